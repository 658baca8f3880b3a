"""Faults of other systems' data paths, by their number in the list of faults."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from token_folder import everything

from lanewise import config
from lanewise.data import store
from lanewise.data.dataset import Dataset
from lanewise.data.prepare import prepare
from lanewise.errors import UserError

LATIN = "größer".encode("latin-1")


def small(**changes) -> config.Batch:
    return config.Batch(**{"lanes": 2, "microbatches": 4, "size": 1, "sequence_length": 8, **changes})


class TestD1Empty:
    """An empty file, shard or document contributes nothing and is counted."""

    def test_counted(self, tmp_path, settings):
        (tmp_path / "source").mkdir()
        for name in ("a.txt", "b.jsonl", "c.parquet"):
            (tmp_path / "source" / name).write_bytes(b"")
        (tmp_path / "source" / "d.jsonl").write_text('\n{"text": ""}\n{"text": null}\n{"text": "d"}\n\n')
        (tmp_path / "source" / "blank.jsonl").write_text("\n\n")
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "source" / "e.parquet")
        pq.write_table(pa.table({"text": ["f", None, ""]}), tmp_path / "source" / "f.parquet")
        said: list[str] = []
        folder = prepare(settings(tmp_path / "source"), said.append)
        assert everything(folder) == ["d", "f"]
        assert store.read_meta(folder)["empty"] == 5 + 2 + 2
        assert "9 empty" in said[-1]

    def test_nothing_but_empty(self, tmp_path, settings):
        (tmp_path / "a.txt").write_text("")
        (tmp_path / "b.txt").write_text("")
        with pytest.raises(UserError, match=r"no text in .*2 documents empty.*choose another source"):
            prepare(settings(tmp_path / "*.txt"))


class TestD2NotUTF8:
    """Refused by name and place, replaced or skipped, as asked, and counted."""

    @pytest.fixture
    def source(self, tmp_path):
        root = tmp_path / "source"
        root.mkdir()
        (root / "good.txt").write_text("größer")
        (root / "latin.txt").write_bytes(LATIN)
        (root / "rows.jsonl").write_bytes(
            b'{"text": "row"}\n{"text": "' + LATIN + b'"}\n{"text": "half \\ud83d", "id": "' + LATIN + b'"}\n'
        )
        pq.write_table(pa.table({"text": pa.array([b"cell", LATIN], pa.binary())}), root / "rows.parquet")
        return root

    @pytest.mark.parametrize(
        ("name", "place"),
        [
            ("latin.txt", "latin.txt: not UTF-8 at byte 2;"),
            ("rows.jsonl", "rows.jsonl, line 2 (at byte 16): not UTF-8 at byte 2;"),
            ("rows.parquet", "rows.parquet, row 2: not UTF-8 at byte 2;"),
        ],
    )
    def test_error_names_file_and_byte(self, source, settings, name, place):
        with pytest.raises(UserError) as caught:
            prepare(settings(source / name))
        assert place in str(caught.value)
        assert "data.errors=replace" in str(caught.value)

    def test_skip(self, source, settings):
        folder = prepare(settings(source, errors="skip"))
        assert everything(folder) == ["cell", "größer", "row"]
        assert (store.read_meta(folder)["skipped"], store.read_meta(folder)["replaced"]) == (4, 0)

    def test_replace(self, source, settings):
        folder = prepare(settings(source, errors="replace"))
        replaced = LATIN.decode("utf-8", "replace")
        half = "half " + "\ud83d".encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        assert everything(folder) == sorted(["cell", "größer", "row", replaced, replaced, replaced, half])
        assert (store.read_meta(folder)["skipped"], store.read_meta(folder)["replaced"]) == (0, 4)

    def test_nothing_left(self, source, settings):
        with pytest.raises(UserError, match=r"no text in .*1 skipped as not UTF-8.*data.errors=replace"):
            prepare(settings(source / "latin.txt", errors="skip"))

    def test_pythons_own_files_in_other_encodings_do_not_stop_the_default_run(self, tmp_path, settings, monkeypatch):
        (tmp_path / "library").mkdir()
        (tmp_path / "library" / "latin.py").write_bytes(b"# coding: latin-1\n# " + LATIN)
        (tmp_path / "library" / "good.py").write_text("x = 1\n" * 10)
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "library"))
        folder = prepare(settings("python", held_out=0))
        assert everything(folder) == ["x = 1\n" * 10]
        assert store.read_meta(folder)["skipped"] == 1


@pytest.mark.parametrize("pack", ["stream", "document"])
def test_D4_a_document_longer_than_the_sequence_is_split(tmp_path, settings, pack):
    rows = ["x", "0123456789" * 50, "y"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = settings(tmp_path / "rows.jsonl", pack=pack, held_out=0)
    dataset = Dataset(prepare(data), data, small(), seed=0, epochs=1)
    counted = sum(
        dataset.slot(s, l, k).valid for s in range(1, 1 + dataset.steps_per(1)) for l in (0, 1) for k in range(4)
    )
    tokens = sum(map(len, rows)) + len(rows)
    assert counted == tokens - (1 if pack == "stream" else len(rows))


def test_D6_every_epoch_has_its_own_order_and_the_same_one_again(tmp_path, settings):
    (tmp_path / "a.txt").write_text("abcdefgh" * 24)
    data = settings(tmp_path / "a.txt", held_out=0)

    def epochs(seed: int) -> list[list[str]]:
        dataset = Dataset(prepare(data), data, small(), seed)
        assert dataset.windows == 24
        steps = [[dataset.slot(s, l, k) for l in (0, 1) for k in range(4)] for s in range(1, 10)]
        samples = [sample.split(":")[1] for step in steps for slot in step for sample in slot.samples]
        return [samples[i : i + 24] for i in (0, 24, 48)]

    first, second, third = epochs(seed=0)
    assert sorted(first) == sorted(second) == sorted(third)
    assert first != second != third != first
    assert epochs(seed=0) == [first, second, third]
    assert epochs(seed=1)[0] not in (first, second, third)


@pytest.mark.parametrize("pack", ["stream", "document"])
def test_D10_labels_are_shifted_once(tmp_path, settings, pack):
    """A count up: what follows n is n + 1."""
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 127)))
    data = settings(tmp_path / "a.txt", pack=pack, held_out=0)
    dataset = Dataset(prepare(data), data, small(), seed=0, epochs=1)
    for lane in (0, 1):
        for k in range(4):
            slot = dataset.slot(1, lane, k)
            tokens, labels = slot.tokens_BT[slot.labels_BT > 0], slot.labels_BT[slot.labels_BT > 0]
            # printable ASCII stands at the start of the byte alphabet, but for the space
            inside = (tokens > 1) & (tokens < 94)
            assert inside.any()
            assert (labels[inside] == tokens[inside] + 1).all()


def test_N5_a_last_step_with_3_of_4_microbatches_counts_what_is_there(tmp_path, settings):
    (tmp_path / "a.txt").write_text("x" * (8 * 7))  # 57 tokens with the end: 7 windows, all full
    data = settings(tmp_path / "a.txt", held_out=0)
    dataset = Dataset(prepare(data), data, small(), seed=0, epochs=1)
    assert dataset.steps_per(1) == 1
    valid = [dataset.slot(1, lane, k).valid for lane in (0, 1) for k in range(4)]
    assert valid == [8, 8, 8, 8, 8, 8, 8, 0]
    assert np.array_equal(dataset.slot(1, 1, 3).labels_BT, np.full((1, 8), -100))
