"""One fresh request body after another, from a seed. Light: runs in the client processes.

The same seed gives the same bodies, stream by stream, however the streams are shared out over processes.
"""

from array import array
from random import Random

from runner.load.wire import Lengths, Listed, Order, Passages

FRESH_UNITS = 6
"""Units drawn one by one at the front of a prompt, so that no two prompts share a prefix (5 000 words: 1e22 fronts)."""


def draw(lengths: Lengths, rng: Random) -> int:
    """A token count, as ``lengths`` says."""
    if lengths.low == lengths.high:
        return lengths.low
    if lengths.stddev > 0:
        return min(max(round(rng.gauss(lengths.mean, lengths.stddev)), lengths.low), lengths.high)
    return rng.randint(lengths.low, lengths.high)


class Bodies:
    """The bodies of one process's streams."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._rngs = {stream: Random(f"{order.seed}/{stream}") for stream in order.streams}
        self._turn = {stream: place for place, stream in enumerate(order.streams)}
        prompts = order.prompts
        self._starts = array("I", prompts.starts) if isinstance(prompts, Passages) else array("I")

    def next(self, stream: int, *, first: bool) -> tuple[bytes, int]:
        """A request of ``stream``: its body and the output tokens it asks for.

        Args:
            stream: Global number of the stream.
            first: Whether it is the stream's first request, whose length puts the stream out of phase.
        """
        order, rng = self._order, self._rngs[stream]
        asked = draw(order.output_tokens, rng)
        if first and order.dephase:
            asked = rng.randint(1, asked)
        if isinstance(order.prompts, Listed):
            prompt = self._listed(order.prompts, stream)
        else:
            prompt = self._passage(order.prompts, rng)
        return b"".join((order.head, prompt, order.tail % (asked, asked))), asked

    def _listed(self, listed: Listed, stream: int) -> bytes:
        turn = self._turn[stream]
        self._turn[stream] = turn + len(self._order.streams)
        return listed.prompts[turn % len(listed.prompts)]

    def _passage(self, passages: Passages, rng: Random) -> bytes:
        wanted = max(1, round(draw(passages.input_tokens, rng) * passages.units_per_token))
        row = len(self._starts) - 1
        shared = min(passages.shared, wanted)
        fresh = min(FRESH_UNITS, wanted - shared)
        rest = wanted - shared - fresh
        parts = [self._cut(passages, 0, shared)] if shared else []
        parts += [self._cut(passages, place, 1) for place in rng.choices(range(shared, row), k=fresh)]
        if rest:
            parts.append(self._cut(passages, rng.randint(shared, row - rest), rest))
        return passages.opening + passages.separator.join(parts) + passages.closing

    def _cut(self, passages: Passages, start: int, count: int) -> bytes:
        return passages.units[self._starts[start] : self._starts[start + count] - len(passages.separator)]
