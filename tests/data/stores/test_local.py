import pickle
import signal
import subprocess
import sys
import time

import pytest

from lanewise.data.stores import open_store
from lanewise.errors import UserError

NAMES = ["a b.bin", "deep/er/x[1].arrow", "deep/y?#.json", "z..txt"]


def test_what_is_written_is_read(tmp_path):
    store = open_store(tmp_path / "set")
    assert store.list() == []
    for i, name in enumerate(NAMES):
        store.write(name, bytes(range(i, 100)))
    assert store.list() == sorted(NAMES)
    assert store.list("deep/") == NAMES[1:3]
    assert store.list("deep/e") == NAMES[1:2]
    assert store.size("z..txt") == 97
    assert store.read("a b.bin", 10, 20) == bytes(range(10, 20))
    assert store.read("a b.bin", 95, 200) == bytes(range(95, 100)), "as a slice"
    assert store.read("a b.bin", 300, 400) == store.read("a b.bin", 5, 5) == b""


def test_a_local_file_is_itself(tmp_path):
    store = open_store(tmp_path)
    (tmp_path / "source").write_bytes(b"content")
    store.write("copy", tmp_path / "source")
    with store.local("copy") as path:
        assert path == tmp_path / "copy"
        assert path.read_bytes() == b"content"
    assert (tmp_path / "copy").exists()
    with pytest.raises(FileNotFoundError), store.local("none"):
        pass


@pytest.mark.parametrize("write", [str, "file://{}".format, lambda path: f"{path}/../{path.name}/"])
def test_one_folder_has_one_identity(tmp_path, write):
    assert open_store(write(tmp_path)).identity == open_store(tmp_path).identity
    assert open_store(tmp_path / "other").identity != open_store(tmp_path).identity
    assert pickle.loads(pickle.dumps(open_store(write(tmp_path)))).identity == open_store(tmp_path).identity


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "", "a//b", "a/../../b"])
def test_a_name_stays_below_the_folder(tmp_path, name):
    with pytest.raises(UserError, match="no name of a file below it"):
        open_store(tmp_path / "set").write(name, b"")


@pytest.mark.parametrize("url", ["ftp://host/set", "s3://", "file://relative", ""])
def test_an_address_that_is_none(url):
    with pytest.raises(UserError, match=r"use a path|names no bucket|write a path"):
        open_store(url)


@pytest.mark.parametrize(("url", "module"), [("s3://bucket/set", "s3fs"), ("hdfs://host:1/set", "hdfs_native")])
def test_a_missing_extra_is_named(monkeypatch, url, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"pip install 'lanewise\[{url.partition(':')[0]}\]'"):
        open_store(url)


def test_killed_while_writing_leaves_the_old_or_the_new(tmp_path):
    """A process that overwrites one file for ever is killed at some moment, again and again."""
    code = """
import sys
from lanewise.data.stores import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
i = 0
while True:
    i += 1
    store.write("file", bytes([i % 256]) * 300_000)
"""
    for attempt in range(4):
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        while not (tmp_path / "file").exists():
            time.sleep(0.001)
        time.sleep(0.003 * attempt)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        content = (tmp_path / "file").read_bytes()
        assert len(content) == 300_000
        assert len(set(content)) == 1
        assert open_store(tmp_path).list() == ["file"], "what was not finished is not listed"
