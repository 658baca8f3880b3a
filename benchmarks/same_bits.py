"""The guarantee, in full: every number of workers and ZeRO stage against one worker, for both model families, both
precisions, with and without accumulation; dropout on, documents of uneven length, a last step that is part padding.

    python benchmarks/same_bits.py            all of it: 144 runs, some minutes
    python benchmarks/same_bits.py dense bf16 only the rows that match these words

Prints a table with the SHA-256 of everything a run must agree on, and exits 1 on any difference.
"""

import hashlib
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from lanewise import config
from lanewise.checkpoint.locate import locate
from lanewise.checkpoint.stored import Stored
from lanewise.checkpoint.weights_hash import weights_hash
from lanewise.data.prepare import prepare
from lanewise.data.store import read_meta
from lanewise.elastic.launcher import launch
from lanewise.job import Job

WORKERS = (1, 2, 3, 4, 5, 8)
ZERO = (0, 1, 2)
COMMON = (
    "model.layers=2 model.hidden=64 model.heads=2 model.ffn_hidden=96 model.dropout=0.1 data.tokenizer=bytes "
    "data.pack=document batch.lanes=8 batch.size=2 batch.sequence_length=64 train.epochs=1 optimizer.lr=0.01 "
    "schedule.warmup=2 layout.bucket_mb=0.1 checkpoint.every=0 eval.every=3"
).split()
FAMILIES = {
    "dense": "model.preset=tiny-dense model.kv_heads=1 model.tie_embeddings=true".split(),
    "deepseek": (
        "model.preset=tiny model.q_lora_rank=32 model.kv_lora_rank=32 model.qk_nope_head_dim=16 "
        "model.qk_rope_head_dim=8 model.v_head_dim=16 model.experts=8 model.expert_hidden=24"
    ).split(),
}


def main() -> int:
    words = set(sys.argv[1:])
    differences = 0
    print(f"{'family':9} {'precision':9} {'microbatches':>12} {'workers':>7} {'ZeRO':>4} {'seconds':>7}  bits")
    with tempfile.TemporaryDirectory() as folder:
        for case in itertools.product(FAMILIES, ("fp32", "bf16"), (1, 2)):
            if not words <= set(map(str, case)):
                continue
            expected = None
            for workers, zero in itertools.product(WORKERS, ZERO):
                started = time.perf_counter()
                found = bits(Path(folder), *case, workers, zero)
                expected = expected or found
                verdict = "" if found == expected else "  DIFFERENT"
                differences += found != expected
                family, precision, microbatches = case
                row = f"{family:9} {precision:9} {microbatches:12} {workers:7} {zero:4}"
                print(f"{row} {time.perf_counter() - started:7.1f}  {found[:16]}{verdict}", flush=True)
    print(f"{differences} differences" if differences else "the same bits everywhere")
    return int(differences > 0)


def bits(folder: Path, family: str, precision: str, microbatches: int, workers: int, zero: int) -> str:
    """SHA-256 over each step's loss, gradient norm, rate and tokens, every evaluation, and all that is stored."""
    source = documents(folder / f"text-{microbatches}.jsonl", 60 * microbatches)
    overrides = [
        *FAMILIES[family],
        *COMMON,
        f"data.source={source}",
        f"data.cache={folder / 'cache'}",
        f"train.precision={precision}",
        f"batch.microbatches={microbatches}",
        f"layout.zero={zero}",
    ]
    run = config.load(None, overrides)
    data = prepare(run.data)
    run = config.with_vocabulary(run, read_meta(data)["vocab_size"])
    out = folder / f"{family}-{precision}-{microbatches}-{workers}-{zero}"
    code = launch(Job(run, data, out, display="none"), workers)
    assert code == 0, code

    digest = hashlib.sha256()
    for name, keys in (
        ("metrics", ("step", "loss", "grad_norm", "lr", "tokens")),
        ("events", ("step", "loss", "tokens")),
    ):
        for line in (out / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record.get("event", "evaluated") == "evaluated":  # the others tell of processes
                digest.update(repr([record[key] for key in keys]).encode())
    stored = Stored(locate(out))
    for kind in ("model/", "exp_avg/", "exp_avg_sq/", "buffer/"):
        digest.update(weights_hash(stored.tensors(kind)).encode())
    return digest.hexdigest()


def documents(path: Path, count: int) -> Path:
    """Rows of 5 to 150 bytes: as windows of 64 predictions, most of them part padding."""
    draw = random.Random(0)
    words = "the cat sat on a mat while rain fell over an old town and no bird sang".split()
    texts = [" ".join(draw.choices(words, k=draw.randint(2, 32))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
