"""Chats: turns to one text by a template (as `transformers` has them), with only some of the turns to be learned."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lanewise import config
from lanewise.data.formats.base import Document
from lanewise.data.tokenizer import Tokenizer
from lanewise.errors import UserError


class Template:
    """The template in the file `data.chat_template`, else the one that came with the tokenizer."""

    def __init__(self, words: Tokenizer, data: config.Data) -> None:
        self.words, self.path, self.learn = words, data.chat_template, frozenset(data.learn)

    @cached_property
    def template(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        source = self.words.chat_template
        if self.path:
            try:
                source = Path(self.path).expanduser().read_text(encoding="utf-8")
            except OSError as e:
                raise UserError(f"data.chat_template: {self.path} cannot be read ({e.strerror})") from None
        if not source:
            raise UserError("data.chat_template: the tokenizer has no chat template; name a file with one")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            return environment.from_string(source)
        except TemplateError as e:
            raise UserError(f"data.chat_template: not a template ({e}); repair it") from None

    def encode(self, document: Document, dtype: np.dtype) -> tuple[bytes, bytes]:
        """The bytes of the token ids, and of a bool for each: whether it is said by a role that is learned."""
        turns = document.turns or []
        text = self._text(turns, document.where)
        said = np.zeros(len(text) + 1, np.bool_)  # by character
        for i, turn in enumerate(turns):
            if turn["role"] in self.learn:
                before = self._text(turns[:i], document.where, prompt=turn["role"] == "assistant")
                after = self._text(turns[: i + 1], document.where)
                if not after.startswith(before) or not text.startswith(after):
                    raise UserError(
                        f"{document.where}: the chat template does not render turn {i + 1} as a continuation of those "
                        "before it, so its loss cannot be told apart; use another data.chat_template"
                    )
                said[len(before) : len(after)] = True
        ids, spans = self.words.encode_chat(text)
        learned = np.array([said[start:stop].any() for start, stop in spans], np.bool_)
        return np.array(ids, dtype).tobytes(), learned.tobytes()

    def _text(self, turns: Sequence[dict[str, Any]], where: str, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        if not turns and not prompt:
            return ""
        names = {"bos_token": self.words.begin_text, "eos_token": self.words.end_text}
        try:
            return self.template.render(messages=turns, add_generation_prompt=prompt, **names)
        except (TemplateError, TypeError, ValueError) as e:
            if not turns:  # a template may insist on a first turn
                return ""
            raise UserError(f"{where}: the chat template refuses it ({e}); repair the turns, or the template") from None
