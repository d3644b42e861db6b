"""One client process: its share of a cell's streams on one event loop. ``python -m runner.load.worker``

Takes ``Order``, ``Stop`` and ``Drop`` on standard input, answers ``Progress`` five times a second and ``Samples`` once
a cell on standard output, and ends when standard input does: a client never outlives its parent. No stream's work is
ever taken over by another process, so the shares stay exact.
"""

import asyncio
import gc
import os
import resource
import signal
import sys
import time
from array import array
from typing import Any

import msgspec
import uvloop

from runner.load.bodies import Bodies
from runner.load.stream import Chunks, Stream
from runner.load.wire import Drop, Frames, Order, Progress, RequestRow, Samples, Stop, write_frame

PROGRESS_S = 0.2
LAG_SAMPLE_S = 0.02
TIMER_NS = 1_000_000
"""Granularity of libuv's timers: being so late is no lag."""

RECONNECT_S = 0.1
"""Pause of a stream whose request failed: a dead server must not be hammered."""

_NS = 1_000_000_000


class Cell:
    """The cell under way in this process."""

    def __init__(self, order: Order, loop: asyncio.AbstractEventLoop) -> None:
        self.chunks = Chunks()
        self._order = order
        self._loop = loop
        self._bodies = Bodies(order)
        self._streams = [Stream(number, self) for number in order.streams]
        self._resting = 0
        self._left = order.requests
        self._rows: list[RequestRow] = []
        self._ok = 0
        self._failed = 0
        self._dephased = 0
        self._request_ns = 0
        self._errors: list[str] = []
        self._lag = array("q")
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def start(self) -> None:
        """Set the streams going, evenly over the ramp."""
        for place, stream in enumerate(self._streams):
            self._loop.call_later(self._order.ramp_s * place / len(self._streams), self._begin, stream)
        self._watch_lag(time.perf_counter_ns())

    def stop(self) -> None:
        """Begin no further request."""
        self._stopping = True

    def drop(self) -> None:
        """Fail what is still open."""
        self._stopping = True
        for task in tuple(self._tasks):
            task.cancel()
        for stream in self._streams:
            stream.fail("dropped: still open at the end of the drain")

    @property
    def drained(self) -> bool:
        """Whether no stream will send or receive anything more."""
        return self._resting == len(self._streams)

    def ended(self, stream: Stream) -> None:
        """A stream's request is over: count it and go on with the next."""
        row = self._rows[stream.index]
        self._dephased += row.first
        if row.error is None:
            self._ok += 1
            self._request_ns += (row.end_ns or 0) - row.sent_ns
            self._begin(stream)
        else:
            self._fail(row.error)
            self._loop.call_later(RECONNECT_S, self._begin, stream)

    def _fail(self, error: str) -> None:
        self._failed += 1
        self._errors.append(error)

    def _begin(self, stream: Stream) -> None:
        if self._stopping or self._left == 0:
            self._resting += 1
            stream.close()  # a server that admits too few connections must get on with the others
            return
        if self._left is not None:
            self._left -= 1
        if stream.transport is not None:
            self._send(stream)
        else:
            task = self._loop.create_task(self._connect(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, stream: Stream) -> None:
        order = self._order
        try:
            connecting = self._loop.create_connection(lambda: stream, order.host, order.port, ssl=order.tls or None)
            await asyncio.wait_for(connecting, order.request_timeout_s)
        except (OSError, TimeoutError) as error:
            now_ns = time.perf_counter_ns()
            reason = f"cannot connect to {order.host}:{order.port}: {error or 'timed out'}"
            self._rows.append(RequestRow(stream.number, False, 0, now_ns, now_ns, error=reason))
            self._fail(reason)
            self._loop.call_later(RECONNECT_S, self._begin, stream)
        except asyncio.CancelledError:
            self._resting += 1
            raise
        else:
            self._send(stream)

    def _send(self, stream: Stream) -> None:
        first = stream.index < 0
        body, asked = self._bodies.next(stream.number, first=first)
        row = RequestRow(stream.number, first and self._order.dephase, asked, 0)
        self._rows.append(row)
        stream.send(row, len(self._rows) - 1, b"%b%d\r\n\r\n%b" % (self._order.request_line, len(body), body))

    def progress(self) -> Progress:
        """How far the cell is; errors not told yet are told once."""
        self._time_out()
        errors, self._errors = self._errors, []
        return Progress(
            t_ns=time.perf_counter_ns(),
            tokens=self.chunks.total or len(self.chunks.ns),  # no counts by chunk: text chunks show the course
            in_flight=sum(stream.row is not None for stream in self._streams),
            ok=self._ok,
            failed=self._failed,
            dephased=self._dephased,
            request_ns=self._request_ns,
            last_token_ns=self.chunks.ns[-1] if self.chunks.ns else 0,
            cpu_s=time.process_time(),
            errors=errors,
            drained=self.drained,
        )

    def _time_out(self) -> None:
        oldest_ns = time.perf_counter_ns() - int(self._order.request_timeout_s * _NS)
        for stream in self._streams:
            if stream.row is not None and stream.row.sent_ns < oldest_ns:
                stream.fail(f"no complete answer within {self._order.request_timeout_s:g} s")

    def samples(self) -> Samples:
        """Everything seen."""
        chunks = self.chunks
        return Samples(
            chunk_request=chunks.request.tobytes(),
            chunk_ns=chunks.ns.tobytes(),
            chunk_tokens=chunks.tokens.tobytes(),
            requests=self._rows,
            lag_ns=self._lag.tobytes(),
        )

    def _watch_lag(self, due_ns: int) -> None:
        now_ns = time.perf_counter_ns()
        self._lag.append(now_ns)
        self._lag.append(max(0, now_ns - due_ns - TIMER_NS))
        if not self.drained:
            self._loop.call_later(LAG_SAMPLE_S, self._watch_lag, now_ns + int(LAG_SAMPLE_S * _NS))


class Client:
    """The process: reads what the parent wants, runs one cell after another, reports."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._frames = Frames(msgspec.msgpack.Decoder(Order | Stop | Drop))
        self._cell: Cell | None = None
        os.set_blocking(0, False)
        loop.add_reader(0, self._on_input)

    def _on_input(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            self._loop.stop()
            return
        for message in self._frames.feed(data):
            if isinstance(message, Order):
                self._cell = Cell(message, self._loop)
                self._cell.start()
                self._loop.call_later(PROGRESS_S, self._report, self._cell)
            elif self._cell is not None:
                if isinstance(message, Stop):
                    self._cell.stop()
                else:
                    self._cell.drop()

    def _report(self, cell: Cell) -> None:
        progress = cell.progress()
        write_frame(sys.stdout.buffer, progress)
        if progress.drained:
            write_frame(sys.stdout.buffer, cell.samples())
            self._cell = None
            gc.collect()
        else:
            self._loop.call_later(PROGRESS_S, self._report, cell)


def _die(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A mistake in a callback must not leave a client that measures half: the parent sees the process end."""
    loop.default_exception_handler(context)
    os._exit(1)


def main() -> None:
    """Serve the parent until it closes the pipe."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act upon
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(_die)
    # Nothing made in a cell forms a cycle worth a pause: collected between cells only.
    gc.disable()
    Client(loop)
    loop.run_forever()


if __name__ == "__main__":
    main()
