"""Whatever goes wrong during a save or to its files: an earlier checkpoint survives, is chosen, the fault is told."""

import errno
import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import PROCESSES, Alarms, run
from faults import Fault, die, error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanewise.checkpoint import dcp, manifest
from lanewise.checkpoint.pieces import Entry
from lanewise.checkpoint.store import Checkpoints
from lanewise.errors import UserError


def state_of(step, rank=0, world=1, n=600):
    """A tensor whose every element is `step`: the flat range of a rank."""
    start, stop = n * rank // world, n * (rank + 1) // world
    return {"model/a": Entry.flat((n // 6, 6), start, torch.full((stop - start,), float(step)))}


def make(root, group=None, keep=1, background=False):
    alarm = Alarms()
    return Checkpoints(root, keep=keep, background=background, group=group, alarm=alarm), alarm


def assert_holds(saver, found, step, rank=0, world=1, *, n=600):
    assert found.step == step
    state = state_of(-1, rank, world, n)
    saver.load(found, state)
    assert all(piece.tensor.eq(step).all() for piece in state["model/a"].pieces)


def names(root):
    return sorted(os.listdir(root))


# ------------------------------------------------------------------------------------------------- C4: killed


def die_everywhere(folder, pipe):
    """In a fork for each n: save step 1, then die at the n-th operation of saving step 2."""
    for n in range(200):
        saver, _ = make(folder / str(n))
        saver.save(1, state_of(1), {})
        child = os.fork()
        if not child:
            with Fault(saver.root, n, die).active():
                saver.save(2, state_of(2), {})
            os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        pipe.send((n, died))
        if not died:
            return


def test_killed_at_every_operation_of_a_save(tmp_path):
    read_end, write_end = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=die_everywhere, args=(tmp_path, write_end))
    process.start()
    outcomes, died = [], 9
    while died:
        assert read_end.poll(10)
        n, died = read_end.recv()
        assert died in (0, 9)
        saver, alarm = make(tmp_path / str(n))
        found = saver.find()
        assert_holds(saver, found, found.step)
        assert not alarm, "what a killed save leaves behind is not a damaged checkpoint"
        assert not any(map(manifest.verify, manifest.checkpoints_in(saver.root))), "nor is a half-removed one"
        outcomes.append(found.step)
        saver.save(3, state_of(3), {})
        assert_holds(saver, saver.find(), 3)
        assert names(saver.root) == ["step-00000003"], "leftovers are removed by the next save"
    process.join()
    assert outcomes == sorted(outcomes), "until it is published the old one is chosen, from then on the new one"
    assert len(outcomes) > 20
    assert set(outcomes) == {1, 2}


def save_on(root, pipe):
    saver, _ = make(root, keep=2)
    pipe.send("ready")
    for step in range(2, 1000):
        saver.save(step, state_of(step, n=60000), {})
        pipe.send(step)


def test_killed_at_random_moments(tmp_path):
    for trial in range(8):
        root, (read_end, write_end) = tmp_path / str(trial), PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=save_on, args=(root, write_end))
        process.start()
        write_end.close()
        assert read_end.recv() == "ready"
        last = read_end.recv()
        time.sleep(random.uniform(0, 0.06))
        process.kill()
        process.join()
        while True:
            try:
                last = read_end.recv()
            except EOFError:
                break
        saver, alarm = make(root)
        found = saver.find()
        assert found.step in (last, last + 1)
        assert_holds(saver, found, found.step, n=60000)
        assert not alarm


# ------------------------------------------------------------------------------------------------ C5: damaged


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A root with steps 1 and 2, and the bytes of step 2's files."""
    root = tmp_path_factory.mktemp("two")
    saver, _ = make(root, keep=2)
    for step in (1, 2):
        saver.save(step, state_of(step), {"why": "test"})
    newest = manifest.folder_of(root, 2)
    return root, {path: path.read_bytes() for path in newest.iterdir()}


def assert_noticed(root, file):
    saver, alarm = make(root)
    assert_holds(saver, saver.find(), 1)
    ((event, details),) = alarm
    assert (event, details["path"], details["file"]) == ("checkpoint_damaged", str(root / "step-00000002"), file)
    assert details["reason"]


FILES = ["__0_0.distcp", ".metadata", "manifest.json"]


@pytest.mark.parametrize("file", FILES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), data=st.data())
def test_a_changed_byte_is_noticed(two, file, place, change, data):
    root, contents = two
    path = root / "step-00000002" / file
    whole = bytearray(contents[path])
    whole[int(place * len(whole))] ^= change
    path.write_bytes(whole)
    try:
        assert_noticed(root, file)
    finally:
        path.write_bytes(contents[path])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("left", [0, 0.5, -1, None])
