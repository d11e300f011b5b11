"""A tokenizer folder, loaded without Transformers: text and conversations to ids, and back.

A conversation's own text never becomes a control token. Before rendering, every literal such as `<|im_end|>` inside a
message is replaced by a stand-in that no message can contain; the stand-in is a token of its own, and its id is then
replaced by the ids that spell the literal out.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import tokenizers

from miles_tito.errors import TemplateError, TokenizerError
from miles_tito.records import Message

from .template import ChatTemplate

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTROL = ("<|", "<｜", "｜D")
"""How control tokens begin that their tokenizer does not declare special: DeepSeek declares none of its own."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell each byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.

    Raises:
        TokenizerError: a file is missing or damaged.
    """
    folder = Path(path)
    text = _read(folder / "tokenizer.json")
    if text is None:
        raise TokenizerError(
            f"{folder} has no `tokenizer.json`. miles-tito reads the fast-tokenizer format; convert with "
            "`transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)`."
        )
    config = _read_json(folder / "tokenizer_config.json")
    sources = _template_sources(config.get("chat_template"), _read(folder / "chat_template.jinja"))
    special = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
    eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(cast("list[int]", eos))
    return Tokenizer(text, special_tokens=special, template_sources=sources, eos_ids=eos_ids, name=str(folder))


def read_max_context(path: str | Path) -> int:
    """`max_position_embeddings` of the model folder's `config.json`.

    Raises:
        TokenizerError: it says none.
    """
    config = _read_json(Path(path) / "config.json")
    length = cast("dict[str, Any]", config.get("text_config", config)).get("max_position_embeddings")
    if not isinstance(length, int):
        raise TokenizerError(
            f"{path}/config.json gives no `max_position_embeddings`; say how many tokens the engine takes."
        )
    return length


class Tokenizer:
    """Exact ids for text and conversations.

    Attributes:
        name: where it came from, for messages.
        source: the JSON it was made from.
        bos_id: the token that begins a sequence, None where there is none.
        eos_ids: ids that end a turn: the tokenizer's own and those of `generation_config.json`, ascending.
        control_ids: ids of added tokens that steer a model, such as `<|im_start|>`.
        template: the chat template, None where the folder has none.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        special_tokens: Mapping[str, str],
        template_sources: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        name: str = "tokenizer",
    ) -> None:
        self.name = name
        try:
            self._backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the Rust library raises bare Exception
            raise TokenizerError(f"{name}: `tokenizer.json` cannot be loaded: {error}.") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.source = tokenizer_json
        self._special_tokens = dict(special_tokens)
        self.template = ChatTemplate(template_sources, special_tokens) if template_sources else None
        added = self._backend.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.control_ids = frozenset(i for i, token in added.items() if token.special or token.content[:2] in _CONTROL)
        self.bos_id = self.token_id(special_tokens.get("bos_token", ""))
        own_eos = self.token_id(special_tokens.get("eos_token", ""))
        self.eos_ids: tuple[int, ...] = tuple(sorted({*eos_ids, *([] if own_eos is None else [own_eos])}))
        self._add_stand_ins()

    def with_template(self, source: str) -> Tokenizer:
        """This tokenizer with another chat template."""
        other = copy.copy(self)
        other.template = ChatTemplate({"default": source}, self._special_tokens)
        return other

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly `text`, None where there is none."""
        return self._backend.token_to_id(text) if text else None

    def is_added(self, text: str) -> bool:
        """Whether `text` is an added token: always one id, whatever stands around it."""
        return text in self._added

    def token_text(self, token_id: int) -> str:
        """How the vocabulary spells a token."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; those of its name, for a control token."""
        text = self.token_text(token_id)
        if text in self._added:
            return text.encode()
        if b'"ByteLevel"' in self._decoder_state:
            return bytes(_BYTES[character] for character in text if character in _BYTES)
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()

    @cached_property
    def _decoder_state(self) -> bytes:
        return self._backend.decoder.__getstate__() if self._backend.decoder else b""

    @property
    def adds_bos(self) -> bool:
        """Whether this tokenizer, used by itself, begins plain text with `bos_id`."""
        ids = self._backend.encode("a", add_special_tokens=True).ids
        return self.bos_id is not None and ids[:1] == [self.bos_id]

    def encode(self, text: str) -> np.ndarray:
        """[N] int32 ids of template text; control tokens in it are real, nothing is added around it."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_guarded(self, text: str) -> np.ndarray:
        """[N] int32 ids of text in which `guard` put its stand-ins."""
        ids = self.encode(text)
        if self._nonce not in text:
            return ids
        stand_ins = np.flatnonzero(ids >= self.vocab_size)
        if text.count(self._nonce) != len(stand_ins):
            raise TemplateError(
                f"{self.name}: the chat template changes message text, so {text.count(self._nonce) - len(stand_ins)} "
                "literal control tokens in it cannot be spelled out safely."
            )
        pieces: list[np.ndarray] = []
        start = 0
        for index in stand_ins:
            pieces += [ids[start:index], self._spell(self._stood_for[int(ids[index])])]
            start = int(index) + 1
        return np.concatenate([*pieces, ids[start:]])

    def has_control_text(self, text: str) -> bool:
        """Whether a control token is spelled out in `text`."""
        return self._any_control.search(text) is not None

    def without_control_text(self, text: str) -> str:
        """`text` with a dash for each control token spelled out in it."""
        return self._any_control.sub("-", text)

    def some_control_text(self) -> str:
        """A few control tokens as text."""
        return " ".join(self.token_text(i) for i in sorted(self.control_ids)[:40])

    def spelled_out(self, token_id: int) -> np.ndarray | None:
        """[N] int32 ids with the same text as an ordinary token, other than it; None where there are none."""
        text = self.token_text(token_id)
        if text in self._added or len(text) < 2:
            return None
        parts = [self._backend.token_to_id(character) for character in text]
        return None if None in parts else np.asarray(parts, np.int32)

    def guard(self, value: Any, *, everything: bool = False) -> Any:
        """`value` (text, or lists and maps of it) with each literal control token replaced by its stand-in.

        Args:
            everything: also guard added tokens that models may write as text, such as `<tool_call>`. Right for
                tool results, which come from outside.
        """
        pattern = self._any_added if everything else self._any_control
        if isinstance(value, str):
            return pattern.sub(lambda match: self._stand_ins[match[0]], value)
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {self.guard(k, everything=everything): self.guard(v, everything=everything) for k, v in items}
        if isinstance(value, (list, tuple)):
            return [self.guard(item, everything=everything) for item in cast("Sequence[Any]", value)]
        return value

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as guarded text, for `encode_guarded`; arguments as `ChatTemplate.render`."""
        if self.template is None:
            raise TemplateError(f"{self.name} has no chat template; put a `chat_template.jinja` into the folder.")
        return self.template.render(
            [
                {key: self.guard(value, everything=message.get("role") == "tool") for key, value in message.items()}
                for message in messages
            ],
            tools=self.guard(tools) if tools else None,
            generation_prompt=generation_prompt,
            now=now,
            variables=variables,
        )

    def decode(self, ids: Sequence[int] | np.ndarray, *, keep: frozenset[int] = frozenset()) -> str:
        """The text of `ids`, control tokens left out but for those in `keep`."""
        dropped = self.control_ids - keep
        kept = [i for i in np.asarray(ids, np.int64).tolist() if i not in dropped and i < self.vocab_size]
        return self._backend.decode(kept, skip_special_tokens=False)

    def decode_stream(self, *, keep: frozenset[int] = frozenset()) -> TextStream:
        """A decoder that takes ids as they come."""
        return TextStream(self, keep)

    def _add_stand_ins(self) -> None:
        self._nonce = f"{secrets.randbelow(10**24):024d}"  # digits only: no template escapes them or changes case
        self._stand_ins = {text: f"{self._nonce}{token_id:08d}" for text, token_id in self._added.items()}
        self._backend.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]
            [tokenizers.AddedToken(t, special=True, normalized=False) for t in self._stand_ins.values()]
        )
        self._stood_for = {self._backend.token_to_id(mark): text for text, mark in self._stand_ins.items()}
        control = [text for text, token_id in self._added.items() if token_id in self.control_ids]
        self._any_control = _any_of(control)
        self._any_added = _any_of(list(self._added))

    @cached_property
    def _speller(self) -> tokenizers.Tokenizer:
        """The same tokenizer without added tokens."""
        plain = json.loads(self.source)
        plain["added_tokens"] = []
        return tokenizers.Tokenizer.from_str(json.dumps(plain))

    def _spell(self, text: str) -> np.ndarray:
        """[N] int32 ids that read as `text` without being its token."""
        token_id = self._added[text]
        for parts in ([text], [text[:1], text[1:]], list(text)):
            ids = [i for part in parts for i in self._speller.encode(part, add_special_tokens=False).ids]
            if ids and token_id not in ids:
                return np.asarray(ids, np.int32)
        raise TokenizerError(
            f"{self.name}: the text {text!r} cannot be encoded without its token {token_id}, so a message that holds "
            "it would control the model."
        )


