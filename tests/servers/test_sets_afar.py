"""Shard sets on real stores: built there, and read from there."""

import json
import uuid
from pathlib import Path

import numpy as np
import pytest

from lanewise import config
from lanewise.cli.main import main
from lanewise.data.dataset import Dataset, Slot
from lanewise.data.prepare import prepare
from lanewise.data.shard_build import build_shards

BATCH = config.Batch(lanes=2, size=2, sequence_length=32)
NAMES = [(step, lane, 0) for step in range(1, 60) for lane in (0, 1)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [{"text": f"row {i} of many, " * (1 + i % 20)} for i in range(2000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


def settings(source: str, cache: Path) -> config.Data:
    return config.Data(source=source, cache=str(cache), tokenizer="bytes", held_out=0.1, pack="best-fit")


def dataset(data: config.Data) -> Dataset:
    return Dataset(prepare(data), data, BATCH, seed=0)


def same(a: Slot, b: Slot) -> bool:
    return (
        a.samples == b.samples and np.array_equal(a.tokens_BT, b.tokens_BT) and np.array_equal(a.labels_BT, b.labels_BT)
    )


@pytest.mark.parametrize("kind", ["s3", "hdfs"])
def test_a_set_on_a_store_is_the_set_at_home(request, source, tmp_path, kind):
    if kind == "s3":
        url = f"{request.getfixturevalue('s3_server').url}/{uuid.uuid4().hex}"
    else:
        url = f"hdfs://127.0.0.1:{request.getfixturevalue('hdfs_server').port}/{uuid.uuid4().hex}"
    assert main(["data", "build", str(source), "--out", url, "data.tokenizer=bytes", "data.held_out=0.1"]) == 0
    build_shards([str(source)], settings("", tmp_path), str(tmp_path / "set"), 1, lambda text: None)
    far, home = (dataset(settings(place, tmp_path / kind)) for place in (url, str(tmp_path / "set")))
    assert far.is_far
    assert not home.is_far
    assert all(same(far.slot(*name), home.slot(*name)) for name in NAMES)
    assert main(["data", "verify", url]) == 0
    assert main(["data", "show", url, "--count", "1"]) == 0
