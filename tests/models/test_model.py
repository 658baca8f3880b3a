"""Whole models: what one forward promises to the sums around it."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lanewise.config import load_model
from lanewise.models.build import build
from lanewise.models.init import fill
from lanewise.models.loss import Objective
from lanewise.models.moe import MoE
from lanewise.models.router import balance_loss

SMALL = {"vocab_size": 61, "hidden": 16, "heads": 2, "ffn_hidden": 24, "layers": 3, "init_std": 0.3}
DEEPSEEK = SMALL | {
    "preset": "tiny",
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "expert_hidden": 10,
    "mtp_layers": 2,
    "balance_loss": 0.1,
}
DENSE = SMALL | {"preset": "tiny-dense", "kv_heads": 1}
FAMILIES = {"dense": DENSE, "dense-tied": DENSE | {"tie_embeddings": True}, "deepseek": DEEPSEEK}


def make(raw, dtype=torch.float32):
    model = build(load_model(raw))
    fill(model, 0)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def data(batch=3, length=24):
    tokens = torch.randint(0, 61, (batch, length + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(params=FAMILIES)
def raw(request):
    return FAMILIES[request.param]


def test_sequences_add_up(raw):
    """A microbatch is the sum of its sequences, however many of their labels count (the ground of N1-N5)."""
    model = make(raw, torch.float64)
    tokens, labels = data()
    labels[0, 5:] = labels[1, ::2] = -100
    whole = model(tokens, labels)
    parts = [model(tokens[i : i + 1], labels[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(whole.loss_sum, sum(p.loss_sum for p in parts))
    torch.testing.assert_close(whole.nll_sum, sum(p.nll_sum for p in parts))
    if whole.expert_counts is not None:
        assert torch.equal(whole.expert_counts, sum(p.expert_counts for p in parts))
    torch.testing.assert_close(gradients(model, whole.loss_sum), gradients(model, sum(p.loss_sum for p in parts)))


def test_padding_does_not_matter(raw):
    model = make(raw, torch.float64)
    tokens, labels = data(1, 11)
    short = model(tokens, labels)
    padded = model(F.pad(tokens, (0, 9), value=3), F.pad(labels, (0, 9), value=-100))
    torch.testing.assert_close(padded.loss_sum, short.loss_sum)
    torch.testing.assert_close(gradients(model, padded.loss_sum), gradients(model, model(tokens, labels).loss_sum))
    if short.expert_counts is not None:
        assert torch.equal(padded.expert_counts, short.expert_counts)


def test_all_labels_ignored(raw):
    """N4 and A13: a loss of 0, and a zero gradient for every parameter rather than none."""
    model = make(raw)
    tokens, labels = data()
    out = model(tokens, torch.full_like(labels, -100))
    assert out.loss_sum.item() == out.nll_sum.item() == 0
    assert all(not g.any() for g in gradients(model, out.loss_sum).values())


def test_nll_is_the_cross_entropy_of_the_logits(raw):
    model = make(raw, torch.float64)
    tokens, labels = data()
    labels[1, 3:7] = -100
    out = model(tokens, labels)
    expected = F.cross_entropy(model.logits(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    torch.testing.assert_close(out.nll_sum, expected)
    assert not out.nll_sum.requires_grad


def test_label_smoothing_and_z_loss_leave_the_displayed_loss_alone(raw):
    alone = {"balance_loss": 0.0, "mtp_layers": 0} if raw is DEEPSEEK else {}
    model = make(raw | alone, torch.float64)
    tokens, labels = data()
    plain = model(tokens, labels).nll_sum
    model.objective = Objective(smoothing=0.1, z=0.01)
    out = model(tokens, labels)
    logits = model.logits(tokens).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(out.loss_sum, expected + 0.01 * logits.logsumexp(-1).square().sum())
    assert out.nll_sum == plain


def test_causality(raw):
    model = make(raw)
    tokens, _ = data(1)
    before = model.logits(tokens)
    tokens[0, 10] += 1
    after = model.logits(tokens)
    torch.testing.assert_close(after[:, :10], before[:, :10])
    assert not torch.allclose(after[:, 10:], before[:, 10:])


def test_same_bits_twice(raw):
    tokens, labels = data()
    raw = raw | {"dropout": 0.1}
    a, b = (make(raw, torch.bfloat16) for _ in range(2))
    first, second = (gradients(m, m(tokens, labels, torch.tensor(4)).loss_sum) for m in (a, b))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bf16_weights_keep_an_fp32_loss(raw):
    tokens, labels = data()
    exact, rounded = make(raw)(tokens, labels), make(raw, torch.bfloat16)(tokens, labels)
    assert rounded.loss_sum.dtype == rounded.nll_sum.dtype == torch.float32
    torch.testing.assert_close(rounded.nll_sum, exact.nll_sum, rtol=0.05, atol=0)


def test_dropout_follows_key_and_mode(raw):
    model = make(raw | {"dropout": 0.3})
    tokens, labels = data()
    loss = [model(tokens, labels, torch.tensor(key)).loss_sum for key in (1, 1, 2)]
    without = model(tokens, labels).loss_sum
    assert loss[0] == loss[1]
    assert len({x.item() for x in (loss[0], loss[2], without)}) == 3
    assert model.eval()(tokens, labels, torch.tensor(1)).loss_sum == without


def test_recompute_changes_nothing(raw):
    """A14: blocks run again in the backward draw the same masks; counts are those of one forward."""
    model = make(raw | {"dropout": 0.3})
    tokens, labels = data()
    key = torch.tensor(77)
    plain = model(tokens, labels, key)
    expected = gradients(model, plain.loss_sum)
    for block in model.layers.values():
        block.forward = lambda *a, f=block.forward: checkpoint(f, *a, use_reentrant=False)
    again = model(tokens, labels, key)
    got = gradients(model, again.loss_sum)
    assert again.loss_sum == plain.loss_sum
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    if plain.expert_counts is not None:
        assert torch.equal(again.expert_counts, plain.expert_counts)


def test_tied_head_adds_to_the_embeddings_gradient():
    """Against the same model untied: the tied gradient is the sum of the two."""
    tokens, labels = data()
    tied, untied = make(FAMILIES["dense-tied"], torch.float64), make(DENSE, torch.float64)
    untied.load_state_dict(tied.state_dict() | {"head.weight": tied.embed.weight.detach().clone()})
    got = gradients(tied, tied(tokens, labels).loss_sum)
    expected = gradients(untied, untied(tokens, labels).loss_sum)
    expected["embed.weight"] += expected.pop("head.weight")
    torch.testing.assert_close(got, expected)
    [spec] = [s for s in tied.table() if s.aliases]
    assert (spec.name, spec.aliases) == ("embed.weight", ("head.weight",))
    tied.to(torch.float32)
    assert tied.head.weight is tied.embed.weight


# ----------------------------------------------------------------------------------------- multi-token prediction


def test_prediction_ahead_by_the_paper():
    """Equations 21-25 on sequences cut to T - k, through the model's own blocks; balance terms added by hand."""
    model = make(DEEPSEEK, torch.float64)
    config = load_model(DEEPSEEK)
    tokens, labels = data()
    out = model(tokens, labels)
    T = tokens.shape[1]
    balance, counts = [], []

    def report(module, args, result):
        balance.append(balance_loss(module.router(args[0]).scores_BTE, args[1], 2))
        counts.append(result[1].counts_E)

    for module in model.modules():
        if isinstance(module, MoE):
            module.register_forward_hook(report)
    everything = torch.ones(3, T, dtype=torch.bool)
    hidden = model.norm(model.trunk(model.embed(tokens), model.places(tokens), everything, None)[0])
    loss = F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    for k, depth in enumerate(model.mtp.values(), start=1):
        n = T - k
        hidden, _ = depth(
            hidden[:, :n], model.embed(tokens[:, k:]), model.places(tokens[:, :n]), everything[:, :n], None
        )
        nll = F.cross_entropy(model.head(hidden).flatten(0, 1), labels[:, k:].flatten(), reduction="sum")
        loss = loss + config.mtp_weight / 2 * nll
    loss = loss + config.balance_loss * sum(balance)
    torch.testing.assert_close(out.loss_sum, loss)
    torch.testing.assert_close(gradients(model, out.loss_sum), gradients(model, loss))
    assert torch.equal(out.expert_counts, torch.stack(counts))
    assert out.expert_counts.sum(1).tolist() == [2 * 3 * n for n in (T, T, T - 1, T - 2)]  # 2 experts a token


