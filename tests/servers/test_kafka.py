"""A topic sealed into segments, with a real broker."""

import signal
import subprocess
import sys
import time
import uuid

import pytest

from lanewise.data.stores import StoreAway, open_store
from lanewise.data.streams import Sealed, Stream, open_stream
from lanewise.errors import UserError


@pytest.fixture
def topic(broker) -> str:
    name = f"t{uuid.uuid4().hex}"
    broker.create(name, partitions=2)
    return name


@pytest.fixture
def opened(broker, topic, tmp_path):
    streams: list[Stream] = []

    def make(folder="sealed", **options) -> Stream:
        options = {"rows": 10, "group": topic, "timeout": 20, **options}
        streams.append(open_stream(f"kafka://{broker.address}/{topic}", tmp_path / folder, **options))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()


def messages(partition: int, start: int, stop: int) -> list[bytes]:
    return [f"{partition}:{i}".encode() for i in range(start, stop)]


def rows(folder) -> list[str]:
    sealed = Sealed(open_store(folder))
    return [text for i in range(len(sealed.segments)) for text in sealed.table(i)["text"].to_pylist()]


def of(partition: int, found: list[str]) -> list[int]:
    return [int(text.partition(":")[2]) for text in found if text.startswith(f"{partition}:")]


def test_segments_are_cut_by_count(broker, topic, opened, tmp_path):
    broker.send(topic, messages(0, 0, 25))
    broker.send(topic, messages(1, 0, 9), partition=1)
    stream = opened()
    assert stream.poll() == 2
    assert stream.poll() == 0
    broker.send(topic, messages(0, 25, 31))
    broker.send(topic, messages(1, 9, 10), partition=1)
    assert stream.poll() == 2
    found = rows(tmp_path / "sealed")
    assert of(0, found) == list(range(30))
    assert of(1, found) == list(range(10))
    places = sorted((s.part, s.start, s.stop) for s in stream.segments)
    assert places == [("0", 0, 10), ("0", 10, 20), ("0", 20, 30), ("1", 0, 10)]


def test_the_cut_does_not_depend_on_when_one_looks(broker, topic, opened, tmp_path):
    early = opened("early")
    for i in range(0, 40, 8):
        broker.send(topic, messages(0, i, i + 8))
        early.poll()
    opened("late").poll()
    files = [sorted(path.name for path in (tmp_path / folder).glob("*.arrow")) for folder in ("early", "late")]
    assert len(files[0]) == 4
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "early" / name).read_bytes() == (tmp_path / "late" / name).read_bytes()


def test_offsets_are_committed_after_the_checkpoint(broker, topic, opened, tmp_path):
    broker.send(topic, messages(0, 0, 45))
    broker.send(topic, messages(1, 0, 15), partition=1)
    stream = opened()
    stream.poll()
    assert all(offset < 0 for offset in broker.committed(topic, topic, 2)), "sealed, and in no checkpoint"
    stream.commit(1)
    first = stream.segments[0]
    assert broker.committed(topic, topic, 2)[int(first.part)] == first.stop
    stream.commit(len(stream.segments))
    assert broker.committed(topic, topic, 2) == [40, 10]
    stream.commit(1)  # a run went on from an older checkpoint
    assert broker.committed(topic, topic, 2) == [40, 10]
    broker.send(topic, messages(0, 45, 50))
    other = opened("empty folder")
    other.poll()
    assert of(0, rows(tmp_path / "empty folder")) == list(range(40, 50)), "begins at what is committed"


CONSUMER = """
import sys, time
from lanewise.data.streams import open_stream
from lanewise.data.stores.local import LocalStore
url, folder, group, dies = sys.argv[1:5]
plain = LocalStore.write
def write(self, name, data):
    plain(self, name, data)
    if name == dies:
        print("here", flush=True)
        time.sleep(60)
LocalStore.write = write
stream = open_stream(url, folder, rows=10, group=group)
stream.poll()
print("sealed", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("dies", ["segment-00000001.arrow", "stream.json", "never"])
def test_killed_between_seal_and_commit(broker, topic, opened, tmp_path, dies):
    """After a segment's file, after the list, after all: what was listed keeps its bits, nothing is lost or twice."""
    broker.send(topic, messages(0, 0, 30))
    words = [f"kafka://{broker.address}/{topic}", str(tmp_path / "sealed"), topic, dies]
    child = subprocess.Popen([sys.executable, "-c", CONSUMER, *words], stdout=subprocess.PIPE)
    assert child.stdout.readline() in (b"here\n", b"sealed\n")
    child.send_signal(signal.SIGKILL)
    child.communicate()
    before = {path.name: path.read_bytes() for path in (tmp_path / "sealed").glob("*.arrow")}
    assert len(before) >= 2
    assert all(offset < 0 for offset in broker.committed(topic, topic, 2))
    broker.send(topic, messages(0, 30, 40))
    stream = opened()
    stream.poll()
    assert of(0, rows(tmp_path / "sealed")) == list(range(40))
    assert all((tmp_path / "sealed" / name).read_bytes() == content for name, content in before.items())


