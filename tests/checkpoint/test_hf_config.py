"""config.json both ways: published files as they are, and what must be refused by name."""

import pytest

from lanewise.checkpoint.hf_config import from_hugging_face, to_hugging_face
from lanewise.config import load_model
from lanewise.errors import UserError


def sizes(hidden, inner, layers, heads, kv_heads, vocab_size):
    return {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}

# preset: the keys of the published config.json that concern the model (huggingface.co; presets.toml names the places)
PUBLISHED = {
    "llama3-8b": sizes(4096, 14336, 32, 32, 8, 128256)
    | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "max_position_embeddings": 8192,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "llama3.1-405b": sizes(16384, 53248, 126, 128, 8, 128256)
    | {
        "architectures": ["LlamaForCausalLM"],
        "mlp_bias": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen2-0.5b": sizes(896, 4864, 24, 14, 2, 151936)
    | WINDOW_OFF
    | {"model_type": "qwen2", "max_position_embeddings": 131072, "tie_word_embeddings": True, "max_window_layers": 24},
    "qwen3-0.6b": sizes(1024, 3072, 28, 16, 8, 151936)
    | WINDOW_OFF
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "rope_scaling": None,
    },
    "deepseek-v3": sizes(7168, 18432, 61, 128, 128, 129280)
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name):
    """Read: the preset, by name and in every setting. Written again: what was read."""
    published = PUBLISHED[name]
    model = from_hugging_face(published)
    assert model == load_model({"preset": name, "init_std": 0.02, "context": published["max_position_embeddings"]})
    written = to_hugging_face(model, 256, 1, "float32")
    for key in published.keys() & written.keys() - {"torch_dtype", "rope_scaling"}:
        assert written[key] == published[key], key
    assert (published.get("rope_scaling") or {}).items() <= (written["rope_scaling"] or {}).items()
    assert from_hugging_face(written) == model


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3-8b", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not supported: LlamaForCausal"),
        ("deepseek-v3", {"architectures": ["DeepseekV2ForCausalLM"]}, "DeepseekV2ForCausalLM is not supported"),
        ("qwen2-0.5b", {"model_type": "gemma"}, "gemma is not supported"),
        ("llama3-8b", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("llama3-8b", {"mlp_bias": True}, "mlp_bias = True"),
        ("qwen3-0.6b", {"attention_bias": True}, "attention_bias = True"),
        ("llama3-8b", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("llama3-8b", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("qwen2-0.5b", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3-0.6b", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: only full_attention"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads differs"),
        (
            "deepseek-v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config = {'quant_method': 'fp8'}",
        ),
        ("llama3-8b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ("llama3-8b", {"rope_scaling": {"type": "linear", "factor": 2.0, "odd": 1}}, "'odd' is not supported"),
        ("llama3-8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama3-8b", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "whole heads"),
        ("llama3-8b", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ("llama3-8b", {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.1}}, "attention_factor"),
        (
            "llama3-8b",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            "softmax",
        ),
        ("deepseek-v3", {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "ignores mscale 0.7"),
        ("llama3-8b", {"hidden_size": "wide"}, "model.hidden: "),
    ],
)
def test_refused(name, change, message):
    with pytest.raises(UserError) as error:
        from_hugging_face(PUBLISHED[name] | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_missing_key(key):
    with pytest.raises(UserError, match=f"^{key} is missing$"):
        from_hugging_face({k: v for k, v in PUBLISHED["llama3-8b"].items() if k != key})


def test_old_llama():
    """Files from before grouped queries and rope settings leave them out."""
    keys = ("num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings")
    model = from_hugging_face({k: v for k, v in PUBLISHED["llama3-8b"].items() if k not in keys})
    assert (model.kv_heads, model.rope_theta, model.tie_embeddings) == (32, 10000.0, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "tiny-dense", "qk_norm": True, "qkv_bias": True}, "no Hugging Face architecture here has both"),
        ({"preset": "tiny-dense", "hidden": 250, "head_dim": 64}, "hidden 250 is not divisible by heads 4"),
        (
            {"preset": "tiny-dense", "rope_scaling": {"kind": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim 1.0 scales the softmax only in DeepSeek-V3",
        ),
        ({"preset": "tiny", "rope_scaling": {"kind": "yarn", "factor": 2.0, "mscale": 0.5}}, "ignores mscale 0.5"),
    ],
)
def test_refused_on_the_way_out(settings, message):
    with pytest.raises(UserError, match=message):
        to_hugging_face(load_model(settings), 64, 1, "float32")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 256),  # what training saw
        ({"rope_scaling": {"kind": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_length": 512}}, 2048),
        ({"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_length": 512}, "context": 1000}, 1000),
    ],
)
def test_context(settings, expected):
    model = load_model({"preset": "tiny-dense"} | settings)
    assert to_hugging_face(model, 256, 1, "float32")["max_position_embeddings"] == expected
