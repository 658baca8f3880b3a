"""Faults of sums and denominators (rows N): every figure is a sum over tokens, divided once by all its tokens."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lanewise import config
from lanewise.checkpoint.locate import locate
from lanewise.data.prepare import prepare
from lanewise.elastic.world import World
from lanewise.lanes.vote import Ballot
from lanewise.models.build import build
from lanewise.models.init import fill
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.replica import Replica
from processes import on_ranks
from reference import BYTES, assert_same_gradients, gradients_of, reference, window
from system import BASE, DEEPSEEK, DENSE, FAMILIES, records, settings, train, write_documents

SHORT, LONG = (
    "eleven byte",
    "a hundred and one bytes of texts, which is about as long as a line that nobody would want to read on.",
)
ONE_STEP = (
    "train.steps=1 optimizer.clip=0 data.pack=document data.shuffle=false data.held_out=0 batch.sequence_length=128"
).split()


def first_step(folder: Path, texts: list[str], workers: int, *overrides: str) -> tuple[config.Run, Path]:
    """A run of one step over a document a sample, in order."""
    source = write_documents(folder / "text.jsonl", texts)
    run = settings(folder, source, *ONE_STEP, *overrides)
    out = folder / f"out-{workers}"
    assert train(run, out, workers) == 0
    return run, out


@pytest.mark.parametrize(
    ("lanes", "microbatches", "workers"),
    [
        pytest.param(1, 2, 1, id="N1-accumulation"),
        pytest.param(2, 1, 2, id="N2-replicas"),
        pytest.param(2, 1, 1, id="N2-lanes"),
    ],
)
def test_N1_N2_a_short_sample_weighs_by_its_tokens(tmp_path: Path, lanes: int, microbatches: int, workers: int) -> None:
    assert (len(SHORT), len(LONG)) == (11, 101)
    size = [f"batch.lanes={lanes}", f"batch.microbatches={microbatches}"]
    run, out = first_step(tmp_path, [SHORT, LONG], workers, *DENSE, *size)
    right = reference(run, [SHORT, LONG])
    [line] = records(out)
    assert line["tokens"] == 112
    assert line["loss"] == pytest.approx(right.loss, rel=1e-6)
    assert line["grad_norm"] == pytest.approx(right.norm, rel=1e-5)
    assert_same_gradients(gradients_of(run, out), right.gradients)
    means = [reference(run, [text]) for text in (SHORT, LONG)]
    mean_of_means = {n: (means[0].gradients[n] + means[1].gradients[n]) / 2 for n in right.gradients}
    with pytest.raises(AssertionError):
        assert_same_gradients(mean_of_means, right.gradients, tolerance=0.01)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("workers", [1, 4])
def test_N4_N5_a_microbatch_without_labels_adds_nothing(tmp_path: Path, family: str, workers: int) -> None:
    """Three documents for four microbatches: the fourth has no valid label, and on 4 workers one rank has nothing."""
    texts = ["one", "two and a bit", "three"]
    size = ["batch.lanes=4", "train.epochs=1", "batch.sequence_length=32"]
    run, out = first_step(tmp_path, texts, workers, *FAMILIES[family], *size)
    right = reference(run, texts)
    [line] = records(out)
    assert line["tokens"] == sum(len(text) for text in texts)
    assert line["loss"] == pytest.approx(right.loss, rel=1e-6)
    assert_same_gradients(gradients_of(run, out), right.gradients)


def test_N5_the_last_step_of_an_epoch_divides_by_what_is_there(tmp_path: Path) -> None:
    """Accumulation of 4, one lane: step 2 of the epoch holds 3 of 4 microbatches. With lr=0 its loss is that of the
    initial weights, so it can be worked out alone."""
    texts = [f"document number {'x' * i}" for i in range(7)]
    size = ["batch.lanes=1", "batch.microbatches=4", "train.epochs=1", "optimizer.lr=0", "optimizer.weight_decay=0"]
    run, out = first_step(tmp_path, texts, 1, *DENSE, *size, "batch.sequence_length=32")
    last = reference(run, texts[4:])
    lines = records(out)
    assert [line["tokens"] for line in lines] == [sum(map(len, texts[:4])), sum(map(len, texts[4:]))]
    assert lines[1]["loss"] == pytest.approx(last.loss, rel=1e-6)
    assert lines[1]["grad_norm"] == pytest.approx(last.norm, rel=1e-5)


@pytest.mark.parametrize(("zero", "workers"), [(0, 1), (1, 2), (2, 2)])
def test_N7_every_microbatch_is_in_the_fp32_sum_of_a_bf16_model(tmp_path: Path, zero: int, workers: int) -> None:
    """The reference: each microbatch's bf16 gradient by plain autograd, added up in fp32."""
    texts = [f"text {'abcdefgh'[i] * (3 * i + 1)}" for i in range(8)]
    size = ["batch.lanes=2", "batch.microbatches=4", "train.precision=bf16", "batch.sequence_length=32"]
    run, out = first_step(tmp_path, texts, workers, *DENSE, *size, f"layout.zero={zero}")
    model = build(run.model)
    fill(model, run.train.seed)
    model.bfloat16()
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for text in texts:
        model.zero_grad()
        model(*window(text, 32)).loss_sum.backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad.float()
    tokens = sum(map(len, texts))
    found = gradients_of(run, out)
    assert_same_gradients(found, {name: g / tokens for name, g in sums.items()}, tolerance=1e-5)
    exact = reference(run, texts)
    assert_same_gradients(found, exact.gradients, tolerance=0.05)  # bf16 keeps 8 bits
    assert records(out)[0]["loss"] == pytest.approx(exact.loss, rel=0.01)


