"""Parquet: a document a row. A part is a range of row groups."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lanewise.data.formats.arrow import ROWS, rows
from lanewise.data.formats.base import Document, Part, no_column, reading
from lanewise.errors import UserError


def parts(path: Path, size: int) -> Iterator[Part]:
    with reading(path), pq.ParquetFile(path) as table:
        groups = table.num_row_groups
    each = max(1, round(groups * size / path.stat().st_size))
    for first in range(0, groups, each):
        yield first, min(first + each, groups)


def documents(path: Path, column: str, part: Part | None = None) -> Iterator[Document]:
    try:
        with reading(path), pq.ParquetFile(path) as table:
            if column not in table.schema_arrow.names:
                raise UserError(no_column(str(path), column, table.schema_arrow.names))
            groups = range(*part) if part else range(table.num_row_groups)
            batches = table.iter_batches(batch_size=ROWS, columns=[column], row_groups=list(groups))
            where = f"{path}, row group {part[0]} on" if part else str(path)
            yield from rows((batch.column(0) for batch in batches), column, where)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise UserError(f"{path}: cannot be read as Parquet ({str(e).splitlines()[0]}); repair it") from None