def test_broker_cut_for_five_seconds_loses_nothing(broker, topic, opened, tmp_path):
    broker.send(topic, [b"0:%d" % i + b" " * 2000 for i in range(3000)])
    stream = opened(rows=100)
    with broker.proxy.away(5, after=1 << 20) as cut:
        begun = time.monotonic()
        while len(stream.segments) < 30 and time.monotonic() < begun + 30:
            stream.poll()
        assert cut.is_set()
    assert time.monotonic() - begun > 4
    assert of(0, rows(tmp_path / "sealed")) == list(range(3000))
    stream.commit(30)
    assert broker.committed(topic, topic)[0] == 3000


def test_a_broker_that_stays_away_is_named(broker, topic, opened):
    broker.send(topic, messages(0, 0, 10))
    stream = opened(timeout=2)
    stream.poll()
    with broker.proxy.away(5) as cut:
        cut.wait()
        begun = time.monotonic()
        with pytest.raises(StoreAway, match=rf"kafka://{broker.address}/{topic}: no answer in 2 s"):
            stream.poll()
        assert time.monotonic() - begun < 10
    broker.send(topic, messages(0, 10, 20))
    assert stream.poll() == 1, "and goes on when it is back"


def test_an_error_while_sealing_loses_nothing(broker, topic, opened, tmp_path, monkeypatch):
    broker.send(topic, messages(0, 0, 35))
    broker.send(topic, messages(1, 0, 35), partition=1)
    stream = opened()
    plain, calls = stream.sealed.append, []

    def failing(*words):
        calls.append(words)
        if len(calls) == 3:
            raise OSError("disk full")
        plain(*words)

    monkeypatch.setattr(stream.sealed, "append", failing)
    with pytest.raises(OSError, match="disk full"):
        stream.poll()
    assert stream.poll() == 4
    found = rows(tmp_path / "sealed")
    assert (of(0, found), of(1, found)) == (list(range(30)), list(range(30)))


def test_messages_without_content_and_bad_bytes(broker, topic, opened, tmp_path):
    broker.send(topic, [b"", None, b"0:2", *messages(0, 3, 9), b"\xff"])
    with pytest.raises(UserError, match=rf"kafka topic {topic}, message 9 of 0: not UTF-8 at byte 0"):
        opened().poll()
    opened("skipping", errors="skip").poll()
    assert rows(tmp_path / "skipping") == ["", "", *(f"0:{i}" for i in range(2, 9))]


def test_what_the_broker_no_longer_has(broker, topic, opened, monkeypatch):
    broker.send(topic, messages(0, 0, 10))
    opened().poll()
    again = opened()
    consumer = again.source.consumer

    class Forgetful:  # this broker cannot drop messages
        def get_watermark_offsets(self, place, timeout):
            return 15, 20

        def __getattr__(self, name):
            return getattr(consumer, name)

    monkeypatch.setattr(again.source, "consumer", Forgetful())
    with pytest.raises(UserError, match="messages 10 to 14 of partition 0 are gone"):
        again.poll()


def test_a_topic_made_anew_is_another(broker, topic, opened):
    broker.send(topic, messages(0, 0, 10))
    opened().poll()
    broker.delete(topic)
    broker.create(topic, partitions=2)
    with pytest.raises(UserError, match="deleted and made again"):
        opened().poll()
    with pytest.raises(UserError, match="check the address, the topic"):
        open_stream(f"kafka://{broker.address}/nothing", opened("x").sealed.store.folder, timeout=3).poll()
