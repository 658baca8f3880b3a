"""The data engine against others on the same tokens, and its own figures.

    python benchmarks/feed.py                                  ours and what torch has
    python benchmarks/feed.py --peers PEERS/bin/python         and mosaicml-streaming, litdata, webdataset, from there
    python benchmarks/feed.py --only build,resume,store

Every contender reads the same tokens in an own process: windows of T tokens in shuffled order, batches of B, as int64
tensors of tokens and labels. The limit is copying as many bytes in memory. Goal: 5x the best of the peers, and half
of the loop over a memory map.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

T, B = 2048, 8
SECONDS = 4.0  # each contender is measured for
VOCABULARY = 50_000


def tokens_of(folder: Path) -> np.ndarray:
    return np.memmap(folder / "tokens.bin", "<u2", "r")


# ------------------------------------------------------------------------------------------------------- contenders
# Each yields batches for ever, or to the end of an epoch; `skip` batches were read before the restart.


def ours(folder: Path, skip: int) -> Iterator[Any]:
    import torch

    from lanewise import config
    from lanewise.data.dataset import Dataset
    from lanewise.data.prepare import prepare
    from lanewise.data.stages import Feed

    data = config.Data(source=str(folder / "set"), cache=str(folder / "cache"))
    batch = config.Batch(lanes=1, size=B, sequence_length=T)
    feed = Feed(Dataset(prepare(data), data, batch, seed=0), range(1), data, batch)
    step = skip
    while True:
        step += 1
        slot = feed.slot(step, 0, 0)
        yield torch.from_numpy(slot.tokens_BT), torch.from_numpy(slot.labels_BT)


def memmap_loop(folder: Path, skip: int) -> Iterator[Any]:
    import torch

    tokens = tokens_of(folder)
    order = np.random.default_rng(0).permutation((len(tokens) - 1) // T)
    for first in range(skip * B, len(order) - B, B):
        rows = np.stack([tokens[i * T : i * T + T + 1] for i in order[first : first + B]]).astype(np.int64)
        yield torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])


def dataloader(folder: Path, skip: int, workers: int = 2) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, Subset

    order = torch.randperm((len(tokens_of(folder)) - 1) // T, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(
        Subset(_Rows(folder), order[skip * B :].tolist()), B, num_workers=workers, multiprocessing_context="spawn"
    )
    for rows in loader:
        yield rows[:, :-1], rows[:, 1:]


class _Rows:
    def __init__(self, folder: Path) -> None:
        self.folder, self.tokens = folder, tokens_of(folder)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // T

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[i * T : i * T + T + 1].astype(np.int64)

    def __getstate__(self) -> Path:
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        self.__init__(folder)  # type: ignore[misc]


def streaming(folder: Path, skip: int) -> Iterator[Any]:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=B)
    loader = StreamingDataLoader(dataset, batch_size=B, num_workers=0)
    if skip:
        state = dataset.state_dict(skip * B, from_beginning=True)
        loader.load_state_dict({**state, "epoch": 0, "sample_in_epoch": skip * B})
    for batch in loader:
        rows = batch["text"].long()
        yield rows[:, :-1], rows[:, 1:]


def litdata(folder: Path, skip: int) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    dataset = StreamingDataset(str(folder / "lit"), item_loader=TokensLoader(block_size=T + 1), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=B, num_workers=0)
    if skip:
        dataset.load_state_dict(dataset.state_dict(skip * B, 0, B))
    for narrow in loader:
        rows = narrow.long()
        yield rows[:, :-1], rows[:, 1:]


def webdataset(folder: Path, skip: int) -> Iterator[Any]:
    import torch
    import webdataset as wds

    urls = sorted(str(path) for path in (folder / "tar").glob("*.tar"))
    found = wds.WebDataset(urls, shardshuffle=len(urls), seed=0).shuffle(1000).decode().to_tuple("npy").batched(B)
    for number, (narrow,) in enumerate(found):
        if number >= skip:  # it has no other way to go on in mid-epoch
            rows = torch.from_numpy(np.asarray(narrow).astype(np.int64))
            yield rows[:, :-1], rows[:, 1:]


def memory_copy(folder: Path, skip: int) -> Iterator[Any]:
    source, target = np.ones((2, B, T), np.int64), np.empty((2, B, T), np.int64)
    while True:
        np.copyto(target, source)
        yield target[0], target[1]


OWN = {"lanewise": ours, "memmap loop": memmap_loop, "DataLoader, 2 workers": dataloader, "memory copy": memory_copy}
PEERS: dict[str, Callable[[Path, int], Iterator[Any]]] = {
    "mosaicml-streaming": streaming,
    "litdata": litdata,
    "webdataset": webdataset,
}


def measure(name: str, folder: Path, skip: int) -> dict[str, float]:
    """Tokens/s after the first batch, and seconds to it from before the imports of the contender."""
    began = time.perf_counter()
    batches = (OWN | PEERS)[name](folder, skip)
    tokens, labels = next(batches)
    assert tuple(tokens.shape) == tuple(labels.shape) == (B, T)
    first = time.perf_counter() - began
    if name in PEERS or name == "lanewise":
        assert (np.asarray(tokens)[:, 1:] == np.asarray(labels)[:, :-1]).all()
    began, count = time.perf_counter(), 0
    for _ in batches if not skip else ():
        count += 1
        if time.perf_counter() - began > SECONDS:
            break
    rate = count * B * T / (time.perf_counter() - began)
    return {"rate": rate, "first": first, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


# ------------------------------------------------------------------------------------------------------- their files


def write_own(folder: Path, count: int) -> None:
    from lanewise import config
    from lanewise.data.shard_build import build_shards

    rng = np.random.default_rng(0)
    with open(folder / "tokens.bin", "wb") as file:
        for _ in range(count // 2**20):
            file.write(rng.integers(0, VOCABULARY, 2**20).astype("<u2").data)
    import pyarrow as pa

    rows = tokens_of(folder).reshape(-1, 4096)
    with pa.ipc.new_file(str(folder / "rows.arrow"), pa.schema({"text": pa.list_(pa.uint16())})) as writer:
        for first in range(0, len(rows), 1024):
            flat = np.ascontiguousarray(rows[first : first + 1024]).reshape(-1)
            bounds = pa.array(np.arange(0, len(flat) + 1, 4096), pa.int32())
            writer.write_batch(pa.record_batch({"text": pa.ListArray.from_arrays(bounds, pa.array(flat))}))
    data = config.Data(tokenizer="ids", vocab_size=VOCABULARY, held_out=0)
    build_shards([str(folder / "rows.arrow")], data, str(folder / "set"), 2, lambda text: None)


def write_peers(folder: Path) -> None:
    import tarfile
    from io import BytesIO

    from litdata import TokensLoader, optimize
    from streaming import MDSWriter

    tokens = tokens_of(folder)
    rows = [tokens[i * T : i * T + T + 1] for i in range((len(tokens) - 1) // T)]
    with MDSWriter(out=str(folder / "mds"), columns={"text": f"ndarray:uint16:{T + 1}"}) as writer:
        for row in rows:
            writer.write({"text": np.array(row)})
    whole = TokensLoader(T + 1)
    optimize(_lit_rows, [str(folder)], str(folder / "lit"), chunk_bytes="64MB", item_loader=whole, num_workers=1)
    (folder / "tar").mkdir()
    for first in range(0, len(rows), 2048):
        with tarfile.open(folder / "tar" / f"{first:07}.tar", "w") as tar:
            for number, row in enumerate(rows[first : first + 2048], start=first):
                raw = BytesIO()
                np.save(raw, np.array(row))
                info = tarfile.TarInfo(f"{number:07}.npy")
                info.size = raw.tell()
                raw.seek(0)
                tar.addfile(info, raw)


def _lit_rows(folder: str) -> Iterator[Any]:
    import torch

    tokens = tokens_of(Path(folder))
    for i in range((len(tokens) - 1) // T):
        yield torch.from_numpy(np.array(tokens[i * T : i * T + T + 1]).astype(np.int32))


def race(folder: Path, count: int, peers: str | None) -> None:
    write_own(folder, count)
    contenders = [(name, sys.executable) for name in OWN]
    if peers:
        subprocess.run([peers, __file__, "--write", str(folder)], check=True, stdout=subprocess.DEVNULL)
        contenders += [(name, peers) for name in PEERS]
    middle = count // T // B // 2
    print(f"{'':24}{'tokens/s':>14}{'first batch':>13}{'resumed':>10}{'peak RSS':>10}")
    found = {}
    for name, python in contenders:
        runs = []
        for skip in (0, middle):
            words = [python, __file__, "--measure", name, "--skip", str(skip), "--write", str(folder)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            runs.append(json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None)
            if runs[-1] is None:
                print(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}")
        if runs[0]:
            again = f"{runs[1]['first']:>9.2f}s" if runs[1] else f"{'-':>10}"
            print(f"{name:24}{runs[0]['rate']:>14,.0f}{runs[0]['first']:>12.2f}s{again}{runs[0]['rss']:>7,.0f} MB")
            found[name] = runs[0]["rate"]
    best = max((found[name] for name in PEERS if name in found), default=None)
    print(f"lanewise / memmap loop: {found['lanewise'] / found['memmap loop']:.2f} (goal: 0.5)")
    if best:
        print(f"lanewise / best of the peers: {found['lanewise'] / best:.1f} (goal: 5)")


# -------------------------------------------------------------------------------------------------------- own figures


def resume(folder: Path) -> None:
    """The first batch at sample 10^9 of 10^12 samples in 100,000 shards: one sparse file under as many names."""
    code = Path(__file__).with_name("feed_huge.py")
    subprocess.run([sys.executable, str(code), str(folder / "huge"), "make"], check=True)
    subprocess.run([sys.executable, str(code), str(folder / "huge"), "read"], check=True)


def build(folder: Path) -> None:
    """`data build` on all cores against the bare tokenizer on all cores, on the same text."""
    import multiprocessing

    from tokenizers import ByteLevelBPETokenizer

    from lanewise import config
    from lanewise.data import sources
    from lanewise.data.shard_build import build_shards

    files = sources.find("python")
    text = [file.path.read_text(encoding="utf-8", errors="replace") for file in files]
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as out:
        for _ in range(2):
            for document in text:
                out.write(json.dumps({"text": document}) + "\n")
    data = config.Data(source=str(folder / "corpus.jsonl"), vocab_size=8192)
    words = ByteLevelBPETokenizer()  # GPT-2's kind: for its own, data build has a faster way, which would flatter it
    words.train_from_iterator(text[::10], vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False)
    (folder / "words").mkdir()
    words.save(str(folder / "words" / "tokenizer.json"))
    cores = len(os.sched_getaffinity(0))
    megabytes = sum(len(document.encode()) for document in text) * 2 / 1e6
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(cores, _load, (str(folder / "words"),)) as pool:
        pool.map(_encode, [text[i::8] for i in range(8)] * 2, chunksize=1)
        bare = megabytes / (time.perf_counter() - began)
    began = time.perf_counter()
    data = data.model_copy(update={"tokenizer": str(folder / "words")})
    build_shards([str(folder / "corpus.jsonl")], data, str(folder / "built"), cores, lambda text: None)
    made = megabytes / (time.perf_counter() - began)
    print(f"data build {made:.1f} MB/s, bare tokenizer {bare:.1f} MB/s on {cores} cores: {made / bare:.2f} (goal: 0.9)")


_words: Any = None


def _load(path: str) -> None:
    global _words  # noqa: PLW0603
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    _words = Tokenizer.from_file(f"{path}/tokenizer.json")


def _encode(texts: list[str]) -> int:
    return sum(len(found.ids) for found in _words.encode_batch_fast(texts, add_special_tokens=False))


def wait_share(folder: Path) -> None:
    """Reading from a store of 50 MB/s with 20 ms to the first byte, while training takes 200 ms a step."""
    from lanewise import config
    from lanewise.data.dataset import Dataset
    from lanewise.data.prepare import prepare
    from lanewise.data.shards import ShardTokens
    from lanewise.data.stages import Feed

    data = config.Data(source=str(folder / "set"), cache=str(folder / "cache"))
    batch = config.Batch(lanes=8, size=B, sequence_length=T)
    original, free_at = ShardTokens.read, [0.0]

    def slow(self: ShardTokens, start: int, stop: int) -> np.ndarray:
        seconds = (stop - start) * 2 / 50e6
        free_at[0] = max(free_at[0], time.monotonic()) + seconds
        time.sleep(max(0.0, free_at[0] - time.monotonic()) + 0.02 / B)  # rows of a batch come together
        return original(self, start, stop)

    ShardTokens.read = slow  # type: ignore[method-assign]
    feed = Feed(Dataset(prepare(data), data, batch, seed=0), range(8), data, batch)
    feed.slot(1, 0, 0)
    feed.lap()
    began = time.perf_counter()
    for step in range(1, 31):
        for lane in range(8):
            feed.slot(step, lane, 0)
            time.sleep(0.2 / 8)
    print(f"device wait share at 50 MB/s and 200 ms a step: {feed.lap()['wait'] / (time.perf_counter() - began):.1%}")
    feed.close()
    ShardTokens.read = original  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="a python that has mosaicml-streaming, litdata and webdataset")
    parser.add_argument("--tokens", type=int, default=2**26)
    parser.add_argument("--only", default="race,resume,build,store", help="some of race, resume, build, store")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.write, arguments.skip)), flush=True)
        os._exit(0)  # workers of some contenders would keep the process
    if arguments.write:
        write_peers(arguments.write)
        return
    folder = Path(tempfile.mkdtemp(prefix="feed-"))
    wanted = arguments.only.split(",")
    try:
        if "race" in wanted:
            race(folder, arguments.tokens, arguments.peers)
        if "store" in wanted:
            if not (folder / "set").exists():
                write_own(folder, arguments.tokens)
            wait_share(folder)
        if "resume" in wanted:
            resume(folder)
        if "build" in wanted:
            build(folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
