"""Lanewise: train large neural networks over many devices.

A run is defined by its lanes, not by its machines: the same bits on any number of replicas.
"""

__version__ = "0.1.0"
