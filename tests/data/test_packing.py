"""Packing: against textbook bin packing done naively, and against the documents one by one."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from lanewise import config
from lanewise.data import packing
from lanewise.data.dataset import Dataset
from lanewise.data.prepare import prepare

ROOM = 32


def naive(sizes: list[int], room: int, best: bool) -> list[int]:
    free: list[int] = []
    bins = []
    for size in sizes:
        fitting = [i for i, left in enumerate(free) if left >= size]
        if not fitting:
            free.append(room)
            fitting = [len(free) - 1]
        chosen = min(fitting, key=lambda i: (free[i], i)) if best else fitting[0]
        free[chosen] -= size
        bins.append(chosen)
    return bins


@pytest.mark.parametrize(("fit", "best"), [(packing.first_fit, False), (packing.best_fit, True)])
def test_fits_are_those_of_the_textbook(fit, best):
    rng = random.Random(1)
    for count in (0, 1, 2, 3, 8, 9, 100, 333):
        for most in (1, ROOM // 2, ROOM):
            sizes = [rng.randint(1, most) for _ in range(count)]
            assert fit(sizes, ROOM) == naive(sizes, ROOM, best)


@pytest.fixture
def packed(tmp_path, settings, monkeypatch):
    """300 documents, some empty, some of one letter, some longer than three sequences."""
    monkeypatch.setattr(packing, "WINDOW", 64)
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh", k=rng.choice([0, 1, 5, 9, 20, 31, 32, 33, 100]))) for _ in range(300)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(pack: str, **changes) -> Dataset:
        data = settings(tmp_path / "d.jsonl", pack=pack, held_out=0, **changes)
        return Dataset(prepare(data), data, config.Batch(lanes=2, size=2, sequence_length=ROOM), seed=0, epochs=1)

    return make


def slots(dataset: Dataset) -> list:
    return [dataset.slot(step, lane, 0) for step in range(1, dataset.steps_per(1) + 1) for lane in (0, 1)]


def stretches(dataset: Dataset) -> Counter:
    """(tokens, labels) of each stretch that one document fills, over an epoch."""
    found: Counter = Counter()
    for slot in slots(dataset):
        starts = slot.starts_BT if slot.starts_BT is not None else np.zeros_like(slot.tokens_BT)
        for tokens, labels, begins in zip(slot.tokens_BT, slot.labels_BT, starts, strict=True):
            for start in sorted(set(begins.tolist())):
                here = (begins == start) & (labels != -100)
                if here.any():
                    assert np.flatnonzero(here)[0] == start
                    found[tuple(tokens[here].tolist()), tuple(labels[here].tolist())] += 1
    return found


@pytest.mark.parametrize("pack", ["first-fit", "best-fit"])
def test_D5_what_is_predicted_is_what_the_documents_alone_predict(packed, pack):
    """No label crosses to another document, nothing is lost or twice, each token knows where its document starts."""
    alone, together = packed("document"), packed(pack)
    assert stretches(together) == stretches(alone)
    assert together.windows < 0.7 * alone.windows
    places = together.windows * ROOM
    filled = sum(slot.valid for slot in slots(together))
    assert together.padding == pytest.approx(1 - filled / places)
    assert f"{together.padding:.2%} of the places" in together.notes[0]
    assert all(slot.starts_BT is None for slot in slots(alone))


def test_best_fit_wastes_no_more_here(packed):
    assert packed("best-fit").padding <= packed("first-fit").padding < 0.15


def test_plans_are_computed_once(packed, monkeypatch):
    before = [slot.tokens_BT.tolist() for slot in slots(packed("best-fit"))]
    monkeypatch.setattr(packing, "pieces_in_bins", None)
    again = packed("best-fit")
    assert isinstance(again.sources[""].pieces, np.memmap)
    assert [slot.tokens_BT.tolist() for slot in slots(again)] == before


def test_padding_is_a_document_of_its_own(packed):
    for slot in slots(packed("first-fit")):
        for labels, begins in zip(slot.labels_BT, slot.starts_BT, strict=True):
            filled = int(np.count_nonzero(labels != -100))
            assert (begins[filled:] == filled).all()
            assert (begins <= np.arange(ROOM)).all()
