"""Tensor parallelism against one plain process, parameter by parameter (A1-A4, A10, A14, A15, N8, P1)."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spread_ranks import DEEPSEEK, DENSE, TOLERANCE, alone, errors, make, same_bits, traced

from lanewise.lanes.reducer import _BucketSum
from lanewise.models import loss
from lanewise.models.loss import Objective
from lanewise.parallel import vocabulary
from lanewise.parallel.spread import Spread
from processes import on_ranks


@pytest.mark.parametrize(
    ("model", "size", "overrides"),
    [
        (DENSE, 2, {"dropout": 0.2}),
        (DENSE, 4, {}),  # A2: 2 key/value heads on 4 ranks
        (DENSE, 3, {"length": 18, "tie_embeddings": True}),  # A1: 4 heads, 50 channels, 67 words over 3
        (DEEPSEEK, 2, {"dropout": 0.2}),  # A3, A4
        (DEEPSEEK, 4, {"tie_embeddings": True}),
        (DEEPSEEK, 3, {"length": 18, "q_lora_rank": 0, "train": {"label_smoothing": 0.1, "z_loss": 0.01}}),  # A11
    ],
)
def test_every_number_is_that_of_one_process(model, size, overrides):
    run = make(model, **overrides)
    found = errors(on_ranks(size, traced, run, f"tp{size}")[0], alone(run))
    worst = max(found, key=found.__getitem__)
    assert found[worst] < TOLERANCE, f"{worst}: {found[worst]}"


@pytest.mark.parametrize("model", [DENSE, DEEPSEEK], ids=["dense", "deepseek"])
def test_replicas_on_top_change_no_bit(model):
    one = on_ranks(2, traced, make(model, lanes=3, dropout=0.1), "tp2")[0]
    for size, zero in [(4, 0), (4, 2), (6, 1)]:
        assert same_bits(
            on_ranks(size, traced, make(model, lanes=3, dropout=0.1, layout={"zero": zero}), "tp2")[0], one
        )


def in_halves(rank, size, seed, objective):
    """Sums, and gradients of x and this rank's rows, of the split cross-entropy; rows 0..2 belong to rank 0.

    So few logits are held at a time that ranks which counted their own rows would cut the tokens differently.
    """
    loss.CHUNK, loss.MIN_ROWS = 12, 1
    x, weight, labels = head(seed)
    rows = slice(0, 3) if rank == 0 else slice(3, None)
    part = weight[rows].clone().requires_grad_()
    x.requires_grad_()
    words = vocabulary.SharedWords(7, dist.group.WORLD)
    total, nll = loss.cross_entropy_sum(x, part, labels, objective, words)
    (2 * total).backward()
    dist.all_reduce(x.grad)
    return total.item(), nll.item(), x.grad, part.grad


def head(seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(7, (2, 5), generator=generator)
    labels[0, 1:4] = -100
    return 30 * torch.randn(2, 5, 4, generator=generator), torch.randn(7, 4, generator=generator), labels


@pytest.mark.parametrize("objective", [Objective(), Objective(smoothing=0.1, z=0.01)], ids=["plain", "A11"])
def test_cross_entropy_over_uneven_halves_of_the_vocabulary(objective):
    """Against torch's, at logits so large that exponentials overflow unless the largest logit of all ranks is used."""
    x, weight, labels = head(1)
    x.requires_grad_()
    weight.requires_grad_()
    logits, flat = (x @ weight.T).flatten(0, 1), labels.flatten()
    nll = F.cross_entropy(logits, flat, reduction="sum")
    total = F.cross_entropy(logits, flat, reduction="sum", label_smoothing=objective.smoothing)
    total = total + objective.z * logits.logsumexp(-1)[flat != -100].square().sum()
    (2 * total).backward()
    (a, plain, dx, top), (b, _, _, bottom) = on_ranks(2, in_halves, 1, objective)
    assert a == b == pytest.approx(total.item(), rel=1e-5)
    assert plain == pytest.approx(nll.item(), rel=1e-5)
    torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(torch.cat((top, bottom)), weight.grad)


PARTIAL = {"router": "ffn.router", "norm": "attention_norm", "latent": "kv_down", "key/value head": "attention.k"}


def broken(rank, size, run, fault):
    """The trace with one reduction left out."""
    if fault in PARTIAL:  # the first rank's part of the gradient goes for the whole
        whole = _BucketSum.take

        def take(self, index, gradient):
            mine = rank == 0 or PARTIAL[fault] not in self.bucket.places[index].spec.name
            return whole(self, index, gradient if mine else torch.zeros_like(gradient))

        _BucketSum.take = take
    elif fault == "balance counts":
        Spread.total = lambda self, counts: counts
    elif fault == "output":
        joined = Spread.joined
        Spread.joined = lambda self, x: joined(self, x if rank == 0 else 0 * x)
    return traced(rank, size, run, f"tp{size}")


@pytest.mark.parametrize("fault", ["router", "norm", "latent", "balance counts", "output"])
def test_a_missing_reduction_shows(fault):
    """The tolerance can tell: each fault, put in on purpose, shows at a thousand times it."""
    run = make(DEEPSEEK, balance_loss=0.1)
    assert max(errors(on_ranks(2, broken, run, fault)[0], alone(run)).values()) > 1000 * TOLERANCE


def test_a_missing_reduction_of_shared_key_value_heads_shows():
    run = make(DENSE)
    assert max(errors(on_ranks(4, broken, run, "key/value head")[0], alone(run)).values()) > 1000 * TOLERANCE
