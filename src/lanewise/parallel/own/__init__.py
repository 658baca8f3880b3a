"""Layouts for modules that this project has no code for: watch one run, derive a plan, prove it, spread it."""

from lanewise.parallel.own.derive import derive
from lanewise.parallel.own.parallelize import parallelize
from lanewise.parallel.own.plan import Group, Plan

__all__ = ["Group", "Plan", "derive", "parallelize"]
