"""Whole runs for the tests: tiny models on a small text, through the real launcher, and what they leave behind."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from faulty_worker import Fault, FaultyJob
from lanewise import config
from lanewise.checkpoint.locate import locate
from lanewise.checkpoint.stored import Stored
from lanewise.checkpoint.weights_hash import weights_hash
from lanewise.data.prepare import prepare
from lanewise.data.store import read_meta
from lanewise.elastic import launcher
from lanewise.job import Job
from lanewise.runfolder import open_run

DENSE = (
    "model.preset=tiny-dense model.layers=2 model.hidden=32 model.heads=2 model.kv_heads=1 model.ffn_hidden=48"
).split()
DEEPSEEK = (
    "model.layers=2 model.hidden=32 model.heads=2 model.ffn_hidden=48 model.q_lora_rank=16 model.kv_lora_rank=16 "
    "model.qk_nope_head_dim=8 model.qk_rope_head_dim=4 model.v_head_dim=8 model.experts=4 model.expert_hidden=16"
).split()
FAMILIES = {"dense": DENSE, "deepseek": DEEPSEEK}
BASE = (
    "data.tokenizer=bytes batch.lanes=8 batch.size=1 batch.sequence_length=32 train.steps=6 optimizer.lr=0.01 "
    "schedule.warmup=2 checkpoint.every=0 eval.every=0"
).split()


def write_documents(path: Path, documents: Sequence[str]) -> Path:
    """A JSONL file, a document a row: with data.pack=document each is a window of its own if it is short enough."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


def sentences(count: int, seed: int = 0) -> list[str]:
    """Documents of uneven length, from 5 to about 100 bytes."""
    words = "the cat sat on a mat while rain fell over an old town and no bird sang".split()
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(2, 22))) for _ in range(count)]


def settings(folder: Path, source: Path, *overrides: str) -> config.Run:
    """The run of BASE with `overrides` on top; its tokens are kept in `folder`/cache."""
    run = config.load(None, [*BASE, f"data.source={source}", f"data.cache={folder / 'cache'}", *overrides])
    return config.with_vocabulary(run, read_meta(prepare(run.data))["vocab_size"])


def job(run: config.Run, out: Path, **options: Any) -> Job:
    return Job(run, prepare(run.data), out, **{"display": "none", **options})


def launched(given: Job, workers: int) -> int:
    """What `lanewise train` does once it knows what to do; the exit code."""
    with open_run(given.run, given.out, given.resume, given.data):
        return launcher.launch(given, workers)


def train(run: config.Run, out: Path, workers: int = 1, **options: Any) -> int:
    """Run it, or go on with it; the exit code. `options`: resume, until."""
    return launched(job(run, out, **options), workers)


def train_with(fault: Fault, run: config.Run, out: Path, workers: int, log: Path | None = None, **options: Any) -> int:
    """`train` with a fault in the workers. With `log` they print there, as they would off a terminal."""
    made = job(run, out, **{"display": "auto" if log else "none", **options})
    launcher.warm_up()  # with the real worker's imports
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "WORKER", "faulty_worker")
        return launched(FaultyJob(**vars(made), fault=fault, log=log), workers)


def records(out: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def tensors(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Full tensors of a run's newest checkpoint (or of one checkpoint) by name, `prefix` taken off."""
    return dict(Stored(locate(path)).tensors(prefix))


def hashes(path: Path) -> dict[str, Any]:
    """Of what the newest checkpoint holds: weights, the optimizer's moments, the experts' biases."""
    stored = Stored(locate(path))
    kinds = ("model/", "exp_avg/", "exp_avg_sq/", "buffer/")
    return {"step": stored.manifest.step, **{kind: weights_hash(stored.tensors(kind)) for kind in kinds}}


def bits(out: Path) -> dict[str, Any]:
    """Everything that must not depend on the layout, to the last bit: what each step printed and read, and `hashes`."""
    timed = ("time", "tokens_per_s", "data_wait_share")
    metrics = [{k: v for k, v in r.items() if k not in timed and not k.endswith("_s")} for r in records(out)]
    assert [r["step"] for r in metrics] == list(range(1, len(metrics) + 1)), "one line a step, in order"
    samples = records(out, "samples") if (out / "samples.jsonl").exists() else None
    return {"metrics": metrics, "samples": samples, **hashes(out)}
