"""The fit of this machine's rates, from made-up measurements; and a plan from stored ones."""

import json
from dataclasses import replace

import pytest

from lanewise import config
from lanewise.cli.main import main
from lanewise.errors import UserError
from lanewise.parallel.layout import Layout, check
from lanewise.planner import probe
from lanewise.planner.auto import settle
from lanewise.planner.cluster import Cluster
from lanewise.planner.hardware import Device
from lanewise.planner.machine import probe_path

RATE = {"fp32": 5e10, "bf16": 1e11}
DEVICE = Device("test", RATE, RATE, 1e12, 1e10, 1e9, 1, 1e9, 10.0)
CLUSTER = Cluster(DEVICE, 1, 1, 1e9, 1e9)
STORED = {
    "matmul": RATE, "bandwidth": 1e10, "link": 1e9, "latency": 1e-4, "memory": 8e9, "cores": 2, "watts_per_core": 10.0,
    "rates": vars(replace(probe.UNIT, fixed=1e-3)),
}  # fmt: skip


def test_rates_that_made_the_times_are_found():
    truth = replace(probe.UNIT, products=0.7, attention=0.4, pointwise=0.5, head=0.6, issue=2e-4, fixed=1e-3, rows=2e5)
    runs = [probe.small_run(shape) for shape in probe.SHAPES]
    measured = [probe.predict_alone(run, CLUSTER, truth) for run in runs]
    fitted = probe.fit_rates(runs, measured, CLUSTER)
    other = probe.small_run(("tiny-dense", 3, 320, 960, 4, 192))
    ours, theirs = (probe.predict_alone(other, CLUSTER, rates) for rates in (fitted, truth))
    assert ours == pytest.approx(theirs, rel=0.05)


def test_plan_uses_the_stored_measurements(tmp_path, capsys):
    path = probe_path(str(tmp_path))
    path.parent.mkdir()
    path.write_text(json.dumps(STORED))
    words = ["model.preset=tiny-dense", f"data.cache={tmp_path}"]
    assert main(["plan", *words, "--workers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"][0]["replicas"] * found["fit"] >= 1
    assert not found["plans"][0]["extrapolates"]


def test_auto_keeps_the_batch(tmp_path):
    path = probe_path(str(tmp_path))
    path.parent.mkdir()
    path.write_text(json.dumps(STORED))
    run = config.load(None, ["model.preset=tiny-dense", f"data.cache={tmp_path}", "layout.axes=auto", "batch.lanes=4"])
    settled, why = settle(run, 4)
    assert settled.batch == run.batch
    check(Layout.parse(settled.layout.axes), settled, 4)
    assert why[0].startswith(f"planned: {settled.layout.axes or 'one rank'}")
    odd = ["model.layers=1", "batch.lanes=3", "batch.sequence_length=251"]
    with pytest.raises(UserError, match="no layout divides 4 devices"):
        settle(config.load(None, ["model.preset=tiny-dense", f"data.cache={tmp_path}", *odd]), 4)


def test_a_run_that_goes_on_keeps_its_layout_unless_it_is_adaptive(tmp_path):
    """Without any probe, too: a usual machine's numbers stand in, and the plan says so."""
    run = config.load(None, ["model.preset=tiny-dense", f"data.cache={tmp_path}", "layout.axes=auto", "batch.lanes=4"])
    best, why = settle(run, 2)
    assert "not measured" in why[-1]
    other = next(axes for axes in ("tp2", "pp2", "") if Layout.parse(axes) != Layout.parse(best.layout.axes))
    before = best.model_copy(update={"layout": best.layout.model_copy(update={"axes": other})})
    again, why = settle(run, 2, before)
    assert again.layout.axes == other
    assert why[0].startswith("as before")
    assert "layout.adaptive=true takes it" in why[1]
    adaptive = run.model_copy(update={"layout": run.layout.model_copy(update={"adaptive": True})})
    moved, why = settle(adaptive, 2, before)
    assert moved.layout.axes == best.layout.axes
    assert "slower" in why[1]
    assert "any layout reads the checkpoint" in why[1]
    alone, why = settle(run, 1, best.model_copy(update={"layout": best.layout.model_copy(update={"axes": "tp2"})}))
    assert alone.layout.axes == ""
    assert "cannot be on 1 workers" in why[1]
