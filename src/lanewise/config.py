"""The run file: every setting, its default, and whether it defines the bits of the run.

This is the one place where defaults stand. A run file is TOML with one table per class below; dotted overrides
(`train.steps=200`) come on top. A key this file does not know is an error that names the nearest one it does.

A field made with `free(...)` may change between a run and its resumption; every other field defines the bits.
"""

import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo

from lanewise.errors import UserError
from lanewise.model_settings import DeepSeekModel, DenseModel, Model, RopeScaling, expand_preset
from lanewise.settings import Section, free, nearest

# ----------------------------------------------------------------------------------------------------------- data


class Source(Section):
    """One of the sources of a mixture."""

    source: str = Field(description="as data.source")
    weight: float = Field(1.0, description="its share of the sequences, to scale with the others", gt=0)
    name: str = Field("", description="what samples and order know it by; empty: the last part of its address")


class Data(Section):
    source: str = free(
        "python",
        "'python' (this interpreter's library), a file, folder, glob or shard set; its content counts. Live: "
        "kafka://host:port/topic, or grow:FOLDER",
    )
    mix: tuple[Source, ...] = free(
        (), "[{source=..., weight=0.7}, ...]: a mixture instead of `source`; a change goes on from where the run is"
    )
    exhausted: Literal["repeat", "stop"] = Field(
        "repeat", description="a source that was read through: starts again in another order, or ends the run"
    )
    text_field: str = Field("text", description="column that holds the text, the token ids, or the turns of a chat")
    tokenizer: str = Field(
        "bpe", description="'bpe' trains one on the data, 'bytes', a tokenizer.json to use, 'ids': the data are ids"
    )
    vocab_size: int = Field(4096, description="entries of a trained BPE tokenizer, or ids there are", ge=257)
    chat_template: str = Field("", description="file with a template for chats; empty: the tokenizer's own")
    learn: tuple[str, ...] = Field(("assistant",), description="roles whose turns in chats are predicted")
    errors: Literal["error", "replace", "skip"] = Field("error", description="what to do with text that is not UTF-8")
    min_chars: int = Field(0, description="shorter documents are left out", ge=0)
    filter: str = Field("", description="'module:function' of a text (its first 256 KB): whether to keep the document")
    dedup: Literal["none", "exact", "near"] = Field(
        "none", description="`data build` leaves out documents that equal an earlier one, or nearly so (MinHash)"
    )
    held_out: float = Field(0.01, description="share of documents kept for validation", ge=0, lt=1)
    pack: Literal["stream", "document", "first-fit", "best-fit"] = Field(
        "stream",
        description="stream: windows over the joined text; document: windows never cross documents, padded; "
        "first-fit, best-fit: several whole documents in a sequence, none sees another",
    )
    shuffle: bool = Field(True, description="visit windows in a keyed order that differs per epoch")
    shuffle_block: int = Field(4096, description="windows read near each other: a block", ge=1)
    shuffle_blocks: int = Field(64, description="blocks, from anywhere in a source, whose windows are mixed", ge=1)
    transform: str = Field("", description="'module:function' of (tokens, labels, key), applied to each microbatch")
    workers: int = free(1, "processes per rank for `transform`", ge=1)
    credit_mb: float = free(64.0, "memory for microbatches read ahead, per stage and rank, in MB (2^20); 0: none", ge=0)
    check: bool = free(True, "compare each record batch of a shard with its hash when it is first read")
    stream_rows: int = Field(1000, description="messages of a live source sealed together", ge=1)
    stream_settle: float = free(5.0, "seconds a file in a growing folder must have stood still to be taken", gt=0)
    record_samples: bool = free(False, "write samples.jsonl: which samples each slot read")
    record_losses: bool = free(False, "write losses.jsonl: the summed loss of each slot with its samples")
    cache: str = free("~/.cache/lanewise", "folder for tokenizers, token files and copies of remote files")
    cache_limit_gb: float = free(50.0, "copies of remote files take at most this much, in GB (10^9)", gt=0)
    cache_free_gb: float = free(5.0, "disk space copies of remote files leave free, in GB", ge=0)
    store_timeout: float = free(120.0, "seconds a store or broker may stay away before the run gives up", gt=0)

    @model_validator(mode="after")
    def _mixture(self) -> "Data":
        names = [name for name, _, _ in self.parts]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two sources of the mix are called {min(twice)!r}: give each a name")
        return self

    @property
    def parts(self) -> list[tuple[str, str, float]]:
        """(name, source, weight) of each source; one alone needs no name."""
        if not self.mix:
            return [("", self.source, 1.0)]
        return [
            (part.name or part.source.rstrip("/").rpartition("/")[2], part.source, part.weight) for part in self.mix
        ]


class Batch(Section):
    lanes: int = Field(8, description="virtual workers; a step's gradient is the sum over lanes", ge=1)
    microbatches: int = Field(1, description="microbatches per lane in a step (gradient accumulation)", ge=1)
    size: int = Field(1, description="sequences in a microbatch", ge=1)
    sequence_length: int = Field(256, description="tokens in a sequence", ge=2)

    @property
    def sequences(self) -> int:
        """Sequences in one step."""
        return self.lanes * self.microbatches * self.size


