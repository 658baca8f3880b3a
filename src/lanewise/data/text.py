"""Bytes to text: what is not UTF-8 is refused, replaced or skipped, by name and counted; memory stays bounded."""

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from lanewise.data.formats.base import Document
from lanewise.errors import UserError

Errors = Literal["error", "replace", "skip"]


def pieces(document: Document, errors: Errors, counts: Counter[str]) -> Iterator[str]:
    """The text of a document in pieces of about one chunk, cut after a newline where there is one.

    No piece: the document is empty or was skipped. `counts` gets "skipped" or "replaced" when it is not UTF-8.
    Tokens never reach over a cut, which is a function of the content alone.
    """
    bad = first_bad_byte(document.chunks())
    if bad is not None:
        if errors == "error":
            raise UserError(
                f"{document.where}: not UTF-8 at byte {bad}; convert the file, or set data.errors=replace or skip"
            )
        counts["skipped" if errors == "skip" else "replaced"] += 1
        if errors == "skip":
            return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for i, chunk in enumerate(document.chunks()):
        if text:  # only now is it known that more follows: a small document stays whole
            cut = text.rfind("\n") + 1 or len(text)
            yield text[:cut]
            text = text[cut:]
        more = decoder.decode(chunk)
        text += more if i else more.removeprefix("\ufeff")
    if text := text + decoder.decode(b"", final=True):
        yield text


def first_bad_byte(chunks: Iterable[bytes]) -> int | None:
    """Where the bytes cease to be UTF-8, or None."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    at = 0
    try:
        for chunk in chunks:
            pending = len(decoder.getstate()[0])
            decoder.decode(chunk)
            at += len(chunk)
        pending = len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as e:
        return at - pending + e.start
    return None