def test_prediction_ahead_does_not_look_across_an_ignored_label():
    """Two documents, an ignored label between them: the loss is that of the first up to its end plus the second's."""
    raw = DEEPSEEK | {"balance_loss": 0.0}
    model = make(raw, torch.float64)
    tokens, labels = data(1)
    labels[0, 9] = -100
    changed = labels.clone()
    changed[0, 10:] = (changed[0, 10:] + 7) % 61
    difference = model(tokens, changed).loss_sum - model(tokens, labels).loss_sum
    # relabelling the second document changes what is predicted from positions 10 on, and nothing before
    labels[0, :10] = changed[0, :10] = -100
    torch.testing.assert_close(difference, model(tokens, changed).loss_sum - model(tokens, labels).loss_sum)


def test_without_experts_or_prediction_ahead():
    model = make(DEEPSEEK | {"dense_layers": 3, "mtp_layers": 0})
    out = model(*data())
    assert out.expert_counts.shape == (0, 8)
    assert torch.equal(out.loss_sum.detach(), out.nll_sum)
    model.balance(out.expert_counts)


# ---------------------------------------------------------------------------------------------------- compilation


@pytest.mark.parametrize("raw", [DENSE | {"qk_norm": True}, DEEPSEEK], ids=["dense", "deepseek"])
def test_blocks_compile(raw):
    """Equal results, each kind of block compiled once however many there are; a dense block is one graph, the experts'
    dispatch splits the other."""
    model = make(raw | {"dropout": 0.1})
    tokens, labels = data()
    key = torch.tensor(3)
    expected = gradients(model, model(tokens, labels, key).loss_sum)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    dense = raw["preset"] == "tiny-dense"
    for block in model.layers.values():
        block.compile(fullgraph=dense, backend=backend)
    got = gradients(model, model(tokens, labels, key).loss_sum)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1 if dense else 1 < len(graphs) < 6
