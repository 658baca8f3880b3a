"""Context parallelism against one plain process (A10, A14, N3, N4), and attention of fewer queries than keys."""

import pytest
import torch
from spread_ranks import DEEPSEEK, DENSE, TOLERANCE, alone, errors, make, same_bits, traced

from lanewise.models import attention
from lanewise.parallel.context import Context
from processes import on_ranks


@pytest.mark.parametrize(
    ("model", "axes", "size", "overrides"),
    [
        (DENSE, "cp2", 2, {"dropout": 0.2}),
        (DENSE, "cp4", 4, {}),
        (DENSE, "cp2.tp2", 4, {"tie_embeddings": True}),
        (DEEPSEEK, "cp2", 2, {"dropout": 0.2}),
        (DEEPSEEK, "cp2.tp2", 4, {}),
    ],
)
def test_every_number_is_that_of_one_process(model, axes, size, overrides):
    """Among the slots are sequences with one valid label and with none: some ranks see nothing to predict."""
    run = make(model, **overrides)
    found = errors(on_ranks(size, traced, run, axes)[0], alone(run))
    worst = max(found, key=found.__getitem__)
    assert found[worst] < TOLERANCE, f"{worst}: {found[worst]}"


def test_replicas_on_top_change_no_bit():
    run = make(DEEPSEEK, lanes=3)
    assert same_bits(on_ranks(6, traced, run, "cp2")[0], on_ranks(2, traced, run, "cp2")[0])


def broken(rank, size, run):
    everywhere = Context.everywhere
    Context.everywhere = lambda self, x: everywhere(self, x.detach()) + 0 * x.sum()
    return traced(rank, size, run, "cp2")


def test_keys_without_the_gradients_of_the_other_ranks_show():
    run = make(DEEPSEEK)
    assert max(errors(on_ranks(2, broken, run)[0], alone(run)).values()) > 1000 * TOLERANCE


def one_document(rank, size, run):
    attend = Context.attend
    Context.attend = lambda self, q, k, v, scale, starts: attend(self, q, k, v, scale, None)
    return traced(rank, size, run, "cp2")


def test_documents_that_see_each_other_show():
    """D5: the made-up slots have rows of several documents."""
    run = make(DENSE)
    assert max(errors(on_ranks(2, one_document, run)[0], alone(run)).values()) > 1000 * TOLERANCE


@pytest.mark.parametrize("longest", [0, attention.LONGEST], ids=["fused", "in-chunks"])
def test_the_queries_are_the_last_ones(monkeypatch, longest):
    monkeypatch.setattr(attention, "LONGEST", longest)
    monkeypatch.setattr(attention, "CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 20, width, generator=generator) for heads, width in ((4, 6), (2, 6), (2, 5)))
    whole = attention.causal_attention(q, k, v, 0.3)
    for start in (0, 7, 16):
        part = attention.causal_attention(q[:, :, start:17], k[:, :, :17], v[:, :, :17], 0.3)
        torch.testing.assert_close(part, whole[:, start:17])


def test_every_rank_has_as_many_pairs():
    """Rank r's queries may look at equally many keys for all r."""
    ends = torch.arange(1, 25)
    pairs = [Context(None, rank, 3).pick(ends, 0).sum().item() for rank in range(3)]
    assert pairs == [100, 100, 100]
