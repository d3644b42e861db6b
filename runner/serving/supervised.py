"""The node's end of a supervisor: start one, hear what it says, ask it to stop, step in when it dies."""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import runner
from runner.errors import EnvironmentFault
from runner.serving.processes import reap, send
from runner.serving.supervisor import LOG_NAME, ServerOrder

_ROOT = str(Path(runner.__file__).parents[1])
_PROGRAM = f"import sys; sys.path.append({_ROOT!r}); from runner.serving.supervisor import main; main()"
"""Isolated from the caller's PYTHON* variables and folder, so that it starts the same way everywhere."""

_MARGIN_S = 15.0
"""What a supervisor may take beyond the grace given to the server before the node takes over."""


_LOOK_S = 2.0
"""Longest wait for a supervisor to look at the shared memory of a server that is ready; it takes milliseconds."""


@dataclasses.dataclass(frozen=True)
class Stopped:
    """How a server's tree went.

    Attributes:
        obeyed: Whether SIGTERM was enough for the leader.
        left: Processes that SIGKILL did not end.
        by: Who cleaned up: the supervisor, or the node after the supervisor's own death.
    """

    obeyed: bool
    left: tuple[int, ...]
    by: str
    durations_s: dict[str, float] = dataclasses.field(default_factory=dict)


class Supervised:
    """A server process and its tree, held by a supervisor of its own."""

    def __init__(self, order: ServerOrder) -> None:
        self.marker = order.marker
        self.log = Path(order.folder) / LOG_NAME
        self._events: dict[str, dict[str, Any]] = {}
        self._over = threading.Event()
        self._known = threading.Event()
        self._looked = threading.Event()
        with (Path(order.folder) / "supervisor.log").open("wb") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=order.folder,
            )
        self._send(dataclasses.asdict(order))
        self._popen.wait()  # The first process only forks; the supervisor itself is nobody's child any more.
        threading.Thread(target=self._listen, name=f"events-{self.marker}", daemon=True).start()
        self._await_start()

    @property
    def exit_code(self) -> int | None:
        """Of the leader, negative when a signal ended it; None while it lives or when nobody saw it end."""
        code: int | None = self._events.get("exited", {}).get("code")
        return code

    @property
    def pid(self) -> int:
        """Of the server's leader, which also leads its process group and session."""
        return int(self._events["started"]["pid"])

    @property
    def supervisor_pid(self) -> int:
        """Of the supervisor."""
        return int(self._events["started"]["supervisor"])

    @property
    def log_error(self) -> str | None:
        """Why the log is no longer written, if it is not."""
        error: str | None = self._events.get("log_lost", {}).get("error")
        return error

    @property
    def ended(self) -> bool:
        """Whether the leader has ended, or its supervisor has or is ending it."""
        return "exited" in self._events or self.abandoned is not None or self._over.is_set()

    @property
    def abandoned(self) -> str | None:
        """Why the supervisor ends the server though nobody here asked for it: an owner is gone. None if it does not."""
        why: str | None = self._events.get("abandoned", {}).get("why")
        return why

    @property
    def unsupervised(self) -> bool:
        """Whether the supervisor died before its work was done."""
        return self._over.is_set() and "clean" not in self._events

    def tell_ready(self) -> None:
        """From now on the server is measured: the supervisor looks a last time, then does nothing but wait.

        Returns when it has looked: a server that is killed before would leave its shared memory behind.
        """
        self._send({"ready": True})
        self._looked.wait(_LOOK_S)

    def stop(self, grace_s: float) -> Stopped:
        """Take the tree down: SIGTERM, at most ``grace_s``, SIGKILL. Safe to call again, and after any end."""
        begin = time.monotonic()
        self._send({"stop": grace_s})
        if not self._over.wait(grace_s + _MARGIN_S):
            send(self.supervisor_pid, signal.SIGKILL)
            self._over.wait(_MARGIN_S)
        self._let_go()
        left = reap(self.marker)
        waited_s = time.monotonic() - begin
        clean = self._events.get("clean")
        if clean is None:
            return Stopped(obeyed=False, left=left, by="node", durations_s={"kill": waited_s})
        terminated = self._events.get("terminated", {})
        return Stopped(
            obeyed=bool(terminated.get("obeyed", True)),
            left=tuple(sorted({*left, *clean["left"]})),
            by="supervisor",
            durations_s={"term": float(terminated.get("seconds", 0.0)), "kill": float(clean["seconds"])},
        )

    def _send(self, message: dict[str, Any]) -> None:
        stream = self._popen.stdin
        assert stream is not None
        try:
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()
        except (BrokenPipeError, ValueError):  # It has gone; the listener knows why.
            return

    def _listen(self) -> None:
        stream = self._popen.stdout
        assert stream is not None
        with stream:
            for line in stream:
                event = json.loads(line)
                name = event.pop("event")
                self._events.setdefault(name, event)  # Of several owners that go, the first is the reason.
                if name in ("started", "refused"):
                    self._known.set()
                if name == "ready":
                    self._looked.set()
        if "clean" not in self._events:
            reap(self.marker)
        for awaited in (self._over, self._known, self._looked):
            awaited.set()

    def _await_start(self) -> None:
        self._known.wait(_MARGIN_S)
        if "started" in self._events:
            return
        self._let_go()
        reason = self._events.get("refused", {}).get("error", "the supervisor did not come up")
        raise EnvironmentFault(f"the server could not be started: {reason}", phase="process")

    def _let_go(self) -> None:
        """Close our end of the pipe; a supervisor that still runs takes this as the end of its node."""
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # What it did not read, it never will.
                self._popen.stdin.close()
