"""Live data: what arrives is sealed into segments, and training reads nothing but those."""

from lanewise.data.streams.open import open_stream
from lanewise.data.streams.sealed import Sealed, Segment
from lanewise.data.streams.stream import Stream

__all__ = ["Sealed", "Segment", "Stream", "open_stream"]
