"""What every store promises, asked of real servers."""

import os
import subprocess
import sys
import threading
import time
import uuid

import pytest

from lanewise import config
from lanewise.data.stores import Cache, StoreAway, configure, open_store
from lanewise.data.stores import open as open_module
from lanewise.errors import UserError

NAMES = ["a b.bin", "deep/er/x[1].arrow", "deep/y?#%.json", "z..txt"]


@pytest.fixture(params=["s3", "hdfs"])
def url(request: pytest.FixtureRequest) -> str:
    """A folder of its own on each kind of server."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_server').url}/{uuid.uuid4().hex}"
    return f"hdfs://127.0.0.1:{request.getfixturevalue('hdfs_server').port}/{uuid.uuid4().hex}"


def noise(size: int) -> bytes:
    return os.urandom(size)


def test_what_is_written_is_read(url, tmp_path, monkeypatch):
    monkeypatch.setattr(open_module, "_settings", open_module._settings)
    configure(config.Data(cache=str(tmp_path), cache_limit_gb=0.001, cache_free_gb=0))
    store = open_store(url)
    with pytest.raises(UserError, match=r"1,000,001 bytes do not fit into a cache of 1,000,000"):
        store.admit(1_000_001)
    assert store.list() == []
    for i, name in enumerate(NAMES):
        store.write(name, bytes(range(i, 100)))
    assert store.list() == sorted(NAMES)
    assert store.list("deep/") == NAMES[1:3]
    assert store.list("deep/e") == NAMES[1:2]
    assert store.list("none/") == []
    assert store.size("z..txt") == 97
    assert store.read("a b.bin", 10, 20) == bytes(range(10, 20))
    assert store.read("a b.bin", 95, 200) == bytes(range(95, 100)), "as a slice"
    assert store.read("a b.bin", 300, 400) == store.read("a b.bin", 5, 5) == b""
    assert store.read("deep/y?#%.json", 0, 100) == bytes(range(2, 100))
    store.write("a b.bin", b"new")
    assert store.read("a b.bin", 0, 100) == b"new"
    store.write("empty", b"")
    assert (store.size("empty"), store.read("empty", 0, 10)) == (0, b"")
    with store.local("deep/y?#%.json") as path:
        assert path.read_bytes() == bytes(range(2, 100))
    assert path.is_relative_to(tmp_path / "store"), "in the cache of the run file"


def test_large_files_in_pieces(url, tmp_path):
    """More than one piece to read, more than one part to write."""
    content = noise(110 << 20)
    (tmp_path / "large").write_bytes(content)
    store = open_store(url, Cache(tmp_path / "cache", 1 << 30))
    store.write("from file", tmp_path / "large")
    with store.local("from file") as path:
        assert path.read_bytes() == content
    store.write("from bytes", content)
    assert store.read("from bytes", 5, 20 << 20) == content[5 : 20 << 20]


@pytest.mark.parametrize("do", [lambda s: s.read("none", 0, 1), lambda s: s.size("none"), lambda s: s.size("deep")])
def test_what_is_not_there(url, do):
    store = open_store(url, timeout=30)
    store.write("deep/file", b"x")
    begun = time.monotonic()
    with pytest.raises(FileNotFoundError, match=r"(s3|hdfs)://.*/(none|deep): no such file or bucket"):
        do(store)
    assert time.monotonic() - begun < 5, "no use waiting"


def test_a_changed_file_is_noticed(url, tmp_path):
    cache = Cache(tmp_path, 1000)
    store = open_store(url, cache)
    for content in (b"one", b"two", b"a longer one"):
        time.sleep(0.01)
        store.write("file", content)
        for _ in range(2):
            with store.local("file") as path:
                assert path.read_bytes() == content
    assert len(list(tmp_path.glob("*.data"))) == 3, "one copy of each version, fetched once"
    with pytest.raises(UserError, match="1,001 bytes do not fit into a cache of 1,000"):
        store.admit(1001)


def test_two_processes_at_once(url, tmp_path):
    """Both overwrite the same file and read it: whatever is read is whole. Both share a cache."""
    code = """
