"""Other systems' files, written by their own libraries where those are at hand, else byte by byte as specified."""

import io
import json
import struct
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from token_folder import everything

from lanewise import config
from lanewise.data import store
from lanewise.data.dataset import Dataset
from lanewise.data.formats import megatron, tfrecord
from lanewise.data.prepare import prepare
from lanewise.errors import UserError

TEXTS = ["one document", "größer, 漢字", "three\nlines\nhere", "x" * 400]
IDS = [[5, 6, 7], [300, 2, 3, 4], [9] * 40]


def ids_of(folder: Path) -> list[list[int]]:
    """The documents of a token folder as ids, without their end-of-text."""
    bounds = np.fromfile(folder / "train.starts", "<i8").tolist()
    tokens = np.fromfile(folder / "train.bin", store.read_meta(folder)["dtype"]).tolist()
    return [tokens[a : b - 1] for a, b in pairwise(bounds)]


# -------------------------------------------------------------------------------------------------------- Hugging Face


def save_to_disk(folder: Path, column: pa.Array, files: int = 2, others: tuple[str, ...] = ()) -> Path:
    """As `datasets.Dataset.save_to_disk` lays a folder out."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        table = pa.table(
            {"text": column.take(pa.array(range(i * len(column) // files, (i + 1) * len(column) // files)))}
        )
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    for name in others:
        (folder / name).write_bytes((folder / names[0]).read_bytes())
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_hugging_face_dataset_folder(tmp_path, built):
    save_to_disk(tmp_path / "set", pa.array(TEXTS), others=("cache-0123456789abcdef.arrow",))
    assert everything(built(tmp_path / "set")) == sorted(TEXTS)


def test_hugging_face_splits(tmp_path, built):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    save_to_disk(tmp_path / "set" / "test", pa.array(["of the test split"]), files=1)
    with pytest.raises(UserError, match="no split named train"):
        built(tmp_path / "set")
    save_to_disk(tmp_path / "set" / "train", pa.array(TEXTS))
    assert everything(built(tmp_path / "set")) == sorted(TEXTS)
    assert everything(built(tmp_path / "set" / "test", held_out=0)) == ["of the test split"]


def test_columns_of_token_ids(tmp_path, built):
    save_to_disk(tmp_path / "set", pa.array(IDS, pa.list_(pa.int32())))
    folder = built(tmp_path / "set", tokenizer="ids", vocab_size=301, held_out=0)
    assert ids_of(folder) == IDS
    assert store.read_meta(folder)["vocab_size"] == 302
    with pytest.raises(UserError, match=r"data-00001-of-00002.arrow, row 1: token id 300 is none of the 258"):
        built(tmp_path / "set", tokenizer="ids", vocab_size=257)
    with pytest.raises(UserError, match=r"holds token ids; set data.tokenizer .* or to 'ids'"):
        built(tmp_path / "set", tokenizer="bpe")


def test_text_is_no_ids(tmp_path, built):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"a.txt: holds text; data.tokenizer='ids' is for"):
        built(tmp_path / "a.txt", tokenizer="ids")


def test_damaged_arrow(tmp_path, built):
    save_to_disk(tmp_path / "set", pa.array(TEXTS), files=1)
    [path] = (tmp_path / "set").glob("data-*")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"data-00000-of-00001.arrow: cannot be read as Arrow"):
        built(tmp_path / "set")


# ---------------------------------------------------------------------------------------------------------- WebDataset


def tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz")])
def test_webdataset(tmp_path, built, name, mode):
    tar(
        tmp_path / name,
        [
            ("./d/000.jpg", b"\xff\xd8"),
            ("./d/000.json", b'{"width": 3}'),  # the text stands beside it
            ("./d/000.txt", TEXTS[0].encode()),
            ("./d/001.json", json.dumps({"text": TEXTS[1]}).encode()),
            ("./d/002.json", json.dumps(TEXTS[2]).encode()),
            ("./e/002.txt", TEXTS[3].encode()),
            ("./e/003.cls", b"7"),
        ],
        mode,
    )
    assert everything(built(tmp_path / name)) == sorted(TEXTS)


def test_webdataset_without_the_column(tmp_path, built):
    tar(tmp_path / "a.tar", [("0.json", b'{"caption": "c"}')])
    with pytest.raises(UserError, match=r"a.tar, member 0.json: no column 'text'; set data.text_field to .*caption"):
        built(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:700])
    with pytest.raises(UserError, match=r"a.tar"):
        built(tmp_path / "a.tar", text_field="caption")


# ----------------------------------------------------------------------------------------------------------------- MDS


def mds(folder: Path, columns: dict[str, str], samples: list[dict[str, bytes]], sizes: dict[str, int]) -> Path:
    """One shard, byte by byte."""
    folder.mkdir()
    names = sorted(columns)
    made = []
    for sample in samples:
        free = b"".join(struct.pack("<I", len(sample[name])) for name in names if name not in sizes)
        made.append(free + b"".join(sample[name] for name in names))
    head = json.dumps({"some": "thing"}).encode()
    first = 4 + 4 * (len(made) + 1) + len(head)
    offsets = np.cumsum([first, *map(len, made)]).astype("<u4")
    raw = struct.pack("<I", len(made)) + offsets.tobytes() + head + b"".join(made)
    (folder / "shard.00000.mds").write_bytes(raw)
    shard = {
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [sizes.get(name) for name in names],
        "raw_data": {"basename": "shard.00000.mds"},
        "zip_data": None,
        "samples": len(made),
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def test_mds_text(tmp_path, built):
    samples = [{"text": text.encode(), "id": struct.pack("<q", i)} for i, text in enumerate(TEXTS)]
    mds(tmp_path / "set", {"text": "str", "id": "int"}, samples, {"id": 8})
    assert everything(built(tmp_path / "set")) == sorted(TEXTS)
    with pytest.raises(UserError, match=r"no column 'body'.*id, text"):
        built(tmp_path / "set", text_field="body")
    with pytest.raises(UserError, match="sample 1: column 'id' holds"):
        built(tmp_path / "set", text_field="id")


def test_mds_token_ids(tmp_path, built):
    arrays = [np.array(ids, "<u2") for ids in IDS]
    free = [bytes([16, 1 << 2, len(a)]) + a.tobytes() for a in arrays]  # type, one dim of a byte, its size
    typed = [bytes([(1 << 2) + 1]) + struct.pack("<H", len(a)) + a.tobytes() for a in arrays]
    for name, encoding, raw in (("free", "ndarray", free), ("typed", "ndarray:uint16", typed)):
        mds(tmp_path / name, {"text": encoding}, [{"text": r} for r in raw], {})
        assert ids_of(built(tmp_path / name, tokenizer="ids", held_out=0)) == IDS
    fixed = [np.array([7, 8, 9], "<i4").tobytes()]
    mds(tmp_path / "fixed", {"text": "ndarray:int32:3"}, [{"text": fixed[0]}], {"text": 12})
    assert ids_of(built(tmp_path / "fixed", tokenizer="ids", held_out=0)) == [[7, 8, 9]]


def test_damaged_mds(tmp_path, built):
    folder = mds(tmp_path / "set", {"text": "str"}, [{"text": text.encode()} for text in TEXTS], {})
    shard = folder / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"shard.00000.mds: damaged"):
        built(folder)
    (folder / "index.json").unlink()
    with pytest.raises(UserError, match=r"no readable index.json"):
        built(folder)


# ------------------------------------------------------------------------------------------------------------ Megatron


def indexed(base: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    code = {v: k for k, v in megatron.TYPES.items()}[dtype]
    raw = b"".join(np.array(document, dtype).tobytes() for document in documents)
    lengths = np.array([len(document) for document in documents], "<i4")
    places = (np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    base.with_suffix(".bin").write_bytes(raw)
    bounds = np.arange(len(documents) + 1, dtype="<i8")
    base.with_suffix(".idx").write_bytes(head + lengths.tobytes() + places.tobytes() + bounds.tobytes())
    return base


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_megatron_is_read_in_place(tmp_path, settings, dtype):
    documents = [[i, i + 1, i + 2, 9] for i in range(20)] + [[]]
    base = indexed(tmp_path / "corpus", documents, dtype)
    for name in (base, base.with_suffix(".bin")):
        data = settings(name, tokenizer="ids", held_out=0.25, pack="document", shuffle=False)
        dataset = Dataset(prepare(data), data, config.Batch(lanes=1, sequence_length=8), seed=0)
        slots = [dataset.slot(step, 0, 0) for step in range(1, 16)]
        assert [slot.tokens_BT[0, :3].tolist() for slot in slots] == [d[:3] for d in documents[:15]]
        assert [slot.labels_BT[0, :3].tolist() for slot in slots] == [d[1:] for d in documents[:15]]
        held = [dataset.held(i, 1).tokens_BT[0, :3].tolist() for i in range(dataset.held_batches(1))]
        assert held == [d[:3] for d in documents[15:20]]
        assert not list((tmp_path / "cache").rglob("*.bin")), "nothing is copied"


def test_megatron_pair_that_does_not_belong_together(tmp_path, settings):
    base = indexed(tmp_path / "corpus", IDS)
    base.with_suffix(".bin").write_bytes(b"\0\0")
    with pytest.raises(UserError, match=r"corpus.bin holds 1 tokens, its index 47"):
        prepare(settings(base, tokenizer="ids"))
    base.with_suffix(".idx").write_bytes(b"something else, long enough to be one of them")
    with pytest.raises(UserError, match=r"corpus.idx: not an index"):
        prepare(settings(base, tokenizer="ids"))
    with pytest.raises(UserError, match=r"holds token ids; set data.tokenizer"):
        prepare(settings(indexed(tmp_path / "other", IDS), tokenizer="bpe"))


# ------------------------------------------------------------------------------------------------------------ TFRecord


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(packed: bool = True, **features: bytes | list[int]) -> bytes:
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        elif packed:
            feature = field(3, field(1, b"".join(map(varint, value))))
        else:
            feature = field(3, b"".join(varint(1 << 3) + varint(v) for v in value))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def tfrecords(path: Path, examples: list[bytes]) -> Path:
    crc = pytest.importorskip("google_crc32c").value

    def masked(raw: bytes) -> bytes:
        c = crc(raw)
        return struct.pack("<I", ((c >> 15 | c << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    with path.open("wb") as file:
        for raw in examples:
            head = struct.pack("<Q", len(raw))
            file.write(head + masked(head) + raw + masked(raw))
    return path


def test_tfrecord(tmp_path, built):
    texts = [example(n=[i], text=text.encode()) for i, text in enumerate(TEXTS)]
    assert everything(built(tfrecords(tmp_path / "text.tfrecord", texts))) == sorted(TEXTS)
    ids = [example(packed, text=tokens) for packed, tokens in zip([True, False, True], IDS, strict=True)]
    folder = built(tfrecords(tmp_path / "ids.tfrecord", ids), tokenizer="ids", held_out=0)
    assert ids_of(folder) == IDS
    assert tfrecord._integers(b"".join(map(varint, [0, 127, 128, 2**40, -1]))).tolist() == [0, 127, 128, 2**40, -1]


def test_damaged_tfrecord(tmp_path, built):
    path = tfrecords(tmp_path / "a.tfrecord", [example(text=text.encode()) for text in TEXTS])
    whole = path.read_bytes()
    for raw in (whole[:-5], whole[:-30] + b"!" + whole[-29:], whole + b"\0" * 20):
        path.write_bytes(raw)
        with pytest.raises(UserError, match=r"a.tfrecord: record [45] is damaged or cut short"):
            built(path)
    with pytest.raises(UserError, match=r"record 1: no column 'body'; .* text"):
        built(tfrecords(path, [example(text=b"t")]), text_field="body")
