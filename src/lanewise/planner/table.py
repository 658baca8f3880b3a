"""Rows of a table of published runs (CSV): what each cell says, and an even-handed guess for each that is empty.

Names of rows, sources and models are carried along, and nothing is read from them.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lanewise.errors import UserError
from lanewise.planner.choice import RECOMPUTE, SCHEDULES, Choice
from lanewise.planner.cluster import Cluster, cluster_of
from lanewise.planner.hardware import find_device
from lanewise.planner.model import Transformer

# A pipeline's schedule has no column; where the notes say it, these are the words.
NAMED = {
    "1f1b": "1f1b", "1f1b-i": "interleaved", "gpipe": "gpipe", "zb-1p": "interleaved-zb", "zb-2p": "interleaved-zb",
    "zb-v": "zbv", "zbv": "zbv", "dualpipe": "dualpipev", "dualpipev": "dualpipev",
}  # fmt: skip
PRECISION = (("fp4", "fp4"), ("fp8", "fp8"), ("fp16", "fp16"), ("bf16", "bf16"), ("fp32", "fp32"))


class Refused(ValueError):
    """Why nothing can be said of a row."""


@dataclass(frozen=True)
class Case:
    """A row, completed. told: names of the cells that were not empty. step_time, memory_GB: measured, or None."""

    id: str
    source: str
    model: Transformer
    choice: Choice
    sequence: int
    batch: float
    cluster: Cluster
    precision: str
    told: frozenset[str]
    step_time: float | None
    memory_GB: float | None
    memory_kind: str


def read_table(path: str | Path, needs: str) -> Iterator[tuple[dict[str, str], Case | Refused]]:
    """Each row with its case, or why there is none. needs: a column the table must have. Raises UserError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the table ({error}): name a CSV file") from None
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in ("id", "gpu", "hidden", "n_layers", needs) if name not in (rows.fieldnames or ())]
    if missing:
        raise UserError(f"{path}: no column {missing[0]!r}: the columns are those of a table of published runs")
    for row in rows:
        cells = {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)}
        try:
            yield cells, complete(cells)
        except Refused as reason:
            yield cells, reason
        except UserError as error:
            yield cells, Refused(str(error))


