import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanewise.errors import UserError
from lanewise.lanes.assignment import lanes_of
from lanewise.lanes.tree import TreeSum, cover


def expression(lanes: int, replicas: int) -> str:
    """The sum as it is really bracketed when `replicas` add their own nodes first."""
    total = TreeSum[str](lanes, lambda a, b: f"({a}+{b})")
    for replica in range(replicas):
        own = TreeSum[str](lanes, lambda a, b: f"({a}+{b})")
        for lane in lanes_of(replica, replicas, lanes):
            own.push(lane, str(lane))
        for node in own.nodes:
            total.push(node.start, node.value, node.size)
    return total.root()


def test_brackets_worked_out_by_hand():
    assert expression(1, 1) == "0"
    assert expression(5, 1) == "(((0+1)+(2+3))+4)"
    assert expression(7, 1) == "(((0+1)+(2+3))+((4+5)+6))"
    assert cover(3, 6, 8) == [(3, 1), (4, 2)]
    assert cover(6, 7, 7) == [(6, 2)]  # its right sibling holds no lane


@given(st.integers(1, 40), st.data())
def test_brackets_do_not_depend_on_the_replicas(lanes, data):
    replicas = data.draw(st.integers(1, lanes))
    assert expression(lanes, replicas) == expression(lanes, 1)


@given(st.integers(1, 200), st.data())
def test_lanes_are_dealt_whole_contiguous_and_even(lanes, data):
    replicas = data.draw(st.integers(1, lanes))
    ranges = [lanes_of(r, replicas, lanes) for r in range(replicas)]
    assert [lane for r in ranges for lane in r] == list(range(lanes))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_more_replicas_than_lanes_is_refused_with_the_remedy():
    with pytest.raises(UserError, match="at most 4 workers"):
        lanes_of(0, 5, 4)
