"""A node of its own for a test: its locks and leases are not shared with other servers of this machine."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def node_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that locks and leases live in."""
    folder = tmp_path_factory.mktemp("node")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
