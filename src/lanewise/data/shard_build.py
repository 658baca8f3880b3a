"""`lanewise data build`: sources to a shard set, on all cores, resumable.

The files are dealt into tasks, in order; each task writes its own shards and, when they are whole, task-NNNNN.json
with the rows of the index. Tasks that have one are not done again. At the end the rows become the set's index, the
manifest is written last, and the task files go. What a set holds hangs on its sources and settings alone, not on the
number of processes or on how often the build was killed.
"""

import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from tokenizers import Tokenizer

from lanewise import config
from lanewise.data import build, formats, sources, store, tokenizer
from lanewise.data.dedup import duplicates, signatures
from lanewise.data.encode import Encoding, Extract, trains
from lanewise.data.processes import leave_with_parent
from lanewise.data.shard_writer import INDEX, ShardWriter
from lanewise.data.shards import FORMAT, MANIFEST, PER_TASK, ShardSet, shard_name
from lanewise.data.stores import Store, configure, open_store
from lanewise.errors import UserError

TASK = 64 * 2**20  # bytes of sources in a task, at most; of small sources less, so that there is work for all cores
TASKS = 256
PLAN = "build.json"
DEFINING = {
    *("text_field", "tokenizer", "vocab_size", "learn", "chat_template", "errors"),
    *("min_chars", "filter", "dedup", "held_out"),
}  # settings that say what a set holds

Say = Callable[[str], None]


def build_shards(names: Sequence[str], data: config.Data, out: str, workers: int, say: Say) -> dict[str, Any]:
    """Makes, or goes on making, the shard set at `out`; returns its manifest.

    Raises UserError if `out` holds another set or another build, or on anything wrong with the sources.
    """
    files = [file for name in names for file in sources.find(name)]
    if any(file.path.suffix == ".arrow" and (file.path.parent / MANIFEST).exists() for file in files):
        raise UserError("these are shards already: train on them with data.source")
    configure(data)
    target = open_store(out)
    plan = _plan(files, data)
    if MANIFEST in target.list(MANIFEST):
        shards = ShardSet(out)
        if shards.manifest["plan"] != plan:
            raise UserError(f"{out} holds a set of other sources or settings: choose another --out")
        say(f"{out} is complete: nothing to do")
        return shards.manifest
    words = _tokenizer(files, data, target, plan, out, say)
    tasks = list(_tasks(files))
    Encoding(data, words)  # refuses what is wrong with the settings here rather than in each process
    try:
        rows = _Build(data, words, out, tasks, say).run(workers)
    except BrokenProcessPool:
        raise UserError(
            "a worker of the build was killed (out of memory?): start it again to go on, perhaps with fewer --workers"
        ) from None
    return _seal(out, plan, words, rows, say)


def _plan(files: list[sources.File], data: config.Data) -> str:
    """Equal for equal sources and settings: a build goes on only with its own."""
    template = Path(data.chat_template).expanduser()
    settings = data.model_dump(include=DEFINING)
    chat = template.read_text(encoding="utf-8") if data.chat_template and template.is_file() else ""
    words = [] if trains(data) else [store.digest(file.path) for file in tokenizer.files(data.tokenizer)]
    entries = [(file.name, file.size, file.times[0]) for file in files]
    return xxhash.xxh3_128_hexdigest(ascii((FORMAT, settings, chat, words, entries)).encode())


def _tokenizer(
    files: list[sources.File], data: config.Data, target: Store, plan: str, out: str, say: Say
) -> tokenizer.Tokenizer:
    """Made once, and kept in the set from the start: a build that goes on must not make another one."""
    begun = PLAN in target.list(PLAN)
    if begun and json.loads(target.read(PLAN, 0, target.size(PLAN)))["plan"] != plan:
        raise UserError(f"{out} holds a build of other sources or settings: remove it, or choose another --out")
    if begun:
        raw = [target.read(name, 0, target.size(name)).decode() for name in tokenizer.FILES]
        return tokenizer.parse(out, *raw)
    if target.list():
        raise UserError(f"{out} holds other files: choose an empty --out")
    words = build.make_tokenizer(files, data, say)
    with tempfile.TemporaryDirectory() as folder:
        words.save(Path(folder))
        for name in tokenizer.FILES:
            target.write(name, Path(folder) / name)
    target.write(PLAN, json.dumps({"plan": plan}).encode())
    return words


