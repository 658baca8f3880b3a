"""The loss against the formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from lanewise.models import loss
from lanewise.models.loss import Objective


def inputs(dtype=torch.float64, tokens=(3, 17), hidden=8, vocab=29):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*tokens, hidden, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, tokens, generator=generator)
    labels[0, 3:9] = labels[2] = -100
    return x, w, labels


def cross_entropy_sum(x, w, labels):
    total, alone = loss.cross_entropy_sum(x, w, labels)
    assert total == alone
    return total


def naive(x, w, labels):
    return F.cross_entropy((x @ w.T).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.fixture(params=[1, 7, 1000], ids=lambda rows: f"{rows} rows a chunk")
def _rows(request, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK", 0)
    monkeypatch.setattr(loss, "MIN_ROWS", request.param)


@pytest.mark.usefixtures("_rows")
def test_value_and_gradients():
    x, w, labels = inputs()
    expected = naive(x, w, labels)
    got = cross_entropy_sum(x, w, labels)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got * 0.3, (x, w)), torch.autograd.grad(expected * 0.3, (x, w)))


def test_only_one_side_needs_a_gradient():
    x, w, labels = inputs()
    expected = torch.autograd.grad(naive(x, w, labels), (x, w))
    torch.testing.assert_close(torch.autograd.grad(cross_entropy_sum(x, w.detach(), labels), x)[0], expected[0])
    torch.testing.assert_close(torch.autograd.grad(cross_entropy_sum(x.detach(), w, labels), w)[0], expected[1])
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy_sum(x, w, labels), naive(x, w, labels))


@pytest.mark.parametrize("tokens", [(2, 5), (2, 0)], ids=["all ignored", "empty"])
def test_nothing_to_predict(tokens):
    """N4, P3: adds 0 to the sum and a zero gradient, not NaN."""
    x, w, _ = inputs(torch.float32, tokens=(3, 17))
    x = x[:2, : tokens[1]].detach().requires_grad_()
    total = cross_entropy_sum(x, w, torch.full(tokens, -100))
    assert total.item() == 0
    dx, dw = torch.autograd.grad(total, (x, w))
    assert not dx.any()
    assert not dw.any()


def test_ignored_tokens_get_exactly_no_gradient():
    x, w, labels = inputs(torch.float32)
    (dx,) = torch.autograd.grad(cross_entropy_sum(x, w, labels), x)
    assert torch.equal(dx.any(-1), labels != -100)


def test_extreme_logits_stay_exact():
    x = torch.tensor([[[1.0], [1.0]]], requires_grad=True)
    w = torch.tensor([[0.0], [300.0]], requires_grad=True)
    total = cross_entropy_sum(x, w, torch.tensor([[0, 1]]))
    assert total.item() == 300.0  # -log softmax: 300 and 0, although exp(300) and exp(-300) leave fp32
    assert torch.isfinite(torch.autograd.grad(total, x)[0]).all()


@pytest.mark.usefixtures("_rows")
def test_bf16_inputs_are_summed_in_fp32():
    x, w, labels = inputs(torch.bfloat16, tokens=(4, 500))
    labels = labels.clamp(min=0)
    logits = (x @ w.T).double()  # the product itself is bf16, everything after it is not
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    got = cross_entropy_sum(x, w, labels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)
    dx, dw = torch.autograd.grad(got, (x, w))
    assert dx.dtype == dw.dtype == torch.bfloat16


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("objective", [Objective(0.2), Objective(z=0.01), Objective(0.2, 0.01)])
def test_label_smoothing_and_z_loss(objective):
    """A11, in one process: against torch's smoothing and the formula; what is displayed stays as it is."""
    x, w, labels = inputs()
    logits, flat = (x @ w.T).flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(logits, flat, reduction="sum", label_smoothing=objective.smoothing)
    expected = expected + objective.z * logits.logsumexp(-1)[flat != -100].square().sum()
    got, nll = loss.cross_entropy_sum(x, w, labels, objective)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(nll, naive(x, w, labels))
    assert not nll.requires_grad
    torch.testing.assert_close(torch.autograd.grad(got * 0.3, (x, w)), torch.autograd.grad(expected * 0.3, (x, w)))
