"""A connection to Ray, and the handle of one node actor. See the room's ``__init__``."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from runner.errors import EnvironmentFault, Quarantined, UsageError
from runner.node import Node
from runner.schema.launch import Phase, StartReport, StopReport, TrialOrder
from runner.schema.trial import Measurement, Provenance
from runner.serving.processes import first_gone

POLL_S = 0.2
"""How often a waiting call looks whether it was cancelled; Ctrl-C is answered within it."""

ANSWER_S = 30.0
"""Longest wait for calls that only look (phase, provenance). A node that does not answer for so long is lost."""

LEASE_S = 120.0
"""Longest wait for an actor to be placed once the cluster has enough GPUs in all."""

CONNECT_S = 5.0
"""Longest wait for a cluster's port to answer."""

STOP_S = 600.0
"""Longest wait for a stop; far beyond what SIGTERM, SIGKILL and the GPUs' memory take together. A node that needs more
is lost, and its server ends with the actor."""

DAEMON = "the node's Ray daemon (raylet)"

PACKAGE = Path(__file__).resolve().parents[1]


class _NodeActor:
    """The node's calls inside Ray. Several may run at once: ``phase`` answers while ``start`` works."""

    def __init__(self, folder: str | None) -> None:
        leased = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        self._daemon = os.getppid()
        self._node = Node(None if folder is None else Path(folder), gpu_ids=leased, owners={DAEMON: self._daemon})

    def start(self, order: TrialOrder) -> StartReport:
        return self._node.start(order)

    def measure(self, concurrency: int) -> tuple[Measurement, bytes]:
        return self._node.measure(concurrency)

    def stop(self, marker: str) -> StopReport:
        return self._node.stop(marker)

    def phase(self) -> Phase:
        return self._node.phase()

    def check(self) -> None:
        self._node.check()

    def reap(self, marker: str) -> list[str]:
        return self._node.reap(marker)

    def reap_leftovers(self) -> list[str]:
        return self._node.reap_leftovers()

    def provenance(self) -> Provenance:
        return self._node.provenance()

    def pid(self) -> int:
        return os.getpid()

    def daemon(self) -> int:
        return self._daemon


class NodeHandle:
    """One node actor as the driver sees it. Calls block, answer to ``cancelled`` and raise ``TrialFailure``."""

    def __init__(self, actor: Any, gpus: int, check_cancelled: Callable[[], None]) -> None:
        self._actor = actor
        self.gpus = gpus
        self._check_cancelled = check_cancelled
        self._marker = ""

    def start(self, order: TrialOrder) -> StartReport:
        self._marker = order.marker
        return self._wait(self._actor.start.remote(order))

    def measure(self, concurrency: int) -> tuple[Measurement, bytes]:
        return self._wait(self._actor.measure.remote(concurrency))

    def stop(self) -> StopReport:
        """Stops the server. Not cancelled by Ctrl-C: a server that is being stopped is stopped to its end."""
        return self._get(self._actor.stop.remote(self._marker), STOP_S)

    def phase(self) -> Phase:
        return self._get(self._actor.phase.remote(), ANSWER_S)

    def check(self) -> None:
        """Fine while this node can take another trial: its actor answers, and the actor's Ray is there as well."""
        self._get(self._actor.check.remote(), ANSWER_S)

    def reap(self, marker: str) -> list[str]:
        """Ends what is left of the trial ``marker`` on this node. Returns what was found."""
        return self._get(self._actor.reap.remote(marker), None)

    def reap_leftovers(self) -> list[str]:
        """Ends what crashed sweeps left on this node's machine. Returns what was found."""
        return self._get(self._actor.reap_leftovers.remote(), ANSWER_S)

    def provenance(self) -> Provenance:
        return self._get(self._actor.provenance.remote(), ANSWER_S)

    def pid(self) -> int:
        """The actor's process on its machine."""
        return self._get(self._actor.pid.remote(), ANSWER_S)

    def kill(self) -> None:
        """Ends the actor. Its server, should one be left, dies with the actor's pipe."""
        ray.kill(self._actor)

    def _wait(self, reference: Any) -> Any:
        while not ray.wait([reference], timeout=POLL_S)[0]:
            self._check_cancelled()
        return self._get(reference, None)

    def _get(self, reference: Any, timeout_s: float | None) -> Any:
        try:
            result = ray.get(reference, timeout=timeout_s)
        except RayTaskError as error:
            # Ray wraps what the actor raised; the cause is the real thing, facts and all.
            raise error.cause from error
        except RayActorError as error:
            raise EnvironmentFault(f"the Ray actor of this trial is gone: {_first_line(error)}") from error
        except GetTimeoutError as error:
            raise EnvironmentFault(f"the Ray actor did not answer within {timeout_s} s") from error
        except RayError as error:
            raise EnvironmentFault(f"Ray does not work any more: {_first_line(error)}") from error
        return result


