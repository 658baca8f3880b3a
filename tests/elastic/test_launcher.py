"""What the launcher does when a worker fails (rows H): all stop within seconds, and who, where and why is said."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from faulty_worker import at, boom, deep_boom, killed, leaves
from lanewise.elastic import launcher as launcher_module
from lanewise.elastic.launcher import Report
from lanewise.elastic.status import Board, Status
from lanewise.worker import _is_echo
from processes import on_ranks
from system import BASE, DENSE, bits, records, sentences, settings, train, train_with, write_documents

SOON = 20.0  # seconds, on a machine that is busy with other things; collectives would wait for ten minutes


@pytest.fixture
def make(tmp_path: Path):
    source = write_documents(tmp_path / "text.jsonl", sentences(30))
    return lambda *overrides: settings(tmp_path, source, *DENSE, *overrides)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param(
            at(1, 3, "backward", boom), "rank 1 failed at step 3 in backward: ArithmeticError: boom", id="H1-raises"
        ),
        pytest.param(
            at(0, 2, "exchange", boom), "rank 0 failed at step 2 in exchange: ArithmeticError: boom", id="H1-rank-0"
        ),
        pytest.param(
            at(2, 1, "forward", deep_boom),
            "rank 2 failed at step 1 in forward: ArithmeticError",
            id="H1-longer-than-a-pipe",
        ),
        pytest.param(
            at(2, 3, "exchange", killed), "rank 2 was killed by SIGKILL at step 3 in exchange", id="H1-killed"
        ),
        pytest.param(
            at(0, 2, "forward", killed), "rank 0 was killed by SIGKILL at step 2 in forward", id="H1-0-killed"
        ),
        pytest.param(
            at(1, 2, "commit", leaves), "rank 1 left early with exit code 0 at step 2 in commit", id="H2-exit-0"
        ),
    ],
)
def test_H1_H2_a_worker_that_fails_stops_the_others(
    tmp_path: Path, make, capfd: pytest.CaptureFixture[str], fault: Callable[[int], None], told: str
) -> None:
    started = time.monotonic()
    assert train_with(fault, make(), tmp_path / "out", 3) == 1
    assert time.monotonic() - started < SOON
    errors = capfd.readouterr().err
    assert told in errors
    assert errors.count("lanewise: rank") == 1, "only the cause is told, not who saw it"
    assert "resumes from the last checkpoint" in errors
    if "failed" in told:
        assert "boom" in errors.partition("lanewise:")[0], "the traceback comes first"
        assert "closed by peer" not in errors
    else:
        assert "Traceback" not in errors
    # H4: nothing is left that the next start trips over
    assert train(make(), tmp_path / "out", 3) == 0
    assert [line["step"] for line in records(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]


def hear_of_a_peer(rank: int, size: int) -> bool | None:
    """What rank 0 thinks of the error it gets when rank 1 leaves in the middle of a step."""
    if rank == 1:
        dist.destroy_process_group()
        return None
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        return _is_echo(error)
    return None


def test_H1_a_worker_knows_an_error_that_is_only_an_echo() -> None:
    assert on_ranks(2, hear_of_a_peer) == [True, None]
    assert not _is_echo(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not _is_echo(ArithmeticError("connection closed by peer"))


@pytest.mark.parametrize(
    ("deaths", "told"),
    [
        ([(0, 1), (2, -9)], "rank 2 was killed by SIGKILL at step 4 in backward"),
        ([(0, 1), (1, 1)], "rank 1 failed at step 5 in commit: ValueError: own"),
        ([(1, 1), (2, -9)], "rank 1 failed at step 5 in commit: ValueError: own"),
        ([(0, 1)], "rank 0 lost its peers at step 5 in exchange: gone"),
    ],
)
def test_H1_the_cause_is_told_whoever_is_noticed_first(
    deaths: list[tuple[int, int]], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 saw a peer vanish, rank 1 raised, rank 2 died without a word."""
    board = Board(multiprocessing.get_context("spawn"), 3)
    status = Status(board, 2)
    status.begin_step(4)
    status.enter("backward")
    reports = {
        0: Report(0, 5, "exchange", "gone", "Traceback of an echo\n", echo=True),
        1: Report(1, 5, "commit", "ValueError: own", "Traceback of its own\n"),
    }
    died = {rank for rank, _ in deaths}
    assert launcher_module._explain(deaths, {r: reports[r] for r in reports if r in died}, board) == 1
    assert f"lanewise: {told}\n" in capsys.readouterr().err


def command(folder: Path, out: Path, *arguments: str) -> list[str]:
    source = write_documents(folder / "text.jsonl", sentences(30))
    overrides = [*BASE, *DENSE, f"data.source={source}", f"data.cache={folder / 'cache'}"]
    return [sys.executable, "-m", "lanewise.cli.main", "train", "--out", str(out), *overrides, *arguments]


