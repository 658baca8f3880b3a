"""From an address to a stream."""

from pathlib import Path

from lanewise.data.stores import open_store
from lanewise.data.stores.retry import TIMEOUT
from lanewise.data.streams.folder import Folder
from lanewise.data.streams.kafka import Kafka
from lanewise.data.streams.sealed import Sealed
from lanewise.data.streams.stream import Encode, Source, Stream
from lanewise.data.text import Errors
from lanewise.errors import UserError

KAFKA, GROWS = "kafka://", "grow:"


def open_stream(
    url: str | Path,
    folder: str | Path,
    *,
    rows: int = 1000,
    errors: Errors = "error",
    encode: Encode | None = None,
    encoding: str = "",
    column: str = "text",
    group: str = "lanewise",
    settle: float = 5.0,
    timeout: float = TIMEOUT,
) -> Stream:
    """The stream at kafka://host:port/topic, or of a folder that grows (its path, or grow:path).

    It is sealed into `folder`, on any store.

    Segments hold `rows` messages, those of files at most that many; `encode` makes rows of tokens of the texts of a
    segment as it is sealed, and `encoding` tells one way to do so from another.
    `column` holds the text of tables in a folder. `group` keeps a topic's committed offsets: an empty `folder` begins
    there, or without them at the oldest message. Files must stand still for `settle` seconds.
    Raises UserError for an address that is none, or a folder that holds another stream.
    """
    url = str(url)
    source: Source
    if url.startswith(KAFKA):
        source = Kafka(url, group, rows, timeout)
    elif "://" in url and not url.startswith("file:///"):
        raise UserError(f"{url}: no stream of this kind; write kafka://host:port/topic, or grow:FOLDER")
    else:
        source = Folder(Path(url.removeprefix(GROWS).removeprefix("file://")).expanduser(), column, rows, settle)
    cut = {"rows": rows, "errors": errors, "column": column, "encoded": encoding or encode is not None}
    return Stream(source, Sealed(open_store(folder, timeout=timeout)), cut, errors, encode)
