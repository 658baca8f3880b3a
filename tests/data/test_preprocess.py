"""Optional steps before tokens: chats with loss on some turns, filters, duplicates."""

import json
import random

import numpy as np
import pytest
from token_folder import everything

from lanewise import config
from lanewise.data import dedup, store, tokenizer
from lanewise.data.dataset import Dataset
from lanewise.data.prepare import prepare
from lanewise.data.shard_build import build_shards
from lanewise.data.shards import ShardSet
from lanewise.errors import UserError

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATS = [
    [("system", "be kind"), ("user", "hi"), ("assistant", "hello, how are you"), ("user", "ok"), ("assistant", "bye")],
    [("user", "1+1"), ("assistant", "2")],
]


@pytest.fixture
def words(tmp_path):
    """A tokenizer with the template's marks as special tokens, as chat models have them."""
    made = tokenizer.train(["hello how are you bye be kind ok hi " * 20], 300)
    made.inner.add_special_tokens(["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"])
    made = tokenizer.Tokenizer(made.inner, tokenizer.END, chat_template=TEMPLATE)
    (tmp_path / "words").mkdir()
    made.save(tmp_path / "words")
    return tmp_path / "words"


@pytest.fixture
def chats(tmp_path):
    rows = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in CHATS]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chats.jsonl"


def learned_texts(dataset: Dataset, rows: int) -> list[str]:
    """What is predicted in each row, in order of the rows."""
    inner = tokenizer.load(dataset.folder).inner
    slots = [dataset.slot(step, 0, 0) for step in range(1, rows + 1)]
    return [inner.decode(slot.labels_BT[slot.labels_BT != -100].tolist(), skip_special_tokens=False) for slot in slots]


@pytest.mark.parametrize("as_set", [False, True])
@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        (["assistant"], ["hello, how are you<|end|>\nbye<|end|>\n", "2<|end|>\n"]),
        (["user"], ["<|user|>hi<|end|>\n<|user|>ok<|end|>\n", "1+1<|end|>\n"]),  # no token predicts the first of all
    ],
)
def test_only_the_chosen_turns_are_learned(tmp_path, settings, words, chats, as_set, learn, expected):
    """From a token folder and from a shard set; the text is that of transformers' own `apply_chat_template`."""
    data = settings(
        chats, text_field="messages", tokenizer=str(words), learn=learn, held_out=0, pack="document", shuffle=False
    )
    if as_set:
        build_shards([str(chats)], data, str(tmp_path / "set"), 1, lambda text: None)
        data = data.model_copy(update={"source": str(tmp_path / "set")})
    folder = prepare(data)
    dataset = Dataset(folder, data, config.Batch(lanes=1, sequence_length=128), seed=0)
    dataset.folder = folder
    assert learned_texts(dataset, 2) == [text + tokenizer.END for text in expected]


def test_the_text_is_that_of_transformers(tmp_path, settings, words, chats):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(words)
    folder = prepare(settings(chats, text_field="messages", tokenizer=str(words), held_out=0))
    tokens = store.tokens(folder, "train", store.read_meta(folder)["dtype"]).tolist()
    end = store.read_meta(folder)["end_of_text"]
    expected = []
    for chat in CHATS:
        turns = [{"role": role, "content": content} for role, content in chat]
        text = theirs.apply_chat_template(turns, tokenize=False)
        expected += [*theirs.encode(text, add_special_tokens=False), end]
    assert tokens == expected


def test_chats_that_cannot_be_used(tmp_path, settings, words, chats):
    base = {"text_field": "messages", "held_out": 0}
    with pytest.raises(UserError, match=r"the tokenizer has no chat template; name a file"):
        prepare(settings(chats, tokenizer="bytes", **base))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"data.chat_template: not a template"):
        prepare(settings(chats, tokenizer=str(words), chat_template=str(tmp_path / "bad.jinja"), **base))
    (tmp_path / "last.jinja").write_text("{{ messages[-1]['content'] }}")
    with pytest.raises(UserError, match=r"line 1 .*does not render turn \d as a continuation"):
        prepare(settings(chats, tokenizer=str(words), chat_template=str(tmp_path / "last.jinja"), **base))
    (tmp_path / "no.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"line 1 .*refuses it .roles must alternate."):
        prepare(settings(chats, tokenizer=str(words), chat_template=str(tmp_path / "no.jinja"), **base))


# ------------------------------------------------------------------------------------------------------------- filters


def test_filters(tmp_path, settings):
    for i, text in enumerate(["short", "long enough to stay", "also long enough"]):
        (tmp_path / f"{i}.txt").write_text(text)
    for change in ({"filter": "user_functions:is_long"}, {"min_chars": 11}):
        folder = prepare(settings(tmp_path / "*.txt", held_out=0, **change))
        assert everything(folder) == ["also long enough", "long enough to stay"]
        assert store.read_meta(folder)["filtered"] == 1
    with pytest.raises(UserError, match=r"data.filter: module 'user_functions' has no function 'nope'"):
        prepare(settings(tmp_path / "*.txt", filter="user_functions:nope"))


# ---------------------------------------------------------------------------------------------------------- duplicates


def edited(text: str, share: float, rng: random.Random) -> str:
    words = text.split()
    for i in rng.sample(range(len(words)), round(share * len(words))):
        words[i] = f"other{rng.random()}"
    return " ".join(words)


def test_near_duplicates_are_those_of_high_resemblance():
    """Against the resemblance computed from the sets themselves."""
    rng = random.Random(0)
    pairs = []
    for _ in range(120):
        text = " ".join(f"w{rng.randrange(10_000)}" for _ in range(200))
        pairs.append((text, edited(text, rng.choice([0, 0.005, 0.01, 0.1, 0.2, 0.5]), rng)))

    def resemblance(a: str, b: str) -> float:
        sets = []
        for text in (a, b):
            words = text.split()
            sets.append({tuple(words[i : i + 5]) for i in range(len(words) - 4)})
        return len(sets[0] & sets[1]) / len(sets[0] | sets[1])

    found = []
    for a, b in pairs:
        [drop] = dedup.duplicates([dedup.signatures([a, b], near=True)])
        found.append((resemblance(a, b), drop == {1}))
    alike = [dropped for likeness, dropped in found if likeness >= 0.85]
    other = [dropped for likeness, dropped in found if likeness <= 0.4]
    assert len(alike) > 20
    assert len(other) > 20
    assert np.mean(alike) > 0.95
    assert np.mean(other) < 0.05


def test_build_leaves_duplicates_out(tmp_path, settings):
    rng = random.Random(1)
    base = [" ".join(f"w{rng.randrange(1000)}" for _ in range(60)) for _ in range(10)]
    rows = [*base, base[3], base[7].upper(), *(f"new {i} " + base[i][::-1] for i in range(3))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    for kind, left in (("none", 15), ("exact", 14), ("near", 13)):
        data = settings(tmp_path / "rows.jsonl", held_out=0, dedup=kind)
        manifest = build_shards([str(tmp_path / "rows.jsonl")], data, str(tmp_path / kind), 1, lambda text: None)
        assert manifest["documents"]["train"] == left
        assert manifest["notes"]["duplicates"] == 15 - left
    made = ShardSet(tmp_path / "near")
    assert made.tokenizer.decode(made.side("train").read(0, len(base[0]))) == base[0]
    with pytest.raises(UserError, match="only `lanewise data build` looks for duplicates"):
        prepare(settings(tmp_path / "rows.jsonl", dedup="near"))
