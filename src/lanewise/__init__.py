"""Lanewise: train large neural networks over many devices.

A run is defined by its lanes, not by its machines: the same bits on any number of replicas.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("parallelize", "Plan", "Group", "derive"):  # on first use: importing lanewise does not import torch
        return getattr(import_module("lanewise.parallel.own"), name)
    raise AttributeError(f"module 'lanewise' has no attribute {name!r}")
