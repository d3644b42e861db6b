"""What holds for every test: several run at a time, each process on a node of its own; the long ones begin first."""

import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from runner.serving.lease import lease_port

_NUMBERS = range(20000, 20040)
"""Leased as if they were ports: a lease is a number that nobody else has."""

_FIRST_PORT, _PORTS_EACH = 11000, 200


@pytest.fixture(scope="session", autouse=True)
def temporary_folder_of_its_own() -> Iterator[None]:
    """Servers of one test process wait for each other at their start, as on one node, but not for those of others.

    The path is short: Ray keeps its sockets below it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(lease_port, "__defaults__", _ports_of_its_own())
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield


def _ports_of_its_own() -> tuple[int, int]:
    """First and last port for this process's servers.

    Ports are the machine's, but their locks lie in the folder above: two processes might pick the same one before
    either listens. So each takes a number among all test processes of this user, and the ports that belong to it. They
    lie below those that a sweep leases in processes of its own.
    """
    number = lease_port(_NUMBERS.start, _NUMBERS.stop - 1).port - _NUMBERS.start  # Held until this process ends.
    first = _FIRST_PORT + number * _PORTS_EACH
    return first, first + _PORTS_EACH - 1


def pytest_configure() -> None:
    """Hypothesis judges properties, never the speed of a machine that does something else as well."""
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real vLLM (one at a time) and whole sweeps take minutes: nobody should wait for the last of them alone."""
    items.sort(
        key=lambda item: ({"real", "sweep"}.isdisjoint(item.path.parts), item.get_closest_marker("real") is None)
    )
