"""The cache: built once, found again by content, never half there; and the held-out split."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from token_folder import documents, everything

from lanewise.data import build, store
from lanewise.data import prepare as prepare_module
from lanewise.data.prepare import prepare
from lanewise.errors import UserError


@pytest.fixture
def source(tmp_path) -> Path:
    """Twenty small documents."""
    root = tmp_path / "source"
    root.mkdir()
    for i in range(20):
        (root / f"{i:02}.txt").write_text(f"document {i} " * (i + 1))
    return root


@pytest.fixture
def later(monkeypatch) -> None:
    """File times are trusted two seconds after a change: the clock runs ahead."""
    now = time.time
    monkeypatch.setattr(prepare_module.time, "time", lambda: now() + 10)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------- found again


def test_second_run_reads_no_text(source, settings, monkeypatch, later):
    folder = prepare(settings(source))
    monkeypatch.setattr(prepare_module, "_content_key", None)
    assert prepare(settings(source)) == folder


def test_new_files_are_read_again_but_not_built_again(source, settings, monkeypatch):
    folder = prepare(settings(source))
    assert not (folder.parent / "seen").exists()
    monkeypatch.setattr(build, "write", None)
    assert prepare(settings(source)) == folder
    os.utime(source / "00.txt")
    assert prepare(settings(source)) == folder


def test_changed_content_is_seen_behind_equal_size_and_time(source, settings, later):
    folder = prepare(settings(source))
    info = (source / "00.txt").stat()
    (source / "00.txt").write_text("DOCUMENT 0 ")
    os.utime(source / "00.txt", ns=(info.st_atime_ns, info.st_mtime_ns))
    changed = prepare(settings(source))
    assert changed != folder
    assert "DOCUMENT 0 " in everything(changed)


def test_equal_content_elsewhere_is_equal(source, settings, tmp_path):
    shutil.copytree(source, tmp_path / "copy")
    one = prepare(settings(source, tokenizer="bpe"))
    two = prepare(settings(tmp_path / "copy", tokenizer="bpe", cache=str(tmp_path / "other")))
    assert one.name == two.name
    assert one != two
    for name, content in contents(one).items():
        assert name == "meta.json" or content == (two / name).read_bytes()
    assert store.read_meta(one)["identity"] == store.read_meta(two)["identity"]


def test_key_names_what_defines_the_tokens_and_nothing_else(source, settings, tmp_path):
    base = prepare(settings(source, tokenizer="bpe"))
    for free in ({"pack": "document"}, {"shuffle": False}, {"record_samples": True}):
        assert prepare(settings(source, tokenizer="bpe", **free)) == base
    others = [
        prepare(settings(source, **{"tokenizer": "bpe", **change}))
        for change in (
            {"tokenizer": "bytes"},
            {"tokenizer": str(base)},
            {"vocab_size": 300},
            {"text_field": "body"},
            {"errors": "replace"},
            {"held_out": 0.3},
        )
    ]
    (source / "00.txt").rename(source / "99.txt")  # another order
    others.append(prepare(settings(source, tokenizer="bpe")))
    assert len({base, *others}) == 8


def test_the_tokenizer_file_is_part_of_the_content(source, settings, tmp_path):
    base = prepare(settings(source))
    shutil.copytree(base, tmp_path / "words")
    one = prepare(settings(source, tokenizer=str(tmp_path / "words")))
    config = tmp_path / "words" / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<other>"}))
    two = prepare(settings(source, tokenizer=str(tmp_path / "words")))
    assert one != two
    assert store.read_meta(two)["vocab_size"] == 258


def test_identity_tells_what_changed(source, settings):
    base = store.read_meta(prepare(settings(source, held_out=0.3)))["identity"]
    assert set(base) == {"tokenizer", "train", "held"}
    (source / "99.txt").write_text("one more")
    more = store.read_meta(prepare(settings(source, held_out=0.3)))["identity"]
    assert more["tokenizer"] == base["tokenizer"]
    assert (more["train"] == base["train"]) != (more["held"] == base["held"])  # it went to one of the sides


# ------------------------------------------------------------------------------------------------ never half there

CHILD = """
import os, signal, sys
from lanewise import config
from lanewise.data import store
from lanewise.data.prepare import prepare
data = config.Data(source=sys.argv[1], cache=sys.argv[2], tokenizer="bpe", vocab_size=300)
kill, calls = sys.argv[3] if len(sys.argv) > 3 else "", 0
def dying(name, call):
    def wrapped(*a, **k):
        global calls
        calls += 1
        if f"{name}{calls}" == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*a, **k)
    return wrapped
