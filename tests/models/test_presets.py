"""Published models on the meta device: parameter counts against transformers' own and the published figures."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3Config

from lanewise.config import load_model
from lanewise.errors import UserError
from lanewise.model_settings import presets
from lanewise.models.build import build

LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8}
QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}


def sizes(hidden, inner, layers, heads, **more):
    return more | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


# name: the fields of the published config.json that shape tensors, and the published size in billions
PUBLISHED = {
    "llama3-8b": (LlamaConfig(**sizes(4096, 14336, 32, 32, **LLAMA3)), 8.03),
    "llama3-70b": (LlamaConfig(**sizes(8192, 28672, 80, 64, **LLAMA3)), 70.6),
    "llama3.1-405b": (LlamaConfig(**sizes(16384, 53248, 126, 128, **LLAMA3)), 406),
    "qwen2-0.5b": (
        Qwen2Config(**sizes(896, 4864, 24, 14, vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True)),
        0.49,
    ),
    "qwen2-7b": (Qwen2Config(**sizes(3584, 18944, 28, 28, vocab_size=152064, num_key_value_heads=4)), 7.6),
    "qwen2-72b": (Qwen2Config(**sizes(8192, 29568, 80, 64, vocab_size=152064, num_key_value_heads=8)), 72.7),
    "qwen3-0.6b": (Qwen3Config(**sizes(1024, 3072, 28, 16, **QWEN3, tie_word_embeddings=True)), 0.6),
    "qwen3-8b": (Qwen3Config(**sizes(4096, 12288, 36, 32, **QWEN3)), 8.2),
    "qwen3-32b": (Qwen3Config(**sizes(5120, 25600, 64, 64, **QWEN3)), 32.8),
    "deepseek-v3": (DeepseekV3Config(), 671),  # the library's defaults are the published model's
}


def on_meta(name, **overrides):
    config = load_model({"preset": name} | overrides)
    with torch.device("meta"):
        return build(config)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts(name):
    config, billions = PUBLISHED[name]
    with torch.device("meta"):
        expected = count(AutoModelForCausalLM.from_config(config))
    extra = {"mtp_layers": 0} if name == "deepseek-v3" else {}
    got = count(on_meta(name, **extra))
    assert got == expected
    digits = len(str(billions).partition(".")[2])
    assert round(got / 1e9, digits) == billions


def test_deepseek_v3_with_prediction_ahead():
    """The published repository holds 685B: 671B and a 14B module with its own copies of embedding and head."""
    model = on_meta("deepseek-v3")
    copies = 2 * model.embed.weight.numel()
    assert round((count(model) + copies) / 1e9) in (684, 685)
    assert round((sum(p.numel() for p in model.mtp.parameters()) + copies) / 1e9, 1) == 13.5


def test_rotary_of_long_context_models():
    """deepseek-v3: head of 192 and mscale 0.1 ln 40 + 1, squared (its published code: softmax_scale * mscale**2)."""
    assert on_meta("deepseek-v3").layers["0"].attention.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert on_meta("llama3.1-405b").rotary.frequencies.min().item() == pytest.approx(500000 ** -(126 / 128) / 8)


@pytest.mark.parametrize("name", presets())
def test_table_agrees_with_the_model(name):
    extra = {} if "vocab_size" in presets()[name] else {"vocab_size": 4096}
    model = on_meta(name, **extra)
    table = model.table()
    assert [spec.name for spec in table] == sorted(spec.name for spec in table)
    assert {spec.name: spec.shape for spec in table} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    for spec in table:
        for alias in spec.aliases:
            assert model.get_parameter(alias) is model.get_parameter(spec.name)
    aliases = [alias for spec in table for alias in spec.aliases]
    assert ("head.weight" in aliases) == load_model({"preset": name} | extra).tie_embeddings
    buffers = [n for n in model.state_dict() if n not in {spec.name for spec in table}]
    assert all(n.endswith("router.expert_bias") for n in buffers)


def test_llama3_scaling_needs_room_between_its_bounds():
    scaling = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
    with pytest.raises(UserError, match="high_freq_factor must exceed low_freq_factor"):
        load_model({"preset": "tiny-dense", "rope_scaling": scaling})
