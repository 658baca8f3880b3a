"""The learned part of a prediction: how far the analytic time is off, and how sure one can be.

A Gaussian process on the logarithm of measured / analytic time (Rasmussen & Williams, 2006), made small by inducing
points (subset of regressors, section 8.3.1): the points are the middles of clusters, so a fitted file holds no run.
Runs of one source share an offset that nobody can know of a new source: it is part of the model while fitting, and of
the interval when predicting. scikit-learn is needed to fit, numpy to predict.
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
        x = _centred(features_NF, self.mean)
        basis = _basis(x, self.points, self.root)
        log = basis @ self.weights
        doubt = np.einsum("nb,bc,nc->n", basis, self.covariance, basis)
        explained = np.sum(basis[:, : len(self.points)] ** 2, axis=1) / SMOOTH
        unexplained = np.clip(1 - explained, 0, 1)
        deviation = np.sqrt(doubt + SMOOTH * unexplained * 0.2 + OFFSET + NOISE) * self.spread
        return Corrected(np.exp(log), np.exp(log - deviation), np.exp(log + deviation), unexplained > FAR)

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


def fit(features: Floats, log_ratio: Floats, groups: Sequence[str], about: dict[str, Any]) -> Correction:
    """log_ratio: log(measured / analytic) of each run; groups: their sources."""
    mean = features.mean(0)
    x = _centred(features, mean)
    points = middles(x)
    root = _root(points)
    basis = _basis(x, points, root)
    held_out, deviation = leave_out(basis, log_ratio, groups)
    precision = np.linalg.inv(_noise(groups))
    covariance = np.linalg.inv(np.eye(basis.shape[1]) + basis.T @ precision @ basis)
    weights = covariance @ basis.T @ precision @ log_ratio
    spread = float(np.quantile(np.abs(held_out) / deviation, 0.8))
    return Correction(mean, points, root, weights, covariance, spread, about)


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


def _noise(groups: Sequence[str]) -> Floats:
    names = np.asarray(groups)
    return OFFSET * (names[:, None] == names[None]) + NOISE * np.eye(len(names))


def leave_out(basis: Floats, log_ratio: Floats, groups: Sequence[str]) -> tuple[Floats, Floats]:
    """What each run is off by, and the deviation stated, when all runs of its group are left out; in closed form
    (Rasmussen & Williams, section 5.4.2, by blocks)."""
    names = np.asarray(groups)
    inverse = np.linalg.inv(basis @ basis.T + _noise(groups))
    pulled = inverse @ log_ratio
    residual, deviation = np.zeros(len(names)), np.zeros(len(names))
    for name in np.unique(names):
        own = np.flatnonzero(names == name)
        block = np.linalg.inv(inverse[np.ix_(own, own)])
        residual[own] = block @ pulled[own]
        deviation[own] = np.sqrt(np.diag(block))
    return residual, deviation


def held_out(features: Floats, log_ratio: Floats, groups: Sequence[str]) -> tuple[Floats, Floats]:
    """The same from features, with the inducing points that `fit` would choose. The points see the features of what is
    left out, never its times."""
    x = _centred(features, features.mean(0))
    points = middles(x)
    return leave_out(_basis(x, points, _root(points)), log_ratio, groups)
