"""One simulated server's life: arguments, socket, processes, phases, service, end."""

import argparse
import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import uvloop

from runner.errors import UsageError
from runner.schema.node import SimulatedModel, SimulatedNode
from runner.simulator import processes, startup
from runner.simulator.api import VERSION, Api
from runner.simulator.arguments import parse
from runner.simulator.describe import load_model, load_node
from runner.simulator.engine import Engine
from runner.simulator.faults import Faults
from runner.simulator.info import server_info
from runner.simulator.launch import Launch, Refused
from runner.simulator.resolve import resolve
from runner.simulator.wire import Connection

NODE = "8x-rtx-pro-6000"
"""Node taken when ``SIMULATED_NODE`` is not set."""
BACKLOG = 4096
STOP_S = 5.0
"""Longest wait for the engine core after SIGTERM."""


def serve(words: Sequence[str], env: Mapping[str, str], faults: Faults) -> int:
    """Run ``serve``; the exit code. argparse ends the process itself with code 2."""
    log = startup.Log(silent=faults.silent)
    log.api(
        "This server is simulated: no GPU and no model are at work; times come from a cost model.",
        level="WARNING",
        where="simulator",
    )
    options = parse(words)
    faults = replace(faults, no_counters=True) if options.disable_log_stats else faults
    name = options.model or options.model_tag or ""
    try:
        start, listener = _prepare(options, name, env, faults, log)
    except Refused as error:
        startup.refuse(log, error.where, error.message)
        return 1
    info = server_info(start.launch, vars(options), dict(env), start.node, start.model)
    server = _Server(start, log, listener, info)
    server.names = options.served_model_name or [name]
    server.force_usage = bool(options.enable_force_include_usage)
    code: int = uvloop.run(server.run())
    return code


def _prepare(
    options: argparse.Namespace, name: str, env: Mapping[str, str], faults: Faults, log: startup.Log
) -> tuple[startup.Start, socket.socket]:
    """What happens before the event loop: port, descriptions, resolved launch, child processes.

    Raises:
        Refused: With what the API server itself finds wrong.
    """
    if faults.hangs("process"):
        time.sleep(startup.HANG_S)
    if (message := faults.crash("process")) is not None:
        raise Refused(message, "process")
    log.api(f"vLLM API server version {VERSION}, model {name}", where="api_utils.py:286")
    try:
        listener = _bind(options.host, options.port)
        node = load_node(env.get("SIMULATED_NODE") or NODE)
        model = load_model(name, options.hf_overrides)
    except (OSError, UsageError) as error:
        kind = "OSError" if isinstance(error, OSError) else "ValueError"
        raise Refused(f"{kind}: {error}", "process") from None
    launch, warnings, refused = _resolve(options, env, node, model)
    if faults.tokens_per_chunk:
        launch = replace(launch, stream_interval=faults.tokens_per_chunk)
    children = processes.start(launch, faults, listener)
    return startup.Start(launch, node, model, name, env, faults, children, refused, warnings), listener


def _resolve(
    options: argparse.Namespace, env: Mapping[str, str], node: SimulatedNode, model: SimulatedModel
) -> tuple[Launch, tuple[str, ...], Refused | None]:
    """The launch and its warnings; a refusal that shows only in the engine is handed on."""
    try:
        resolved = resolve(options, env, node, model)
    except Refused as error:
        if error.where == "config":
            text = f"pydantic_core._pydantic_core.ValidationError: 1 validation error\n  {error.message}"
            raise Refused(text, "config") from None
        return Launch(tensor_parallel=options.tensor_parallel_size), (), error
    return resolved.launch, resolved.warnings, None


