"""A model's settings as the config.json of a Hugging Face folder, and back. No torch, no files: data in, data out.

What this project does not compute is refused by name, in both directions, never dropped.
"""

from dataclasses import dataclass, field
from typing import Any

from lanewise.config import DeepSeekModel, DenseModel, RopeScaling, load_model
from lanewise.errors import UserError
from lanewise.model_settings import presets

_COMMON = {  # our setting: their key
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "context": "max_position_embeddings",
}
_DENSE = _COMMON | {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_DEEPSEEK = _COMMON | {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "dense_layers": "first_k_dense_replace",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "expert_hidden": "moe_intermediate_size",
    "expert_groups": "n_group",
    "groups_per_token": "topk_group",
    "routed_scale": "routed_scaling_factor",
    "norm_topk": "norm_topk_prob",
    "mtp_layers": "num_nextn_predict_layers",
}
_MAY_LACK = {  # what transformers assumes where config.json says nothing; other keys must be there
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,  # older versions do not write it
}
_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0, "quantization_config": None, "partial_rotary_factor": 1.0}
_NO_WINDOW = {"use_sliding_window": False}


@dataclass(frozen=True)
class Architecture:
    """One of theirs. `implied`: our settings it stands for; `fixed`: their keys and the one value we compute with;
    `written`: of those, what an export says (the rest is their default)."""

    model_type: str
    keys: dict[str, str]
    implied: dict[str, Any]
    fixed: dict[str, Any]
    written: dict[str, Any] = field(default_factory=dict)
    may_lack: dict[str, Any] = field(default_factory=dict)


def _dense(qkv_bias: bool, qk_norm: bool) -> dict[str, Any]:
    return {"family": "dense", "preset": "tiny-dense", "qkv_bias": qkv_bias, "qk_norm": qk_norm}


_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        "llama",
        _DENSE,
        _dense(qkv_bias=False, qk_norm=False),
        {"attention_bias": False, "mlp_bias": False},
        written={"attention_bias": False, "mlp_bias": False},
        may_lack={"head_dim": None, "num_key_value_heads": None},
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", _DENSE, _dense(qkv_bias=True, qk_norm=False), _NO_WINDOW, _NO_WINDOW, may_lack={"head_dim": None}
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        _DENSE,
        _dense(qkv_bias=False, qk_norm=True),
        {"attention_bias": False} | _NO_WINDOW,
        written={"attention_bias": False} | _NO_WINDOW,
        may_lack={"head_dim": 128},
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3",
        _DEEPSEEK,
        {"family": "deepseek", "preset": "tiny"},
        {"attention_bias": False, "rope_interleave": True} | _ROUTER,
        written={"attention_bias": False} | _ROUTER,
    ),
}


def _name(model: DenseModel | DeepSeekModel) -> str:
    if isinstance(model, DeepSeekModel):
        return "DeepseekV3ForCausalLM"
    if model.qkv_bias and model.qk_norm:
        raise UserError("model.qkv_bias together with model.qk_norm: no Hugging Face architecture here has both")
    return "Qwen3ForCausalLM" if model.qk_norm else "Qwen2ForCausalLM" if model.qkv_bias else "LlamaForCausalLM"


# ------------------------------------------------------------------------------------------------------------- out


def to_hugging_face(model: DenseModel | DeepSeekModel, sequence_length: int, end: int, dtype: str) -> dict[str, Any]:
    """The config.json of `model`. sequence_length: tokens of a training sequence; end: id of the end-of-text token;
    dtype: of the weights, as torch names it. Raises UserError if no architecture computes what the model does."""
    name = _name(model)
    architecture = ARCHITECTURES[name]
    if name == "LlamaForCausalLM" and model.hidden % model.heads:
        raise UserError(f"model.hidden {model.hidden} is not divisible by heads {model.heads}: transformers refuses it")
    config: dict[str, Any] = {theirs: getattr(model, ours) for ours, theirs in architecture.keys.items()}
    if isinstance(model, DenseModel):
        config["head_dim"] = model.head_size
    else:
        config["q_lora_rank"] = model.q_lora_rank or None
        config["num_key_value_heads"] = model.heads
    config["max_position_embeddings"] = model.context or _context(model.rope_scaling, sequence_length)
    return {
        "architectures": [name],
        "model_type": architecture.model_type,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **config,
        **architecture.written,
        # transformers 4 and 5 and other programs all read these two; `rope_parameters` only transformers 5
        "rope_theta": model.rope_theta,
        "rope_scaling": _stretching(model),
        "bos_token_id": None,
        "eos_token_id": end,
        "use_cache": True,
    }


def _context(scaling: RopeScaling | None, sequence_length: int) -> int:
    stretched = round(scaling.original_length * scaling.factor) if scaling and scaling.kind != "linear" else 0
    return max(stretched, sequence_length)


