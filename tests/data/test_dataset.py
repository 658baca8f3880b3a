"""Windows and slots against lists of tokens put together by hand."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from lanewise import config
from lanewise.data import store
from lanewise.data.dataset import Dataset, Slot
from lanewise.data.windows import IGNORED, Documents
from lanewise.errors import UserError

LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 30, 1, 16, 33, 8]


@pytest.fixture
def source(tmp_path):
    """Documents of known lengths, each with letters of its own."""
    root = tmp_path / "source"
    root.mkdir()
    for i, length in enumerate(LENGTHS):
        (root / f"{i:02}.txt").write_text("".join(chr(ord("A") + (i * 7 + j) % 58) for j in range(length)))
    return root


@pytest.fixture
def dataset(source, settings, built):
    def make(seed=0, epochs=0.0, batch=None, **changes) -> Dataset:
        data = settings(source, **{"held_out": 0, **changes})
        shape = {"lanes": 3, "microbatches": 2, "size": 2, "sequence_length": 8, **(batch or {})}
        return Dataset(built(source, **{"held_out": 0, **changes}), data, config.Batch(**shape), seed, epochs)

    return make


def slots(dataset: Dataset, steps: range) -> list[Slot]:
    batch = dataset.batch
    return [
        dataset.slot(step, lane, k) for step in steps for lane in range(batch.lanes) for k in range(batch.microbatches)
    ]


def predictions(slot: Slot) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of each row up to its padding."""
    rows = []
    for tokens, labels in zip(slot.tokens_BT.tolist(), slot.labels_BT.tolist(), strict=True):
        n = sum(label != -100 for label in labels)
        assert labels[n:] == [-100] * (len(labels) - n)  # what is ignored stands at the end
        rows.append((tokens[:n], labels[:n]))
    return rows


def by_hand(dataset: Dataset, folder, pack: str, T: int) -> list[tuple[list[int], list[int]]]:
    """All windows, cut from the files' tokens."""
    tokens = np.fromfile(folder / "train.bin", "<u2").tolist()
    bounds = np.fromfile(folder / "train.starts", "<i8").tolist()
    parts = [tokens] if pack == "stream" else [tokens[a:b] for a, b in pairwise(bounds)]
    return [
        (part[i : min(i + T, len(part) - 1)], part[i + 1 : i + T + 1])
        for part in parts
        for i in range(0, len(part) - 1, T)
    ]


@pytest.mark.parametrize("pack", ["stream", "document"])
@pytest.mark.parametrize("T", [2, 7, 8, 9, 100])
def test_windows_are_those_cut_by_hand(dataset, built, source, pack, T):
    made = dataset(pack=pack, shuffle=False, batch={"sequence_length": T})
    expected = by_hand(made, built(source, held_out=0), pack, T)
    assert made.windows == len(expected)
    found = [row for slot in slots(made, range(1, made.steps_per(1) + 1)) for row in predictions(slot)]
    assert found[: len(expected)] == expected
    assert sum(len(labels) for _, labels in expected) == sum(LENGTHS) + (-1 + len(LENGTHS) if pack == "stream" else 0)


def test_numbering_of_sequences(dataset):
    """step, lane, k, row: in this order of significance, whoever computes them."""
    made = dataset(shuffle=False)
    position = 0
    for step in range(1, 6):
        for lane in range(3):
            for k in range(2):
                samples = made.slot(step, lane, k).samples
                assert samples == [f"e{(position + b) // made.windows}:{(position + b) % made.windows}" for b in (0, 1)]
                position += 2


@pytest.mark.parametrize("pack", ["stream", "document"])
def test_each_sample_once_per_epoch_and_other_orders(dataset, pack):
    made = dataset(pack=pack)
    samples = [s for slot in slots(made, range(1, 4 * made.steps_per(1) + 1)) for s in slot.samples]
    epochs = [samples[e * made.windows : (e + 1) * made.windows] for e in range(3)]
    for e, epoch in enumerate(epochs):
        assert sorted(epoch) == sorted(f"e{e}:{w}" for w in range(made.windows))
    orders = {tuple(sample.split(":")[1] for sample in epoch) for epoch in epochs}
    assert len(orders) == 3
    assert [s for slot in slots(dataset(pack=pack, seed=1), range(1, 3)) for s in slot.samples] != samples[:24]