@pytest.mark.parametrize("workers", [1, 3])
def test_N8_the_recorded_loss_is_the_true_one(tmp_path: Path, workers: int) -> None:
    """Next-token loss alone, whatever else is differentiated (balance, further predictions), and on any layout."""
    texts = [f"sample {'y' * i}" for i in range(5)]
    run, out = first_step(tmp_path, texts, workers, *DEEPSEEK, "batch.lanes=5", "batch.sequence_length=32")
    [line] = records(out)
    assert line["loss"] == pytest.approx(reference(run, texts).loss, rel=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_N9_each_held_out_sample_counts_once(tmp_path: Path, workers: int) -> None:
    """Held-out windows in batches of 2, so that neither batches nor windows divide by the workers."""
    source = write_documents(
        tmp_path / "text.jsonl", [f"text {'abcdefghij'[i % 10] * (i % 19 + 1)}" for i in range(58)]
    )
    overrides = ["data.pack=document", "data.held_out=0.15", "batch.lanes=3", "batch.size=2", "eval.sequences=0"]
    run = settings(tmp_path, source, *DENSE, *overrides, "train.steps=1", "eval.every=1")
    assert train(run, tmp_path / "out", workers) == 0
    ids = np.fromfile(prepare(run.data) / "held.bin", "<u2").tolist()
    texts = [BYTES.decode(list(group)) for end, group in itertools.groupby(ids, BYTES.end.__eq__) if not end]
    assert len(texts) % 2 == 1, "the last batch is part padding"
    assert math.ceil(len(texts) / 2) % 3 != 0
    before = next(e for e in records(tmp_path / "out", "events") if e["event"] == "evaluated")
    right = reference(run, texts)
    assert (before["event"], before["step"], before["tokens"]) == ("evaluated", 0, right.tokens)
    assert before["loss"] == pytest.approx(right.loss, rel=1e-6)


def vote_on(rank: int, size: int) -> tuple[float, int, bool, list[list[int]]]:
    run = config.load(None, [*BASE, *DENSE, "batch.lanes=3", "model.vocab_size=257"])
    mesh = Mesh(World(rank, size, torch.device("cpu"), dist.group.WORLD), Layout())
    replica = Replica(run, build(run.model), mesh)
    ballot = Ballot(3, torch.device("cpu"))
    for lane in replica.reducer.mine:
        ballot.add(lane, torch.tensor(10.0 ** (lane + 1)), 2**lane, torch.tensor([[lane, 5]]))
    chunks = [torch.zeros(bucket.chunk) for bucket in replica.buckets]
    verdict, _ = replica.voter.vote(ballot, chunks, stop=rank == 1)
    return verdict.loss, verdict.tokens, verdict.stop, verdict.counts.tolist()


def test_N10_what_ranks_report_is_matched_by_what_it_is(tmp_path: Path) -> None:
    """Ranks with 1 and 2 lanes, one of which wants to stop: no figure slips into another's place."""
    for loss, tokens, stop, counts in on_ranks(2, vote_on):
        assert (loss, tokens, stop, counts) == (1110 / 7, 7, True, [[0 + 1 + 2, 15]])


def test_N10_every_line_names_the_same_metrics(tmp_path: Path) -> None:
    """On ranks that differ (lanes, padding, evaluations), in every step; what is said of a step holds for all ranks."""
    source = write_documents(tmp_path / "text.jsonl", [f"text {'z' * i}" for i in range(16)])
    overrides = [*DENSE, "data.pack=document", "train.epochs=2", "eval.every=2", "checkpoint.every=3"]
    names = []
    for workers in (1, 3):
        out = tmp_path / f"{workers}"
        assert train(settings(tmp_path, source, *overrides), out, workers) == 0
        names.append([sorted(k for k in line if not k.endswith("_s")) for line in records(out)])
        for line in records(out):
            timed = sum(v for k, v in line.items() if k.endswith("_s") and k != "tokens_per_s")
            assert timed > 0.9 * line["tokens"] / line["tokens_per_s"], "phases are all of a step's time"
    assert names[0] == names[1]
    assert all(line == names[0][0] for line in names[0])
    assert locate(tmp_path / "1").name == locate(tmp_path / "3").name
