"""`lanewise train layout.axes=auto`, for real: without a probe, then going on with one."""

import json

from test_probe import STORED

from lanewise import config
from lanewise.cli.main import main
from lanewise.planner.learning import runs_path
from lanewise.planner.machine import probe_path
from system import BASE, DENSE, records, sentences, write_documents


def test_a_run_is_planned_goes_on_and_says_how_far_the_prediction_was_off(tmp_path, capsys):
    source, out, cache = write_documents(tmp_path / "t.jsonl", sentences(60)), tmp_path / "out", str(tmp_path / "cache")
    words = [*BASE, *DENSE, f"data.source={source}", f"data.cache={cache}", "train.steps=16", "layout.axes=auto"]

    def train(workers: int, *more: str) -> str:
        assert main(["train", *words, "--out", str(out), "--workers", str(workers), *more]) == 0
        return capsys.readouterr().out

    said = train(2, "--until", "8")
    assert "planned: " in said
    assert "not measured" in said
    assert "the planner said" in said
    assert not runs_path(cache).exists(), "there is nothing to learn beside numbers of another machine"
    chosen = config.load(out / "run.toml").layout.axes

    path = probe_path(cache)
    path.parent.mkdir()
    path.write_text(json.dumps(STORED))
    said = train(2)
    assert "as before: " in said
    assert config.load(out / "run.toml").layout.axes == chosen
    assert [record["step"] for record in records(out)] == list(range(1, 17))
    learned = json.loads(runs_path(cache).read_text())
    off = learned["predicted_s"] / learned["measured_s"] - 1
    assert f"({off:+.0%})" in said
