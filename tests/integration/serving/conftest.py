"""Every test here has a node of its own."""

from tests.fakes.node import node_of_its_own

__all__ = ["node_of_its_own"]
