"""What a run needs of a machine, looked at one by one."""

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import psutil


class Finding(NamedTuple):
    what: str
    verdict: Literal["ok", "note", "missing"]
    found: str
    remedy: str = ""


def examine(cache: str) -> list[Finding]:
    """All findings on this machine; `cache` is where token files will go."""
    return [*_python(), *_machine(), *_disk(Path(cache).expanduser()), *_torch()]


def _python() -> Iterator[Finding]:
    fit = sys.version_info >= (3, 11)
    remedy = "" if fit else "install Python 3.11 or newer"
    yield Finding("python", "ok" if fit else "missing", platform.python_version(), remedy)
    for package in ("numpy", "pydantic", "rich", "pyarrow", "fsspec", "safetensors", "tokenizers", "xxhash"):
        try:
            yield Finding(package, "ok", version(package))
        except PackageNotFoundError:
            yield Finding(package, "missing", "not installed", "pip install -e .")


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", "ok", str(cores))
    free = psutil.virtual_memory().available / 1e9
    needed = 1.0 * cores
    verdict: Literal["ok", "note"] = "ok" if free >= needed else "note"
    remedy = "" if verdict == "ok" else f"the default run wants about 1 GB a worker: use --workers {max(1, int(free))}"
    yield Finding("free memory", verdict, f"{free:.1f} GB", remedy)
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
        yield Finding("loopback", "ok", "127.0.0.1")
    except OSError as error:
        yield Finding("loopback", "missing", str(error), "workers meet on 127.0.0.1: allow listening on it")


def _disk(cache: Path) -> Iterator[Finding]:
    for what, folder in (("cache folder", cache), ("current folder", Path.cwd())):
        place = folder
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free / 1e9
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            yield Finding(what, "missing", f"{folder}: {error.strerror}", "make it writable, or choose another")
            continue
        small = free < 1
        remedy = "the default run writes about 0.5 GB: free some space" if small else ""
        yield Finding(what, "note" if small else "ok", f"{folder}: {free:.0f} GB free", remedy)


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Finding("torch", "missing", str(error), "pip install 'torch>=2.9,<2.14'")
        return
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    fit = (2, 9) <= release < (2, 14)
    yield Finding(
        "torch", "ok" if fit else "missing", torch.__version__, "" if fit else "pip install 'torch>=2.9,<2.14'"
    )
    gloo = dist.is_available() and dist.is_gloo_available()
    remedy = "" if gloo else "this torch was built without gloo: several CPU workers cannot talk"
    yield Finding("gloo", "ok" if gloo else "missing", "available" if gloo else "not available", remedy)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        nccl = dist.is_nccl_available()
        yield Finding("CUDA", "ok", names)
        yield Finding("NCCL", "ok" if nccl else "missing", "available" if nccl else "not available")
    else:
        yield Finding("CUDA", "note", "no device: runs use the CPU")
    compiler = shutil.which("g++") or shutil.which("clang++")
    yield Finding(
        "C++ compiler",
        "ok" if compiler else "note",
        compiler or "none",
        "" if compiler else "only train.compile=true needs one",
    )
