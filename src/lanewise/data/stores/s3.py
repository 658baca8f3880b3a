"""S3 and what speaks like it (SeaweedFS, Ceph's RADOS gateway, ...), by s3fs.

Address and credentials come from where all S3 tools look: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ~/.aws, the machine's role. Without any, requests go unsigned, as public buckets
want them.
"""

import os
from pathlib import Path
from typing import Any

from lanewise.data.stores.extras import needs
from lanewise.data.stores.remote import Backend, Stat
from lanewise.errors import UserError

ATTEMPT = 20.0  # seconds without a byte after which a try is given up


class S3(Backend):
    remedy = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL"

    def __init__(self, url: str, timeout: float):
        s3fs = needs("s3fs", "s3", url)
        import botocore.session

        bucket, _, folder = url.removeprefix("s3://").partition("/")
        if not bucket:
            raise UserError(f"{url}: names no bucket; write s3://bucket/folder")
        self.root = f"{bucket}/{folder}".strip("/")
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        self.identity = f"s3://{self.root}" + (f" at {endpoint.rstrip('/')}" if endpoint else "")
        attempt = min(ATTEMPT, timeout)
        self.fs = s3fs.S3FileSystem(
            anon=botocore.session.get_session().get_credentials() is None,
            config_kwargs={
                "retries": {"total_max_attempts": 1},  # ours is the only patience: a deadline must hold
                "connect_timeout": min(5.0, attempt),
                "read_timeout": attempt,
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self.fs.retries = 1

    def read(self, name: str, start: int, stop: int) -> bytes:
        try:
            return self.fs.cat_file(f"{self.root}/{name}", start=start, end=stop)
        except OSError as e:
            if _answer(e).get("Error", {}).get("Code") in ("InvalidRange", "416"):
                return b""  # starts behind the end
            raise

    def stat(self, name: str) -> Stat:
        info = self.fs.info(f"{self.root}/{name}")
        if info["type"] != "file":
            raise FileNotFoundError(name)
        return Stat(info["size"], info["ETag"])

    def list(self, prefix: str) -> list[str]:
        try:
            found = self.fs.find(self.root, prefix=prefix)
        except FileNotFoundError:  # no such bucket
            return []
        names = (path.removeprefix(self.root + "/") for path in found)
        return [name for name in names if name.startswith(prefix)]

    def write(self, name: str, data: bytes | Path) -> None:
        """An object appears whole, with its last part."""
        path = f"{self.root}/{name}"
        self.fs.pipe_file(path, data) if isinstance(data, bytes) else self.fs.put_file(str(data), path)

    def transient(self, error: Exception) -> bool:
        from botocore.exceptions import BotoCoreError, ConnectionError, HTTPClientError

        if status := _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode"):
            return status >= 500 or status in (408, 429)
        if isinstance(error, BotoCoreError):
            return isinstance(error, ConnectionError | HTTPClientError)
        if isinstance(error, OSError):
            return not isinstance(error, FileNotFoundError | PermissionError | FileExistsError)
        return type(error).__module__.partition(".")[0] in ("aiohttp", "asyncio")  # cut in the middle of a body


def _answer(error: BaseException) -> dict[str, Any]:
    """What the server said, if it came to that."""
    return getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
