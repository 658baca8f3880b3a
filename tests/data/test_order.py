import math

import numpy as np
import pytest

from lanewise.data.order import Order, Permutation


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 16, 17, 31, 97, 100, 101, 1000, 1009, 4096, 65_537])
def test_bijection(n):
    for seed in range(3):
        assert sorted(Permutation(seed, seed + 1, n).at(np.arange(n)).tolist()) == list(range(n))


def test_one_at_a_time_is_the_same_as_all_at_once():
    for n in (1, 2, 5, 1000, 10**12, 2**62):
        order = Permutation(7, 3, n)
        places = [0, n // 3, n - 1]
        assert order.at(np.array(places)).tolist() == [order.at(i) for i in places]


@pytest.mark.parametrize("n", [10**12, 10**12 + 39, 2**62])
def test_huge_sizes_stay_in_range_without_repeats(n):
    places = np.unique(np.random.default_rng(0).integers(0, n, 100_000))
    seen = Permutation(1, 2, n).at(places)
    assert seen.min() >= 0
    assert seen.max() < n
    assert len(np.unique(seen)) == len(places)


def test_small_sizes_reach_every_permutation_about_equally():
    for n in (2, 3, 4):
        keys = 100 * math.factorial(n)
        found = [tuple(Permutation(seed, 0, n).at(np.arange(n)).tolist()) for seed in range(keys)]
        _, counts = np.unique(found, axis=0, return_counts=True)
        assert len(counts) == math.factorial(n)
        assert ((counts - 100) ** 2 / 100).sum() < 2 * math.factorial(n) + 10  # chi-square, some 5 sigma


def test_looks_random():
    """Against what a shuffle of this size does: neighbours part, places are forgotten, halves mix."""
    n = 10_000
    seen = Permutation(0, 0, n).at(np.arange(n))
    assert (np.abs(np.diff(seen)) == 1).sum() < 12  # 2 expected
    assert (seen == np.arange(n)).sum() < 8  # 1 expected
    assert abs(np.corrcoef(seen, np.arange(n))[0, 1]) < 0.05
    assert abs(np.corrcoef(seen[1:], seen[:-1])[0, 1]) < 0.05
    counts, _, _ = np.histogram2d(np.arange(n), seen, bins=10)
    assert ((counts - 100) ** 2 / 100).sum() < 150  # chi-square with 81 degrees of freedom


def test_differs_by_seed_and_by_epoch():
    n = 10_000
    orders = [Permutation(seed, epoch, n).at(np.arange(n)) for seed in (0, 1, 2**62) for epoch in (0, 1, 2)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 8  # 1 expected
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.05


def test_never_changes():
    """Runs are resumed by later versions: these values must stay."""
    assert Permutation(0, 0, 10).at(np.arange(10)).tolist() == [7, 5, 4, 9, 3, 2, 0, 8, 1, 6]
    assert Permutation(5, 2, 10**12).at(123_456_789) == 71_968_935_191


@pytest.mark.parametrize("n", [1, 12, 13, 24, 25, 36, 40, 41, 47, 48, 100])
def test_two_levels_are_a_bijection_that_differs_by_epoch(n):
    orders = [Order(3, epoch, n, "web", block=4, blocks=3).at(np.arange(n)).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert n == 1 or len({tuple(order) for order in orders}) == 3
    assert n == 1 or Order(3, 0, n, "books", block=4, blocks=3).at(np.arange(n)).tolist() != orders[0]


def test_reads_stay_inside_a_group_of_whole_blocks():
    n, block, blocks = 10_007, 10, 5
    order = Order(0, 1, n, block=block, blocks=blocks)
    seen = order.at(np.arange(n))
    groups = [(seen[i : i + 50] - order.shift) % n for i in range(0, n - 57, 50)]
    assert all(len(np.unique(group // block)) == blocks for group in groups)
    starts = [group.min() for group in groups]
    assert abs(np.corrcoef(starts, np.arange(len(starts)))[0, 1]) < 0.2  # blocks come from all over the source


def test_any_place_of_a_huge_source_at_once():
    order = Order(1, 0, 10**12)
    places = np.arange(10**9, 10**9 + 1000)
    seen = order.at(places)
    assert len(np.unique(seen)) == 1000
    assert [int(order.at(np.array([p]))[0]) for p in places[:5]] == seen[:5].tolist()
