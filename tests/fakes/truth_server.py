"""A server that measures itself: streams known tokens at a set pace and keeps the time of each of its own sends.

One thread, epoll and a heap of due times, standard library only, so that it carries tens of thousands of chunks a
second on one core. Switches bring in the faults that load generators are known to miss. It is a fake for tests: it has
no model, no tokenizer (a word is a token) and no scheduler but a cap.

Run as ``python tests/fakes/truth_server.py --port 0``; the port is the first line on standard output. ``GET /truth``
gives what was sent: per request the arrival of its last byte, then send time and tokens of each chunk (ns, the
machine-wide monotonic clock).
"""

import argparse
import heapq
import json
import random
import select
import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

NS_PER_MS = 1_000_000
SMILEY = "\N{SLIGHTLY SMILING FACE}"


def options(argv: list[str]) -> argparse.Namespace:
    """Pace and faults."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--port", type=int, default=0)
    p.add_argument("--model", default="truth")
    p.add_argument("--ttft-ms", type=float, default=20.0)
    p.add_argument("--tpot-ms", type=float, default=5.0)
    p.add_argument("--tokens-per-chunk", default="1", help="a number, or mix:1,2,4,8")
    p.add_argument("--first-chunk-tokens", type=int, default=1)
    p.add_argument("--usage", choices=["continuous", "final", "none", "token_ids", "both"], default="continuous")
    p.add_argument("--usage-off", type=int, default=0, help="the final usage is off by so many")
    p.add_argument("--counter-off", type=float, default=0.0, help="the token counter is off by this share")
    p.add_argument("--error-after", type=int, help="an error object inside the stream after so many tokens")
    p.add_argument("--die", action="store_true", help="with --error-after: /health answers 503 from then on")
    p.add_argument("--no-done", action="store_true")
    p.add_argument("--break-after", type=int, help="the connection breaks after so many tokens")
    p.add_argument("--stop-at", type=int, help="finish_reason stop after so many tokens")
    p.add_argument("--stall-after", type=int, help="nothing more after so many tokens")
    p.add_argument("--refuse-every", type=int, help="each so many-th request gets a 503")
    p.add_argument("--conn-cap", type=int, help="requests let through at once; the others are not even counted")
    p.add_argument("--max-running", type=int, help="requests that run at once; the others are counted as waiting")
    p.add_argument("--prefix-hits", type=float, default=0.0, help="share of prompt tokens found in the cache")
    p.add_argument(
        "--template-tokens", type=int, default=0, help="a chat's prompt has so many more, found in the cache"
    )
    p.add_argument("--acceptance", type=float, help="speculation counters, accepted share of 4 drafted tokens")
    p.add_argument("--no-metrics", action="store_true")
    p.add_argument("--no-tokenize", action="store_true")
    p.add_argument("--refuse-resets", type=int, default=0, help="so many cache resets answer success: false")
    p.add_argument("--empty-first", action="store_true", help="a first chunk without text or tokens")
    p.add_argument("--split", action="store_true", help="every event leaves in two sends, cut inside a character")
    p.add_argument("--merge", action="store_true", help="two events leave in one send")
    p.add_argument("--comments", action="store_true")
    p.add_argument("--crlf", action="store_true")
    p.add_argument("--close", action="store_true", help="close the connection after each answer")
    return p.parse_args(argv)


@dataclass(slots=True)
class Sent:
    """One request as it was served."""

    received_ns: int
    asked: int
    ns: array = field(default_factory=lambda: array("q"))  # type: ignore[type-arg]
    tokens: array = field(default_factory=lambda: array("I"))  # type: ignore[type-arg]


@dataclass(slots=True, eq=False)
class Connection:
    """One client connection and the request under way on it."""

    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    sent: Sent | None = None
    received_ns: int = 0
    due_ns: int = 0
    count: int = 0
    prompt_tokens: int = 0
    held: bytes = b""
    open: bool = True


class TruthServer:
    """All of it; ``run`` never returns."""

    def __init__(self, opts: argparse.Namespace) -> None:
        self.opts = opts
        spec = opts.tokens_per_chunk
        self.sizes = [int(part) for part in spec.removeprefix("mix:").split(",")]
        self.random = random.Random(1)
        self.epoll = select.epoll()
        self.listener = socket.create_server(("127.0.0.1", opts.port), backlog=4096)
        self.listener.setblocking(False)
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.connections: dict[int, Connection] = {}
        self.heap: list[tuple[int, int, Connection]] = []
        self.order = 0
        self.queue: deque[Connection] = deque()
        self.running = 0
        self.peak = 0
        self.requests: list[Sent] = []
        self.seen = 0
        self.generated = 0
        self.chunks = 0
        self.prompted = 0
        self.template_hits = 0
        self.resets = 0
        self.dead = False
        self.eol = b"\r\n" if opts.crlf else b"\n"

    def run(self) -> None:
        """Serve until killed."""
        print(self.listener.getsockname()[1], flush=True)
        while True:
            wait_s = 1.0
            if self.heap:
                wait_s = max(0.0, (self.heap[0][0] - time.perf_counter_ns()) / 1e9)
            for number, events in self.epoll.poll(wait_s):
                if number == self.listener.fileno():
                    self.accept()
                elif (connection := self.connections.get(number)) is not None:
                    if events & select.EPOLLOUT:
                        self.flush(connection)
                    if events & ~select.EPOLLOUT:
                        self.receive(connection)
            now_ns = time.perf_counter_ns()
            while self.heap and self.heap[0][0] <= now_ns:
                _, _, connection = heapq.heappop(self.heap)
                if connection.open and connection.sent is not None:
                    self.step(connection)

    def accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections[sock.fileno()] = Connection(sock)
            self.epoll.register(sock.fileno(), select.EPOLLIN)

    def receive(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.drop(connection)
            return
        if not connection.inbox:  # The request is here from its first byte on: reading it is the server's own time.
            connection.received_ns = time.perf_counter_ns()
        connection.inbox += data
        end = connection.inbox.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(connection.inbox[:end]).decode("latin-1")
        length = 0
        for line in head.split("\r\n"):
            name, _, value = line.partition(":")
            if name.lower() == "content-length":
                length = int(value)
        if len(connection.inbox) < end + 4 + length:
            return
        body = bytes(connection.inbox[end + 4 : end + 4 + length])
        del connection.inbox[: end + 4 + length]
        self.answer(connection, head.split(" ", 2)[1].partition("?")[0], body)

    def answer(self, connection: Connection, path: str, body: bytes) -> None:
        routes: dict[str, Callable[[bytes], tuple[int, bytes]]] = {
            "/health": lambda _: (503 if self.dead else 200, b""),
            "/v1/models": self.models,
            "/metrics": self.metrics,
            "/truth": self.truth,
            "/tokenize": self.tokenize,
            "/reset_prefix_cache": self.reset,
        }
        if path in routes:
            status, reply = routes[path](body)
            self.reply(connection, status, reply)
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self.complete(connection, body)
        else:
            self.reply(connection, 404, b"{}")

    def reply(self, connection: Connection, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self.send(connection, head + body)

    def models(self, _: bytes) -> tuple[int, bytes]:
        return 200, json.dumps({"data": [{"id": self.opts.model, "max_model_len": 32768}]}).encode()

    def tokenize(self, body: bytes) -> tuple[int, bytes]:
        if self.opts.no_tokenize:
            return 404, b"{}"
        words = json.loads(body)["prompt"].split()
        return 200, json.dumps({"count": len(words), "tokens": [hash(word) % 30000 for word in words]}).encode()

    def reset(self, _: bytes) -> tuple[int, bytes]:
        self.resets += 1
        return 200, json.dumps({"success": self.resets > self.opts.refuse_resets}).encode()

    def metrics(self, _: bytes) -> tuple[int, bytes]:
        if self.opts.no_metrics:
            return 404, b"{}"
        waiting = len(self.queue) if self.opts.max_running else 0
        series = {
            "generation_tokens_total": self.generated * (1 + self.opts.counter_off),
            "prompt_tokens_total": self.prompted,
            "prefix_cache_queries_total": self.prompted,
            "prefix_cache_hits_total": self.prompted * self.opts.prefix_hits + self.template_hits,
            "num_preemptions_total": 0,
            "num_requests_running": self.running,
            "num_requests_waiting": waiting,
        }
        if self.opts.acceptance is not None:
            drafted = {"drafts": self.chunks, "draft_tokens": 4 * self.chunks}
            drafted["accepted_tokens"] = 4 * self.chunks * self.opts.acceptance
            series |= {f"spec_decode_num_{name}_total": value for name, value in drafted.items()}
        lines = [f'vllm:{name}{{model_name="truth",engine="0"}} {float(value)}' for name, value in series.items()]
        return 200, ("\n".join(["# HELP x y", *lines]) + "\n").encode()

    def truth(self, _: bytes) -> tuple[int, bytes]:
        rows = [[one.received_ns, one.ns.tolist(), one.tokens.tolist()] for one in self.requests]
        facts = {"requests": rows, "tokens": self.generated, "peak": self.peak, "cpu_s": time.process_time()}
        return 200, json.dumps(facts).encode()

    def complete(self, connection: Connection, body: bytes) -> None:
        wanted = json.loads(body)
        self.seen += 1
        prompt = wanted["prompt"] if "prompt" in wanted else wanted["messages"][0]["content"]
        template_tokens = self.opts.template_tokens if "messages" in wanted else 0
        connection.prompt_tokens = template_tokens + len(prompt if isinstance(prompt, list) else prompt.split())
        if not wanted.get("stream"):
            usage = {"prompt_tokens": connection.prompt_tokens, "completion_tokens": 0}
            self.reply(connection, 200, json.dumps({"choices": [], "usage": usage}).encode())
            return
        if self.opts.refuse_every and self.seen % self.opts.refuse_every == 0:
            self.reply(connection, 503, b'{"error": {"message": "overloaded"}}')
            return
        self.prompted += connection.prompt_tokens
        self.template_hits += template_tokens
        asked = wanted.get("max_tokens") or wanted.get("max_completion_tokens") or 16
        connection.sent = Sent(connection.received_ns, asked)
        connection.count, connection.held = 0, b""
        cap = self.opts.max_running or self.opts.conn_cap
        if cap and self.running >= cap:
            self.queue.append(connection)
        else:
            self.admit(connection)

    def admit(self, connection: Connection) -> None:
        self.running += 1
        self.peak = max(self.peak, self.running)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        if self.opts.close:
            head = head[:-2] + b"Connection: close\r\n\r\n"
        self.send(connection, head)
        if self.opts.empty_first:
            self.send(connection, self.http_chunk(self.event(connection, 0, "", None)))
        connection.due_ns = time.perf_counter_ns() + int(self.opts.ttft_ms * NS_PER_MS)
        self.schedule(connection)

    def schedule(self, connection: Connection) -> None:
        self.order += 1
        heapq.heappush(self.heap, (connection.due_ns, self.order, connection))

    def step(self, connection: Connection) -> None:
        """Send the chunk that is due, and plan the next."""
        sent, opts = connection.sent, self.opts
        assert sent is not None
        asked = sent.asked if opts.stop_at is None else min(sent.asked, opts.stop_at)
        size = opts.first_chunk_tokens if not connection.count else self.random.choice(self.sizes)
        size = min(size, asked - connection.count)
        connection.count += size
        last = connection.count >= asked
        finish = None if not last else "stop" if asked < sent.asked else "length"
        text = (SMILEY if opts.split else " a") * size
        data = self.event(connection, size, text, finish)
        if opts.comments:
            data = b": keep-alive" + self.eol * 2 + data
        self.deliver(connection, self.http_chunk(data), last)
        now_ns = time.perf_counter_ns()
        sent.ns.append(now_ns)
        sent.tokens.append(size)
        self.generated += size
        self.chunks += 1
        if opts.stall_after is not None and connection.count >= opts.stall_after:
            return
        if opts.error_after is not None and connection.count >= opts.error_after:
            self.dead = self.dead or opts.die
            error = b'data: {"error": {"message": "the engine is gone", "code": 500}}' + self.eol * 2
            self.finish(connection, self.http_chunk(error))
        elif opts.break_after is not None and connection.count >= opts.break_after:
            self.drop(connection)
        elif last:
            self.finish(connection, b"")
        else:
            coming = min(self.sizes[0] if len(self.sizes) == 1 else self.random.choice(self.sizes), 8)
            connection.due_ns += int(coming * opts.tpot_ms * NS_PER_MS)
            self.schedule(connection)

    def deliver(self, connection: Connection, data: bytes, last: bool) -> None:
        if self.opts.split:
            cut = data.find(SMILEY.encode()) + 2
            self.send(connection, connection.held + data[:cut])
            connection.held, data = b"", data[cut:]
        if self.opts.merge and not connection.held and not last:
            connection.held = data
            return
        self.send(connection, connection.held + data)
        connection.held = b""

    def event(self, connection: Connection, size: int, text: str, finish: str | None) -> bytes:
        """One chunk as vLLM writes it (spelled out: json.dumps would be the server's limit)."""
        usage, ids = b"", b""
        if self.opts.usage in ("continuous", "both"):
            usage = b',"usage":%b' % self.usage(connection, 0)
        if self.opts.usage in ("token_ids", "both"):
            ids = b',"token_ids":[%b]' % b",".join([b"7"] * size)
        reason = b"null" if finish is None else b'"%b"' % finish.encode()
        choice = b'{"index":0,"text":"%b"%b,"logprobs":null,"finish_reason":%b}' % (text.encode(), ids, reason)
        head = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"truth"'
        return b'%b,"choices":[%b]%b%b' % (head, choice, usage + b"}", self.eol * 2)

    def usage(self, connection: Connection, off: int) -> bytes:
        count, prompt = connection.count + off, connection.prompt_tokens
        return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (prompt, prompt + count, count)

    def finish(self, connection: Connection, data: bytes) -> None:
        if self.opts.usage not in ("none", "token_ids"):
            usage = b'data: {"id":"cmpl-1","choices":[],"usage":%b}' % self.usage(connection, self.opts.usage_off)
            data += self.http_chunk(usage + self.eol * 2)
        if not self.opts.no_done:
            data += self.http_chunk(b"data: [DONE]" + self.eol * 2)
        self.release(connection)
        self.send(connection, data + b"0\r\n\r\n")
        if self.opts.close:
            self.drop(connection)

    def http_chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    def release(self, connection: Connection) -> None:
        """Take the request off the running ones and let the next waiting one in."""
        if connection.sent is None:
            return
        if connection in self.queue:
            self.queue.remove(connection)
        else:
            self.running -= 1
        self.requests.append(connection.sent)
        connection.sent = None
        if self.queue and connection not in self.queue:
            self.admit(self.queue.popleft())

    def send(self, connection: Connection, data: bytes) -> None:
        if not connection.open:
            return
        if connection.outbox:
            connection.outbox += data
            return
        try:
            count = connection.socket.send(data)
        except BlockingIOError:
            count = 0
        except ConnectionError:
            self.drop(connection)
            return
        if count < len(data):
            connection.outbox += data[count:]
            self.epoll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def flush(self, connection: Connection) -> None:
        data, connection.outbox = bytes(connection.outbox), bytearray()
        self.epoll.modify(connection.socket.fileno(), select.EPOLLIN)
        self.send(connection, data)

    def drop(self, connection: Connection) -> None:
        if not connection.open:
            return
        connection.open = False
        self.connections.pop(connection.socket.fileno(), None)
        self.epoll.unregister(connection.socket.fileno())
        connection.socket.close()
        self.release(connection)


if __name__ == "__main__":
    TruthServer(options(sys.argv[1:])).run()
