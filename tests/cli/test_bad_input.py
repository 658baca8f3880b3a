"""The user's mistakes: exit code 2, one clear line that says what is wrong and the remedy, nothing lost."""

import contextlib
import gzip
import os
import subprocess
from pathlib import Path

import pytest

from lanewise.cli.main import main
from system import BASE, DENSE, bits, records, sentences, settings, train, train_with, write_documents


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "text.jsonl", sentences(30))


@pytest.fixture
def refused(tmp_path: Path, source: Path, capfd: pytest.CaptureFixture[str]):
    """Run `lanewise train` with these words on top of a run that is in order; the line it prints."""

    def run(*words: str, out: Path | str = tmp_path / "out") -> str:
        base = [*BASE, *DENSE, f"data.source={source}", f"data.cache={tmp_path / 'cache'}", "train.steps=2"]
        assert main(["train", "--workers", "2", *base, "--out", str(out), *words]) == 2
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith("lanewise: ")
        return line.removeprefix("lanewise: ")

    return run


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        pytest.param(["train.stepz=3"], "train.stepz", "did you mean 'steps'", id="unknown-key"),
        pytest.param(["train.steps=many"], "train.steps", "integer", id="wrong-type"),
        pytest.param(["train.steps=0"], "train.steps", "greater than or equal to 1", id="out-of-range"),
        pytest.param(["model.heads=3"], "heads 3", "change one", id="impossible-size"),
        pytest.param(
            ["--workers", "9"], "9 replicas but only 8 lanes", "at most 8 workers", id="more-workers-than-lanes"
        ),
        pytest.param(["--workers", "0"], "--workers 0", "at least one", id="no-worker"),
        pytest.param(["model.vocab_size=100"], "model.vocab_size 100", "raise it, or leave it at 0", id="vocabulary"),
        pytest.param(["data.source=nowhere"], "nowhere", "name a file, folder or glob", id="missing-data"),
        pytest.param(["data.source=no/*.txt"], "no/*.txt", "check the pattern", id="empty-glob"),
        pytest.param(["data.tokenizer=nowhere.json"], "nowhere.json", "", id="missing-tokenizer"),
        pytest.param(["data.text_field=body"], "no column 'body'", "one of: text", id="wrong-column"),
        pytest.param(["batch.sequence_length=99999"], "fewer than one sequence", "sequence_length", id="short-text"),
        pytest.param(["--layout", "xp2"], "'xp2' is not an axis", "as in pp2.tp2", id="layout"),
        pytest.param(["--layout", "tp2", "--workers", "3"], "replicas of 2", "use 2 workers", id="workers-left-over"),
        pytest.param(["--until", "0"], "--until 0", "count from 1", id="until"),
        pytest.param(["--resume", "nowhere"], "nowhere", "name a run's folder", id="resume-from-nothing"),
        pytest.param(["one.toml", "two.toml"], "more than one run file", "section.key=value", id="two-run-files"),
        pytest.param(["one.toml"], "one.toml", "no such run file", id="missing-run-file"),
        pytest.param(["--wrokers", "2"], "--wrokers", "train --help", id="unknown-option"),
        pytest.param(["--workers", "two"], "--workers", "train --help", id="option-of-wrong-type"),
    ],
)
def test_one_clear_line(refused, tmp_path: Path, words: list[str], named: str, remedy: str) -> None:
    line = refused(*words)
    assert named in line
    assert remedy in line
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_empty_data(refused, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "no text in" in refused(f"data.source={tmp_path / 'empty.txt'}")


def test_unreadable_data(refused, tmp_path: Path) -> None:
    broken = tmp_path / "text.txt.gz"
    broken.write_bytes(gzip.compress(b"words " * 1000)[:40])
    line = refused(f"data.source={broken}")
    assert str(broken) in line
    assert "repair it" in line


def test_text_that_is_not_utf8(refused, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    line = refused(f"data.source={tmp_path / 'latin.txt'}")
    assert f"{tmp_path / 'latin.txt'}: not UTF-8 at byte 3" in line
    assert "data.errors=replace" in line


def test_output_folder_of_a_different_run(refused, tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    assert train(settings(tmp_path, source, *DENSE, "train.steps=2"), out) == 0
    before = bits(out)
    line = refused("optimizer.lr=0.5", "train.seed=3")
    assert "train.seed was 0, now 3" in line
    assert "optimizer.lr was 0.01, now 0.5" in line
    assert "choose another --out" in line
    assert "already holds a run" in refused("--resume", "never")
    assert bits(out) == before
    (out / "run.toml").unlink()
    assert "no run.toml" in refused()
    assert bits(out) == before


@pytest.mark.parametrize("out", ["{tmp}/file/out", "{tmp}/file", "/proc/lanewise-test"])
def test_output_folder_that_cannot_be_made(refused, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    line = refused(out=out.format(tmp=tmp_path))
    assert "choose another --out" in line


def test_a_second_run_in_the_same_folder_at_the_same_time(refused, tmp_path: Path, source: Path) -> None:
    from lanewise.data.prepare import prepare
    from lanewise.runfolder import open_run

    run = settings(tmp_path, source, *DENSE, "train.steps=2")
    with open_run(run, tmp_path / "out", "auto", prepare(run.data)):
        assert "another process is training there" in refused()
    assert train(run, tmp_path / "out") == 0


# ------------------------------------------------------------------------------------------------------ a full disk


@pytest.fixture
def small_disk(tmp_path: Path):
    """A folder on a disk of 1 MB, and a way to give it more."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield mount, lambda: subprocess.run(["mount", "-o", "remount,size=64m", mount], check=True)
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_no_space_for_the_run_file(refused, small_disk) -> None:
    mount, _ = small_disk
    (mount / "out").mkdir()
    with open(mount / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    line = refused(out=mount / "out")
    assert "No space left on device" in line
    assert "choose another --out" in line
    assert [p.name for p in (mount / "out").iterdir() if not p.name.startswith(".")] == []


def test_no_space_for_a_checkpoint_is_an_alarm_and_training_goes_on(tmp_path: Path, source: Path, small_disk) -> None:
    """Two checkpoints of 0.4 MB do not fit beside a third that is being written."""
    mount, grow = small_disk
    run = settings(tmp_path, source, *DENSE, "checkpoint.every=1", "checkpoint.keep=2")
    out = mount / "out"
    assert train_with(no_fault, run, out, 2, log=tmp_path / "log") == 1, "its last checkpoint is missing"
    assert [line["step"] for line in records(out)] == [1, 2, 3, 4, 5, 6], "training went on"
    printed = (tmp_path / "log.0").read_text()
    assert "ALARM checkpoint_failed" in printed
    assert "No space left" in printed
    kept = sorted(os.listdir(out / "checkpoints"))
    assert kept
    assert "step-00000006" not in kept
    assert all(name.startswith("step-") for name in kept), "nothing half-written is left"
    alarms = [e for e in records(out, "events") if e.get("alarm")]
    assert all(a["event"] == "checkpoint_failed" for a in alarms)
    grow()
    assert train(run, out) == 0
    assert train(run, tmp_path / "elsewhere") == 0
    assert bits(out) == bits(tmp_path / "elsewhere")


def no_fault(rank: int) -> None: ...