def test_a_file_cut_short_or_removed_is_noticed(two, file, left):
    root, contents = two
    path = root / "step-00000002" / file
    if left is None:
        path.unlink()
    else:
        path.write_bytes(contents[path][: int(left * len(contents[path])) if left >= 0 else -1])
    try:
        assert_noticed(root, file)
    finally:
        path.write_bytes(contents[path])


def test_the_fixture_itself_verifies(two):
    saver, alarm = make(two[0])
    assert_holds(saver, saver.find(), 2)
    assert not alarm


def find_damaged(rank, group, root):
    saver, alarm = make(root, group, keep=2)
    for step in (1, 2):
        saver.save(step, state_of(step, rank, 3), {})
    dist.barrier(group)
    if rank == 0:
        path = root / "step-00000002" / "__2_0.distcp"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    dist.barrier(group)
    assert_holds(saver, saver.find(), 1, rank, 3)
    assert [details["file"] for _, details in alarm] == ["__2_0.distcp"]
    saver.save(2, state_of(2, rank, 3), {})  # reached again: the damaged one is replaced
    assert_holds(saver, saver.find(), 2, rank, 3)
    assert len(alarm) == 1
    dist.barrier(group)
    assert names(root) == ["step-00000001", "step-00000002"]


def test_all_ranks_agree_on_what_is_damaged_and_replace_it(tmp_path):
    run(tmp_path, 3, find_damaged, tmp_path / "root")


# ----------------------------------------------------------------------------------- C6, C7: errors of the disk


