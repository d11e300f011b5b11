"""A small byte-level ChatML tokenizer, as a folder that a model would ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

CHATML = (
    "{%- for message in messages -%}"
    "{%- if loop.first and tools -%}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{%- endif -%}"
    "{%- set role = 'user' if message.role == 'tool' else message.role -%}"
    "{{ '<|im_start|>' ~ role ~ '\n' }}"
    "{%- if message.role == 'tool' -%}"
    "{{ '<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}"
    "{%- else -%}"
    "{%- if message.reasoning_content %}{{ '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' }}{% endif -%}"
    "{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    '{{ \'\n<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)


def write_tokenizer(folder: Path, *, template: str = CHATML, **config: Any) -> Path:
    """A folder as a model ships it: byte-level BPE, ChatML control tokens, tool marks that are added but plain."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    control = [AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    plain = [AddedToken(t, special=False, normalized=False) for t in ("<tool_call>", "</tool_call>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*control, *plain],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant system the answer is a word and another number"] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
