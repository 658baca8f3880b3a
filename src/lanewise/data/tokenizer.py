"""Text to tokens and back: a byte-level BPE trained here, plain bytes, or a tokenizer.json from elsewhere.

All three are Hugging Face `tokenizers` objects, so `tokenizer.json` and `tokenizer_config.json` in a folder say all,
and `transformers` reads that folder too.
"""

import json
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lanewise.data import sources
from lanewise.errors import UserError

FILES = ("tokenizer.json", "tokenizer_config.json")
END = "<|endoftext|>"
KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>")

# Words as in GPT-2 (Radford et al., 2019), except that letters are ASCII's, "_" and all beyond ASCII: said in plain
# code points, Python's `re` and the library's engine cut alike whatever Unicode version each knows.
_LETTER, _OTHER = r"[^\x00-@\[-^`{-\x7f]", r"[\x00-\x08\x0e-\x1f!-/:-@\[-^`{-\x7f]"
_SPACE, _NO_SPACE = r"[\t-\r ]", r"[^\t-\r ]"
WORD = rf" ?(?:{_LETTER}+|{_OTHER}+|[0-9]+)|{_SPACE}(?:{_SPACE}*(?!{_NO_SPACE}))?"


class Tokenizer:
    """`end` is the id of the end-of-text token; ids are below `vocab_size`.

    Special tokens spelled out in a text are ordinary text: data cannot end a document from within.
    """

    def __init__(self, inner: tokenizers.Tokenizer, end: str, begin: str = "", chat_template: str = ""):
        self.is_ours = _state(inner) == _state(_empty())
        inner.no_truncation()  # a tokenizer.json may carry a length at which it drops the rest of every document
        inner.no_padding()
        inner.encode_special_tokens = True
        if end not in inner.get_vocab():
            inner.add_special_tokens([end])
        self.inner = inner
        self.end_text, self.begin_text, self.chat_template = end, begin, chat_template
        self.end = inner.get_vocab()[end]
        self.vocab_size = max(inner.get_vocab().values()) + 1  # ids may have holes

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_chat(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, the characters each stands for) of a text a template made: special tokens in it are special."""
        self.inner.encode_special_tokens = False
        try:
            found = self.inner.encode(text, add_special_tokens=False)
        finally:
            self.inner.encode_special_tokens = True
        return found.ids, found.offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        (folder / FILES[0]).write_text(self.inner.to_str(), encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end_text}
        config |= {"bos_token": self.begin_text} if self.begin_text else {}
        config |= {"chat_template": self.chat_template} if self.chat_template else {}
        (folder / FILES[1]).write_text(json.dumps(config), encoding="utf-8")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries: end of text, 256 bytes, merges. No text: bytes only."""
    inner = _empty()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner, END)


def _empty() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def _state(inner: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """What is equal for all tokenizers that cut text as ours do."""
    model = type(inner.model).__name__.encode()
    return model, *(part.__getstate__() if part else b"" for part in (inner.normalizer, inner.pre_tokenizer))


def ids(count: int) -> Tokenizer:
    """For sources of token ids whose tokenizer is not at hand: ids 0 to count-1, shown as numbers, and end of text."""
    inner = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(count)}, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner, END)


def load(path: str | Path) -> Tokenizer:
    """The tokenizer in a folder, or in a tokenizer.json; raises UserError if there is none.

    Its end-of-text token is the `eos_token` of the tokenizer_config.json beside it, else one of KNOWN_ENDS, else added.
    """
    file, *config = (found.path for found in files(path))
    try:
        texts = [part.read_text(encoding="utf-8") for part in (file, *config)]
    except (OSError, ValueError) as e:
        raise UserError(f"data.tokenizer: {file} cannot be read ({e})") from None
    return parse(str(file), *texts)


def parse(where: str, text: str, config: str = "{}") -> Tokenizer:
    """The tokenizer of a tokenizer.json and a tokenizer_config.json, which stand at `where`."""
    try:
        inner = tokenizers.Tokenizer.from_str(text)
        settings = json.loads(config)
        end, begin = (_content(settings.get(key)) for key in ("eos_token", "bos_token"))
        template = settings.get("chat_template") or ""
        if isinstance(template, list):  # several, by name
            template = next((t["template"] for t in template if t["name"] == "default"), "")
    except Exception as e:  # the library raises bare Exception for what it cannot parse
        raise UserError(f"data.tokenizer: {where} cannot be used ({e}); give a Hugging Face tokenizer.json") from None
    end = end or next((e for e in KNOWN_ENDS if inner.token_to_id(e) is not None), END)
    return Tokenizer(inner, end, begin or "", template)


def _content(token: str | dict[str, str] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def files(path: str | Path) -> list[sources.File]:
    """The tokenizer.json that `path`, a folder or the file itself, stands for, and the config beside it if any."""
    file = Path(path).expanduser()
    file = file / FILES[0] if file.is_dir() else file
    found = [sources.entry(p, p.name) for p in (file, file.with_name(FILES[1]))]
    if found[0] is None:
        raise UserError(f"data.tokenizer: there is no {file}; give 'bpe', 'bytes' or the path of a tokenizer.json")
    return [f for f in found if f]


# ------------------------------------------------------------------------------------------------------ many texts

Encoder = Callable[[list[str]], list[bytes]]


def encoder(tokenizer: Tokenizer, code: str, trained: bool) -> Encoder:
    """Encodes many texts into the bytes of little-endian arrays of type `code` ("H" or "I"). `trained`: made here."""
    if trained:
        words = _Words(tokenizer, code)
        cut = re.compile(WORD).findall
        return lambda texts: [b"".join(map(words.__getitem__, cut(text))) for text in texts]

    def encode(texts: list[str]) -> list[bytes]:
        found = tokenizer.inner.encode_batch_fast(texts, add_special_tokens=False)
        return [_pack(code, e.ids) for e in found]

    return encode


class _Words(dict[str, bytes]):
    """The tokens of each word met so far: three times faster than the library, which cuts words far more slowly."""

    LIMIT = 400_000  # entries; 80 MB

    def __init__(self, tokenizer: Tokenizer, code: str):
        self.model, self.code = tokenizer.inner.model, code
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 shows these bytes as themselves,
        other = [b for b in range(256) if b not in plain]  # and the rest as the characters from 256 on
        self.shown = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(other)}

    def __missing__(self, word: str) -> bytes:
        shown = word.encode().decode("latin-1").translate(self.shown)
        tokens = _pack(self.code, [token.id for token in self.model.tokenize(shown)])
        if len(word) <= 64:
            if len(self) >= self.LIMIT:
                self.clear()
            self[word] = tokens
        return tokens


def _pack(code: str, ids: list[int]) -> bytes:
    tokens = array(code, ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()
