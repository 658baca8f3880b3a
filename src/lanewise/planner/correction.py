"""The learned part of a prediction: how far the analytic time is off, and how sure one can be.

A Gaussian process on the logarithm of measured / analytic time (Rasmussen & Williams, 2006), made small by inducing
points (subset of regressors, section 8.3.1): the points are the middles of clusters, so a fitted file holds no run.
Runs of one source share an offset that nobody can know of a new source: it is part of the model while fitting, and of
the interval when predicting. Runs that the others do not bear out count for less (Huber's weights): tables have slow
days, software of every age, and misprints. scikit-learn is needed to fit, numpy to predict.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from lanewise.errors import UserError
from lanewise.planner.choice import Floats

LENGTH, SMOOTH, LINEAR, LEVEL = 8.0, 0.1, 0.002, 0.05  # prior: scale of similarity, and variances of its three parts
OFFSET, NOISE = 0.005, 0.006  # variance between sources, and within one
HEAVY = 1.5  # deviations beyond which a run counts for less
POINTS = 120
FAR = 0.35  # share of the prior's smooth variance left unexplained: beyond it a prediction extrapolates
SHIPPED = Path(__file__).parent / "correction.npz"


class Corrected(NamedTuple):
    """factor: of the analytic time. low, high: factors of an interval that holds 80% of runs (p10 to p90).
    far: whether nothing like it was among the runs learned from."""

    factor: Floats
    low: Floats
    high: Floats
    far: Any


@dataclass(frozen=True)
class Correction:
    """points [M, F]; mean [F] of the features; root [M, M]: their kernel's inverse's Cholesky factor; weights and
    covariance of the M + F + 1 coefficients; spread: interval's half-width in standard deviations; about: what it was
    fitted on, when and how well it did on sources held out."""

    mean: Floats
    points: Floats
    root: Floats
    weights: Floats
    covariance: Floats
    spread: float
    about: dict[str, Any]

    def predict(self, features_NF: Floats) -> Corrected:
        basis = _basis(_centred(features_NF, self.mean), self.points, self.root)
        log = basis @ self.weights
        unknown = _unexplained(basis, len(self.points))
        doubt = np.einsum("nb,bc,nc->n", basis, self.covariance, basis) + SMOOTH * unknown + OFFSET + NOISE
        deviation = np.sqrt(doubt) * self.spread
        return Corrected(np.exp(log), np.exp(log - deviation), np.exp(log + deviation), unknown > FAR)

    def save(self, path: Path) -> None:
        arrays: dict[str, Any] = {name: np.asarray(getattr(self, name), dtype=np.float32) for name in _ARRAYS}
        np.savez_compressed(path, spread=self.spread, about=json.dumps(self.about), **arrays)


class Learned(Protocol):
    def predict(self, features_NF: Floats) -> Corrected: ...


_ARRAYS = ("mean", "points", "root", "weights", "covariance")


@cache
def shipped() -> Correction:
    """The one that comes with the program."""
    with np.load(SHIPPED) as file:
        arrays = {name: file[name].astype(np.float64) for name in _ARRAYS}
        return Correction(**arrays, spread=float(file["spread"]), about=json.loads(str(file["about"])))


def _centred(features: Floats, mean: Floats) -> Floats:
    return np.clip(features - mean, -4.0, 4.0)


def _kernel(a: Floats, b: Floats) -> Floats:
    """Matern 3/2."""
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    r = np.sqrt(3 * np.maximum(squared, 0)) / LENGTH
    similar: Floats = (1 + r) * np.exp(-r)
    return similar


def _basis(x: Floats, points: Floats, root: Floats) -> Floats:
    """[n, M + F + 1] functions whose coefficients have a standard normal prior."""
    smooth = np.sqrt(SMOOTH) * _kernel(x, points) @ root
    return np.concatenate((smooth, np.sqrt(LINEAR) * x, np.full((len(x), 1), np.sqrt(LEVEL))), axis=1)


def _unexplained(basis: Floats, points: int) -> Floats:
    """[n] share of the prior's smooth variance that the inducing points leave open."""
    return np.clip(1 - np.sum(basis[:, :points] ** 2, axis=1) / SMOOTH, 0, 1)


def fit(
    features: Floats, log_ratio: Floats, sources: Sequence[str], publishers: Sequence[str], about: dict[str, Any]
) -> Correction:
    """log_ratio: log(measured / analytic) of each run. The interval is as wide as the runs of a
    publisher who is left out need it."""
    mean = features.mean(0)
    x = _centred(features, mean)
    points = middles(x)
    root = _root(points)
    basis = _basis(x, points, root)
    pull = _pull(basis, log_ratio, sources)
    off, deviation = held_out(features, log_ratio, sources, publishers)
    spread = _quantile(np.abs(off) / deviation, _rarity(publishers), 0.8)
    covariance = np.eye(basis.shape[1]) - basis.T @ pull @ basis
    return Correction(mean, points, root, basis.T @ pull @ log_ratio, covariance, spread, about)


def _rarity(names: Sequence[str]) -> Floats:
    """[n] weights that keep a publisher of many runs from speaking for everybody."""
    _, which, count = np.unique(names, return_inverse=True, return_counts=True)
    weights: Floats = count[which] ** -0.5
    return weights


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(below, share)])


def middles(x: Floats) -> Floats:
    if len(x) <= POINTS:
        return x
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        raise UserError("fitting needs scikit-learn: pip install 'lanewise[plan]'") from None
    centres: Floats = KMeans(POINTS, n_init=1, random_state=0).fit(x).cluster_centers_
    return centres


def _root(points: Floats) -> Floats:
    inverse = np.linalg.inv(_kernel(points, points) + 1e-6 * np.eye(len(points)))
    return np.linalg.cholesky((inverse + inverse.T) / 2)


def _pull(basis: Floats, log_ratio: Floats, sources: Sequence[str]) -> Floats:
    """[n, n] the inverse of the runs' covariance, in which a run far from what the others say has more noise."""
    names = np.asarray(sources)
    shared = basis @ basis.T + OFFSET * (names[:, None] == names[None])
    noise = np.full(len(names), NOISE)
    for _ in range(2):  # a third round changes little
        inverse = np.linalg.inv(shared + np.diag(noise))
        variance = 1 / np.diag(inverse)  # of what a run is off by when it alone is left out
        off = inverse @ log_ratio * variance
        noise = NOISE * np.maximum(1, np.abs(off) / (HEAVY * np.sqrt(variance - noise + NOISE)))
    pull: Floats = np.linalg.inv(shared + np.diag(noise))
    return pull


def held_out(
    features: Floats, log_ratio: Floats, sources: Sequence[str], groups: Sequence[str]
) -> tuple[Floats, Floats]:
    """What each run is off by, and the deviation stated, when all runs of its group are left out. The inducing points
    see the features of what is left out, never its times."""
    x = _centred(features, features.mean(0))
    points = middles(x)
    basis = _basis(x, points, _root(points))
    names, labels = np.asarray(sources), np.asarray(groups)
    off, variance = np.zeros(len(x)), np.zeros(len(x))
    for label in np.unique(labels):
        own = labels == label
        others = basis[~own]
        pull = _pull(others, log_ratio[~own], names[~own])
        across = basis[own] @ others.T
        off[own] = log_ratio[own] - across @ pull @ log_ratio[~own]
        variance[own] = np.sum(basis[own] ** 2, axis=1) - np.einsum("ij,jk,ik->i", across, pull, across)
    return off, np.sqrt(variance + SMOOTH * _unexplained(basis, len(points)) + OFFSET + NOISE)
