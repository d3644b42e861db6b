"""A cell's work split into one order for each client process. Pure."""

import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from runner.errors import UsageError
from runner.load.clients import shares
from runner.load.prompts import lengths
from runner.load.server import Target
from runner.load.wire import Listed, Order, Passages
from runner.schema.experiment import Protocol, Workload

RAMP_S_PER_STREAM = 0.002
"""Pause between two streams' beginnings; 1024 streams start over 2 s."""

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def orders(
    target: Target,
    workload: Workload,
    protocol: Protocol,
    concurrency: int,
    seed: int,
    prompts: Sequence[Passages | Listed],
) -> list[Order]:
    """One order a process: streams (and requests) shared out exactly.

    Raises:
        UsageError: ``base_url`` is none, a window is under a second, or fewer requests are asked for than streams.
    """
    url = urlsplit(target.base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UsageError(f"{target.base_url!r} is no base URL", remedy="e.g. http://127.0.0.1:8000")
    if protocol.requests is None and protocol.window_s < 1:
        raise UsageError(f"a window of {protocol.window_s:g} s holds no whole second", remedy="window_s of 1 or more")
    if protocol.requests is not None and protocol.requests < concurrency:
        raise UsageError(
            f"{protocol.requests} requests cannot keep {concurrency} streams busy", remedy="ask for at least C requests"
        )
    naive = protocol.requests is not None
    parts = len(prompts)
    requests = shares(protocol.requests, parts) if protocol.requests is not None else [None] * parts
    head, tail = body_frame(target.model, workload)
    return [
        Order(
            host=url.hostname,
            port=url.port or (443 if url.scheme == "https" else 80),
            tls=url.scheme == "https",
            request_line=request_line(target, url.path.rstrip("/") + PATHS[workload.endpoint], url.netloc),
            head=head,
            tail=tail,
            prompts=prompts[part],
            output_tokens=lengths(workload.output_tokens),
            seed=seed,
            streams=list(range(part, concurrency, parts)),
            requests=requests[part],
            ramp_s=0.0 if naive else min(RAMP_S_PER_STREAM * concurrency, protocol.warmup_max_s / 4),
            dephase=not naive,
            request_timeout_s=protocol.request_timeout_s,
        )
        for part in range(parts)
    ]


def request_line(target: Target, path: str, netloc: str) -> bytes:
    """The request's first line and headers, up to the value of Content-Length."""
    authorization = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key is not None else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {netloc}\r\n{authorization}"
        "Accept: text/event-stream\r\nContent-Type: application/json\r\nContent-Length: "
    ).encode()


def body_frame(model: str, workload: Workload) -> tuple[bytes, bytes]:
    """The request body before the prompt and after it (``%d`` twice: the output length).

    Exact lengths: ``ignore_eos`` and ``min_tokens = max_tokens``; usage in every chunk: ``continuous_usage_stats``.

    Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html
    """
    fixed = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": workload.temperature,
        "ignore_eos": True,
    }
    key = "messages" if workload.endpoint == "chat" else "prompt"
    return f'{json.dumps(fixed)[:-1]}, "{key}": '.encode(), b', "max_tokens": %d, "min_tokens": %d}'
