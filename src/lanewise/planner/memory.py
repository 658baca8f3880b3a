"""Peak memory of a rank, by component. Elementwise: a choice of arrays gives arrays.

The formulas follow the tensors that a block's backward needs (Korthikanti et al., arXiv:2205.05198, brought up to
date: gated feed-forwards, grouped queries, an attention that keeps no scores). Each stage is looked at, and the
fullest counts.
"""

from dataclasses import dataclass, fields

import numpy as np

from lanewise.planner.choice import SCHEDULES, Choice, Number, among
from lanewise.planner.model import Transformer
from lanewise.planner.stages import cut

WAVE = tuple(SCHEDULES.index(name) for name in ("zbv", "dualpipev"))
ALL = tuple(SCHEDULES.index(name) for name in ("gpipe", "looped-bfs"))
ZERO_BUBBLE = SCHEDULES.index("interleaved-zb")


@dataclass(frozen=True)
class Engine:
    """How a training engine stores things, in bytes per parameter and shares.

    gradient: kept over the step; optimizer: masters and moments; logits: bytes per logit at the peak, or 0 where the
    loss is computed in chunks, of `chunk` logits; spread: whether what a recomputed block keeps is cut by tp;
    activations: kept, over those that a fully fused block keeps; scores: bytes kept of each attention score, 0 where
    attention is one kernel; slack: allocator's waste, a share of activations;
    context: outside the allocator's books; short: whether a cut that is not even leaves the ends of a pipeline a block
    less, as they hold the embeddings; tree: ours, where a pipeline's cut weighs the head, and where lanes add up along
    the canonical tree, each with a gradient of its own, so that nodes may wait beside the lane at work;
    holes: shares of the activations that a plain allocator loses between tensors: with one microbatch a step, with
    several, and with recomputation.
    """

    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    logits: float = 0.0
    chunk: float = 2.0**21
    spread: bool = True
    activations: float = 1.0
    scores: float = 0.0
    slack: float = 0.03
    buffers: float = 0.3e9
    context: float = 0.0
    short: bool = False
    tree: bool = False
    holes: tuple[float, float, float] = (0.0, 0.0, 0.0)


# activations: as traced from our blocks in bf16 (`planner.trace`; a test holds it)
OURS = Engine(activations=1.2, context=1.0e9, tree=True)


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank's parts."""

    weights: Number
    gradients: Number
    optimizer: Number
    activations: Number
    logits: Number
    buffers: Number

    @property
    def total(self) -> Number:
        return sum(getattr(self, f.name) for f in fields(self))


def in_flight(choice: Choice, stage: Number) -> Number:
    """Microbatches (of a whole rank's layers) whose activations rank `stage` of the pipeline holds at its peak."""
    pp, count, chunks = choice.pp, choice.count, choice.chunks
    plain = np.minimum(count, pp - stage)
    looped = np.minimum(count, pp * (1 + (pp - 1.0) / (pp * chunks)) - 2.0 * stage / chunks)
    held = np.where(chunks > 1, np.maximum(looped, 1), plain)
    # zero-bubble keeps what weight gradients need for a while longer; the V-shaped ones fill all ranks alike
    held = np.where(choice.schedule == ZERO_BUBBLE, np.minimum(count, pp), held)
    held = np.where(among(choice.schedule, WAVE), np.minimum(count, pp), held)
    held = np.where(among(choice.schedule, ALL), count, held)
    return np.where(np.asarray(choice.flight) > 0, np.minimum(count, choice.flight), held)


def saved(model: Transformer, choice: Choice, sequence: int, recompute: Number, spread: bool = True) -> Number:
    """Bytes that one block keeps of one microbatch for its backward, on one rank; two bytes an element."""
    tokens = choice.micro * sequence / choice.cp
    H, tp = model.hidden, choice.tp
    if model.latent is None:
        inner = model.heads * model.head_dim * 2.0 + model.kv_heads * (model.head_dim + model.v_dim)
    else:
        inner = model.heads * (2 * model.head_dim + 2 * model.v_dim) + 2 * (sum(model.latent) + model.latent[0])
    routed = model.routed_layers / model.layers
    dense = model.matrices * model.ffn  # what goes into the activation, and what comes out
    experts = (model.top_k / choice.expert_tp + model.shared / tp) * tp * (model.matrices * model.expert_ffn)
    moved = (2.0 * model.top_k * H + 4 * model.experts) * tp / choice.expert_tp
    per_token = 4 * H + inner + (1 - routed) * dense + routed * (experts + moved) + 2 * H
    whole = 2.0 * tokens * per_token / tp
    products = 2.0 * tokens * (2 * H + inner + (1 - routed) * (model.matrices - 1) * model.ffn + routed * moved) / tp
    entry = 2.0 * tokens * H / (tp if spread else 1)
    return np.select([recompute == 0, recompute == 1], [whole, products], entry)


