"""The run file's `model` section: the two families, and the named models they come in."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lanewise.errors import UserError
from lanewise.settings import Section, free, nearest


class RopeScaling(Section):
    """How rotary frequencies are stretched for contexts longer than the pre-training length."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float = Field(description="how many times longer the context gets", ge=1)
    original_length: int = Field(4096, description="tokens of context before stretching", ge=1)
    low_freq_factor: float = Field(1.0, description="llama3: wavelengths longer than length/this are fully stretched")
    high_freq_factor: float = Field(4.0, description="llama3: wavelengths shorter than length/this are kept")
    beta_fast: float = Field(32.0, description="yarn: rotations above which a frequency is kept")
    beta_slow: float = Field(1.0, description="yarn: rotations below which a frequency is fully stretched")
    mscale: float = Field(1.0, description="yarn: weight of the attention temperature")
    mscale_all_dim: float = Field(0.0, description="yarn: the same, for the whole softmax scale (0: off)")

    @model_validator(mode="after")
    def _bounds(self) -> "RopeScaling":
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must exceed low_freq_factor: change one of them")
        return self


class ModelBase(Section):
    preset: str = Field("tiny", description="start from this named model; other keys override it")
    vocab_size: int = Field(0, description="rows of the embedding; 0 takes the tokenizer's size", ge=0)
    layers: int = Field(description="transformer blocks", ge=1)
    hidden: int = Field(description="width of the residual stream", ge=1)
    heads: int = Field(description="query heads", ge=1)
    ffn_hidden: int = Field(description="inner width of a dense feed-forward", ge=1)
    rope_theta: float = Field(10000.0, description="base of the rotary frequencies", gt=0)
    rope_scaling: RopeScaling | None = Field(None, description="stretching of rotary frequencies")
    tie_embeddings: bool = Field(False, description="the output head is the embedding")
    norm_eps: float = Field(1e-6, description="epsilon of RMSNorm", gt=0)
    init_std: float = Field(0.02, description="standard deviation of initial weights", gt=0)
    dropout: float = Field(0.0, description="probability of dropping an element of each block's output", ge=0, lt=1)
    context: int = free(0, "longest sequence an export declares; 0 derives it from the run", ge=0)


class DenseModel(ModelBase):
    """Llama 3 and Qwen 2/3: GQA, SwiGLU, RoPE, optional qk-norm and biases."""

    family: Literal["dense"]
    kv_heads: int = Field(description="key/value heads (GQA)", ge=1)
    head_dim: int = Field(0, description="width of a head; 0 is hidden / heads", ge=0)
    qk_norm: bool = Field(False, description="RMSNorm on each query and key head (Qwen3)")
    qkv_bias: bool = Field(False, description="biases on the q, k and v projections (Qwen2)")

    @model_validator(mode="after")
    def _sizes(self) -> "DenseModel":
        if self.head_dim == 0 and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not divisible by heads {self.heads}: change one, or set head_dim"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}: change one of them")
        if self.head_size % 2:
            raise ValueError(f"head_dim {self.head_size} is odd: rotary embedding needs an even width")
        return self

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads


class DeepSeekModel(ModelBase):
    """DeepSeek-V3: multi-head latent attention, mixture of experts, multi-token prediction (arXiv:2412.19437)."""

    family: Literal["deepseek"]
    q_lora_rank: int = Field(description="rank of the query projection; 0 projects directly", ge=0)
    kv_lora_rank: int = Field(description="rank of the joint key/value latent", ge=1)
    qk_nope_head_dim: int = Field(description="width of a query/key head without position", ge=1)
    qk_rope_head_dim: int = Field(description="width of the rotary part, shared by all key heads", ge=2)
    v_head_dim: int = Field(description="width of a value head", ge=1)
    dense_layers: int = Field(1, description="first blocks with a dense feed-forward instead of experts", ge=0)
    experts: int = Field(description="routed experts in a layer", ge=1)
    experts_per_token: int = Field(description="routed experts each token goes to", ge=1)
    shared_experts: int = Field(1, description="experts every token goes to", ge=0)
    expert_hidden: int = Field(description="inner width of one expert", ge=1)
    expert_groups: int = Field(1, description="groups of experts for group-limited routing", ge=1)
    groups_per_token: int = Field(1, description="groups a token may choose experts from", ge=1)
    routed_scale: float = Field(1.0, description="factor on the routed experts' weights", gt=0)
    norm_topk: bool = Field(True, description="chosen experts' weights sum to one before routed_scale")
    bias_speed: float = Field(0.001, description="step of the balancing bias; 0 turns it off", ge=0)
    balance_loss: float = Field(0.0001, description="weight of the sequence-wise balance loss; 0 turns it off", ge=0)
    mtp_layers: int = Field(1, description="extra prediction depths (multi-token prediction)", ge=0)
    mtp_weight: float = Field(0.3, description="weight of the extra predictions' mean loss", ge=0)

    @model_validator(mode="after")
    def _sizes(self) -> "DeepSeekModel":
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd: rotary embedding needs an even width")
        if self.experts % self.expert_groups:
            raise ValueError(f"experts {self.experts} is not divisible by expert_groups {self.expert_groups}")
        if self.groups_per_token > self.expert_groups:
            raise ValueError(f"groups_per_token {self.groups_per_token} exceeds expert_groups {self.expert_groups}")
        choice = self.experts // self.expert_groups * self.groups_per_token
        if self.experts_per_token > choice:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds the {choice} a token may choose from")
        if self.expert_groups > 1 and self.experts // self.expert_groups < 2:
            raise ValueError("a group needs at least 2 experts (its score is the sum of its two best)")
        return self


Model = Annotated[DenseModel | DeepSeekModel, Field(discriminator="family")]


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Named models: the tiny default up to published sizes, each with its source (`presets.toml`)."""
    return tomllib.loads((Path(__file__).parent / "presets.toml").read_text(encoding="utf-8"))


def expand_preset(raw: dict[str, Any]) -> dict[str, Any]:
    """The preset's fields with the user's on top. A resolved model (all fields present) comes out unchanged."""
    name = raw.get("preset", "tiny")
    if name not in presets():
        raise UserError(f"model.preset: no model named {name!r}{nearest(str(name), presets())}")
    base = presets()[name]
    if raw.get("family", base["family"]) != base["family"]:
        raise UserError(f"model.family: preset {name!r} is of family {base['family']!r}; choose another preset")
    return {"preset": name, **base, **raw}
