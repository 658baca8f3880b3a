"""Rows of a table of published runs (CSV): what each cell says, and an even-handed guess for each that is empty or says
nothing that can be.

Names of rows, sources and models are carried along. One thing is read from a model's: its size ("70B", "30B-A3B",
"8x7B"), where no cell gives it.
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
PRECISION = (
    ("fp4", "fp4"), ("fp8", "fp8"), ("bfloat16", "bf16"), ("bf16", "bf16"), ("float16", "fp16"), ("fp16", "fp16"),
    ("half", "fp16"), ("float32", "fp32"), ("fp32", "fp32"), ("tf32", "fp32"),
)  # fmt: skip
MOST = 2e6  # no size or count of a run is larger: devices, layers, widths, tokens of a sequence


class Refused(ValueError):
    """Why nothing can be said of a row."""


@dataclass
class Cells:
    """A row's cells. ignored: those that hold something else than a number that can be; they count as empty."""

    cells: Mapping[str, str]
    ignored: dict[str, str] = field(default_factory=dict)

    def text(self, key: str) -> str:
        return self.cells.get(key, "")

    def number(self, key: str, default: float = math.nan, least: float = 0.0, most: float = MOST) -> float:
        """What the cell says, or the default if that is nothing or cannot be."""
        text = self.text(key)
        if text.lower() in EMPTY:
            return default
        value = _number(text)
        if value is None or not least <= value <= most:
            self.ignored[key] = text
            return default
        return value

    def whole(self, key: str, default: float) -> int:
        return max(round(self.number(key, default, least=1.0)), 1)


EMPTY = ("", "nan", "none", "null", "n/a", "na", "-", "?", "unknown")


@dataclass(frozen=True)
class Case:
    """A row, completed. told: names of the cells that say something; ignored: what cannot be, by cell. step_time,
    memory_GB: measured, or None."""

    id: str
    source: str
    model: Transformer
    choice: Choice
    sequence: int
    batch: float
    cluster: Cluster
    precision: str
    told: frozenset[str]
    ignored: dict[str, str]
    step_time: float | None
    memory_GB: float | None
    memory_kind: str


