"""Where a plan is for: a described cluster, or this machine as `lanewise probe` measured it."""

import json
import os
import platform
from pathlib import Path
from typing import Any

from lanewise.config import Run
from lanewise.errors import UserError
from lanewise.planner.cluster import Cluster, read_cluster
from lanewise.planner.cost import Rates
from lanewise.planner.hardware import Device
from lanewise.planner.memory import OURS, Engine


def place(cluster: str | None, workers: int | None, run: Run) -> tuple[Cluster, Rates | None, Engine]:
    """Cluster, rates (None: those fitted to published runs) and engine. Raises UserError: not probed."""
    if cluster is not None:
        if workers is not None:
            raise UserError("--workers is for this machine: leave it out with --cluster")
        return read_cluster(cluster), None, OURS
    probed = read_probe(run.data.cache)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (*local(probed, workers or max(cores // run.train.threads, 1)), LOCAL)


# On a CPU there is no context and no allocator that keeps blocks; what one process of ours holds beside its tensors is
# the interpreter with torch, and that is shared or outside what a plan can change.
LOCAL = Engine(slack=0.0, buffers=0.0, context=0.0, activations=1.5)


def local(probed: dict[str, Any], workers: int) -> tuple[Cluster, Rates]:
    """This machine as a cluster of one node of `workers` devices, and its rates."""
    share = max(workers / probed["cores"], 1.0)  # processes beyond the cores take turns
    rate = {kind: value / share for kind, value in probed["matmul"].items()}
    device = Device(
        f"{platform.machine()} core",
        rate,
        rate,
        probed["memory"] / workers,
        probed["bandwidth"] / share,
        probed["link"] / share,
        workers,
        probed["link"] / share,
        probed["watts_per_core"],
        "lanewise probe",
    )
    latency = (probed["latency"] * share, probed["latency"] * share)
    cluster = Cluster(device, 1, workers, device.link, device.inter, latency)
    return cluster, Rates(**probed["rates"])


def probe_path(cache: str) -> Path:
    return Path(cache).expanduser() / "probe" / f"{platform.node() or 'machine'}.json"


def read_probe(cache: str) -> dict[str, Any]:
    path = probe_path(cache)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("this machine is not measured yet: run `lanewise probe`, or name a --cluster") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read the measurements ({error}): run `lanewise probe` again") from None
    return found
