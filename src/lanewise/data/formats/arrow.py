"""Arrow IPC files and streams, as in Hugging Face dataset folders (`save_to_disk`): a document a row."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from lanewise.data.formats.base import Document, Part, document_of, no_column, reading
from lanewise.errors import UserError

ROWS = 64  # turned into Python objects at once


def documents(path: Path, column: str, part: Part | None = None) -> Iterator[Document]:
    try:
        with reading(path), pa.memory_map(str(path)) as file:
            try:
                table = pa.ipc.open_stream(file)
                batches = iter(table)
            except pa.ArrowInvalid:
                table = pa.ipc.open_file(file)
                batches = (table.get_batch(i) for i in range(table.num_record_batches))
            if column not in table.schema.names:
                raise UserError(no_column(str(path), column, table.schema.names))
            yield from rows((batch[column] for batch in batches), column, str(path))
    except pa.ArrowException as e:
        raise UserError(f"{path}: cannot be read as Arrow ({str(e).splitlines()[0]}); repair it") from None


def rows(arrays: Iterator[pa.Array], column: str, where: str) -> Iterator[Document]:
    """A document for each value of a column that comes in pieces. Text need not be UTF-8: bytes are looked at later."""
    number = 0
    for array in arrays:
        values = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
        if is_text or values.type == pa.string_view():
            values = values.cast(pa.large_binary())
        is_ids = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        is_ids = is_ids and pa.types.is_integer(values.type.value_type)
        for value in values:
            number += 1
            content = value.values.to_numpy() if is_ids and value.is_valid else value.as_py()
            yield document_of(content, column, f"{where}, row {number}")
