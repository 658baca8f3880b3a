"""Training on a topic of a real broker."""

import shutil
import uuid
from itertools import pairwise
from pathlib import Path

import pytest

from faulty_worker import at, killed
from lanewise.data.stores import open_store
from lanewise.data.streams import Sealed
from servers.kafka import Broker
from system import DENSE, bits, records, sentences, settings, train, train_with

LIVE = [*DENSE, "train.steps=8", "batch.lanes=4", "checkpoint.every=2", "data.stream_rows=10", "data.pack=document"]


@pytest.fixture
def topic(broker: Broker) -> str:
    name = f"t{uuid.uuid4().hex}"
    broker.create(name, partitions=2)
    return name


def test_a_run_killed_between_checkpoints_reads_the_same_again(broker: Broker, topic: str, tmp_path: Path) -> None:
    texts = [text.encode() for text in sentences(60)]
    broker.send(topic, texts[:10])
    broker.send(topic, texts[10:20], partition=1)
    source = Path(f"kafka://{broker.address}/{topic}")
    words = [*LIVE, f"name={topic}", "data.store_timeout=20", f"data.source=kafka://{broker.address}/{topic}"]
    run = settings(tmp_path, source, *words, "data.record_samples=true")
    out = tmp_path / "out"
    assert train_with(at(0, 4, "forward", killed), run, out, 2) == 1
    assert [line["step"] for line in records(out)] == [1, 2, 3]
    first = {path.name: path.read_bytes() for path in (out / "stream").glob("*.arrow")}
    assert len(first) == 2
    broker.send(topic, texts[20:40])
    broker.send(topic, texts[40:], partition=1)
    with broker.proxy.away(1):
        assert train(run, out, 2) == 0

    sealed = Sealed(open_store(out / "stream"))
    assert all((out / "stream" / name).read_bytes() == content for name, content in first.items())
    places = {part: [(s.start, s.stop) for s in sealed.segments if s.part == part] for part in "01"}
    assert places == {part: list(pairwise([0, 10, 20, 30])) for part in "01"}, "nothing twice, nothing left out"
    samples = [s for slot in records(out, "samples") for s in slot["samples"]]
    ids = [f"s{n}:{row}" for n, segment in enumerate(sealed.segments) for row in range(segment.rows)]
    assert samples == ids[: 8 * 4]

    assert sealed.state is not None
    done = sealed.state.committed
    assert sealed.firsts[done] <= 8 * 4 < sealed.firsts[done + 1], "what the last checkpoint read to its end"
    expected = {s.part: s.stop for s in sealed.segments[:done]}
    committed = [max(0, offset) for offset in broker.committed(f"lanewise.{topic}", topic, 2)]
    assert done > 0
    assert committed == [expected.get(part, 0) for part in "01"]

    (tmp_path / "whole").mkdir()
    shutil.copytree(out / "stream", tmp_path / "whole/stream")
    assert train(run, tmp_path / "whole") == 0
    assert bits(out) == bits(tmp_path / "whole")


def test_a_broker_that_is_gone_is_named(
    broker: Broker, topic: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """But only when data run out: what was sealed is trained on first."""
    broker.send(topic, [text.encode() for text in sentences(10)])
    source = f"kafka://{broker.address}/{topic}"
    run = settings(tmp_path, Path(source), *LIVE, f"data.source={source}", f"name={topic}", "data.store_timeout=2")
    assert train(run, tmp_path / "out", until=1) == 0
    broker.proxy.cut()
    try:
        assert train(run, tmp_path / "out") == 2
    finally:
        broker.proxy.mend()
    assert 1 < len(records(tmp_path / "out")) < 8
    assert f"{source}: no answer in 2 s" in capfd.readouterr().err
