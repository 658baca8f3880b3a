"""A Kafka topic (or what speaks its protocol), by confluent-kafka.

Partitions are assigned here, not by the group: the group only keeps the offsets of what is in a checkpoint. A topic's
segments hold `rows` messages each, counted from the place where the last one ended; how messages of several
partitions are interleaved is decided once, when they are sealed.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from lanewise.data.stores.extras import needs
from lanewise.data.stores.retry import StoreAway, brief, patiently
from lanewise.data.streams.stream import Batch, Source
from lanewise.errors import UserError

T = TypeVar("T")
QUIET = 0.6  # seconds without a message after which what was there has come
AT_ONCE = 1000  # messages asked for together
MOST = 100  # segments before the list is written, about
CALL = 5.0  # seconds for one question to the broker


class Kafka(Source):
    def __init__(self, url: str, group: str, rows: int, timeout: float):
        self.module = needs("confluent_kafka", "kafka", url)
        from confluent_kafka.admin import AdminClient

        brokers, _, self.topic = url.removeprefix("kafka://").partition("/")
        if not brokers or not self.topic or "/" in self.topic:
            raise UserError(f"{url}: names no topic of a broker; write kafka://host:port/topic")
        self.where, self.identity = url, f"kafka topic {self.topic}"
        self.rows, self.timeout = rows, timeout
        self.trouble = "no answer"
        common: dict[str, Any] = {"bootstrap.servers": brokers, "log_level": 0, "error_cb": self._note}
        self.admin = AdminClient(common)
        self.consumer = self.module.Consumer(
            {
                **common,
                "group.id": group,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",  # a place that is gone must be said, never skipped
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
            }
        )
        self.held: dict[int, list[Any]] = {}  # messages of each partition that do not fill a segment yet
        self.at_end: set[int] = set()
        self.busy = False

    def take(self, places: dict[str, int], marks: dict[str, Any]) -> Iterator[Batch]:
        if self.busy:  # the last time ended in an error: what was read then and not sealed is read again
            self.consumer.unassign()
            self.held.clear()
            self.at_end.clear()
        self.busy = True
        self._assign(places, marks)
        heard, taken = time.monotonic(), 0
        while taken < MOST:
            messages = self.consumer.consume(AT_ONCE, timeout=QUIET)
            if not messages and len(self.at_end) == len(self.held):
                break
            if time.monotonic() > heard + self.timeout:
                raise self._away()
            for message in messages:
                if message.error() is not None:
                    self._heed(message)
                    continue
                heard = time.monotonic()
                partition = message.partition()
                self.at_end.discard(partition)
                held = self.held[partition]
                held.append(message)
                if len(held) == self.rows:
                    self.held[partition] = []
                    taken += 1
                    offsets = [m.offset() for m in held]
                    start = places.get(str(partition), offsets[0])
                    places[str(partition)] = offsets[-1] + 1
                    yield Batch(str(partition), start, offsets[-1] + 1, [m.value() or b"" for m in held], offsets)
        self.busy = False

    def commit(self, places: dict[str, int]) -> None:
        offsets = [self._place(int(part), offset) for part, offset in places.items()]
        self._ask(lambda: self.consumer.commit(offsets=offsets, asynchronous=False))

    def close(self) -> None:
        self.consumer.close()

    # ---------------------------------------------------------------------------------------------------------------

    def _assign(self, places: dict[str, int], marks: dict[str, Any]) -> None:
        """All partitions the topic has now, each from its place: after what is sealed, or else what is committed."""
        partitions, identity = self._ask(self._describe)
        if marks.setdefault("topic_id", identity) != identity:
            raise UserError(
                f"{self.where}: the topic was deleted and made again since it was first sealed here, its offsets mean "
                f"other messages; choose an empty folder"
            )
        new = sorted(partitions - self.held.keys())
        if not new:
            return
        committed = self._ask(lambda: self.consumer.committed([self._place(p) for p in new], timeout=CALL))
        assigned = []
        for place in committed:
            first, _ = self._ask(partial(self.consumer.get_watermark_offsets, place, timeout=CALL))
            want = places.get(str(place.partition), place.offset if place.offset >= 0 else first)
            if want < first:
                raise UserError(
                    f"{self.where}: messages {want} to {first - 1} of partition {place.partition} are gone from the "
                    f"broker and were never sealed; choose an empty folder and another group to go on without them, "
                    f"and let the topic keep messages longer"
                )
            assigned.append(self._place(place.partition, want))
            self.held[place.partition] = []
        self.consumer.incremental_assign(assigned)

    def _describe(self) -> tuple[set[int], str]:
        future = self.admin.describe_topics(self.module.TopicCollection([self.topic]), request_timeout=CALL)[self.topic]
        found = future.result()
        return {partition.id for partition in found.partitions}, str(found.topic_id)

    def _heed(self, message: Any) -> None:
        """What comes instead of a message: the end for now, or a fault. Passing ones the library mends itself."""
        error = message.error()
        if error.code() == self.module.KafkaError._PARTITION_EOF:
            self.at_end.add(message.partition())
        elif error.code() in (self.module.KafkaError._AUTO_OFFSET_RESET, self.module.KafkaError.OFFSET_OUT_OF_RANGE):
            raise UserError(
                f"{self.where}: partition {message.partition()} no longer has the next message ({error.str()}); choose "
                f"an empty folder and another group to go on without what is gone"
            )
        else:
            self._note(error)

    def _ask(self, do: Callable[[], T]) -> T:
        try:
            return patiently(do, self._transient, self.timeout, self.where)
        except self.module.KafkaException as e:
            raise UserError(f"{self.where}: {e.args[0].str()}; check the address, the topic and your rights") from None

    def _transient(self, error: Exception) -> bool:
        if not isinstance(error, self.module.KafkaException):
            return False
        kafka = error.args[0]
        if kafka.code() == self.module.KafkaError.UNKNOWN_TOPIC_OR_PART:
            return False  # the library would hope for ever
        names = ("_TRANSPORT", "_TIMED_OUT", "_ALL_BROKERS_DOWN", "_UNKNOWN_PARTITION", "_WAIT_COORD", "_DESTROY")
        return kafka.retriable() or kafka.name() in (*names, "COORDINATOR_NOT_AVAILABLE", "LEADER_NOT_AVAILABLE")

    def _away(self) -> StoreAway:
        return StoreAway(
            f"{self.where}: no answer in {self.timeout:g} s ({self.trouble}); check its address and that it is up, "
            f"or raise data.store_timeout"
        )

    def _note(self, error: Any) -> None:
        self.trouble = brief(RuntimeError(error.str())).partition(": ")[2]

    def _place(self, partition: int, *offset: int) -> Any:
        return self.module.TopicPartition(self.topic, partition, *offset)
