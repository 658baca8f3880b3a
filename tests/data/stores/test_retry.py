import pytest

from lanewise.data.stores import StoreAway, retry
from lanewise.data.stores.retry import patiently


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only by sleeping."""
    slept: list[float] = []
    monkeypatch.setattr(retry.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(retry.time, "sleep", slept.append)
    return slept


def failing(times: int):
    left = [ConnectionResetError("cut")] * times

    def do():
        if left:
            raise left.pop()
        return "there"

    return do


def test_pauses_grow_and_are_not_all_the_same(clock):
    assert patiently(failing(9), lambda e: True, 1000, "store") == "there"
    for n, pause in enumerate(clock):
        longest = min(10.0, 0.1 * 2**n)
        assert longest / 2 <= pause <= longest
    assert len({pause / 2**n for n, pause in enumerate(clock[:6])}) == 6


def test_patience_ends_at_the_deadline_and_names_the_store(clock):
    with pytest.raises(StoreAway, match=r"s3://b/set: no answer in 7 s \(ConnectionResetError: cut\)"):
        patiently(failing(10**6), lambda e: True, 7, "s3://b/set")
    assert sum(clock) == pytest.approx(7)


def test_what_does_not_pass_is_said_at_once(clock):
    with pytest.raises(ConnectionResetError):
        patiently(failing(1), lambda e: False, 7, "store")
    assert clock == []
