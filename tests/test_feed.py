"""The data engine in whole runs: the same bits on any number of workers, over restarts and weight changes."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from faulty_worker import at, terminated
from lanewise.data.shard_build import build_shards
from system import DENSE, bits, records, sentences, settings, train, train_with, write_documents

MIX = "data.mix=[{source='%s', weight=0.7, name='a'}, {source='%s', weight=0.2, name='b'}, {source='%s', weight=0.1}]"
FEED = [
    *DENSE,
    "data.pack=best-fit",
    "data.record_samples=true",
    "data.record_losses=true",
    "data.shuffle_block=2",
    "data.shuffle_blocks=3",
    "data.held_out=0",
    "batch.lanes=8",
    "train.steps=4",
]
TRANSFORM = "data.transform=transforms_of_tests:reverse_some"


@pytest.fixture
def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of a run over two texts and a shard set, packed; TRANSFORM may be put on top."""
    (tmp_path / "transforms_of_tests.py").write_text(
        "def reverse_some(tokens, labels, key):\n"
        "    return (tokens[:, ::-1].copy(), labels) if key % 3 == 0 else (tokens, labels)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    a = write_documents(tmp_path / "a.jsonl", sentences(60, seed=1))
    b = write_documents(tmp_path / "b.jsonl", sentences(24, seed=2))
    write_documents(tmp_path / "c.jsonl", sentences(9, seed=3))
    first = settings(tmp_path, a, *DENSE, "data.held_out=0")
    build_shards([str(tmp_path / "c.jsonl")], first.data, str(tmp_path / "set"), 1, lambda text: None)

    def make(*overrides: str, mix: str = MIX % (a, b, tmp_path / "set")) -> Any:
        return settings(tmp_path, a, *FEED, mix, *overrides)

    return make


def test_mixing_packing_and_shuffling_on_any_number_of_workers(tmp_path: Path, mixture: Any) -> None:
    assert train(mixture(), tmp_path / "alone") == 0
    alone, losses = bits(tmp_path / "alone"), records(tmp_path / "alone", "losses")
    samples = [s for slot in alone["samples"] for s in slot["samples"]]
    assert {s.split(":")[0] for s in samples} == {"a", "b", "set"}
    assert len(set(samples)) == len(samples)
    assert [{k: v for k, v in line.items() if k != "loss"} for line in losses] == alone["samples"]
    by_step = [sum(line["loss"] for line in losses if line["step"] == step) for step in range(1, 5)]
    for metrics, total in zip(alone["metrics"], by_step, strict=True):
        assert metrics["loss"] * metrics["tokens"] == pytest.approx(total, rel=1e-9)
        assert metrics["padding"] > 0
    for workers, ahead in ((5, "0"), (8, "64")):
        out = tmp_path / f"{workers}"
        assert train(mixture(f"data.credit_mb={ahead}"), out, workers) == 0
        assert bits(out) == alone
        assert records(out, "losses") == losses


def test_D7_weights_change_on_resume(tmp_path: Path, mixture: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Every sample once an epoch; the run restarted twice after the change is the run that was not. Data that changed
    are refused by name."""
    assert train(mixture(), tmp_path / "out", until=1) == 0
    other = mixture().data.mix
    mix = (
        "data.mix=["
        + ", ".join(
            f"{{source='{part.source}', name='{part.name}', weight={weight}}}"
            for part, weight in zip(other, (0.2, 0.5, 0.3), strict=True)
        )
        + "]"
    )
    shutil.copytree(tmp_path / "out", tmp_path / "again")
    assert train(mixture(mix=mix), tmp_path / "out") == 0
    whole = bits(tmp_path / "out")
    for until, workers in ((2, 1), (3, 3), (None, 1)):
        assert train(mixture(mix=mix), tmp_path / "again", workers, until=until) == 0
    assert bits(tmp_path / "again") == whole
    samples = [s for slot in whole["samples"] for s in slot["samples"]]
    assert len(set(samples)) == len(samples)
    second = [s.split(":")[0] for slot in whole["samples"] if slot["step"] > 1 for s in slot["samples"]]
    assert abs(second.count("b") - 12) <= 1
    write_documents(tmp_path / "b.jsonl", sentences(13, seed=2))
    assert train(mixture(mix=mix), tmp_path / "out") == 2
    assert "b: the training tokens changed" in capfd.readouterr().err


def test_H5_sigterm_with_data_processes_at_work(tmp_path: Path, mixture: Any) -> None:
    run = mixture(TRANSFORM, "train.steps=3")
    assert train_with(at(0, 2, "forward", terminated), run, tmp_path / "out", 2) == 75
    assert [line["step"] for line in records(tmp_path / "out")] == [1, 2]
    assert train(run, tmp_path / "out", 1) == 0
    assert train(run, tmp_path / "whole", 1) == 0
    assert bits(tmp_path / "out") == bits(tmp_path / "whole")
    line = records(tmp_path / "whole")[-1]
    assert {"data_wait_s", "data_read_s", "data_preprocess_s", "data_wait_share"} <= set(line)
