"""An HDFS of one NameNode and one DataNode: Hadoop 2.7.3 from the jars in PyPI's pyspark 2.4.8, on Java 17."""

import fnmatch
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from servers.process import Server, free_ports, listens

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lanewise-tests" / "hadoop-2.7.3"
JARS = (
    "hadoop-common-* hadoop-hdfs-* hadoop-auth-* hadoop-annotations-* guava-* commons-* protobuf-java-* jetty-* "
    "netty-* javax.servlet-api-* javax.ws.rs-api-* jsr305-* jersey-* log4j-* slf4j-* htrace-core-* xmlenc-* "
    "leveldbjni-* jackson-*asl-* xercesImpl-*"
).split()
OPENED = ("lang", "util", "net", "nio")
SETTINGS = """<configuration>
<property><name>fs.defaultFS</name><value>hdfs://127.0.0.1:{rpc}</value></property>
<property><name>dfs.namenode.name.dir</name><value>file://{folder}/name</value></property>
<property><name>dfs.datanode.data.dir</name><value>file://{folder}/data</value></property>
<property><name>dfs.namenode.http-address</name><value>127.0.0.1:{http}</value></property>
<property><name>dfs.datanode.address</name><value>127.0.0.1:{data}</value></property>
<property><name>dfs.datanode.http.address</name><value>127.0.0.1:{data_http}</value></property>
<property><name>dfs.datanode.ipc.address</name><value>127.0.0.1:{data_ipc}</value></property>
<property><name>dfs.heartbeat.interval</name><value>1</value></property>
<property><name>dfs.namenode.safemode.extension</name><value>0</value></property>
<property><name>dfs.replication</name><value>1</value></property>
<property><name>dfs.webhdfs.enabled</name><value>false</value></property>
</configuration>"""


def jars() -> Path:
    """The folder of the jars; got from PyPI (220 MB) the first time. Raises CalledProcessError without a network."""
    if not CACHE.exists():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE.parent) as scratch:
            folder = Path(scratch)
            _download(folder)
            (archive,) = folder.glob("pyspark-*.tar.gz")
            (folder / "jars").mkdir()
            with tarfile.open(archive) as packed:
                for member in packed:
                    name = Path(member.name).name
                    if "/deps/jars/" in member.name and any(fnmatch.fnmatch(name, f"{jar}.jar") for jar in JARS):
                        with open(folder / "jars" / name, "wb") as file:
                            shutil.copyfileobj(packed.extractfile(member), file)
            try:
                (folder / "jars").rename(CACHE)
            except OSError:
                assert CACHE.exists()  # another was first
    return CACHE


def _download(folder: Path) -> None:
    """pip runs a source package's setup.py to learn its name; that of pyspark needs an older setuptools."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [folder / "venv/bin/python", "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", "setuptools<70", "wheel"], check=True)
    words = ["download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "--dest", folder, "pyspark==2.4.8"]
    subprocess.run([*pip, *words], check=True)


class Cluster:
    """NameNode and DataNode; `port` is where clients go."""

    def __init__(self, folder: Path):
        self.port, http, data, data_http, data_ipc = free_ports(5)
        for path in ("name", "data", "conf/webapps/hdfs", "conf/webapps/datanode"):
            (folder / path).mkdir(parents=True)
        settings = SETTINGS.format(
            folder=folder, rpc=self.port, http=http, data=data, data_http=data_http, data_ipc=data_ipc
        )
        (folder / "conf/hdfs-site.xml").write_text(settings, encoding="utf-8")
        (folder / "conf/core-site.xml").write_text(settings, encoding="utf-8")
        (folder / "conf/log4j.properties").write_text(LOGGING, encoding="utf-8")
        java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        java += [f"--add-opens=java.base/java.{part}=ALL-UNNAMED" for part in OPENED]
        java += ["--add-opens=java.base/sun.nio.ch=ALL-UNNAMED"]
        java += ["--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED"]
        java += ["-cp", f"{folder / 'conf'}:{jars()}/*"]
        node = "org.apache.hadoop.hdfs.server.{0}.{1}".format
        format_ = [*java, node("namenode", "NameNode"), "-format", "-nonInteractive"]
        subprocess.run(format_, check=True, capture_output=True, timeout=60)
        self.name = Server([*java, node("namenode", "NameNode")], lambda: listens(self.port), folder / "name.log")
        self.data = Server([*java, node("datanode", "DataNode")], self._takes_writes, folder / "data.log")

    def _takes_writes(self) -> bool:
        """A DataNode listens before the NameNode knows it and leaves its safe mode."""
        import hdfs_native

        try:
            client = hdfs_native.Client(f"hdfs://127.0.0.1:{self.port}")
            with client.create("/probe", hdfs_native.WriteOptions(overwrite=True)) as file:
                file.write(b"probe")
            return True
        except RuntimeError:
            return False

    def kill(self) -> None:
        self.data.kill()
        self.name.kill()

    def start(self) -> None:
        self.name.start()
        self.data.start()


LOGGING = """log4j.rootLogger=WARN, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d %p %c: %m%n
"""
