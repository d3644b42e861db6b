"""Start, measure, stop on the machine that has the hardware. Run bare, or inside an actor.

One trial at a time. ``phase`` may be asked from another thread while a call is under way.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from runner.errors import Cancelled, EnvironmentFault
from runner.load.measure import Bench
from runner.load.server import Target
from runner.schema.launch import Phase, StartReport, StopReport, TrialOrder
from runner.schema.trial import Measurement, Provenance
from runner.serving import processes, provenance
from runner.serving.lease import node_folder
from runner.serving.server import Server


class Node:
    """The hardware's own end of a trial.

    Args:
        folder: Where trials run, made when needed; each gets a folder of its own below it, and both are gone after
            ``stop``. None takes one of this process among this user's temporary files.
        gpu_ids: GPUs leased for this node, by number or UUID; none on a CPU.
        owners: Name -> process beside this one whose end ends the server within seconds. An actor names the daemon
            that started it, which it may outlive.
    """

    def __init__(
        self, folder: Path | None = None, gpu_ids: tuple[str, ...] = (), *, owners: Mapping[str, int] | None = None
    ) -> None:
        self._folder = folder or _folder_of_its_own()
        self._owners = owners or {}
        self._gpu_ids = gpu_ids
        self._server: Server | None = None
        self._bench: Bench | None = None
        self._order: TrialOrder | None = None
        self._announced = self._cancelled = ""  # Markers of trials.
        self._phase = ("idle", "", time.monotonic())
        self._lock = threading.Lock()
        self._busy = threading.Lock()

    def start(self, order: TrialOrder) -> StartReport:
        """Bring up the server of a trial; one that is still there is taken down first.

        Raises:
            TrialFailure: It did not come up. ``stop`` then gives its log.
        """
        with self._lock:
            self._announced = order.marker
        self._take_down()
        with self._busy:
            server = Server(order, self._trial_folder(order), self._gpu_ids, self._enter, owners=self._owners)
            with self._lock:
                if self._cancelled == order.marker:
                    raise Cancelled("the trial was stopped before its server was made")
                self._order, self._server = order, server
            return server.start()

    def measure(self, concurrency: int) -> tuple[Measurement, bytes]:
        """One level of the ladder on the running server.

        Returns:
            The measurement and its raw samples, compressed (empty when there are none).

        Raises:
            TrialFailure: The server failed, or no valid number could be made.
        """
        with self._busy:
            server, order = self._running()
            path = self._trial_folder(order) / f"samples-c{concurrency}.parquet"
            self._enter(f"C={concurrency}", "")
            server.check()
            if self._bench is None:
                self._bench = Bench(_target(server), order.workload)
            measurement = self._bench.measure(
                order.protocol,
                concurrency,
                order.seed,
                on_phase=lambda name: self._enter(name, ""),
                check=server.check,
                samples_path=path,
            )
            server.check()
            return measurement, path.read_bytes() if path.is_file() else b""

    def stop(self, marker: str = "") -> StopReport:
        """Take the server down and hand over its log. Fine when nothing runs.

        A call under way in another thread ends as cancelled first.

        Args:
            marker: The trial that is over. Its start, should it only arrive later, is refused: calls of one caller
                may overtake each other on their way into this process. Left out: the last one that arrived.
        """
        with self._lock:
            self._cancelled = marker or self._announced
        return self._take_down()

    def phase(self) -> Phase:
        """Where the trial is right now."""
        with self._lock:
            name, detail, since_s = self._phase
        return Phase(name=name, elapsed_s=round(time.monotonic() - since_s, 1), detail=detail)

    def check(self) -> None:
        """Fine while this node can take another trial.

        Raises:
            EnvironmentFault: An owner is gone, and every server would go at once.
        """
        if (gone := processes.first_gone(self._owners)) is not None:
            raise EnvironmentFault(f"this node is of no use any more: {gone} is gone")

    def reap(self, marker: str) -> list[str]:
        """End what is left of the trial ``marker`` on this machine.

        Returns:
            What was found, a line each.
        """
        found = [f"{one.pid} {one.command}" for one in processes.marked(marker) if one.marker == marker]
        processes.reap(marker)
        return found

    def reap_leftovers(self) -> list[str]:
        """End what crashed sweeps left on this machine.

        Returns:
            What was found, a line each.
        """
        return processes.end_leftovers()

    def provenance(self) -> Provenance:
        """What this machine is and has installed."""
        return provenance.provenance(None if self._order is None else self._order.python)

    def _take_down(self) -> StopReport:
        server, order = self._server, self._order
        if server is None or order is None:
            return StopReport(durations_s={})
        report = server.stop()
        with self._busy:
            if self._server is not server:  # Somebody else was quicker.
                return report
            if self._bench is not None:
                self._bench.close()
                self._bench = None
            shutil.rmtree(self._trial_folder(order), ignore_errors=True)
            with contextlib.suppress(OSError):  # Not empty: somebody else's trials run there as well.
                self._folder.rmdir()
            self._server = None
            self._enter("idle", "")
        return report

    def _running(self) -> tuple[Server, TrialOrder]:
        if self._server is None or self._order is None:
            raise Cancelled("no server runs on this node: it was stopped, or never started")
        return self._server, self._order

    def _trial_folder(self, order: TrialOrder) -> Path:
        return self._folder / f"trial-{order.number}-{order.config.fingerprint}"

    def _enter(self, name: str, detail: str) -> None:
        with self._lock:
            since_s = time.monotonic() if name != self._phase[0] else self._phase[2]
            self._phase = (name, detail, since_s)


def _folder_of_its_own() -> Path:
    """This process's among the user's; those of processes that were killed go."""
    for left in node_folder().glob("node-*"):
        if processes.identity(int(left.name.removeprefix("node-"))) is None:
            shutil.rmtree(left, ignore_errors=True)
    return node_folder() / f"node-{os.getpid()}"


def _target(server: Server) -> Target:
    front_end = () if server.pid is None else (server.pid,)
    return Target(base_url=server.base_url, model=server.served_name, api_server_pids=front_end, api_key=server.api_key)