class TextStream:
    """Decodes ids as they come; its pieces join to what `Tokenizer.decode` gives for all of them."""

    def __init__(self, tokenizer: Tokenizer, keep: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._keep = keep
        self._ids: list[int] = []
        self._start = 0
        """First id of the window that is decoded again: some decoders look one piece back."""
        self._done = 0
        """Ids whose text was handed out."""

    def feed(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text that became certain with `ids`."""
        self._ids += np.asarray(ids, np.int64).tolist()
        text = self._pending()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text

    def finish(self) -> str:
        """What is left; an incomplete character at the end decodes to replacement marks."""
        text = self._pending()
        self._start, self._done = self._done, len(self._ids)
        return text

    def _pending(self) -> str:
        window, done = self._ids[self._start :], self._done - self._start
        decode = self._tokenizer.decode
        return decode(window, keep=self._keep)[len(decode(window[:done], keep=self._keep)) :]


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    # Longest first, as the tokenizer matches. `(?!)` never matches: a tokenizer without added tokens needs no guard.
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")


def _template_sources(configured: Any, file_text: str | None) -> dict[str, str] | None:
    if file_text is not None:
        return {"default": file_text}
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, list):
        sources = {item["name"]: item["template"] for item in cast("list[dict[str, str]]", configured)}
        return sources if "default" in sources else None
    return None


def _token_text(token: Any) -> str:
    return token if isinstance(token, str) else cast("dict[str, str]", token)["content"]


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read(path)
    if text is None:
        return {}
    try:
        return cast("dict[str, Any]", json.loads(text))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path} is no JSON: {error}.") from error
