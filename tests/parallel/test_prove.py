"""`prove`: passes what is right, and names what is not."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from spread_ranks import DEEPSEEK, DENSE, make

from lanewise import config
from lanewise.elastic.world import World
from lanewise.lanes.reducer import _BucketSum
from lanewise.model_settings import presets
from lanewise.models.build import build
from lanewise.parallel.layout import Layout, check
from lanewise.parallel.prove import prove
from lanewise.parallel.shrink import shrink
from processes import on_ranks


def proven(rank, size, run, axes, fault=None):
    """Findings on the first rank. fault: (part of a parameter's name, factor on what the last rank adds to it)."""
    if fault is not None and rank == size - 1:
        take = _BucketSum.take

        def spoilt(self, index, gradient):
            hit = fault[0] in self.bucket.places[index].spec.name
            return take(self, index, gradient * fault[1] if hit else gradient)

        _BucketSum.take = spoilt
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD, dist.new_group())
    return [(f.what, f.worst, f.tolerance, f.passed) for f in prove(run, Layout.parse(axes), world)]


@pytest.mark.parametrize(
    ("model", "axes", "size", "settings"),
    [
        (DENSE | {"layers": 4, "tie_embeddings": True}, "pp2", 4, {"layout": {"schedule": "zbv"}}),
        (DEEPSEEK, "tp2", 4, {"train": {"freeze": ["layers.0.*"]}}),
    ],
)
def test_what_is_right_passes(model, axes, size, settings):
    findings, *others = on_ranks(size, proven, make(model, **settings), axes)
    assert others == [[]] * (size - 1)
    assert all(passed for *_, passed in findings)
    exact = [what for what, _, tolerance, _ in findings if tolerance == 0]
    assert exact == [
        "state after saving and loading in other layouts",
        "bits of one rank" if axes == "pp2" else "bits of tp2, one replica",
    ]


@pytest.mark.parametrize("name", ["ffn.router", "attention_norm", "kv_down"])
def test_a_missing_reduction_is_named(name):
    findings = on_ranks(2, proven, make(DEEPSEEK), "tp2", (name, 0.0))[0]
    wrong = [(what, worst) for what, worst, _, passed in findings if not passed]
    gradients = [worst for what, worst in wrong if what.startswith("gradient of")]
    assert gradients
    assert all(name in worst for worst in gradients)


def test_a_single_bit_is_noticed_where_bits_are_promised():
    """A factor that fp32 can barely tell from 1, in one of two replicas: far inside the tolerance."""
    findings = on_ranks(2, proven, make(DENSE), "", ("ffn.up", 1 + 2**-22))[0]
    wrong = [what for what, _, _, passed in findings if not passed]
    assert wrong == ["bits of one rank"]


def test_the_command():
    def lanewise(*words):
        small = ["model.preset=tiny-dense", "model.layers=1", "batch.lanes=2"]
        command = [sys.executable, "-m", "lanewise.cli.main", "prove", *words, *small]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    told = json.loads(lanewise("--layout", "tp2", "--json").stdout)
    assert (told["layout"], told["replicas"], told["passed"]) == ("tp2", 1, True)
    for words in (["--layout", "tp3.cp0"], ["--layout", "tp2", "--workers", "3"]):
        refused = lanewise(*words)
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("axes", ["tp2", "pp2.tp4", "ep2.cp2"])
def test_a_shrunk_model_is_small_and_fits_its_layout(preset, axes):
    layout = Layout.parse(axes)
    run = config.load(None, [f"model.preset={preset}"])
    if layout.ep > 1 and run.model.family == "dense":
        return
    small = shrink(run, layout)
    check(layout, small, layout.size)
    with torch.device("meta"):
        assert sum(p.numel() for p in build(small.model).parameters()) < 6e6
    for key in ("heads", "tie_embeddings", "family", "dropout"):
        assert getattr(small.model, key) == getattr(run.model, key)
