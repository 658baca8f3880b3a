"""The learned correction on made-up machines, where the truth is known."""

import numpy as np
import pytest

from lanewise.planner import correction


def made_up(seed: int, runs: int = 300):
    """Features, log ratios that depend on two of them, and sources with offsets of their own."""
    random = np.random.default_rng(seed)
    sources = [f"s{i % 20}" for i in range(runs)]
    x = random.normal(size=(runs, 4))
    offsets = {name: random.normal() * correction.OFFSET**0.5 for name in sorted(set(sources))}
    noise = random.normal(size=runs) * correction.NOISE**0.5
    return x, 0.3 * x[:, 0] - 0.2 * np.tanh(x[:, 1]) + np.array([offsets[s] for s in sources]) + noise, sources


def test_learns_what_is_there_and_its_intervals_hold():
    pytest.importorskip("sklearn")
    x, y, sources = made_up(0)
    fitted = correction.fit(x, y, sources, sources, {})
    new_x, new_y, _ = made_up(1)
    found = fitted.predict(new_x)
    assert np.median(np.abs(np.log(found.factor) - new_y)) < 0.1 < np.median(np.abs(new_y))
    inside = np.mean((np.log(found.low) <= new_y) & (new_y <= np.log(found.high)))
    assert 0.7 <= inside <= 0.95  # an 80% interval
    assert not found.far.any()


def test_says_when_it_extrapolates():
    pytest.importorskip("sklearn")
    x, y, sources = made_up(0)
    fitted = correction.fit(x, y, sources, sources, {})
    near, far = fitted.predict(x[:1]), fitted.predict(np.full((1, 4), 40.0))
    assert far.far[0]
    assert far.high[0] / far.low[0] > near.high[0] / near.low[0]


def test_leaving_out_is_fitting_without():
    """Few runs are their own inducing points, so the points stay out of the comparison."""
    x, y, sources = made_up(2, runs=60)
    off, _ = correction.held_out(x, y, sources, sources)
    off_again, _ = correction.held_out(x, np.where(np.asarray(sources) == "s3", 9.0, y), sources, sources)
    left = np.asarray(sources) == "s3"
    assert off_again[left] == pytest.approx(off[left] + 9.0 - y[left]), "a prediction does not see what is left out"
    assert np.median(np.abs(off)) < 0.15 < np.median(np.abs(y))


def test_a_run_that_the_others_do_not_bear_out_counts_for_less():
    pytest.importorskip("sklearn")
    x, y, sources = made_up(3)
    new_x, new_y, _ = made_up(4)
    slow = np.arange(len(y)) % 12 == 0
    wrong = {}
    for heavy in (correction.HEAVY, 1e9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(correction, "HEAVY", heavy)
            fitted = correction.fit(x, np.where(slow, y + 2.0, y), sources, sources, {})
        wrong[heavy] = np.median(np.abs(np.log(fitted.predict(new_x).factor) - new_y))
    assert wrong[correction.HEAVY] < 0.6 * wrong[1e9]


def test_what_is_shipped_holds_no_run():
    shipped = correction.shipped()
    assert len(shipped.points) < shipped.about["runs"] / 5
    assert set(shipped.about) == {"fitted", "runs", "method"}
