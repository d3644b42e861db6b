"""What two trials on one node must not have at once: an API port, and the start-up of a server.

Both are held by something of the kernel's that ends with the process, however it ends: a name among abstract sockets,
which are known exactly as far as ports are, and an advisory lock on a file in a folder of this user.
"""

import fcntl
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.errors import EnvironmentFault

LOOPBACK = "127.0.0.1"

_FIRST_PORT = 20000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def node_folder() -> Path:
    """A folder for this user's locks on this machine, 0700.

    Raises:
        EnvironmentFault: It belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()) / f"tok100-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EnvironmentFault(f"{folder} belongs to another user; remove it, or set TMPDIR")
    return folder


class PortLease:
    """A port that no other trial on this machine gets while the lease is held."""

    def __init__(self, port: int, claim: socket.socket) -> None:
        self.port = port
        self._claim = claim

    def release(self) -> None:
        """Give the port back; a second call does nothing."""
        self._claim.close()


def lease_port(first: int = _FIRST_PORT, last: int | None = None) -> PortLease:
    """A port that nobody leased and nobody listens on, outside the range the kernel hands out by itself.

    The search begins anywhere: a port that was just given back may still have connections of its last server.

    Raises:
        EnvironmentFault: There is none.
    """
    last = _last_port() if last is None else last
    candidates = list(range(first, last + 1))
    begin = random.randrange(len(candidates))
    for port in candidates[begin:] + candidates[:begin]:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if _named(claim, port) and is_free(port):
            return PortLease(port, claim)
        claim.close()
    raise EnvironmentFault(f"no free port from {first} to {last}", phase="process")


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could bind the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@contextmanager
def exclusive(name: str, on_wait: Callable[[], None], *, poll_s: float = 0.2) -> Iterator[Callable[[], None]]:
    """Hold the node's lock ``name``; yields a call that lets go of it early.

    Args:
        name: Of the lock.
        on_wait: Called at every turn of waiting; may raise to give up.
        poll_s: Length of a turn.
    """
    descriptor = os.open(node_folder() / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not _locked(descriptor):
            on_wait()
            time.sleep(poll_s)
        yield lambda: fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _named(claim: socket.socket, port: int) -> bool:
    try:
        claim.bind(f"\0tok100-port-{port}")
    except OSError:  # Somebody has the name.
        return False
    return True


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _last_port() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0]) - 1
    except OSError:
        return 32767  # The kernel's own default begins at 32768.