def wait_for(condition: Callable[[], object], what: str, limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {limit} s"
        time.sleep(0.02)


def test_H8_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    out = tmp_path / "out"
    launcher = subprocess.Popen(
        command(tmp_path, out, "--workers", "3", "train.steps=100000"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() and len(records(out)) > 2, "step")
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert len(family) >= 4, "a server and three workers"
    finally:
        launcher.kill()
        launcher.wait()
    _, alive = psutil.wait_procs(family, timeout=SOON)
    for process in alive:
        process.kill()
    assert not alive
    if os.path.isdir("/dev/shm"):  # H4
        assert not {name for name in set(os.listdir("/dev/shm")) - shm if name.startswith(("torch", "pym", "gloo"))}


def test_H4_many_launches_at_once_take_different_ports(tmp_path: Path) -> None:
    """Three runs of two workers each, in the same second; each is as if alone."""
    expected = None

    def run(i: int) -> subprocess.CompletedProcess[str]:
        words = command(tmp_path, tmp_path / f"{i}", "--workers", "2", "train.steps=2")
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    command(tmp_path, tmp_path)
    with ThreadPoolExecutor(3) as pool:
        for i, done in enumerate(pool.map(run, range(3))):
            assert done.returncode == 0, done.stderr
            expected = expected or bits(tmp_path / f"{i}")
            assert bits(tmp_path / f"{i}") == expected


def test_H6_replicas_with_unequal_work_make_equal_steps(tmp_path: Path) -> None:
    """Five lanes on three workers (1, 2 and 2), and one sample for the last step: four lanes have none."""
    source = write_documents(tmp_path / "text.jsonl", [f"text {i}" for i in range(11)])
    overrides = ["data.pack=document", "data.held_out=0", "train.epochs=1", "batch.lanes=5", "data.record_samples=true"]
    run = settings(tmp_path, source, *DENSE, *overrides)
    assert train(run, tmp_path / "out", 3) == 0
    assert len(records(tmp_path / "out")) == 3
    read = [slot["samples"] for slot in records(tmp_path / "out", "samples")]
    assert read[10:] == [read[10], [], [], [], []]
    assert sorted(sample for slot in read for sample in slot) == sorted(f"e0:{i}" for i in range(11))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_mpirun_gives_the_same_bits(tmp_path: Path) -> None:
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *command(tmp_path, tmp_path / "joined")]
    subprocess.run(words, check=True, timeout=120)
    assert train(settings(tmp_path, tmp_path / "text.jsonl", *DENSE), tmp_path / "own", 3) == 0
    assert bits(tmp_path / "joined") == bits(tmp_path / "own")


def test_torchrun_gives_the_same_bits(tmp_path: Path) -> None:
    words = command(tmp_path, tmp_path / "joined", "--resume", "never")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words[1:]]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1/6") == 1, "one rank prints"
    source = tmp_path / "text.jsonl"
    assert train(settings(tmp_path, source, *DENSE), tmp_path / "own", 3) == 0
    assert bits(tmp_path / "joined") == bits(tmp_path / "own")

    again = subprocess.run(torchrun, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode != 0
    assert again.stderr.count("already holds a run") == 1, "the user's mistake is told once"
    assert "UserError" not in again.stderr


def test_joined_workers_tell_a_wrong_word_once(tmp_path: Path) -> None:
    """Every process gets the same words; rank 0 says what is wrong with them, before anything heavy is imported."""
    for rank in (0, 1):
        place = {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        words = command(tmp_path, tmp_path / "out", "train.stepz=2")
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **place}, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == (rank == 0)


def test_a_group_signal_counts_once(tmp_path: Path) -> None:
    """`timeout`, Slurm and others signal the launcher, its group, or both: the run stops after its step, with 75."""
    out = tmp_path / "out"
    launcher = subprocess.Popen(
        command(tmp_path, out, "--workers", "2", "train.steps=100000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(records(out)) > 2, "step")
    os.kill(launcher.pid, signal.SIGTERM)
    time.sleep(0.02)  # time to be seen as two signals
    os.killpg(launcher.pid, signal.SIGTERM)
    printed, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, errors
    steps = [line["step"] for line in records(out)]
    assert steps == list(range(1, len(steps) + 1))
    assert f"step {steps[-1]}/100000" in printed
    assert "\r" not in printed
    assert "\x1b" not in printed, "plain lines off a terminal"
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("step ")] == [
        f"{step}/100000" for step in steps
    ], "each step once, by one rank"
    assert (out / "checkpoints" / f"step-{steps[-1]:08d}").is_dir()
