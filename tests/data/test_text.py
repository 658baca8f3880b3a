"""Text to tokens and back, against `tokenizers`' own encoder and Python's own codec."""

import json
import os
import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from token_folder import documents, everything
from tokenizers import models, pre_tokenizers

from lanewise.data import store, text, tokenizer
from lanewise.data.formats import base
from lanewise.errors import UserError

SAMPLE = Path(os.__file__).read_text() + Path(json.__file__).read_text()
ODD = [
    "",
    " ",
    "\n",
    "  \n\t x  \r\n",
    "don't  stop_it99 é̂ ñ",
    "日本語、テスト。",
    "x\u00a0y\u3000z\u2028w\x85v\x1cu\x1fs\x0bt\x0cr",
    "\x00\x01\x7f\x80ÿ",
    "🙂🙂 👩‍👩‍👧 \U0010ffff",
    "<|endoftext|> is text here",
    "a" * 500 + "é" * 500,
    "9 99 999\n\n\n9",
]


@pytest.fixture(scope="module")
def words() -> tokenizer.Tokenizer:
    return tokenizer.train([SAMPLE, *ODD], 700)


def test_the_fast_encoder_equals_the_library(words):
    alphabet = [*" \n\t\r_aZ09'.\"<|>é漢\x00\x1c\u00a0", "  ", "the", "self", "<|endoftext|>", "🙂"]
    rng = random.Random(0)
    texts = [*ODD, SAMPLE, *("".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(2000))]
    got = tokenizer.encoder(words, "H", trained=True)(texts)
    library = tokenizer.encoder(words, "H", trained=False)(texts)
    assert got == library
    assert [list(memoryview(tokens).cast("H")) for tokens in got] == [words.encode(t) for t in texts]


def test_the_fast_encoder_forgets_to_stay_small(words, monkeypatch):
    monkeypatch.setattr(tokenizer._Words, "LIMIT", 10)
    assert tokenizer.encoder(words, "I", trained=True)([SAMPLE]) == tokenizer.encoder(words, "I", trained=False)(
        [SAMPLE]
    )


def test_what_is_encoded_comes_back(words):
    assert words.vocab_size == 700
    for sample in [*ODD, SAMPLE]:
        ids = words.encode(sample)
        assert words.decode(ids) == sample
        assert words.end not in ids
        assert max(ids, default=0) < words.vocab_size
    assert len(words.encode(SAMPLE)) < len(SAMPLE) / 2


def test_training_is_deterministic(words):
    again = tokenizer.train([SAMPLE, *ODD], 700)
    assert again.inner.to_str() == words.inner.to_str()


def test_bytes_are_257_entries():
    plain = tokenizer.train([], 257)
    assert plain.vocab_size == 257
    assert len(plain.encode("aé漢")) == 6
    assert len({plain.encode(chr(i))[0] for i in range(128)}) == 128


def test_saved_and_read_by_transformers(words, tmp_path):
    from transformers import AutoTokenizer

    words.save(tmp_path)
    ours, theirs = tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.end == theirs.eos_token_id == words.end
    assert ours.encode(SAMPLE) == theirs.encode(SAMPLE, add_special_tokens=False) == words.encode(SAMPLE)


# ------------------------------------------------------------------------------------------- tokenizers of others


def foreign(folder: Path, vocabulary: dict[str, int], special: list[str] = (), config: dict | None = None) -> Path:
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(special))
    inner.enable_truncation(3)  # as files made for encoders do
    inner.enable_padding(length=8)
    inner.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def test_foreign_tokenizer_drops_and_pads_nothing(tmp_path, built):
    path = foreign(tmp_path, {"?": 0, "a": 1, "b": 70_000}, ["</s>"])
    (tmp_path / "x.txt").write_text("a b a b a b")
    folder = built(tmp_path / "x.txt", tokenizer=str(path), held_out=0)
    meta = store.read_meta(folder)
    end = meta["end_of_text"]
    assert store.tokens(folder, "train", "<u4").tolist() == [1, 70_000] * 3 + [end]
    assert meta["dtype"] == "<u4"
    assert meta["vocab_size"] == 70_001  # ids have holes
    assert tokenizer.load(folder).inner.id_to_token(end) == "</s>"


@pytest.mark.parametrize("eos", ["<stop>", {"content": "<stop>", "special": True}])
def test_end_of_text_is_what_the_config_says(tmp_path, eos):
    path = foreign(tmp_path, {"?": 0}, ["</s>", "<stop>"], {"eos_token": eos})
    assert tokenizer.load(path).end_text == "<stop>"
    tokenizer.load(path).save(tmp_path)
    assert tokenizer.load(tmp_path).end_text == "<stop>"


def test_end_of_text_is_added_where_there_is_none(tmp_path):
    words = tokenizer.load(foreign(tmp_path, {"?": 0, "a": 1}))
    assert (words.end, words.vocab_size) == (2, 3)


def test_wrong_tokenizer(tmp_path, built):
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"there is no .*nowhere; give 'bpe', 'bytes'"):
        built(tmp_path / "x.txt", tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"cannot be used .*; give a Hugging Face tokenizer.json"):
        built(tmp_path / "x.txt", tokenizer=str(tmp_path))


# --------------------------------------------------------------------------------------------------- bytes to text

BROKEN = [b"abc\xff", b"\xc3", b"ok \xe6\xbc", b"\xed\xa0\x80", b"x" * 20 + b"\xf0\x9f\x99" + b"y" * 20, b"\xff\xfea\0"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("raw", [*BROKEN, b"", "gr\u00f6\u00dfer 漢字 🙂".encode()])
def test_place_of_the_first_bad_byte_is_that_of_the_codec(monkeypatch, raw, chunk):
    monkeypatch.setattr(base, "CHUNK", chunk)
    try:
        raw.decode()
        expected = None
    except UnicodeDecodeError as e:
        expected = e.start
    document = base.Document("x", partial(base.sliced, raw))
    assert text.first_bad_byte(document.chunks()) == expected
    assert "".join(text.pieces(document, "replace", Counter())) == raw.decode(errors="replace")


def test_pieces_are_bounded_and_end_with_a_line_where_there_is_one(monkeypatch):
    monkeypatch.setattr(base, "CHUNK", 100)
    lines = "".join(f"line {i}\n" for i in range(100))
    for whole, at_newline in ((lines, True), ("x" * 1000, False)):
        found = list(text.pieces(base.Document("x", partial(base.sliced, whole.encode())), "error", Counter()))
        assert "".join(found) == whole
        assert max(map(len, found)) <= 200
        assert not at_newline or all(piece.endswith("\n") for piece in found)


def test_byte_order_mark_is_no_text(tmp_path, built):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "b"}\n')
    assert everything(built(tmp_path / "*.*")) == ["a", "b"]


def test_long_documents_come_back_whole(tmp_path, built):
    whole = "".join(f"ligne n° {i}\n" for i in range(30_000))  # several chunks, with characters across their ends
    (tmp_path / "a.txt").write_text(whole)
    (tmp_path / "b.txt").write_text("short")
    assert sorted(documents(built(tmp_path, tokenizer="bpe", vocab_size=300), "train")) == [whole]
