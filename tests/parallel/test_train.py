"""`train` in layouts: the same bits under a pipeline, and on from one layout into another (C2)."""

import pytest

from lanewise.parallel.layout import Layout
from system import DEEPSEEK, hashes, records, sentences, settings, train, write_documents


def test_a_run_goes_through_layouts(tmp_path):
    source = write_documents(tmp_path / "text.jsonl", sentences(30))

    def run(axes):
        overrides = ["batch.lanes=4", "batch.size=2", "train.steps=4", "eval.every=2", "optimizer.eps=1e-4"]
        return settings(tmp_path, source, *DEEPSEEK, *overrides, f"layout.axes='{axes}'")

    def go(axes, name, replicas=1, **options):
        workers = replicas * Layout.parse(axes).size
        assert train(run(axes), tmp_path / name, workers, **options) == 0

    go("", "one")
    go("pp2", "stages", replicas=2)
    assert hashes(tmp_path / "stages") == hashes(tmp_path / "one")
    assert [r["loss"] for r in records(tmp_path / "stages")] == [r["loss"] for r in records(tmp_path / "one")]

    go("cp2.tp2", "mixed", until=1)
    go("ep2", "mixed", replicas=2, until=2)
    go("pp2", "mixed", until=3)
    go("", "mixed", replicas=3)
    for mixed, one in zip(records(tmp_path / "mixed"), records(tmp_path / "one"), strict=True):
        assert mixed["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert mixed["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    last = [[e["loss"] for e in records(tmp_path / name, "events") if "loss" in e][-1] for name in ("mixed", "one")]
    assert last[0] == pytest.approx(last[1], rel=1e-5)
