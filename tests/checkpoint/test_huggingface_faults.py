"""Wrong input to `import` and `export`: one line that names it, exit code 2, and nothing left behind."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lanewise.checkpoint import hf_shards
from lanewise.checkpoint.hf_shards import INDEX, SINGLE
from lanewise.checkpoint.huggingface import export_checkpoint
from lanewise.cli.main import main
from tiny_runs import model_of, run_folder

DEEPSEEK = {"preset": "tiny", "tie_embeddings": False}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """(run, folder in one file, folder in several): DeepSeek-V3, with prediction ahead."""
    root = tmp_path_factory.mktemp("good")
    checkpoint = run_folder(root / "run", model_of(**DEEPSEEK))
    export_checkpoint(checkpoint, root / "single", torch.float32, 10**9)
    export_checkpoint(checkpoint, root / "several", torch.float32, 40_000)
    return root


def refused(capsys, *words) -> str:
    """The one line that the program says on its way out with exit code 2."""
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lanewise: ")
    assert err.count("\n") == 1
    return err


def edit(change):
    """Damage done to the tensors of the single file."""

    def damage(folder: Path) -> None:
        held = load_file(folder / SINGLE)
        change(held)
        save_file(held, folder / SINGLE)

    return damage


def settings(**change):
    def damage(folder: Path) -> None:
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | change))

    return damage


def cut(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-1])


def widen(held: dict) -> None:
    held["model.norm.weight"] = held["model.norm.weight"].double()


def other_head(held: dict) -> None:
    held["model.layers.2.shared_head.head.weight"][3, 5] += 1


NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
DAMAGES = {
    "not such a folder": (lambda f: (f / "config.json").unlink(), "not a Hugging Face folder: it has no config.json"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read"),
    "not an object": (lambda f: (f / "config.json").write_text("[]"), "config.json: cannot be read (not an object)"),
    "odd rope": (settings(rope_scaling=5), "config.json: cannot be read"),
    "architecture": (settings(architectures=["GPT2LMHeadModel"]), "config.json: architecture GPT2LMHeadModel is not"),
    "activation": (settings(hidden_act="gelu"), "config.json: hidden_act = 'gelu' is not supported"),
    "no weights": (lambda f: (f / SINGLE).unlink(), f"holds neither {SINGLE} nor {INDEX}\n"),
    "other weights": (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), "save them as safetensors"),
    "cut short": (cut, f"{SINGLE}: damaged or cut short"),
    "empty": (lambda f: (f / SINGLE).write_bytes(b""), f"{SINGLE}: damaged or cut short"),
    "missing tensor": (edit(lambda held: held.pop(NORM)), f"tensor '{NORM}' is missing"),
    "missing expert": (edit(lambda held: held.pop(EXPERT)), f"tensor '{EXPERT}' is missing"),
    "part of the prediction ahead": (
        edit(lambda held: held.pop("model.layers.2.eh_proj.weight")),
        "'model.layers.2.eh_proj.weight' is missing",
    ),
    "shape": (
        edit(lambda held: held.update({EXPERT: torch.zeros(20, 47)})),
        f"'{EXPERT}' has shape (20, 47), config.json asks for (20, 48)",
    ),
    "sizes": (settings(intermediate_size=81), "config.json asks for (48, 81)"),
    "type": (edit(widen), "'model.norm.weight' is of type F64: only F32, BF16, F16 are read"),
    "one too many": (
        edit(lambda held: held.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(48)})),
        "no place for tensor 'model.layers.0.self_attn.o_proj.bias'",
    ),
    "a head of its own": (edit(other_head), "'model.layers.2.shared_head.head.weight' differs from 'lm_head.weight'"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "name another with --tokenizer"),
    "damaged tokenizer": (lambda f: (f / "tokenizer.json").write_text("?"), "tokenizer.json cannot be used"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders(name, good, tmp_path, capsys):
    damage, message = DAMAGES[name]
    folder = shutil.copytree(good / "single", tmp_path / "hf")
    damage(folder)
    line = refused(capsys, "import", folder, "--out", tmp_path / "out")
    assert message in line
    assert str(folder) in line
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_damaged_shards(good, tmp_path, capsys):
    folder = shutil.copytree(good / "several", tmp_path / "hf")
    second = sorted(folder.glob("*.safetensors"))[1]
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    assert f"{second}: damaged or cut short" in refused(capsys, "import", folder, "--out", tmp_path / "out")
    second.unlink()
    assert f"{second}: missing" in refused(capsys, "import", folder, "--out", tmp_path / "out")
    (folder / INDEX).write_text('{"weight_map": []}')
    assert f"{INDEX}: cannot be read" in refused(capsys, "import", folder, "--out", tmp_path / "out")


def test_a_tokenizer_too_large(tmp_path, capsys):
    run_folder(tmp_path / "run", model_of(preset="tiny-dense", vocab_size=256))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    line = refused(capsys, "import", tmp_path / "hf", "--out", tmp_path / "out")
    assert "the tokenizer has 257 entries (its end of text included), the embedding 256 rows" in line


def test_out_is_taken(good, tmp_path, capsys):
    """By a file, or by a folder with anything in it; an empty folder is filled."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for taken in (tmp_path / "taken", tmp_path / "taken" / "file"):
        assert f"{taken} is already there" in refused(capsys, "export", good / "run", "--out", taken)
        assert f"{taken} is already there" in refused(capsys, "import", good / "single", "--out", taken)
    under_a_file = tmp_path / "taken" / "file" / "out"
    assert "cannot be written (Not a directory)" in refused(capsys, "export", good / "run", "--out", under_a_file)
    (tmp_path / "empty").mkdir()
    assert main(["export", str(good / "run"), "--out", str(tmp_path / "empty")]) == 0


def test_a_full_disk_leaves_nothing(good, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf_shards.os, "fsync", full)
        line = refused(capsys, "export", good / "run", "--out", tmp_path / "out")
        assert "cannot be written (No space left on device)" in line
        line = refused(capsys, "import", good / "single", "--out", tmp_path / "out")
        assert "cannot be written (No space left on device)" in line
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_cannot_be(good, tmp_path, capsys):
    run_folder(tmp_path / "both", model_of(preset="tiny-dense", qk_norm=True, qkv_bias=True))
    line = refused(capsys, "export", tmp_path / "both", "--out", tmp_path / "out")
    assert "model.qkv_bias together with model.qk_norm" in line
    line = refused(capsys, "export", tmp_path / "nothing", "--out", tmp_path / "out")
    assert "holds no checkpoint" in line
    (tmp_path / "both" / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refused(capsys, "export", tmp_path / "both", "--out", tmp_path / "out")
    for size in ("5", "0GB", "big", "-1MB", "1TB"):
        line = refused(capsys, "export", good / "run", "--out", tmp_path / "out", f"--shard-size={size}")
        assert f"--shard-size '{size}': write a number and KB, MB or GB" in line
