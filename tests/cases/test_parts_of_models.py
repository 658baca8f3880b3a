"""Faults of parts that are frozen or not always used, dropout and expert balance in the trainer (rows A12 to A15)."""

import json
from pathlib import Path

import pytest
import torch

from lanewise import config
from lanewise.cli.main import main
from lanewise.config import with_vocabulary
from lanewise.lanes.keys import slot_key
from lanewise.models.build import build
from lanewise.models.init import initial
from reference import Reference, assert_same_gradients, gradients_of, reference
from system import DEEPSEEK, DENSE, hashes, records, sentences, settings, tensors, train, write_documents

ONE_STEP = "train.steps=1 optimizer.clip=0 data.pack=document data.shuffle=false data.held_out=0".split()


def first_step(folder: Path, texts: list[str], workers: int, *overrides: str) -> tuple[config.Run, Path]:
    run = settings(folder, write_documents(folder / "text.jsonl", texts), *ONE_STEP, *overrides)
    out = folder / f"out-{workers}"
    assert train(run, out, workers) == 0
    return run, out


def test_A12_frozen_parameters_are_saved_and_restored_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_documents(tmp_path / "text.jsonl", sentences(16))
    freeze = ["train.freeze=['layers.0.*','embed.weight']", "train.steps=3"]
    run = settings(tmp_path, source, *DENSE, *freeze, "batch.lanes=2")
    assert train(run, tmp_path / "one") == 0
    assert train(run, tmp_path / "two", 2, until=1) == 0
    assert train(run, tmp_path / "two", 1) == 0
    assert hashes(tmp_path / "two") == hashes(tmp_path / "one")
    weights = tensors(tmp_path / "one", "model/")
    fixed = {name for name in weights if name.startswith("layers.0.") or name == "embed.weight"}
    assert weights.keys() - tensors(tmp_path / "one", "exp_avg/").keys() == fixed
    for spec in build(with_vocabulary(run, len(weights["embed.weight"])).model).table():
        assert torch.equal(weights[spec.name], initial(spec, run.train.seed)) == (spec.name in fixed), spec.name
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "one"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frozen"] == sum(weights[name].numel() for name in fixed)


def test_A12_a_pattern_that_matches_nothing_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_documents(tmp_path / "text.jsonl", sentences(16))
    assert train(settings(tmp_path, source, *DENSE, "train.freeze=['layer.0.*']"), tmp_path / "out") == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if "freeze" in line]
    assert "'layer.0.*'" in line
    assert "layers.0." in line


@pytest.mark.parametrize(("workers", "zero"), [(1, 1), (3, 1), (2, 2)])
def test_A13_an_expert_that_no_token_reaches_has_a_zero_gradient(tmp_path: Path, workers: int, zero: int) -> None:
    """Some of the experts are used on one rank only, some on none: no hang, and the gradients of one process."""
    texts = ["ab cd", "on", "to ef"]
    size = ["batch.lanes=3", "model.experts=32", "model.expert_groups=1", "model.mtp_layers=0", f"layout.zero={zero}"]
    run, out = first_step(tmp_path, texts, workers, *DEEPSEEK, *size)
    right = reference(run, texts)
    [load] = right.loads.values()
    each = [reference(run, [text]).loads["layers.1.ffn.router"] for text in texts]
    assert (load == 0).any()
    assert any(((one > 0) & (load == one)).any() for one in each), "an expert that only one rank uses"
    found = gradients_of(run, out)
    assert_same_gradients(found, right.gradients)
    for name in ("gate", "up", "down"):
        assert (found[f"layers.1.ffn.experts.{name}"][load == 0] == 0).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_A14_each_slot_drops_by_its_own_mask(tmp_path: Path, workers: int) -> None:
    """The same document in every slot: the masks, and so the losses, differ by slot and are those of its key."""
    texts = ["the same words in every slot"] * 4
    size = ["batch.lanes=2", "batch.microbatches=2", "model.dropout=0.5"]
    run, out = first_step(tmp_path, texts, workers, *DENSE, *size)
    keys = [slot_key(run.train.seed, 1, lane, k) for lane in (0, 1) for k in (0, 1)]
    right = reference(run, texts, keys)
    assert len({total for total, _ in right.sums}) == 4, "four different masks"
    assert records(out)[0]["loss"] == pytest.approx(right.loss, rel=1e-5)
    assert_same_gradients(gradients_of(run, out), right.gradients)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_A15_the_balance_bias_moves_by_the_counts_of_the_whole_step(tmp_path: Path, workers: int) -> None:
    """Over microbatches and replicas, in every layer with experts, the prediction layers included."""
    texts = [f"document {'pqrstu'[i] * (2 * i + 1)}" for i in range(6)]
    size = ["batch.lanes=3", "batch.microbatches=2", "model.layers=3", "model.bias_speed=0.001"]
    run, out = first_step(tmp_path, texts, workers, *DEEPSEEK, *size)
    right = reference(run, texts)
    assert [sum(load.tolist()) for load in right.loads.values()] == [2 * n for n in predicted(right, texts)]
    biases = tensors(out, "buffer/")
    assert biases.keys() == {f"{name}.expert_bias" for name in right.loads}
    for name, load in right.loads.items():
        below = torch.sign(load.double().mean() - load)
        assert len(below.unique()) > 1
        torch.testing.assert_close(biases[f"{name}.expert_bias"], 0.001 * below.float(), rtol=0, atol=1e-9)


def predicted(right: Reference, texts: list[str]) -> list[int]:
    """Tokens that count in each layer with experts: two layers, then one prediction layer."""
    return [right.tokens, right.tokens, right.tokens - len(texts)]
