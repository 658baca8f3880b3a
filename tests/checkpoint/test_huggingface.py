"""Export and import against the transformers library: its logits, its own folders, and every bit there and back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel

from lanewise.checkpoint.hf_shards import INDEX, SINGLE
from lanewise.checkpoint.huggingface import export_checkpoint, import_folder
from lanewise.checkpoint.locate import locate
from lanewise.checkpoint.stored import Stored
from lanewise.checkpoint.weights_hash import weights_hash
from lanewise.data import tokenizer
from lanewise.generation import restore
from tiny_runs import model_of, run_folder

DENSE, DEEPSEEK = {"preset": "tiny-dense"}, {"preset": "tiny"}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_length": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 16, "beta_fast": 24.0, "beta_slow": 2.0}
CASES = {
    "llama": DENSE | {"rope_theta": 5000.0, "norm_eps": 1e-5},
    "llama-llama3-scaling-tied": DENSE | {"rope_scaling": LLAMA3, "tie_embeddings": True},
    "llama-linear-scaling-wide-heads": DENSE | {"rope_scaling": {"kind": "linear", "factor": 4.0}, "head_dim": 20},
    "qwen2-tied": DENSE | {"qkv_bias": True, "tie_embeddings": True},
    "qwen2-yarn-wide-heads": DENSE | {"qkv_bias": True, "rope_scaling": YARN, "head_dim": 20},
    "qwen3": DENSE | {"qk_norm": True, "head_dim": 20, "kv_heads": 1},
    "deepseek": DEEPSEEK | {"mtp_layers": 2},
    "deepseek-yarn": DEEPSEEK | {"mtp_layers": 0, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    "deepseek-other-switches": DEEPSEEK
    | {"q_lora_rank": 0, "norm_topk": False, "shared_experts": 2, "dense_layers": 0, "expert_groups": 1}
    | {"groups_per_token": 1, "tie_embeddings": True},
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek": "DeepseekV3ForCausalLM",
}
TOKENS = torch.randint(0, 264, (2, 64), generator=torch.Generator().manual_seed(1))


def export(checkpoint: Path, out: Path, dtype=torch.float32, shard_bytes=60_000, **more) -> dict:
    return export_checkpoint(checkpoint, out, dtype, shard_bytes, **more)


def hashes(checkpoint: Path) -> tuple[str, str]:
    """Of the weights and of the buffers."""
    return weights_hash(Stored(checkpoint).tensors("model/")), weights_hash(Stored(checkpoint).tensors("buffer/"))


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(name, checkpoint, exported folder): made once for all tests of a model."""
    root = tmp_path_factory.mktemp(request.param)
    checkpoint = run_folder(root / "run", model_of(**CASES[request.param]))
    export(checkpoint, root / "hf")
    return request.param, checkpoint, root / "hf"


def load(folder: Path):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    ahead = [k for k in info["unexpected_keys"] if int(k.split(".")[2]) < model.config.num_hidden_layers]
    assert not ahead, "only layers after the last, for multi-token prediction, may be left over"
    return model.eval()


@torch.no_grad()
def test_transformers_computes_the_same_logits(case):
    name, checkpoint, folder = case
    theirs, (ours, _) = load(folder), restore(checkpoint)
    assert type(theirs).__name__ == CLASSES[name.split("-")[0]]
    assert theirs.dtype == torch.float32
    expected = ours.logits(TOKENS)
    torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1


def test_there_and_back_changes_no_bit(case, tmp_path):
    _, checkpoint, folder = case
    import_folder(folder, tmp_path / "run")
    imported = locate(tmp_path / "run")
    assert hashes(imported) == hashes(checkpoint)
    export(imported, tmp_path / "hf")
    for file in sorted(p.name for p in folder.iterdir()):
        ours, again = (folder / file).read_bytes(), (tmp_path / "hf" / file).read_bytes()
        if file == "config.json":  # of an imported model the context is known
            ours, again = json.loads(ours), json.loads(again)
        assert ours == again, file
    assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("name", ["llama-llama3-scaling-tied", "qwen2-yarn-wide-heads", "qwen3", "deepseek-yarn"])
@torch.no_grad()
def test_a_folder_that_transformers_wrote(name, tmp_path):
    """In bf16, in its own way of writing config.json and shards."""
    theirs = load_and_save(name, tmp_path)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    ours, run = restore(locate(tmp_path / "run"))
    assert run.batch.sequence_length == theirs.config.max_position_embeddings
    torch.testing.assert_close(ours.logits(TOKENS), theirs.float()(TOKENS).logits, rtol=1e-5, atol=1e-5)

    export(locate(tmp_path / "run"), tmp_path / "again", torch.bfloat16)
    before, after = tensors(tmp_path / "theirs"), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        wanted = torch.float32 if key.endswith("e_score_correction_bias") else torch.bfloat16
        assert after[key].dtype == wanted, key
        assert torch.equal(after[key], tensor.to(wanted)), key


def load_and_save(name: str, root: Path):
    checkpoint = run_folder(root / "first", model_of(**CASES[name]))
    export(checkpoint, root / "hf", torch.bfloat16)
    theirs = load(root / "hf")
    assert theirs.dtype == torch.bfloat16
    theirs.save_pretrained(root / "theirs", max_shard_size="40KB")
    AutoTokenizer.from_pretrained(root / "hf").save_pretrained(root / "theirs")
    return theirs


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


