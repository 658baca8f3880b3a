"""Documents that are like earlier ones: equal, or nearly so by MinHash.

Near: the share of common stretches of WORDS words (Jaccard) is estimated by HASHES random minima (Broder, "On the
resemblance and containment of documents", 1997); documents that agree in all ROWS of one of the bands are alike. With
16 bands of 8, a pair of 0.8 resemblance is found with probability 0.95, one of 0.5 with 0.06.
"""

import re
from collections.abc import Iterable

import numpy as np
import xxhash

WORDS = 5
BANDS, ROWS = 16, 8
HASHES = BANDS * ROWS
_draw = np.random.default_rng(0)
FACTORS = _draw.integers(0, 2**63, HASHES, np.uint64) * 2 + 1
OFFSETS = _draw.integers(0, 2**63, HASHES, np.uint64)


def signatures(texts: Iterable[str], near: bool) -> np.ndarray:
    """[documents, bands] uint64: documents that share one of theirs are alike. Equal ones share all."""
    found = [_near(text) if near else [xxhash.xxh3_64_intdigest(text.encode())] for text in texts]
    return np.array(found, np.uint64).reshape(len(found), -1)


def _near(text: str) -> np.ndarray:
    words = re.findall(r"\w+", text.lower())
    stretches = {" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}
    raw = np.array([xxhash.xxh3_64_intdigest(stretch.encode()) for stretch in stretches], np.uint64)
    least = np.full(HASHES, 2**64 - 1, np.uint64)
    for first in range(0, len(raw), 4096):  # memory stays small however long the document is
        mixed = raw[first : first + 4096, None] * FACTORS + OFFSETS
        least = np.minimum(least, (mixed ^ (mixed >> np.uint64(32))).min(axis=0))
    bands = least.reshape(BANDS, ROWS)
    return np.array([xxhash.xxh3_64_intdigest(band.tobytes(), seed=i) for i, band in enumerate(bands)], np.uint64)


def duplicates(tasks: Iterable[np.ndarray]) -> Iterable[frozenset[int]]:
    """For each task's signatures, its documents that are like one that was kept before, in the order of the tasks."""
    kept: set[int] = set()
    for signed in tasks:
        drop = set()
        for number, bands in enumerate(signed.tolist()):
            if kept.isdisjoint(bands):
                kept.update(bands)
            else:
                drop.add(number)
        yield frozenset(drop)