def test_disk_full(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.name != "posix" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        root = mount / "checkpoints"
        saver, alarm = make(root, background=True)
        saver.save(1, state_of(1, n=90000), {})  # 360 kB
        assert saver.wait()
        (mount / "other").write_bytes(bytes(400_000))
        saver.save(2, state_of(2, n=90000), {})
        assert not saver.wait()
        ((event, details),) = alarm
        assert event == "checkpoint_failed"
        assert details["step"] == 2
        assert "No space left on device" in details["reason"]
        assert names(root) == ["step-00000001"]
        (mount / "other").unlink()
        saver.save(3, state_of(3, n=90000), {})
        assert saver.wait()
        assert saver.find().step == 3
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def fail_everywhere(rank, group, root, who, number):
    """One operation fails, each in turn, on rank `who`; in between the run goes on and saves again."""
    saver, alarm = make(root, group, background=True)
    saver.save(1, state_of(1, rank, 2), {})
    assert saver.wait()
    last, step, failed = 1, 1, 0
    for n in range(200):
        step += 1
        alarm.clear()
        fault = Fault(root, n if rank == who else -1, error(number))
        with fault.active():
            saver.save(step, state_of(step, rank, 2), {})
            published = saver.wait()
        dist.barrier(group)
        if published:
            last = step
            assert set(alarm.events) <= {"checkpoint_not_removed"}
        else:
            failed += 1
            ((event, details),) = alarm
            assert (event, details["step"]) == ("checkpoint_failed", step)
            assert os.strerror(number) in details["reason"]
            assert f"rank {who}:" in details["reason"]
            assert names(root) == [f"step-{last:08d}"], "nothing is published, nothing is left behind"
        alarm.clear()
        assert_holds(saver, saver.find(), last, rank, 2)
        assert not alarm
        if not dist_any(group, rank == who and fault.count > n):
            break
    assert failed >= (12 if who == 0 else 3)


def dist_any(group, value):
    answers = [None, None]
    dist.all_gather_object(answers, value, group=group)
    return any(answers)


@pytest.mark.parametrize(("who", "number"), [(0, errno.ENOSPC), (1, errno.EIO)])
def test_an_error_at_every_operation_of_a_save(tmp_path, who, number):
    run(tmp_path, 2, fail_everywhere, tmp_path / "root", who, number)


# ------------------------------------------------------------------------------ C8, C9: in the background


def test_weights_changed_right_after_save_are_not_in_it(tmp_path, monkeypatch):
    go = threading.Event()
    plain = dcp.Writer.write_data
    monkeypatch.setattr(dcp.Writer, "write_data", lambda *args: go.wait(10) and plain(*args))
    saver, _ = make(tmp_path, background=True)
    state = state_of(1)
    saver.save(1, state, {})
    for piece in state["model/a"].pieces:
        piece.tensor.fill_(2)
    assert not names(tmp_path) or names(tmp_path)[0].startswith(".")
    go.set()
    assert saver.wait()
    assert_holds(saver, saver.find(), 1)


def train_meanwhile(rank, group, root):
    """Collectives of the training go on, on another group, while the save runs its own."""
    plain = dcp.Writer.write_data

    def slow(*args):
        time.sleep(0.5 * (rank + 1))
        return plain(*args)

    dcp.Writer.write_data = slow
    saver, alarm = make(root, group, background=True)
    start, steps = time.monotonic(), 0
    saver.save(1, state_of(1, rank, 2), {})
    blocked = time.monotonic() - start
    total = torch.zeros(1000)
    while dist_any(None, saver._thread.is_alive()):
        steps += 1
        part = torch.full((1000,), float(steps * (rank + 1)))
        dist.all_reduce(part)
        total += part
    assert total.eq(3 * steps * (steps + 1) / 2).all()
    assert steps > 20
    assert blocked < 0.4
    assert saver.wait()
    assert not alarm
    assert_holds(saver, saver.find(), 1, rank, 2)


def test_training_goes_on_during_a_save(tmp_path):
    run(tmp_path, 2, train_meanwhile, tmp_path / "root")


def one_dies(rank, group, root, dying, call):
    saver, alarm = make(root, group, background=True)
    saver.save(1, state_of(1, rank, 3), {})
    assert saver.wait()
    if rank == dying:
        setattr(dcp.Writer, call, lambda *_: die())
    start = time.monotonic()
    saver.save(2, state_of(2, rank, 3), {})
    assert not saver.wait()
    assert alarm.events == ["checkpoint_failed"]
    return time.monotonic() - start


@pytest.mark.parametrize(("dying", "call"), [(0, "write_data"), (1, "write_data"), (1, "prepare_local_plan")])
def test_a_peer_that_dies_in_a_save_does_not_keep_the_others(tmp_path, dying, call):
    """Neither from `wait` nor from leaving, and the checkpoint before is the one to use."""
    seconds = run(tmp_path, 3, one_dies, tmp_path / "root", dying, call, dies={dying})
    assert max(filter(None, seconds)) < 5
    saver, alarm = make(tmp_path / "root")
    assert_holds(saver, saver.find(), 1)
    assert not alarm


def save_last_and_leave(root):
    plain = dcp.Writer.write_data
    dcp.Writer.write_data = lambda *args: time.sleep(0.5) or plain(*args)
    saver, _ = make(root, background=True)
    saver.save(1, state_of(1), {})
    raise SystemExit(0 if saver.wait() else 1)


def test_the_last_save_is_awaited(tmp_path):
    process = PROCESSES.Process(target=save_last_and_leave, args=(tmp_path,))
    process.start()
    process.join(20)
    assert process.exitcode == 0
    saver, _ = make(tmp_path)
    assert_holds(saver, saver.find(), 1)


LEAVE_WITHOUT_WAITING = """
import sys, time
from lanewise.checkpoint import dcp
from test_faults import make, state_of
plain = dcp.Writer.write_data
dcp.Writer.write_data = lambda *args: time.sleep(0.3) or plain(*args)
make(__import__("pathlib").Path(sys.argv[1]), background=True)[0].save(1, state_of(1), {})
sys.exit(3)
"""


def test_a_process_that_leaves_in_a_save_keeps_its_exit_code_and_the_checkpoint(tmp_path):
    command = [sys.executable, "-c", LEAVE_WITHOUT_WAITING, str(tmp_path)]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=60, check=False)
    assert done.returncode == 3
    saver, _ = make(tmp_path)
    assert_holds(saver, saver.find(), 1)


