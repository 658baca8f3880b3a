"""Every kind of source, and every way to name a wrong one."""

import bz2
import gzip
import json
import os
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from token_folder import everything

from lanewise.data import sources
from lanewise.data.formats import lines
from lanewise.errors import UserError

TEXTS = ["first\ntext", "zwei: größer", "三"]


def write_lines(path: Path, rows: list, opener=open) -> Path:
    with opener(path, "wb") as file:
        file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return path


def zstd(path: Path, mode: str):
    return pa.CompressedOutputStream(pa.OSFile(str(path), mode), "zstd")


def test_text_file(tmp_path, built):
    (tmp_path / "any.name").write_bytes(b"a\r\nb\n\n")
    assert "".join(everything(built(tmp_path / "any.name", held_out=0))) == "a\r\nb\n\n"


def test_folder_takes_text_and_tables_and_leaves_out_what_is_hidden(tmp_path, built):
    root = tmp_path / "source"
    for name in ("a.txt", "deep/er/b.md", "c.py", ".hidden.txt", ".git/d.txt", "__pycache__/e.py", "f.bin", "g.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    write_lines(root / "h.jsonl", [{"text": "h1"}, {"text": "h2"}])
    (root / "i.txt.gz").write_bytes(gzip.compress(b"i"))
    os.mkfifo(root / "pipe.txt")  # reading it would never end
    (root / "nowhere.txt").symlink_to(root / "missing")
    assert everything(built(root)) == ["a.txt", "c.py", "deep/er/b.md", "h1", "h2", "i"]


def test_glob_takes_what_it_matches(tmp_path, built, monkeypatch):
    for name in ("x/1.dat", "x/y/2.dat", "x/3.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert everything(built(tmp_path / "x" / "**" / "*.dat")) == ["x/1.dat", "x/y/2.dat"]
    monkeypatch.chdir(tmp_path)
    assert everything(built("x/*")) == ["x/1.dat", "x/3.txt"]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_lines(tmp_path, built, suffix):
    path = write_lines(tmp_path / f"rows{suffix}", [{"body": text, "n": 1} for text in TEXTS])
    assert everything(built(path, text_field="body")) == sorted(TEXTS)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_parquet(tmp_path, built, kind):
    texts = TEXTS * 50  # more than one batch of rows
    column = pa.array([t.encode() for t in texts] if kind == pa.binary() else texts, kind)
    pq.write_table(pa.table({"body": column, "n": range(150)}), tmp_path / "rows.parquet", row_group_size=40)
    assert everything(built(tmp_path / "rows.parquet", text_field="body")) == sorted(texts)


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".bz2", bz2.open), (".zst", zstd)])
def test_packed(tmp_path, built, suffix, opener):
    path = write_lines(tmp_path / f"rows.jsonl{suffix}", [{"text": text} for text in TEXTS], opener)
    assert everything(built(path)) == sorted(TEXTS)
    long = "".join(f"line {i}\n" for i in range(40_000))  # several chunks
    with opener(tmp_path / f"long.txt{suffix}", "wb") as file:
        file.write(long.encode())
    assert "".join(everything(built(tmp_path / f"long.txt{suffix}", held_out=0))) == long


def test_python_is_the_library_without_installed_packages():
    files = sources.find("python")
    names = [file.name for file in files]
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any("-packages" in name for name in names)
    root = Path(sysconfig.get_path("stdlib"))
    below = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    assert names == sorted(name for name in below if "-packages/" not in name)


def fails(built, source, *words: str, **changes) -> None:
    """With one line that holds all of these words."""
    with pytest.raises(UserError) as caught:
        built(source, **changes)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message


def test_nothing_there(tmp_path, built):
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"\xff\xd8")
    fails(built, tmp_path / "missing", "there is no", "missing", "name a file, folder or glob")
    fails(built, "", "there is no ''")
    fails(built, tmp_path / "*.txt", "no file matches", "*.txt")
    fails(built, tmp_path / "empty", "no text files below", "glob")
    fails(built, tmp_path / "photos", "no text files below", "glob")
    fails(built, "/dev/null", "not a regular file")


def test_text_on_a_store_is_refused_with_the_way_to_go():
    with pytest.raises(UserError, match=r"no shard set at ftp://host/texts, and only those.*--out ftp://host/texts"):
        sources.find("ftp://host/texts")


def test_wrong_column_lists_the_columns(tmp_path, built):
    rows = write_lines(tmp_path / "rows.jsonl", [{"text": "fine"}, {"body": "b", "id": 1}])
    fails(built, rows, "rows.jsonl, line 2 (at byte 17)", "no column 'text'", "data.text_field", "body, id")
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "rows.parquet")
    fails(built, tmp_path / "rows.parquet", "rows.parquet", "no column 'text'", "data.text_field", "body, id")


def test_column_that_is_not_text(tmp_path, built):
    rows = write_lines(tmp_path / "rows.jsonl", [{"text": 3}])
    fails(built, rows, "line 1", "holds int", "data.text_field")
    pq.write_table(pa.table({"text": [1.5]}), tmp_path / "rows.parquet")
    fails(built, tmp_path / "rows.parquet", "row 1", "holds float", "data.text_field")


def test_lines_that_are_not_rows(tmp_path, built):
    (tmp_path / "pretty.json").write_text('{\n "text": "a"\n}\n')
    fails(built, tmp_path / "pretty.json", "line 1", "one object a line")
    (tmp_path / "list.jsonl").write_text('["a"]\n')
    fails(built, tmp_path / "list.jsonl", "line 1", "one object a line")
    (tmp_path / "deep.jsonl").write_text('{"text":' + "[" * 100_000)
    fails(built, tmp_path / "deep.jsonl", "line 1", "one object a line")


def test_line_too_long_to_parse(tmp_path, built, monkeypatch):
    monkeypatch.setattr(lines, "ROW_LIMIT", 2**20)
    rows = write_lines(tmp_path / "rows.jsonl", [{"text": "short"}, {"text": "x" * 2**20}])
    fails(built, rows, "line 2", "longer than 1 MB", "split it")


def test_damaged_files(tmp_path, built):
    packed = gzip.compress(os.urandom(10_000))
    (tmp_path / "cut.txt.gz").write_bytes(packed[:-20])
    fails(built, tmp_path / "cut.txt.gz", "cut.txt.gz", "cannot read it")
    pq.write_table(pa.table({"text": ["a" * 1000]}), tmp_path / "whole.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-9])
    fails(built, tmp_path / "cut.parquet", "cut.parquet", "cannot be read")


def test_unreadable(tmp_path, built, monkeypatch):
    (tmp_path / "a.txt").write_text("a")

    def refuse(path, mode="r"):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)  # tests may run as root, whom permissions do not stop
    fails(built, tmp_path / "a.txt", "a.txt", "Permission denied")
