"""One server of one trial: brought up, watched, taken down; nothing of it stays.

``start`` leases a port and the node's start-up lock, lets a supervisor run the server, and returns when the server
has answered a real completion. Then a thread watches it, so that ``check`` costs nothing. ``stop`` may be called at
any time, from any thread, after any failure, more than once; a start under way then ends as cancelled.
"""

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from runner.errors import Cancelled, EnvironmentFault
from runner.schema.launch import StartReport, StopReport, TrialOrder
from runner.serving.command import command, environment, served_name
from runner.serving.effective import effective
from runner.serving.judge import taken_down
from runner.serving.lease import LOOPBACK, PortLease, exclusive, lease_port
from runner.serving.memory import Memory
from runner.serving.phases import PROCESS, SETTINGS, Allowed, allowed
from runner.serving.probe import Probe, Refused, Unreachable
from runner.serving.processes import first_gone
from runner.serving.redaction import redact_argv, redact_env, secrets
from runner.serving.starting import Start
from runner.serving.supervised import Stopped, Supervised
from runner.serving.supervisor import LOG_NAME, ServerOrder
from runner.serving.watch import Watch
from runner.serving.weights import weights_gib

OnPhase = Callable[[str, str], None]
"""Told the name of each phase as it begins, and a detail ("" for none)."""

_LONGEST_FOLDER = 50
"""Of a folder for sockets, characters: a socket's path ends at 107, and vLLM appends a UUID."""

_RENDEZVOUS = re.compile(r"distributed_init_method=file://(/\S+/vllm_dist_\w+)")
"""vllm/utils/network_utils.py."""


def limits_of(order: TrialOrder) -> Allowed:
    """How long the start of this trial may take on this machine."""
    model_gib: float | None = 0.0  # A simulated server has no weights.
    if order.engine.kind != "simulated":
        model_gib = weights_gib(order.model, order.config, {**os.environ, **order.config.env})
    return allowed(order.deadlines, model_gib=model_gib, compiles=not order.config.flags.get("enforce-eager", False))


