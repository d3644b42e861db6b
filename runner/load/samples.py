"""The raw samples of one cell: columns in memory, one Parquet file on disk; every figure can be computed from them.

One row a request, its chunks as two list columns. Times are nanoseconds after the first request sent.
What is not a sample (counters before and after, gauges, the client's own load) stands as JSON in the file's metadata.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from runner.errors import UsageError
from runner.load.server import Counters
from runner.load.wire import Samples
from runner.schema.base import Model
from runner.schema.experiment import Slo

Ints = NDArray[np.int64]

_FACTS_KEY = b"runner.load"

_SCHEMA = pa.schema(
    [
        ("process", pa.int32()),
        ("stream", pa.int32()),
        ("first", pa.bool_()),
        ("asked", pa.int32()),
        ("sent_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("tokens", pa.int32()),
        ("counted", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("finish", pa.string()),
        ("error", pa.string()),
        ("chunk_ns", pa.list_(pa.int64())),
        ("chunk_tokens", pa.list_(pa.int32())),
    ]
)


class Facts(Model):
    """What was known about a cell beside its samples.

    Attributes:
        origin_ns: Reading of the machine's monotonic clock that all times count from.
        span_ns: Start and end of the steady span after ``origin_ns``; None: the naive protocol.
        windows: Windows that make up the span.
        warmup_s: From the first request to the span.
        before: The server's counters before the first request; ``after`` after the last stream's end.
        in_flight: The server's running + waiting, as polled inside the span.
        reset_asked: Whether the prefix cache was to be reset; ``cache_reset`` is the answer, None: no such endpoint.
        fresh_prompts: Whether prompts have no common prefix, so that a prefix-cache hit is a mistake.
        template_tokens: Tokens that the server's chat template puts around every prompt.
        client_cpu: Busiest client process inside the span, cores.
        lag_mean_ms: Mean event-loop lag of the worst client process inside the span; ``lag_p99_ms`` its p99.
        server_cpu: Busiest process of the server's front end inside the span, cores.
    """

    concurrency: int
    protocol: Literal["steady", "requests"]
    seed: int
    processes: int
    origin_ns: int = 0
    span_ns: tuple[int, int] | None = None
    windows: int = 0
    warmup_s: float | None = None
    before: Counters | None = None
    after: Counters | None = None
    in_flight: tuple[float, ...] = ()
    reset_asked: bool = False
    cache_reset: bool | None = None
    fresh_prompts: bool = True
    template_tokens: int = 0
    client_cpu: float | None = None
    lag_mean_ms: float | None = None
    lag_p99_ms: float | None = None
    server_cpu: float | None = None
    slo: Slo | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell's samples; ``requests`` has one row a request (see ``_SCHEMA``)."""

    facts: Facts
    requests: pa.Table


def gather(samples: list[Samples]) -> tuple[pa.Table, int]:
    """Join what the client processes saw: the requests' table and its origin (clock nanoseconds)."""
    rows = [(process, row) for process, part in enumerate(samples) for row in part.requests]
    origin = min((row.sent_ns for _, row in rows), default=0)
    columns: dict[str, Any] = {
        name: [getattr(row, name) for _, row in rows]
        for name in ("stream", "first", "asked", "tokens", "counted", "prompt_tokens", "finish", "error")
    }
    columns["process"] = [process for process, _ in rows]
    columns["sent_ns"] = [row.sent_ns - origin for _, row in rows]
    columns["end_ns"] = [None if row.end_ns is None else row.end_ns - origin for _, row in rows]
    columns["chunk_ns"], columns["chunk_tokens"] = _chunk_lists(samples, origin)
    return pa.table(columns, schema=_SCHEMA), origin


def _chunk_lists(samples: list[Samples], origin: int) -> tuple[pa.ListArray, pa.ListArray]:
    request, ns, tokens, first_row = [], [], [], 0
    for part in samples:
        request.append(np.frombuffer(part.chunk_request, np.uint32).astype(np.int64) + first_row)
        ns.append(np.frombuffer(part.chunk_ns, np.int64) - origin)
        tokens.append(np.frombuffer(part.chunk_tokens, np.uint32).astype(np.int32))
        first_row += len(part.requests)
    owner = np.concatenate(request)
    order = np.argsort(owner, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=first_row)))).astype(np.int32)
    return (
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(ns)[order])),
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(tokens)[order])),
    )


def relative(facts: Facts, origin_ns: int) -> Facts:
    """The facts with their span counted from ``origin_ns`` instead of the clock's own zero."""
    if facts.span_ns is None:
        return facts.model_copy(update={"origin_ns": origin_ns})
    start, end = facts.span_ns
    span = (start - origin_ns, end - origin_ns)
    return facts.model_copy(update={"origin_ns": origin_ns, "span_ns": span, "warmup_s": span[0] / 1e9})


def write(cell: Cell, path: Path) -> None:
    """Write the cell beside ``path`` and rename."""
    table = cell.requests.replace_schema_metadata({_FACTS_KEY: cell.facts.model_dump_json().encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    pq.write_table(table, beside, compression="zstd")
    beside.replace(path)


def read(path: Path) -> Cell:
    """Read a cell back.

    Raises:
        UsageError: There is no such file, or it holds no samples of a load benchmark.
    """
    try:
        table = pq.read_table(path)
        facts = Facts.model_validate_json((table.schema.metadata or {})[_FACTS_KEY])
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(f"no samples of a load benchmark: {error}", path=path) from error
    return Cell(facts, table)
