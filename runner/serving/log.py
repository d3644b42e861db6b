"""A server's log on disk: written with a cap, read while it grows. Standard library only (the supervisor uses it)."""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

HEAD_BYTES = 8 * 1024 * 1024
"""Kept from the start of a log: a start of vLLM writes well under 1 MiB."""

TAIL_BYTES = 2 * 1024 * 1024
"""Kept from the end of a log that outgrew the head."""

_LONGEST_LINE = 64 * 1024


class CappedLog:
    """Writes head and tail of a stream of bytes to a file, in whole lines that went through ``clean``.

    What comes after the head stays in memory, the newest ``tail_bytes`` of it, until ``close``. A disk that is full
    costs the log's text, never the writer: ``error`` says what happened.
    """

    def __init__(
        self,
        path: Path,
        clean: Callable[[str], str],
        *,
        head_bytes: int = HEAD_BYTES,
        tail_bytes: int = TAIL_BYTES,
    ) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._clean = clean
        self._room = head_bytes
        self._tail_bytes = tail_bytes
        self._tail: deque[bytes] = deque()
        self._held = 0
        self._left_out = 0
        self._unfinished = b""
        self.error: str | None = None

    def feed(self, data: bytes) -> None:
        """Take what the server wrote; a line still without its end waits for it. A carriage return ends one too."""
        data = self._unfinished + data.replace(b"\r", b"\n")
        end = data.rfind(b"\n") + 1
        if len(data) - end > _LONGEST_LINE:
            end = len(data)
        self._unfinished = data[end:]
        if end:
            self._take(data[:end])

    def close(self) -> None:
        """Write the tail that was held back, with the number of bytes left out before it."""
        if self._unfinished:
            self._take(self._unfinished + b"\n")
        if self._left_out:
            self._write(f"[... {self._left_out} bytes left out ...]\n".encode())
        self._write(b"".join(self._tail))
        os.close(self._file)

    def _take(self, lines: bytes) -> None:
        """Whole lines go to the file while there is room, then to memory; cleaned together, which is much faster."""
        cleaned = self._clean(lines.decode(errors="replace")).encode()
        if len(cleaned) <= self._room and not self._tail:
            self._room -= len(cleaned)
            self._write(cleaned)
            return
        self._tail.append(cleaned)
        self._held += len(cleaned)
        while self._held > self._tail_bytes and len(self._tail) > 1:
            gone = len(self._tail.popleft())
            self._held -= gone
            self._left_out += gone

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.error = str(error)


class LogFollower:
    """Reads the whole lines that were added to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._unfinished = ""

    def lines(self) -> list[str]:
        """New lines, oldest first; none when the file is not there yet."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(HEAD_BYTES + TAIL_BYTES)
        self._offset += len(data)
        lines = (self._unfinished + data.decode(errors="replace")).split("\n")
        self._unfinished = lines.pop()
        return [line for line in lines if line.strip()]
