"""Our logits against the transformers library's, on random weights carried over by name through a saved checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_layers import MtpLayer

from lanewise.config import load_model
from lanewise.models.build import build
from lanewise.models.names import hugging_face

SIZES = {"vocab_size": 97, "layers": 2, "hidden": 48, "heads": 4, "ffn_hidden": 80}
DENSE = SIZES | {"preset": "tiny-dense", "kv_heads": 2}
DEEPSEEK = SIZES | {
    "preset": "tiny",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "experts": 8,
    "experts_per_token": 3,
    "expert_groups": 4,
    "groups_per_token": 2,
    "expert_hidden": 20,
    "routed_scale": 2.5,
    "mtp_layers": 0,
}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_length": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 32}
LINEAR = {"kind": "linear", "factor": 4.0}

CASES = {
    "llama": (LlamaForCausalLM, DENSE),
    "llama-tied": (LlamaForCausalLM, DENSE | {"tie_embeddings": True}),
    "llama-3.1-scaling": (LlamaForCausalLM, DENSE | {"rope_scaling": LLAMA3}),
    "llama-linear-scaling": (LlamaForCausalLM, DENSE | {"rope_scaling": LINEAR}),
    "qwen2": (Qwen2ForCausalLM, DENSE | {"qkv_bias": True, "tie_embeddings": True}),
    "qwen2-yarn": (Qwen2ForCausalLM, DENSE | {"qkv_bias": True, "rope_scaling": YARN}),
    "qwen3": (Qwen3ForCausalLM, DENSE | {"qk_norm": True, "head_dim": 20, "kv_heads": 1}),
    "deepseek": (DeepseekV3ForCausalLM, DEEPSEEK),
    "deepseek-direct-q": (DeepseekV3ForCausalLM, DEEPSEEK | {"q_lora_rank": 0, "dense_layers": 0}),
    "deepseek-no-groups": (DeepseekV3ForCausalLM, DEEPSEEK | {"expert_groups": 1, "groups_per_token": 1}),
    "deepseek-raw-weights": (DeepseekV3ForCausalLM, DEEPSEEK | {"norm_topk": False, "shared_experts": 2}),
    "deepseek-yarn": (
        DeepseekV3ForCausalLM,
        DEEPSEEK | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
}


def theirs(config):
    """The transformers configuration of the same model."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (s := config.rope_scaling) is not None:
        rope |= {"rope_type": s.kind, "factor": s.factor}
        if s.kind != "linear":
            rope["original_max_position_embeddings"] = s.original_length
        if s.kind == "llama3":
            rope |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
        if s.kind == "yarn" and s.mscale_all_dim:
            rope |= {"mscale": s.mscale, "mscale_all_dim": s.mscale_all_dim}
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope,
        "max_position_embeddings": 128,
    }
    if config.family == "deepseek":
        return DeepseekV3Config(
            **common,
            num_key_value_heads=config.heads,
            q_lora_rank=config.q_lora_rank or None,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            first_k_dense_replace=config.dense_layers,
            n_routed_experts=config.experts,
            num_experts_per_tok=config.experts_per_token,
            n_shared_experts=config.shared_experts,
            moe_intermediate_size=config.expert_hidden,
            n_group=config.expert_groups,
            topk_group=config.groups_per_token,
            routed_scaling_factor=config.routed_scale,
            norm_topk_prob=config.norm_topk,
            num_mtp_layers=config.mtp_layers,
        )
    kind = Qwen3Config if config.qk_norm else Qwen2Config if config.qkv_bias else LlamaConfig
    heads = {} if kind is Qwen2Config else {"head_dim": config.head_size}
    return kind(**common, num_key_value_heads=config.kv_heads, **heads)


@torch.no_grad()
def randomize(module, seed=0):
    """Every tensor random, norms and biases too, so that none can be swapped or dropped unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if "inv_freq" not in name:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0))


@torch.no_grad()
def carry(ours, config, checkpoint):
    """Fill our model from a checkpoint, by name; every tensor of it must be used."""
    unused = set(checkpoint)
    for name, tensor in ours.state_dict().items():
        names = hugging_face(name, config)
        unused -= set(names)
        tensor.copy_(torch.stack([checkpoint[n] for n in names]).view(tensor.shape))
    assert not unused


@pytest.mark.parametrize("case", CASES)
def test_logits(case, tmp_path):
    kind, raw = CASES[case]
    config = load_model(raw)
    hf = kind(theirs(config)).eval()
    randomize(hf)
    hf.save_pretrained(tmp_path)
    ours = build(config)
    carry(ours, config, load_file(tmp_path / "model.safetensors"))
    tokens = torch.randint(0, config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = hf(tokens).logits
        torch.testing.assert_close(ours.logits(tokens), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1


def test_scaling_is_seen():
    """The scaled cases above would prove nothing if 64 tokens did not feel the scaling."""
    tokens = torch.arange(64)[None]
    logits = {}
    for name, scaling in {"none": None, "llama3": LLAMA3, "yarn": YARN, "linear": LINEAR}.items():
        model = build(load_model(DENSE | {"rope_scaling": scaling}))
        randomize(model)
        logits[name] = model.logits(tokens)
    assert all((logits[name] - logits["none"]).abs().max() > 1e-2 for name in ("llama3", "yarn", "linear"))


def test_prediction_ahead():
    """One depth of multi-token prediction, against the library's layer for drafting tokens from published weights."""
    config = load_model(DEEPSEEK | {"mtp_layers": 1})
    ours = build(config)
    randomize(ours)
    hf_config = theirs(config)
    hf_config.first_k_dense_replace = 0  # the library counts its extra layers from 0
    hf = DeepseekV3ForCausalLM(hf_config).eval()
    layer = MtpLayer(hf_config, type(hf.model.layers[0]), type(hf.model.norm), layer_idx=0).eval()
    ahead = ours.mtp["0"]
    weights = {}
    for name, tensor in ahead.state_dict().items():
        names = hugging_face(f"mtp.0.{name}", config)
        for n, t in zip(names, tensor if len(names) > 1 else [tensor], strict=True):
            local = n.removeprefix(f"model.layers.{config.layers}.").replace("shared_head.norm", "post_norm")
            weights[
                local if local.split(".")[0] in ("enorm", "hnorm", "eh_proj", "post_norm") else f"mtp_block.{local}"
            ] = t
    experts = "mtp_block.mlp.experts"
    each = [[weights.pop(f"{experts}.{e}.{p}_proj.weight") for e in range(8)] for p in ("gate", "up", "down")]
    weights[f"{experts}.gate_up_proj"] = torch.cat([torch.stack(each[0]), torch.stack(each[1])], dim=1)
    weights[f"{experts}.down_proj"] = torch.stack(each[2])
    layer.load_state_dict(weights)

    hidden, following = torch.randn(2, 2, 64, config.hidden, generator=torch.Generator().manual_seed(2))
    position = hf.model.rotary_emb(hidden, torch.arange(64)[None])
    with torch.no_grad():
        expected = layer(
            following, hidden, position_embeddings=position, attention_mask=None, position_ids=None, cache=None
        )
        got, _ = ahead(hidden, following, ours.places(hidden[..., 0]), torch.ones(2, 64, dtype=torch.bool), None)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
