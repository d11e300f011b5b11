"""`verify`: it passes what joins exactly, and each kind of break is found and named."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miles_tito import Tokenizer, TokenizerError, load_tokenizer, verify
from miles_tito.cli import main
from miles_tito.sessions.session import Session
from miles_tito.tokens.families import FAMILIES
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from models_at_hand import MODELS, WITH_TOOLS, joiner_of, tokenizer_of

WriteTokenizer = Callable[..., Path]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("Qwen3-2507", "Qwen3.6", "DeepSeek-V3.2")])
def test_every_family_joins_exactly_in_every_case(name: str):
    report = verify(tokenizer_of(name), family=MODELS[name].family, conversations=8)
    assert report.ok, report.table()
    played = [finding.case for finding in report.findings if finding.group == "played"]
    assert any("tools" in case for case in played) == (name in WITH_TOOLS)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("DeepSeek-V3.2", "DeepSeek-V4", "Inkling")])
def test_auto_proves_every_template_that_a_model_ships(name: str):
    """The others ship none: their family brings one."""
    family = choose_family("auto", tokenizer_of(name))
    known = FAMILIES[MODELS[name].family]
    assert (family.close, family.openers) == (known.close, known.openers)
    assert family.reasoning == (None if name == "Qwen3-2507" else known.reasoning)  # that model does not reason
    assert (family.tool_call, family.channels, family.late_system) == (
        known.tool_call,
        known.channels,
        known.late_system,
    )


def test_the_same_seed_plays_the_same_conversations(tokenizer: Tokenizer):
    first, second = (verify(tokenizer, seed=7, conversations=10) for _ in range(2))
    assert first.findings == second.findings


def _forget_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_tito.sessions.session.value_key", lambda value: secrets.token_bytes(16))


def _train_a_prompt_token(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Session.commit

    def wrong(self: Any, turn: Any, generation: Any) -> Any:
        node = commit(self, turn, generation)
        node.completion_ids = np.append(node.completion_ids[:-1], np.int32(5))
        return node

    monkeypatch.setattr(Session, "commit", wrong)


def _lose_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = Joiner.extend
    monkeypatch.setattr(Joiner, "extend", lambda self, messages, *a, **k: extend(self, messages[:1], *a, **k))


def _let_text_steer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "guard", lambda self, value, everything=False: value)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (_forget_a_reply, "not found again"),
        (_train_a_prompt_token, "the ids trained are not the ids sampled"),
        (_lose_a_message, "not in the prompt"),
        (_let_text_steer, "control tokens come out of message text"),
    ],
)
def test_a_fault_in_sessions_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], why: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    fault(monkeypatch)
    report = verify(tokenizer, family="tiny", conversations=40)
    assert not report.ok
    assert any(why in finding.message for finding in report.broken), report.table()


def test_the_command_prints_a_table_and_leaves_with_0(
    tmp_path: Path, write_tokenizer: WriteTokenizer, capsys: pytest.CaptureFixture[str]
):
    folder = write_tokenizer(tmp_path)
    assert main(["verify", "--tokenizer", str(folder), "--conversations", "5"]) == 0
    out = capsys.readouterr().out
    assert "random conversations" in out
    assert "exact joins hold in every case" in out


def test_the_command_leaves_with_1_and_names_what_breaks(
    tmp_path: Path, write_tokenizer: WriteTokenizer, chatml: str, capsys: pytest.CaptureFixture[str]
):
    forgetful = chatml.replace(
        "{{ '<|im_start|>' ~ role", "{{ '!' if loop.first and loop.length > 2 }}{{ '<|im_start|>' ~ role"
    )
    folder = write_tokenizer(tmp_path, template=forgetful)
    assert main(["verify", "--tokenizer", str(folder), "--family", "tiny", "--conversations", "1", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert any("rewritten" in finding["message"] for finding in report["findings"])
    assert main(["verify", "--tokenizer", str(folder)]) == 1
    assert "cannot prove exact joins" in capsys.readouterr().out


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(TokenizerError, match=r"no `tokenizer\.json`"):
        verify(tmp_path)
    assert main(["verify", "--tokenizer", str(tmp_path)]) == 1
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_family_of_another_model_is_named(tokenizer: Tokenizer):
    report = verify(tokenizer, family="kimi-k2", conversations=1)
    assert not report.ok or report.family == "kimi-k2"
    assert not verify(tokenizer, family="gemma-3").ok


def test_two_beginning_tokens_are_reported(tmp_path: Path, write_tokenizer: WriteTokenizer, chatml: str):
    """A template that writes the token, and text that begins with it once more."""
    template = "{{ bos_token }}{{ bos_token }}" + chatml
    folder = write_tokenizer(tmp_path, template=template, bos_token="<|endoftext|>")
    report = verify(load_tokenizer(folder), conversations=1)
    warnings = [finding for finding in report.findings if finding.level == "warning"]
    assert any("'<|endoftext|>' 2 times" in finding.message for finding in warnings)


@pytest.mark.parametrize("name", ["Llama-3.1", "DeepSeek-V4", "Gemma-3"])
def test_a_prompt_begins_with_one_beginning_token(name: str):
    """Whether or not the tokenizer itself would add one."""
    joiner = joiner_of(name)
    from miles_tito.tokens.merge import Setting

    ids = joiner.start([{"role": "user", "content": "q"}], Setting())
    assert ids[0] == joiner.tokenizer.bos_id
    assert (ids == joiner.tokenizer.bos_id).sum() == 1
