"""TFRecord files of tf.train.Example: a document each, from a feature of bytes (text) or integers (token ids).

A record is its length (uint64), a masked CRC-32C of that, the bytes, a masked CRC-32C of those; see
https://www.tensorflow.org/tutorials/load_data/tfrecord. An Example is a protocol buffer: Features (1) is a map (1) from
name (1) to Feature (2), which is one of bytes_list (1), float_list (2) and int64_list (3), each with values (1).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lanewise.data.formats.base import Document, Part, document_of, no_column, opened, reading
from lanewise.errors import UserError

LIMIT = 2**30  # bytes of a record: a length above that is damage


def documents(path: Path, column: str, part: Part | None = None) -> Iterator[Document]:
    with reading(path):
        for number, record in enumerate(_records(path), start=1):
            where = f"{path}, record {number}"
            try:
                features = dict(_features(record))
            except (ValueError, IndexError, struct.error):
                raise UserError(f"{where}: not a tf.train.Example; choose another data.source") from None
            if column not in features:
                raise UserError(no_column(where, column, list(features)))
            yield document_of(features[column], column, where)


def _records(path: Path) -> Iterator[bytes]:
    try:
        from google_crc32c import value as crc
    except ImportError:
        raise UserError(f"{path}: reading TFRecord needs google-crc32c: pip install 'lanewise[formats]'") from None

    def sound(raw: bytes, mask: bytes) -> bool:
        sum_ = crc(raw)
        return (((sum_ >> 15) | (sum_ << 17)) + 0xA282EAD8) & 0xFFFFFFFF == struct.unpack("<I", mask)[0]

    number = 0
    with opened(path) as stream:
        while head := stream.read(12):
            number += 1
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else LIMIT
            body = stream.read(length + 4) if length < LIMIT and sound(head[:8], head[8:]) else b""
            if not body or len(body) < length + 4 or not sound(body[:-4], body[-4:]):
                raise UserError(f"{path}: record {number} is damaged or cut short; repair it")
            yield body[:-4]


def _features(record: bytes) -> Iterator[tuple[str, Any]]:
    for features in _fields(record, 1):
        for entry in _fields(features, 1):
            name = b"".join(_fields(entry, 1)).decode()
            yield name, _values(b"".join(_fields(entry, 2)))


def _values(feature: bytes) -> Any:
    """Bytes of the first value, an int64 array, or None for what is neither text nor ids."""
    for texts in _fields(feature, 1):
        return next(_fields(texts, 1), b"")
    for integers in _fields(feature, 3):
        return _integers(b"".join(_fields(integers, 1)))
    return None


def _fields(message: bytes, wanted: int) -> Iterator[bytes]:
    """The contents of a message's fields of one number; a lone integer as its packed form."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        start = at
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            length, start = _varint(message, at)
            at = start + length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(kind)
        if at > len(message):
            raise ValueError("cut short")
        if number == wanted:
            yield message[start:at]


def _integers(packed: bytes) -> np.ndarray:
    """Varints back to back: seven bits a byte, the lowest first; the last byte of each is below 128."""
    raw = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(raw < 128)
    starts = np.concatenate([[0], ends[:-1] + 1])
    numbers = np.zeros(len(ends), np.uint64)
    for i in range(int((ends - starts).max(initial=-1)) + 1):
        longer = starts + i <= ends
        numbers[longer] |= (raw[starts[longer] + i] & 127).astype(np.uint64) << np.uint64(7 * i)
    return numbers.astype(np.int64)


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = raw[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
