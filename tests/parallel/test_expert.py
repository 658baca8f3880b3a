"""Expert parallelism against one plain process (A5, A6, A15)."""

import pytest
import torch
import torch.distributed as dist
from spread_ranks import DEEPSEEK, TOLERANCE, alone, errors, make, same_bits, traced

from lanewise.config import load_model
from lanewise.models.experts import Experts
from lanewise.models.seams import Seams
from lanewise.parallel import expert
from processes import on_ranks


@pytest.mark.parametrize(
    ("axes", "size", "overrides"),
    [
        ("ep2", 2, {"dropout": 0.2}),
        ("ep3", 3, {"size": 3}),  # 8 experts on 3 ranks
        ("ep4", 4, {"size": 4}),
        ("ep2.tp2", 4, {}),
        ("cp2.ep2", 4, {}),
    ],
)
def test_every_number_is_that_of_one_process(axes, size, overrides):
    run = make(DEEPSEEK, **overrides)
    found = errors(on_ranks(size, traced, run, axes)[0], alone(run))
    worst = max(found, key=found.__getitem__)
    assert found[worst] < TOLERANCE, f"{worst}: {found[worst]}"


def test_replicas_on_top_change_no_bit():
    run = make(DEEPSEEK, lanes=3)
    assert same_bits(on_ranks(6, traced, run, "ep2")[0], on_ranks(2, traced, run, "ep2")[0])


LOADS = {
    "all to one rank": [[0, 1]] * 5,
    "even": [[0, 2], [1, 3], [2, 0], [3, 1], [0, 3]],
    "all to one expert": [[3, 3]] * 5,
}


def layer():
    experts = Experts(load_model({"preset": "tiny", "experts": 4, "expert_hidden": 6, "hidden": 5}))
    generator = torch.Generator().manual_seed(3)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x, weights = torch.randn(2, 5, 5, generator=generator), torch.rand(2, 5, 2, generator=generator)
    return experts, x.double(), weights.double()


def on_half(rank, size, load):
    experts, x, weights = layer()
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, torch.nn.Parameter(parameter[2 * rank : 2 * rank + 2].detach().clone()))
    experts.seams = Seams()
    experts.seams.dispatched = lambda x, sizes: expert.dispatched(x, sizes, dist.group.WORLD)
    x, weights = x[rank].requires_grad_(), weights[rank].requires_grad_()
    y = experts(x, torch.tensor(LOADS[load]), weights)
    y.square().sum().backward()
    return y.detach(), x.grad, weights.grad, {name: p.grad for name, p in experts.named_parameters()}


@pytest.mark.parametrize("load", LOADS)
def test_any_load_is_carried(load):
    """Also none at all on a rank (A6), whose experts then have a zero gradient."""
    experts, x, weights = layer()
    x.requires_grad_()
    weights.requires_grad_()
    right = torch.stack([experts(x[i], torch.tensor(LOADS[load]), weights[i]) for i in range(2)])
    right.square().sum().backward()
    found = on_ranks(2, on_half, load)
    for part, expected in ((0, right.detach()), (1, x.grad), (2, weights.grad)):
        torch.testing.assert_close(torch.stack([f[part] for f in found]), expected)
    for name, parameter in experts.named_parameters():
        torch.testing.assert_close(torch.cat([f[3][name] for f in found]), parameter.grad)
    if load == "all to one rank":
        assert all((g == 0).all() for g in found[1][3].values())