class Cluster:
    """A local Ray or a running cluster; use as a context manager.

    Args:
        address: Of a running cluster (``RAY_ADDRESS`` style); None starts Ray on this machine.
        gpus: GPUs a local Ray shall believe in, for a simulated engine; None lets Ray look.
        check_cancelled: Called while waiting; raises ``Cancelled`` to give a trial up.

    Raises:
        UsageError: The address does not answer.
    """

    def __init__(self, address: str | None, *, gpus: int | None, check_cancelled: Callable[[], None]) -> None:
        self._address = address
        self._gpus = gpus
        self._check_cancelled = check_cancelled
        self._handle: NodeHandle | None = None
        self._quarantined: list[NodeHandle] = []
        self._daemon: dict[str, int] = {}

    def __enter__(self) -> Self:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray makes its workers nice; a server that inherits that loses to anything else on the machine.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  Ray spells it so
        # What an actor raised after nobody waited for it any more (Ctrl-C) is no news.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        # Ray warns about a coming change of a behaviour that nothing here relies on.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        if self._address is None:
            # Workers start from the raylet's environment, and that from ours.
            os.environ["PYTHONPATH"] = os.pathsep.join(
                dict.fromkeys([str(PACKAGE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
            ).strip(os.pathsep)
            options |= {"address": "local", "num_gpus": self._gpus}
        else:
            options |= {"address": self._address, "runtime_env": code_to_bring(PACKAGE)}
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**options)
        except ConnectionError as error:
            raise _no_cluster(self._address or "local", _first_line(error)) from error
        # Ray takes SIGTERM for a crash: it dumps the stacks and ends. Who waits for the signal must get it.
        signal.signal(signal.SIGTERM, before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
        if self.lost is None:
            ray.shutdown()
        # Else Ray's own hook does it when the program exits: without its daemon Ray may end this process from a thread
        # of its own while it shuts down ("The process will exit"), and a summary is still owed.

    @property
    def gpus(self) -> int:
        """GPUs of the whole cluster."""
        return int(ray.cluster_resources().get("GPU", 0))

    @property
    def lost(self) -> str | None:
        """Why this Ray runs nothing any more; None while it does, and for one that runs elsewhere.

        Actors outlive their daemon and go on answering, and Ray itself takes a quarter of a minute to see its end.
        """
        gone = first_gone(self._daemon)
        return None if gone is None else f"{gone} is gone"

    def node(self, gpus: int) -> NodeHandle:
        """A node actor that holds ``gpus`` GPUs; the last one is used again when it holds as many.

        Raises:
            EnvironmentFault: The GPUs are not to be had.
            Quarantined: They would be, had none been quarantined.
        """
        if self.lost is not None:
            raise EnvironmentFault(self.lost)
        if self._handle is not None and self._handle.gpus == gpus:
            return self._handle
        self.drop()
        free = self.gpus - sum(handle.gpus for handle in self._quarantined)
        if gpus > free:
            fault = Quarantined if gpus <= self.gpus else EnvironmentFault
            raise fault(f"{gpus} GPUs are needed and {free} are usable in this cluster")
        actor = ray.remote(_NodeActor).options(num_gpus=gpus, num_cpus=0, max_concurrency=4, max_restarts=0)
        self._handle = NodeHandle(actor.remote(os.environ.get("TOK100_WORK")), gpus, self._check_cancelled)
        daemon = self._handle._get(self._handle._actor.daemon.remote(), LEASE_S)
        if self._address is None:
            self._daemon = {DAEMON: daemon}
        return self._handle

    def drop(self) -> None:
        """Gives the last node's GPUs back."""
        if self._handle is not None:
            self._handle.kill()
            self._handle = None

    def quarantine(self) -> None:
        """Keeps the last node's GPUs leased so that nobody gets them again, and forgets the node."""
        if self._handle is not None:
            self._quarantined.append(self._handle)
            self._handle = None


def code_to_bring(package: Path) -> dict[str, Any]:
    """Ray's runtime environment for a cluster elsewhere: this checkout, else the installed package alone.

    A checkout brings its experiments along, which describe simulated nodes and models.
    """
    checkout = package.parent
    if not (checkout / "experiments").is_dir():
        return {"py_modules": [str(package)]}
    # Ray matches these against the checkout itself as well, which it calls ".": "/.*" would leave out everything.
    return {"working_dir": str(checkout), "excludes": ["/.?*", "/results", "/tests", "/build", "__pycache__"]}


def refuse_silence(address: str) -> None:
    """Says at once that nobody listens at an address; Ray itself would try for minutes.

    Raises:
        UsageError: Nobody does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, why: str) -> UsageError:
    return UsageError(
        f"no Ray cluster answers at {address!r}: {why}",
        remedy="start one with `ray start --head`, or leave the address out to use this machine",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
