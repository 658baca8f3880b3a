"""Hugging Face folders: a checkpoint written as one, and one read as the start of a run.

Both ways the weights pass one tensor at a time, both are checked before a byte is written, and the result appears
under its name only when it is whole.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from lanewise import config
from lanewise.checkpoint import hf_shards, manifest
from lanewise.checkpoint.dcp import SavePieces, Writer
from lanewise.checkpoint.hf_config import from_hugging_face, to_hugging_face
from lanewise.checkpoint.hf_shards import Form, Shards
from lanewise.checkpoint.pieces import Entry, Piece
from lanewise.checkpoint.stored import Stored
from lanewise.config import DeepSeekModel, DenseModel
from lanewise.data import tokenizer
from lanewise.data.stores.atomic import sync
from lanewise.errors import UserError
from lanewise.models.build import build
from lanewise.models.names import hugging_face
from lanewise.runfolder import tokenizer_of

# What may stand beside the weights for the sake of the tokenizer and of generation; carried along where it is there.
COMPANIONS = (
    *tokenizer.FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
SEQUENCE = 2048  # an imported run's batch.sequence_length, unless the model's context is shorter


class Place(NamedTuple):
    """One tensor of theirs in one of ours: all of it, or its slice `expert`."""

    theirs: str
    ours: str
    expert: int | None
    shape: tuple[int, ...]


def places(model: DenseModel | DeepSeekModel) -> list[Place]:
    """Every tensor of the checkpoint, by our stored names in order: buffers first."""
    with torch.device("meta"):
        built = build(model)
    parameters = dict(built.named_parameters())
    found = []
    for name, tensor in built.state_dict().items():
        ours = f"{'model' if name in parameters else 'buffer'}/{name}"
        names = hugging_face(name, model)
        if tensor.dim() == 3:  # experts, stacked
            found += [Place(theirs, ours, i, tuple(tensor.shape[1:])) for i, theirs in enumerate(names)]
        else:
            found.append(Place(names[0], ours, None, tuple(tensor.shape)))
    return sorted(found, key=lambda place: place.ours)


def copies(model: DenseModel | DeepSeekModel) -> dict[str, str]:
    """Tensors that folders may hold although they are others' copies, as {copy: original}: a tied head, and the ends
    of each extra prediction depth, which share the model's (DeepSeek-V3's published folder holds them)."""
    found = {"lm_head.weight": "model.embed_tokens.weight"} if model.tie_embeddings else {}
    for depth in range(_depths(model)):
        layer = f"model.layers.{model.layers + depth}"
        found[f"{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        found[f"{layer}.shared_head.head.weight"] = found.get("lm_head.weight", "lm_head.weight")
    return found


def _depths(model: DenseModel | DeepSeekModel) -> int:
    return model.mtp_layers if isinstance(model, DeepSeekModel) else 0


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A folder beside `out` to fill, which becomes `out` at the end, or nothing if anything fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is already there: choose another --out, or remove it")
    temporary = manifest.hidden_name(out.absolute())
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync(temporary)
        temporary.rename(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}): choose another --out") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _carry(source: Path, target: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- out


def export_checkpoint(
    checkpoint: Path, out: Path, dtype: torch.dtype, shard_bytes: int, *, strip_vocab: bool = False
) -> dict[str, Any]:
    """Write the (verified) `checkpoint` as the new Hugging Face folder `out`; returns what was written.

    dtype: of the parameters (fp32 is exact; buffers stay fp32 always). strip_vocab: leave out the embedding's rows
    beyond the tokenizer's entries. Raises UserError if no architecture there computes this model, if the run's
    tokenizer is missing, if `out` is not empty or cannot be written.
    """
    stored = Stored(checkpoint)
    run = config.parse(stored.manifest.meta["run"], name=str(checkpoint))
    model, tokens = run.model, tokenizer_of(checkpoint)
    words = tokenizer.load(tokens)
    if strip_vocab:
        model = model.model_copy(update={"vocab_size": min(model.vocab_size, words.vocab_size)})
    described = to_hugging_face(model, run.batch.sequence_length, words.end, str(dtype).removeprefix("torch."))
    wanted = _with_copies(model)
    forms = [Form(p.theirs, p.shape, _dtype_of(p.ours, dtype)) for p in wanted]

    def tensors() -> Iterator[Tensor]:
        for ours, group in groupby(wanted, key=lambda place: place.ours):
            whole = stored.tensor(ours)
            for place in group:
                part = whole[: place.shape[0]] if place.expert is None else whole[place.expert]
                yield part.to(_dtype_of(ours, dtype))
            del part, whole  # before the next one is read

    with published(out) as folder:
        files = hf_shards.write(folder, forms, tensors(), shard_bytes)
        _carry(tokens.parent, folder)
        _write_json(folder / "config.json", described)
        if not (folder / "generation_config.json").exists():
            _write_json(folder / "generation_config.json", {"eos_token_id": words.end})
    return {
        "architecture": described["architectures"][0],
        "tensors": len(forms),
        "bytes": sum(form.nbytes for form in forms),
        "files": len(files),
    }


def _dtype_of(ours: str, dtype: torch.dtype) -> torch.dtype:
    """Buffers, the experts' balancing biases, stay fp32: bf16 would swallow their small steps."""
    return torch.float32 if ours.startswith("buffer/") else dtype


