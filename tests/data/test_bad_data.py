"""Sources as they are found in the wild: giant lines, very many files, odd names, lists that change."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from token_folder import everything

from lanewise import config
from lanewise.data import corpus, shard_build
from lanewise.data.dataset import Dataset
from lanewise.data.prepare import prepare
from lanewise.data.shard_build import build_shards
from lanewise.errors import UserError

GIANT = """
import resource, sys
from lanewise import config
from lanewise.data.prepare import prepare
data = config.Data(source=sys.argv[1], cache=sys.argv[2], tokenizer="bytes", held_out=0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(data)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_giant_line_takes_little_memory(tmp_path):
    """32 MB here: what it takes is bounded, and does not grow with the line."""
    with open(tmp_path / "line.txt", "wb") as file:
        for _ in range(32):
            file.write(b"no end in sight " * 2**16)
    words = [sys.executable, "-c", GIANT, str(tmp_path / "line.txt"), str(tmp_path / "cache")]
    grown = subprocess.run(words, check=True, capture_output=True, text=True, timeout=100).stdout
    assert int(grown) < 30, "MB"
    [tokens] = (tmp_path / "cache").glob("*/train.bin")
    assert tokens.stat().st_size == 2 * (32 * 2**20 + 1)


def test_a_giant_line_of_json_is_refused_before_it_is_read(tmp_path, settings):
    """It must be parsed whole, so it is refused by name; memory stays that of the limit."""
    with open(tmp_path / "rows.jsonl", "wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        file.truncate(2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"rows.jsonl, line 2 \(at byte 18\): longer than 64 MB; split it"):
        prepare(settings(tmp_path / "rows.jsonl"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def test_very_many_tiny_files(tmp_path, settings):
    """Each one is there."""
    for i in range(1000):
        folder = tmp_path / "many" / f"{i % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.txt").write_text(f"{i}")
    assert everything(prepare(settings(tmp_path / "many"))) == sorted(str(i) for i in range(1000))
    tasks = list(shard_build._tasks(shard_build.sources.find(str(tmp_path / "many"))))
    assert len(tasks) == 1, "many small files are one piece of work"


@pytest.mark.parametrize("name", ["a b.txt", "a.b.c.txt", "a[1].txt", "[a-z].jsonl", "ü (2).txt", "a=b.txt", "*.txt"])
def test_odd_names(tmp_path, settings, name):
    folder = tmp_path / "my [data].v1 {x}"
    folder.mkdir()
    content = json.dumps({"text": name}) + "\n" if name.endswith("jsonl") else name
    (folder / name).write_text(content)
    (folder / "a.dat").write_text("not this one")
    assert everything(prepare(settings(folder / name, held_out=0))) == [name]
    assert everything(prepare(settings(folder, held_out=0))) == [name]
    out = folder / "set 1.0 [x]"
    build_shards([str(folder / name)], settings("", held_out=0), str(out), 1, lambda text: None)
    data = settings(out, pack="document")
    dataset = Dataset(prepare(data), data, config.Batch(lanes=1, sequence_length=64), seed=0)
    assert dataset.slot(1, 0, 0).valid == len(name.encode())


@pytest.fixture
def shard_set(tmp_path, settings):
    """A set of three shards, and how to build it again with other rows."""

    def build(rows: int) -> Path:
        out = tmp_path / "set"
        for old in out.glob("*"):
            old.unlink()
        names = []
        for i in range(rows):
            (tmp_path / f"{i}.jsonl").write_text(json.dumps({"text": f"row {i} " * 40}) + "\n")
            names.append(str(tmp_path / f"{i}.jsonl"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_build, "TASK", 4000)  # a file each
            build_shards(names, settings("", held_out=0), str(out), 1, lambda text: None)
        return out

    return build


def test_a_shard_list_that_changes_is_refused_and_the_difference_named(shard_set, settings):
    data = settings(shard_set(3))
    folder = prepare(data)
    before = Dataset(folder, data, config.Batch(lanes=1, sequence_length=16), seed=0)
    shard_set(4)
    with pytest.raises(
        UserError, match=r"its shards changed \(added: train-00003-000.arrow\) since the run was started"
    ):
        Dataset(folder, data, config.Batch(lanes=1, sequence_length=16), seed=0)
    after = Dataset(prepare(data), data, config.Batch(lanes=1, sequence_length=16), seed=0)
    assert corpus.difference(before.identity, after.identity) == "its shards changed (added: train-00003-000.arrow)"
    shard_set(2)
    last = Dataset(prepare(data), data, config.Batch(lanes=1, sequence_length=16), seed=0)
    assert "removed: train-00002-000.arrow" in corpus.difference(before.identity, last.identity)


def test_a_shard_that_goes_while_training_is_named(shard_set, settings):
    out = shard_set(3)
    data = settings(out, shuffle=False)
    dataset = Dataset(prepare(data), data, config.Batch(lanes=1, sequence_length=16), seed=0)
    assert dataset.slot(1, 0, 0).valid == 16
    (out / "train-00002-000.arrow").unlink()
    last = dataset.windows
    with pytest.raises(UserError, match=rf"sample e0:{last - 1}: .*train-00002-000.arrow is missing: restore it"):
        dataset.slot(last, 0, 0)
