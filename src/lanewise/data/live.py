"""Training on a stream: what has been sealed (see `streams`) is read in the order in which it came, once.

Sequence p of a run is row p of the sealed segments, whose rows are sequences already: they are cut when they are
sealed. So a run that resumes reads what it would have, and finds its place without counting.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lanewise import config
from lanewise.data import build, store, tokenizer
from lanewise.data.dataset import Slot
from lanewise.data.stores import configure, open_store
from lanewise.data.streams import Sealed, Stream, open_stream
from lanewise.data.streams.open import GROWS, KAFKA
from lanewise.data.transform import named
from lanewise.data.windows import IGNORED
from lanewise.errors import UserError

HELD = 8  # segments in memory


def is_stream(source: str) -> bool:
    return source.startswith((KAFKA, GROWS))


def words_of(data: config.Data) -> tokenizer.Tokenizer:
    """The tokenizer of a stream. Raises UserError for settings that need all of the data, which a stream never has."""
    for what, asked in (
        (
            "data.tokenizer=bpe cannot be trained on a stream: give a tokenizer.json, or 'bytes'",
            data.tokenizer == "bpe",
        ),
        (
            "data.tokenizer=ids: messages of a stream are text: give a tokenizer.json, or 'bytes'",
            data.tokenizer == "ids",
        ),
        ("data.pack: a stream is packed as 'stream' or 'document'", data.pack not in ("stream", "document")),
        ("data.dedup: duplicates are not looked for in a stream: leave it 'none'", data.dedup != "none"),
        ("data.exhausted: a stream has no end: leave it 'repeat', and set train.steps", data.exhausted == "stop"),
    ):
        if asked:
            raise UserError(what)
    return build.make_tokenizer([], data, lambda text: None)


def describe(data: config.Data, words: tokenizer.Tokenizer) -> dict[str, Any]:
    """The meta.json of a stream's prepared folder, which besides holds nothing but the tokenizer."""
    known = xxhash.xxh3_128_hexdigest(words.inner.to_str().encode())
    return {
        "format": store.FORMAT,
        "parts": [],
        "held_out": 0.0,
        "vocab_size": words.vocab_size,
        "end_of_text": words.end,
        "identity": {"tokenizer": known, "train": "stream"},
    }