def test_a_sample_has_the_same_tokens_wherever_it_is_read(dataset):
    seen: dict[str, tuple] = {}
    for batch in ({"lanes": 1, "microbatches": 1, "size": 1}, {"lanes": 2, "microbatches": 3, "size": 4}):
        made = dataset(batch=batch)
        for slot in slots(made, range(1, 2 + made.steps_per(1))):
            for sample, row in zip(slot.samples, predictions(slot), strict=True):
                window = sample.split(":")[1]
                assert seen.setdefault(window, row) == row
    assert len(seen) == made.windows


@pytest.mark.parametrize("epochs", [0.1, 0.5, 1, 1.5, 2, 2.9])
def test_padding_after_the_last_epoch(dataset, epochs):
    made = dataset(epochs=epochs)
    end = -(-(Fraction(str(epochs)) * made.windows) // 1)
    steps = made.steps_per(epochs)
    assert (steps - 1) * 12 < end <= steps * 12
    found = slots(made, range(1, steps + 2))  # one step beyond
    assert sum(len(slot.samples) for slot in found) == end
    endless = slots(dataset(), range(1, steps + 2))
    for slot, same in zip(found, endless, strict=True):
        assert slot.tokens_BT.shape == slot.labels_BT.shape == (2, 8)
        assert slot.tokens_BT.dtype == slot.labels_BT.dtype == np.int64
        assert slot.valid == (slot.labels_BT != -100).sum()
        n = len(slot.samples)
        assert slot.samples == same.samples[:n]
        assert (slot.tokens_BT[:n] == same.tokens_BT[:n]).all()
        assert (slot.labels_BT[n:] == IGNORED).all()
        assert (slot.tokens_BT[n:] == made.meta["end_of_text"]).all()
    assert found[-1].valid == 0


def test_decimal_epochs_count_as_written(dataset):
    made = dataset(batch={"lanes": 1, "microbatches": 1, "size": 1, "sequence_length": 3})
    made.windows = 30
    assert [made.steps_per(e) for e in (0.1, 0.7, 1.1, 2)] == [3, 21, 33, 60]  # 1.1 * 30 in floats is above 33


@pytest.mark.parametrize("pack", ["stream", "document"])
@pytest.mark.parametrize("size", [1, 2, 5, 50])
@pytest.mark.parametrize("limit", [0, 1, 4, 1000])
def test_held_out_windows_come_once(dataset, pack, size, limit):
    made = dataset(pack=pack, held_out=0.5)
    total = made.held_batches(1)
    taken = min(limit or total, total)
    batches = [made.held(i, size, limit) for i in range(made.held_batches(size, limit))]
    assert {slot.tokens_BT.shape for slot in batches} == {(size, 8)}
    numbers = [int(sample.removeprefix("held:")) for slot in batches for sample in slot.samples]
    assert len(set(numbers)) == len(numbers) == taken
    gaps = np.diff([*numbers, total])
    assert gaps.max() - gaps.min() <= 1  # evenly spread
    if taken == total:
        expected = total_predictions(made, pack)
        assert sum(slot.valid for slot in batches) == expected


def total_predictions(made: Dataset, pack: str) -> int:
    return made.meta["tokens"]["held"] - (1 if pack == "stream" else made.meta["documents"]["held"])


def test_nothing_held_out(dataset):
    assert dataset(held_out=0).held_batches(4) == 0


def test_index_of_document_windows_is_shared_and_repaired(built, source, tmp_path):
    folder = built(source, held_out=0)
    tokens = store.FolderTokens(folder, "train")
    spans = [Documents(tokens, 5, 0, folder / "train").spans(w) for w in range(20)]
    index = folder / "train.windows-5.npy"
    for harm in (index.unlink, lambda: index.write_bytes(b"short"), lambda: index.write_bytes(b""), lambda: None):
        harm()
        again = Documents(tokens, 5, 0, folder / "train")
        assert [again.spans(w) for w in range(20)] == spans
        assert isinstance(again.firsts, np.memmap)
        assert isinstance(again.starts, np.memmap)
    assert store.damage(folder) is None


def test_too_little_text(dataset):
    tokens = sum(LENGTHS) + len(LENGTHS)
    assert dataset(batch={"sequence_length": tokens - 1}).windows == 1
    with pytest.raises(UserError, match=f"{tokens} tokens .* set batch.sequence_length to at most {tokens - 1}"):
        dataset(batch={"sequence_length": tokens})
    assert dataset(batch={"sequence_length": tokens}, pack="document").windows == len(LENGTHS)


def test_damaged_folder_is_refused(built, settings, source):
    folder = built(source)
    (folder / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train.bin has 0 bytes .* start again to rebuild it"):
        Dataset(folder, settings(source), config.Batch(), seed=0)