def _stretching(model: DenseModel | DeepSeekModel) -> dict[str, Any] | None:
    s = model.rope_scaling
    if s is None:
        return None
    theirs: dict[str, Any] = {"rope_type": s.kind, "type": s.kind, "factor": s.factor}
    if s.kind != "linear":
        theirs["original_max_position_embeddings"] = s.original_length
    if s.kind == "llama3":
        theirs |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind == "yarn":
        _check_temperature(s.mscale, s.mscale_all_dim, isinstance(model, DeepSeekModel), "model.rope_scaling")
        theirs |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow}
        if s.mscale_all_dim:
            theirs |= {"mscale": s.mscale, "mscale_all_dim": s.mscale_all_dim}
    return theirs


def _check_temperature(mscale: float, all_dim: float, deepseek: bool, where: str) -> None:
    """Where transformers and we would compute different attention temperatures."""
    if all_dim and not deepseek:
        raise UserError(f"{where}: mscale_all_dim {all_dim} scales the softmax only in DeepSeek-V3: set it to 0")
    if not all_dim and mscale != 1:
        raise UserError(f"{where}: transformers ignores mscale {mscale} without mscale_all_dim: set it to 1")


# -------------------------------------------------------------------------------------------------------------- in


def from_hugging_face(config: dict[str, Any]) -> DenseModel | DeepSeekModel:
    """The model that a config.json describes.

    Raises UserError for an architecture or a feature that is not supported, naming it, and for missing keys.
    """
    name = _architecture(config)
    architecture = ARCHITECTURES[name]
    for key, value in (_FIXED | architecture.fixed).items():
        if config.get(key, value) not in (value, None):
            raise UserError(f"{key} = {_short(config[key])} is not supported for {name} (only {value!r})")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UserError(f"layer_types: only full_attention is supported for {name}")

    raw = dict(architecture.implied)
    may_lack = _MAY_LACK | architecture.may_lack
    for ours, theirs in architecture.keys.items():
        if theirs not in config and theirs not in may_lack:
            raise UserError(f"{theirs} is missing")
        raw[ours] = config.get(theirs, may_lack.get(theirs))
    if isinstance(raw["heads"], int) and raw["heads"] > 0:
        _fill_heads(raw, config, name)
    raw |= _rope(config, raw["context"], name == "DeepseekV3ForCausalLM")
    return load_model(raw | {"preset": _preset(raw)})


def _architecture(config: dict[str, Any]) -> str:
    types = {architecture.model_type: name for name, architecture in ARCHITECTURES.items()}
    names = config.get("architectures")
    name = str(names[0] if names else types.get(str(config.get("model_type")), config.get("model_type")))
    if name not in ARCHITECTURES:
        raise UserError(f"architecture {name} is not supported: {', '.join(ARCHITECTURES)} are")
    return name


def _fill_heads(raw: dict[str, Any], config: dict[str, Any], name: str) -> None:
    """Widths and counts of heads that they leave to be derived."""
    if raw["family"] == "deepseek":
        raw["q_lora_rank"] = raw["q_lora_rank"] or 0
        if config.get("num_key_value_heads", raw["heads"]) not in (raw["heads"], None):
            raise UserError(f"num_key_value_heads differs from num_attention_heads: not supported for {name}")
        return
    raw["kv_heads"] = raw["heads"] if raw["kv_heads"] is None else raw["kv_heads"]
    if raw["head_dim"] is None or raw["head_dim"] * raw["heads"] == raw["hidden"]:
        raw["head_dim"] = 0


def _rope(config: dict[str, Any], context: int, deepseek: bool) -> dict[str, Any]:
    """rope_theta and rope_scaling, from transformers 5's `rope_parameters` or the two keys before it."""
    theirs = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = theirs.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kinds = [theirs.pop(key) for key in ("rope_type", "type") if key in theirs]
    kind = kinds[0] if kinds else "default"
    if theirs.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise UserError("partial_rotary_factor: only rotation of whole heads is supported")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in ("linear", "llama3", "yarn"):
        raise UserError(f"rope_scaling of type {kind!r} is not supported: linear, llama3 and yarn are")
    raw: dict[str, Any] = {"kind": kind}
    if kind != "linear":
        raw["original_length"] = theirs.pop("original_max_position_embeddings", None) or context
    known = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }[kind]
    for key in known:
        if (value := theirs.pop(key, None)) is not None:
            raw[key] = value
    if (theirs.pop("truncate", True), theirs.pop("attention_factor", None)) != (True, None):
        raise UserError("rope_scaling: truncate = false and attention_factor are not supported")
    if theirs:
        raise UserError(f"rope_scaling: {min(theirs)!r} is not supported for type {kind!r}")
    if kind == "yarn":
        _check_temperature(raw.get("mscale", 1.0), raw.get("mscale_all_dim", 0.0), deepseek, "rope_scaling")
    return {"rope_theta": theta, "rope_scaling": raw}


def _preset(raw: dict[str, Any]) -> str:
    """The name of the published model that these settings are, else of the family's small one."""

    def same(name: str) -> bool:
        published = presets()[name] | {"init_std": raw["init_std"]}  # which papers and config.json put differently
        return load_model(raw | {"preset": name}) == load_model(raw | {"preset": name} | published)

    alike = (name for name, preset in presets().items() if preset["family"] == raw["family"])
    return next(filter(same, alike), raw["preset"])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
