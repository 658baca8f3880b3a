"""Training on a folder that grows: rows come once, in order, also to a run that was killed on the way."""

import json
import re
import shutil
import time
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from faulty_worker import at, killed, terminated
from lanewise.cli.main import main
from lanewise.data import tokenizer
from lanewise.data.stores import open_store
from lanewise.data.streams import Sealed
from lanewise.errors import UserError
from system import DENSE, bits, records, sentences, settings, train, train_with

LIVE = [
    *DENSE,
    "train.steps=6",
    "batch.lanes=4",
    "checkpoint.every=2",
    "data.stream_rows=10",
    "data.stream_settle=0.1",
    "data.record_samples=true",
]


def put(inbox: Path, name: str, texts: list[str]) -> None:
    """A file that is there at once."""
    (inbox / f".{name}").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (inbox / f".{name}").rename(inbox / name)


def expected(texts: list[list[str]], pack: str, words: Any) -> list[list[int]]:
    """The sequences of segments of texts: up to 32 predictions each, every token but the first of its kin predicted."""
    rows = []
    for segment in texts:
        documents = [[*words.encode(text), words.end] for text in segment]
        for tokens in [sum(documents, [])] if pack == "stream" else documents:  # noqa: RUF017 - short lists
            rows += [tokens[at : at + 33] for at in range(0, len(tokens) - 1, 32)]
    return rows


@pytest.mark.parametrize("pack", ["stream", "document"])
def test_a_run_waits_for_data_and_a_killed_one_reads_the_same_again(tmp_path: Path, pack: str) -> None:
    inbox, out, log = tmp_path / "inbox", tmp_path / "out", tmp_path / "log"
    inbox.mkdir()
    texts = sentences(60)
    put(inbox, "a.jsonl", texts[:8])
    run = settings(tmp_path, Path(f"grow:{inbox}"), *LIVE, f"data.pack={pack}")
    assert train_with(at(0, 3, "forward", killed), run, out, 2) == 1
    assert [line["step"] for line in records(out)] == [1, 2]
    said = Path(f"{log}.0")

    def more() -> None:
        """Once the run waits for it."""
        while not (
            said.exists() and re.search(r"step [3-6] waits for data: grow:.* gave \d+ of \d+", said.read_text())
        ):
            time.sleep(0.02)
        put(inbox, "b.jsonl", texts[8:])

    Thread(target=more, daemon=True).start()
    assert train_with(at(0, 99, "forward", killed), run, out, 2, log=log) == 0
    sealed = Sealed(open_store(out / "stream"))
    rows = [row for number in range(len(sealed.segments)) for row in sealed.table(number)["tokens"].to_pylist()]
    segments = [texts[a:b] for a, b in pairwise([0, 8, 18, 28, 38, 48, 58, 60])]
    assert rows == expected(segments, pack, tokenizer.load(out))
    samples = [s for slot in records(out, "samples") for s in slot["samples"]]
    ids = [f"s{n}:{row}" for n, segment in enumerate(sealed.segments) for row in range(segment.rows)]
    assert samples == ids[: 6 * 4]
    tokens = [line["tokens"] for line in records(out)]
    assert tokens == [sum(len(row) - 1 for row in rows[at : at + 4]) for at in range(0, 24, 4)]
    assert sealed.state is not None
    assert sealed.firsts[sealed.state.committed] <= 24 < sealed.firsts[sealed.state.committed + 1]
    # The same segments again, in one process and without a break.
    (tmp_path / "whole").mkdir()
    shutil.copytree(out / "stream", tmp_path / "whole/stream")
    assert train(run, tmp_path / "whole") == 0
    assert bits(out) == bits(tmp_path / "whole")


def test_a_stop_is_heard_while_it_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    run = settings(tmp_path, Path(f"grow:{inbox}"), *LIVE)
    assert train_with(at(1, 0, "start", terminated), run, out, 2) == 75
    assert records(out) == []
    (inbox / "bad.txt").write_bytes(b"\xff")
    assert train(run, out) == 2
    assert "message 0 of bad.txt: not UTF-8 at byte 0; set data.errors" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["data.tokenizer=bpe"], "cannot be trained on a stream"),
        (["data.pack=best-fit"], "a stream is packed as"),
        (["data.dedup=near"], "duplicates are not looked for"),
        (["data.exhausted=stop"], "a stream has no end"),
        (["data.mix=[{source='grow:x'}, {source='python'}]"], "a live source cannot be mixed"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(tmp_path: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        settings(tmp_path, Path(f"grow:{tmp_path}"), *words)


def test_segments_that_are_gone_and_epochs_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    put(inbox, "a.jsonl", sentences(60))
    run = settings(tmp_path, Path(f"grow:{inbox}"), *LIVE)
    assert train(run, out, until=1) == 0
    shutil.rmtree(out / "stream")
    assert train(run, out) == 2
    assert "does not hold the segments the checkpoint was trained on" in capfd.readouterr().err
    assert main(["eval", str(out)]) == 2
    assert "nothing of a live source is held out" in capfd.readouterr().err
    assert train(settings(tmp_path, Path(f"grow:{inbox}"), *LIVE, "train.epochs=1"), tmp_path / "x") == 2
    assert "a stream has no epochs" in capfd.readouterr().err
