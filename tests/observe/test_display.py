"""What a person sees: plain lines off a terminal, a live line on one, records only with --json."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lanewise.observe.display import make_display
from system import BASE, DENSE, records, sentences, settings, train_with, write_documents

RECORD = {"step": 3, "loss": 1.25, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 1234.5, "skipped": 0}


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display("auto", every=2)
    display.start(0, 5)
    for step in range(1, 6):
        display.step({**RECORD, "step": step, "skipped": int(step == 3), "loss": None if step == 3 else 1.25})
    display.note("ALARM disk: full")
    display.stop()
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert [line.partition("  ")[0] for line in lines[:-1]] == ["step 2/5", "step 3/5", "step 4/5", "step 5/5"]
    assert "loss 1.2500  norm 0.500  lr 1.00e-03  1,234 tokens/s" in lines[0]
    assert "loss non-finite" in lines[1]
    assert lines[1].endswith("SKIPPED"), "a step that was skipped is shown whatever `every` is"
    assert lines[-1] == "ALARM disk: full"
    assert "\r" not in printed
    assert "\x1b" not in printed


def test_json_has_records_only_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display("json", every=9)
    display.start(0, 5)
    display.step(RECORD)
    display.note("resuming")
    printed = capsys.readouterr()
    assert [json.loads(line) for line in printed.out.splitlines()] == [RECORD]
    assert printed.err == "resuming\n"


def test_N8_only_the_first_rank_prints_and_what_it_prints_is_the_true_loss(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "text.jsonl", sentences(30))
    run = settings(tmp_path, source, *DENSE, "eval.every=3")
    assert train_with(no_fault, run, tmp_path / "out", 3, log=tmp_path / "log") == 0
    printed = (tmp_path / "log.0").read_text().splitlines()
    assert [(tmp_path / f"log.{rank}").read_text() for rank in (1, 2)] == ["", ""]
    for line in records(tmp_path / "out"):
        assert any(p.startswith(f"step {line['step']}/6  loss {line['loss']:.4f}") for p in printed)
    for event in records(tmp_path / "out", "events"):
        if event["event"] == "evaluated":
            assert f"step {event['step']}  held-out loss {event['loss']:.4f}" in printed


def no_fault(rank: int) -> None:
    """No fault."""


def test_on_a_terminal_progress_is_live_and_the_cursor_comes_back(tmp_path: Path) -> None:
    """Even when the worker that prints is killed and cannot end its line."""
    source = write_documents(tmp_path / "text.jsonl", sentences(30))
    words = [*BASE, *DENSE, f"data.source={source}", f"data.cache={tmp_path / 'cache'}", "train.steps=100000"]
    command = [sys.executable, "-m", "lanewise.cli.main", "train", "--workers", "2", "--out", str(tmp_path / "out")]
    master, slave = pty.openpty()
    process = subprocess.Popen([*command, *words], stdin=slave, stdout=slave, stderr=subprocess.PIPE, text=True)
    os.close(slave)
    seen = b""
    deadline = time.monotonic() + 90
    killed = False
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            seen += chunk
        if not killed and b"tokens/s" in seen:
            [printing] = [e for e in records(tmp_path / "out", "events") if e["event"] == "joined" and e["rank"] == 0]
            os.kill(printing["pid"], signal.SIGKILL)
            killed = True
    assert process.wait(timeout=30) == 1
    assert "rank 0 was killed by SIGKILL at step" in process.stderr.read()
    os.close(master)
    text = seen.decode()
    assert "\r" in text
    assert "left" in text
    assert text.count("\x1b[?25l") == 1, "the cursor is hidden while the line lives"
    assert text.rindex("\x1b[?25h") > text.index("\x1b[?25l")
