"""Ctrl-C, once: close the running trial, stop the server, print the summary. Twice: as Python does it."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from runner.errors import Cancelled


class Interrupt:
    """Turns the first SIGINT or SIGTERM into a request that waiting calls see; use as a context manager.

    Args:
        say: Told once what the signal will do.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._asked = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    @property
    def asked(self) -> bool:
        """Whether somebody asked to stop."""
        return self._asked.is_set()

    def check(self) -> None:
        """Raises ``Cancelled`` once somebody asked to stop."""
        if self._asked.is_set():
            raise Cancelled("stopped by the user")

    def _first(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()
        self._restore()
        self._say("stopping: the running trial is closed and its server taken down (again to give up at once)")

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
