"""Data of several sources: what each sequence reads, over restarts, weight changes and epochs."""

import random
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lanewise import config
from lanewise.data import corpus
from lanewise.data.dataset import Dataset
from lanewise.data.prepare import prepare
from lanewise.errors import UserError

BATCH = config.Batch(lanes=3, microbatches=2, size=2, sequence_length=16)


@pytest.fixture
def make(tmp_path, settings):
    for i, (name, count) in enumerate({"web": 700, "books": 90, "code": 40}.items()):
        letters = "".join(chr(65 + 20 * i + j % 20) for j in range(16 * count))
        (tmp_path / f"{name}.txt").write_text(letters)

    def dataset(weights: dict[str, float], **changes) -> Dataset:
        mix = [
            config.Source(source=str(tmp_path / f"{name}.txt"), weight=weight, name=name)
            for name, weight in weights.items()
        ]
        data = settings("unused", mix=tuple(mix), held_out=0, **changes)
        return Dataset(prepare(data), data, BATCH, seed=5)

    return dataset


def read(dataset: Dataset, steps: range) -> list[list[str]]:
    """By step, what all slots read, in order."""
    return [[s for lane in range(3) for k in range(2) for s in dataset.slot(step, lane, k).samples] for step in steps]


def test_shares_and_epochs(make):
    dataset = make({"web": 0.7, "books": 0.2, "code": 0.1})
    samples = [s for step in read(dataset, range(1, 101)) for s in step]
    names = [sample.split(":")[0] for sample in samples]
    assert {name: names.count(name) for name in set(names)} == {"web": 840, "books": 240, "code": 120}
    for name, windows in dataset.sources.items():
        mine = [sample for sample in samples if sample.startswith(f"{name}:")]
        n = len(windows)
        orders = []
        for epoch in range(len(mine) // n):
            now = mine[epoch * n : (epoch + 1) * n]
            assert sorted(now) == sorted(f"{name}:e{epoch}:{w}" for w in range(n)), "each once an epoch"
            orders.append([sample.split(":")[2] for sample in now])
        assert all(a != b for a, b in pairwise(orders)), "each epoch in its own order"


def test_rows_hold_what_their_ids_say(make):
    """Every source has letters of its own."""
    dataset = make({"web": 2, "books": 1, "code": 1})
    words = dataset.meta["vocab_size"]
    assert words == 257
    for step in range(1, 20):
        for lane in range(3):
            slot = dataset.slot(step, lane, 1)
            for row, sample in zip(slot.tokens_BT, slot.samples, strict=True):
                name, _, window = sample.split(":")
                source = dataset.sources[name].tokens
                assert row.tolist() == source.read(int(window) * 16, int(window) * 16 + 16).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_D7_restarts_and_weight_changes_lose_and_repeat_nothing(make, seed):
    """Restarts at random steps, with changed weights; each run is then restarted twice more without a change."""
    rng = random.Random(seed)
    weights = {"web": 0.7, "books": 0.2, "code": 0.1}
    dataset, step, seen, record = make(weights), 0, [], None
    for _ in range(4):
        stop = step + rng.randrange(1, 25)
        whole = read(dataset, range(step + 1, stop + 1))
        seen += whole
        record = dataset.segments()
        middle = rng.randrange(step, stop)
        for start in (middle, (middle + stop) // 2):
            again = make(weights)
            again.go_on(record, start)
            assert read(again, range(start + 1, stop + 1)) == whole[start - step :]
        step = stop
        names = rng.sample(["web", "books", "code"], rng.choice([2, 3]))
        weights = {name: rng.choice([0.5, 0.25, 3, 1]) for name in names}
        dataset = make(weights)
        dataset.go_on(record, step)
    samples = [s for at_step in seen for s in at_step]
    for name in ("web", "books", "code"):
        mine = [s for s in samples if s.startswith(f"{name}:")]
        assert len(set(mine)) == len(mine), "nothing twice in an epoch"
        epochs = [int(s.split(":")[1][1:]) for s in mine]
        assert epochs == sorted(epochs), "no epoch begins before the one before it is over"


def test_a_run_can_stop_when_a_source_is_read_through(make):
    dataset = make({"web": 1, "code": 1}, exhausted="stop")
    n = len(dataset.sources["code"])
    assert abs(dataset.end - 2 * n) <= 1
    steps = dataset.steps(10_000)
    assert steps == -(-dataset.end // 12)
    assert dataset.steps(3) == 3
    samples = [s for step in read(dataset, range(1, steps + 2)) for s in step]
    assert len(samples) == dataset.end
    assert sorted(s for s in samples if s.startswith("code")) == sorted(f"code:e0:{w}" for w in range(n))
    assert dataset.slot(steps + 1, 0, 0).valid == 0


def test_999_to_1_with_a_small_source(make):
    dataset = make({"web": 0.999, "code": 0.001})
    samples = [s for step in read(dataset, range(1, 251)) for s in step]
    assert sum(s.startswith("code:") for s in samples) == 3
    assert len(set(samples)) == 3000


def test_held_out_is_that_of_all_sources(tmp_path, settings):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 1000)
    mix = tuple(config.Source(source=str(tmp_path / f"{name}.txt")) for name in "ab")
    data = settings("unused", mix=mix, held_out=0.1)
    dataset = Dataset(prepare(data), data, BATCH, seed=0)
    slots = [dataset.held(i, 2) for i in range(dataset.held_batches(2))]
    assert sum(slot.valid for slot in slots) == 2 * (100 - 1)
    assert {s for slot in slots for s in slot.samples} == {f"held:{i}" for i in range(dataset.held_batches(1))}
    assert len(set(np.concatenate([slot.tokens_BT.ravel() for slot in slots]).tolist())) == 3  # a, b, end of text


def test_D1_a_source_without_text_is_left_out_and_named(tmp_path, settings):
    (tmp_path / "full.txt").write_text("text " * 100)
    (tmp_path / "tiny.txt").write_text("t")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    mix = tuple(config.Source(source=str(tmp_path / name)) for name in ("full.txt", "tiny.txt", "none.parquet"))
    data = settings("unused", mix=mix, held_out=0, pack="document")
    said: list[str] = []
    dataset = Dataset(prepare(data, said.append), data, BATCH, seed=0)
    assert dataset.notes == ["none.parquet holds no training text: it is left out"]
    assert any("none.parquet: no text in" in line for line in said)
    samples = [s for step in read(dataset, range(1, 11)) for s in step]
    assert {s.split(":")[0] for s in samples} == {"full.txt", "tiny.txt"}
    nothing = data.model_copy(update={"mix": mix[2:]})
    with pytest.raises(UserError, match=r"no text in .*none.parquet"):
        prepare(nothing)


def test_mixtures_that_are_refused(make, tmp_path, settings):
    data = make({"web": 1, "code": 1}).data
    with pytest.raises(UserError, match="a mixture has no epochs"):
        Dataset(prepare(data), data, BATCH, seed=0, epochs=1)
    with pytest.raises(UserError, match=r"data: two sources of the mix are called 'a.txt': give each a name"):
        config.load(None, ["data.mix=[{source='x/a.txt'}, {source='y/a.txt'}]"])
    with pytest.raises(UserError, match=r"weigth: unknown key; did you mean 'weight'"):
        config.load(None, ["data.mix=[{source='x/a.txt', weigth=2}]"])
    with pytest.raises(UserError, match=r"greater than 0"):
        config.load(None, ["data.mix=[{source='x/a.txt', weight=0}]"])


def test_run_files_with_a_mixture_come_back(tmp_path):
    run = config.load(None, ["data.mix=[{source='a \"b\".txt', weight=0.7, name='x'}, {source='c'}]"])
    again = config.parse(config.dump(run))
    assert again == run
    changed = config.load(None, ["data.mix=[{source='c', weight=3}]"])
    assert list(config.differences(run, changed)) == []


def test_what_differs_is_named():
    old = {"tokenizer": "t", "parts": {"a": {"shards": {"1": "x", "2": "y"}}, "b": {"train": "1", "held": "2"}}}
    same = {"tokenizer": "t", "parts": {"a": {"shards": {"1": "x", "2": "y"}}, "c": {"train": "9"}}}
    assert corpus.difference(old, same) is None, "parts may come and go"
    new = {"tokenizer": "t", "parts": {"a": {"shards": {"1": "z", "3": "y"}}}}
    assert corpus.difference(old, new) == "a: its shards changed (added: 3; removed: 2; changed: 1)"
    assert corpus.difference(old, old | {"tokenizer": "u"}) == "the tokenizer changed"
