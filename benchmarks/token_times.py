"""Prints when each token of one request arrives, in a process that does nothing else.

python benchmarks/token_times.py URL RID      seconds of the system's monotonic clock, a line a token
"""

from __future__ import annotations

import json
import sys
import time

import httpx


def main(url: str, rid: str) -> None:
    sampling = {"max_new_tokens": 2000, "ignore_eos": True}
    body = {"input_ids": [5, 17, 42, 99], "stream": True, "rid": rid, "sampling_params": sampling}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=120, trust_env=False) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                if "error" in json.loads(line[6:]):
                    raise SystemExit(line)
                print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
