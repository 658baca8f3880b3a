"""What a token folder holds, read without the code that reads it in training."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from lanewise.data import store, tokenizer


def documents(folder: Path, side: store.Side) -> list[str]:
    """The documents as text; each document's end-of-text token is checked and taken off."""
    meta, words = store.read_meta(folder), tokenizer.load(folder)
    tokens = np.fromfile(folder / f"{side}.bin", meta["dtype"]).tolist()
    starts = np.fromfile(folder / f"{side}.starts", "<i8").tolist()
    pieces = [tokens[a:b] for a, b in pairwise(starts)]
    assert starts[0] == 0
    assert starts[-1] == len(tokens)
    assert all(piece[-1] == words.end and words.end not in piece[:-1] for piece in pieces)
    return [words.decode(piece[:-1]) for piece in pieces]


def everything(folder: Path) -> list[str]:
    return sorted(documents(folder, "train") + documents(folder, "held"))
