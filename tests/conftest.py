"""What holds for every test: several run at a time, each process on a node of its own; the long ones begin first."""

import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings


@pytest.fixture(scope="session", autouse=True)
def temporary_folder_of_its_own() -> Iterator[None]:
    """Servers of one test process wait for each other at their start, as on one node, but not for those of others.

    The path is short: Ray keeps its sockets below it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield


def pytest_configure() -> None:
    """Hypothesis judges properties, never the speed of a machine that does something else as well."""
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real vLLM (one at a time) and whole sweeps take minutes: nobody should wait for the last of them alone."""
    items.sort(
        key=lambda item: ({"real", "sweep"}.isdisjoint(item.path.parts), item.get_closest_marker("real") is None)
    )