class Live:
    """The sealed rows of a stream, as a run reads them (what `Dataset` is for data that are all there)."""

    is_far = False
    padding = None
    end = None

    def __init__(self, folder: Path, sealed: Path, data: config.Data, batch: config.Batch, seed: int, epochs: float):
        """folder: prepared; sealed: where the segments are. `last`: the last step that all ranks have the rows of."""
        if epochs:
            raise UserError("train.epochs: a stream has no epochs: set train.steps")
        configure(data)
        self.meta = store.read_meta(folder)
        self.vocab_size: int = self.meta["vocab_size"]
        self.identity: dict[str, Any] = self.meta["identity"]
        self.data, self.batch, self.seed, self.last = data, batch, seed, 0
        self.sealed = Sealed(open_store(sealed))
        self.notes = [f"{data.source}: sealed into {sealed}; read once, in the order it came; nothing is held out"]
        self._segment = lru_cache(HELD)(self._load)

    def steps(self, most: int) -> int:
        return most

    def look(self) -> int:
        """Steps there are rows for by now."""
        self.sealed.refresh()
        return self.sealed.rows // self.batch.sequences

    def read_by(self, step: int) -> int:
        """Segments that have been read to their end after a step."""
        return bisect_right(self.sealed.firsts, step * self.batch.sequences) - 1

    # ------------------------------------------------------------------------------------------------------- going on

    def segments(self) -> list[dict[str, Any]]:
        """For the checkpoint: the newest segment, which vouches for those before it."""
        known = len(self.sealed.segments)
        return [{"sealed": known, "xxh3": self.sealed.segments[-1].xxh3}] if known else []

    def go_on(self, segments: Sequence[dict[str, Any]], step: int) -> bool:
        """Raises UserError if what was sealed is not what the run of the checkpoint read."""
        self.sealed.refresh()
        for known in segments:
            there = self.sealed.segments[: known["sealed"]]
            if len(there) < known["sealed"] or there[-1].xxh3 != known["xxh3"]:
                raise UserError(
                    f"{self.sealed.store.identity} does not hold the segments the checkpoint was trained on: "
                    f"restore them, or start a new run with another --out"
                )
        return False

    # ---------------------------------------------------------------------------------------------------------- slots

    def slot(self, step: int, lane: int, k: int) -> Slot:
        """Microbatch k of a lane in a step (from 1)."""
        places = self._places(step, lane, k)
        shape = len(places), self.batch.sequence_length
        tokens_BT = np.full(shape, self.meta["end_of_text"], np.int64)
        labels_BT = np.full(shape, IGNORED, np.int64)
        for b, (segment, row) in enumerate(places):
            starts, tokens = self._segment(segment)
            stretch = tokens[starts[row] : starts[row + 1]]
            tokens_BT[b, : len(stretch) - 1] = stretch[:-1]
            labels_BT[b, : len(stretch) - 1] = stretch[1:]
        valid = int(np.count_nonzero(labels_BT != IGNORED))
        return Slot(tokens_BT, labels_BT, self._ids(places), valid)

    def samples(self, step: int, lane: int, k: int) -> list[str]:
        """The ids of what a slot reads: 's<segment>:<row>'."""
        return self._ids(self._places(step, lane, k))

    def _ids(self, places: Sequence[tuple[int, int]]) -> list[str]:
        return [f"s{segment}:{row}" for segment, row in places]

    def _places(self, step: int, lane: int, k: int) -> list[tuple[int, int]]:
        batch = self.batch
        first = (((step - 1) * batch.lanes + lane) * batch.microbatches + k) * batch.size
        return [self.sealed.locate(row) for row in range(first, first + batch.size)]

    def _load(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """([rows + 1] where each row starts, [tokens]) of a segment."""
        column = self.sealed.table(number)["tokens"].combine_chunks()
        return column.offsets.to_numpy(), column.values.to_numpy()

    # -------------------------------------------------------------------------------------------------------- held out

    def held_batches(self, size: int, limit: int = 0) -> int:
        return 0

    def held(self, i: int, size: int, limit: int = 0) -> Slot:
        raise AssertionError("nothing of a stream is held out")


def sealing(data: config.Data, batch: config.Batch, words: tokenizer.Tokenizer, folder: Path, group: str) -> Stream:
    """The stream of a run file, which seals sequences for this batch into `folder`."""
    encode = _sequences(data, words, batch.sequence_length)
    how = [words.inner.to_str(), words.end, batch.sequence_length, data.pack, data.min_chars, data.filter]
    return open_stream(
        data.source,
        folder,
        rows=data.stream_rows,
        errors=data.errors,
        encode=encode,
        encoding=xxhash.xxh3_64_hexdigest(repr(how).encode()),
        column=data.text_field,
        group=group,
        settle=data.stream_settle,
        timeout=data.store_timeout,
    )


def _sequences(data: config.Data, words: tokenizer.Tokenizer, length: int) -> Callable[[list[str]], list[np.ndarray]]:
    """Texts to sequences: `length` predictions at most, so up to length + 1 tokens. No document, no sequence."""
    encode = tokenizer.encoder(words, "I", words.is_ours)
    keeps: Callable[[str], bool] = named(data.filter, "data.filter") if data.filter else lambda text: True
    end = np.array([words.end], "<u4")

    def sequences(texts: list[str]) -> list[np.ndarray]:
        kept = [text for text in texts if text and len(text) >= data.min_chars and keeps(text)]
        documents = [np.concatenate([np.frombuffer(raw, "<u4"), end]) for raw in encode(kept)]
        joined = [np.concatenate(documents)] if documents and data.pack == "stream" else documents
        return [tokens[at : at + length + 1] for tokens in joined for at in range(0, len(tokens) - 1, length)]

    return sequences
