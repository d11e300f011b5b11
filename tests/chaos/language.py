"""What the scripted engines speak: one word for each node of the tree of weights, and ChatML around it."""

from __future__ import annotations

import functools
import json

from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.tokenizer import Tokenizer

MAX_NODES = 1024
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = ("\n", " ", "system", "user", "assistant", "ask", "go", "on", "?")
END = _CONTROL.index("<|im_end|>")
"""Id that ends a turn."""
_FIRST_NODE = len(_CONTROL) + len(_WORDS)
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def word(node: int) -> int:
    """The id that stands for the weights of `node`."""
    return _FIRST_NODE + node % MAX_NODES


def node_of(token: int) -> int | None:
    """The weights that sampled `token`; None for a token that is no word of theirs."""
    return token - _FIRST_NODE if token >= _FIRST_NODE else None


@functools.cache
def joiner() -> Joiner:
    """Tokenizer and chat template of the language, as sessions use them."""
    words = [*_CONTROL, *_WORDS, *(f"w{node}" for node in range(MAX_NODES))]
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": text,
                "special": True,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            for i, text in enumerate(_CONTROL)
        ],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"\n| |[^\n ]+"},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {text: i for i, text in enumerate(words)}, "unk_token": "?"},
    }
    tokenizer = Tokenizer(
        json.dumps(content),
        special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        template_sources={"default": _TEMPLATE},
        name="chaos",
    )
    return Joiner(tokenizer, choose_family("chatml", tokenizer))
