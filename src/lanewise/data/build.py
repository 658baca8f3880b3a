"""One pass from documents to a folder of tokens: tokenizer, encoding, held-out split, counts."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from lanewise import config
from lanewise.data import sources, store, tokenizer
from lanewise.data.text import Errors, pieces
from lanewise.errors import UserError

SAMPLE = 4_000_000  # bytes a BPE is trained on: on Python's library ten times as many save 1% of the tokens
BATCH = 2**20  # characters encoded at once


class Piece(NamedTuple):
    document: int  # counted over the whole source
    side: store.Side
    text: str


def trains(data: config.Data) -> bool:
    """Whether the tokenizer is made here ('bpe', 'bytes') rather than read from a file."""
    return data.tokenizer in ("bpe", "bytes")


def policy(data: config.Data) -> Errors:
    """Python's library has a few files in other encodings on purpose: no fault of the user, so left out and counted."""
    return "skip" if (data.source, data.errors) == ("python", "error") else data.errors


def write(files: list[sources.File], data: config.Data, folder: Path, progress: Callable[[str], None]) -> None:
    """Fills and seals an empty folder."""
    progress(f"reading {len(files):,} files, {sum(file.size for file in files) / 1e6:,.1f} MB")
    words = _tokenizer(files, data, progress)
    words.save(folder)
    dtype = np.dtype("<u2" if words.vocab_size <= 2**16 else "<u4")
    encode = tokenizer.encoder(words, "H" if dtype.itemsize == 2 else "I", trains(data))
    counts: Counter[str] = Counter()
    sides = {side: store.Writer(folder, side, dtype, words.end) for side in store.SIDES}
    told = time.monotonic()
    try:
        encoded = _encoded(_pieces(files, data, counts), encode)
        for (_, side), parts in groupby(encoded, key=lambda part: part[0][:2]):
            for _, encoded_piece in parts:
                sides[side].add(encoded_piece)
                if time.monotonic() > told + 5:
                    told = time.monotonic()
                    progress(f"{sum(writer.tokens for writer in sides.values()):,} tokens so far")
            counts["empty"] += not sides[side].close_document()
    finally:
        for writer in sides.values():
            writer.close()
    documents = sum(writer.documents for writer in sides.values())
    if not documents:
        raise UserError(
            f"data.source: no text in {data.source} ({len(files)} files, {counts['empty']} documents empty, "
            f"{counts['skipped']} skipped as not UTF-8); choose another source, or set data.errors=replace"
        )
    is_tail = _balance(folder, data.held_out, dtype.str)

    bounds = {side: store.starts(folder, side) for side in store.SIDES}
    tokens = {side: int(starts[-1]) for side, starts in bounds.items()}
    meta = {
        "format": store.FORMAT,
        "source": data.source,
        "files_read": len(files),
        "documents": {side: len(starts) - 1 for side, starts in bounds.items()},
        "tokens": tokens,
        **{kind: counts[kind] for kind in ("empty", "skipped", "replaced")},
        "held_out_is_tail": is_tail,
        "vocab_size": words.vocab_size,
        "end_of_text": words.end,
        "dtype": dtype.str,
    }
    store.seal(folder, meta)
    notes = [f"{counts[kind]:,} {kind}" for kind in ("empty", "skipped", "replaced") if counts[kind]]
    progress(", ".join([f"{documents:,} documents, {sum(tokens.values()):,} tokens", *notes]))


def _tokenizer(files: list[sources.File], data: config.Data, progress: Callable[[str], None]) -> tokenizer.Tokenizer:
    if data.tokenizer == "bytes":
        return tokenizer.train([], 257)
    if data.tokenizer != "bpe":
        return tokenizer.load(data.tokenizer)
    progress(f"training a tokenizer of {data.vocab_size:,} entries")
    return tokenizer.train(_sample(files, data), data.vocab_size)


def _sample(files: list[sources.File], data: config.Data) -> Iterator[str]:
    """About SAMPLE bytes spread evenly over the files; one that is not taken is not even opened."""
    share = min(1.0, SAMPLE / max(1, sum(file.size for file in files)))
    due, taken = 0.0, 0
    for file in files:
        after = due + share * file.size
        if taken <= due:
            for piece in _pieces([file], data, Counter()):
                yield piece.text
                taken += len(piece.text)
                if taken >= after:
                    break
        due = after


def _pieces(files: list[sources.File], data: config.Data, counts: Counter[str]) -> Iterator[Piece]:
    """Every document of every file. Its side hangs on its content alone (the first piece), not on its place."""
    number = 0
    for file in files:
        for document in sources.documents(file, data.text_field):
            side: store.Side | None = None
            skipped = counts["skipped"]
            for text in pieces(document, policy(data), counts):
                if side is None:
                    side = "held" if xxhash.xxh3_64_intdigest(text.encode()) < data.held_out * 2**64 else "train"
                yield Piece(number, side, text)
            counts["empty"] += side is None and counts["skipped"] == skipped
            number += 1


def _encoded(found: Iterator[Piece], encode: tokenizer.Encoder) -> Iterator[tuple[Piece, bytes]]:
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.text) + 256  # a piece takes room itself
        if size >= BATCH:
            yield from zip(batch, encode([p.text for p in batch]), strict=True)
            batch, size = [], 0
    yield from zip(batch, encode([p.text for p in batch]), strict=True)


def _balance(folder: Path, held_out: float, dtype: str) -> bool:
    """Gives a side without a document one of the other's: the one whose length comes nearest to the share asked for.

    A lone document is cut instead, its tail held out; True then.
    """
    lengths = {side: np.diff(store.starts(folder, side)) for side in store.SIDES}
    if held_out == 0 or all(len(lengths[side]) for side in store.SIDES):
        return False
    source, target = store.SIDES if len(lengths["train"]) else store.SIDES[::-1]
    total = int(lengths[source].sum())
    if len(lengths[source]) > 1:
        share = held_out if target == "held" else 1 - held_out
        nearest = int(np.abs(lengths[source] - share * total).argmin())
        store.move(folder, source, nearest, int(lengths[source][nearest]), dtype)
        return False
    if source == "held":
        store.move(folder, "held", 0, total, dtype)
    tail = max(2, round(total * held_out))
    if total - tail < 2:
        raise UserError(
            f"data.source: one document of {total} tokens is too short to hold any of it out; "
            "add documents, or set data.held_out=0"
        )
    store.move(folder, "train", 0, tail, dtype)
    return True
