"""The fit of this machine's rates, from made-up measurements; and a plan from stored ones."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest

from lanewise import config
from lanewise.cli.main import main
from lanewise.errors import UserError
from lanewise.lanes import wire
from lanewise.parallel.layout import Layout, check
from lanewise.planner import fit, machine, probe, resident, steps
from lanewise.planner.auto import settle
from lanewise.planner.cluster import Cluster
from lanewise.planner.hardware import Device
from lanewise.planner.machine import probe_path
from lanewise.planner.traffic import traffic

RATE = {"fp32": 5e10, "bf16": 1e11}
DEVICE = Device("test", RATE, RATE, 1e12, 1e10, 1e9, 1, 1e9, 10.0)
CLUSTER = Cluster(DEVICE, 1, 1, 1e9, 1e9)
STORED = {
    "matmul": RATE, "bandwidth": 1e10, "link": 1e9, "latency": 1e-4, "memory": 8e9, "cores": 2, "watts_per_core": 10.0,
    "rates": vars(replace(fit.UNIT, fixed=1e-3, costs=dict.fromkeys(fit.FREE, (1e-9, 1e-4)))),
}  # fmt: skip
TINY = [
    "model.preset=tiny-dense", "model.vocab_size=300", "model.layers=1", "model.hidden=64", "batch.size=1",
    "batch.lanes=2", "batch.sequence_length=16",
]  # fmt: skip


def test_rates_that_made_the_times_are_found():
    truth = replace(fit.UNIT, products=0.7, attention=0.4, pointwise=0.5, head=0.6, issue=2e-4, fixed=1e-3, rows=2e5)
    runs = [probe.dense(shape) for shape in probe.DENSE] + [probe.routed(shape) for shape in probe.ROUTED]
    measured = [fit.predict(run, CLUSTER, truth) for run in runs]
    fitted = fit.fit_alone(runs, measured, CLUSTER, {"fp32": 2e10})
    for other in (probe.dense((3, 320, 960, 4, 192, 1)), probe.routed((3, 320, 128, 2, 192, 2, 12))):
        ours, theirs = (fit.predict(other, CLUSTER, rates) for rates in (fitted, truth))
        assert ours == pytest.approx(theirs, rel=0.05)


def test_costs_of_traffic_that_made_the_times_are_found():
    axes = ("tensor", "context", "expert", "sharded", "copies", "stages")
    costs = {axis: (2e-9 + 1e-9 * i, 4e-4 + 1e-4 * i) for i, axis in enumerate(axes)}
    two = Cluster(DEVICE, 1, 2, 1e9, 1e9)
    truth = replace(fit.UNIT, fixed=1e-3, costs=costs)
    measured = [fit.predict(run, two, truth) for run in probe.spread()]
    fitted = replace(truth, costs=fit.fit_traffic(probe.spread(), measured, two, replace(truth, costs=None)))
    for axes_ in probe.AXES:
        other = probe.dense((3, 320, 960, 4, 192, 4), axes_)
        assert fit.predict(other, two, fitted) == pytest.approx(fit.predict(other, two, truth), rel=0.03)
        assert fit.predict(other, two, truth) > 1.05 * fit.predict(other, two, replace(truth, costs=fit.FREE))


def test_a_hindered_step_counts_as_if_it_were_not(monkeypatch):
    """Half the time the machine is twice as slow, for the step and for the product beside it."""
    now = {"calls": 0}

    def slow() -> float:
        return 2.0 if (now["calls"] // 40) % 2 else 1.0

    def timed(step, world):
        now["calls"] += 1
        return 0.1 * slow()

    monkeypatch.setattr(steps, "Step", lambda run, world: lambda: None)
    monkeypatch.setattr(steps, "_timed", timed)
    monkeypatch.setattr(steps, "Pace", lambda device: lambda: 0.002 * slow())
    (took,) = steps.step_seconds([probe.dense(probe.DENSE[0])], steps.alone(), rounds=200)
    assert took == pytest.approx(0.1, rel=0.05)


def test_a_larger_model_holds_more(tmp_path):
    """40 MB of weights, gradients and moments, beyond a model of next to nothing."""
    small, large = (config.load(None, [*TINY, f"model.vocab_size={size}"]) for size in (300, 20300))
    low, high = resident.peaks([small, large])
    assert high - low > 2 * 20000 * 64 * 4 * 4 * 0.9


def test_nodes_that_were_probed_together_are_a_cluster():
    between = {"link": 2e8, "latency": 1e-3, "per_node": 2, "nodes": 3}
    one, rates = machine.local(STORED, 2)
    assert (one.nodes, one.per_node, rates.costs) == (1, 2, STORED["rates"]["costs"])
    six, rates = machine.local(STORED | {"between": between}, 6)
    assert (six.nodes, six.per_node, six.inter, six.latency[1]) == (3, 2, 2e8, 1e-3)
    assert rates.costs is None, "what was measured within a node does not hold between nodes"


def test_plan_uses_the_stored_measurements(tmp_path, capsys):
    path = probe_path(str(tmp_path))
    path.parent.mkdir()
    path.write_text(json.dumps(STORED))
    words = ["model.preset=tiny-dense", f"data.cache={tmp_path}"]
    assert main(["plan", *words, "--workers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"][0]["replicas"] * found["fit"] >= 1
    assert not found["plans"][0]["extrapolates"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"matmul": {}}', "\x00"])
def test_a_broken_probe_is_named(tmp_path, text, capsys):
    path = probe_path(str(tmp_path))
    path.parent.mkdir()
    path.write_text(text)
    assert main(["plan", "model.preset=tiny-dense", f"data.cache={tmp_path}", "--workers", "2"]) == 2
    assert "run `lanewise probe` again" in capsys.readouterr().err


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


def test_traffic_is_what_a_step_sends():
    """Bytes that leave a rank in a step, and messages; those that carry a few numbers are counted, roughly."""
    runs = [probe.dense((2, 64, 128, 2, 64, 2), axes) for axes in ("", "tp2", "cp2", "fsdp2")]
    runs += [probe.routed((2, 64, 64, 2, 64, 2, 4), axes) for axes in ("tp2", "ep2")]
    (took,), counted = steps.on_two(runs[1:2], partial(_sent, runs))
    assert 0 < took < 5, "seconds of a step of two processes"
    for run, (sent, messages) in zip(runs, counted["each"], strict=True):
        space = fit.space_of(run, Cluster(DEVICE, 1, 2, 1e9, 1e9), replace(fit.UNIT, costs=fit.FREE))
        said = traffic(space.model, space.choice, run.batch.sequence_length, 4.0).values()
        if run.layout.axes != "tp2" or run.model.family == "dense":  # latents are summed over tp, too
            assert sum(float(part.sent[0]) for part in said) == pytest.approx(sent, rel=0.15), run.layout.axes
        assert sum(float(part.calls[0]) for part in said) == pytest.approx(messages, rel=0.35), run.layout.axes


def _sent(runs, world):
    """[bytes, messages] that leave this rank in a step of each run."""
    plain, found = wire.exchange, []

    def counting(sends, receives, group):
        found[-1] += [m.tensor.numel() * m.tensor.element_size() for m in sends]
        return plain(sends, receives, group)

    for module in [m for name, m in sys.modules.items() if name.startswith("lanewise.")]:
        if getattr(module, "exchange", None) is plain:
            module.exchange = counting
    for run in runs:
        found.append([])
        step = steps.Step(run, world)
        step()
        found[-1].clear()
        step()
    return {"each": [[sum(sizes), len(sizes)] for sizes in found]}
