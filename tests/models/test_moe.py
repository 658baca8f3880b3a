"""Routing, experts and balancing against a loop over tokens in float64, and against values worked out by hand."""

import pytest
import torch
import torch.nn.functional as F

from lanewise.config import load_model
from lanewise.models.build import build
from lanewise.models.init import fill
from lanewise.models.moe import MoE
from lanewise.models.router import Router, balance_loss, count

SMALL = {
    "preset": "tiny",
    "vocab_size": 61,
    "layers": 3,
    "hidden": 16,
    "heads": 2,
    "ffn_hidden": 24,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "expert_hidden": 10,
    "experts": 8,
    "experts_per_token": 2,
    "expert_groups": 4,
    "groups_per_token": 2,
    "routed_scale": 1.5,
}


def moe(**overrides):
    """A float64 layer with random weights and an uneven choice bias."""
    layer = MoE(load_model(SMALL | overrides)).double()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.5
    return layer


def choose(scores, bias, config):
    """The experts of one token by the paper's words: the groups whose two best sum highest, then the best in them."""
    biased = (scores + bias).tolist()
    size = config.experts // config.expert_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.expert_groups)]
    groups.sort(key=lambda g: -sum(sorted(biased[e] for e in g)[-2:]))
    open_experts = [e for g in groups[: config.groups_per_token] for e in g]
    return sorted(open_experts, key=lambda e: -biased[e])[: config.experts_per_token]


def by_token(layer, x_BTH, config):
    out = []
    for x in x_BTH.flatten(0, 1):
        scores = (layer.router.weight @ x).sigmoid()
        chosen = choose(scores, layer.router.expert_bias, config)
        weights = scores[chosen] / (scores[chosen].sum() if config.norm_topk else 1) * config.routed_scale
        y = layer.shared(x) if layer.shared is not None else torch.zeros_like(x)
        for e, weight in zip(chosen, weights, strict=True):
            gate, up, down = layer.experts.gate[e], layer.experts.up[e], layer.experts.down[e]
            y = y + weight * (down @ (F.silu(gate @ x) * (up @ x)))
        out.append(y)
    return torch.stack(out).view_as(x_BTH)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"norm_topk": False, "shared_experts": 0},
        {"expert_groups": 1, "groups_per_token": 1, "experts_per_token": 5},
        {"experts": 1, "experts_per_token": 1, "expert_groups": 1, "groups_per_token": 1},
    ],
)
def test_output_and_every_gradient(overrides):
    layer, config = moe(**overrides), load_model(SMALL | overrides)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64).requires_grad_()
    g = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64)
    got, _ = layer(x, torch.ones(2, 9, dtype=torch.bool))
    expected = by_token(layer, x, config)
    torch.testing.assert_close(got, expected)
    inputs = (x, *layer.parameters())
    torch.testing.assert_close(torch.autograd.grad(got, inputs, g), torch.autograd.grad(expected, inputs, g))


def test_an_expert_without_tokens_gets_a_zero_gradient():
    """A13: it takes part in every sum over replicas like any other."""
    layer = moe(experts_per_token=1, expert_groups=1, groups_per_token=1)
    layer.router.expert_bias[2:] = -10.0
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    y, routing = layer(x, torch.ones(1, 20, dtype=torch.bool))
    assert routing.counts_E[2:].sum() == 0
    y.sum().backward()
    for p in (layer.experts.gate, layer.experts.up, layer.experts.down):
        assert p.grad[:2].any()
        assert not p.grad[2:].any()


def test_no_tokens_at_all():
    layer = moe()
    y, routing = layer(torch.zeros(0, 5, 16, dtype=torch.float64), torch.ones(0, 5, dtype=torch.bool))
    (y.sum() + routing.balance_sum).backward()
    assert routing.counts_E.tolist() == [0] * 8
    assert all(not p.grad.any() for p in layer.parameters())


def test_router_is_fp32_in_bf16():
    router = Router(load_model(SMALL))
    router.weight.data = torch.randn(8, 16).bfloat16()
    x = torch.randn(1, 50, 16).bfloat16()
    choice = router(x)
    exact = (x.double() @ router.weight.double().T).sigmoid()
    torch.testing.assert_close(choice.scores_BTE.double(), exact, rtol=1e-6, atol=0)
    assert choice.weights_BTK.dtype == torch.float32


