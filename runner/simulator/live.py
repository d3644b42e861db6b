"""Runs the engine model against the clock: model time is loop time since the start.

Steps keep their planned times even when the process wakes late, so lateness delays chunks but never slows the model.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from runner.simulator.engine import Chunk, Engine
from runner.simulator.scheduler import Request

LATENESS_SAMPLES = 20_000


class Live:
    """An engine in real time.

    Args:
        deliver: Called with each chunk when it is due.

    Attributes:
        on_tokens: Called with the tokens generated so far whenever time has passed; the faults count by it.
        lateness_s: How late the latest chunks were delivered after their planned time.
    """

    def __init__(self, engine: Engine, deliver: Callable[[Chunk], None]) -> None:
        self.engine = engine
        self.on_tokens: Callable[[int], None] = lambda tokens: None
        self.lateness_s: deque[float] = deque(maxlen=LATENESS_SAMPLES)
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._zero_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._stuck = False

    def now_s(self) -> float:
        """Model time."""
        return self._loop.time() - self._zero_s

    def submit(self, request: Request) -> None:
        """Give the engine a request now."""
        self.engine.submit(request, self.now_s())
        self._arm()

    def abort(self, request: Request) -> None:
        """Take a request away."""
        self.engine.abort(request)

    def freeze(self) -> None:
        """Nothing happens any more."""
        self._stuck = True
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        next_s = self.engine.next_s()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_s is not None and not self._stuck:
            self._timer = self._loop.call_at(self._zero_s + next_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_s = self.now_s()
        for chunk in self.engine.run_until(now_s):
            if self._stuck:
                return
            self.lateness_s.append(now_s - chunk.at_s)
            self._deliver(chunk)
        self.on_tokens(self.engine.counters.generation_tokens)
        self._arm()
