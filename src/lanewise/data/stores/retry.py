"""Waiting out a store's faults: exponential back-off with jitter, and an end to all patience."""

import random
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from lanewise.errors import UserError

T = TypeVar("T")
TIMEOUT = 120.0  # seconds a store may stay away
FIRST, LONGEST = 0.1, 10.0  # seconds between two tries: the first time, and in the end


class StoreAway(UserError):
    """A store or broker did not answer for as long as it may."""


def patiently(do: Callable[[], T], transient: Callable[[Exception], bool], timeout: float, who: str) -> T:
    """What `do` gives, asked again while its error is transient and for at most `timeout` seconds.

    Each pause is twice the last, times a random share, so that many processes do not return to a store that
    recovers all at once. Raises StoreAway, naming `who`, in the end; any other error at once.
    """
    end = time.monotonic() + timeout
    for attempt in count():
        try:
            return do()
        except Exception as e:
            left = end - time.monotonic()
            if not transient(e):
                raise
            if left <= 0:
                raise StoreAway(
                    f"{who}: no answer in {timeout:g} s ({brief(e)}); check its address and that it is up, "
                    f"or raise data.store_timeout"
                ) from e
            time.sleep(min(left, random.uniform(0.5, 1) * min(LONGEST, FIRST * 2**attempt)))
    raise AssertionError


def brief(error: BaseException) -> str:
    """An error in one short line."""
    first = str(error).replace("\\n", "\n").strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__