def _with_copies(model: DenseModel | DeepSeekModel) -> list[Place]:
    """What is exported: each extra depth's copies of the ends too, as in the published folders; no tied head."""
    found = places(model)
    originals = {place.theirs: place for place in found}
    for copy, original in copies(model).items():
        if copy != "lm_head.weight":
            found.append(originals[original]._replace(theirs=copy))
    return sorted(found, key=lambda place: place.ours)


# -------------------------------------------------------------------------------------------------------------- in


def import_folder(source: Path, out: Path, tokens: Path | None = None) -> dict[str, Any]:
    """Make the run folder `out` (run.toml, tokenizer, a checkpoint of step 0) from the Hugging Face folder `source`.

    The weights become fp32 masters, exactly. tokens: folder or tokenizer.json to use instead of the one in `source`.
    Returns what was made. Raises UserError for whatever is missing, damaged, of another shape or not supported.
    """
    model = _model_of(source / "config.json")
    shards = Shards(source)
    notes = []
    extra = f"model.layers.{model.layers}."
    if _depths(model) and not any(name.startswith(extra) for name in shards.forms):
        model = model.model_copy(update={"mtp_layers": 0})
        notes.append("the folder holds no weights for multi-token prediction: imported without it")
    wanted = {place.theirs: place for place in places(model)}
    _check(source, shards, wanted, copies(model))
    words = _tokenizer(tokens or source, model.vocab_size)

    with published(out) as folder:
        if tokens is None:
            _carry(source, folder)
        else:
            words.save(folder)
        run = _run(out, model)
        (folder / "run.toml").write_text(config.dump(run), encoding="utf-8")
        meta = {
            "progress": {"step": 0, "updates": 0, "tokens": 0, "skipped": 0, "skipped_in_row": 0},
            "run": config.dump(run),
            "data": None,
            "imported": str(source.absolute()),
            "layout": {"replicas": 1, "zero": 0},
        }
        (folder / "checkpoints").mkdir()
        _save(manifest.folder_of(folder / "checkpoints", 0), shards, wanted, meta)
    return {
        "architecture": to_hugging_face(model, 0, 0, "")["architectures"][0],
        "tensors": len(wanted),
        "vocabulary": f"{words.vocab_size:,} tokens, {model.vocab_size:,} rows",
        "notes": notes,
    }


def _model_of(file: Path) -> DenseModel | DeepSeekModel:
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(described, dict):
            raise ValueError("not an object")
        return from_hugging_face(described)
    except FileNotFoundError:
        raise UserError(f"{file.parent}: not a Hugging Face folder: it has no config.json") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: cannot be read ({error}): copy it again") from None


