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
    fitted = correction.fit(x, y, sources, {})
    new_x, new_y, _ = made_up(1)
    found = fitted.predict(new_x)
    assert np.median(np.abs(np.log(found.factor) - new_y)) < 0.1 < np.median(np.abs(new_y))
    inside = np.mean((np.log(found.low) <= new_y) & (new_y <= np.log(found.high)))
    assert 0.7 <= inside <= 0.95  # an 80% interval
    assert not found.far.any()


def test_says_when_it_extrapolates():
    pytest.importorskip("sklearn")
    x, y, sources = made_up(0)
    fitted = correction.fit(x, y, sources, {})
    near, far = fitted.predict(x[:1]), fitted.predict(np.full((1, 4), 40.0))
    assert far.far[0]
    assert far.high[0] / far.low[0] > near.high[0] / near.low[0]


def test_leaving_out_in_closed_form_is_leaving_out():
    """One source is left out by fitting without it."""
    x, y, sources = made_up(2, runs=60)
    basis = np.concatenate((x, np.ones((60, 1))), axis=1)
    off, _ = correction.leave_out(basis, y, sources)
    names = np.asarray(sources)
    kept, left = names != "s3", names == "s3"
    noise = correction.OFFSET * (names[kept][:, None] == names[kept]) + correction.NOISE * np.eye(kept.sum())
    weights = basis[kept].T @ np.linalg.solve(basis[kept] @ basis[kept].T + noise, y[kept])
    assert off[left] == pytest.approx(y[left] - basis[left] @ weights, abs=1e-9)


def test_what_is_shipped_holds_no_run():
    shipped = correction.shipped()
    assert len(shipped.points) < shipped.about["runs"] / 5
    assert set(shipped.about) == {"fitted", "runs", "method"}