if kill:
    os.rename = dying("rename", os.rename)
    os.fsync = dying("fsync", os.fsync)
    store.Writer.add = dying("add", store.Writer.add)
    calls = 0
if "together" in sys.argv:
    print("ready", flush=True)
    sys.stdin.readline()
print(prepare(data))
assert "torch" not in sys.modules
"""


def child(source: Path, cache: Path, *more: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(cache), *more],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("moment", ["add1", "add9", "fsync41", "fsync48", "rename49"])
def test_killed_while_building(source, tmp_path, settings, moment):
    """40 calls of add (a document and its end, 20 times) come first; 7 files and a folder are flushed."""
    killed = child(source, tmp_path / "cache", moment)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert all(path.name.startswith(".building-") for path in (tmp_path / "cache").iterdir())
    folder = prepare(settings(source, tokenizer="bpe", vocab_size=300))
    assert len(everything(folder)) == 20


def test_launches_at_once_agree(source, tmp_path):
    """And none of them imports torch (see the child's last line)."""
    cache = tmp_path / "cache"
    children = [child(source, cache, "", "together") for _ in range(2)]
    for process in children:
        assert process.stdout.readline() == "ready\n"
    for process in children:
        process.stdin.write("\n")
        process.stdin.flush()
    folders = {process.communicate()[0].strip() for process in children}
    assert [process.returncode for process in children] == [0, 0]
    assert len(folders) == 1
    assert sorted(path.name for path in cache.iterdir() if path.name != "seen") == [Path(folders.pop()).name]


def test_training_is_the_same_with_any_hash_seed_and_threads(source, tmp_path):
    folders = []
    for i in range(2):
        process = child(source, tmp_path / f"cache{i}", PYTHONHASHSEED=str(i), RAYON_NUM_THREADS=str(2 - i))
        folders.append(Path(process.communicate()[0].strip()))
    assert contents(folders[0]) == contents(folders[1])


def test_a_build_that_loses_the_race_takes_the_winners(source, settings, monkeypatch):
    write, winner = build.write, []

    def overtaken(*args):
        if not winner:
            winner.append(None)
            winner[0] = prepare(settings(source))
            winner.append(contents(winner[0]))
        return write(*args)

    monkeypatch.setattr(build, "write", overtaken)
    folder = prepare(settings(source))
    assert folder == winner[0]
    assert contents(folder) == winner[1]
    assert [path.name for path in folder.parent.iterdir() if path.name != "seen"] == [folder.name]


def truncate(folder: Path) -> None:
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 1)


def flip(folder: Path) -> None:
    raw = bytearray((folder / "train.starts").read_bytes())
    raw[9] ^= 1
    (folder / "train.starts").write_bytes(raw)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (truncate, "train.bin has .* bytes instead of"),
        (flip, "train.starts has changed since it was written"),
        (lambda folder: (folder / "held.bin").unlink(), "is incomplete .*held.bin"),
        (lambda folder: (folder / "meta.json").write_text("{"), "is incomplete"),
        (lambda folder: (folder / "meta.json").unlink(), "is incomplete .*meta.json"),
    ],
)
def test_damage_is_named_and_repaired(source, settings, later, harm, named):
    folder = prepare(settings(source))
    before = contents(folder)
    harm(folder)
    said: list[str] = []
    assert prepare(settings(source), said.append) == folder
    assert said[0].endswith(": building it again")
    assert re.search(named, said[0])
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir() if path.name != "seen"] == [folder.name]


def test_mark_of_a_large_file_reads_its_ends(tmp_path):
    path = tmp_path / "large"
    raw = bytearray(os.urandom(6_000_000))
    path.write_bytes(raw)
    mark = store.mark(path)
    for place in (0, len(raw) - 1):
        raw[place] ^= 1
        path.write_bytes(raw)
        assert store.mark(path) != mark
        raw[place] ^= 1
    path.write_bytes(raw)
    assert store.mark(path) == mark


