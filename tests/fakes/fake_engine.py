"""A stand-in for an interpreter that runs ``vllm serve``: quick to start, and wrong in one named way on request.

``FAKE_FAULT`` names the fault and, after a colon, its argument. The log has vLLM's landmarks in own wording. Standard
library only; run as a script, with the launcher's path as first argument as a real interpreter would be.
"""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FAULT, _, ARGUMENT = os.environ.get("FAKE_FAULT", "").partition(":")
TOKEN_S = float(os.environ.get("FAKE_TOKEN_S", "0.002"))

FAILS_AFTER = 60
"""Tokens after which a fault under load sets in: soon, so that a busy machine comes to it as well."""

MAPPED: list[mmap.mmap] = []

LINES = {
    "process": "(APIServer pid=1) INFO 01-01 00:00:00 [api.py:1] fake engine: hello",
    "weights": "(Worker pid=2) INFO 01-01 00:00:01 [runner.py:1] Starting to load model fake...",
    "compile": "(Worker pid=2) INFO 01-01 00:00:02 [loader.py:1] Loading weights took 0.01 seconds",
    "capture": "(EngineCore pid=3) INFO 01-01 00:00:03 [kv.py:1] GPU KV cache size: 4,096 tokens",
    "first token": "INFO:     Application startup complete.",
}
"""Said on entering each phase."""


class State:
    """What the counters show."""

    generated = 0
    prompted = 0
    running = 0
    stuck = False
    dead = False
    lock = threading.Lock()


def say(line: str) -> None:
    print(line, flush=True)


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def main() -> None:
    words = sys.argv[2:]
    port = int(words[words.index("--port") + 1])
    name = words[words.index("--served-model-name") + 1]
    if FAULT == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if FAULT == "says":
        say(ARGUMENT)
        sys.exit(1)
    start_up()
    hold_memory(float(os.environ.get("FAKE_USED_GIB", "40")))
    Handler.name = "somebody-else" if FAULT == "wrong_model" else name
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    say(LINES["first token"])
    if FAULT == "leader_leaves":
        leave_grandchildren()
        threading.Thread(target=leave_when_told, daemon=True).start()
    if FAULT == "double_fork":
        double_fork()
    if FAULT == "shared_memory":
        keep_mapped(ARGUMENT.split(","))
    server.serve_forever()


def start_up() -> None:
    """Through the phases, wrong where asked."""
    at_phase("")
    for phase in ("process", "weights", "compile", "capture"):
        say(LINES[phase])
        time.sleep(0.02)
        at_phase(phase)


def at_phase(phase: str) -> None:
    """The fault that belongs to the end of this phase, if there is one."""
    where, _, code = ARGUMENT.partition(",")
    if FAULT == "hang" and where == (phase or "process"):
        sleep_for_ever()
    if FAULT == "exit" and where == phase:
        sys.exit(int(code))
    if FAULT == "kill" and where == phase:
        os.kill(os.getpid(), signal.SIGKILL)
    if (FAULT, phase) in TALKS:
        TALKS[FAULT, phase]()


def repeat_itself() -> None:
    for attempt in range(10**6):
        say(f"(Worker pid={attempt}) WARNING 01-01 00:00:{attempt % 60:02} [w.py:1] try {attempt}, {attempt} s")
        time.sleep(0.05)


def dawdle() -> None:
    for step in range(10**6):
        say(f"Loading shards: {step}/1000000")
        time.sleep(0.05)


def wait_for_workers() -> None:
    for _ in range(2):
        say("INFO [shm.py:1] No available shared memory broadcast block found in 60 seconds. Somebody waits.")
        time.sleep(0.05)
    sleep_for_ever()


def lose_the_engine() -> None:
    say("(EngineCore pid=3) ERROR 01-01 00:00:02 [core.py:1] EngineCore failed to start.")
    sleep_for_ever()


def flood() -> None:
    for _ in range(int(ARGUMENT)):
        sys.stdout.write(("x" * 200 + "\n") * 5000)
    sys.stdout.flush()


TALKS: dict[tuple[str, str], Callable[[], None]] = {
    ("repeats", "weights"): repeat_itself,
    ("dawdles", "weights"): dawdle,
    ("stuck_workers", "capture"): wait_for_workers,
    ("zombie_api", "weights"): lose_the_engine,
    ("flood", "weights"): flood,
    ("tells", "weights"): lambda: say(ARGUMENT),
}


def hold_memory(gib: float) -> None:
    """Write what a fake driver shows while this process lives."""
    path = os.environ.get("TOK100_FAKE_NVML")
    if path:
        told = json.loads(Path(path).read_text())
        for gpu in told.values():
            gpu["used_gib"] = gib
        new = Path(f"{path}.{os.getpid()}")
        new.write_text(json.dumps(told))
        new.replace(path)