# ------------------------------------------------------------------------------------------------------- training


class Train(Section):
    steps: int = Field(180, description="steps of the run; the schedule spans them", ge=1)
    epochs: float = Field(0, description="if > 0: stop after this many passes over the data instead of `steps`", ge=0)
    seed: int = Field(0, description="seed of weights, order and dropout", ge=0, lt=2**63)
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16 keeps fp32 master weights and sums")
    label_smoothing: float = Field(0.0, description="part of a label's weight that goes to all words alike", ge=0, lt=1)
    z_loss: float = Field(0.0, description="weight of the squared log of softmax's denominator", ge=0)
    freeze: tuple[str, ...] = Field((), description="parameters that do not change, by name, as in 'layers.0.*'")
    compile: bool = Field(False, description="torch.compile the blocks: slower start, faster steps, other bits")
    threads: int = Field(1, description="compute threads per process", ge=1)
    deterministic: bool = Field(True, description="deterministic kernels on CUDA (always so on CPU)")
    check_sync: int = free(0, "steps between checks that copies of a weight are equal on all ranks; 0 is never", ge=0)
    max_skips: int = free(10, "stop after this many non-finite steps in a row", ge=1)


class Layout(Section):
    recompute: Literal["none", "full", "selective"] = free(
        "none", "activations not kept for the backward: none, all of a block's, or all but products of matrices"
    )
    recompute_stages: tuple[Annotated[int, Field(ge=0)], ...] = free((), "stages that recompute; empty: all of them")
    axes: str = free("", "axes inside a replica with their degrees, as in 'pp2.tp2'; 'auto': planned at launch")
    adaptive: bool = free(
        False, "take a better layout: in a live run at a commit, and with axes=auto when it is resumed"
    )
    offload: bool = free(False, "with fsdp: weights, gradients and optimizer state in host memory")
    schedule: Literal["gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zb", "zbv", "dualpipev"] = free(
        "1f1b", "order of the pipeline's forwards and backwards"
    )
    chunks: int = free(0, "stages on each worker of the pipeline; 0: one for gpipe and 1f1b, else two", ge=0)
    stages: tuple[Annotated[int, Field(ge=1)], ...] = free((), "layers of each stage; empty: cut evenly by cost")
    zero: Literal[0, 1, 2] = free(1, "across replicas: 1 shards the optimizer, 2 also frees full gradients early")
    bucket_mb: float = Field(8.0, description="fp32 gradient bytes exchanged at once, in MB (2^20)", gt=0)


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    lr: float = Field(4e-3, description="peak learning rate", ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="decay of the first and second moments"
    )
    eps: float = Field(1e-8, description="added to the root of the second moment", gt=0)
    weight_decay: float = Field(0.1, description="decoupled decay, times lr", ge=0)
    no_decay: tuple[Literal["norm", "bias", "embedding"], ...] = Field(
        ("norm", "bias"), description="kinds of parameters that do not decay"
    )
    clip: float = Field(1.0, description="largest norm of the whole gradient; 0 turns clipping off", ge=0)


class Schedule(Section):
    kind: Literal["cosine", "linear", "wsd", "constant"] = Field("cosine", description="shape after warm-up")
    warmup: int = Field(20, description="steps of linear warm-up", ge=0)
    min_ratio: float = Field(0.1, description="last learning rate / peak", ge=0, le=1)
    decay_fraction: float = Field(0.2, description="wsd: share of the steps spent decaying at the end", gt=0, le=1)


class Checkpoint(Section):
    every: int = free(50, "steps between checkpoints; 0 writes only the last", ge=0)
    keep: int = free(2, "newest checkpoints kept; the last good one always is", ge=1)
    background: bool = free(True, "write from a snapshot while training goes on")


class Eval(Section):
    every: int = free(50, "steps between evaluations on held-out text; 0 is never", ge=0)
    sequences: int = free(64, "held-out sequences evaluated; 0 is all", ge=0)


class Observe(Section):
    every: int = free(1, "steps between progress lines off a terminal", ge=1)


class Run(Section):
    """A whole run file."""

    name: str = free("default", "name of the run and of its output folder", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: Model = Field(default_factory=lambda: load_model({}), description="what is trained")
    data: Data = Data()
    batch: Batch = Batch()
    train: Train = Train()
    layout: Layout = Layout()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    observe: Observe = Observe()

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and isinstance(raw.get("model", {}), dict):
            raw = {**raw, "model": expand_preset(raw.get("model", {}))}
        return raw


# -------------------------------------------------------------------------------------------------------- loading


def load_model(raw: dict[str, Any]) -> DenseModel | DeepSeekModel:
    """A model's settings from its preset name and overriding fields."""
    try:
        return TypeAdapter[DenseModel | DeepSeekModel](Model).validate_python(expand_preset(raw))
    except ValidationError as e:
        raise UserError(_explain(e, prefix="model")) from None


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Run:
    """Read a run file (TOML; none: all defaults) and put `section.key=value` overrides on top.

    Raises UserError, one line with the remedy, on anything that is wrong with either.
    """
    text = ""
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"{path}: no such run file (overrides are written section.key=value)") from None
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{path}: cannot read the run file ({e}): name a TOML file") from None
    return parse(text, overrides, name=str(path))


