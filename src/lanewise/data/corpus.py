"""The parts of a run's data, wherever their tokens are: a token folder, a shard set on any store, Megatron's files.

A run whose data are not just one token folder has a folder of its own in the cache, with the tokenizer and

meta.json    parts: name, place and identity of each; vocab_size, end_of_text, identity as in token folders
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from lanewise import config
from lanewise.data import packing, store, tokenizer
from lanewise.data.formats import megatron
from lanewise.data.shards import ShardSet, is_shard_set
from lanewise.data.stores import configure
from lanewise.data.windows import Documents, Stream, Tokens, Windows
from lanewise.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """One part: its tokens by side, and the folder (and first letters) where plans over them may be kept."""

    name: str
    place: str
    sides: Mapping[str, Tokens]
    plans: Path

    def windows(self, side: store.Side, pack: str, length: int, filler: int) -> Windows:
        tokens, plans = self.sides[side], self.plans / side
        if pack == "stream":
            return Stream(tokens, length, filler)
        if pack == "document":
            return Documents(tokens, length, filler, plans)
        return packing.Packed(tokens, length, filler, pack, plans)


def holds_tokens(source: str) -> bool:
    """Whether a source is read in place: it holds tokens, not files to tokenize."""
    return is_shard_set(source) or megatron.is_megatron(source)


def describe(places: Mapping[str, str], held_out: float, words: tokenizer.Tokenizer) -> dict[str, Any]:
    """The meta.json of a folder of parts."""
    parts = [{"name": name, "place": place, "identity": _identity(place, held_out)} for name, place in places.items()]
    identity: dict[str, Any] = {"tokenizer": xxhash.xxh3_128_hexdigest(words.inner.to_str().encode())}
    if list(places) == [""]:
        identity |= parts[0]["identity"]  # type: ignore[arg-type]
    else:
        identity["parts"] = {part["name"]: part["identity"] for part in parts}
    return {
        "format": store.FORMAT,
        "parts": parts,
        "held_out": held_out,
        "vocab_size": words.vocab_size,
        "end_of_text": words.end,
        "identity": identity,
    }


def write(folder: Path, meta: dict[str, Any], words: tokenizer.Tokenizer) -> None:
    """Fills and seals an empty folder."""
    words.save(folder)
    store.seal(folder, dict(meta), tokenizer.FILES)


def open_parts(folder: Path, data: config.Data) -> list[Corpus]:
    """The parts of a prepared folder. Raises UserError if one is not what it was when it was prepared."""
    configure(data)
    meta = store.read_meta(folder)
    if "parts" not in meta:
        return [Corpus("", str(folder), _token_folder(folder), folder)]
    return [_open(part, meta["held_out"], folder, data.check) for part in meta["parts"]]


def _open(part: dict[str, Any], held_out: float, folder: Path, check: bool) -> Corpus:
    place = part["place"]
    if (changed := difference(part["identity"], _identity(place, held_out))) is not None:
        raise UserError(f"{place}: {changed} since the run was started; restore it, or start again")
    mark = xxhash.xxh3_64_hexdigest(repr(part["identity"]).encode())
    if is_shard_set(place):
        shards = ShardSet(place)
        return Corpus(part["name"], place, {side: shards.side(side, check) for side in store.SIDES}, folder / mark)
    if megatron.is_megatron(place):
        return Corpus(part["name"], place, megatron.sides(place, held_out), folder / mark)
    return Corpus(part["name"], place, _token_folder(Path(place)), Path(place))


def _token_folder(folder: Path) -> dict[str, Tokens]:
    if (damage := store.damage(folder)) is not None:
        raise UserError(f"{damage}; delete {folder} and start again to rebuild it")
    return {side: store.FolderTokens(folder, side) for side in store.SIDES}


def _identity(place: str, held_out: float) -> dict[str, Any]:
    """Of a part's tokens: equal, or other data."""
    if is_shard_set(place):
        return ShardSet(place).identity
    if megatron.is_megatron(place):
        return {side: tokens.identity for side, tokens in megatron.sides(place, held_out).items()}
    found = dict(store.read_meta(Path(place))["identity"])
    del found["tokenizer"]
    return found


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """In a few words how two identities differ, or None. Parts that came or went are no difference."""
    for name in set(old.get("parts", ())) & set(new.get("parts", ())):
        if (found := difference(old["parts"][name], new["parts"][name])) is not None:
            return f"{name}: {found}"
    if ("parts" in old) != ("parts" in new):
        return "it was one source" if "parts" in new else "it was a mixture"
    shards = [dict(each.get("shards", ())) for each in (old, new)]
    if shards[0] != shards[1]:
        return _shard_difference(*shards)
    for key in ("tokenizer", "train", "held"):
        if old.get(key) != new.get(key):
            what = {"tokenizer": "the tokenizer", "train": "the training tokens", "held": "the held-out tokens"}[key]
            return f"{what} changed"
    return None


def _shard_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    kinds = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and new[name] != old[name]],
    }
    told = [
        f"{kind}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for kind, names in kinds.items()
        if names
    ]
    return f"its shards changed ({'; '.join(told)})"