def keep_mapped(paths: list[str]) -> None:
    """Map these files for as long as this process lives, as a shared-memory channel would."""
    for path in paths:
        with Path(path).open("w+b") as file:
            file.truncate(4096)
            MAPPED.append(mmap.mmap(file.fileno(), 4096))


def leave_grandchildren() -> None:
    for _ in range(2):
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import signal,time; signal.signal(signal.SIGHUP, signal.SIG_IGN); time.sleep(3600)",
            ],
            start_new_session=True,
        )


def leave_when_told() -> None:
    while not Path(ARGUMENT).exists():
        time.sleep(0.05)
    os._exit(0)


def double_fork() -> None:
    """A descendant in a session of its own, with an environment that lost the marker."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(
                sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)"], {"FAKE_ORPHAN": ARGUMENT}
            )
        os._exit(0)
    os.wait()


WRONG_ANSWERS = {
    "error_in_200": (200, json.dumps({"error": {"message": "fake engine died", "code": 500}})),
    "refuses": (400, json.dumps({"error": {"message": "prompt is too long for this model"}})),
    "not_json": (200, "<html>some proxy</html>"),
}


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM would, but for the fault."""

    protocol_version = "HTTP/1.1"
    name = ""

    def log_message(self, *words: object) -> None:
        pass

    def reply(self, status: int, text: str, kind: str = "application/json") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            self.reply(503 if State.dead or FAULT == "unhealthy" else 200, "")
        elif path == "/v1/models":
            self.reply(200, json.dumps({"data": [{"id": self.name, "max_model_len": 4096}]}))
        elif path == "/metrics":
            self.reply(200, metrics(), "text/plain")
        elif path == "/server_info":
            self.reply(200, json.dumps({"vllm_config": {"scheduler_config": {"async_scheduling": True}}}))
        else:
            self.reply(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        if self.path != "/v1/completions":
            self.reply(200 if self.path == "/reset_prefix_cache" else 404, json.dumps({"success": True}))
        elif body.get("stream"):
            self.stream(body)
        else:
            self.complete(body)

    def complete(self, body: dict[str, object]) -> None:
        if self.misbehaves():
            return
        made = int(str(body["max_tokens"])) - (1 if FAULT == "short" else 0)
        with State.lock:
            State.generated += made
        usage = {"prompt_tokens": 4, "completion_tokens": made}
        self.reply(200, json.dumps({"choices": [{"text": "a b", "finish_reason": "length"}], "usage": usage}))

    def misbehaves(self) -> bool:
        """Do the wrong thing with a completion, if that is the fault."""
        if FAULT == "hang" and ARGUMENT == "first token":
            sleep_for_ever()
        if FAULT == "kill" and ARGUMENT == "first token":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return True
        if FAULT in WRONG_ANSWERS:
            State.dead = FAULT == "error_in_200"
            self.reply(*WRONG_ANSWERS[FAULT])
            return True
        return False

    def stream(self, body: dict[str, object]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        wanted = int(str(body["max_tokens"]))
        prompt = body["prompt"]
        prompted = len(prompt) if isinstance(prompt, list) else len(str(prompt)) // 4 + 1
        with State.lock:
            State.running += 1
            State.prompted += prompted
        try:
            self.tokens(wanted, prompted)
        finally:
            with State.lock:
                State.running -= 1

    def tokens(self, wanted: int, prompted: int) -> None:
        for number in range(1, wanted + 1):
            time.sleep(TOKEN_S)
            if FAULT == "stalls" and State.generated > FAILS_AFTER:
                sleep_for_ever()
            if FAULT == "dies_under_load" and State.generated > FAILS_AFTER:
                say(ARGUMENT)
                os._exit(1)
            if FAULT == "dead_under_load" and State.generated > FAILS_AFTER:
                State.dead = True
                self.event({"error": {"message": "fake engine died", "code": 500}})
                break
            with State.lock:
                State.generated += 1
            choice = {"index": 0, "text": " a", "finish_reason": "length" if number == wanted else None}
            usage = {"prompt_tokens": prompted, "completion_tokens": number, "total_tokens": prompted + number}
            self.event({"object": "text_completion", "choices": [choice], "usage": usage})
        else:
            self.event({"choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value: object) -> None:
        self.chunk(f"data: {json.dumps(value)}\n\n".encode())

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def metrics() -> str:
    """The counters a watch and a benchmark read."""
    return (
        f'vllm:generation_tokens_total{{engine="0",model_name="fake"}} {State.generated}\n'
        f'vllm:prompt_tokens_total{{engine="0",model_name="fake"}} {State.prompted}\n'
        f'vllm:num_requests_running{{engine="0",model_name="fake"}} {State.running}\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="fake"}} 0\n'
    )


if __name__ == "__main__":
    main()
