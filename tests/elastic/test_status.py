"""Where a worker is, and where its time goes."""

import multiprocessing
import time

import pytest

from lanewise.elastic.status import Board, Status
from lanewise.stop import StopRequest


def test_the_launcher_reads_each_rank() -> None:
    board = Board(multiprocessing.get_context("spawn"), 3)
    statuses = [Status(board, rank) for rank in range(3)]
    statuses[1].begin_step(7)
    statuses[1].enter("exchange")
    statuses[2].finished()
    assert [board.read(rank)[:2] for rank in range(3)] == [(0, "start"), (7, "exchange"), (0, "end")]
    assert [board.read(rank)[3] for rank in range(3)] == [False, False, True]
    assert board.read(1)[2] == pytest.approx(time.time(), abs=5)


def test_laps_are_all_the_time_there_was() -> None:
    started = time.perf_counter()
    status = Status()
    for _ in range(2):
        for phase, seconds in [("data", 0.01), ("forward", 0.02), ("data", 0.01), ("commit", 0.03)]:
            status.enter(phase)
            time.sleep(seconds)
        first = status.lap()
        assert first["data"] >= 0.02
        assert first["forward"] >= 0.02
        assert first["commit"] >= 0.03, "the phase that is still going on counts up to now"
        assert sum(first.values()) == pytest.approx(time.perf_counter() - started, abs=0.01)
        started = time.perf_counter()


def test_the_launchers_wish_to_stop() -> None:
    board = Board(multiprocessing.get_context("spawn"), 2)
    stop = StopRequest(board=board)
    assert not stop.asked
    board.ask_to_stop()
    assert stop.asked
    assert board.read(1) == board.read(0), "it touches no rank's row"
