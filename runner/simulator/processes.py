"""The server's process tree, as vLLM's: API server (leader), engine core below it, one worker a GPU below that.

Children are forked before any thread exists; they only sleep, carry the environment, and end as vLLM's do: a worker
when the engine core is gone, the engine core on SIGTERM or when a worker dies, but not when the API server is killed.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from types import FrameType

from runner.simulator.faults import Faults
from runner.simulator.launch import Launch

_PR_SET_NAME = 15
_ORPHAN_LIFE_S = 900.0
"""Orphans made on purpose end by themselves after this, should nobody find them."""


@dataclass(frozen=True)
class Children:
    """Process ids below the API server."""

    engine: int
    workers: tuple[int, ...]


def start(launch: Launch, faults: Faults, listener: socket.socket) -> Children:
    """Fork the engine core, which forks the workers.

    Args:
        launch: Says how many workers there are.
        faults: What goes wrong with them.
        listener: The API server's socket, which no child may hold: its port must be free when the API server is gone.
    """
    if faults.double_fork:
        _double_fork(listener)
    reading, writing = os.pipe()
    engine = os.fork()
    if engine == 0:
        listener.close()
        os.close(reading)
        _engine(launch, faults, writing)
    os.close(writing)
    with os.fdopen(reading) as told:
        workers = tuple(int(word) for word in told.read().split())
    return Children(engine, workers)


def worker_names(launch: Launch) -> list[str]:
    """Names of the workers as in vLLM's log."""
    names = []
    for rank in range(launch.world):
        stage, place = divmod(rank, launch.tensor_parallel)
        parts = [f"PP{stage}"] if launch.pipeline_parallel > 1 else []
        parts += [f"TP{place}"] if launch.tensor_parallel > 1 else []
        names.append("Worker" + "".join(f"_{part}" for part in parts))
    return names


def _engine(launch: Launch, faults: Faults, tell: int) -> None:
    _name("VLLM::EngineCore")
    alive, held = os.pipe()
    names = worker_names(launch)
    pids: list[int] = []
    for rank, name in enumerate(names):
        pid = os.fork()
        if pid == 0:
            os.close(held)
            os.close(tell)
            _worker(f"VLLM::{name}", alive, faults, orphan=faults.orphan and rank == 0)
        pids.append(pid)
    os.close(alive)

    def stop(number: int, frame: FrameType | None) -> None:
        _kill(pids, signal.SIGTERM)
        os._exit(0)

    _on_signals(faults, stop)
    os.write(tell, " ".join(map(str, pids)).encode())
    os.close(tell)
    pid, _ = os.waitpid(-1, 0)
    sys.stdout.write(
        f"(EngineCore pid={os.getpid()}) ERROR [multiproc_executor.py] Worker proc VllmWorker-{pids.index(pid)} "
        "died unexpectedly, shutting down executor.\n"
    )
    sys.stdout.flush()
    _kill([other for other in pids if other != pid], signal.SIGKILL)
    os._exit(1)


def _worker(name: str, alive: int, faults: Faults, *, orphan: bool) -> None:
    _name(name)
    if orphan and os.fork() == 0:
        os.close(alive)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(_ORPHAN_LIFE_S)
        os._exit(0)
    _on_signals(faults, lambda number, frame: os._exit(0))
    os.read(alive, 1)
    os._exit(0)


def _on_signals(faults: Faults, stop: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if faults.sigterm_deaf else stop)  # type: ignore[arg-type]


def _double_fork(listener: socket.socket) -> None:
    child = os.fork()
    if child == 0:
        listener.close()
        if os.fork() == 0:
            _name("VLLM::Resource")
            time.sleep(_ORPHAN_LIFE_S)
        os._exit(0)
    os.waitpid(child, 0)


def _kill(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _name(name: str) -> None:
    """The name that ps shows; the kernel keeps 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
