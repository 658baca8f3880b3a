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


def open_stream(
    url: str | Path,
    folder: str | Path,
    *,
    rows: int = 1000,
    errors: Errors = "error",
    encode: Encode | None = None,
    column: str = "text",
    group: str = "lanewise",
    settle: float = 5.0,
    timeout: float = TIMEOUT,
) -> Stream:
    """The stream at kafka://host:port/topic, or of a folder that grows, sealed into `folder` (on any store).

    Segments hold `rows` messages, those of files at most that many; `encode` makes tokens of text as it is sealed.
    `column` holds the text of tables in a folder. `group` keeps a topic's committed offsets: an empty `folder` begins
    there, or without them at the oldest message. Files must stand still for `settle` seconds.
    Raises UserError for an address that is none, or a folder that holds another stream.
    """
    url = str(url)
    source: Source
    if url.startswith("kafka://"):
        source = Kafka(url, group, rows, timeout)
    elif "://" in url and not url.startswith("file:///"):
        raise UserError(f"{url}: no stream of this kind; write kafka://host:port/topic, or the path of a folder")
    else:
        source = Folder(Path(url.removeprefix("file://")).expanduser(), column, rows, settle)
    cut = {"rows": rows, "errors": errors, "column": column, "encoded": encode is not None}
    return Stream(source, Sealed(open_store(folder, timeout=timeout)), cut, errors, encode)