# ------------------------------------------------------------------------------------------------ what is in a folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (checkpoint, exported folder)} of two small models."""
    root = tmp_path_factory.mktemp("runs")
    found = {}
    for name, settings in {"llama": DENSE, "deepseek": DEEPSEEK | {"dense_layers": 0}}.items():
        checkpoint = run_folder(root / name, model_of(**settings))
        export(checkpoint, root / f"{name}-hf", shard_bytes=10**9)
        found[name] = (checkpoint, root / f"{name}-hf")
    return found


def test_shards(runs, tmp_path):
    """Files keep to the limit, the index tells where each tensor is, and one file needs no index."""
    checkpoint, single = runs["deepseek"]
    limit = 20_000
    made = export(checkpoint, tmp_path / "hf", shard_bytes=limit)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    one = load_file(single / SINGLE)
    assert not (single / INDEX).exists()
    assert index["weight_map"].keys() == one.keys()
    assert len(set(index["weight_map"].values())) == made["files"] > 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values()) == made["bytes"]
    for file in (tmp_path / "hf").glob("*.safetensors"):
        held = load_file(file)
        assert sum(t.nbytes for t in held.values()) <= limit or len(held) == 1
        assert all(index["weight_map"][name] == file.name for name in held)
        assert all(torch.equal(t, one[name]) for name, t in held.items())


def test_prediction_ahead_is_stored_as_in_the_published_folder(runs, monkeypatch):
    """As the layer after the last, with copies of the ends. transformers leaves it out of the model, and reads it for
    drafting (here told of our depth: it knows only layer 61, the published one)."""
    checkpoint, folder = runs["deepseek"]
    held = load_file(folder / SINGLE)
    assert torch.equal(held["model.layers.2.embed_tokens.weight"], held["model.embed_tokens.weight"])
    assert torch.equal(held["model.layers.2.shared_head.head.weight"], held["lm_head.weight"])
    theirs = load(folder)
    monkeypatch.setattr(theirs, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    layer = MtpModel.from_pretrained(theirs).layers[0]
    ours, _ = restore(checkpoint)
    ahead = ours.mtp["0"]
    assert torch.equal(layer.eh_proj.weight, ahead.join.weight)
    assert torch.equal(layer.enorm.weight, ahead.embed_norm.weight)
    assert torch.equal(layer.post_norm.weight, ahead.norm.weight)
    assert torch.equal(layer.mtp_block.mlp.experts.down_proj, ahead.block.ffn.experts.down)
    assert torch.equal(layer.mtp_block.mlp.gate.e_score_correction_bias, ahead.block.ffn.router.expert_bias)


def test_a_folder_that_lost_its_prediction_ahead(runs, tmp_path):
    """transformers saves what it loaded: config.json still counts one extra layer, the weights are gone."""
    load(runs["deepseek"][1]).save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs/config.json").read_text())["num_nextn_predict_layers"] == 1
    made = import_folder(tmp_path / "theirs", tmp_path / "run", tokens=runs["deepseek"][1])
    assert "without it" in made["notes"][0]
    assert restore(locate(tmp_path / "run"))[1].model.mtp_layers == 0


def test_import_where_there_is_a_gpu(runs, tmp_path, monkeypatch):
    """There torch's writer would ask for tensors ahead of writing the last, which must not share memory then."""
    checkpoint, folder = runs["deepseek"]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        import_folder(folder, tmp_path / "run")
    assert hashes(locate(tmp_path / "run")) == hashes(checkpoint)


def test_tokenizer(runs):
    """The run's own, as transformers reads it."""
    checkpoint, folder = runs["llama"]
    theirs, ours = AutoTokenizer.from_pretrained(folder), tokenizer.load(checkpoint.parents[1])
    text = "def f(x):\n    return 'naïve'"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((folder / file).read_text())["eos_token_id"] == theirs.eos_token_id == ours.end


@torch.no_grad()
def test_padding_of_the_vocabulary_is_kept_or_stripped(runs, tmp_path):
    """264 rows, 257 tokens: kept, so that nothing is lost; left out when asked, the other logits as they were."""
    checkpoint, folder = runs["llama"]
    export(checkpoint, tmp_path / "stripped", strip_vocab=True)
    full, stripped = load(folder), load(tmp_path / "stripped")
    assert (full.config.vocab_size, stripped.config.vocab_size) == (264, 257)
    tokens = TOKENS.clamp(max=256)
    assert stripped(tokens).logits.shape[-1] == 257
    torch.testing.assert_close(stripped(tokens).logits, full(tokens).logits[..., :257])


def test_companions_of_the_weights_travel(runs, tmp_path):
    """A chat template and a generation_config.json are handed on as they are."""
    folder = shutil.copytree(runs["llama"][1], tmp_path / "hf")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    import_folder(folder, tmp_path / "run")
    export(locate(tmp_path / "run"), tmp_path / "again")
    for file in ("chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "again" / file).read_text() == (folder / file).read_text()


def test_a_published_layout_with_more_than_we_hold(runs, tmp_path):
    """Rotary frequencies (old Llama folders), and a head beside tied embeddings: taken if they say nothing new."""
    checkpoint = run_folder(tmp_path / "run", model_of(**DENSE, tie_embeddings=True))
    export(checkpoint, tmp_path / "hf", shard_bytes=10**9)
    held = load_file(tmp_path / "hf" / SINGLE)
    assert "lm_head.weight" not in held
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(held, tmp_path / "hf" / SINGLE)
    import_folder(tmp_path / "hf", tmp_path / "imported")
    assert hashes(locate(tmp_path / "imported")) == hashes(checkpoint)
