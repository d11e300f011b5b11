"""A fake SGLang server that runs in a thread, records what it is asked, and can be told what to answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

INFO = {
    "model_path": "m",
    "served_model_name": "m",
    "version": "0.5.23",
    "is_generation": True,
    "weight_version": "3",
    "loads": [{"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 5, "token_usage": 0.25}],
}


class FakeEngine:
    """Answers GET with `INFO` and POST /generate with the body it got; `answers` overrides single paths."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.release = threading.Event()
        """Requests whose body says `"hold": true` are answered when this is set."""
        self.held = threading.Semaphore(0)
        """Counts the requests that are being held."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def generated(self) -> list[dict[str, Any]]:
        """Bodies of the /generate requests so far."""
        return [body for _, path, body in self.calls if path == "/generate"]

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in self.answers:
            return self.answers[path]
        if path == "/generate":
            if body.get("hold"):
                self.held.release()
                self.release.wait(30)
            return 200, {"engine": self.url, "body": body}
        return (200, INFO) if method == "GET" else (200, {"status": "ok"})

    def _handler(fake) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._serve({})

            def do_POST(self) -> None:
                raw = self._body()
                self._serve(json.loads(raw) if raw else {})

            def _body(self) -> bytes:
                if self.headers.get("transfer-encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("content-length") or 0))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def _serve(self, body: dict[str, Any]) -> None:
                fake.calls.append((self.command, self.path, body))
                fake.headers.append({key.lower(): value for key, value in self.headers.items()})
                status, answer = fake.answer(self.command, self.path.partition("?")[0], body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Silence."""

        return Handler


@pytest.fixture
def fake_engine() -> Iterator[Callable[[], FakeEngine]]:
    """Start as many fake engines as a test asks for."""
    engines: list[FakeEngine] = []

    def start() -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
