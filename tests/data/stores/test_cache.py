import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from lanewise.data.stores import Cache, StoreAway
from lanewise.errors import UserError


class Source:
    """Files of one letter each, and how often they were fetched."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.fetched: list[str] = []

    def file(self, letter: str, size: int = 100):
        def fetch(path: Path) -> None:
            self.fetched.append(letter)
            assert path.stat().st_size == size, "room is taken before the transfer"
            path.write_bytes(letter.encode() * size)

        return self.cache.file(letter, letter, size, fetch)

    def use(self, *letters: str) -> None:
        for letter in letters:
            with self.file(letter) as path:
                assert path.read_bytes() == letter.encode() * 100
            time.sleep(0.002)  # times of use differ


@pytest.fixture
def source(tmp_path):
    return Source(Cache(tmp_path / "cache", limit=300, timeout=0.3))


def held(cache: Cache) -> int:
    return sum(path.stat().st_size for path in cache.folder.iterdir())


def test_fetched_once_and_the_longest_unused_leaves(source):
    source.use("a", "b", "c", "a", "b", "c")
    assert source.fetched == ["a", "b", "c"]
    source.use("a", "d")  # b is the oldest now
    assert held(source.cache) == 300
    source.use("a", "c", "d")
    assert source.fetched == ["a", "b", "c", "d"]
    source.use("b")
    assert source.fetched[-1] == "b"


def test_a_file_in_use_stays(source):
    with source.file("a") as a, source.file("b"):
        source.use("c", "d", "e", "f")
        assert a.read_bytes() == b"a" * 100
        assert held(source.cache) == 300
    source.use("a", "b")
    assert source.fetched == ["a", "b", "c", "d", "e", "f"]


def test_no_room_but_for_files_in_use(source):
    with ExitStack() as stack:
        for letter in "abc":
            stack.enter_context(source.file(letter))
        with pytest.raises(UserError, match=r"no room for 100 bytes of d.*300 bytes"), source.file("d"):
            pass
        threading.Timer(0.1, stack.pop_all().close).start()
        source.use("d")  # waits for one to be given back


def test_larger_than_the_limit_is_said_before_anything_is_deleted(source):
    source.use("a", "b", "c")
    with pytest.raises(UserError, match=r"d: 301 bytes do not fit into a cache of 300.*data.cache_limit_gb"):
        source.cache.admit(301, "d")
    with pytest.raises(UserError, match="301 bytes"), source.file("d", 301):
        pass
    assert held(source.cache) == 300


def test_the_disk_keeps_its_free_space(source, monkeypatch, tmp_path):
    source.use("a", "b")
    real = os.statvfs(tmp_path)
    room = real.f_bavail * real.f_frsize
    wanting = Cache(source.cache.folder, limit=300, free=room * 2, timeout=0.1)
    with pytest.raises(UserError, match=r"less than .* free on its disk"):
        Source(wanting).use("c")
    source.use("a", "b")
    assert source.fetched == ["a", "b"], "nothing was deleted that could not have helped"


def test_what_is_not_the_caches_own_is_left_alone(source):
    source.cache.folder.mkdir()
    for name in ("mine.data", "precious.bin", "a" * 32):
        (source.cache.folder / name).write_bytes(b"x" * 1000)
    source.use(*"abcdef")
    assert all((source.cache.folder / name).stat().st_size == 1000 for name in ("mine.data", "precious.bin", "a" * 32))


def test_a_copy_cut_short_is_fetched_again(source):
    source.use("a")
    (copy,) = source.cache.folder.glob("*.data")
    os.truncate(copy, 50)
    source.use("a")
    assert source.fetched == ["a", "a"]


def test_a_failed_fetch_leaves_nothing(source):
    def fetch(path: Path) -> None:
        raise OSError("cut")

    with pytest.raises(OSError, match="cut"), source.cache.file("a", "a", 100, fetch):
        pass
    assert held(source.cache) == 0
    source.use("a")


def test_an_empty_file(source):
    with source.file("a", 0) as path:
        assert path.read_bytes() == b""


def test_two_at_once_fetch_once(source):
    both = threading.Barrier(2)

    def fetch(path: Path) -> None:
        source.fetched.append("slow")
        time.sleep(0.2)
        path.write_bytes(b"s" * 100)

    def use() -> None:
        both.wait(10)
        with source.cache.file("s", "s", 100, fetch) as path:
            assert path.read_bytes() == b"s" * 100

    other = threading.Thread(target=use)
    other.start()
    use()
    other.join()
    assert source.fetched == ["slow"]


def test_a_process_that_stopped_fetching_is_named(source):
    going, done = threading.Event(), threading.Event()

    def fetch(path: Path) -> None:
        going.set()
        done.wait(10)
        path.write_bytes(b"s" * 100)

    def hang() -> None:
        with source.cache.file("s", "s", 100, fetch):
            pass

    thread = threading.Thread(target=hang)
    thread.start()
    assert going.wait(10)
    with pytest.raises(StoreAway, match="another process fetches s and has stopped"), source.file("s"):
        pass
    done.set()
    thread.join()


# --------------------------------------------------------------------------------------------------------- processes

CHURN = """
import random, sys, time
from pathlib import Path
from lanewise.data.stores import Cache
cache = Cache(Path(sys.argv[1]), limit=5_000, timeout=20)
random.seed(int(sys.argv[2]))
end = time.monotonic() + float(sys.argv[3])
print("ready", flush=True)
while time.monotonic() < end:
    letter = random.choice("abcdefgh")
    def fetch(path):
        with open(path, "r+b") as file:
            for _ in range(10):
                file.write(letter.encode() * 100)
                time.sleep(random.random() / 1000)
    with cache.file(letter, letter, 1000, fetch) as path:
        assert path.read_bytes() == letter.encode() * 1000, letter
        assert sum(f.stat().st_size for f in Path(sys.argv[1]).glob("*.data")) <= 5_000
"""


def churn(folder: Path, seed: int, seconds: float) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-c", CHURN, str(folder), str(seed), str(seconds)], stdout=-1, stderr=-1)
    assert child.stdout.readline() == b"ready\n", child.stderr.read()
    return child


def test_killed_at_any_moment_the_cache_goes_on(tmp_path):
    """Processes of one host use one small cache and are killed one after the other; those that live see no fault."""
    survivor = churn(tmp_path, 0, 3.0)
    for seed in range(1, 9):
        child = churn(tmp_path, seed, 60)
        time.sleep(0.02 * seed)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    last = churn(tmp_path, 99, 0.3)
    for process in (survivor, last):
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said.decode()
    for path in tmp_path.glob("*.data"):
        assert re.fullmatch(rb"(.)\1{999}", path.read_bytes()), path
    Source(Cache(tmp_path, limit=100)).use("a")  # all the rubbish can go
    assert held(Cache(tmp_path, 0)) == 100


def test_a_pickled_cache_is_the_same(source):
    source.use("a")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_copies, (source.cache,)) == 1


def _copies(cache: Cache) -> int:
    def fetch(path: Path) -> None:
        raise AssertionError

    with cache.file("a", "a", 100, fetch):
        return len(list(cache.folder.glob("*.data")))
