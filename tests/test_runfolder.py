"""A run's folder is refused to any other run, from its first step on."""

import pytest

from lanewise import config
from lanewise.errors import UserError
from lanewise.runfolder import open_run


def test_what_never_took_a_step_may_be_corrected(tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (data / name).write_text("{}")
    first, second = config.load(None, ["train.seed=1"]), config.load(None, ["train.seed=2"])
    open_run(first, out, "auto", data).close()
    open_run(second, out, "auto", data).close()
    assert config.load(out / "run.toml") == second
    (out / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"different run .train.seed was 2, now 1"):
        open_run(first, out, "auto", data)
    with pytest.raises(UserError, match="already holds a run"):
        open_run(second, out, "never", data)
    open_run(second, out, "auto", data).close()