@pytest.mark.parametrize("death", [SystemExit, ZeroDivisionError])
def test_death_of_the_writing_thread_is_told_and_raised(tmp_path, monkeypatch, death):
    def dead(*_):
        raise death("gone")

    saver, alarm = make(tmp_path, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(dcp.Writer, "write_data", dead)
        saver.save(1, state_of(1), {})
        with pytest.raises(death):
            saver.wait()
    assert alarm.events == ["checkpoint_failed"]
    assert "gone" in alarm[0][1]["reason"]
    assert not saver.wait()
    saver.save(2, state_of(2), {})
    assert saver.wait()


def test_a_wait_that_gives_up_says_so(tmp_path, monkeypatch):
    go = threading.Event()
    plain = dcp.Writer.write_data
    monkeypatch.setattr(dcp.Writer, "write_data", lambda *args: go.wait(10) and plain(*args))
    saver, alarm = make(tmp_path, background=True)
    saver.save(1, state_of(1), {})
    assert not saver.wait(timeout=0.05)
    assert alarm.events == ["checkpoint_failed"]
    assert alarm[0][1]["step"] == 1
    go.set()
    assert saver.wait()


# ----------------------------------------------------------------------------- C10, keep, the same step again


def test_none_that_verifies_is_an_error_and_changes_nothing(tmp_path):
    saver, alarm = make(tmp_path, keep=2)
    for step in (1, 2):
        saver.save(step, state_of(step), {})
    (tmp_path / "step-00000001" / "__0_0.distcp").unlink()
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=f"{tmp_path}.*step-00000002/manifest.json.*--out"):
        saver.find()
    assert alarm.events == ["checkpoint_damaged"] * 2
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_no_checkpoint_is_none(tmp_path):
    assert make(tmp_path / "not there")[0].find() is None
    (tmp_path / ".step-00000003.abc").mkdir()
    assert make(tmp_path)[0].find() is None


def test_a_root_that_is_no_folder(tmp_path):
    root = tmp_path / "file"
    root.touch()
    saver, alarm = make(root)
    with pytest.raises(UserError, match=f"{root}: not a readable folder"):
        saver.find()
    saver.save(1, state_of(1), {})
    assert not saver.wait()
    assert alarm.events == ["checkpoint_failed"]


def test_keep(tmp_path):
    saver, alarm = make(tmp_path, keep=2)
    for step in (9, 10, 11, 12):
        saver.save(step, state_of(step), {})
    assert names(tmp_path) == ["step-00000011", "step-00000012"]
    assert not alarm


@pytest.mark.parametrize("known", ["by its size", "by find"])
def test_keep_does_not_count_damaged_ones(tmp_path, known):
    saver, _ = make(tmp_path, keep=2)
    saver.save(1, state_of(1), {})
    saver.save(2, state_of(2), {})
    path = tmp_path / "step-00000002" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + (b"!" if known == "by find" else b""))
    if known == "by find":
        assert saver.find().step == 1
    saver.save(3, state_of(3), {})
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    saver.save(4, state_of(4), {})
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_keep_spares_what_was_just_written_when_later_steps_exist(tmp_path):
    saver, _ = make(tmp_path, keep=2)
    for step in (20, 30, 5):  # someone went back to an earlier step
        saver.save(step, state_of(step), {})
    assert names(tmp_path) == ["step-00000005", "step-00000030"]


def test_a_step_is_saved_once(tmp_path):
    saver, alarm = make(tmp_path)
    saver.save(1, state_of(1), {})
    inode = (tmp_path / "step-00000001" / "__0_0.distcp").stat().st_ino
    saver.save(1, state_of(1), {})
    assert saver.wait()
    assert (tmp_path / "step-00000001" / "__0_0.distcp").stat().st_ino == inode
    assert not alarm
