"""Search: valid, deterministic, quick; what wins fits; and the verb's output."""

import json
import time

import pytest

from lanewise import config
from lanewise.cli.main import main
from lanewise.parallel.layout import Layout, check
from lanewise.planner import search
from lanewise.planner.cluster import read_cluster
from lanewise.planner.machine import Where
from lanewise.planner.memory import OURS
from lanewise.planner.report import chosen

LLAMA = [
    "model.preset=llama3.1-405b",
    "train.precision=bf16",
    "batch.lanes=128",
    "batch.microbatches=16",
    "batch.sequence_length=8192",
]
DEEPSEEK = [
    "model.preset=deepseek-v3",
    "train.precision=bf16",
    "batch.lanes=16",
    "batch.microbatches=960",
    "batch.sequence_length=4096",
]


@pytest.mark.parametrize(
    ("words", "cluster", "published"),
    [(LLAMA, "2048x8 H100", "pp16.tp8"), (DEEPSEEK, "256x8 H800", "pp16.ep64")],
)
def test_published_giants_fit_and_the_choice_is_a_valid_run(words, cluster, published):
    run = config.load(None, words)
    space = search.explore(run, Where(read_cluster(cluster)))
    plans = search.rank(space)
    assert all(plan.bytes <= 80e9 * search.USABLE for plan in plans)
    assert any(plan.layout == Layout.parse(published) for plan in plans)
    for plan in plans[:5]:
        settled = chosen(run, plan)
        assert settled.batch.sequences == run.batch.sequences
        check(plan.layout, settled, read_cluster(cluster).devices)
        assert plan.layout.replicas(read_cluster(cluster).devices) == plan.replicas
    assert [p.step for p in plans] == sorted(p.step for p in plans)
    assert plans == search.rank(search.explore(run, Where(read_cluster(cluster))))


def test_under_a_second_for_ten_thousand_devices():
    run = config.load(None, [*DEEPSEEK, "batch.lanes=125", "batch.microbatches=80"])
    start = time.process_time()
    plans = search.rank(search.explore(run, Where(read_cluster("1250x8 H100"))))
    assert time.process_time() - start < 1.0
    assert plans


def test_pruning_is_exact():
    """What the space says fits is what the memory model says of each alone."""
    run = config.load(
        None, ["model.preset=llama3-8b", "train.precision=bf16", "batch.lanes=16", "batch.sequence_length=8192"]
    )
    space = search.explore(run, Where(read_cluster("2x8 A100")))
    for place in range(0, space.size, 37):
        one = search.memory(space.model, space.choice.at(place), 8192, OURS)
        assert (float(one.total) <= 80e9 * search.USABLE) == bool(space.fits[place])
    assert 0 < space.fits.sum() < space.size


def test_plan_prints_and_writes(tmp_path, capsys):
    out = tmp_path / "run.toml"
    words = ["model.preset=llama3-8b", "train.precision=bf16", "batch.lanes=64", "batch.sequence_length=4096"]
    assert main(["plan", *words, "--cluster", "2x8 H100", "--rank", "tp8", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["plans"][0]
    assert sum(first["waterfall_s"].values()) == pytest.approx(first["step_s"])
    assert sum(first["memory_GB"].values()) == pytest.approx(first["memory_total_GB"])
    assert first["p10_s"] < first["step_s"] < first["p90_s"]
    assert any(line.startswith("tp8: number") for line in found["why"])
    written = config.load(out)
    assert written.layout.axes == first["layout"]
    check(Layout.parse(written.layout.axes), written, 16)
    assert main(["plan", *words, "--cluster", "2x8 H100"]) == 0
    assert "is" in capsys.readouterr().out


def test_nothing_fits_says_by_how_much_and_what_would_do(capsys):
    words = ["model.preset=llama3-70b", "train.precision=bf16", "batch.lanes=8", "batch.sequence_length=4096"]
    assert main(["plan", *words, "--cluster", "1x2 A100"]) == 2
    message = capsys.readouterr().err
    assert "GB too little" in message
    assert "devices would do" in message
    assert message.count("\n") == 1


def test_unknown_device_asks_for_its_numbers(capsys):
    assert main(["plan", "--cluster", "2x8 Q100"]) == 2
    assert "write a cluster file" in capsys.readouterr().err


def test_without_a_probe_it_says_how(tmp_path, capsys):
    assert main(["plan", f"data.cache={tmp_path}"]) == 2
    assert "lanewise probe" in capsys.readouterr().err
