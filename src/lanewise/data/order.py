"""The order of samples: a permutation of 0..n-1 that is computed, not stored.

A Feistel network on pairs (left, right) from rows x columns >= n cells is a bijection whatever its round function is;
walking on until the value falls below n keeps it one on 0..n-1 (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002). Rows and columns are near the root of n, so about one value in root n needs a second walk.
"""

import hashlib
import math
import struct
from typing import TypeVar

import numpy as np

Integers = TypeVar("Integers", int, np.ndarray)

PAIRS_OF_ROUNDS = 4
MASK = 2**64 - 1


class Permutation:
    """A bijection of 0..n-1 keyed by (seed, epoch), in O(1) memory. n up to 2**62."""

    def __init__(self, seed: int, epoch: int, n: int):
        assert 1 <= n <= 2**62, n
        self.n = n
        self.rows = math.isqrt(n - 1) + 1
        self.columns = -(-n // self.rows)
        digest = hashlib.blake2b(f"order {seed} {epoch}".encode(), digest_size=16 * PAIRS_OF_ROUNDS).digest()
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


def _mix(z: Integers) -> Integers:
    """64 bits in, 64 bits out, each depending on all (Stafford's Mix13, the finaliser of SplitMix64)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
