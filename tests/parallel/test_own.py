"""Modules of the user's own: the plan that is derived, and what it computes against one process."""

import json
import subprocess
import sys

import pytest
import torch
from own_modules import architecture, net
from torch import nn

import lanewise
from lanewise.errors import UserError
from lanewise.parallel.layout import Layout
from lanewise.parallel.own.derive import observed
from lanewise.parallel.own.parallel import Parallel
from lanewise.parallel.own.plan import Group, Plan
from lanewise.parallel.own.prove import made_up, prove
from processes import on_ranks

MIXES = {
    "gpt2": ["pp2.tp2"],
    "mistral": ["fsdp2.tp2"],
    "gemma2": ["pp2.fsdp2"],
    "olmo2": ["pp2.tp2"],
    "net": ["fsdp2.tp2", "pp2.fsdp2"],
}
CASES = [(name, axes) for name, mixes in MIXES.items() for axes in ("tp2", "fsdp2", "pp2", *mixes)]


def build(name):
    return net() if name == "net" else architecture(name)


def proven(rank, size, cases, fault=""):
    """{case: findings}. fault: a kind of parameter whose gradients' last sums are left out."""
    if fault:
        whole = Parallel.reductions
        Parallel.reductions = lambda self, entry: () if entry.kind == fault else whole(self, entry)
    found = {}
    for name, axes in cases:
        layout, module = Layout.parse(axes), build(name)
        batches = made_up(module, 2 * 2 * layout.fsdp * layout.replicas(size))
        found[name, axes] = prove(module, layout, batches, microbatches=2)
    return found


@pytest.fixture(scope="module")
def findings():
    """One start for all: four processes, so that layouts of two have two replicas."""
    return on_ranks(4, proven, CASES, limit=200)[0]


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_it_computes_what_one_process_computes(findings, name, axes):
    assert [(f.what, f.worst, f.error) for f in findings[name, axes] if not f.passed] == []
    assert {"gradient of column", "gradient of row", "row after 3 steps"} <= {f.what for f in findings[name, axes]}


@pytest.mark.parametrize(
    ("name", "axes", "kind", "worst"),
    [
        ("net", "tp2", "summed", "scale"),  # each rank has only its heads' part of it
        ("gpt2", "pp2", "embedding", "wte"),  # tied: both ends of the pipeline have a part
    ],
)
def test_a_missing_reduction_is_named(name, axes, kind, worst):
    found = on_ranks(2, proven, [(name, axes)], kind)[0][name, axes]
    wrong = [f for f in found if f.what.startswith("gradient of ") and not f.passed]
    assert [f.what for f in wrong] == [f"gradient of {kind}"]
    assert worst in wrong[0].worst


# ------------------------------------------------------------------------------------------------- derivation


def groups(name, tp=2):
    return {(*g.columns, g.row): g for g in lanewise.derive(build(name), f"tp{tp}").groups}


def test_a_fused_column_is_split_piece_by_piece():
    found = groups("gpt2")
    attention = found["attn.c_attn", "attn.c_proj"]
    assert attention.local
    assert (attention.pieces, attention.divided) == ((32, 32, 32), ("attn.split_size",))
    assert found["mlp.c_fc", "mlp.c_proj"] == Group(("mlp.c_fc",), "mlp.c_proj")


def test_what_works_only_as_a_whole_is_gathered():
    attention = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"
    assert groups("mistral")[attention].local
    assert not groups("mistral", tp=4)[attention].local  # half a key/value head is none
    assert not groups("olmo2")[attention].local  # a norm over the width of all queries
    assert groups("olmo2")["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].local


def test_structure_not_names():
    plan = lanewise.derive(net(), "tp2")
    assert plan.blocks == "rest"
    assert [(g.columns, g.row, g.local, g.divided, g.summed) for g in plan.groups] == [
        (("one", "two", "three"), "out", True, ("heads",), ("scale.weight",)),
        (("experts.0.0",), "experts.0.2", True, (), ()),
        (("experts.1.0",), "experts.1.2", True, (), ()),
    ]
    assert (plan.embeddings, plan.heads) == (("table",), ("end",))


def test_the_plan_shows_what_is_done_and_what_is_not():
    shown = str(lanewise.derive(architecture("gpt2"), "pp2.tp2"))
    for line in (
        "split       attn.c_attn -> attn.c_proj",
        "tied        transformer.wte.weight = lm_head.weight",
        "column              22,176         11,088",
        "pp stage 1  blocks 2 to 2, what comes after",
    ):
        assert line in shown
    assert "whole: rest.*.choice.weight (2): no second linear layer takes what it makes" in str(
        lanewise.derive(net(), "tp2")
    )


def test_a_declared_plan_is_checked():
    good = Plan("rest", (Group(("one", "two", "three"), "out", divided=("heads",)),), ("table",), ("end",))
    assert lanewise.parallelize(net(), "", good, show=False).plan.table[0].kind == "embedding"
    for plan, word in (
        (Plan("rest", (Group(("one",), "out"),)), "part by part"),
        (Plan("rest", (Group(("scale",), "out"),)), "rest.0.scale"),
        (Plan("rest", heads=("ending",)), "ending"),
    ):
        with pytest.raises(UserError, match=word):
            observed(net(), "tp2", None, plan)


@pytest.mark.parametrize(
    ("axes", "module", "word"),
    [
        ("cp2", net, "cp"),
        ("ep2", net, "ep"),
        ("tp2", net, "torchrun"),
        ("", lambda: nn.Linear(2, 2), "repeated blocks"),
        ("", lambda: net().to("meta"), "meta"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(axes, module, word):
    with pytest.raises(UserError, match=word) as raised:
        lanewise.parallelize(module(), axes)
    assert "\n" not in str(raised.value)


def test_one_process_is_the_plain_module():
    parallel, alone = lanewise.parallelize(net(), "", show=False), net()
    tokens = torch.arange(24).reshape(2, 12)
    loss = parallel.forward_backward(tokens, tokens, microbatches=2)
    right = nn.functional.cross_entropy(alone(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    right.backward()
    assert loss == pytest.approx(right.item(), rel=1e-6)
    for name, gradient in parallel.whole(gradients=True):
        expected = alone.get_parameter(name).grad
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)
    with pytest.raises(UserError, match="multiple of 3"):
        parallel.forward_backward(tokens, tokens, microbatches=3)


def test_the_command(tmp_path):
    def run(*words):
        command = [sys.executable, "-m", "lanewise.cli.main", "prove", "--json", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2", "vocab_size": 50001}))
    found = run("--module", f"hf:{tmp_path}", "--layout", "tp2")
    told = json.loads(found.stdout)
    assert (found.returncode, told["layout"], told["passed"]) == (0, "tp2", True)
    for words in (["--module", "hf:nowhere"], ["run.toml", "--module", "os:path"]):
        refused = run(*words)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr


def test_importing_lanewise_does_not_import_torch():
    code = (
        "import sys, lanewise; assert 'torch' not in sys.modules; lanewise.parallelize; assert 'torch' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
