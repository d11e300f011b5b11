"""How each agent is started against a session: its command, its environment, its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plays import TASK

CODEX_CONFIG = """\
model = "policy"
model_provider = "session"
check_for_update_on_startup = false
[model_providers.session]
name = "session"
base_url = "{base_url}"
env_key = "SESSION_KEY"
wire_api = "responses"
[analytics]
enabled = false
[otel]
exporter = "none"
"""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Commands to run one after the other in one folder."""

    commands: Sequence[Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    home: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files below the home folder."""
    work: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files below the folder it works in."""


def claude(folder: Path, base_url: str, key: str, *more: str) -> Agent:
    """Claude Code; each of `more` is a prompt that continues the conversation."""
    program = str(folder / "npm/node_modules/@anthropic-ai/claude-code-linux-x64/claude")
    ask = [program, "--dangerously-skip-permissions", "--output-format", "json"]
    return Agent(
        commands=[[*ask, "-p", TASK], *([*ask, "--continue", "-p", prompt] for prompt in more)],
        env={
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": key,
            "ANTHROPIC_MODEL": "policy",
            "ANTHROPIC_SMALL_FAST_MODEL": "policy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
            "IS_SANDBOX": "1",
        },
    )


def codex(folder: Path, base_url: str, key: str, *, compact_at: int | None = None) -> Agent:
    """Codex; `compact_at` tokens of context make it compact."""
    program = str(folder / "npm/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex")
    limits = [] if compact_at is None else ["-c", f"model_auto_compact_token_limit={compact_at}"]
    if compact_at is not None:
        limits += ["-c", f"model_context_window={4 * compact_at}", "-c", "tool_output_token_limit=20000"]
    flags = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return Agent(
        commands=[[program, "exec", *flags, *limits, TASK]],
        env={"SESSION_KEY": key},
        home={".codex/config.toml": CODEX_CONFIG.format(base_url=base_url)},
    )


def opencode(folder: Path, base_url: str, key: str) -> Agent:
    """opencode."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "session",
        "options": {"baseURL": base_url, "apiKey": key},
        "models": {"policy": {"name": "policy", "limit": {"context": 128000, "output": 8192}}},
    }
    config = {"autoupdate": False, "share": "disabled", "model": "session/policy", "provider": {"session": provider}}
    switches = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")
    return Agent(
        commands=[[str(folder / "npm/node_modules/opencode-linux-x64/bin/opencode"), "run", TASK]],
        env={f"OPENCODE_DISABLE_{name}": "1" for name in switches},
        work={"opencode.json": json.dumps(config)},
    )


def mini(folder: Path, base_url: str, key: str) -> Agent:
    """mini-swe-agent."""
    program = str(folder / "mini/bin/mini")
    return Agent(
        commands=[[program, "-y", "--exit-immediately", "-m", "openai/policy", "-t", TASK]],
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "OPENAI_API_KEY": key,
            "OPENAI_API_BASE": base_url,
            "OPENAI_BASE_URL": base_url,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
        },
    )


def plain_environment(home: Path) -> dict[str, str]:
    """Nothing of the environment of the tests but where programs are."""
    return {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "xterm", "LANG": "C.UTF-8", "TMPDIR": str(home)}
