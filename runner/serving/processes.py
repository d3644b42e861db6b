"""The processes of a trial: found by the marker in their environment, by group and by descent, never by name.

Linux and the standard library only, because the supervisor must start in a blink. Processes of other users cannot
be read and are not seen.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.serving.redaction import redact_argv

TRIAL_VARIABLE = "TOK100_TRIAL"
"""Carries the trial's marker in the environment of every process of a server."""

SUPERVISOR_VARIABLE = "TOK100_SUPERVISOR"
"""Carries the identity of the supervisor that holds the server."""

_PROC = Path("/proc")


@dataclass(frozen=True)
class Marked:
    """A process that carries a trial's marker.

    Attributes:
        owned: Whether its supervisor still lives and so will end it; a process that is not owned is a leftover.
    """

    pid: int
    marker: str
    owned: bool
    command: str


def identity(pid: int) -> str | None:
    """``pid-starttime`` of a process, unique for the life of the machine; None when it is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else f"{pid}-{fields[19]}"


def first_gone(owners: Mapping[str, int]) -> str | None:
    """Name of the first of these processes, name -> pid, that is gone; None while all live."""
    return next((name for name, pid in owners.items() if identity(pid) is None), None)


def marked(prefix: str = "") -> tuple[Marked, ...]:
    """Every living process of this user whose marker starts with ``prefix``, in order of pid."""
    found = []
    for pid in _pids():
        environment = _environment(pid)
        marker = environment.get(TRIAL_VARIABLE)
        if marker is not None and marker.startswith(prefix):
            found.append(Marked(pid, marker, _is_alive(environment.get(SUPERVISOR_VARIABLE, "")), command(pid)))
    return tuple(found)


def leftovers(prefix: str = "") -> tuple[Marked, ...]:
    """Marked processes whose supervisor is gone: what a crashed sweep left behind on this node."""
    return tuple(process for process in marked(prefix) if not process.owned)


def reap(marker: str, *, wait_s: float = 5.0) -> tuple[int, ...]:
    """Kill every process that carries exactly ``marker``; return those that still live after ``wait_s``."""
    return kill_all(lambda: {process.pid for process in marked(marker) if process.marker == marker}, wait_s)


def reap_leftovers(prefix: str = "", *, wait_s: float = 5.0) -> tuple[int, ...]:
    """Kill every leftover; return those that still live after ``wait_s`` (stuck in the kernel, most likely)."""
    return kill_all(lambda: {process.pid for process in leftovers(prefix)}, wait_s)


def end_leftovers() -> list[str]:
    """Kill what crashed sweeps left on this machine; a line for each process that was found."""
    found = [f"left behind by {one.marker}, ended: pid {one.pid} {one.command[:80]}" for one in leftovers()]
    reap_leftovers()
    return found


def kill_all(victims: Callable[[], set[int]], wait_s: float, *, poll_s: float = 0.05) -> tuple[int, ...]:
    """SIGKILL what ``victims()`` names until it names nobody, for at most ``wait_s``; return who is left.

    The set is asked again each time: a process may fork while it is being killed.
    """
    deadline = time.monotonic() + wait_s
    while left := victims():
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return tuple(sorted(left))
        time.sleep(poll_s)
    return ()


def send(pid: int, number: int) -> None:
    """Signal one process; one that has just gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(root: int) -> set[int]:
    """Every living process below ``root``, zombies left out."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for pid in _pids():
        if (fields := _stat(pid)) is not None:
            children.setdefault(int(fields[1]), []).append(pid)
            if fields[0] == "Z":
                zombies.add(pid)
    found: set[int] = set()
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue.extend(below)
    return found - zombies


def group(pgid: int) -> set[int]:
    """Every living process of a process group, zombies left out."""
    statuses = ((pid, _stat(pid)) for pid in _pids())
    return {pid for pid, fields in statuses if fields and fields[0] != "Z" and int(fields[2]) == pgid}


def oom_kills() -> int:
    """How often this machine's kernel has killed for want of memory since it started; 0 when it does not say."""
    try:
        counters = dict(line.split() for line in (_PROC / "vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counters.get("oom_kill", 0))


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Files under ``/dev/shm`` that these processes have mapped; a killed server leaves them behind."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
            found |= {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}
    return {path for path in found if not path.name.endswith(" (deleted)")}


def remove_orphaned(paths: set[Path]) -> None:
    """Delete those of these files of this user that no living process has mapped."""
    mine = {path for path in paths if path.exists() and path.stat().st_uid == os.getuid()}
    if mine:
        for path in mine - shared_memory(_pids()):
            path.unlink(missing_ok=True)


def command(pid: int) -> str:
    """The command line of a process, or what it renamed itself to, without the values of secret flags."""
    return " ".join(redact_argv(words(pid))).strip()


def words(pid: int) -> list[str]:
    """The command line of a process, secrets and all; empty when it is gone."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").rstrip("\0").split("\0")


def _pids() -> Iterator[int]:
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            yield int(entry.name)


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the state on: 0 state, 1 parent, 2 group, 19 start time (man 5 proc)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    if TRIAL_VARIABLE.encode() not in raw:
        return {}
    return dict(item.split("=", 1) for item in raw.decode(errors="replace").split("\0") if "=" in item)


def _is_alive(who: str) -> bool:
    pid = who.split("-")[0]
    return pid.isdigit() and identity(int(pid)) == who
