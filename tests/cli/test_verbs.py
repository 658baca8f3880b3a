"""Every verb answers --help at once and --json in JSON; generate, eval, inspect and doctor say what is true."""

import hashlib
import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lanewise import config
from lanewise.checkpoint.locate import locate
from lanewise.cli.main import VERBS, main
from lanewise.generation import restore
from reference import BYTES, reference
from system import BASE, DEEPSEEK, DENSE, FAMILIES, records, sentences, settings, tensors, train, write_documents

COMMAND = [sys.executable, "-m", "lanewise.cli.main"]


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[config.Run, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    source = write_documents(folder / "text.jsonl", sentences(60))
    overrides = ["data.held_out=0.2", "batch.size=2", "eval.every=4", "eval.sequences=0", "train.steps=8"]
    run = settings(folder, source, *FAMILIES[request.param], *overrides)
    assert train(run, folder / "out", 2) == 0
    return run, folder / "out"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a verb prints with --json."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------- help and --json


@pytest.mark.parametrize("words", [[], *[[verb] for verb in VERBS]], ids=lambda words: " ".join(words) or "program")
def test_help_answers_at_once(words: list[str]) -> None:
    """In 0.3 s of processor time, best of three, so that a busy machine does not count."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*COMMAND, *words, "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < 0.3
    assert "example" in done.stdout
    assert "--json" in done.stdout or not words


def test_help_imports_nothing_heavy() -> None:
    for verb in VERBS:
        words = [sys.executable, "-X", "importtime", "-m", "lanewise.cli.main", verb, "--help"]
        imported = subprocess.run(words, capture_output=True, text=True, check=True).stderr
        modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in imported.splitlines()}
        assert not modules & {"torch", "numpy", "pyarrow", "tokenizers", "rich", "transformers"}, verb


def test_show_config_is_a_run_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "train.steps=7", "--show-config", "model.preset=tiny-dense"]) == 0
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out)
    run = config.load(file)
    assert (run.train.steps, run.model.preset, run.optimizer.lr) == (7, "tiny-dense", config.Optimizer().lr)
    assert main(["train", str(file), "--show-config"]) == 0
    assert capsys.readouterr().out == file.read_text()


def test_train_json(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "text.jsonl", sentences(30))
    words = [*BASE, *DENSE, f"data.source={source}", f"data.cache={tmp_path / 'cache'}", "eval.every=2"]
    command = [*COMMAND, "train", "--json", "--workers", "2", "--out", str(tmp_path / "out"), "train.steps=3", *words]
    done = subprocess.run([*command, "train.steps=3"], capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == records(tmp_path / "out")
    assert "held-out loss" in done.stderr


# ---------------------------------------------------------------------------------------------------------- inspect


def test_inspect(trained: tuple[config.Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, out = trained
    facts = answer(capsys, "inspect", str(out))
    weights = tensors(out, "model/")
    assert (facts["step"], facts["updates"], facts["skipped"]) == (8, 8, 0)
    assert facts["parameters"] == sum(w.numel() for w in weights.values())
    assert facts["tokens"] == sum(line["tokens"] for line in records(out))
    assert facts["layout"] == "2 replicas, ZeRO 1"
    assert facts["health"] == "1 checkpoint, every byte verified"
    digest = hashlib.sha256()
    for name in sorted(weights):
        shape = ",".join(map(str, weights[name].shape))
        digest.update(f"{name}\0float32\0{shape}\0".encode() + weights[name].numpy().tobytes())
    assert facts["weights"] == digest.hexdigest()
    assert answer(capsys, "inspect", str(locate(out))) == facts, "the checkpoint itself"
    assert main(["inspect", str(out)]) == 0
    assert f"weights: {facts['weights']}\n" in capsys.readouterr().out


def test_inspect_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- eval


def test_eval_is_the_trainers_own_last_evaluation(
    trained: tuple[config.Run, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = trained
    first, *_, last = [event for event in records(out, "events") if event["event"] == "evaluated"]
    facts = answer(capsys, "eval", str(out))
    assert last["step"] == 8
    assert (facts["loss"], facts["tokens"]) == (last["loss"], last["tokens"]), "to the last digit"
    assert facts["loss"] < first["loss"], "and it learned something"
    fewer = answer(capsys, "eval", str(out), "--sequences", "3")
    assert 0 < fewer["tokens"] < facts["tokens"]


def test_eval_of_another_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Untrained weights (lr=0) on documents that fit a window: the reference's loss."""
    source = write_documents(tmp_path / "text.jsonl", sentences(30))
    still = ["train.steps=1", "optimizer.lr=0", "data.pack=document", "data.held_out=0"]
    run = settings(tmp_path, source, *DEEPSEEK, *still)
    assert train(run, tmp_path / "out") == 0
    texts = ["one text", "and another one", "three"]
    other = write_documents(tmp_path / "other.jsonl", texts)
    facts = answer(capsys, "eval", str(tmp_path / "out"), "--source", str(other))
    right = reference(run, texts)
    assert facts["tokens"] == right.tokens
    assert facts["loss"] == pytest.approx(right.loss, rel=1e-6)
    assert main(["eval", str(tmp_path / "out")]) == 2, "this run holds nothing out"
    assert "data.held_out above 0, or name some with --source" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- generate


def test_generate_greedily(trained: tuple[config.Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, out = trained
    prompt = "the cat"
    facts = answer(capsys, "generate", str(out), "--prompt", prompt, "--tokens", "40", "--temperature", "0")
    model, _ = restore(locate(out))
    ids = list(BYTES.encode(prompt))
    with torch.no_grad():
        for _ in range(40):
            best = int(model.logits(torch.tensor([ids[-32:]]))[0, -1].argmax())
            if best == BYTES.end:
                break
            ids.append(best)
    assert facts["text"] == BYTES.decode(ids[len(prompt) :])
    assert facts["tokens"] == len(ids) - len(prompt)
    only = answer(capsys, "generate", str(out), "--prompt", prompt, "--tokens", "40", "--top-k", "1", "--seed", "5")
    assert only["text"] == facts["text"], "among one there is no choice"


def test_generate_draws_by_seed(trained: tuple[config.Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, out = trained
    words = ["generate", str(out), "--prompt", "on", "--tokens", "30", "--temperature", "1.5"]
    drawn = [answer(capsys, *words, "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert main([*words, "--seed", "1"]) == 0
    assert capsys.readouterr().out == f"on{drawn[0]}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--prompt", ""], "prompt is empty"), (["--tokens", "0"], "at least 1"), (["--temperature", "-1"], "at least 0")],
)
def test_generate_refuses(
    trained: tuple[config.Run, Path], capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["generate", str(trained[1]), *words]) == 2
    assert told in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- doctor


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    findings = {finding["what"]: finding for finding in answer(capsys, "doctor", "--cache", str(tmp_path))}
    assert findings["torch"]["found"] == torch.__version__
    assert findings["gloo"]["verdict"] == "ok"
    assert math.isfinite(float(findings["free memory"]["found"].removesuffix(" GB")))
    assert main(["doctor", "--cache", "/proc/lanewise"]) == 1, "tokens cannot be kept there"
    printed = capsys.readouterr().out
    assert "MISSING cache folder: /proc/lanewise" in printed
    assert "make it writable, or choose another" in printed
