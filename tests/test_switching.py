"""A live run changes its layout at a commit: its numbers, its folder, and what is left if a rank dies on the way."""

import json
import math
import os
import signal
from dataclasses import replace
from functools import partial

import pytest

from lanewise import config, trainer
from lanewise.checkpoint.locate import locate
from lanewise.checkpoint.manifest import Manifest
from lanewise.parallel import prove
from lanewise.planner.adaptive import Adviser, Switch
from lanewise.planner.fit import UNIT
from lanewise.planner.machine import probe_path
from system import DEEPSEEK, DENSE, bits, hashes, records, sentences, settings, train, train_with, write_documents

RATE = {"fp32": 5e10, "bf16": 1e11}
SLOW_LINK = {
    "matmul": RATE, "bandwidth": 1e10, "link": 1e9, "latency": 3e-3, "memory": 8e9, "cores": 2, "watts_per_core": 10.0,
    "rates": vars(replace(UNIT, fixed=1e-3)),
}  # fmt: skip
LITTLE, MUCH = 0.0, math.inf  # bytes, as a copy of the state is said to take: MUCH does not fit


class Scripted(Adviser):
    """Chooses by script: after so many steps, these settings of the layout, whose state takes so many bytes."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.taken = 0

    def step(self, seconds, left):
        self.taken, self.known = self.taken + 1, seconds
        if self.taken in self.script:
            update, size = self.script[self.taken]
            layout = self.run.layout.model_copy(update=update)
            self.choice = Switch(self.run.model_copy(update={"layout": layout}), size)


def scripted(script, rank):
    Scripted.script = script
    trainer.Adviser = Scripted


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("text") / "text.jsonl", sentences(30))


def small(folder, source, *overrides):
    common = ["train.steps=7", "batch.lanes=4", "batch.size=2", "eval.every=3", "data.record_samples=true"]
    return settings(folder, source, *common, *overrides)


def test_pipeline_to_replicas_and_back_changes_no_bit(tmp_path, source):
    run = small(tmp_path, source, *DEEPSEEK, "layout.axes=pp2", "data.record_losses=true", "checkpoint.every=2")
    script = {1: ({"axes": "", "zero": 2}, LITTLE), 4: ({"axes": "pp2"}, MUCH)}
    assert train_with(partial(scripted, script), run, tmp_path / "moved", 2) == 0
    assert train(run, tmp_path / "still", 2) == 0
    assert bits(tmp_path / "moved") == bits(tmp_path / "still")
    assert records(tmp_path / "moved", "losses") == records(tmp_path / "still", "losses")
    switched = [e for e in records(tmp_path / "moved", "events") if e["event"] == "switched"]
    assert [(e["step"], e["from"], e["to"], e["how"]) for e in switched] == [
        (2, "pp2", "", "memory"),
        (5, "", "pp2", "a checkpoint"),
    ]
    assert all(e["seconds"] > 0 for e in switched)
    assert [r["step"] for r in records(tmp_path / "moved") if r.get("switch_s", 0) > 0] == [3, 6]


def test_what_is_written_after_a_switch_tells_of_it_and_is_resumed_from(tmp_path, source):
    run = small(tmp_path, source, *DENSE, "layout.axes=tp2", "eval.every=0")
    out = tmp_path / "out"
    script = {2: ({"axes": "fsdp2", "zero": 0}, LITTLE)}
    assert train_with(partial(scripted, script), run, out, 2, until=5) == 0
    meta = Manifest.read(locate(out)).meta
    assert meta["layout"] == {"replicas": 1, "axes": "fsdp2", "zero": 0}
    assert config.parse(meta["run"]).layout.axes == config.load(out / "run.toml").layout.axes == "fsdp2"
    assert train(config.load(out / "run.toml"), out, 2) == 0
    assert train(run, tmp_path / "one", 2) == 0
    for ours, theirs in zip(records(out), records(tmp_path / "one"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=prove.TOLERANCE)
    assert records(out, "samples") == records(tmp_path / "one", "samples")


def killed_in_reshard(script, rank):
    scripted(script, rank)
    if rank == 1:
        from lanewise import switching

        switching.reshard = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def test_who_dies_in_a_switch_leaves_the_folder_as_it_was(tmp_path, source):
    run = small(tmp_path, source, *DENSE, "layout.axes=pp2", "checkpoint.every=2", "checkpoint.background=false")
    out = tmp_path / "out"
    assert train_with(partial(killed_in_reshard, {2: ({"axes": ""}, LITTLE)}), run, out, 2) == 1
    assert config.load(out / "run.toml").layout.axes == "pp2"
    assert Manifest.read(locate(out)).step == 2
    assert "switched" not in [e["event"] for e in records(out, "events")]
    assert train(run, out, 2) == 0
    assert train(run, tmp_path / "still", 2) == 0
    assert hashes(out) == hashes(tmp_path / "still")


def full(script, rank):
    scripted(script, rank)
    from lanewise.checkpoint import store

    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    store.Checkpoints._write = no_space


def test_without_memory_and_disk_the_layout_stays(tmp_path, source):
    run = small(tmp_path, source, *DENSE, "layout.axes=pp2", "train.steps=4")
    train_with(partial(full, {1: ({"axes": ""}, MUCH)}), run, tmp_path / "out", 2)
    events = records(tmp_path / "out", "events")
    assert [e["reason"] for e in events if e["event"] == "not_switched"] == [
        "both layouts do not fit into memory, and no checkpoint could be written"
    ]
    assert [r["step"] for r in records(tmp_path / "out")] == [1, 2, 3, 4]
    assert config.load(tmp_path / "out" / "run.toml").layout.axes == "pp2"


def test_a_run_finds_out_by_itself_what_the_probe_tells(tmp_path, source):
    """By the probe two ranks hardly reach each other: the pipeline, which says little, beats tensor parallel."""
    run = small(tmp_path, source, *DENSE, "layout.axes=tp2", "train.steps=30", "eval.every=0", "layout.adaptive=true")
    path = probe_path(run.data.cache)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(SLOW_LINK))
    out = tmp_path / "out"
    assert train(run, out, 2) == 0
    events = [e for e in records(out, "events") if e["event"] in ("proposed", "switched", "measured")]
    proposed, switched, measured = events[:3]
    assert [e["event"] for e in events[:3]] == ["proposed", "switched", "measured"]
    assert proposed["from"] == switched["from"] == "tp2"
    assert proposed["to"] == switched["to"] == measured["layout"]
    assert (proposed["step"], switched["step"]) == (6, 7), "told in the vote of the step after, then done"
    assert measured["keeps"] == (measured["step_s"] < proposed["step_s"])
    last = [e["to"] for e in events if e["event"] == "switched"][-1]
    assert config.load(out / "run.toml").layout.axes == Manifest.read(locate(out)).meta["layout"]["axes"] == last
    assert [r["step"] for r in records(out)] == list(range(1, 31))