def complete(cells: dict[str, str]) -> Case:
    """Raises Refused, or UserError on a device nobody knows."""
    told = frozenset(key for key, value in cells.items() if value)

    def number(key: str, default: float = math.nan) -> float:
        return _number(cells.get(key, ""), key, default)

    def whole(key: str, default: float) -> int:
        value = number(key, default)
        if not value >= 1:
            raise Refused(f"{key} is {cells.get(key)!r}: it must be at least 1")
        return round(value)

    device = find_device(cells["gpu"])
    tp, pp, cp = whole("tp", 1), whole("pp", 1), whole("cp", 1)
    ranks = whole("n_gpus", max(number("dp", 1), 1) * tp * pp * cp)
    per_node = min(whole("gpus_per_node", min(device.domain, 8)), ranks)
    nodes = max(ranks // per_node, 1)
    cluster = cluster_of(device, nodes, per_node)
    sequence = whole("seq_len", 2048)
    model = _model(number, whole, cells)
    dp = number("dp")
    data = dp if dp >= 1 else max(ranks / (tp * pp * cp), 1)
    data = max(min(data, ranks / (tp * pp * cp)), 1) if ranks >= tp * pp * cp else data
    batch = number("global_batch")
    micro = number("micro_batch")
    if not batch > 0:
        count = 4.0 * pp if pp > 1 else 1.0
        batch = data * (micro if micro > 0 else 1) * count
    if not micro > 0:
        # one sequence in a pipeline, else about 8192 tokens, as the batch allows
        micro = 1.0 if pp > 1 else min(max(1.0, 8192 // sequence), max(batch / data, 1))
    count = max(batch / (data * micro), 1.0)
    micro = batch / (data * count) if count == 1.0 else micro
    zero = number("zero_stage", 1 if data > 1 else 0)
    chunks = max(number("vpp_interleave", 1), 1) if pp > 1 else 1
    ep = whole("ep", 1) if model.experts else 1
    ep = min(ep, model.experts or 1)
    checkpointing = cells.get("activation_ckpt", "").lower()
    choice = Choice(
        data=data,
        fsdp=data * cp if zero >= 3 else 1,
        pp=pp,
        cp=cp,
        ep=ep,
        tp=tp,
        expert_tp=1 if ep > 1 else tp,
        chunks=chunks,
        micro=micro,
        count=count,
        recompute=RECOMPUTE.index(checkpointing) if checkpointing in RECOMPUTE else 0,
        schedule=SCHEDULES.index(_schedule(cells.get("notes", ""), chunks)),
        zero=min(zero, 2),
    )
    kind = cells.get("dtype", "").lower()
    precision = next(
        (name for key, name in PRECISION if key in kind), "fp16" if "bf16" not in device.matmul else "bf16"
    )
    step = number("step_time_s_derived")
    memory = number("peak_mem_GB")
    return Case(
        cells["id"],
        cells.get("source", ""),
        model,
        choice,
        sequence,
        batch,
        cluster,
        precision,
        told,
        step if step > 0 else None,
        memory if memory > 0 else None,
        cells.get("mem_kind", ""),
    )


def _schedule(notes: str, chunks: float) -> str:
    word = re.search(r"schedule ([\w-]+)", notes)
    return NAMED.get(word[1].lower() if word else "", "interleaved" if chunks > 1 else "1f1b")


def _number(text: str, key: str, default: float) -> float:
    if not text or text.lower() in ("nan", "none", "n/a", "-", "?"):
        return default
    try:
        value = float(text.replace(",", "").removeprefix("~"))
    except ValueError:
        raise Refused(f"{key} is {text!r}, which is no number") from None
    if math.isinf(value) or value < 0:
        raise Refused(f"{key} is {text}: no such number can be")
    return value


def _model(number: Callable[..., float], whole: Callable[[str, float], int], cells: dict[str, str]) -> Transformer:
    """A decoder of the row's sizes. Sizes it does not give follow from the number of parameters, as models are usually
    proportioned; a gated feed-forward is told from a plain one by that number too."""
    billions, active = number("params_B"), number("active_params_B")
    layers, hidden, vocab = number("n_layers"), number("hidden"), number("vocab", 50304)
    routed = cells.get("is_moe") == "1" or number("n_experts", 0) > 1
    size = active if active > 0 else billions
    if not hidden > 0:
        if not size > 0:
            raise Refused("neither hidden nor a number of parameters is given: nothing tells the size of the model")
        # a block has about 12 hidden^2 parameters, and there are about hidden / 128 of them
        hidden = (
            128 * max(round((size * 1e9 * 128 / 12) ** (1 / 3) / 128), 1)
            if not layers > 0
            else (128 * max(round((size * 1e9 / 12 / layers) ** 0.5 / 128), 1))
        )
    heads = whole("n_heads", max(round(hidden / 128), 1))
    kv_heads = whole("n_kv_heads", heads)
    ffn = number("ffn_hidden")
    if not ffn > 0:
        ffn = 4 * hidden
    experts, top_k = (whole("n_experts", 8), whole("top_k", 2)) if routed else (0, 0)

    def build(layers: float, matrices: int, tied: bool = False) -> Transformer:
        width = max(round(hidden / heads), 1)
        if routed and ffn < hidden and heads >= 16:
            width = max(width, 128)  # fine-grained experts come with heads of 128 whatever the width
        return Transformer(
            layers=max(round(layers), 1),
            hidden=round(hidden),
            heads=heads,
            kv_heads=min(kv_heads, heads),
            head_dim=width,
            v_dim=width,
            ffn=round(ffn),
            vocab=round(vocab),
            matrices=matrices,
            tied=tied,
            experts=experts,
            top_k=top_k,
            expert_ffn=round(ffn) if routed else 0,
        )

    matrices, tied = (3 if routed or ffn < 3.9 * hidden else 2), False
    if billions > 0 and layers > 0 and not routed:
        # of kinds that agree to half a percent, the gated one: the later fashion
        kinds = [(m, t) for m in (3, 2) for t in (False, True)]
        misses = [abs(build(layers, *kind).parameters / (billions * 1e9) - 1) for kind in kinds]
        matrices, tied = next(kind for kind, miss in zip(kinds, misses, strict=True) if miss <= min(misses) + 0.005)
    if not layers > 0:
        block = build(1, matrices)
        per_layer = block.block_dense + (block.block_experts if routed and not active > 0 else top_k * block.expert)
        layers = max((size * 1e9 - block.embedding) / per_layer, 1) if size > 0 else max(hidden / 128, 1)
    model = build(layers, matrices, tied)
    if routed and active > 0:
        # what a token meets beyond the named sizes: shared experts, dense layers
        extra = (active * 1e9 - model.active) / model.layers
        model = replace(model, extra_active=max(extra, -0.6 * model.active / model.layers))
    return model
