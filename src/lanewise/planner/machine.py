"""Where a plan is for: a described cluster, or this machine as `lanewise probe` measured it."""

import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from lanewise.config import Run
from lanewise.errors import UserError
from lanewise.planner.choice import Floats
from lanewise.planner.cluster import Cluster, read_cluster
from lanewise.planner.correction import Corrected, Learned, shipped
from lanewise.planner.cost import Rates
from lanewise.planner.hardware import Device
from lanewise.planner.learning import learned
from lanewise.planner.memory import OURS, Engine

UNSURE = (0.8, 1.3)  # p10 and p90 where nothing like it was learned from


class Where(NamedTuple):
    """What a plan is for. rates, correction: None are those fitted to published runs."""

    cluster: Cluster
    engine: Engine = OURS
    rates: Rates | None = None
    correction: Learned | None = None

    def correct(self, features: Floats) -> Corrected:
        """What is learned of such runs: from this machine's own, or from published ones. What nothing like it was
        learned from is left as it is, with a wide interval."""
        count = len(features)
        if self.rates is not None and self.correction is None:
            return Corrected(np.ones(count), np.full(count, 0.85), np.full(count, 1.2), np.zeros(count, dtype=bool))
        factor, low, high, far = (self.correction or shipped()).predict(features)
        return Corrected(np.where(far, 1, factor), np.where(far, UNSURE[0], low), np.where(far, UNSURE[1], high), far)


def place(cluster: str | None, workers: int | None, run: Run, guess: bool = False) -> Where:
    """A described cluster, or else this machine. guess: if it is not probed, take it for a usual one. Raises UserError:
    not probed."""
    if cluster is not None:
        if workers is not None:
            raise UserError("--workers is for this machine: leave it out with --cluster")
        return Where(read_cluster(cluster))
    probed = read_probe(run.data.cache) if is_probed(run.data.cache) or not guess else USUAL
    each = run.train.threads if probed.get("device", "cpu") == "cpu" else 1
    here, rates = local(probed, workers or max(probed["cores"] // each, 1))
    return Where(here, engine(probed), rates, learned(run.data.cache))


# On a CPU there is no context and no allocator that keeps blocks; what one process of ours holds beside its tensors is
# the interpreter with torch, and that is shared or outside what a plan can change.
LOCAL = replace(OURS, slack=0.0, buffers=0.0, context=0.0)


def engine(probed: dict[str, Any]) -> Engine:
    """How our own engine stores things on this machine."""
    told = probed.get("resident")
    return replace(LOCAL, buffers=told["base"], holes=tuple(told["holes"])) if told else LOCAL


def local(probed: dict[str, Any], workers: int) -> tuple[Cluster, Rates]:
    """This machine as a cluster of one node of `workers` devices, and its rates; several nodes, if it was probed with
    others and there are more workers than it has devices."""
    between = probed.get("between") or {"per_node": workers}
    spans = workers > between["per_node"] and workers % between["per_node"] == 0
    here = between["per_node"] if spans else workers
    share = max(here / probed["cores"], 1.0)  # processes beyond the cores take turns
    rate = {kind: value / share for kind, value in probed["matmul"].items()}
    device = Device(
        f"{platform.machine()} core" if probed.get("device", "cpu") == "cpu" else "GPU here",
        rate,
        rate,
        probed["memory"] / here,
        probed["bandwidth"] / share,
        probed["link"] / share,
        here,
        probed["link"] / share,
        probed["watts_per_core"],
        "lanewise probe",
    )
    # what was measured is a whole collective of two ranks; `cost.ring` counts a quarter of the first number for it
    latency = (4 * probed["latency"] * share, probed["latency"] * share)
    rates = Rates(**probed["rates"])
    if not spans:
        return Cluster(device, 1, workers, device.link, device.inter, latency), rates
    # what traffic costs was measured within a node
    inter, latency = between["link"] / share, (latency[0], between["latency"] * share)
    return Cluster(device, workers // here, here, device.link, inter, latency), replace(rates, costs=None)


# Round numbers of a server's core and of two processes of it over gloo, where nobody has measured. They tell layouts
# apart; a step may well take several times as long.
USUAL: dict[str, Any] = {
    "matmul": {"fp32": 1e11, "bf16": 2e11}, "bandwidth": 1e10, "link": 1e9, "latency": 2e-4, "watts_per_core": 10.0,
    "memory": psutil.virtual_memory().total, "cores": os.cpu_count() or 1,
    "rates": {
        "rows": 2e5, "launch": 0.0, "launch_routed": 0.0, "scores": 0.0, "products": 0.8, "attention": 0.2,
        "pointwise": 0.15, "head": 0.8, "link": 1.0, "network": 1.0, "hidden_tensor": 0.0, "hidden_expert": 0.0,
        "hidden_data": 0.5, "seen": 1.0, "bubble": 1.0, "uneven": 1.0, "jitter": 0.0, "fixed": 2e-3, "issue": 3e-4,
    },
}  # fmt: skip


NEEDED = ("matmul", "bandwidth", "link", "latency", "memory", "cores", "watts_per_core", "rates")


def is_probed(cache: str) -> bool:
    return probe_path(cache).exists()


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
    lacking = [key for key in NEEDED if key not in found] if isinstance(found, dict) else list(NEEDED)
    if lacking:
        raise UserError(f"{path}: measurements are missing ({', '.join(lacking)}): run `lanewise probe` again")
    return found
