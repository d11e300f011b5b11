"""A progress line on stderr: drawn over itself on a terminal, one line every tenth elsewhere."""

from __future__ import annotations

import sys
import threading
import time


class ProgressLine:
    """Bytes written of a folder, counted from any of the threads that write its files.

    Args:
        total: bytes of the whole job.
    """

    def __init__(self, title: str, *, total: int, is_quiet: bool = False) -> None:
        self.found = 0
        """Bytes that an earlier run had written."""
        self._title, self._total, self._done = title, max(total, 1), 0
        self._start, self._drawn = time.monotonic(), 0.0
        self._lock = threading.Lock()
        self._is_quiet, self._is_terminal = is_quiet, sys.stderr.isatty()

    def start_at(self, num_bytes: int) -> None:
        """Count what an earlier run left of a file."""
        with self._lock:
            self.found += num_bytes
            self._done += num_bytes

    def add(self, num_bytes: int) -> None:
        """Count what was written now, and draw."""
        with self._lock:
            before, self._done = self._done, self._done + num_bytes
            if self._is_quiet:
                return
            now, ended = time.monotonic(), self._done >= self._total
            if self._is_terminal and (ended or now - self._drawn > 0.1):
                self._drawn = now
                print(f"\r{self._line()}", end="\n" if ended else "", file=sys.stderr, flush=True)
            elif not self._is_terminal and 10 * self._done // self._total > 10 * before // self._total:
                print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        share = self._done / self._total
        speed = (self._done - self.found) / max(time.monotonic() - self._start, 1e-9)
        bar = ("#" * int(30 * share)).ljust(30)
        return f"{self._title} [{bar}] {share:4.0%}  {self._done / 1e9:.2f} GB  {speed / 1e6:.0f} MB/s  "
