"""The shipped devices against what their parts must add up to: units x work a cycle x clock, links x rate of a link."""

import re
from importlib.resources import files

import pytest

from lanewise.planner.hardware import devices

TEXT = files("lanewise.planner").joinpath("hardware.toml").read_text(encoding="utf-8")

# Units (SMs, compute units, matrix units), dense floating-point operations of each in a cycle with sums in fp32, and
# GHz of boost: counted apart from the rates that makers advertise ([1] and [3] of the table, and whitepapers).
PARTS = {
    ("P100", "bf16"): (56, 128, 1.48), ("V100", "bf16"): (80, 128, 1.53),  # which have none: fp32
    ("V100", "fp16"): (80, 1024, 1.53), ("P100", "fp16"): (56, 256, 1.48), ("A100", "bf16"): (108, 2048, 1.41),
    ("H100", "bf16"): (132, 4096, 1.83),
    ("MI250X", "bf16"): (220, 1024, 1.7), ("MI300X", "bf16"): (304, 2048, 2.1), ("MI355X", "bf16"): (256, 4096, 2.4),
    ("A40", "bf16"): (84, 1024, 1.74), ("A6000", "bf16"): (84, 1024, 1.8), ("L4", "bf16"): (60, 1024, 2.04),
    ("L40S", "bf16"): (142, 1024, 2.49), ("RTX 3090", "bf16"): (82, 512, 1.695),
    ("RTX 4090", "bf16"): (128, 512, 2.52), ("GAUDI2", "bf16"): (2, 2 * 256**2, 1.65),
    ("GAUDI3", "bf16"): (8, 2 * 256**2, 1.6), ("TPU V3", "bf16"): (4, 2 * 128**2, 0.94),
    ("TPU V4", "bf16"): (8, 2 * 128**2, 1.05), ("TPU V5E", "bf16"): (4, 2 * 128**2, 1.5),
    ("TPU V5P", "bf16"): (8, 2 * 128**2, 1.75),
}  # fmt: skip
LINKS = {  # links of a device, GB/s of one, one way
    "P100": (4, 20), "V100": (6, 25), "A100": (12, 25), "A800": (8, 25), "H100": (18, 25), "H800": (8, 25),
    "H20": (18, 25), "H200": (18, 25), "GH200": (18, 25), "B200": (18, 50), "B300": (18, 50), "GB200": (18, 50),
    "GB300": (18, 50), "MI250X": (7, 50), "MI300X": (7, 64), "MI325X": (7, 64), "MI355X": (7, 76.8),
    "GAUDI2": (21, 12.5), "GAUDI3": (21, 25), "ASCEND 910B": (7, 28), "TPU V3": (4, 82), "TPU V4": (6, 45),
    "TPU V5E": (4, 50), "TPU V5P": (6, 100), "TPU V6E": (4, 100),
}  # fmt: skip
SAME_CHIP = {"A100": ("A100 40GB", "A100 PCIE", "A800"), "H100": ("H100 96GB", "H200", "H800", "GH200")}


@pytest.mark.parametrize(("name", "kind"), PARTS)
def test_a_dense_peak_is_units_times_work_times_clock(name, kind):
    units, work, clock = PARTS[name, kind]
    assert devices()[name].peak[kind] == pytest.approx(units * work * clock * 1e9, rel=0.04)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_all_its_links_one_way(name):
    count, rate = LINKS[name]
    assert devices()[name].link == pytest.approx(count * rate * 1e9, rel=0.02)


def test_devices_of_one_chip_have_its_peak():
    for chip, others in SAME_CHIP.items():
        assert all(devices()[other].peak == devices()[chip].peak for other in others)


@pytest.mark.parametrize("name", devices())
def test_rates_and_links_are_in_order(name):
    device = devices()[name]
    wide, narrow, least = (device.peak.get(kind, 0.0) for kind in ("bf16", "fp8", "fp4"))
    assert not narrow or wide <= narrow <= 2.05 * wide  # twice that would be a sparse rate
    assert not least or narrow <= least <= 3.05 * narrow
    assert device.inter <= device.link <= device.bandwidth


@pytest.mark.parametrize("name", devices())
def test_every_entry_names_a_source_one_can_look_up(name):
    source = devices()[name].source
    short = re.findall(r"\[\d+\]", source)
    assert short or re.search(r"\w\.\w+/|data sheet|whitepaper", source)
    assert all(re.search(rf"^# .*{re.escape(key)} \S", TEXT, re.MULTILINE) for key in short)
