"""Faults of norms, skips and precision (rows P)."""

import math
from pathlib import Path

import pytest
import torch

from faulty_worker import poison
from lanewise import config
from lanewise.models.build import build
from lanewise.parallel.mesh import Mesh
from lanewise.replica import Replica
from reference import assert_same_gradients, gradients_of, reference
from system import (
    BASE,
    DEEPSEEK,
    DENSE,
    bits,
    records,
    sentences,
    settings,
    tensors,
    train,
    train_with,
    write_documents,
)

TEXTS = [f"sample {'abcde'[i] * (5 * i + 1)}" for i in range(5)]


@pytest.mark.parametrize(("workers", "zero"), [(1, 1), (3, 0), (3, 1), (5, 2)])
def test_P1_one_norm_over_all_parameters(tmp_path: Path, workers: int, zero: int) -> None:
    """Experts and router included; clipping scales every gradient by the same factor."""
    source = write_documents(tmp_path / "text.jsonl", TEXTS)
    clip = 0.25
    overrides = [*DEEPSEEK, "data.pack=document", "data.shuffle=false", "data.held_out=0", "batch.lanes=5"]
    run = settings(tmp_path, source, *overrides, "train.steps=1", f"layout.zero={zero}", f"optimizer.clip={clip}")
    assert train(run, tmp_path / "out", workers) == 0
    right = reference(run, TEXTS)
    norms = [g.norm().item() for g in right.gradients.values()]
    assert records(tmp_path / "out")[0]["grad_norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)
    assert right.norm > 2 * clip
    assert_same_gradients(
        gradients_of(run, tmp_path / "out"), {n: g * (clip / right.norm) for n, g in right.gradients.items()}
    )


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_P3_a_gradient_that_is_not_finite_voids_the_step_on_every_replica(tmp_path: Path, factor: float) -> None:
    """Lane 5 of step 3 is spoilt: that step changes nothing, counts as skipped, and the schedule waits."""
    source = write_documents(tmp_path / "text.jsonl", sentences(30))
    overrides = [*DEEPSEEK, "schedule.kind=constant", "schedule.warmup=4", "optimizer.lr=0.01", "checkpoint.every=1"]
    run = settings(tmp_path, source, *overrides, "checkpoint.keep=9", "train.steps=5")
    outs = {}
    for workers, zero in [(1, 1), (2, 0), (3, 2)]:
        outs[workers] = out = tmp_path / f"{workers}"
        spoilt = settings(tmp_path, source, *overrides, "checkpoint.keep=9", "train.steps=5", f"layout.zero={zero}")
        assert train_with(poison({(3, 5)}, factor), spoilt, out, workers) == 0
    assert bits(outs[1]) == bits(outs[2]) == bits(outs[3])

    lines = records(outs[3])
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0, 0]
    assert lines[-1]["skipped_total"] == 1
    assert lines[2]["grad_norm"] is None
    assert [line["lr"] for line in lines] == pytest.approx([0.0025, 0.005, 0.0075, 0.0075, 0.01])
    [alarm] = [e for e in records(outs[3], "events") if e.get("alarm")]
    assert (alarm["event"], alarm["step"], alarm["in_row"]) == ("step_skipped", 3, 1)

    before, after = (outs[3] / "checkpoints" / f"step-0000000{step}" for step in (2, 3))
    for kind in ("model/", "exp_avg/", "exp_avg_sq/", "buffer/"):
        stored = tensors(before, kind), tensors(after, kind)
        assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0]), kind
    assert train(run, tmp_path / "clean", until=2) == 0
    clean = bits(tmp_path / "clean")
    assert clean["metrics"] == bits(outs[1])["metrics"][:2], "the steps before it are those of a run without the fault"


def test_P4_a_run_that_only_skips_says_so_and_stops(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "text.jsonl", sentences(30))
    run = settings(tmp_path, source, *DENSE, "train.precision=bf16", "train.max_skips=3", "train.steps=9")
    every_step = poison({(step, 1) for step in range(1, 10)}, float("nan"))
    log = tmp_path / "log"
    assert train_with(every_step, run, tmp_path / "out", 2, log=log) == 1
    lines = records(tmp_path / "out")
    assert [line["skipped"] for line in lines] == [1, 1, 1]
    assert len({line["lr"] for line in lines}) == 1, "the schedule does not advance"
    alarms = [e for e in records(tmp_path / "out", "events") if e.get("alarm")]
    assert [a["event"] for a in alarms] == ["step_skipped"] * 3 + ["stopped"]
    assert "3 steps in a row were not finite" in alarms[-1]["reason"]
    assert "optimizer.lr" in alarms[-1]["remedy"]
    printed = (tmp_path / "log.0").read_text()
    assert printed.count("SKIPPED") == 3
    assert "ALARM stopped" in printed
    assert (tmp_path / "log.1").read_text() == ""
    start = build(run.model)
    Replica(run, start, Mesh.alone(torch.device("cpu")))
    for name, weight in tensors(tmp_path / "out", "model/").items():
        assert torch.equal(weight.bfloat16(), start.get_parameter(name)), "no weight has moved"


def test_P5_updates_smaller_than_bf16_resolution_add_up() -> None:
    """A constant gradient on weights of 1.0, where bf16 steps by 2^-8 downwards: each update of 5e-4 alone is lost in
    bf16, ten of them are not. Reference: torch's AdamW in fp32, and in bf16 to show the loss."""
    overrides = [*BASE, *DENSE, "train.precision=bf16", "model.vocab_size=257", "optimizer.no_decay=['norm']"]
    run = config.load(None, overrides)
    model = build(run.model)
    replica = Replica(run, model, Mesh.alone(torch.device("cpu")))
    right, lossy = (torch.nn.Parameter(torch.ones(32, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    peers = [torch.optim.AdamW([p], lr=5e-4, betas=run.optimizer.betas, weight_decay=0) for p in (right, lossy)]
    for update in range(10):
        replica.optimizer.step([torch.full((b.size,), 3.0) for b in replica.buckets], 1.0, 5e-4, update)
        for parameter, peer in zip((right, lossy), peers, strict=True):
            parameter.grad = torch.full_like(parameter, 3.0)
            peer.step()
        weight = model.get_parameter("norm.weight")
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, right.bfloat16())
        assert (weight == 1).all() == (update < 3), "the master moves by 5e-4 each time, the rounded weight at 2e-3"
    assert (lossy == 1).all(), "without masters it never moves"
    torch.testing.assert_close(replica.state(share=True)["model/norm.weight"].pieces[0].tensor, right.detach())
