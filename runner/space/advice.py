"""Warnings about a space: knobs that change nothing on the path that runs, values that are known to be trouble."""

from collections.abc import Iterator

from runner.space.knobs import Knob
from runner.space.space import Space


def warnings_for(space: Space) -> tuple[str, ...]:
    """What a user should know before a study starts, one sentence each."""
    return tuple(_inert_collectives(space))


def _inert_collectives(space: Space) -> Iterator[str]:
    unused: list[Knob] = []
    if unused:
        yield ""
