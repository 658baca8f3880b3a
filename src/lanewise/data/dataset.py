"""What each slot of a run reads: a pure function of (token folder, settings, seed) and (step, lane, k).

Nothing is consumed and nothing is remembered, so a run resumed at any step on any layout reads what it would have.
The one thing that can change on the way, the weights of a mixture, leaves its segments in the checkpoint.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lanewise import config
from lanewise.data import corpus, store
from lanewise.data.mixture import Mixture
from lanewise.data.order import Order
from lanewise.data.packing import Packed
from lanewise.data.shards import Damage, is_far
from lanewise.data.windows import IGNORED, Rows, Windows
from lanewise.errors import UserError

AT_ONCE = 1024  # sequences whose samples are computed together


@dataclass(frozen=True)
class Slot:
    """One microbatch of B sequences of T tokens. Its shape is always the same."""

    tokens_BT: np.ndarray  # int64
    labels_BT: np.ndarray  # int64, what follows each token (already shifted); IGNORED: not predicted
    samples: list[str]  # ids, see `Dataset._id`, or "held:<window>"; a row of padding has none
    valid: int  # labels that count
    starts_BT: np.ndarray | None = None  # int64, where in its row each token's document starts; None: one a row


class Sample(NamedTuple):
    source: int
    epoch: int
    window: int


class Part(NamedTuple):
    """The rows of a slot that are windows of one source."""

    windows: Windows
    rows: list[int]
    numbers: list[int]


class Dataset:
    """The windows of prepared data in the order of the run.

    Sequences are numbered through the run: ((step-1) * lanes + lane) * microbatches + k, times B, plus the row b.
    The mixture says which source number p comes from, and that it is the source's c-th: epoch c // windows, place
    c % windows in that epoch's order. In each epoch of a source every sample id comes exactly once, whatever the number
    of steps. Epochs join without a gap. Rows from `end` on are padding: with `epochs` > 0 after that many passes, with
    data.exhausted = "stop" after one pass over the source that is read through first.

    `last`: the last step there is data for, None: all of them are there (a stream has other ideas, see live.py).
    `notes`: what a user should know about the data. Raises UserError if the folder is damaged or the text is shorter
    than one sequence.
    """

    last = None

    def __init__(self, folder: Path, data: config.Data, batch: config.Batch, seed: int, epochs: float = 0):
        if (damage := store.damage(folder)) is not None:
            raise UserError(f"{damage}; delete {folder} and start again to rebuild it")
        self.meta: dict[str, Any] = store.read_meta(folder)
        self.vocab_size: int = self.meta["vocab_size"]
        self.data, self.batch, self.seed, self.epochs = data, batch, seed, epochs
        parts = corpus.open_parts(folder, data)
        self.is_far = any(is_far(part.place) for part in parts)
        if epochs and len(parts) > 1:
            raise UserError("train.epochs: a mixture has no epochs: set train.steps, or data.exhausted=stop")
        shape = data.pack, batch.sequence_length, self.meta["end_of_text"]
        self.sources = {part.name: part.windows("train", *shape) for part in parts}
        self.held_outs = {part.name: part.windows("held", *shape) for part in parts}
        self.notes = self._look_at([part.sides["train"].total for part in parts])
        self.windows = sum(len(windows) for windows in self.sources.values())
        self.mixture = Mixture({name: weight for name, _, weight in data.parts if len(self.sources.get(name, ()))})
        self._drawn = lru_cache(16)(self._draw)

    def _look_at(self, totals: Sequence[int]) -> list[str]:
        """Refuse what cannot be trained on; notes on what is odd."""
        notes = []
        for (name, windows), tokens in zip(self.sources.items(), totals, strict=True):
            if self.data.pack == "stream" and tokens <= self.batch.sequence_length:
                if name and not tokens:
                    continue
                which = f"data.mix: {name}" if name else "data.source"
                raise UserError(
                    f"{which}: {tokens} tokens of training text are fewer than one sequence and the token after it; "
                    f"add text, or set batch.sequence_length to at most {max(2, tokens - 1)}"
                )
            if isinstance(windows, Packed) and len(windows):
                notes.append(f"{name or 'data'}: {windows.padding:.2%} of the places in packed sequences are padding")
        empty = [name for name, _, _ in self.data.parts if not len(self.sources.get(name, ()))]
        if len(empty) == len(self.data.parts):
            raise UserError("data.source: there is no training text; add some")
        if self.data.held_out and not any(len(windows) for windows in self.held_outs.values()):
            notes.append("the data holds nothing out, so there is no held-out loss (a set is built with data.held_out)")
        return [*notes, *(f"{name} holds no training text: it is left out" for name in empty)]

    @property
    def identity(self) -> dict[str, Any]:
        """Hashes of the tokenizer, the training tokens and the held-out tokens (by source): equal, or other data."""
        return self.meta["identity"]

    @property
    def padding(self) -> float | None:
        """The share of places that hold nothing, where documents are packed."""
        packed = [windows for windows in self.sources.values() if isinstance(windows, Packed) and len(windows)]
        places = sum(len(windows) for windows in packed)
        return sum(windows.padding * len(windows) for windows in packed) / places if places else None

    # ---------------------------------------------------------------------------------------------------- going on

    def segments(self) -> list[dict[str, Any]]:
        """For the checkpoint: the only state of the order there is."""
        return self.mixture.record

    def go_on(self, segments: Sequence[dict[str, Any]], step: int) -> bool:
        """Go on after `step` of a run with these segments; True if the mixture changes there."""
        changed = self.mixture.go_on(segments, step * self.batch.sequences)
        if gone := [name for name in self.mixture.names if name not in self.sources]:
            # Only the past needs them, and the past is over.
            self.sources |= dict.fromkeys(gone, next(iter(self.sources.values())))
        self._drawn.cache_clear()
        self.__dict__.pop("end", None)  # where the data end may have moved
        return changed

    # ------------------------------------------------------------------------------------------------------ length

    @cached_property
    def end(self) -> int | None:
        """The first sequence that is padding, if there is one."""
        if self.epochs > 0:
            return self._passes(self.epochs)
        if self.data.exhausted == "stop":
            ends = [self.mixture.when(name, len(windows)) for name, windows in self.sources.items() if len(windows)]
            return min(end for end in ends if end is not None)
        return None

    def steps(self, most: int) -> int:
        """Steps of the run: `most`, or as many as the data last for."""
        if self.end is None:
            return most
        enough = -(-self.end // self.batch.sequences)
        return enough if self.epochs else min(most, enough)

    def steps_per(self, epochs: float) -> int:
        """Steps that pass over the data `epochs` times; the last may be part padding."""
        return -(-self._passes(epochs) // self.batch.sequences)

    def _passes(self, epochs: float) -> int:
        """Sequences in so many passes. Decimal fractions count as written: 0.1 of 30 windows is 3."""
        return math.ceil(Fraction(str(epochs)) * self.windows)

    # ------------------------------------------------------------------------------------------------------- slots

    def slot(self, step: int, lane: int, k: int) -> Slot:
        """Microbatch k of a lane in a step (from 1)."""
        drawn = self._samples(step, lane, k)
        by_source: dict[int, list[int]] = {}
        for b, sample in enumerate(drawn):
            by_source.setdefault(sample.source, []).append(b)
        parts = [
            Part(self.sources[self.mixture.names[source]], rows, [drawn[b].window for b in rows])
            for source, rows in by_source.items()
        ]
        return self._slot(parts, self.batch.size, [self._id(sample) for sample in drawn])

    def samples(self, step: int, lane: int, k: int) -> list[str]:
        """The ids of what a slot reads, without reading it."""
        return [self._id(sample) for sample in self._samples(step, lane, k)]

    def _samples(self, step: int, lane: int, k: int) -> list[Sample]:
        batch = self.batch
        assert step >= 1, step
        assert 0 <= lane < batch.lanes, lane
        assert 0 <= k < batch.microbatches, k
        first = (((step - 1) * batch.lanes + lane) * batch.microbatches + k) * batch.size
        last = first + batch.size if self.end is None else min(first + batch.size, self.end)
        drawn: list[Sample] = []
        for number in range(first // AT_ONCE, -(-last // AT_ONCE)):
            before = number * AT_ONCE
            drawn += self._drawn(number)[max(first - before, 0) : last - before]
        return drawn

    def _id(self, sample: Sample) -> str:
        """'e<epoch>:<window>', in a mixture with the source's name before it. It does not depend on the layout."""
        name = self.mixture.names[sample.source]
        return f"{name}:e{sample.epoch}:{sample.window}" if name else f"e{sample.epoch}:{sample.window}"

    def _draw(self, number: int) -> list[Sample]:
        """The samples of sequences number * AT_ONCE on."""
        positions = np.arange(number * AT_ONCE, (number + 1) * AT_ONCE)
        sources, indices = self.mixture.at(positions)
        epochs, windows = np.zeros_like(indices), np.zeros_like(indices)
        for source in np.unique(sources):
            here, name = sources == source, self.mixture.names[source]
            n = len(self.sources[name])
            epochs[here], windows[here] = np.divmod(indices[here], n)
            if self.data.shuffle:
                for epoch in np.unique(epochs[here]):
                    now = here & (epochs == epoch)
                    size = self.data.shuffle_block, self.data.shuffle_blocks
                    windows[now] = Order(self.seed, int(epoch), n, name, *size).at(windows[now])
        return [Sample(*sample) for sample in zip(sources.tolist(), epochs.tolist(), windows.tolist(), strict=True)]

    # -------------------------------------------------------------------------------------------------- held out

    def held_batches(self, size: int, limit: int = 0) -> int:
        """Batches of `size` held-out windows; of at most `limit` windows, spread evenly, if limit > 0."""
        return -(-self._held(limit) // size)

    def held(self, i: int, size: int, limit: int = 0) -> Slot:
        """Batch i of those; the last is filled up with padding. Over all i each window comes once."""
        assert 0 <= i < self.held_batches(size, limit), i
        taken = self._held(limit)
        places = range(i * size, min((i + 1) * size, taken))
        total = sum(map(len, self.held_outs.values()))
        numbers = [place * total // taken for place in places]
        ids = [f"held:{number}" for number in numbers]
        parts, first = [], 0
        for windows in self.held_outs.values():  # one after the other, as if they were one
            rows = [b for b, number in enumerate(numbers) if first <= number < first + len(windows)]
            parts += [Part(windows, rows, [numbers[b] - first for b in rows])] if rows else []
            first += len(windows)
        return self._slot(parts, size, ids)

    def _held(self, limit: int) -> int:
        total = sum(map(len, self.held_outs.values()))
        return min(limit, total) if limit else total

    def _slot(self, parts: Sequence[Part], size: int, samples: list[str]) -> Slot:
        """The rows of all parts; those of none are padding."""
        found = [_read(part, samples) for part in parts]
        if len(parts) == 1 and len(parts[0].rows) == size:
            (whole,) = found
        else:
            shape = size, self.batch.sequence_length
            packed = next(iter(self.sources.values())).is_packed
            whole = Rows(
                np.full(shape, self.meta["end_of_text"], np.int64),
                np.full(shape, IGNORED, np.int64),
                np.zeros(shape, np.int64) if packed else None,
            )
            for part, its in zip(parts, found, strict=True):
                for target, values in zip(whole, its, strict=True):
                    if target is not None:
                        target[part.rows] = values
        valid = int(np.count_nonzero(whole.labels_BT != IGNORED))
        return Slot(whole.tokens_BT, whole.labels_BT, samples, valid, whole.starts_BT)


def _read(part: Part, samples: Sequence[str]) -> Rows:
    try:
        return part.windows.batch(part.numbers)
    except Damage as damage:
        raise Damage(f"sample {', '.join(samples[b] for b in part.rows)}: {damage}") from None
