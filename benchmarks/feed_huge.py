"""A shard set of 10^12 samples in 100,000 shards, for `feed.py`: one sparse file under 100,000 names."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

SHARDS, SAMPLES, T = 100_000, 10**12, 8


def make(folder: Path) -> None:
    from lanewise.data import tokenizer
    from lanewise.data.shard_writer import INDEX, Batch
    from lanewise.data.shards import FORMAT, PER_TASK, shard_name
    from lanewise.data.store import SIDES

    folder.mkdir()
    words = tokenizer.train([], 257)
    words.save(folder)
    tokens = SAMPLES // SHARDS * T
    with open(folder / "zeros", "wb") as file:
        file.truncate(2 * tokens)
    files, totals = {}, {}
    for side in SIDES:
        count = SHARDS if side == "train" else 0
        empty = Batch(shard=0, documents=1, tokens=tokens, tokens_at=0, learned_at=0, xxh3=0)
        rows = [empty._replace(shard=i * PER_TASK) for i in range(count)]
        index = np.array(rows, np.int64).reshape(-1, len(INDEX))
        table = pa.table([pa.array(column) for column in index.T], INDEX)
        starts = pa.table({"start": pa.array(np.arange(count + 1) * tokens)})
        for name, content in ((f"{side}.index.arrow", table), (f"{side}.starts.arrow", starts)):
            with pa.ipc.new_file(str(folder / name), content.schema) as writer:
                writer.write_table(content, max_chunksize=max(1, len(content)))
        totals[side] = count
        for i in range(count):
            os.symlink("zeros", folder / shard_name(side, i, 0))
    for name in [*tokenizer.FILES, *(f"{s}.{k}.arrow" for s in SIDES for k in ("index", "starts"))]:
        raw = (folder / name).read_bytes()
        files[name] = {"bytes": len(raw), "xxh3": xxhash.xxh3_128_hexdigest(raw)}
    manifest = {
        "format": FORMAT,
        "plan": "",
        "documents": totals,
        "tokens": {side: count * tokens for side, count in totals.items()},
        "learned": False,
        "vocab_size": 257,
        "end_of_text": words.end,
        "dtype": "<u2",
        "shards": {},
        "shard_count": SHARDS,
        "largest_shard": 2 * tokens,
        "files": files,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def read(folder: Path) -> None:
    began = time.perf_counter()
    from lanewise import config
    from lanewise.data.dataset import Dataset
    from lanewise.data.prepare import prepare

    imported = time.perf_counter()
    data = config.Data(source=str(folder), cache=str(folder / "cache"), check=False)
    dataset = Dataset(prepare(data), data, config.Batch(lanes=8, sequence_length=T), seed=0)
    slot = dataset.slot(10**9 // 8 + 1, 0, 0)
    done = time.perf_counter()
    print(
        f"first batch at sample 10^9 of {dataset.windows:.1e} in {SHARDS:,} shards: {done - imported:.2f} s "
        f"after {imported - began:.2f} s of imports (goal: 1 s); it is {slot.samples[0]}"
    )


if __name__ == "__main__":
    {"make": make, "read": read}[sys.argv[2]](Path(sys.argv[1]))
