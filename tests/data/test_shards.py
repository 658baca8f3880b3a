"""Shard sets: readable by others, built on any number of processes or attempts, damage named."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lanewise import config
from lanewise.cli.main import main
from lanewise.data import shard_build, shard_writer, shards
from lanewise.data.dataset import Dataset
from lanewise.data.prepare import prepare
from lanewise.data.shard_build import build_shards
from lanewise.data.shards import ShardSet
from lanewise.errors import UserError

TEXTS = [f"document {i} " * random.Random(i).randrange(1, 40) + "größer" for i in range(300)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a b [1].x.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[:200]))
    pq.write_table(pa.table({"text": TEXTS[200:]}), folder / "c.parquet", row_group_size=9)
    return folder


@pytest.fixture
def small(monkeypatch):
    """Record batches, shards and tasks so small that there are many; in this process alone."""
    monkeypatch.setattr(shard_writer, "BATCH", 2000)
    monkeypatch.setattr(shard_writer, "SHARD", 8000)
    monkeypatch.setattr(shard_build, "TASK", 8000)

    class Here:
        """A pool of no processes."""

        def __init__(self, size, context, initializer, initargs):
            monkeypatch.setattr(shard_build, "leave_with_parent", lambda: None)
            initializer(*initargs)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def submit(self, call, *arguments):
            done = shard_build.Future()
            done.set_result(call(*arguments))
            return done

        map = staticmethod(map)

    monkeypatch.setattr(shard_build, "ProcessPoolExecutor", Here)


def make(source, out, *names, **settings) -> ShardSet:
    data = config.Data(**{"tokenizer": "bytes", "held_out": 0.1, **settings})
    build_shards([str(source), *names], data, str(out), 1, lambda text: None)
    return ShardSet(out)


def rows(out: Path, side: str) -> list[dict]:
    """What a shard set holds, read by pyarrow alone."""
    files = sorted(out.glob(f"{side}-*.arrow"))
    return [row for file in files for row in pa.ipc.open_file(str(file)).read_all().to_pylist()]


def test_readable_without_us(source, small, tmp_path):
    made = make(source, tmp_path / "set")
    found = rows(tmp_path / "set", "train") + rows(tmp_path / "set", "held")
    decode = made.tokenizer.decode
    assert sorted(decode(row["tokens"][:-1]) for row in found) == sorted(TEXTS)
    assert {row["tokens"][-1] for row in found} == {made.manifest["end_of_text"]}
    assert {row["source"] for row in found} == {"a b [1].x.jsonl", "c.parquet"}
    assert len({row["id"] for row in found}) == len(TEXTS)
    assert not any(str(source) in row["id"] for row in found), "the place of the source is no part of the set"
    assert len(list((tmp_path / "set").glob("train-*.arrow"))) > 5
    database = pytest.importorskip("duckdb").connect()
    table = pa.concat_tables(
        pa.ipc.open_file(str(file)).read_all() for file in (tmp_path / "set").glob("train-*.arrow")
    )
    database.register("shards", table)
    [counted] = database.execute("select count(*), sum(len(tokens)) from shards").fetchall()
    assert counted == (made.manifest["documents"]["train"], made.manifest["tokens"]["train"])


def test_tokens_are_views_of_the_files(source, small, tmp_path):
    made = make(source, tmp_path / "set").side("train")
    expected = [token for row in rows(tmp_path / "set", "train") for token in row["tokens"]]
    assert made.total == len(expected)
    assert made.read(0, made.total).tolist() == expected
    rng = random.Random(0)
    for _ in range(50):
        a = rng.randrange(made.total)
        b = min(made.total, a + rng.randrange(1, 3000))
        assert made.read(a, b).tolist() == expected[a:b]
    view = made.read(5, 9)
    assert not view.flags.owndata
    assert np.shares_memory(view, made.read(0, 10))
    lengths = [len(row["tokens"]) for row in rows(tmp_path / "set", "train")]
    assert made.starts.tolist() == np.cumsum([0, *lengths]).tolist()


def test_training_reads_what_it_reads_from_the_same_text(source, small, tmp_path):
    make(source, tmp_path / "set")
    batch = config.Batch(lanes=2, size=3, sequence_length=16)
    found = []
    for name in (source, tmp_path / "set"):
        data = config.Data(
            source=str(name), cache=str(tmp_path / "cache"), tokenizer="bytes", held_out=0.1, pack="document"
        )
        dataset = Dataset(prepare(data), data, batch, seed=3)
        found.append([dataset.slot(step, lane, 0) for step in (1, 7) for lane in (0, 1)])
    for a, b in zip(*found, strict=True):
        assert a.samples == b.samples
        assert np.array_equal(a.tokens_BT, b.tokens_BT)
        assert np.array_equal(a.labels_BT, b.labels_BT)


def test_from_afar_stretches_are_read_until_the_shard_is_here(source, small, tmp_path, monkeypatch):
    near = make(source, tmp_path / "set").side("train")
    places = [(a, min(a + 700, near.total)) for a in range(0, near.total, 997)]
    expected = [near.read(*place).tolist() for place in places]
    monkeypatch.setattr(shards, "is_far", lambda address: True)
    arrived, opened, ranged = threading.Event(), ShardSet.opened, []

    def slowly(self, name):
        if name.startswith("train-0"):
            arrived.wait(20)
        return opened(self, name)

    monkeypatch.setattr(ShardSet, "opened", slowly)
    far = ShardSet(tmp_path / "set").side("train")
    read = far.set.store.read
    monkeypatch.setattr(far.set.store, "read", lambda *place: ranged.append(place) or read(*place))
    assert [far.read(*place).tolist() for place in places] == expected
    assert len(ranged) >= len(places)
    assert sum(stop - start for _, start, stop in ranged) == 2 * sum(b - a for a, b in places), "no byte too many"
    arrived.set()
    for fetched in far.fetching.values():
        fetched.result(timeout=20)
    ranged.clear()
    assert [far.read(*place).tolist() for place in places] == expected
    assert ranged == []


def test_D8_one_shard_feeds_every_lane(source, tmp_path, small, monkeypatch):
    monkeypatch.setattr(shard_writer, "SHARD", 2**30)
    monkeypatch.setattr(shard_build, "TASK", 2**30)
    made = make(source, tmp_path / "set", held_out=0)
    assert made.manifest["shard_count"] == 1
    data = config.Data(source=str(tmp_path / "set"), cache=str(tmp_path / "cache"))
    dataset = Dataset(prepare(data), data, config.Batch(lanes=64, sequence_length=16), seed=0)
    slots = [dataset.slot(1, lane, 0) for lane in range(64)]
    assert all(slot.valid == 16 for slot in slots)
    assert len({sample for slot in slots for sample in slot.samples}) == 64


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_any_number_of_processes_and_attempts_make_the_same_set(source, tmp_path):
    """Real processes; one build is killed as soon as a task is whole, and goes on."""
    big = tmp_path / "big"
    big.mkdir()
    for i in range(6):
        shutil.copy(source / "a b [1].x.jsonl", big / f"{i}.jsonl")
    code = (
        "import sys; from lanewise import config; from lanewise.data import shard_build as b\n"
        "b.TASK = 30_000\n"
        "d = config.Data(tokenizer='bytes')\n"
        "if __name__ == '__main__': b.build_shards([sys.argv[1]], d, sys.argv[2], int(sys.argv[3]), print)\n"
    )
    (tmp_path / "build.py").write_text(code)

    def build(out: Path, workers: int) -> subprocess.Popen:
        words = [sys.executable, str(tmp_path / "build.py"), str(big), str(out), str(workers)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    assert build(tmp_path / "one", 1).wait(60) == 0
    killed = build(tmp_path / "two", 2)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "two").glob("task-*")) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    again = build(tmp_path / "two", 2)
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    assert "going on with the others" in said or "is complete" in said
    found = [everything(tmp_path / name) for name in ("one", "two")]
    assert {name for name in found[0] if name.startswith("task")} == set()
    assert found[0] == {name: raw for name, raw in found[1].items() if not name.startswith(".")}


def test_a_build_goes_on_only_with_its_own(source, small, tmp_path):
    make(source, tmp_path / "set")
    before = everything(tmp_path / "set")
    make(source, tmp_path / "set")
    assert everything(tmp_path / "set") == before
    with pytest.raises(UserError, match="other sources or settings: choose another --out"):
        make(source, tmp_path / "set", held_out=0.2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="holds other files"):
        make(source, tmp_path / "full")


def test_parts_of_files_hold_each_row_once(small, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    lines = [json.dumps({"text": f"{i} " * (i % 50)}) + "\n" for i in range(1, 900)]
    (folder / "l.jsonl").write_text("".join(lines))
    pq.write_table(pa.table({"text": [f"p{i} " * 9 for i in range(900)]}), folder / "p.parquet", row_group_size=7)
    assert len(list(shard_build._tasks(shard_build.sources.find(str(folder))))) > 5
    made = make(folder, tmp_path / "set", held_out=0)
    found = sorted(made.tokenizer.decode(row["tokens"][:-1]) for row in rows(tmp_path / "set", "train"))
    expected = [f"{i} " * (i % 50) for i in range(1, 900) if i % 50] + [f"p{i} " * 9 for i in range(900)]
    assert found == sorted(expected)


# ------------------------------------------------------------------------------------------------- D3: damage is named


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_D3_damage_is_named(source, small, tmp_path, capsys):
    made = make(source, tmp_path / "set").side("train")
    batch = len(made) // 2
    shard, at = made.shard_of(batch), int(made.columns["tokens_at"][batch])
    first, last = made.first_document[batch], made.first_document[batch + 1] - 1
    assert main(["data", "verify", str(tmp_path / "set")]) == 0
    flip(tmp_path / "set" / shard, at + 10)
    capsys.readouterr()
    assert main(["data", "verify", str(tmp_path / "set"), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    [complaint] = facts["damage"]
    assert not facts["whole"]
    assert f"{shard}, record batch {made._number(batch)} (train documents {first} to {last})" in complaint

    data = config.Data(source=str(tmp_path / "set"), cache=str(tmp_path / "cache"), shuffle=False)
    dataset = Dataset(prepare(data), data, config.Batch(lanes=1, sequence_length=8), seed=0)
    window = int(made.first_token[batch]) // 8 + 1
    with pytest.raises(UserError, match=rf"sample e0:{window}: .*{shard}, record batch"):
        dataset.slot(window + 1, 0, 0)
    assert dataset.slot(1, 0, 0).valid == 8, "what is whole is read"

    os.truncate(tmp_path / "set" / shard, at)
    assert main(["data", "verify", str(tmp_path / "set")]) == 1
    assert f"{shard}, record batch" in capsys.readouterr().out
    (tmp_path / "set" / shard).unlink()
    flip(tmp_path / "set" / "held.index.arrow", 400)
    assert main(["data", "verify", str(tmp_path / "set")]) == 1
    said = capsys.readouterr().out
    assert f"{shard} is missing" in said
    assert "held.index.arrow is not what was written" in said


def test_show(source, small, tmp_path, capsys):
    make(source, tmp_path / "set")
    assert main(["data", "show", str(tmp_path / "set"), "--count", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [sample["text"] in TEXTS for sample in facts["samples"]] == [True, True]
    found = rows(tmp_path / "set", "train")
    assert facts["documents"]["train"] == len(found) == sum(facts["sources"].values())
    assert facts["lengths"]["p100"] == max(len(row["tokens"]) for row in found)
    assert main(["data", "show", str(tmp_path / "set"), "--first", "7", "--count", "1"]) == 0
    assert found[7]["id"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "--out", "x"], "name at least one source"),
        (["build", "x.txt"], "say with --out"),
        (["show"], "name one shard set"),
        (["verify", "nowhere"], "no shard set"),
        (["build", "nowhere", "--out", "x"], "there is no 'nowhere'"),
        (["mend", "x"], "--help"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