def read_table(path: str | Path) -> Iterator[tuple[dict[str, str], Case | Refused]]:
    """Each row with its case, or why there is none. Raises UserError."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read the table ({error}): name a CSV file") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        names = [(name or "").strip() for name in rows.fieldnames or ()]
        if "gpu" not in names:
            raise UserError(f"{path}: no column 'gpu': the columns are those of a table of published runs")
        rows.fieldnames = names
        for number, row in enumerate(rows, 1):
            cells = {key: value.strip() for key, value in row.items() if isinstance(key, str) and value is not None}
            cells["id"] = cells.get("id") or f"row {number}"
            yield cells, _case(cells)
    except csv.Error as error:
        raise UserError(f"{path}: line {rows.line_num} cannot be read ({error})") from None


def _case(cells: dict[str, str]) -> Case | Refused:
    try:
        return complete(cells)
    except Refused as reason:
        return reason
    except UserError as error:
        return Refused(str(error))


def complete(row: Mapping[str, str]) -> Case:
    """Raises Refused, or UserError on a device nobody knows."""
    cells = Cells(row)
    number, whole = cells.number, cells.whole
    if not cells.text("gpu"):
        raise Refused("gpu is empty: nothing tells the device")
    device = find_device(cells.text("gpu"))
    tp, pp, cp = whole("tp", 1), whole("pp", 1), whole("cp", 1)
    ranks = whole("n_gpus", max(number("dp", 1), 1) * tp * pp * cp)
    per_node = min(whole("gpus_per_node", min(device.domain, 8)), ranks)
    nodes = max(ranks // per_node, 1)
    cluster = cluster_of(device, nodes, per_node)
    sequence = whole("seq_len", 2048)
    model = _model(cells)
    dp, batch = number("dp"), number("global_batch", most=1e9)
    if pp > 1 and batch > 0 and not dp >= 1 and not number("tp") >= 1:
        # nobody starves a pipeline: ranks of a node share microbatches until there are four for each stage
        while tp < per_node and ranks >= 2 * tp * pp * cp and batch < 4 * pp * ranks / (tp * pp * cp):
            tp *= 2
    data = dp if dp >= 1 else max(ranks / (tp * pp * cp), 1)
    data = max(min(data, ranks / (tp * pp * cp)), 1) if ranks >= tp * pp * cp else data
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
        recompute=_recompute(cells.text("activation_ckpt").lower()),
        schedule=SCHEDULES.index(_schedule(cells.text("notes"), chunks)),
        zero=min(zero, 2),
        flight=2 * pp if "zb-2p" in cells.text("notes").lower() else 0,  # it buys its bubble with memory
    )
    kind = cells.text("dtype").lower()
    precision = next(
        (name for key, name in PRECISION if key in kind), "fp16" if "bf16" not in device.matmul else "bf16"
    )
    step = number("step_time_s_derived", most=1e9)
    memory = number("peak_mem_GB")
    told = {key for key, value in row.items() if value.lower() not in EMPTY or value.lower() == "none"}
    return Case(
        cells.text("id"),
        cells.text("source"),
        model,
        choice,
        sequence,
        batch,
        cluster,
        precision,
        frozenset(told - set(cells.ignored)),
        cells.ignored,
        step if step > 0 else None,
        memory if memory > 0 else None,
        cells.text("mem_kind"),
    )


def _recompute(said: str) -> int:
    if "select" in said:
        return RECOMPUTE.index("selective")
    return RECOMPUTE.index("full" if said in ("1", "true", "yes", "block", "uniform") or "full" in said else "none")


def _schedule(notes: str, chunks: float) -> str:
    word = re.search(r"schedule ([\w-]+)", notes)
    return NAMED.get(word[1].lower() if word else "", "interleaved" if chunks > 1 else "1f1b")


def _number(text: str) -> float | None:
    """`1,024`, `~8`, `4k` (1024 each), `2x8`, `8 GPUs`, `1.5 s`, `80GB` or `70B` (cells in billions say 70). None:
    no number."""
    match = re.fullmatch(
        r"[~<>=\u2248 ]*(?:(\d+) ?x ?)?([\d.,]+(?:e[+-]?\d+)?) *(k|b|gb|s|sec|gpus?|tokens?)?", text.lower()
    )
    if match is None:
        return None
    try:
        return float(match[2].replace(",", "")) * int(match[1] or 1) * (1024 if match[3] == "k" else 1)
    except ValueError:
        return None


def size_in(name: str) -> tuple[float, float]:
    """(billions of parameters, of those a token meets) that a model's name tells, or nan: `GPT-3 175B` (175, nan),
    `OLMo-350M` (0.35, nan), `30B-A3B` (30, 3). `8x7B` shares what is outside the experts: 7 each are nearer to 6."""
    size = r"(\d+(?:\.\d+)?)\s*([mbt])(?![a-z0-9])"
    unit = {"m": 1e-3, "b": 1.0, "t": 1e3}
    text = name.lower()
    active = re.search(rf"(?<![a-z0-9])a{size}", text)
    each = re.search(rf"(?<![\w.])(\d+)\s*x\s*{size}", text)
    whole = re.search(rf"(?<![\w.]){size}", text)
    if each is not None:
        billions = int(each[1]) * float(each[2]) * unit[each[3]] * 0.85
    else:
        billions = float(whole[1]) * unit[whole[2]] if whole is not None else math.nan
    return billions, float(active[1]) * unit[active[2]] if active is not None else math.nan


def _width(billions: float, layers: float, heads: float, ffn: float) -> float:
    """As models are usually proportioned: a block has about 12 width^2 parameters, a head 128 of the width, the
    feed-forward four times it, and there are about width / 128 blocks."""
    if heads > 0:
        return 128 * heads
    if ffn > 0:
        return ffn / 4
    if billions > 0:
        return (billions * 1e9 / 12 / layers) ** 0.5 if layers > 0 else (billions * 1e9 * 128 / 12) ** (1 / 3)
    if layers > 0:
        return 128 * layers
    raise Refused("no width, depth, heads or number of parameters, nor does a name tell one: nothing tells the size")


def _model(cells: Cells) -> Transformer:
    """A decoder of the row's sizes. Sizes it does not give follow from the number of parameters, as models are usually
    proportioned; a gated feed-forward is told from a plain one by that number too."""
    number, whole = cells.number, cells.whole
    billions, active = number("params_B"), number("active_params_B")
    layers, hidden, vocab = number("n_layers"), number("hidden", least=1), number("vocab", 50304, least=1)
    routed = number("n_experts", 0) > 1 or cells.text("is_moe").lower() in ("1", "1.0", "true", "yes")
    if not billions > 0 and not (hidden > 0 and layers > 0):
        billions, met = size_in(cells.text("model_name"))
        active = active if active > 0 else met
        routed = routed or met > 0
    size = active if active > 0 else billions
    if not hidden > 0:
        hidden = 128 * max(round(_width(size, layers, number("n_heads"), number("ffn_hidden")) / 128), 1)
    heads = whole("n_heads", max(round(hidden / 128), 1))
    kv_heads = whole("n_kv_heads", heads)
    ffn = number("ffn_hidden", least=1)
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
