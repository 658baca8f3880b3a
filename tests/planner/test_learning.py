"""Runs of this machine: what they took is kept, and plans learn from it."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_probe import STORED

from lanewise import config
from lanewise.planner import learning
from lanewise.planner.machine import place, probe_path
from lanewise.planner.search import cost_out, fixed


@pytest.fixture
def cache(tmp_path):
    path = probe_path(str(tmp_path))
    path.parent.mkdir()
    path.write_text(json.dumps(STORED))
    return str(tmp_path)


def finished(folder: Path, step_s: float, steps: int = 12) -> Path:
    """A run's folder whose steps took so long each, the first a second more."""
    folder.mkdir()
    times = [100.0] + [101.0 + step_s * n for n in range(steps - 1)]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "time": t}) + "\n" for i, t in enumerate(times, 1))
    )
    return folder


def test_runs_that_take_twice_as_long_double_the_prediction(cache, tmp_path):
    runs = [
        config.load(None, ["model.preset=tiny-dense", f"data.cache={cache}", f"model.layers={n}", "batch.lanes=4"])
        for n in range(1, 12)
    ]
    for n, run in enumerate(runs):
        predicted = cost_out(fixed(run, place(None, 2, run), "1f1b", 1), np.array([0]))[0]
        analytic = predicted.step - predicted.time["correction"]
        row = learning.record(run, 2, finished(tmp_path / f"run{n}", 2 * analytic))
        assert row["measured_s"] == pytest.approx(2 * analytic)
    after = cost_out(fixed(runs[5], place(None, 2, runs[5]), "1f1b", 1), np.array([0]))[0]
    assert after.step == pytest.approx(2 * (after.step - after.time["correction"]), rel=0.1)
    assert after.low < after.step < after.high


def test_a_broken_line_is_passed_over_and_few_runs_say_nothing(cache, tmp_path):
    run = config.load(None, ["model.preset=tiny-dense", f"data.cache={cache}", "batch.lanes=4"])
    learning.record(run, 2, finished(tmp_path / "run", 0.1))
    with learning.runs_path(cache).open("a") as file:
        file.write('{"features": [1, 2')
    assert learning.learned(cache) is None


def test_short_runs_and_unprobed_machines_record_nothing(cache, tmp_path):
    run = config.load(None, ["model.preset=tiny-dense", f"data.cache={cache}"])
    assert learning.record(run, 2, finished(tmp_path / "short", 0.1, steps=4)) is None
    elsewhere = config.load(None, ["model.preset=tiny-dense", f"data.cache={tmp_path / 'none'}", "batch.lanes=4"])
    assert learning.record(elsewhere, 2, finished(tmp_path / "long", 0.1))["predicted_s"] > 0
    assert not learning.runs_path(elsewhere.data.cache).exists()
