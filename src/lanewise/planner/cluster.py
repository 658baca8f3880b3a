"""The machines a plan is for: `64x8 H100`, or a TOML file that says more."""

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lanewise.errors import UserError
from lanewise.planner.hardware import Device, device_of, find_device

LATENCY = (8e-6, 25e-6)  # seconds a message, within a node and between nodes: usual for NVLink and InfiniBand
YEAR = 365.25 * 24 * 3600
MTBF_YEARS = 5.7  # of one device: 419 interruptions in 54 days of 16,384 H100 (arXiv:2407.21783, section 3.3.4)
KEYS = {
    "nodes", "devices_per_node", "device", "memory_GB", "link_GBps", "inter_GBps", "oversubscription", "pod_nodes",
    "latency_us", "mtbf_years", "price_per_device_hour", "carbon_g_per_kWh", "overhead_W", "devices",
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """nodes of per_node devices each. link, inter: bytes/s, one way, per device, within and between nodes.

    Beyond pod_nodes nodes the network carries 1/oversubscription of inter. mtbf: seconds between failures of one
    device, its share of the host counted. price: money per device-hour or None; carbon: g CO2e per kWh or None.
    overhead: W per device of hosts, network and cooling.
    """

    device: Device
    nodes: int
    per_node: int
    link: float
    inter: float
    latency: tuple[float, float] = LATENCY
    oversubscription: float = 1.0
    pod_nodes: int = 0
    mtbf: float = MTBF_YEARS * YEAR
    price: float | None = None
    carbon: float | None = None
    overhead: float = 0.0

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    @property
    def fast(self) -> int:
        """Devices that `link` joins: a node's, or a rack's where the link leaves the node (NVL72, a torus)."""
        return self.per_node if self.device.domain <= 8 else max(self.per_node, self.device.domain)

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node} {self.device.name}"


def cluster_of(device: Device, nodes: int, per_node: int) -> Cluster:
    """Nodes as they are usually built: what is not known of them comes from the device."""
    return Cluster(device, nodes, per_node, device.link, device.inter, overhead=0.3 * device.power)


def read_cluster(text: str) -> Cluster:
    """From `64x8 H100` (nodes x devices a node) or `512 H100`, or a TOML file's path. Raises UserError."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX]\s*)?(\d+)\s*[xX]?\s+(\S.*)", text)
    if match is None:
        if Path(text).suffix != ".toml":
            raise UserError(f"cluster {text!r}: write NODESxDEVICES NAME, as in '64x8 H100', or name a TOML file")
        return _from_file(text)
    device = find_device(match[3])
    if match[1] is not None:
        nodes, per_node = int(match[1]), int(match[2])
    else:
        total = int(match[2])
        per_node = min(total, 8)
        if total % max(per_node, 1):
            raise UserError(f"cluster {text!r}: {total} devices are no whole number of nodes of 8: write NODESxDEVICES")
        nodes = total // max(per_node, 1)
    if nodes < 1 or per_node < 1:
        raise UserError(f"cluster {text!r}: it has no devices")
    return cluster_of(device, nodes, per_node)


def _from_file(path: str) -> Cluster:
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such cluster file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: cannot read the cluster file: {error}") from None
    unknown = sorted(set(raw) - KEYS)
    if unknown:
        raise UserError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(sorted(KEYS))}")
    for key in ("device", "nodes"):
        if key not in raw:
            raise UserError(f"{path}: {key} is missing")
    spec = raw["device"]
    device = device_of(str(spec.get("name", "device")), _numbers(spec)) if isinstance(spec, dict) else find_device(spec)
    nodes, per_node = _count(raw, "nodes", path), _count(raw, "devices_per_node", path, min(device.domain, 8))
    if "devices" in raw and raw["devices"] != nodes * per_node:
        raise UserError(
            f"{path}: devices = {raw['devices']} contradicts nodes = {nodes} times devices_per_node = {per_node}"
        )
    base = cluster_of(
        replace(device, memory=_positive(raw, "memory_GB", path, device.memory / 1e9) * 1e9), nodes, per_node
    )
    if base.device.memory > 4 * device.memory:
        raise UserError(
            f"{path}: memory_GB = {raw['memory_GB']} contradicts {device.name}'s {device.memory / 1e9:g} GB"
        )
    link = _positive(raw, "link_GBps", path, base.link / 1e9) * 1e9
    inter = _positive(raw, "inter_GBps", path, base.inter / 1e9) * 1e9
    if inter > link and nodes > 1 and per_node > 1:
        raise UserError(
            f"{path}: inter_GBps = {inter / 1e9:g} exceeds link_GBps = {link / 1e9:g}: links between nodes are not "
            f"faster than those within (both are one way, per device)"
        )
    latency = raw.get("latency_us", [seconds * 1e6 for seconds in LATENCY])
    if not isinstance(latency, list) or len(latency) != 2:
        raise UserError(f"{path}: latency_us = {latency!r}: give two numbers, within and between nodes")
    over = _positive(raw, "oversubscription", path, 1.0)
    if over < 1:
        raise UserError(f"{path}: oversubscription = {over:g}: 1 is a full network, 2 half of one")
    return replace(
        base,
        link=link,
        inter=inter,
        latency=(float(latency[0]) * 1e-6, float(latency[1]) * 1e-6),
        oversubscription=over,
        pod_nodes=int(raw.get("pod_nodes", 0)),
        mtbf=_positive(raw, "mtbf_years", path, MTBF_YEARS) * YEAR,
        price=_positive(raw, "price_per_device_hour", path) if "price_per_device_hour" in raw else None,
        carbon=_positive(raw, "carbon_g_per_kWh", path) if "carbon_g_per_kWh" in raw else None,
        overhead=float(raw.get("overhead_W", base.overhead)),
    )


def _numbers(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key != "name"}


def _count(raw: dict[str, Any], key: str, path: str, default: int = 1) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{path}: {key} = {value!r}: it must be a whole number of at least 1")
    return value


def _positive(raw: dict[str, Any], key: str, path: str, default: float = 1.0) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(f"{path}: {key} = {value!r}: it must be a positive number")
    return float(value)
