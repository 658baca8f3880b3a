"""Text to a folder of tokens, once: later runs on the same content find the folder in the cache.

    cache/<content key>/        what store.py describes; the key stands for everything that defines the tokens
    cache/seen/<quick key>      the content key that files of these paths, sizes and times had: no text is read again
    cache/.building-*           being written; renamed when whole, so a build that dies leaves no half folder

A mixture, and a source that holds tokens already, get a folder too: the tokenizer, and where the tokens of each part
are (see corpus.py).

There are no locks. Of two builds of one folder at once both do the work, and the second to finish takes the first's.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from lanewise import config
from lanewise.data import build, corpus, live, sources, store, tokenizer
from lanewise.data.encode import policy, trains
from lanewise.data.shards import ShardSet, is_shard_set
from lanewise.data.stores import configure
from lanewise.data.stores.atomic import sync
from lanewise.errors import UserError

DAY = 86_400  # seconds


def prepare(data: config.Data, progress: Callable[[str], None] = lambda message: None) -> Path:
    """The folder of tokens for `data`, built if the cache has none. `progress` gets a line now and then.

    Safe to call from several processes and hosts at once. Raises UserError on anything wrong with the source, the
    tokenizer or the room in the cache.
    """
    configure(data)
    if data.mix and any(live.is_stream(part.source) for part in data.mix):
        raise UserError("data.mix: a live source cannot be mixed: name it as data.source")
    if not data.mix and live.is_stream(data.source):
        words = live.words_of(data)
        return _place(data, live.describe(data, words), words)
    if data.mix or corpus.holds_tokens(data.source):
        _check_used(data)
        return _mixture(data, progress)
    if data.dedup != "none":
        raise UserError("data.dedup: only `lanewise data build` looks for duplicates: build a set, and train on that")
    return _kept(data, [data.source], "tokens", build.write, progress)


# What says how text becomes tokens, and means nothing to data that is tokens already.
OF_TEXT = ("min_chars", "filter")


def _check_used(data: config.Data) -> None:
    """A setting that would do nothing is refused."""
    fields = config.Data.model_fields
    if data.dedup == "none" and any(not corpus.holds_tokens(source) for _, source, _ in data.parts):
        return
    for key in (*OF_TEXT, "dedup"):
        if getattr(data, key) != fields[key].default:
            raise UserError(f"data.{key}: is for making tokens of text: give it to `lanewise data build`")


def _mixture(data: config.Data, progress: Callable[[str], None]) -> Path:
    """A folder that says where the parts are, which all have one tokenizer."""
    texts = [source for _, source, _ in data.parts if not corpus.holds_tokens(source)]
    words = _shared_tokenizer(data, texts, progress)
    plain = data
    if texts:
        home = _place(data, {"tokenizer": words.inner.to_str(), "end": words.end_text}, words)
        plain = data.model_copy(update={"mix": (), "tokenizer": str(home)})
    places: dict[str, str] = {}
    empty: list[str] = []
    for name, source, _ in data.parts:
        if source in texts:
            try:
                places[name] = str(prepare(plain.model_copy(update={"source": source}), progress))
            except build.NoText as reason:
                if len(data.parts) - len(empty) == 1:
                    raise
                empty.append(name)
                progress(f"{name}: {str(reason).removeprefix('data.source: ')}")
        else:
            places[name] = source if "://" in source else os.path.abspath(os.path.expanduser(source))
    return _place(data, corpus.describe(places, data.held_out, words), words)


def _shared_tokenizer(data: config.Data, texts: list[str], progress: Callable[[str], None]) -> tokenizer.Tokenizer:
    """The tokenizer of the shard sets among the parts; without any, the one asked for, made of all texts."""
    owned = {source: ShardSet(source).tokenizer for _, source, _ in data.parts if is_shard_set(source)}
    asked = None
    if not trains(data):
        asked = tokenizer.load(data.tokenizer)
    elif data.tokenizer == "ids":
        asked = tokenizer.ids(data.vocab_size)
    elif not owned and texts:
        asked = tokenizer.load(_kept(data, texts, "tokenizer", build.write_tokenizer, progress))
    elif not owned:
        raise UserError(
            f"data.source: {data.parts[0][1]} holds token ids; set data.tokenizer to the tokenizer they are of, or to "
            "'ids' with data.vocab_size"
        )
    words = asked or next(iter(owned.values()))
    for source, its_words in owned.items():
        if its_words.inner.to_str() != words.inner.to_str():
            remedy = (
                "leave data.tokenizer out"
                if asked
                else "build one of the sets again with data.tokenizer=OTHER_SET/tokenizer.json"
            )
            raise UserError(f"{source} was built with another tokenizer: {remedy}")
    return words


def _place(data: config.Data, meta: dict[str, Any], words: tokenizer.Tokenizer) -> Path:
    """A folder of the cache with a tokenizer and `meta`, which with the tokenizer is its key."""
    cache = Path(data.cache).expanduser()
    folder = cache / xxhash.xxh3_128_hexdigest(ascii((store.FORMAT, meta, words.inner.to_str())).encode())
    with _keeping(cache):
        if store.damage(folder) is not None:
            _build(folder, lambda building: corpus.write(building, meta, words))
    return folder


Write = Callable[[list[sources.File], config.Data, Path, Callable[[str], None]], None]


def _kept(data: config.Data, names: Sequence[str], purpose: str, write: Write, progress: Callable[[str], None]) -> Path:
    """The folder that `write` makes from the files that `names` name, from the cache if it is there."""
    files = _find(names)
    quick = _quick_key(files, data, purpose)
    cache = Path(data.cache).expanduser()
    with _keeping(cache):
        with suppress(FileNotFoundError):
            folder = cache / (cache / "seen" / quick).read_text(encoding="ascii", errors="replace")
            if store.damage(folder) is None:
                return folder
        folder = cache / _content_key(files, data, purpose)
        damage = store.damage(folder)
        if damage and folder.exists():
            progress(f"{damage}: building it again")

        def fill(building: Path) -> None:
            write(files, data, building, progress)
            if _quick_key(_find(names), data, purpose) != quick:
                what = ", ".join(names)
                raise UserError(f"data.source: {what} changed while it was read; start again when it is complete")

        if damage:
            _build(folder, fill)
        _remember(cache / "seen" / quick, folder.name, files)
    return folder


def _find(names: Sequence[str]) -> list[sources.File]:
    return [file for name in names for file in sources.find(name)]


@contextmanager
def _keeping(cache: Path) -> Iterator[None]:
    """Errors of the cache in the user's words; those of the source are UserErrors already."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space there" if full else "make it writable"
        raise UserError(f"{cache}: cannot keep tokens there ({e.strerror or e}); {remedy}, or set data.cache") from None


