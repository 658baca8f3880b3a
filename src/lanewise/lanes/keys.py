"""Keyed random numbers: what a slot draws depends on its name alone, never on who runs it or what ran before."""

import struct

import xxhash


def slot_key(seed: int, step: int, lane: int, k: int) -> int:
    """63 bits that name microbatch `k` of `lane` in `step` (counted from 1): the key of its dropout masks."""
    return xxhash.xxh3_64_intdigest(struct.pack("<4q", seed, step, lane, k)) >> 1
