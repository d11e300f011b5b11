"""The tokenizer of the tiny model: a byte-level BPE trained from a seed, and its chat template.

Two splits make it exact to join: every digit is a token of its own, and a newline always ends a token. A chat header
ends in a newline, so encoding a prefix and its continuation apart gives the ids of encoding them together.
Whitespace and punctuation do not split, so the constant pieces of a tool call become one token each.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 448
MAX_LENGTH = 2048
"""Positions of the model, and so the longest text that its tokenizer announces."""
PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (PAD, IM_START, IM_END)
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that decoding keeps, as in Qwen3: a tool-call parser reads them from the text."""

CHAT_TEMPLATE = r"""
{%- macro listing() -%}
    Tools:
    {%- for tool in tools %}
        {%- set function = tool.function if tool.function is defined else tool %}
        {{- ' ' ~ function.name ~ '(' ~ (function.parameters.properties.keys() | join(', ')) ~ ')' }}
    {%- endfor %}
{%- endmacro -%}
{%- set own_system = messages and messages[0].role == 'system' -%}
{%- if tools and not own_system -%}
    {{- '<|im_start|>system\n' ~ listing() ~ '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content or '' -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\n<tool_response>\n' ~ content ~ '\n</tool_response><|im_end|>\n' }}
    {%- else -%}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ content }}
        {%- if loop.first and tools and own_system -%}
            {{- '\n' ~ listing() }}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function is defined else call -%}
            {%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}
            {{- '\n' if content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' ~ function.name ~ '", "arguments": ' ~ arguments ~ '}\n</tool_call>' }}
        {%- endfor -%}
        {{- '<|im_end|>\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' }}
{%- endif -%}
""".strip()
"""ChatML with Hermes tool calls. Append-only: a message renders the same whatever follows it."""


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` tokens over a synthetic corpus drawn with `seed`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", behavior="merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, normalized=False) for t in CONTROL_TOKENS + TOOL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(random.Random(seed)), trainer=trainer)
    return _keep_tool_tokens(tokenizer)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as Transformers and SGLang read them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": PAD,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _keep_tool_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Unmark the tool tokens as special, which the BPE trainer does to every added token."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return Tokenizer.from_str(json.dumps(content))


_TEXT = (
    "add two numbers with the tool and give the answer",
    "what is the sum of this list of numbers?",
    "find the first word in the text and sort the rest",
    "use a tool for each call, then answer in one line",
    "you can count how many there are; take the max or the min of them",
    "the result is not right, do it once more",
)
_NAMES = ("add", "sub", "mul", "max", "search", "python")
_KEYS = ("a", "b", "x", "query", "code")


def _corpus(rng: random.Random) -> list[str]:
    """Chat pieces, tool calls and short sentences, already cut where a special token would stand."""
    lines = ["system\n", "user\n", "assistant\n", "\n"] * 200
    words = " ".join(_TEXT).split()
    for _ in range(400):
        name, first, second = _call(rng)
        arguments = f'{{"{first}": {rng.randrange(100)}, "{second}": {rng.randrange(100)}}}'
        lines += [
            f'{{"name": "{name}", "arguments": {arguments}}}\n',
            f"Tools: {name}({first}, {second})",
            f"{rng.randrange(100)}+{rng.randrange(100)}=?",
            " ".join(rng.choices(words, k=6)) + rng.choice(".?!"),
        ]
    return lines


def _call(rng: random.Random) -> tuple[str, str, str]:
    if rng.random() < 0.5:
        return "add", "a", "b"
    first, second = rng.sample(_KEYS, 2)
    return rng.choice(_NAMES), first, second
