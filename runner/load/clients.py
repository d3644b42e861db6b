"""The client processes, seen from their parent: started once, given one cell after another.

Plain subprocesses and pipes: safe to start from any thread of a threaded process (Ray runs trials off the main one).
"""

import os
import resource
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

import msgspec

from runner.errors import EnvironmentFault
from runner.load.wire import Drop, Frames, Order, Progress, Samples, Stop, write_frame

STREAMS_PER_PROCESS = 256
"""Streams one process carries well; more processes are only started while there are cores for them.

Source: vllm-project/vllm#7935 and #4806: one Python client saturates at high concurrency.
"""

RESERVED_FILES = 64
"""Descriptors a client process needs beside its connections."""

_QUIT_S = 5.0
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def processes_for(concurrency: int, cores: int | None = None) -> int:
    """Client processes for a level: one for every 256 streams, on at most half the cores."""
    wanted = -(-concurrency // STREAMS_PER_PROCESS)
    return max(1, min(wanted, (cores or len(os.sched_getaffinity(0))) // 2))


def shares(total: int, parts: int) -> list[int]:
    """Split exactly: the shares sum to ``total`` and differ by at most 1."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def refusal(concurrency: int, processes: int) -> str | None:
    """Why this machine cannot hold ``concurrency`` connections open; None when it can."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = max(shares(concurrency, processes))
    if hard in (resource.RLIM_INFINITY,) or hard >= share + RESERVED_FILES:
        return None
    return (
        f"C={concurrency} needs {share + RESERVED_FILES} open files in each of {processes} client process(es), "
        f"the hard limit is {hard}: raise it (ulimit -Hn) or measure a lower concurrency"
    )


class _Client:
    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", "runner.load.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.orders = cast(BinaryIO, self.process.stdin)
        self.answers = cast(BinaryIO, self.process.stdout)
        os.set_blocking(self.answers.fileno(), False)
        self.frames = Frames(msgspec.msgpack.Decoder(Progress | Samples))
        self.latest: Progress | None = None
        self.samples: Samples | None = None

    def tell(self, message: Order | Stop | Drop) -> None:
        try:
            write_frame(self.orders, message)
        except BrokenPipeError:
            raise self.death() from None

    def read(self) -> None:
        data = self.answers.read(1 << 20)
        if data == b"":
            raise self.death()
        for message in self.frames.feed(data or b""):
            if isinstance(message, Samples):
                self.samples = message
            else:
                self.latest = message

    def death(self) -> EnvironmentFault:
        return EnvironmentFault(f"a client process of the load benchmark ended by itself (exit {self.process.wait()})")

    def quit(self) -> None:
        self.orders.close()
        try:
            self.process.wait(_QUIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()


class Clients:
    """Client processes, kept over the cells of a ladder. A context manager: leaving it ends them all."""

    def __init__(self) -> None:
        self._clients: list[_Client] = []
        self._busy: list[_Client] = []
        self._selector = selectors.DefaultSelector()
        self._errors: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every client process; a cell under way is lost."""
        for client in self._clients:
            self._selector.unregister(client.answers)
            client.quit()
        self._clients = []
        self._busy = []

    def prepare(self, processes: int) -> None:
        """Start processes until there are ``processes``; returns at once, they come up by themselves."""
        while len(self._clients) < processes:
            client = _Client()
            self._clients.append(client)
            self._selector.register(client.answers, selectors.EVENT_READ, client)

    def begin(self, orders: list[Order]) -> None:
        """Begin a cell, one order a process."""
        self.prepare(len(orders))
        self._busy = self._clients[: len(orders)]
        self._errors = []
        for client, order in zip(self._busy, orders, strict=True):
            client.latest = client.samples = None
            client.tell(order)

    def stop(self) -> None:
        """Let the open requests end and begin no more."""
        for client in self._busy:
            client.tell(Stop())

    def drop(self) -> None:
        """Fail the requests that are still open."""
        for client in self._busy:
            client.tell(Drop())

    def poll(self, timeout_s: float) -> None:
        """Take in what the clients say for ``timeout_s``.

        Raises:
            EnvironmentFault: A client process died.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and not self.finished:
            for key, _ in self._selector.select(left):
                client: _Client = key.data
                before = client.latest
                client.read()
                if client.latest is not None and client.latest is not before:
                    self._errors += client.latest.errors

    @property
    def progress(self) -> list[Progress]:
        """The latest word of each process; empty until all have spoken."""
        latest = [client.latest for client in self._busy if client.latest is not None]
        return latest if len(latest) == len(self._busy) else []

    @property
    def errors(self) -> list[str]:
        """Error texts of the cell so far, oldest first."""
        return self._errors

    @property
    def finished(self) -> bool:
        """Whether every process has handed in its samples."""
        return bool(self._busy) and all(client.samples is not None for client in self._busy)

    def samples(self) -> list[Samples]:
        """Each process's samples, once ``finished``."""
        return [client.samples for client in self._busy if client.samples is not None]