def _bind(host: str, port: int) -> socket.socket:
    """Bind before the engine starts, as vLLM does; listening comes when the engine is ready."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _engine(launch: Launch, node: SimulatedNode, model: SimulatedModel, env: Mapping[str, str]) -> Engine:
    """The engine; ``SIMULATED_SEED`` switches noise on, ``SIMULATED_AGE_H`` ages the node for the drift."""
    seed = env.get("SIMULATED_SEED")
    age_h = float(env.get("SIMULATED_AGE_H", "0"))
    return Engine(launch, node, model, seed=int(seed or 0), noisy=seed is not None, age_h=age_h)


class _Server:
    """The leader's event loop.

    Attributes:
        names: Served model names.
        force_usage: ``--enable-force-include-usage``.
    """

    def __init__(
        self, start: startup.Start, log: startup.Log, listener: socket.socket, info: dict[str, object]
    ) -> None:
        self._start = start
        self._log = log
        self._listener = listener
        self._info = info
        self.names = [start.model_name]
        self.force_usage = False
        self._stopping = asyncio.Event()
        self._exit_code = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Start, serve until told to stop, stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        starting = asyncio.ensure_future(startup.run(self._start, self._log))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return await self._end(1)
        failure = starting.exception()
        if isinstance(failure, Refused):
            return await self._end(1)
        if failure is None:
            server = await self._open(loop)
            await self._stopping.wait()
            server.close()
        elif isinstance(failure, startup.EngineFailed):
            await self._stopping.wait()
        else:
            raise failure
        return await self._end(self._exit_code)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        start = self._start
        engine = _engine(start.launch, start.node, start.model, start.env)
        api = Api(
            engine,
            start.faults,
            names=self.names,
            root=start.model_name,
            vocabulary=start.model.vocabulary,
            info=self._info,
            force_usage=self.force_usage,
        )
        if start.env.get("VLLM_SERVER_DEV_MODE") == "1":
            api.add_dev_endpoints()
        self._watch_engine(loop, api)
        self._arm_faults(loop, api)
        server = await loop.create_server(
            lambda: Connection(api.handle, self._access), sock=self._listener, backlog=BACKLOG
        )
        address = self._listener.getsockname()
        self._log.api(f"Starting vLLM server on http://{address[0]}:{address[1]}", where="entry.py:140")
        for text in (f"Started server process [{os.getpid()}]", "Waiting for application startup."):
            self._log.line(f"INFO:     {text}")
        self._log.line("INFO:     Application startup complete.")
        return server

    def _watch_engine(self, loop: asyncio.AbstractEventLoop, api: Api) -> None:
        engine = os.pidfd_open(self._start.children.engine)

        def gone() -> None:
            loop.remove_reader(engine)
            os.close(engine)
            if self._stopping.is_set():
                return
            text = "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."
            self._log.api(text, level="ERROR", where="core_client.py:600")
            self._log.api(
                "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) "
                "for the root cause.",
                level="ERROR",
                where="async_llm.py:700",
            )
            api.engine_died()

        loop.add_reader(engine, gone)

    def _arm_faults(self, loop: asyncio.AbstractEventLoop, api: Api) -> None:
        faults = self._start.faults
        if faults.exit0_after is not None:
            loop.call_later(faults.exit0_after, os._exit, 0)
        if faults.kill_worker_after is not None:
            loop.call_later(faults.kill_worker_after, os.kill, self._start.children.workers[0], signal.SIGKILL)
        if faults.log_flood:
            self._tasks.add(loop.create_task(self._flood(faults.log_flood)))
        if faults.hangs("first_token"):
            api.live.freeze()
        api.live.on_tokens = lambda tokens: self._on_tokens(api, faults, tokens)

    def _on_tokens(self, api: Api, faults: Faults, tokens: int) -> None:
        message = faults.crash("first_token")
        if message is not None and not self._stopping.is_set():
            startup.engine_failed(self._log, message)
            self._exit_code = 1
            self._stopping.set()
        if faults.engine_stuck_after is not None and tokens >= faults.engine_stuck_after:
            api.live.freeze()
        if faults.engine_dead_after is not None and tokens >= faults.engine_dead_after and not api.dead:
            self._log.engine("EngineCore encountered a fatal error.", level="ERROR", where="core.py:1200")
            os.kill(self._start.children.engine, signal.SIGKILL)
            api.engine_died()

    async def _flood(self, lines_a_second: float) -> None:
        while True:
            for count in range(max(1, int(lines_a_second / 20))):
                self._log.api(f"Engine 000: Avg generation throughput: {count}.0 tokens/s", where="loggers.py:250")
            await asyncio.sleep(0.05)

    def _access(self, peer: str, method: str, path: str, status: int) -> None:
        if self._start.env.get("SIMULATED_ACCESS_LOG") == "1":
            self._log.line(f'INFO:     {peer} - "{method} {path} HTTP/1.1" {status}')

    def _on_signal(self) -> None:
        if not self._start.faults.sigterm_deaf:
            self._stopping.set()

    async def _end(self, code: int) -> int:
        """Stop the engine core, then itself."""
        self._stopping.set()
        self._log.api("[shutdown] API server: signalling HTTP server shutdown", where="launcher.py:282")
        for task in self._tasks:
            task.cancel()
        engine = self._start.children.engine
        try:
            os.kill(engine, signal.SIGTERM)
        except ProcessLookupError:
            return code
        until_s = time.monotonic() + STOP_S
        while time.monotonic() < until_s:
            pid, _ = os.waitpid(engine, os.WNOHANG)
            if pid:
                break
            await asyncio.sleep(0.02)
        self._log.line("INFO:     Application shutdown complete.")
        return code
