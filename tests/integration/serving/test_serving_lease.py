"""Ports and locks among processes of one machine."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runner.errors import EnvironmentFault
from runner.serving.lease import exclusive, is_free, lease_port, node_folder


def test_no_port_is_leased_twice() -> None:
    """Not in one process, and not below the kernel's own range."""
    leases = [lease_port() for _ in range(20)]
    ports = [lease.port for lease in leases]
    assert len(set(ports)) == 20
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < low for port in ports)
    for lease in leases:
        lease.release()


def test_a_port_in_use_is_not_leased() -> None:
    """A listener nobody leased for is passed over; when there is no other port, that is said."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(EnvironmentFault, match="no free port"):
            lease_port(port, port)


def test_a_lease_ends_with_its_process(node_of_its_own: Path) -> None:
    """A killed holder does not keep its port."""
    free = lease_port()
    port = free.port
    free.release()
    code = (
        f"import tempfile, time; tempfile.tempdir = {str(node_of_its_own)!r}\n"
        "from runner.serving.lease import lease_port\n"
        f"lease = lease_port({port}, {port})\nprint(lease.port, flush=True)\ntime.sleep(600)\n"
    )
    root = Path(__file__).parents[3]
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root)
    assert holder.stdout is not None
    assert int(holder.stdout.readline()) == port
    with pytest.raises(EnvironmentFault):
        lease_port(port, port)
    holder.kill()
    holder.wait(10)
    lease_port(port, port).release()


def test_starts_take_turns() -> None:
    """The second waits until the first lets go, and is told that it waits."""
    order: list[str] = []
    inside, waits, entered = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with exclusive("start", lambda: None) as let_go:
            inside.set()
            assert waits.wait(60)
            order.append("first")
            let_go()
            assert entered.wait(60)
            order.append("first is over")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with exclusive("start", waits.set, poll_s=0.05):
        order.append("second")
        entered.set()
    thread.join(60)
    assert order == ["first", "second", "first is over"]


def test_the_folder_of_locks_is_private() -> None:
    """Nobody else can hold our locks."""
    assert node_folder().stat().st_mode & 0o777 == 0o700
