"""What each slot of a run reads: a pure function of (token folder, settings, seed) and (step, lane, k).

Nothing is consumed and nothing is remembered, so a run resumed at any step on any layout reads what it would have.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from lanewise import config
from lanewise.data import store
from lanewise.data.order import Permutation
from lanewise.data.windows import IGNORED, Windows
from lanewise.errors import UserError


@dataclass(frozen=True)
class Slot:
    """One microbatch of B sequences of T tokens. Its shape is always the same."""

    tokens_BT: np.ndarray  # int64
    labels_BT: np.ndarray  # int64, what follows each token (already shifted); IGNORED: not predicted
    samples: list[str]  # "e<epoch>:<window>" or "held:<window>"; a row of padding has none
    valid: int  # labels that count
    starts_BT: np.ndarray | None = None  # int64, where in its row each token's document starts; None: one a row


class Dataset:
    """The windows of a prepared folder in the order of the run.

    Sequences are numbered through the run: ((step-1) * lanes + lane) * microbatches + k, times B, plus the row b.
    Number p belongs to epoch p // windows and reads the window at place p % windows of that epoch's order: in each
    epoch every sample id comes exactly once, whatever the number of steps. Epochs join without a gap; with
    `epochs` > 0, rows beyond that many passes are padding.

    Raises UserError if the folder is damaged or the text is shorter than one sequence.
    """

    def __init__(self, folder: Path, data: config.Data, batch: config.Batch, seed: int, epochs: float = 0):
        if (damage := store.damage(folder)) is not None:
            raise UserError(f"{damage}; delete {folder} and start again to rebuild it")
        self.meta: dict[str, Any] = store.read_meta(folder)
        self.vocab_size: int = self.meta["vocab_size"]
        self.batch = batch
        self.seed = seed
        self.shuffle = data.shuffle
        self.train = Windows(folder, "train", data.pack, batch.sequence_length)
        self.held_out = Windows(folder, "held", data.pack, batch.sequence_length)
        self.windows = len(self.train)
        tokens = self.meta["tokens"]["train"]
        if data.pack == "stream" and tokens <= batch.sequence_length:
            raise UserError(
                f"data.source: {tokens} tokens of training text are fewer than one sequence and the token after it; "
                f"add text, or set batch.sequence_length to at most {tokens - 1}"
            )
        self.end = self._passes(epochs) if epochs > 0 else None

    @property
    def identity(self) -> dict[str, str]:
        """A hash each of the tokenizer, the training tokens and the held-out tokens: equal, or other data."""
        return self.meta["identity"]

    def steps_per(self, epochs: float) -> int:
        """Steps that pass over the data `epochs` times; the last may be part padding."""
        return -(-self._passes(epochs) // self.batch.sequences)

    def _passes(self, epochs: float) -> int:
        """Sequences in so many passes. Decimal fractions count as written: 0.1 of 30 windows is 3."""
        return math.ceil(Fraction(str(epochs)) * self.windows)

    def slot(self, step: int, lane: int, k: int) -> Slot:
        """Microbatch k of a lane in a step (from 1)."""
        batch = self.batch
        assert step >= 1, step
        assert 0 <= lane < batch.lanes, lane
        assert 0 <= k < batch.microbatches, k
        first = (((step - 1) * batch.lanes + lane) * batch.microbatches + k) * batch.size
        last = first + batch.size if self.end is None else min(first + batch.size, self.end)
        numbers: list[int | None] = [None] * batch.size
        samples = []
        for b, position in enumerate(range(first, last)):
            epoch, place = divmod(position, self.windows)
            window = Permutation(self.seed, epoch, self.windows).at(place) if self.shuffle else place
            numbers[b] = window
            samples.append(f"e{epoch}:{window}")
        return _slot(self.train, numbers, samples)

    # -------------------------------------------------------------------------------------------------- held out

    def held_batches(self, size: int, limit: int = 0) -> int:
        """Batches of `size` held-out windows; of at most `limit` windows, spread evenly, if limit > 0."""
        return -(-self._held(limit) // size)

    def held(self, i: int, size: int, limit: int = 0) -> Slot:
        """Batch i of those; the last is filled up with padding. Over all i each window comes once."""
        assert 0 <= i < self.held_batches(size, limit), i
        taken = self._held(limit)
        places = range(i * size, min((i + 1) * size, taken))
        windows = [place * len(self.held_out) // taken for place in places]
        return _slot(self.held_out, windows + [None] * (size - len(windows)), [f"held:{w}" for w in windows])

    def _held(self, limit: int) -> int:
        return min(limit, len(self.held_out)) if limit else len(self.held_out)


def _slot(windows: Windows, numbers: list[int | None], samples: list[str]) -> Slot:
    tokens_BT, labels_BT = windows.batch(numbers)
    return Slot(tokens_BT, labels_BT, samples, valid=int(np.count_nonzero(labels_BT != IGNORED)))