class Server:
    """The server of one trial. Nothing runs before ``start``.

    Args:
        order: What to run.
        folder: Where the server runs and its log goes; made if it is not there.
        gpu_ids: GPUs leased for it, by number or UUID.
        on_phase: Told where the trial is.
        owners: Name -> process beside this one whose end shall be the server's.
    """

    def __init__(
        self,
        order: TrialOrder,
        folder: Path,
        gpu_ids: tuple[str, ...],
        on_phase: OnPhase,
        *,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self._owners = owners or {}
        self._order = order
        self._folder = folder
        self._gpu_ids = gpu_ids
        self._on_phase = on_phase
        self._lease: PortLease | None = None
        self._process: Supervised | None = None
        self._watch: Watch | None = None
        self._memory: Memory | None = None
        self._sockets: Path | None = None
        self._start_up: Start | None = None
        self._stopped: StopReport | None = None
        self._closing = threading.Event()
        self._spawning = threading.Lock()
        self._stopping = threading.Lock()
        self.served_name = served_name(order)
        self.report: StartReport | None = None

    @property
    def base_url(self) -> str:
        """Where it answers, e.g. ``http://127.0.0.1:20000``."""
        if self._lease is None:
            raise EnvironmentFault("the server was not started")
        return f"http://{LOOPBACK}:{self._lease.port}"

    @property
    def api_key(self) -> str | None:
        """What the configuration makes clients send, if it does."""
        given = self._order.config.flags.get("api-key", self._order.config.env.get("VLLM_API_KEY"))
        return None if given is None else str(given[0] if isinstance(given, tuple) else given)

    @property
    def pid(self) -> int | None:
        """Of the server's leader, once it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> StartReport:
        """Bring the server up.

        Returns:
            Its command line, environment (secrets hidden), durations by phase and effective configuration.

        Raises:
            TrialFailure: It did not come up; ``stop`` must still be called.
        """
        try:
            return self._start()
        except OSError as error:  # A full disk, a folder that is not ours, no more processes: never the configuration.
            raise EnvironmentFault(f"this machine cannot start a server: {error}", phase=PROCESS) from error

    def _start(self) -> StartReport:
        if (gone := first_gone(self._owners)) is not None:
            raise EnvironmentFault(f"this node can start no server any more: {gone} is gone", phase=PROCESS)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._on_phase("memory", "")
        self._memory = Memory(self._watched_gpus(), self._order.deadlines.memory_s)
        self._memory.await_room(self._check_open)
        self._lease = lease_port()
        limits = limits_of(self._order)
        begin_s = time.monotonic()
        with exclusive("start", self._queue) as let_go:
            queued_s = time.monotonic() - begin_s
            self.report = self._bring_up(limits, let_go, queued_s)
        return self.report

    def check(self) -> None:
        """Raise the failure that the watch has found, if it has found one. Costs nothing."""
        self._check_open()
        if self._process is not None and self._process.abandoned is not None:  # Before the watch comes to see it.
            raise EnvironmentFault(taken_down(self._process.abandoned), phase="load")
        if self._watch is not None and self._watch.failure is not None:
            raise self._watch.failure

    def stop(self) -> StopReport:
        """Take everything down and wait for the GPUs' memory. Safe at any time and more than once."""
        with self._stopping:
            if self._stopped is None:
                self._closing.set()
                self._on_phase("stopping", "")
                self._stopped = self._take_down()
            return self._stopped

    def _watched_gpus(self) -> tuple[str, ...]:
        """GPUs whose memory this server takes; a simulated one takes none.

        Raises:
            EnvironmentFault: The lease is too small for the configuration.
        """
        if self._order.engine.kind == "simulated":
            return ()
        if self._gpu_ids and len(self._gpu_ids) != self._order.config.gpus:
            told = f"{self._order.config.gpus} GPUs are needed and {len(self._gpu_ids)} were leased"
            raise EnvironmentFault(told, phase="process")
        return self._gpu_ids

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Cancelled("the server was stopped by whoever started it")

    def _queue(self) -> None:
        self._check_open()
        self._on_phase("queued", "another server of this node is starting")

    def _spawn(self, argv: list[str], env: dict[str, str], hidden: tuple[str, ...]) -> Supervised:
        with self._spawning:
            self._check_open()
            self._process = Supervised(
                ServerOrder(
                    argv=argv,
                    env=env,
                    folder=str(self._folder),
                    marker=self._order.marker,
                    owners={"the node": os.getpid(), **self._owners},
                    hidden=hidden,
                    remove=() if self._sockets is None else (str(self._sockets),),
                )
            )
            return self._process

    def _bring_up(self, limits: Allowed, let_go: Callable[[], None], queued_s: float) -> StartReport:
        self._on_phase(PROCESS, "")
        assert self._lease is not None
        argv = command(self._order, port=self._lease.port, served_name=self.served_name)
        short = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_FOLDER else "/tmp"
        self._sockets = Path(tempfile.mkdtemp(prefix="t100-", dir=short))
        env = environment(self._order, os.environ, self._gpu_ids, sockets=self._sockets, ready_s=limits.total_s)
        hidden = secrets(env, argv)
        process = self._spawn(argv, env, hidden)
        probe = Probe(self.base_url, self.served_name, self.api_key)
        start = Start(
            process,
            probe,
            limits=limits,
            gpu_ids=self._gpu_ids,
            on_phase=self._on_phase,
            check_open=self._check_open,
        )
        self._start_up = start
        durations_s = {"queued": queued_s} | start.wait(let_go)
        process.tell_ready()
        begin_s = time.monotonic()
        try:
            server_info = probe.server_info()
        except (Unreachable, Refused):
            server_info = None
        # vLLM lists the machine's packages for it, which takes seconds.
        durations_s[SETTINGS] = time.monotonic() - begin_s
        self._watch = Watch(process, probe, start.follower, gpu_ids=self._gpu_ids, stall_s=self._order.protocol.stall_s)
        return StartReport(
            argv=redact_argv(argv, hidden),
            env=redact_env(env, hidden),
            durations_s={phase: round(seconds, 3) for phase, seconds in durations_s.items()},
            effective=effective(start.lines, server_info),
            gpu_ids=self._gpu_ids,
        )

    def _take_down(self) -> StopReport:
        if self._watch is not None:
            self._watch.stop()
        stopped = Stopped(obeyed=True, left=(), by="nobody")
        with self._spawning:  # A start under way has either spawned by now, or will not.
            process = self._process
        if process is not None:
            stopped = process.stop(self._order.deadlines.stop_s)
        durations_s = dict(stopped.durations_s)
        quarantined: tuple[str, ...] = ()
        if self._memory is not None:
            begin_s = time.monotonic()
            quarantined = self._memory.await_release()
            durations_s["memory"] = time.monotonic() - begin_s
        if stopped.left and self._gpu_ids:
            quarantined = self._gpu_ids
        if self._start_up is not None:
            for path in rendezvous_files(self._start_up.lines):
                path.unlink(missing_ok=True)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        if self._lease is not None:
            self._lease.release()
        return StopReport(
            durations_s={phase: round(seconds, 3) for phase, seconds in durations_s.items()},
            files=self._files(),
            gpu_memory_gib={} if self._memory is None else self._memory.now_gib(),
            quarantined=quarantined,
        )

    def _files(self) -> dict[str, bytes]:
        names = (LOG_NAME, "supervisor.log")
        found = {name: self._folder / name for name in names}
        return {name: path.read_bytes() for name, path in found.items() if path.is_file() and path.stat().st_size}


def rendezvous_files(lines: Iterable[str]) -> set[Path]:
    """Files that the server's workers met over, as its log names them; a killed server leaves them behind."""
    return {Path(match[1]) for match in map(_RENDEZVOUS.search, lines) if match}
