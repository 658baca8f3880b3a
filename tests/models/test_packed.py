"""Several documents in a row: the sums of a row for each (D5)."""

import pytest
import torch
import torch.nn.functional as F

from lanewise.config import load_model
from lanewise.models import attention
from lanewise.models.attention import causal_attention
from lanewise.models.build import build
from lanewise.models.init import fill

SMALL = {"vocab_size": 61, "hidden": 16, "heads": 2, "ffn_hidden": 24, "layers": 2, "init_std": 0.3}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
FAMILIES = {
    "dense": SMALL | {"preset": "tiny-dense", "kv_heads": 1, "qkv_bias": True, "qk_norm": True},
    # The sequence-wise balance loss is one of the row, whatever is in it.
    "deepseek": SMALL | LATENT | {"preset": "tiny", "expert_hidden": 10, "mtp_layers": 2, "balance_loss": 0.0},
}
# Of 40 tokens; a document of one token, one shorter than the extra predictions reach, and chunks that cut documents.
LENGTHS = [[7, 1, 2, 30], [40], [19, 21]]


@pytest.fixture(params=["in chunks", "by document"])
def _path(request, monkeypatch):
    monkeypatch.setattr(attention, "LONGEST", 0 if request.param == "by document" else 1024)
    monkeypatch.setattr(attention, "CHUNK", 16)


def packed():
    """(tokens, labels, starts) of rows of documents, and (tokens, labels) of each document."""
    generator = torch.Generator().manual_seed(2)
    tokens_BT = torch.randint(61, (3, 40), generator=generator)
    labels_BT = F.pad(tokens_BT[:, 1:], (0, 1), value=5)
    labels_BT[1, 11:15] = -100
    starts_BT, separate = torch.zeros_like(tokens_BT), []
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths, strict=True):
            piece = slice(end - length, end)
            starts_BT[row, piece] = end - length
            # The second row's document goes on elsewhere: what follows its last token is known.
            labels_BT[row, end - 1] = 9 if row == 1 or length == 19 else -100
            separate.append((tokens_BT[row : row + 1, piece], labels_BT[row : row + 1, piece]))
    return (tokens_BT, labels_BT, starts_BT), separate


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("raw", FAMILIES.values(), ids=FAMILIES)
def test_a_row_of_documents_is_their_sum(raw):
    model = build(load_model(raw))
    fill(model, 0)
    (tokens, labels, starts), separate = packed()
    outputs = [model(*document) for document in separate]
    right = gradients(model, sum(o.loss_sum for o in outputs))
    output = model(tokens, labels, starts_BT=starts)
    torch.testing.assert_close(output.loss_sum, sum(o.loss_sum for o in outputs))
    torch.testing.assert_close(output.nll_sum, sum(o.nll_sum for o in outputs))
    if output.expert_counts is not None:
        assert torch.equal(output.expert_counts, sum(o.expert_counts for o in outputs))
    for name, gradient in gradients(model, output.loss_sum).items():
        error = (gradient - right[name]).abs().max() / right[name].abs().max()
        assert error < 2e-6, f"{name}: {error}"
    without = model(tokens, labels).nll_sum
    assert abs(without - output.nll_sum) > 1e-3 * without, "the documents would see each other"


@pytest.mark.parametrize("longest", [1024, 0], ids=["in chunks", "by document"])
def test_compiled(longest, monkeypatch):
    """Short rows stay one graph; where documents are cut out one by one, the graph is split."""
    monkeypatch.setattr(attention, "LONGEST", longest)
    model = build(load_model(FAMILIES["dense"] | {"layers": 1}))
    fill(model, 0)
    tokens, labels, starts = packed()[0]
    right = gradients(model, model(tokens, labels, starts_BT=starts).loss_sum)
    model.layers["0"].compile(backend="eager", fullgraph=longest > 0)
    torch.testing.assert_close(gradients(model, model(tokens, labels, starts_BT=starts).loss_sum), right)


@pytest.mark.usefixtures("_path")
def test_queries_that_are_the_last_ones():
    """As context parallelism asks for them: a stretch of queries, and the keys before its end."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, 40, width, generator=generator) for heads, width in ((4, 6), (2, 6), (2, 5)))
    starts = packed()[0][2]
    k_all, v_all = (t.repeat_interleave(2, dim=1) for t in (k, v))
    index = torch.arange(40)
    seen_BTK = (index <= index[:, None]) & (index >= starts[..., None])
    scores = (0.3 * q @ k_all.transpose(-1, -2)).masked_fill(~seen_BTK[:, None], -torch.inf)
    right = (scores.softmax(-1) @ v_all).transpose(1, 2)
    for start, end in ((0, 40), (0, 13), (8, 20), (25, 26)):
        part = causal_attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], 0.3, starts[:, start:end])
        torch.testing.assert_close(part, right[:, start:end])
