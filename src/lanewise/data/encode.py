"""Documents to tokens: which side each is on, its pieces, and the token ids of those."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from lanewise import config
from lanewise.data import sources, store, tokenizer
from lanewise.data.chat import Template
from lanewise.data.formats.base import Document, Part
from lanewise.data.text import Errors, pieces
from lanewise.data.transform import named
from lanewise.errors import UserError

BATCH = 2**20  # characters encoded at once
NONE: frozenset[int] = frozenset()
Extract = tuple[sources.File, Part | None]  # a file, or a part of it


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a document: its text, and once they are known the bytes of its token ids."""

    document: int  # counted over all
    side: store.Side
    id: str  # its file, and in a table its row; relative to the source
    file: str  # its file's name, relative to the source
    text: str = ""
    tokens: bytes = b""
    learned: bytes | None = None  # a bool a token: whether it is worth predicting; None: all are


class Encoding:
    """How the documents of a source become tokens. `counts` gets what became of those that did not."""

    def __init__(self, data: config.Data, words: tokenizer.Tokenizer) -> None:
        self.data, self.words = data, words
        self.dtype = np.dtype("<u2" if words.vocab_size <= 2**16 else "<u4")
        self.encode = tokenizer.encoder(words, "H" if self.dtype.itemsize == 2 else "I", words.is_ours)
        self.template = Template(words, data)
        self.keeps: Callable[[str], bool] = named(data.filter, "data.filter") if data.filter else lambda text: True

    def __call__(self, extracts: Iterable[Extract], counts: Counter[str], drop: Set[int] = NONE) -> Iterator[Piece]:
        """The pieces of all documents that stay, in order; those of one document follow each other.

        drop: numbers of documents to leave out, as duplicates.
        """
        batch: list[Piece] = []
        size = 0
        for piece in self._pieces(extracts, counts, drop):
            batch.append(piece)
            size += len(piece.text) + len(piece.tokens) + 256  # a piece takes room itself
            if size >= BATCH:
                yield from self._encoded(batch)
                batch, size = [], 0
        yield from self._encoded(batch)

    def texts(self, extracts: Iterable[Extract]) -> Iterator[str]:
        """The text of each document by which duplicates are found: of a long one, its beginning."""
        for _, document in documents(extracts, self.data):
            if document.tokens is not None:
                yield document.tokens.tobytes().hex()
            elif document.turns is not None:
                yield "\n".join(str(turn.get("content") or "") for turn in document.turns)
            else:
                yield next(document.chunks(), b"").decode("utf-8", "replace")

    def _encoded(self, batch: list[Piece]) -> Iterator[Piece]:
        found = iter(self.encode([piece.text for piece in batch if not piece.tokens]))
        return (piece if piece.tokens else replace(piece, text="", tokens=next(found)) for piece in batch)

    def _pieces(self, extracts: Iterable[Extract], counts: Counter[str], drop: Set[int]) -> Iterator[Piece]:
        for number, (file, document) in enumerate(documents(extracts, self.data)):
            if number in drop:
                counts["duplicates"] += 1
            else:
                yield from self._of(document, number, file, counts)

    def _of(self, document: Document, number: int, file: sources.File, counts: Counter[str]) -> Iterator[Piece]:
        """A document's side hangs on its content alone (the first piece), not on its place."""
        id = file.name + document.where.removeprefix(str(file.path))
        if document.tokens is not None or document.turns is not None:
            if document.tokens is not None:
                tokens, learned = self._checked(document), None
            else:
                tokens, learned = self.template.encode(document, self.dtype)
            if not tokens:
                counts["empty"] += 1
            else:
                yield Piece(number, self._side(tokens), id, file.name, "", tokens, learned)
            return
        if self.data.tokenizer == "ids":
            raise UserError(f"{document.where}: holds text; data.tokenizer='ids' is for sources of token ids")
        side: store.Side | None = None
        skipped = counts["skipped"]
        for text in pieces(document, policy(self.data), counts):
            if side is None:
                if len(text) < self.data.min_chars or not self.keeps(text):
                    counts["filtered"] += 1
                    return
                side = self._side(text.encode())
            yield Piece(number, side, id, file.name, text)
        counts["empty"] += side is None and counts["skipped"] == skipped

    def _side(self, content: bytes) -> store.Side:
        return "held" if xxhash.xxh3_64_intdigest(content) < self.data.held_out * 2**64 else "train"

    def _checked(self, document: Document) -> bytes:
        """Ids as they come, but for an end-of-text token of their own."""
        assert document.tokens is not None
        ids = document.tokens[:-1] if document.tokens[-1:].tolist() == [self.words.end] else document.tokens
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.words.vocab_size:
            raise UserError(
                f"{document.where}: token id {ids.max() if ids.min() >= 0 else ids.min()} is none of the "
                f"{self.words.vocab_size} of data.tokenizer; name the tokenizer these ids are of"
            )
        return ids.astype(self.dtype).tobytes()


def documents(extracts: Iterable[Extract], data: config.Data) -> Iterator[tuple[sources.File, Document]]:
    """Each document with its file."""
    for file, part in extracts:
        for document in sources.documents(file, data.text_field, part):
            yield file, document


def trains(data: config.Data) -> bool:
    """Whether the tokenizer is made here rather than read from a file."""
    return data.tokenizer in ("bpe", "bytes", "ids")


def policy(data: config.Data) -> Errors:
    """Python's library has a few files in other encodings on purpose: no fault of the user, so left out and counted."""
    return "skip" if (data.source, data.errors) == ("python", "error") else data.errors
