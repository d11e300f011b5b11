"""Tiny models that call a tool, and the tokenizer folder that they ship with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from miles_tito import load_tokenizer
from miles_tito.tokens.messages import normalize

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "miles-tito" / "tests"))

from small_tokenizer import write_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [],  # SGLang 0.5.23 gives every layer experts, and those of a dense one would never be loaded
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"n": {"type": "integer"}}}}}
TURNS = 3
OLD = ((3, 3, 3),)
NEW = ((5, 5, 5), (3, 5, 5), (3, 3, 5))
"""Numbers that the calls of a transcript look at: under the new weights also after turns that the old ones took."""
LEARNED = 0.005
"""Nats a token; the three transcripts of NEW leave .0026, as nothing says which one it will be."""
MAX_STEPS = 500


def make_versions(folder: Path, *, experts: bool) -> tuple[Path, Path]:
    """Two folders of one model, weights 0 and 1: it has learned to call `look`, then to look at another number."""
    import torch
    import transformers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for one another longer than such small products take
    torch.manual_seed(0)
    if experts:
        config = transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS)
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE))
    folders = folder / "version_0", folder / "version_1"
    for path, numbers in zip(folders, (OLD, NEW), strict=True):
        write_tokenizer(path)
        _learn(model, path, numbers)
        model.save_pretrained(path)
    torch.set_num_threads(threads)
    return folders


def _learn(model: Any, folder: Path, numbers: tuple[tuple[int, ...], ...]) -> None:
    """Until it knows the transcripts so well that whatever it samples calls the tool."""
    import torch

    batch = torch.stack([_transcript(folder, of_turns) for of_turns in numbers])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    loss = model(batch, labels=batch).loss
    for _ in range(MAX_STEPS):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = model(batch, labels=batch).loss
        if loss.item() < LEARNED:
            return
    raise AssertionError(f"after {MAX_STEPS} steps the loss is {loss.item():.4f} nats a token, wanted below {LEARNED}")


def _transcript(folder: Path, of_turns: tuple[int, ...]) -> Any:
    """Tokens [T] of a dialogue whose turn i looks at number `of_turns[i]`."""
    import torch

    tokenizer = load_tokenizer(folder)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is there?"}]
    for turn, number in enumerate(of_turns):
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"n": number}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": f"nothing at {turn}", "tool_call_id": "c"})
    text = tokenizer.render(normalize(messages), tools=[TOOL])
    return torch.from_numpy(tokenizer.encode_guarded(text)).long()
