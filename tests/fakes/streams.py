"""Opens many streams on one server and counts what comes, for a while: a client that costs little.

``python -m tests.fakes.streams PORT STREAMS SECONDS`` prints chunks a second over the last half of the time.
"""

import asyncio
import json
import sys
from typing import cast

import uvloop


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, counts: list[int]) -> None:
        self._request = request
        self._counts = counts

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._counts[0] += data.count(b'"token_ids"')


async def _run(port: int, streams: int, seconds: float) -> float:
    body = json.dumps(
        {
            "prompt": [1, 2, 3, 4],
            "max_tokens": 3000,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    counts = [0]
    loop = asyncio.get_running_loop()
    for first in range(0, streams, 100):
        opening = [
            loop.create_connection(lambda: _Stream((head + body).encode(), counts), "127.0.0.1", port)
            for _ in range(min(100, streams - first))
        ]
        await asyncio.gather(*opening)
    await asyncio.sleep(seconds / 2)
    before = counts[0]
    await asyncio.sleep(seconds / 2)
    return (counts[0] - before) / (seconds / 2)


if __name__ == "__main__":
    print(uvloop.run(_run(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