import pathlib, sys
from lanewise.data.stores import Cache, open_store
store = open_store(sys.argv[1], Cache(pathlib.Path(sys.argv[2]), 100_000_000))
for i in range(8):
    store.write("file", bytes([int(sys.argv[3]) + i]) * 2_000_000)
    content = store.read("file", 0, 10_000_000)
    assert len(content) == 2_000_000 and len(set(content)) == 1, (len(content), set(content))
    with store.local("steady") as path:
        assert path.read_bytes() == b"steady"
print(store.identity)
"""
    store = open_store(url)
    store.write("steady", b"steady")
    words = [sys.executable, "-c", code, url, str(tmp_path)]
    children = [subprocess.Popen([*words, str(i)], stdout=-1, stderr=-1) for i in (0, 100)]
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err.decode()
        assert out.decode().strip() == store.identity
    assert store.list() == ["file", "steady"]
    assert len(list(tmp_path.glob("*.data"))) == 1


# -------------------------------------------------------------------------------------------------------- a store away


def test_s3_cut_for_five_seconds_loses_nothing(s3_server, monkeypatch, tmp_path):
    """In the middle of a download, of ranged reads and of an upload."""
    content = noise(30 << 20)
    folder = f"{s3_server.url}/{uuid.uuid4().hex}"
    open_store(folder).write("large", content)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.through)
    store = open_store(folder, Cache(tmp_path / "cache", 1 << 30), timeout=60)
    (tmp_path / "source").write_bytes(content)
    with s3_server.proxy.away(5, after=12 << 20) as cut:
        ranges: list[bytes] = []
        reader = threading.Thread(
            target=lambda: ranges.extend(store.read("large", i << 20, (i + 1) << 20) for i in range(30))
        )
        reader.start()
        with store.local("large") as path:
            assert path.read_bytes() == content
        store.write("copy", tmp_path / "source")
        reader.join()
        assert cut.is_set()
    assert b"".join(ranges) == content
    assert store.read("copy", 0, 1 << 30) == content


def test_hdfs_killed_for_five_seconds_loses_nothing(hdfs_server, tmp_path):
    content = noise(40 << 20)
    store = open_store(f"hdfs://127.0.0.1:{hdfs_server.port}/{uuid.uuid4().hex}", Cache(tmp_path, 1 << 30), timeout=60)
    store.write("large", content)
    read: list[bytes] = []
    reader = threading.Thread(
        target=lambda: read.extend(store.read("large", i << 20, (i + 1) << 20) for i in range(40))
    )
    reader.start()
    while len(read) < 3:
        time.sleep(0.001)
    hdfs_server.kill()
    time.sleep(5)
    hdfs_server.start()
    reader.join(60)
    assert b"".join(read) == content
    store.write("after", content)
    with store.local("after") as path:
        assert path.read_bytes() == content


@pytest.mark.parametrize("do", [lambda s: s.list(), lambda s: s.read("a", 0, 1), lambda s: s.write("a", b"1")])
def test_a_store_that_stays_away_is_named(monkeypatch, do):
    from servers.process import free_ports

    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for url, module in ((f"s3://nowhere/{port}", "s3fs"), (f"hdfs://127.0.0.1:{port}/set", "hdfs_native")):
        pytest.importorskip(module)
        begun = time.monotonic()
        with pytest.raises(StoreAway, match=rf"{url}.*: no answer in 2 s .*store_timeout"):
            do(open_store(url, timeout=2))
        assert time.monotonic() - begun < 8


def test_a_wrong_key_is_said_at_once(s3_server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"access refused.*AWS_SECRET_ACCESS_KEY"):
        open_store(f"{s3_server.url}/set", timeout=30).write("file", b"")
    assert time.monotonic() - begun < 10


def test_a_wrong_user_is_said_at_once(hdfs_server, monkeypatch):
    folder = f"hdfs://127.0.0.1:{hdfs_server.port}/{uuid.uuid4().hex}"
    open_store(folder).write("mine", b"")
    code = "import sys; from lanewise.data.stores import open_store; open_store(sys.argv[1]).write('file', b'')"
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    begun = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60, check=False)
    assert "access refused" in said.stderr.splitlines()[-1]
    assert "HADOOP_USER_NAME" in said.stderr.splitlines()[-1]
    assert time.monotonic() - begun < 15
