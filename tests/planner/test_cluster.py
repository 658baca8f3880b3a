import pytest

from lanewise.errors import UserError
from lanewise.planner.cluster import read_cluster
from lanewise.planner.hardware import devices, find_device


@pytest.mark.parametrize(
    ("text", "device", "count"),
    [
        ("64x8 H100", "H100", 512),
        ("512 H100", "H100", 512),
        ("2 x 16 v100-32GB", "V100", 32),
        ("18x4 GB200", "GB200", 72),
    ],
)
def test_short_form(text, device, count):
    cluster = read_cluster(text)
    assert (cluster.device.name, cluster.devices) == (device, count)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("H100-80GB-SXM (GCP A3)", "H100"), ("A100-40GB", "A100 40GB"), ("A100 (DGX-A100)", "A100"),
        ("H100 96GB HBM2e 500W", "H100 96GB"), ("tpu v5p", "TPU V5P"), ("GB200", "GB200"),
        ("Gaudi 3", "GAUDI3"), ("A100 40 GB", "A100 40GB"), ("RTX A6000", "A6000"), ("AMD Instinct MI250X", "MI250X"),
    ],
)  # fmt: skip
def test_free_names(name, device):
    assert find_device(name).name == device


def test_rates_fall_back_to_wider_precisions():
    a100, b200 = devices()["A100"], devices()["B200"]
    assert a100.rate("fp8") == a100.rate("bf16") == 271.2e12
    assert b200.rate("fp4") > b200.rate("fp8") > b200.rate("bf16")
    assert all(device.rate("fp32") > 0 for device in devices().values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('device = "H100"\nnodes = 2\ndevices = 20', "contradicts"),
        ('device = "H100"\nnodes = 2\ninter_GBps = 900', "exceeds link_GBps"),
        ('device = "H100"\nnodes = 0', "at least 1"),
        ('device = "H100"\nnodes = 2\nnodez = 3', "unknown key 'nodez'"),
        ('device = "Q7"\nnodes = 2', "unknown device"),
        ("nodes = 2\n[device]\nname = 'X1'\npeak = { bf16 = 100 }", "memory, bandwidth, link, inter, power missing"),
        ('device = "H100"\nnodes = 2\noversubscription = 0.5', "1 is a full network"),
    ],
)
def test_bad_files_are_named(tmp_path, text, says):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        read_cluster(str(path))
    assert "\n" not in str(caught.value)


def test_file_of_an_unknown_device(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        "nodes = 4\ndevices_per_node = 4\nprice_per_device_hour = 2.5\n[device]\nname = 'X1'\npeak = { bf16 = 100 }\n"
        "memory = 64\nbandwidth = 1000\nlink = 100\ninter = 10\npower = 300"
    )
    cluster = read_cluster(str(path))
    assert (cluster.devices, cluster.price, cluster.device.rate("bf16")) == (16, 2.5, 80e12)
