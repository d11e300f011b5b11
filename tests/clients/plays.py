"""What the scripted model says to each agent: one command that makes the file, then that it is done."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

TASK = "Create a file hello.txt containing the word hello"
SUBTASK = "SUBTASK: create the file that was asked for"
SUMMARY = "The file hello.txt was created with the word hello; nothing else is left to do."
COMMAND = "printf 'hello' > hello.txt"

Call = tuple[str, Mapping[str, Any]]


class Play:
    """A rule for the engine."""

    def __init__(self, shell: Call, *, delegate: Call | None = None, wait: Callable[[str], Call] | None = None) -> None:
        """
        Args:
            shell: the agent's tool that runs the command.
            delegate: its tool that gives the task to a sub-agent.
            wait: its tool that waits for the one that the delegation named.
        """
        self._shell = shell
        self._delegate = delegate
        self._wait = wait

    def __call__(self, prompt: str) -> str:
        turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", prompt, re.DOTALL)
        said = [text for role, text in turns[:-1] if role == "user"]
        results = [text for text in said if text.startswith("<tool_response>")]
        asked = [text for text in said if not text.startswith("<tool_response>")]
        if "title" in prompt[:3000] and TASK in prompt and "<tool_call>" not in prompt and "Tools:" not in prompt:
            return "Hello file"
        if re.search(r"CONTEXT CHECKPOINT COMPACTION|TEXT ONLY", asked[-1]):
            return SUMMARY
        is_agent = any(SUBTASK in text for text in asked)
        if self._delegate and not is_agent:
            if not results:
                return "I delegate.\n" + _call(self._delegate)
            if self._wait and len(results) == 1:
                return _call(self._wait(results[0]))
            return "Done: hello.txt created."
        if any("Another language model started" in text for text in asked):
            return "Done: hello.txt created."
        if asked[-1].rstrip().endswith(("Now say thanks", "And again")):
            return "Thanks."
        return "Done: hello.txt created." if results else "Creating the file.\n" + _call(self._shell)


class MiniPlay(Play):
    """mini-swe-agent ends a task with a command of its own."""

    def __call__(self, prompt: str) -> str:
        if "<tool_response>" in prompt:
            return "Finished.\n" + _call(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))
        return super().__call__(prompt)


def _call(call: Call) -> str:
    name, arguments = call
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _waiting(result: str) -> Call:
    found = re.search(r'"agent_id": ?"([^"]+)"', result)
    assert found, f"the delegation named no agent: {result!r:.200}"
    return "wait_agent", {"targets": [found[1]], "timeout_ms": 20000}


BASH: Call = ("Bash", {"command": COMMAND, "description": "Create the file"})
EXEC: Call = ("exec_command", {"cmd": COMMAND})
# Prints enough to fill the context that the test allows.
LONG_EXEC: Call = ("exec_command", {"cmd": f"{COMMAND}; seq 1 9000", "max_output_tokens": 20000})
AGENT: Call = (
    "Agent",
    {
        "description": "make file",
        "prompt": SUBTASK,
        "subagent_type": "general-purpose",
        "run_in_background": False,
    },
)

PLAYS: dict[str, Play] = {
    "claude": Play(BASH),
    "claude-subagent": Play(BASH, delegate=AGENT),
    "codex": Play(EXEC),
    "codex-long": Play(LONG_EXEC),
    "codex-subagent": Play(EXEC, delegate=("spawn_agent", {"message": SUBTASK, "task_name": "sub"}), wait=_waiting),
    "opencode": Play(("bash", {"command": COMMAND, "description": "Create the file"})),
    "mini": MiniPlay(("bash", {"command": COMMAND})),
}
