"""Devices: what they compute, hold and move. The figures stand in `hardware.toml`, with their sources."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from lanewise.errors import UserError

UNMEASURED = 0.8  # matmul rate / peak where nobody measured it: the usual ratio of those measured
NUMBERS = ("memory", "bandwidth", "link", "inter", "power")  # besides `peak`, what an unknown device must tell


@dataclass(frozen=True)
class Device:
    """peak, matmul: FLOP/s by precision (fp32, bf16, fp16, fp8, fp4). memory in bytes; bandwidth, link and inter in
    bytes/s, one way, per device; domain: devices joined by `link`; power in W."""

    name: str
    peak: dict[str, float]
    matmul: dict[str, float]
    memory: float
    bandwidth: float
    link: float
    domain: int
    inter: float
    power: float
    source: str = ""

    def rate(self, precision: str) -> float:
        """Best matrix product, FLOP/s, in the precision or the nearest wider one that the device has."""
        wider = ("fp4", "fp8", "bf16", "fp32")
        kinds = [precision] if precision == "fp16" else []
        kinds += wider[wider.index(precision) :] if precision in wider else ["bf16", "fp32"]
        for kind in [*kinds, *reversed(wider)]:
            if kind in self.matmul:
                return self.matmul[kind]
        raise AssertionError(f"{self.name} has no rate")


def device_of(name: str, raw: dict[str, Any]) -> Device:
    """A device from its numbers in the units of `hardware.toml`. Raises UserError that names what is missing."""
    lacking = [key for key in ("peak", *NUMBERS) if key not in raw]
    if lacking:
        raise UserError(f"device {name!r}: {', '.join(lacking)} missing: give its numbers as in hardware.toml")
    unknown = set(raw) - {"peak", "matmul", "domain", "source", *NUMBERS}
    if unknown:
        raise UserError(f"device {name!r}: unknown key {sorted(unknown)[0]!r}")
    peak = {kind: float(rate) * 1e12 for kind, rate in raw["peak"].items()}
    measured = {kind: float(rate) * 1e12 for kind, rate in raw.get("matmul", {}).items()}
    for kind, rate in measured.items():
        if rate > peak.get(kind, rate):
            raise UserError(f"device {name!r}: matmul.{kind} exceeds peak.{kind}: one of them is wrong")
    memory, bandwidth, link, inter, power = (float(raw[key]) for key in NUMBERS)
    for key in NUMBERS:
        if float(raw[key]) <= 0:
            raise UserError(f"device {name!r}: {key} is {raw[key]}: it must be positive")
    return Device(
        name,
        peak,
        {kind: measured.get(kind, rate * UNMEASURED) for kind, rate in peak.items()},
        memory * 1e9,
        bandwidth * 1e9,
        link * 1e9,
        int(raw.get("domain", 8)),
        inter * 1e9,
        power,
        str(raw.get("source", "")),
    )


@cache
def devices() -> dict[str, Device]:
    """The known devices by name."""
    text = (Path(__file__).parent / "hardware.toml").read_text(encoding="utf-8")
    return {name: device_of(name, raw) for name, raw in tomllib.loads(text).items()}


def find_device(name: str) -> Device:
    """The device a free name means: `H100-80GB-SXM`, `A100 (DGX-A100)`, `tpu-v5p`. Raises UserError if none.

    All words of a known device's name must be among those of `name`, apart or in one; the longest such wins.
    """
    said = re.findall(r"[A-Z0-9]+", re.sub(r"\b\d+ ?X ?(?=[A-Z])", "", name.upper()))
    words = {
        *said,
        *(one + two for one, two in pairwise(said) if two.isdigit() or two == "GB"),
    }  # `Gaudi 3` is `GAUDI3`
    known = [d for d in devices().values() if set(d.name.split()) <= words or d.name.replace(" ", "") in words]
    if not known:
        raise UserError(
            f"unknown device {name!r}: known are {', '.join(devices())}; for another write a cluster file with its "
            f"peak (TFLOP/s by precision), {', '.join(NUMBERS)}, or run `lanewise probe` on it"
        )
    return max(known, key=lambda device: (len(device.name.split()), len(device.name)))
