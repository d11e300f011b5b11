"""Two trainer ranks in processes of their own, for tests of staged pushes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Trainer:
    """Two ranks that carry out orders together."""

    def __init__(self, folder: Path, *, store: str = "store") -> None:
        script = Path(__file__).with_name("staged_rank.py")
        command = [sys.executable, str(script)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._ranks = [
            subprocess.Popen(
                [*command, str(rank), str(folder / store), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for rank in range(2)
        ]

    @property
    def is_alive(self) -> bool:
        return all(rank.poll() is None for rank in self._ranks)

    def wait_until_ready(self) -> None:
        for rank in self._ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"

    def push(self, source: str, transport: str, version: int, urls: list[str], **more: object) -> dict[str, Any]:
        order = {"source": source, "transport": transport, "version": version, "urls": urls, **more}
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(order) + "\n")
            rank.stdin.flush()
        answers: list[dict[str, Any]] = []
        for rank in self._ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            answers.append(json.loads(line) if line else {"died": True})
        assert answers[0] == answers[1] or answers[1] == {"died": True}
        return answers[0]

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(30)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()
