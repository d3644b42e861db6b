"""One concurrency measured: prepare, warm up, windows, drain, check.

``measure`` does one level; ``Bench`` keeps its client processes and the tokenised text over the levels of a ladder.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from runner.errors import UsageError
from runner.load import figures, samples
from runner.load.clients import Clients, processes_for, refusal
from runner.load.level import Level
from runner.load.orders import orders
from runner.load.prompts import Source, lengths
from runner.load.server import Server, Target
from runner.schema.experiment import Protocol, Workload
from runner.schema.trial import Measurement


class Bench:
    """Measures one server under one workload, level after level. A context manager.

    Args:
        target: The server.
        workload: What a request asks for.
        processes: Client processes; None takes what the level needs and the machine has cores for.

    Raises:
        UsageError: The workload cannot fit the server's context length.
    """

    def __init__(self, target: Target, workload: Workload, *, processes: int | None = None) -> None:
        self._check_fit(target, workload)
        self._workload = workload
        self._processes = processes
        self._server = Server(target)
        self._clients = Clients()
        self._source = Source(workload, self._server)
        self._clients.prepare(1)  # comes up while the caller is still busy

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the client processes."""
        self._clients.close()
        self._server.close()

    def measure(
        self,
        protocol: Protocol,
        concurrency: int,
        seed: int,
        *,
        on_phase: Callable[[str], None],
        check: Callable[[], None],
        samples_path: Path,
    ) -> Measurement:
        """Measure one level. Blocks for warm-up, windows and drain; may be called from any thread, one at a time.

        Args:
            protocol: How.
            concurrency: Closed-loop streams.
            seed: Seed of the study or trial; this level's prompts derive from it and from ``concurrency``.
            on_phase: Told where the level is.
            check: Called about once a second; raises when the server is gone.
            samples_path: Where the raw samples go (Parquet).

        Returns:
            The figures; ``valid`` is False, with a reason, where they do not count.

        Raises:
            UsageError: The workload cannot be made.
            TrialFailure: ``check`` raised; or Hang (no token for ``stall_s``), EngineDead, LoadFailed (more failures
                than ``max_error_rate``), EnvironmentFault (a client process died).
        """
        protocol = protocol.at(concurrency)
        processes = self._processes or processes_for(concurrency)
        if (reason := refusal(concurrency, processes)) is not None:
            return Measurement(concurrency=concurrency, valid=False, reason=reason, seed=seed)
        on_phase(f"C={concurrency} prepare")
        self._clients.prepare(processes)
        cell_seed = hash_seed(seed, concurrency)
        prompts = self._source.for_cell(cell_seed, processes)
        told = orders(self._server.target, self._workload, protocol, concurrency, cell_seed, prompts)
        level = Level(self._server, self._clients, protocol, concurrency, on_phase=on_phase, check=check)
        with ExitStack() as on_failure:
            # Whatever a client is still sending must not run into the next level.
            on_failure.callback(self._clients.close)
            facts = level.run(
                told,
                seed=seed,
                fresh_prompts=fresh_prompts(self._workload),
                template_tokens=self._source.template_tokens,
            )
            on_failure.pop_all()
        table, origin = samples.gather(self._clients.samples())
        cell = samples.Cell(samples.relative(facts, origin), table)
        samples.write(cell, samples_path)
        return figures.measurement(cell).model_copy(update={"samples": samples_path.name})

    @staticmethod
    def _check_fit(target: Target, workload: Workload) -> None:
        wanted = lengths(workload.output_tokens).high
        if workload.prompts != "file":
            wanted += max(lengths(workload.input_tokens).high, workload.shared_prefix_tokens)
        if target.max_model_len is not None and wanted > target.max_model_len:
            raise UsageError(
                f"a request may need {wanted} tokens, the server takes {target.max_model_len} (max_model_len)",
                remedy="shorten input_tokens or output_tokens, or raise max-model-len",
            )


def measure(
    target: Target,
    workload: Workload,
    protocol: Protocol,
    concurrency: int,
    seed: int,
    *,
    on_phase: Callable[[str], None],
    check: Callable[[], None],
    samples_path: Path,
    processes: int | None = None,
) -> Measurement:
    """Measure one level with client processes of its own; see ``Bench.measure``."""
    with Bench(target, workload, processes=processes) as bench:
        return bench.measure(protocol, concurrency, seed, on_phase=on_phase, check=check, samples_path=samples_path)


def recompute(path: Path) -> Measurement:
    """Compute every figure of a level again from its raw samples.

    Raises:
        UsageError: ``path`` holds no samples of a load benchmark.
    """
    return figures.measurement(samples.read(path)).model_copy(update={"samples": path.name})


def hash_seed(seed: int, concurrency: int) -> int:
    """Seed of one level's prompts: no two levels of a ladder share prompts (vllm-project/vllm#54227)."""
    return seed * 1_000_003 + concurrency


def fresh_prompts(workload: Workload) -> bool:
    """Whether prompts have nothing but a chat template in common, so that any other prefix-cache hit is a mistake."""
    return workload.prompts != "file" and workload.shared_prefix_tokens == 0
