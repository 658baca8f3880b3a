"""Mixtures against counting: shares at every prefix, nothing lost or repeated when weights change."""

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise.data.mixture import Mixture, in_lowest_terms
from lanewise.errors import UserError


def drawn(mixture: Mixture, positions: range) -> list[tuple[str, int]]:
    sources, indices = mixture.at(np.array(positions))
    return [(mixture.names[s], i) for s, i in zip(sources.tolist(), indices.tolist(), strict=True)]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_within_one_sample_of_the_weights(weights):
    mixture = Mixture({str(i): w for i, w in enumerate(weights)})
    counts = dict.fromkeys(mixture.names, 0)
    for p, (name, index) in enumerate(drawn(mixture, range(2 * sum(weights) + 3))):
        assert index == counts[name]
        counts[name] += 1
        for other, count in counts.items():
            assert abs(count - Fraction((p + 1) * weights[int(other)], sum(weights))) < 1
    assert mixture.given(p + 1) == counts


def test_999_and_001_are_exact_far_into_a_run():
    mixture = Mixture({"web": 0.999, "books": 0.001})
    assert mixture.segments[0].weights == {"web": 999, "books": 1}
    for p in (1000, 10**6, 10**15):
        assert mixture.given(p) == {"web": p * 999 // 1000, "books": p // 1000}
    names = [name for name, _ in drawn(mixture, range(10**12, 10**12 + 1000))]
    assert names.count("books") == 1


@pytest.mark.parametrize("seed", range(10))
def test_weights_that_change_lose_and_repeat_nothing(seed):
    """Restarts at random places, with changed weights, sources that leave and come back."""
    rng = random.Random(seed)
    mixture, position, seen = Mixture({"a": 1, "b": 2}), 0, []
    for _ in range(6):
        stop = position + rng.randrange(0, 40)
        seen += drawn(mixture, range(position, stop))
        position, record = stop, mixture.record
        names = rng.sample(["a", "b", "c"], rng.choice([1, 2, 3]))
        mixture = Mixture({name: rng.choice([1, 0.5, 7, 0.25]) for name in names})
        mixture.go_on(record, position)
    for name in "abc":
        indices = [index for source, index in seen if source == name]
        assert indices == list(range(len(indices)))
        assert mixture.given(position).get(name, 0) == len(indices)
    assert drawn(mixture, range(position)) == seen, "the past does not change"
    for p, (name, index) in enumerate(seen):
        assert mixture.when(name, index) == p


def test_going_on_with_equal_weights_is_no_new_segment():
    mixture = Mixture({"a": 0.7, "b": 0.3})
    again = Mixture({"a": 7, "b": 3})
    assert not again.go_on(mixture.record, 55)
    assert again.segments == mixture.segments


def test_a_segment_that_was_never_reached_is_dropped():
    """A run changed its weights at 20 and went back to its checkpoint at 10."""
    mixture = Mixture({"a": 1, "b": 1})
    mixture.go_on(Mixture({"a": 2, "b": 1}).record, 20)
    again = Mixture({"a": 2, "b": 1})
    assert not again.go_on(mixture.record, 10)
    assert [segment.first for segment in again.segments] == [0]


def test_lowest_terms_are_as_written():
    assert in_lowest_terms({"a": 0.1, "b": 0.2}) == {"a": 1, "b": 2}
    assert in_lowest_terms({"a": 1e-4, "b": 1}) == {"a": 1, "b": 10_000}
    with pytest.raises(UserError, match=r"repeat only after 10,000,000,001 .*round them"):
        in_lowest_terms({"a": 1e-10, "b": 1})
