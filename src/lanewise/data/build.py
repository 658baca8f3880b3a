"""One pass from documents to a folder of tokens: tokenizer, encoding, held-out split, counts."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from lanewise import config
from lanewise.data import sources, store, tokenizer
from lanewise.data.encode import Encoding, policy
from lanewise.data.formats.base import Document
from lanewise.data.text import pieces
from lanewise.errors import UserError

SAMPLE = 4_000_000  # bytes a BPE is trained on: on Python's library ten times as many save 1% of the tokens
NOTED = ("empty", "skipped", "replaced", "filtered", "duplicates")  # what may become of a document besides tokens


class NoText(UserError):
    """A source has no document with a token in it."""


def write(files: list[sources.File], data: config.Data, folder: Path, progress: Callable[[str], None]) -> None:
    """Fills and seals an empty folder."""
    progress(f"reading {len(files):,} files, {sum(file.size for file in files) / 1e6:,.1f} MB")
    words = make_tokenizer(files, data, progress)
    words.save(folder)
    encoding = Encoding(data, words)
    dtype = encoding.dtype
    counts: Counter[str] = Counter()
    sides = {side: store.Writer(folder, side, dtype, words.end) for side in store.SIDES}
    told = time.monotonic()
    try:
        encoded = encoding([(file, None) for file in files], counts)
        for (_, side), parts in groupby(encoded, key=lambda piece: (piece.document, piece.side)):
            for piece in parts:
                sides[side].add(piece.tokens, piece.learned)
                if time.monotonic() > told + 5:
                    told = time.monotonic()
                    progress(f"{sum(writer.tokens for writer in sides.values()):,} tokens so far")
            counts["empty"] += not sides[side].close_document()
    finally:
        for writer in sides.values():
            writer.close()
    if any(writer.learned for writer in sides.values()):
        for writer in sides.values():
            writer.learn()
    documents = sum(writer.documents for writer in sides.values())
    if not documents:
        raise NoText(
            f"data.source: no text in {data.source} ({len(files)} files, {counts['empty']} documents empty, "
            f"{counts['skipped']} skipped as not UTF-8); choose another source, or set data.errors=replace"
        )
    is_tail = _balance(folder, data.held_out, dtype.str)

    bounds = {side: store.starts(folder, side) for side in store.SIDES}
    tokens = {side: int(starts[-1]) for side, starts in bounds.items()}
    meta: dict[str, Any] = {
        "format": store.FORMAT,
        "source": data.source,
        "files_read": len(files),
        "documents": {side: len(starts) - 1 for side, starts in bounds.items()},
        "tokens": tokens,
        **{kind: counts[kind] for kind in NOTED},
        "held_out_is_tail": is_tail,
        "learned": any(writer.learned for writer in sides.values()),
        "vocab_size": words.vocab_size,
        "end_of_text": words.end,
        "dtype": dtype.str,
    }
    kinds = (".bin", ".starts", *[".learned"] * meta["learned"])
    meta["identity"] = {
        "tokenizer": store.digest(folder / tokenizer.FILES[0]),
        **{side: store.digest(*(folder / f"{side}{kind}" for kind in kinds)) for side in store.SIDES},
    }
    names = [*tokenizer.FILES, *(f"{side}{kind}" for side in store.SIDES for kind in kinds)]
    store.seal(folder, meta, names)
    progress(", ".join([f"{documents:,} documents, {sum(tokens.values()):,} tokens", *notes(counts)]))


def write_tokenizer(
    files: list[sources.File], data: config.Data, folder: Path, progress: Callable[[str], None]
) -> None:
    """Fills and seals an empty folder with nothing but the tokenizer of all these files."""
    make_tokenizer(files, data, progress).save(folder)
    store.seal(folder, {"format": store.FORMAT}, tokenizer.FILES)


def notes(counts: Counter[str]) -> list[str]:
    """What became of the documents that were not simply taken."""
    return [f"{counts[kind]:,} {kind}" for kind in NOTED if counts[kind]]


def make_tokenizer(
    files: list[sources.File], data: config.Data, progress: Callable[[str], None]
) -> tokenizer.Tokenizer:
    if data.tokenizer == "bytes":
        return tokenizer.train([], 257)
    if data.tokenizer == "ids":
        return tokenizer.ids(data.vocab_size)
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
            for document in sources.documents(file, data.text_field):
                for text in _texts(document, data):
                    yield text
                    taken += len(text)
                    if taken >= after:
                        break
                if taken >= after:
                    break
        due = after


def _texts(document: Document, data: config.Data) -> Iterator[str]:
    if document.tokens is not None:
        raise UserError(
            f"{document.where}: holds token ids; set data.tokenizer to the tokenizer they are of, or to 'ids' with "
            "data.vocab_size"
        )
    if document.turns is not None:
        return (str(turn.get("content") or "") for turn in document.turns)
    return pieces(document, policy(data), Counter())


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
