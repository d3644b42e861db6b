"""GPU memory before and after a server: is there room, and did it all come back. Tolerates the driver's own reserve."""

import time
from collections.abc import Callable, Sequence

from runner.errors import EnvironmentFault
from runner.serving import gpu

TOLERANCE_GIB = 0.5
"""Above the level before the trial that still counts as back; a CUDA context alone takes about as much."""

HELD_BY_OTHERS_GIB = 2.0
"""In use before a start: more than the reserve that NVML v1 counts (0.6 GiB on an idle H200) and a display server."""

_POLL_S = 0.25


class Memory:
    """Watches the memory of one GPU set around one server.

    Args:
        gpu_ids: The set; with none of them nothing is watched.
        wait_s: Longest wait for memory to be let go of.
    """

    def __init__(self, gpu_ids: Sequence[str], wait_s: float) -> None:
        self._ids = tuple(gpu_ids)
        self._wait_s = wait_s
        self._before_gib: dict[str, float] = {}

    def await_room(self, on_wait: Callable[[], None]) -> None:
        """Remember the level before the start, once nobody else holds the GPUs.

        Args:
            on_wait: Called at every turn of waiting; may raise to give up.

        Raises:
            EnvironmentFault: Somebody still holds memory after the wait; the evidence says who.
        """
        deadline_s = time.monotonic() + self._wait_s
        while True:
            now = gpu.gpus(self._ids)
            held = [one for one in now if one.used_gib > HELD_BY_OTHERS_GIB]
            if not held:
                self._before_gib = {one.id: one.used_gib for one in now}
                return
            on_wait()
            if time.monotonic() > deadline_s:
                told = ", ".join(f"GPU {one.id}: {one.used_gib:.1f} GiB by {list(one.pids)}" for one in held)
                raise EnvironmentFault(
                    f"GPU memory is held by somebody else ({told})",
                    phase="memory",
                    waited_s=self._wait_s,
                    evidence={"used_gib": {one.id: one.used_gib for one in now}},
                )
            time.sleep(_POLL_S)

    def await_release(self) -> tuple[str, ...]:
        """Wait until every GPU is back at its level; return the set if one is not (it is used as a whole)."""
        if not self._before_gib:
            return ()
        deadline_s = time.monotonic() + self._wait_s
        while not self._is_back():
            if time.monotonic() > deadline_s:
                return self._ids
            time.sleep(_POLL_S)
        return ()

    def now_gib(self) -> dict[str, float]:
        """GiB in use by GPU, now."""
        return {one.id: round(one.used_gib, 2) for one in gpu.gpus(self._ids)}

    def _is_back(self) -> bool:
        now = self.now_gib()
        return all(now[one] <= before + TOLERANCE_GIB for one, before in self._before_gib.items())
