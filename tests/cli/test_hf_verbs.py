"""`export` and `import` from the command line, and what can be done with an imported folder."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lanewise.checkpoint.huggingface import export_checkpoint, import_folder
from lanewise.checkpoint.locate import locate
from lanewise.checkpoint.stored import Stored
from lanewise.cli.main import main
from lanewise.config import parse
from lanewise.errors import UserError
from lanewise.origin import check_origin
from processes import on_ranks
from tiny_runs import model_of, run_folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run, its export, the folder imported from that, and some text."""
    root = tmp_path_factory.mktemp("verbs")
    checkpoint = run_folder(root / "run", model_of(preset="tiny"))
    export_checkpoint(checkpoint, root / "hf", torch.float32, 10**9)
    import_folder(root / "hf", root / "imported")
    (root / "text.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    return root


@pytest.fixture(autouse=True)
def _own_cache(root, monkeypatch):
    monkeypatch.setenv("HOME", str(root))


def said(capsys, *words) -> dict:
    assert main([str(word) for word in words] + ["--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_export_and_import(root, tmp_path, capsys):
    made = said(capsys, "export", root / "run", "--out", tmp_path / "hf", "--dtype", "bf16", "--shard-size", "0.1MB")
    assert made["checkpoint"] == str(locate(root / "run"))
    assert made["files"] == len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    file = next((tmp_path / "hf").glob("model-00002-of-*.safetensors"))
    assert {t.dtype for t in load_file(file).values()} == {torch.bfloat16}
    made = said(capsys, "import", tmp_path / "hf", "--out", tmp_path / "run")
    assert made["architecture"] == "DeepseekV3ForCausalLM"
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "again")]) == 0
    assert "vocabulary 257 tokens, 264 rows" in capsys.readouterr().out


def test_an_imported_folder_is_a_run(root, capsys):
    """What inspect, generate and eval say of the folder is what they say of the run it came from."""
    of_run, of_import = (said(capsys, "inspect", root / folder) for folder in ("run", "imported"))
    assert of_import["weights"] == of_run["weights"]
    assert (of_import["step"], of_import["tokens"]) == (0, 0)
    words = ("--prompt", "To be", "--tokens", "4", "--temperature", "0")
    of_run, of_import = (said(capsys, "generate", root / folder, *words) for folder in ("run", "imported"))
    assert of_import == of_run
    source = ("--source", root / "text.txt")
    of_run, of_import = (said(capsys, "eval", root / folder, *source) for folder in ("run", "imported"))
    assert (of_import["loss"], of_import["tokens"]) == (of_run["loss"], of_run["tokens"])


def test_training_starts_from_it(root, tmp_path, capsys):
    """At learning rate 0 the weights after two steps are the imported ones: they were read, and moments and progress
    began at zero. A second run then goes on from its own checkpoint."""
    words = ["train", str(root / "imported" / "run.toml"), f"data.source={root / 'text.txt'}", "--workers", "1"]
    words += ["batch.lanes=1", "batch.size=1", "batch.sequence_length=32", "optimizer.lr=0", "eval.every=0"]
    words += ["train.steps=2", "schedule.warmup=0", "model.bias_speed=0", "--out", str(tmp_path / "tuned")]
    assert main([*words, "--resume", str(root / "imported")]) == 0
    capsys.readouterr()
    of_import, tuned = (said(capsys, "inspect", folder) for folder in (root / "imported", tmp_path / "tuned"))
    assert (tuned["step"], tuned["updates"]) == (2, 2)
    assert tuned["weights"] == of_import["weights"]
    names = set(Stored(locate(tmp_path / "tuned")).forms)
    assert {"model/norm.weight", "exp_avg/norm.weight", "exp_avg_sq/norm.weight"} <= names
    buffer = "buffer/layers.1.ffn.router.expert_bias"
    assert torch.equal(*(Stored(locate(f)).tensor(buffer) for f in (root / "imported", tmp_path / "tuned")))


def test_what_an_imported_checkpoint_binds(root):
    """The model, not the data, the batch, the optimizer, nor what only training knows of the model."""
    meta = Stored(locate(root / "imported")).manifest.meta

    def start(*changes):
        check_origin(meta, parse(meta["run"], changes), {"train": "another"})

    start("batch.lanes=3", "optimizer.lr=0.5", "train.seed=9", "model.dropout=0.1", "model.mtp_weight=0.1")
    with pytest.raises(UserError, match=r"^the imported model is another one: model.layers is 2 there, 3 here"):
        start("model.layers=3")
    with pytest.raises(UserError, match=r"model.rope_theta is 10000.0 there, 5.0 here"):
        start("model.rope_theta=5.0")

    own = Stored(locate(root / "run")).manifest.meta
    check_origin(own, parse(own["run"]), own["data"])
    with pytest.raises(UserError, match="the data has changed"):
        check_origin(own, parse(own["run"]), {"train": "another"})
    with pytest.raises(UserError, match=r"of another run: batch.lanes was 8, now 3"):
        check_origin(own, parse(own["run"], ["batch.lanes=3"]), own["data"])


def test_memory(tmp_path):
    """160 MB of weights in tensors of at most 2 MB pass through a few of those."""
    [growth] = on_ranks(1, _growth, tmp_path)
    assert max(growth) < 32, f"MB that export and import took: {growth}"


def _growth(_rank, _size, root):
    checkpoint = run_folder(root / "run", model_of(preset="tiny-dense", hidden=512, ffn_hidden=1024, layers=16))
    work = [
        lambda: export_checkpoint(checkpoint, root / "hf", torch.float32, 10**9),
        lambda: import_folder(root / "hf", root / "imported"),
    ]
    return [_peak(task) for task in work]


def _peak(task):
    """MB by which the process outgrew itself (Linux: writing 5 to clear_refs resets the peak)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    task()
    return _status("VmHWM") - before


def _status(key):
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(key))
    return int(line.split()[1]) / 1024
