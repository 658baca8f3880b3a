"""Our parameters' names in published Hugging Face checkpoints (Llama, Qwen2, Qwen3, DeepSeek-V3), as data.

Layouts agree tensor by tensor: no transposing, no permuting of rotary channels. The one difference is that we stack
the experts' weights, which checkpoints hold one expert a tensor.
"""

from lanewise.config import DeepSeekModel, DenseModel

_ENDS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}

_BLOCK = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}

_DEEPSEEK_BLOCK = _BLOCK | {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "ffn.router": "mlp.gate",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj",
    "ffn.shared.up": "mlp.shared_experts.up_proj",
    "ffn.shared.down": "mlp.shared_experts.down_proj",
}

_AHEAD = {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}


def hugging_face(name: str, config: DenseModel | DeepSeekModel) -> tuple[str, ...]:
    """The checkpoint's name of our parameter or persistent buffer `name`. Several names: the slices of our leading
    dimension, in order (the experts)."""
    path, leaf = name.rsplit(".", 1)
    if path in _ENDS:
        return (f"{_ENDS[path]}.{leaf}",)
    room, number, inner = path.split(".", 2)
    if room == "mtp":  # extra prediction depths are stored as layers after the last
        assert isinstance(config, DeepSeekModel)
        number = str(config.layers + int(number))
        if inner in _AHEAD:
            return (f"model.layers.{number}.{_AHEAD[inner]}.{leaf}",)
        inner = inner.removeprefix("block.")
    layer = f"model.layers.{number}"
    if isinstance(config, DenseModel):
        return (f"{layer}.{_BLOCK[inner]}.{leaf}",)
    if inner == "ffn.experts":
        return tuple(f"{layer}.mlp.experts.{e}.{leaf}_proj.weight" for e in range(config.experts))
    if leaf == "expert_bias":
        leaf = "e_score_correction_bias"
    block = _DEEPSEEK_BLOCK if config.q_lora_rank else _DEEPSEEK_BLOCK | {"attention.q_up": "self_attn.q_proj"}
    return (f"{layer}.{block[inner]}.{leaf}",)
