"""What a model is to the planner: parameters, FLOPs and saved activations of its repeated block, in closed form.

The models' own tables of parameters are the source of truth; a test holds these formulas against them. No torch.
"""

from dataclasses import dataclass
from typing import Any

from lanewise.config import DeepSeekModel, DenseModel


@dataclass(frozen=True)
class Transformer:
    """A decoder. Widths in elements; `matrices`: of a feed-forward (3: gated, 2: plain).

    latent: (q_lora_rank or 0, kv_lora_rank, rotary width) of latent attention, or None.
    experts, top_k, shared, expert_ffn: of the routed layers, which are all but the first `dense_layers`.
    ahead: depths of multi-token prediction, each one more block, a join and another use of the head.
    extra_active: parameters a token meets in a layer that these fields do not name (only from published tables).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    ffn: int
    vocab: int
    matrices: int = 3
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    latent: tuple[int, int, int] | None = None
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0
    ahead: int = 0
    extra_active: float = 0.0

    # ------------------------------------------------------------------------------------------------- parameters

    @property
    def attention(self) -> int:
        """Parameters of a block's attention, its norms included."""
        H, N = self.hidden, self.heads
        if self.latent is None:
            qkv = (N + self.kv_heads) * self.head_dim + self.kv_heads * self.v_dim
            return H * qkv + N * self.v_dim * H + 2 * self.head_dim * self.qk_norm + qkv * self.qkv_bias
        q_rank, kv_rank, rotary = self.latent
        query = H * q_rank + q_rank if q_rank else 0
        query += (q_rank or H) * N * self.head_dim
        up = kv_rank * N * (self.head_dim - rotary + self.v_dim)
        return query + H * (kv_rank + rotary) + kv_rank + up + N * self.v_dim * H

    @property
    def dense_ffn(self) -> int:
        return self.matrices * self.hidden * self.ffn

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        return self.matrices * self.hidden * self.expert_ffn

    @property
    def routed_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def blocks(self) -> int:
        """Blocks in all, those that predict ahead included."""
        return self.layers + self.ahead

    @property
    def block_dense(self) -> float:
        """Mean parameters of a block outside its routed experts."""
        routed = self.routed_layers / self.layers
        shared = self.shared * self.expert + self.hidden * self.experts
        return self.attention + 2 * self.hidden + (1 - routed) * self.dense_ffn + routed * shared + self.extra_active

    @property
    def block_experts(self) -> float:
        """Mean parameters of a block's routed experts, all of them."""
        return self.routed_layers / self.layers * self.experts * self.expert

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        blocks = self.layers * (self.block_dense + self.block_experts)
        # a depth ahead: a routed block, a join of two states, and three norms
        one = self.attention + 2 * self.hidden + self.shared * self.expert + self.experts * (self.expert + self.hidden)
        ahead = self.ahead * (one + 2 * self.hidden**2 + 3 * self.hidden)
        return blocks + ahead + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def active(self) -> float:
        """Parameters a token meets, the embedding's look-up left out (one layer's worth of top_k experts)."""
        chosen = self.routed_layers / self.layers * self.top_k * self.expert
        return self.layers * (self.block_dense + chosen) + self.embedding

    # ------------------------------------------------------------------------------------------------------ FLOPs

    def block_flops(self, sequence: int) -> float:
        """Forward FLOPs a token in the mean block: two per weight it meets, and causal attention's two products."""
        chosen = self.routed_layers / self.layers * self.top_k * self.expert
        return 2 * (self.block_dense + chosen) + self.attention_flops(sequence)

    def attention_flops(self, sequence: int) -> float:
        """Forward FLOPs a token of scores and values, of which a causal mask leaves half."""
        return self.heads * (self.head_dim + self.v_dim) * sequence

    def step_flops(self, sequence: int, tokens: float) -> float:
        """Model FLOPs of forward and backward, recomputation not counted (what MFU counts)."""
        head = 2 * self.embedding * (1 + self.ahead)
        return 3 * tokens * (self.blocks * self.block_flops(sequence) + head)


def describe(model: DenseModel | DeepSeekModel, vocab: int = 0) -> Transformer:
    """The description of a run's model; vocab: the tokenizer's, where the run file leaves it open."""
    common: dict[str, Any] = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "ffn": model.ffn_hidden,
        "vocab": model.vocab_size or vocab,
        "tied": model.tie_embeddings,
    }
    if isinstance(model, DenseModel):
        size = model.head_size
        return Transformer(
            **common,
            kv_heads=model.kv_heads,
            head_dim=size,
            v_dim=size,
            qk_norm=model.qk_norm,
            qkv_bias=model.qkv_bias,
        )
    return Transformer(
        **common,
        kv_heads=model.heads,
        head_dim=model.qk_nope_head_dim + model.qk_rope_head_dim,
        v_dim=model.v_head_dim,
        latent=(model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim),
        experts=model.experts,
        top_k=model.experts_per_token,
        shared=model.shared_experts,
        expert_ffn=model.expert_hidden,
        dense_layers=min(model.dense_layers, model.layers),
        ahead=model.mtp_layers,
    )