def _tasks(files: list[sources.File]) -> Iterator[list[Extract]]:
    """Files in order, large ones in parts where their format allows it."""
    most = min(TASK, max(TASK // 16, sum(file.size for file in files) // TASKS))
    task: list[Extract] = []
    size = 0
    for file in files:
        parts = formats.parts(file.path, file.name, most) if file.size > most else [None]
        for part in parts:
            share = file.size // len(parts) + 4096  # a file takes time itself
            if task and size + share > most:
                yield task
                task, size = [], 0
            task.append((file, part))
            size += share
    if task:
        yield task


# ---------------------------------------------------------------------------------------------------------- the work


class _Build:
    """The tasks, and what each process needs to do one."""

    def __init__(
        self, data: config.Data, words: tokenizer.Tokenizer, out: str, tasks: list[list[Extract]], say: Say
    ) -> None:
        self.data, self.out, self.tasks, self.say = data, out, tasks, say
        names = (words.inner.to_str(), words.end_text, words.begin_text, words.chat_template)
        self.setup = (data, names, out, dict(os.environ))

    def run(self, workers: int) -> list[dict[str, Any]]:
        """The results of all tasks, in order."""
        target = open_store(self.out)
        done = {int(name[5:-5]) for name in target.list("task-")}
        if done:
            self.say(f"{len(done)} of {len(self.tasks)} tasks are whole: going on with the others")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.started, self.told, self.tokens = time.monotonic(), time.monotonic(), 0
        size = max(1, min(workers, len(self.tasks)))
        with ProcessPoolExecutor(size, context, initializer=_begin, initargs=self.setup) as pool:
            drop = self._duplicates(pool) if self.data.dedup != "none" else {}
            waiting = {
                pool.submit(_work, number, task, drop.get(number, frozenset())): number
                for number, task in enumerate(self.tasks)
                if number not in done
            }
            self._follow(waiting, len(done))
        names = [f"task-{number:05}.json" for number in range(len(self.tasks))]
        return [json.loads(target.read(name, 0, target.size(name))) for name in names]

    def _duplicates(self, pool: ProcessPoolExecutor) -> dict[int, frozenset[int]]:
        """A first pass over the texts: by task, the documents that are like an earlier one."""
        self.say("looking for duplicates")
        near = self.data.dedup == "near"
        found = pool.map(_sign, self.tasks, [near] * len(self.tasks))
        return dict(enumerate(duplicates(found)))

    def _follow(self, waiting: dict["Future[int]", int], done: int) -> None:
        try:
            for finished in as_completed(waiting):
                self.tokens += finished.result()
                done += 1
                if time.monotonic() > self.told + 5 or done == len(self.tasks):
                    self.told = time.monotonic()
                    rate = self.tokens / (self.told - self.started)
                    self.say(f"{done} of {len(self.tasks)} tasks, {self.tokens:,} tokens, {rate:,.0f} tokens/s")
        except BaseException:  # Ctrl-C too: tasks under way are finished, and count when the build goes on
            for future in waiting:
                future.cancel()
            raise


_encoding: Encoding
_out: Store


def _begin(data: config.Data, words: tuple[str, str, str, str], out: str, environment: dict[str, str]) -> None:
    """Once in each process of the build. What forks them may have started in another environment."""
    os.environ.update(environment)
    global _encoding, _out  # noqa: PLW0603 - what a process of the pool is
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    leave_with_parent()
    configure(data)
    raw, *rest = words
    _encoding = Encoding(data, tokenizer.Tokenizer(Tokenizer.from_str(raw), *rest))
    _out = open_store(out)


def _sign(task: list[Extract], near: bool) -> np.ndarray:
    return signatures(_encoding.texts(task), near)


def _work(number: int, task: list[Extract], drop: frozenset[int]) -> int:
    """Do a task; the tokens it wrote."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        writers: dict[store.Side, ShardWriter] = {}
        pieces = _encoding(task, counts, drop)
        for _, parts in groupby(pieces, key=lambda piece: piece.document):
            first = next(parts)
            if first.side not in writers:
                is_chat = first.learned is not None
                writers[first.side] = ShardWriter(
                    _out, Path(scratch), first.side, number, _encoding.dtype, _encoding.words.end, is_chat
                )
            writers[first.side].add(first.id, first.file, chain([first], parts))  # noqa: B031 - in their order
        result = {side: writer.close() for side, writer in writers.items()}
    _out.write(f"task-{number:05}.json", json.dumps({"sides": result, "counts": counts}).encode())
    return sum(row[2] for side in result.values() for row in side["index"])


# ---------------------------------------------------------------------------------------------------------- the end


def _seal(out: str, plan: str, words: tokenizer.Tokenizer, rows: list[dict[str, Any]], say: Say) -> dict[str, Any]:
    target = open_store(out)
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["counts"])
    manifest: dict[str, Any] = {"format": FORMAT, "plan": plan}
    files: dict[str, dict[str, Any]] = {}
    totals: dict[str, dict[str, int]] = {"documents": {}, "tokens": {}}
    hashes: dict[str, str] = {}
    flags = set()
    for side in store.SIDES:
        parts = [row["sides"][side] for row in rows if side in row["sides"]]
        index = np.array([batch for part in parts for batch in part["index"]], np.int64).reshape(-1, len(INDEX))
        lengths = np.concatenate([[0], *(part["lengths"] for part in parts)]).astype(np.int64)
        table = pa.table([pa.array(column) for column in index.T], INDEX)
        starts = pa.table({"start": pa.array(np.cumsum(lengths))})
        for name, content in ((f"{side}.index.arrow", table), (f"{side}.starts.arrow", starts)):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, content.schema) as writer:
                writer.write_table(content, max_chunksize=max(1, len(content)))
            raw = sink.getvalue()
            target.write(name, raw.to_pybytes())
            files[name] = {"bytes": raw.size, "xxh3": xxhash.xxh3_128_hexdigest(raw)}
        totals["documents"][side], totals["tokens"][side] = len(lengths) - 1, int(lengths.sum())
        flags |= {bool(at) for at in index[:, 4]}
        for shard, batches in groupby(index.tolist(), key=lambda batch: batch[0]):
            whole = xxhash.xxh3_64(repr(list(batches)).encode())
            hashes[shard_name(side, *divmod(shard, PER_TASK))] = whole.hexdigest()
    if not any(totals["documents"].values()):
        raise UserError(f"no text in these sources ({', '.join(build.notes(counts)) or 'no documents'}); name others")
    if len(flags) > 1:
        raise UserError("some of the sources are chats and some are not: build a set of each, and mix them")
    for name in tokenizer.FILES:
        raw_words = target.read(name, 0, target.size(name))
        files[name] = {"bytes": len(raw_words), "xxh3": xxhash.xxh3_128_hexdigest(raw_words)}
    manifest |= {
        "schema": {"id": "string", "source": "string", "tokens": f"list<{_encoding_dtype(words)}>"},
        **totals,
        "notes": {kind: counts[kind] for kind in build.NOTED},
        "learned": flags == {True},
        "vocab_size": words.vocab_size,
        "end_of_text": words.end,
        "dtype": np.dtype(_encoding_dtype(words)).str,
        "shards": hashes if len(hashes) <= MOST_NAMED else {},
        "shard_count": len(hashes),
        "largest_shard": max(target.size(name) for name in hashes),
        "files": files,
    }
    target.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    if "://" not in out:  # a store keeps them: they do no harm
        for name in [PLAN, *target.list("task-")]:
            (Path(out).expanduser() / name).unlink()
    told = [f"{sum(totals['documents'].values()):,} documents", f"{sum(totals['tokens'].values()):,} tokens"]
    say(", ".join([*told, f"{len(hashes):,} shards", *build.notes(counts)]))
    return manifest


MOST_NAMED = 2000  # shards whose hashes stand in the manifest, so that a difference can be named


def _encoding_dtype(words: tokenizer.Tokenizer) -> str:
    return "uint16" if words.vocab_size <= 2**16 else "uint32"