# ------------------------------------------------------------------------------------------------------- balancing


def test_balance_loss_by_hand():
    """4 experts, K = 2, a sequence of 3 valid tokens and one ignored, a second all ignored.

    token   affinities        2 highest   shares
    0       .4 .3 .2 .1       0, 1        .4  .3  .2  .1
    1       .2 .1 .4 .1       0, 2        .25 .125 .5 .125
    2       .6 .2 .1 .1       0, 1        .6  .2  .1  .1
    times chosen 3 2 1 0; mean shares P = (1.25, .625, .8, .325) / 3; f = 4/(2*3) * (3, 2, 1, 0)
    n sum f P = 3 * 2/3 * (3*1.25 + 2*.625 + 1*.8) / 3 = 2/3 * 5.8
    """
    scores = torch.tensor([[[0.4, 0.3, 0.2, 0.1], [0.2, 0.1, 0.4, 0.1], [0.6, 0.2, 0.1, 0.1], [0.1, 0.1, 0.9, 0.9]]])
    scores = torch.cat((scores, torch.rand(1, 4, 4))).requires_grad_()
    valid = torch.tensor([[True, True, True, False], [False] * 4])
    loss = balance_loss(scores, valid, chosen=2)
    assert loss.item() == pytest.approx(2 / 3 * 5.8)
    (g,) = torch.autograd.grad(loss, scores)
    assert not g[0, 3].any()
    assert not g[1].any()
    # d/ds of (2/3) (f . s / sum s) at token 0, f = (3, 2, 1, 0), sum 1: (2/3) (f - f.s), f.s = 2
    torch.testing.assert_close(g[0, 0], torch.tensor([1.0, 0.0, -1.0, -2.0]) * 2 / 3)


def test_even_loads_cost_one_a_token():
    """f = P-weighted 1 when every expert has the same share: the sum over tokens is the number of tokens."""
    scores = torch.eye(4)[None] * 0.5 + 0.1
    assert balance_loss(scores, torch.ones(1, 4, dtype=torch.bool), chosen=1).item() == pytest.approx(4.0)


def test_counts_are_exact_and_of_valid_tokens():
    experts = torch.tensor([[[0, 2], [1, 2], [0, 1]], [[2, 0], [2, 1], [1, 0]]])
    valid = torch.tensor([[True, True, False], [True, False, False]])
    assert count(experts, valid, 4).tolist() == [[1, 1, 2, 0], [1, 0, 1, 0]]


def test_bias_moves_towards_the_mean_in_every_layer():
    """A15: multi-token prediction's layer included; a load equal to the mean stays."""
    model = build(load_model(SMALL | {"experts": 4, "expert_groups": 1, "groups_per_token": 1, "bias_speed": 0.25}))
    fill(model, 0)
    model.balance(torch.tensor([[5, 1, 3, 3], [0, 0, 0, 12], [2**40, 2**40, 2**40 - 1, 2**40 + 1]]))
    biases = [b.tolist() for name, b in model.named_buffers() if name.endswith("expert_bias")]
    assert biases == [[-0.25, 0.25, 0, 0], [0.25, 0.25, 0.25, -0.25], [0, 0, 0.25, -0.25]]
    assert [n for n, _ in model.named_buffers()][-1].startswith("mtp.0.")


def test_bias_evens_out_the_loads():
    """What it is for: with the bias moved after every step, a skewed router ends up using all experts alike."""
    router = Router(load_model(SMALL | {"expert_groups": 1, "groups_per_token": 1}))
    generator = torch.Generator().manual_seed(0)
    router.weight.data = torch.randn(8, 16, generator=generator)
    x = torch.randn(1, 2000, 16, generator=generator) + 0.5
    valid = torch.ones(1, 2000, dtype=torch.bool)

    def loads():
        return count(router(x).experts_BTK, valid, 8).sum(0)

    before = loads().double().std()
    for _ in range(500):
        router.balance(loads(), 0.002)
    assert loads().double().std() < before / 10
