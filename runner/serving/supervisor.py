"""The process that holds one server's whole tree and ends it, whatever happens to the node that asked for it.

It leaves the node's process tree (double fork, own session), becomes the reaper of every orphan below it, and waits
for the first of: a stop request, the end of the pipe from the node, the end of an owner, a signal, or the end of the
server. Then it takes down the leader, its group, every descendant and everything with the trial's marker, and says so;
when nobody asked for it, it says why before it begins. It speaks JSON lines: an order and stop requests on standard
input, events on standard output. Linux and the standard library only. What it cannot do is survive its own SIGKILL:
the node reaps by marker then.
"""

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from runner.serving.log import CappedLog
from runner.serving.processes import (
    SUPERVISOR_VARIABLE,
    TRIAL_VARIABLE,
    descendants,
    first_gone,
    group,
    identity,
    kill_all,
    marked,
    remove_orphaned,
    send,
    shared_memory,
)
from runner.serving.redaction import redact

ABANDONED_GRACE_S = 4.0
"""From SIGTERM to SIGKILL when the node is gone: all must be over within 10 s."""

LOG_NAME = "server.log"

_VOLUNTARY_S = 1.0
"""What remains after the leader's own end may clean up (resource trackers free shared memory) before SIGKILL."""

_KILL_S = 4.0
_LOOK_EVERY_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class ServerOrder:
    """What a supervisor is told; goes to it as one JSON line.

    Attributes:
        argv: The server's command line.
        env: The server's whole environment; the marker is added.
        folder: Where the server runs and its ``server.log`` goes.
        marker: Carried by every process of the tree.
        owners: Name -> process; the end of any of them is the server's.
        hidden: Values that must not reach the log.
        remove: Folders that go when the server has gone.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    folder: str
    marker: str
    owners: Mapping[str, int]
    hidden: Sequence[str] = ()
    remove: Sequence[str] = ()


class Supervisor:
    """Holds one server. ``run`` returns when nothing of it is left, or what is left cannot be killed."""

    def __init__(self, order: ServerOrder) -> None:
        self._order = order
        self._log = CappedLog(Path(order.folder) / LOG_NAME, lambda text: redact(text, order.hidden))
        self._selector = selectors.DefaultSelector()
        self._exit_code: int | None = None
        self._kill_at: float | None = None  # Set: take the server down, and no later than then by force.
        self._requests = b""
        self._shared_memory: set[Path] = set()
        self._leader = 0
        self._complained = False
        self._ready = False
        self._looked_at = 0.0

    def run(self) -> None:
        """Start the server, wait, take it down, report."""
        self._watch_signals()
        self._watch_owners()
        try:
            self._spawn()
        except OSError as error:
            _tell(event="refused", error=str(error))
            self._remove_folders()
            return
        self._pump(lambda: self._exit_code is not None or self._kill_at is not None)
        if self._exit_code is None:
            self._terminate()
        self._clean()
        self._log.close()

    def _spawn(self) -> None:
        order = self._order
        if (gone := first_gone(order.owners)) is not None:
            raise ProcessLookupError(f"{gone} is gone")
        own = {TRIAL_VARIABLE: order.marker, SUPERVISOR_VARIABLE: identity(os.getpid()) or "", "SPT_NOENV": "1"}
        reading, writing = os.pipe()
        process = subprocess.Popen(
            order.argv,
            env={**order.env, **own},
            cwd=order.folder,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
        os.close(writing)
        os.set_blocking(reading, False)
        self._selector.register(reading, selectors.EVENT_READ, self._read_log)
        self._leader = process.pid
        process.returncode = 0  # This loop reaps every child itself; Popen must not try.
        _tell(event="started", pid=self._leader, supervisor=os.getpid())

    def _watch_signals(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        self._selector.register(reading, selectors.EVENT_READ, self._reap)

    def _watch_owners(self) -> None:
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, self._read_requests)
        # The pipe alone would not tell while a process that the node forked still holds its other end.
        for name, pid in self._order.owners.items():
            with contextlib.suppress(OSError):
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, partial(self._owner_gone, name))

    def _end_within(self, grace_s: float) -> None:
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _abandon(self, why: str) -> None:
        """End a server that did nothing wrong. The reason goes ahead, or its end would be taken for its own."""
        _tell(event="abandoned", why=why)
        self._end_within(ABANDONED_GRACE_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._abandon(f"its supervisor was ended by {signal.Signals(number).name}")

    def _owner_gone(self, name: str, fd: int) -> None:
        self._selector.unregister(fd)
        self._abandon(f"{name} is gone")

    def _read_requests(self, fd: int) -> None:
        data = os.read(fd, 4096)
        if not data:
            self._owner_gone("the node", fd)
            return
        *lines, self._requests = (self._requests + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "stop" in message:
                self._end_within(float(message["stop"]))
            else:
                self._look_at_shared_memory()
                self._ready = True
                _tell(event="ready")

    def _read_log(self, fd: int) -> None:
        """Take what the pipe holds, but not for ever: a flood must not keep the loop from its other duties."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                data = os.read(fd, 64 * 1024)
                if not data:
                    self._selector.unregister(fd)
                    return
                self._log.feed(data)
                if self._log.error and not self._complained:
                    self._complained = True
                    _tell(event="log_lost", error=self._log.error)

    def _reap(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(fd, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == self._leader:
                    self._exit_code = os.waitstatus_to_exitcode(ended[1])
                    self._serve(self._read_log)  # Its last words are in the file before its end is told.
                    _tell(event="exited", code=self._exit_code)

    def _pump(self, until: Callable[[], bool]) -> None:
        """Serve every file descriptor until ``until()`` holds."""
        while not until():
            for key, _ in self._selector.select(0.05 if self._kill_at else 0.5):
                if key.fd in self._selector.get_map():  # An earlier handler of this turn may have closed it.
                    key.data(key.fd)
            if not self._ready and time.monotonic() > self._looked_at + _LOOK_EVERY_S:
                self._look_at_shared_memory()

    def _look_at_shared_memory(self) -> None:
        """Remember what the tree has mapped: a process that is killed leaves its segments behind, and no trace.

        While the server starts, and once when it is ready; never while it is measured.
        """
        self._looked_at = time.monotonic()
        self._shared_memory |= shared_memory(self._victims())

    def _terminate(self) -> None:
        begin = time.monotonic()
        self._look_at_shared_memory()
        send(self._leader, signal.SIGTERM)
        self._pump(lambda: self._exit_code is not None or time.monotonic() > (self._kill_at or 0))
        _tell(event="terminated", obeyed=self._exit_code is not None, seconds=time.monotonic() - begin)

    def _clean(self) -> None:
        begin = time.monotonic()
        if self._exit_code is not None:
            self._end_within(_VOLUNTARY_S)
            self._pump(lambda: not self._victims() or time.monotonic() > begin + _VOLUNTARY_S)
        remaining = self._victims()
        self._look_at_shared_memory()
        left = kill_all(self._victims_now, _KILL_S)
        self._serve(self._read_log)
        remove_orphaned(self._shared_memory)
        self._remove_folders()
        _tell(
            event="clean",
            killed=len(remaining),
            left=list(left),
            seconds=time.monotonic() - begin,
        )

    def _remove_folders(self) -> None:
        for folder in self._order.remove:
            shutil.rmtree(folder, ignore_errors=True)

    def _victims_now(self) -> set[int]:
        self._serve(self._reap)
        return self._victims()

    def _serve(self, handler: Callable[[int], None]) -> None:
        """One turn of one handler, out of the loop."""
        for key in list(self._selector.get_map().values()):
            if key.data == handler:
                handler(key.fd)

    def _victims(self) -> set[int]:
        named = {process.pid for process in marked(self._order.marker) if process.marker == self._order.marker}
        return (descendants(os.getpid()) | group(self._leader) | named) - {os.getpid()}


def main() -> None:
    """Detach, read the order, supervise. Called by ``runner.serving.supervised``."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT in its children; a server must see it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Supervisor(ServerOrder(**json.loads(_read_line()))).run()


def _read_line() -> bytes:
    """The first line of standard input, byte by byte so that nothing after it is swallowed."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit("the node went away before it gave an order")
        line += byte
    return line


def _tell(**event: object) -> None:
    """One event to the node, if it is still there to hear it."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(event).encode() + b"\n")


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler, not SIG_IGN, which the server would inherit."""