def test_full_disk(source, settings, monkeypatch, tmp_path):
    add = store.Writer.add

    def full(self, tokens, learned=None):
        if self.tokens > 500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, tokens, learned)

    monkeypatch.setattr(store.Writer, "add", full)
    with pytest.raises(UserError, match=r"cache: .*No space left.*free some space there, or set data.cache"):
        prepare(settings(source))
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_cannot_be_written(source, settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/below: cannot keep tokens there .*or set data.cache"):
        prepare(settings(source, cache=str(tmp_path / "file" / "below")))


def test_source_that_changes_while_it_is_read(source, settings, monkeypatch, tmp_path):
    write = build.write

    def busy(*args):
        write(*args)
        with open(source / "00.txt", "a") as file:
            file.write("more")

    monkeypatch.setattr(build, "write", busy)
    with pytest.raises(UserError, match="changed while it was read; start again"):
        prepare(settings(source))
    assert list((tmp_path / "cache").iterdir()) == []


def test_leftovers_of_killed_builds_go_after_a_day(source, settings, tmp_path):
    for name, age in (("old", 100_000), ("new", 10)):
        left = tmp_path / "cache" / f".building-{name}"
        left.mkdir(parents=True)
        (left / "train.bin").write_bytes(b"x")
        for path in (left / "train.bin", left):
            os.utime(path, (time.time() - age,) * 2)
    prepare(settings(source))
    assert [path.name for path in (tmp_path / "cache").glob(".building-*")] == [".building-new"]


# ---------------------------------------------------------------------------------------------------------- held out


def test_the_side_of_a_document_hangs_on_its_content(source, settings):
    for i in range(20, 400):
        (source / f"{i}.txt").write_text(f"document {i}")
    folder = prepare(settings(source, held_out=0.2))
    held = set(documents(folder, "held"))
    assert 50 < len(held) < 110  # 80 expected, deviation 8
    assert not held & set(documents(folder, "train"))
    (source / "00.txt").rename(source / "zz.txt")
    (source / "01.txt").unlink()
    again = set(documents(prepare(settings(source, held_out=0.2)), "held"))
    assert again == held - {"document 1 " * 2}


def test_nothing_held_out(source, settings):
    folder = prepare(settings(source, held_out=0))
    assert documents(folder, "held") == []
    assert len(documents(folder, "train")) == 20


@pytest.mark.parametrize("share", [1e-9, 0.05, 0.5, 1 - 1e-9])
def test_two_documents_are_enough_for_both_sides(tmp_path, settings, share):
    texts = ["x" * 9_000, "y" * 1_000]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    folder = prepare(settings(tmp_path / "*.txt", held_out=share))
    sides = [documents(folder, side) for side in store.SIDES]
    assert sorted(map(len, sides)) == [1, 1]
    assert everything(folder) == texts
    assert store.read_meta(folder)["documents"] == {"train": 1, "held": 1}
    if share < 0.4:  # neither is held out by itself: the one nearer to the share in length is
        assert sides[1] == [texts[1]]
    if share > 0.9:
        assert sides[0] == [texts[1]]


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.9])
def test_a_lone_document_gives_its_tail(tmp_path, settings, share):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    folder = prepare(settings(tmp_path / "a.txt", held_out=share))
    meta = store.read_meta(folder)
    tokens = {side: store.tokens(folder, side, "<u2").tolist() for side in store.SIDES}
    assert meta["held_out_is_tail"]
    assert len(tokens["held"]) == max(2, round(101 * share))
    whole = prepare(settings(tmp_path / "a.txt", held_out=0))
    assert tokens["train"] + tokens["held"] == store.tokens(whole, "train", "<u2").tolist()
    for side in store.SIDES:
        assert store.starts(folder, side).tolist() == [0, len(tokens[side])]


def test_a_lone_document_too_short_to_cut(tmp_path, settings):
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(UserError, match=r"one document of 3 tokens is too short .*data.held_out=0"):
        prepare(settings(tmp_path / "a.txt"))
    assert everything(prepare(settings(tmp_path / "a.txt", held_out=0))) == ["ab"]
