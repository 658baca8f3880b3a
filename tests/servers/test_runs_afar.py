"""Training from a store that goes away in mid-run: for good, and for a while."""

import os
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lanewise.data import shard_build
from lanewise.data.stores import open_store
from servers.proxy import Proxy
from system import BASE, DENSE, bits, records, sentences, settings, train, write_documents

STEPS = 12
AWAY = 5.0  # seconds
WORDS = [*DENSE, f"train.steps={STEPS}", "checkpoint.every=2", "data.credit_mb=0", "data.record_samples=true"]


class Afar(NamedTuple):
    """A shard set on a store, behind a proxy."""

    url: str
    proxy: Proxy
    environment: dict[str, str]


@pytest.fixture(params=["s3", "hdfs"])
def afar(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same set at home and on the store; of many shards, so that a run asks for new ones all the time."""
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        here = there = f"{server.url}/{uuid.uuid4().hex}"
        proxy, environment = server.proxy, {"AWS_ENDPOINT_URL": server.through}
    else:
        server = request.getfixturevalue("hdfs_server")
        proxy, environment = Proxy(server.port), {}
        name = uuid.uuid4().hex
        here, there = (f"hdfs://127.0.0.1:{port}/{name}" for port in (server.port, proxy.port))
    monkeypatch.setattr(shard_build, "TASK", 32_000)
    source = write_documents(tmp_path / "rows.jsonl", sentences(1200))
    data = settings(tmp_path, source, "data.held_out=0").data
    manifest = shard_build.build_shards([str(source)], data, str(tmp_path / "home"), 1, lambda text: None)
    assert manifest["shard_count"] > 30
    store = open_store(here)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda path: store.write(path.name, path), (tmp_path / "home").iterdir()))
    yield Afar(there, proxy, environment)
    if request.param == "hdfs":
        proxy.cut()


def training(afar: Afar, out: Path, cache: Path, timeout: float) -> subprocess.Popen[bytes]:
    """Its complaints go to `out`.err: a pipe would be held open by the last of its processes."""
    words = [*BASE, *WORDS, f"data.source={afar.url}", f"data.cache={cache}", f"data.store_timeout={timeout}"]
    return subprocess.Popen(
        [sys.executable, "-m", "lanewise.cli.main", "train", *words, "--workers", "2", "--out", str(out)],
        env={**os.environ, **afar.environment},
        stdout=subprocess.DEVNULL,
        stderr=open(f"{out}.err", "wb"),
    )


def wait_for(step: int, out: Path, run: subprocess.Popen[bytes]) -> None:
    while not ((out / "metrics.jsonl").exists() and any(line["step"] >= step for line in records(out))):
        assert run.poll() is None, Path(f"{out}.err").read_text()
        time.sleep(0.01)


def test_a_store_that_goes_away_in_mid_run(afar: Afar, tmp_path: Path) -> None:
    """For good: one line that names it, soon. For a while: the run goes on, and not a bit of it differs."""
    out, run = tmp_path / "out", None
    try:
        run = training(afar, out, tmp_path / "first", timeout=3)
        wait_for(3, out, run)
        afar.proxy.cut()
        begun = time.monotonic()
        code = run.wait(timeout=30)
        assert time.monotonic() - begun < 3 + 5
        complaint = Path(f"{out}.err").read_text()
        assert (code, complaint.count("\n")) == (2, 1), complaint
        assert afar.url in complaint
        assert "no answer in 3 s" in complaint
        reached = len(records(out))
        afar.proxy.mend()

        run = training(afar, out, tmp_path / "second", timeout=30)
        wait_for(reached + 1, out, run)
        with afar.proxy.away(AWAY):
            assert run.wait(timeout=60) == 0, Path(f"{out}.err").read_text()
    finally:
        if run is not None:
            run.kill()
    times = [line["time"] for line in records(out)][reached:]
    assert max(b - a for a, b in pairwise(times)) > AWAY - 1, "it was away while training"
    home = settings(tmp_path, tmp_path / "home", *WORDS)
    assert train(home, tmp_path / "whole", 1) == 0
    assert bits(out) == bits(tmp_path / "whole")