def memory(model: Transformer, choice: Choice, sequence: int, engine: Engine = OURS) -> Memory:
    """The fullest stage's peak: the first one's, the second's or the last one's."""
    stages = [_stage(model, choice, sequence, engine, place) for place in (0, 1, -1)]
    fullest = np.argmax(np.stack(np.broadcast_arrays(*(stage.total for stage in stages))), axis=0)
    parts = {f.name: [getattr(stage, f.name) + 0.0 * fullest for stage in stages] for f in fields(Memory)}
    return Memory(**{name: np.choose(fullest, held) for name, held in parts.items()})


def _stage(model: Transformer, choice: Choice, sequence: int, engine: Engine, place: int) -> Memory:
    """place: 0 the first stage of the pipeline, 1 the second, -1 the last; all of them are the one of no pipeline."""
    one = choice.pp == 1
    wave = among(choice.schedule, WAVE)  # the first rank of a V holds both ends
    blocks = np.ceil(model.blocks / choice.pp)
    if engine.tree:
        most, last, _ = cut(model, choice.pp)
        blocks = np.where(choice.chunks > 1, blocks, last if place == -1 else most)
    if engine.short:
        missing = blocks * choice.pp - model.blocks
        blocks = blocks - np.where(missing >= (2, np.inf, 1)[place], 1, 0)
    both = model.embedding * (1 if model.tied else 2)
    holds_head = one | (wave & (place == 0)) | (~wave & (place == -1))
    ends = np.where(one | (wave & (place == 0)), both, np.where(wave | (place == 1), 0, model.embedding))
    copies = choice.data * choice.cp / choice.fsdp
    expert_copies = np.maximum(choice.data * choice.cp * choice.tp / (choice.ep * choice.expert_tp * choice.fsdp), 1)
    dense = (blocks * model.block_dense + ends) / choice.tp
    experts = blocks * model.block_experts / (choice.ep * choice.expert_tp)
    held = (dense + experts) / choice.fsdp
    owned = np.where(choice.zero >= 1, dense / choice.fsdp / copies + experts / choice.fsdp / expert_copies, held)
    # weights sharded by fsdp are gathered a block at a time, the next one ahead of its use
    gathered = np.where(
        choice.fsdp > 1, 2 * (model.block_dense / choice.tp + model.block_experts / (choice.ep * choice.expert_tp)), 0
    )
    # a lane of one microbatch is added straight onto its left sibling
    leaves = np.where(choice.count > choice.lanes, choice.lanes, (choice.lanes + 1) / 2)
    waiting = 1 + np.floor(np.log2(leaves)) if engine.tree else 1
    # a gradient that is added to again is whole until the last microbatch
    early = (choice.zero >= 2) & ((choice.count == 1) | (not engine.tree))
    gradients = np.where(early, owned, held * waiting) * engine.gradient + gathered * engine.weight
    if engine.tree:  # its chunk of the other copies' gradients arrives beside its own; ZeRO-2 keeps no place for it
        others = dense / choice.fsdp * (1 - 1 / copies) + experts / choice.fsdp * (1 - 1 / expert_copies)
        gradients = gradients + np.where(choice.zero >= 2, 0, others) * engine.gradient

    stage = np.minimum(place, choice.pp - 1) if place >= 0 else choice.pp - 1
    flight = in_flight(choice, stage)
    # what a recomputed block keeps is its input, or products: no engine keeps more
    whole = saved(model, choice, sequence, 0 * choice.recompute) * engine.activations
    tokens = choice.micro * sequence / choice.cp
    whole = whole + engine.scores * tokens * sequence * model.heads / choice.tp
    kept = saved(model, choice, sequence, choice.recompute, engine.spread)
    kept = np.where(choice.recompute == 0, whole, kept)
    working = np.where(choice.recompute > 0, whole, 0.0)
    again = np.where(choice.count > 1, engine.holes[1], engine.holes[0])
    lost = np.where(choice.recompute > 0, engine.holes[2], again)
    activations = (blocks * kept * flight + working) * (1 + engine.slack + lost)
    row = model.vocab / choice.tp
    logits = np.where(
        engine.logits > 0,
        tokens * row * engine.logits,
        np.minimum(tokens * row, np.maximum(engine.chunk, 128 * row)) * 10.0,
    )
    return Memory(
        (held + gathered) * engine.weight,
        gradients,
        owned * engine.optimizer,
        activations,
        np.where(holds_head, logits, 0.0),
        engine.buffers + engine.context + 0 * held,
    )