# ------------------------------------------------------------------------------------------------------------ keys


def _settings(data: config.Data) -> str:
    """What defines the tokens besides the content of the files."""
    kind = data.tokenizer if trains(data) else "file"
    size = data.vocab_size if kind in ("bpe", "ids") else 0
    template = Path(data.chat_template).expanduser()
    chat = (data.learn, template.read_text(encoding="utf-8") if template.is_file() else data.chat_template)
    rest = (data.min_chars, data.filter, chat)
    return repr((store.FORMAT, data.text_field, kind, size, policy(data), data.held_out, rest))


def _all(files: list[sources.File], data: config.Data) -> list[sources.File]:
    return files if trains(data) else files + tokenizer.files(data.tokenizer)


def _quick_key(files: list[sources.File], data: config.Data, purpose: str) -> str:
    entries = [(os.path.abspath(file.path), file.name, file.size, file.times) for file in _all(files, data)]
    return xxhash.xxh3_128_hexdigest(ascii((purpose, _settings(data), entries)).encode())


def _content_key(files: list[sources.File], data: config.Data, purpose: str) -> str:
    contents = []
    for file in _all(files, data):
        content = xxhash.xxh3_128()
        with sources.reading(file.path), open(file.path, "rb") as stream:
            while block := stream.read(2**20):
                content.update(block)
        contents.append((file.name, content.hexdigest()))
    return xxhash.xxh3_128_hexdigest(ascii((purpose, _settings(data), contents)).encode())


def _remember(seen: Path, key: str, files: list[sources.File]) -> None:
    """Unless a file is so new that another write could leave its size and time as they are (as in git's index)."""
    if max(max(file.times) for file in files) / 1e9 < time.time() - 2:
        seen.parent.mkdir(exist_ok=True)
        new = seen.with_name(f".{uuid.uuid4().hex}")
        new.write_text(key, encoding="ascii")
        os.replace(new, seen)


# ------------------------------------------------------------------------------------------------------ publishing


def _build(folder: Path, fill: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    building = folder.with_name(f".building-{uuid.uuid4().hex}")
    building.mkdir()
    try:
        fill(building)
        _publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _publish(building: Path, folder: Path) -> None:
    while True:
        try:
            os.rename(building, folder)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if store.damage(folder) is None:
                return  # another process was first
            aside = building.with_name(f"{building.name}-damaged")
            with suppress(FileNotFoundError):  # another process was first at putting it aside
                os.rename(folder, aside)
                shutil.rmtree(aside, ignore_errors=True)
        else:
            sync(folder.parent)
            return


def _sweep(cache: Path) -> None:
    """Removes what builds that were killed left behind: nothing in it was written for a day."""
    for old in cache.glob(".building-*"):
        with suppress(OSError):
            if max(path.stat().st_mtime for path in [old, *old.iterdir()]) < time.time() - DAY:
                shutil.rmtree(old, ignore_errors=True)