def load_words(words: Sequence[str]) -> Run:
    """A run from the words of a command line: at most one run file, and overrides. Raises UserError."""
    files = [w for w in words if "=" not in w]
    if len(files) > 1:
        raise UserError(f"more than one run file: {', '.join(files)} (overrides are written section.key=value)")
    return load(files[0] if files else None, [w for w in words if "=" in w])


def parse(text: str, overrides: Sequence[str] = (), name: str = "run file") -> Run:
    """A run from the text of a run file called `name`, and overrides. Raises UserError."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"{name}: not valid TOML: {e}") from None
    for item in overrides:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise UserError(f"{item!r} is not an override: write section.key=value")
        _put(raw, key.strip().split("."), _value(value.strip()), item)
    try:
        return Run.model_validate(raw)
    except ValidationError as e:
        raise UserError(_explain(e)) from None


def _put(raw: dict[str, Any], keys: list[str], value: Any, item: str) -> None:
    node = raw
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise UserError(f"{item!r}: {key} is a value, not a section")
    node[keys[-1]] = value


def _value(text: str) -> Any:
    """TOML where it parses (numbers, booleans, arrays, quoted strings), else the bare word."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: ValidationError, prefix: str = "") -> str:
    """The first problem of a pydantic error as one line; a misspelt key goes before the field it leaves missing."""
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    tags = {"dense", "deepseek"}
    place = [prefix] * bool(prefix) + [str(p) for p in first["loc"] if p not in tags]
    key = ".".join(place)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key{nearest(place[-1], _fields_of(first['loc'], prefix))}{more}"
    message = first["msg"].removeprefix("Value error, ").replace("\n", " ")
    given = first.get("input")
    shown = "" if isinstance(given, dict | BaseModel) else f", got {given!r}"
    if not key:
        return message + more
    if first["type"] == "missing":
        return f"{key}: has no value: set {key}=...{more}"
    if first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        return f"{key}: is a section, not a value: set {key}.SETTING=...{more}"
    if first["type"] == "string_pattern_mismatch":
        return f"{key}: {given!r} is no name for a folder: use letters, digits and . _ -, a letter or digit first{more}"
    return f"{key}: {message[0].lower()}{message[1:]}{shown}{more}"


def _fields_of(loc: tuple[Any, ...], prefix: str) -> list[str]:
    """Names of the fields beside the unknown key at `loc`."""
    families = {"dense": DenseModel, "deepseek": DeepSeekModel}
    section: Any = Run
    for part in loc[:-1]:
        if part in families:
            section = families[part]
        elif part == "rope_scaling":
            section = RopeScaling
        elif part == "mix":
            section = Source
        elif part != "model" and not isinstance(part, int):
            section = Run.model_fields[part].annotation
    if prefix == "model" and section is Run:
        section = next((families[p] for p in loc if p in families), DeepSeekModel)
    return list(section.model_fields)


def with_vocabulary(run: Run, vocabulary: int) -> Run:
    """The run with `model.vocab_size` filled in from the tokenizer's `vocabulary`, or checked against it."""
    if run.model.vocab_size == 0:
        return run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": vocabulary})})
    if run.model.vocab_size < vocabulary:
        raise UserError(
            f"model.vocab_size {run.model.vocab_size} is smaller than the tokenizer's {vocabulary}: "
            f"raise it, or leave it at 0 to take the tokenizer's"
        )
    return run


# -------------------------------------------------------------------------------------------------------- writing


def dump(run: Run) -> str:
    """The resolved run file as TOML, every default in it, each with its description."""
    lines = [f"name = {_toml(run.name)}"]
    for name in type(run).model_fields:
        section = getattr(run, name)
        if isinstance(section, Section):
            lines += ["", f"[{name}]"]
            for key, field in type(section).model_fields.items():
                value = getattr(section, key)
                if value is not None:
                    note = f"  # {field.description}" if field.description else ""
                    lines.append(f"{key} = {_toml(value)}{note}{' (may change on resume)' * _is_free(field)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # but for DEL, TOML's escapes
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, BaseModel):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value if v is not None) + " }"
    return repr(value)


def differences(old: Run, new: Run) -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new) of each setting that defines the bits and differs."""
    for name in Run.model_fields:
        a, b = getattr(old, name), getattr(new, name)
        if not isinstance(a, Section):
            continue
        for key in {**type(a).model_fields, **type(b).model_fields}:
            field = type(a).model_fields.get(key) or type(b).model_fields[key]
            x, y = getattr(a, key, None), getattr(b, key, None)
            if not _is_free(field) and x != y and (name, key) != ("model", "preset"):
                yield f"{name}.{key}", x, y


def _is_free(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("free"))
