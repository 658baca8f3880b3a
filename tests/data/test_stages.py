"""Reading ahead changes nothing but the time it takes; the user's functions run elsewhere, and may die."""

import threading
import time

import numpy as np
import psutil
import pytest

from lanewise import config
from lanewise.data.dataset import Dataset, Slot
from lanewise.data.prepare import prepare
from lanewise.data.stages import Feed, WriteBack
from lanewise.errors import UserError

BATCH = config.Batch(lanes=4, microbatches=2, size=2, sequence_length=16)
SLOT_MB = 8 * 2 * 16 * 2 / 2**20
MINE = (1, 2)
NAMES = [(step, lane, k) for step in range(1, 8) for lane in MINE for k in range(2)]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "text.txt").write_text("".join(chr(65 + (i * i) % 60) for i in range(3000)))
    return tmp_path / "text.txt"


@pytest.fixture
def feed(source, settings):
    feeds = []

    def make(is_far=False, **changes) -> Feed:
        data = settings(source, held_out=0, **changes)
        dataset = Dataset(prepare(data), data, BATCH, seed=1)
        dataset.is_far = is_far
        feeds.append(Feed(dataset, MINE, data, BATCH))
        return feeds[-1]

    yield make
    for made in feeds:
        made.close()


def same(a: Slot, b: Slot) -> bool:
    arrays = np.array_equal(a.tokens_BT, b.tokens_BT) and np.array_equal(a.labels_BT, b.labels_BT)
    return arrays and (a.samples, a.valid) == (b.samples, b.valid)


@pytest.mark.parametrize("slots", [0, 1, 3, 1000])
def test_order_and_bits_are_those_of_the_dataset(feed, slots):
    made = feed(credit_mb=slots * SLOT_MB)
    assert all(same(made.slot(*name), made.dataset.slot(*name)) for name in NAMES)


def test_any_other_microbatch_may_be_asked_for(feed):
    made = feed()
    for name in (NAMES[5], NAMES[2], (3, 0, 1), (3, 3, 0), *NAMES[3:9]):
        assert same(made.slot(*name), made.dataset.slot(*name))


def test_credit_bounds_what_is_in_memory(feed):
    made, original = feed(credit_mb=3 * SLOT_MB), Dataset.slot
    read = []

    def slot(*name):
        read.append(name)
        return original(made.dataset, *name)

    made.dataset.slot = slot
    for taken, name in enumerate(NAMES[:10], start=1):
        made.slot(*name)
        time.sleep(0.1)
        assert len(read) <= taken + 3
    assert read == NAMES[: len(read)], "read ahead in the order of use"


def test_a_slow_store_is_hidden_behind_training(feed):
    """The store takes 100 ms for each microbatch, training 75 ms: several readers keep up once the first is there.
    The times are long beside those for which a busy machine may keep a thread waiting."""
    made, original = feed(is_far=True), Dataset.slot

    def slow(*name):
        time.sleep(0.1)
        return original(made.dataset, *name)

    made.dataset.slot = slow
    made.slot(*NAMES[0])
    made.lap()
    began = time.perf_counter()
    for name in NAMES[1:]:
        time.sleep(0.075)
        made.slot(*name)
    assert made.lap()["wait"] < 0.08 * (time.perf_counter() - began)


def test_errors_reach_the_step_that_needs_the_data(feed):
    made, original = feed(), Dataset.slot

    def damaged(*name):
        if name == NAMES[6]:
            raise UserError("this shard is damaged")
        return original(made.dataset, *name)

    made.dataset.slot = damaged
    for name in NAMES[:6]:
        made.slot(*name)
    with pytest.raises(UserError, match="this shard is damaged"):
        made.slot(*NAMES[6])


# ------------------------------------------------------------------------------------------------- the user's functions


def test_transform_is_applied_in_other_processes_with_a_key_of_the_microbatch(feed):
    made = feed(transform="user_functions:mask_some", workers=2)
    plain = [made.dataset.slot(*name) for name in NAMES]
    found = [made.slot(*name) for name in NAMES]
    hidden = set()
    for slot, before in zip(found, plain, strict=True):
        assert np.array_equal(slot.tokens_BT, before.tokens_BT)
        places = np.flatnonzero((slot.labels_BT != before.labels_BT).any(axis=0))
        assert len(set(places % 5)) == 1
        hidden.add(int(places[0] % 5))
        assert slot.valid == np.count_nonzero(slot.labels_BT != -100)
    assert len(hidden) == 5, "keys differ"
    again = feed(transform="user_functions:mask_some", credit_mb=0)
    assert all(same(again.slot(*name), slot) for name, slot in zip(NAMES, found, strict=True))
    assert set(made.lap()) == {"wait", "read", "preprocess"}


def test_transform_uses_all_its_processes(feed):
    import os

    made = feed(transform="user_functions:which_process", workers=2)
    seen = {int(made.slot(*name).tokens_BT[0, 0]) for name in NAMES}
    assert os.getpid() % 251 not in seen
    assert 1 <= len(seen) <= 2


DIES_ONCE = """
import os, pathlib, signal
mark = pathlib.Path({mark!r})
def function(tokens, labels, key):
    if not mark.exists():
        mark.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return tokens, labels
"""


def test_H5_what_a_dead_process_worked_on_is_made_again(feed, tmp_path, monkeypatch):
    (tmp_path / "dies_once.py").write_text(DIES_ONCE.format(mark=str(tmp_path / "mark")))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = feed(transform="dies_once:function", workers=2)
    assert all(same(made.slot(*name), made.dataset.slot(*name)) for name in NAMES)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("dies", "its process died 3 times"),
        ("fails", "ValueError: this one is bad"),
        ("other_shape", r"must return tokens and labels, both of shape \(2, 16\)"),
        ("other_ids", "returned an id outside 0 to 256"),
    ],
)
def test_functions_that_go_wrong_are_named_with_the_sample(feed, function, said):
    made = feed(transform=f"user_functions:{function}")
    with pytest.raises(UserError, match=rf"data.transform: user_functions:{function} on e0:\d+, e0:\d+: {said}"):
        made.slot(*NAMES[0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "names no function: write module:function"),
        ("no_such_module:f", "cannot be imported"),
        ("user_functions:no_such", "has no function 'no_such'"),
    ],
)
def test_functions_that_are_not_there(feed, name, said):
    with pytest.raises(UserError, match=f"data.transform: .*{said}"):
        feed(transform=name)


def test_processes_go_with_the_feed(feed):
    made = feed(transform="user_functions:mask_some")
    made.slot(*NAMES[0])
    [worker] = map(psutil.Process, made.transform.pool._processes)
    made.close()
    _, alive = psutil.wait_procs([worker], timeout=10)
    assert not alive


# ------------------------------------------------------------------------------------------------------- write back


def test_write_back_keeps_order_and_raises():
    write, out = WriteBack(most=4), []
    gate = threading.Event()
    write(gate.wait)
    for i in range(3):
        write(out.append, i)
    assert out == []
    gate.set()
    write.drain()
    assert out == [0, 1, 2]

    def fail():
        raise OSError("disk full")

    write(fail)
    with pytest.raises(OSError, match="disk full"):
        write.drain()
