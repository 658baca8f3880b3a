"""Looking into a shard set: samples, lengths, sources, and whether it is what was written."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from lanewise.data.shards import Damage, ShardSet, ShardTokens
from lanewise.data.store import SIDES, Side

MOST_READ = 256  # record batches whose sources are counted


def show(address: str, side: Side, count: int, first: int | None = None) -> dict[str, Any]:
    """Counts, lengths and sources of a set, and `count` of its documents decoded, spread evenly or from `first` on."""
    shards = ShardSet(address)
    tokens = shards.side(side)
    lengths = np.diff(tokens.starts)
    marks = (0, 10, 50, 90, 99, 100)
    taken = min(count, tokens.documents)
    if first is None:
        numbers = [i * tokens.documents // taken for i in range(taken)]
    else:
        numbers = list(range(first, min(first + taken, tokens.documents)))
    manifest = shards.manifest
    return {
        "address": shards.store.identity,
        **{
            key: manifest[key]
            for key in ("documents", "tokens", "shard_count", "vocab_size", "dtype", "learned", "notes")
        },
        "lengths": {f"p{mark}": int(np.percentile(lengths, mark)) for mark in marks} if len(lengths) else {},
        "sources": _sources(tokens),
        "samples": [_sample(tokens, number) for number in numbers],
    }


def _sample(tokens: ShardTokens, number: int) -> dict[str, Any]:
    batch = int(tokens.first_document.searchsorted(number, side="right")) - 1
    row = tokens.rows(batch).slice(number - int(tokens.first_document[batch]), 1).to_pylist()[0]
    return {
        "document": number,
        "id": row["id"],
        "source": row["source"],
        "tokens": len(row["tokens"]),
        "text": tokens.set.tokenizer.decode(row["tokens"]),
    }


def _sources(tokens: ShardTokens) -> dict[str, int]:
    """Documents by source, counted in record batches spread over the set: all of them in a small one."""
    found: dict[str, int] = {}
    taken = min(MOST_READ, len(tokens))
    for batch in (i * len(tokens) // taken for i in range(taken)):
        for entry in tokens.rows(batch)["source"].value_counts().to_pylist():
            found[entry["values"]] = found.get(entry["values"], 0) + entry["counts"]
    return dict(sorted(found.items(), key=lambda entry: -entry[1])[:20])


def verify(address: str) -> Iterator[str]:
    """Each thing that is wrong with a set. Raises UserError if there is no set at all."""
    shards = ShardSet(address)
    there = set(shards.store.list())
    for name, known in shards.manifest["files"].items():
        if name not in there:
            yield f"{shards.store.identity}/{name} is missing"
        elif not shards.is_whole(name, known):
            yield f"{shards.store.identity}/{name} is not what was written"
    for side in SIDES:
        try:
            tokens = shards.side(side)
            starts = tokens.starts
        except (Damage, pa.ArrowException):
            continue  # told above
        for batch in range(len(tokens)):
            try:
                tokens.verify(batch)
            except Damage as damage:
                yield str(damage)
        if int(starts[-1]) != tokens.total or len(starts) != tokens.documents + 1:
            yield f"{shards.store.identity}: the {side} index and starts disagree"
