"""The order of samples: a permutation of 0..n-1 that is computed, not stored.

A Feistel network on pairs (left, right) from rows x columns >= n cells is a bijection whatever its round function is;
walking on until the value falls below n keeps it one on 0..n-1 (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002). Rows and columns are near the root of n, so about one value in root n needs a second walk.
"""

import hashlib
import math
import struct
from functools import lru_cache
from typing import TypeVar

import numpy as np

Integers = TypeVar("Integers", int, np.ndarray)

PAIRS_OF_ROUNDS = 4
MASK = 2**64 - 1


class Permutation:
    """A bijection of 0..n-1 keyed by (seed, epoch, purpose), in O(1) memory. n up to 2**62."""

    def __init__(self, seed: int, epoch: int, n: int, purpose: str = ""):
        assert 1 <= n <= 2**62, n
        self.n = n
        self.rows = math.isqrt(n - 1) + 1
        self.columns = -(-n // self.rows)
        key = " ".join(["order", str(seed), str(epoch), *[purpose] * bool(purpose)])
        digest = hashlib.blake2b(key.encode(), digest_size=16 * PAIRS_OF_ROUNDS).digest()
        self.keys = list(struct.iter_unpack("<QQ", digest))

    def at(self, i: Integers) -> Integers:
        """What stands at place i: an int for an int, an int64 array for an array of integers."""
        if isinstance(i, np.ndarray):
            x = self._walk(i.astype(np.uint64))
            while (outside := x >= self.n).any():
                x[outside] = self._walk(x[outside])
            return x.astype(np.int64)
        y = self._walk(i)
        while y >= self.n:
            y = self._walk(y)
        return y

    def _walk(self, x: Integers) -> Integers:
        left, right = x // self.columns, x % self.columns
        for a, b in self.keys:
            left = (left + _mix(right ^ a) % self.rows) % self.rows
            right = (right + _mix(left ^ b) % self.columns) % self.columns
        return left * self.columns + right


class Order:
    """The samples 0..n-1 of one source in the order of one epoch, on two levels so that reads stay local.

    Samples stand in blocks of `block` neighbours. The blocks are permuted; every `blocks` of them, as they come, form
    a group, inside which the samples are permuted. At any time a run so reads from one group: `blocks` stretches of
    the source, each whole. Up to one group of samples this is a plain permutation. Where blocks begin shifts with the
    epoch, so the last block, which may be short and always comes in the last group, is another one each time.
    """

    def __init__(self, seed: int, epoch: int, n: int, name: str = "", block: int = 4096, blocks: int = 64):
        self.seed, self.epoch, self.n, self.name, self.block, self.blocks = seed, epoch, n, name, block, blocks
        self.is_plain = n <= block * blocks
        if self.is_plain:
            self.samples = Permutation(seed, epoch, n, name)
        else:
            self.full = Permutation(seed, epoch, n // block, f"blocks {name}")
            self.shift = Permutation(seed, epoch, n, f"shift {name}").at(0)

    def at(self, places: np.ndarray) -> np.ndarray:
        """[any] int64: the samples at these places of the epoch."""
        if self.is_plain:
            return self.samples.at(places)
        size = self.block * self.blocks
        groups = places // size
        found = np.empty(len(places), np.int64)
        for group in np.unique(groups):
            here = groups == group
            inside = _inside(self.seed, self.epoch, min(size, self.n - int(group) * size), f"{group} {self.name}")
            drawn = inside.at(places[here] - group * size)
            number = group * self.blocks + drawn // self.block
            is_full = number < self.full.n
            number[is_full] = self.full.at(number[is_full])
            found[here] = (number * self.block + drawn % self.block + self.shift) % self.n
        return found


@lru_cache(64)
def _inside(seed: int, epoch: int, n: int, purpose: str) -> Permutation:
    return Permutation(seed, epoch, n, f"group {purpose}")


def _mix(z: Integers) -> Integers:
    """64 bits in, 64 bits out, each depending on all (Stafford's Mix13, the finaliser of SplitMix64)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