def _check(source: Path, shards: Shards, wanted: dict[str, Place], copied: dict[str, str]) -> None:
    """Every tensor that the model needs is there in its shape, and none that it would not use."""
    for name, place in wanted.items():
        if name not in shards.forms:
            raise UserError(f"{source}: tensor {name!r} is missing")
        if shards.forms[name].shape != place.shape:
            raise UserError(
                f"{source}: {name!r} has shape {shards.forms[name].shape}, config.json asks for {place.shape}"
            )
    for name in shards.forms:
        if name in copied:
            if not torch.equal(shards.tensor(name), shards.tensor(copied[name])):
                raise UserError(f"{source}: {name!r} differs from {copied[name]!r}: here the two are one")
        elif name not in wanted and not name.endswith("rotary_emb.inv_freq"):  # computed from the settings
            raise UserError(f"{source}: the model that config.json describes has no place for tensor {name!r}")


def _tokenizer(path: Path, rows: int) -> tokenizer.Tokenizer:
    try:
        words = tokenizer.load(path)
    except UserError as error:
        raise UserError(f"{error}; name another with --tokenizer") from None
    if words.vocab_size > rows:
        raise UserError(
            f"{path}: the tokenizer has {words.vocab_size} entries (its end of text included), the embedding {rows} "
            "rows: name another with --tokenizer"
        )
    return words


def _run(out: Path, model: DenseModel | DeepSeekModel) -> config.Run:
    """The imported run's settings: the defaults, but for the model, its tokenizer and the length of a sequence."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", out.absolute().name).lstrip("._-") or "imported"
    length = min(model.context or SEQUENCE, SEQUENCE)
    return config.Run(
        name=name,
        model=model,
        data=config.Data(tokenizer=str(out.absolute() / tokenizer.FILES[0])),
        batch=config.Batch(sequence_length=length),
    )


def _save(path: Path, shards: Shards, wanted: dict[str, Place], meta: dict[str, Any]) -> None:
    """A checkpoint with a piece for each of their tensors, read when it is written and not before."""
    state: dict[str, Entry] = {}
    sources: dict[MetadataIndex, Place] = {}
    for ours, group in groupby(wanted.values(), key=lambda place: place.ours):
        parts, pieces = list(group), []
        for part in parts:
            box = part.shape if part.expert is None else (1, *part.shape)
            piece = Piece((part.expert or 0,) + (0,) * (len(box) - 1), torch.empty(box, device="meta"))
            sources[MetadataIndex(ours, piece.offsets)] = part
            pieces.append(piece)
        state[ours] = Entry((len(parts), *box[1:]) if part.expert is not None else box, torch.float32, pieces)

    def read(index: MetadataIndex, out: Tensor) -> None:
        place = sources[index]
        out.view(place.shape).copy_(shards.tensor(place.theirs))

    temporary = manifest.hidden_name(path)
    temporary.mkdir()
    writer = Writer(temporary, path, 0, meta)
    writer.per_thread_copy_ahead = 0  # one tensor at a time, also where there is a GPU
    try:
        dcp.save(dict(state), storage_writer=writer, planner=_ReadLate(read), no_dist=True)
    except CheckpointException as failed:
        raise next(error for error, _ in failed.failures.values()) from None


class _ReadLate(SavePieces):
    """Gets each tensor when its turn comes to be written: `read(index, out)` fills it.

    DCP keeps every tensor until its file is complete, so those of one size share memory: what has been written may go.
    """

    def __init__(self, read: Callable[[MetadataIndex, Tensor], None]) -> None:
        super().__init__()
        self.read = read
        self.buffers: dict[int, Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        form = self.tensors[index]
        if form.numel() not in self.buffers:
            self.buffers[form.numel()] = torch.empty(form.numel())
        self.read(index, self.buffers[form.numel()])
        return self.buffers[form.numel()].view(form.shape)
