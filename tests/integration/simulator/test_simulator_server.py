"""The simulated server as real processes: its API, its process tree, its start, its end, and its faults."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from runner.serving.lease import lease_port
from tests.fakes.trials import until

ROOT = Path(__file__).parents[3]
EXACT: dict[str, Any] = {"max_tokens": 8, "min_tokens": 8, "ignore_eos": True, "temperature": 0.0}
LONG: dict[str, Any] = EXACT | {"max_tokens": 300, "min_tokens": 300}
"""Some two seconds: an engine that counts its tokens a moment late is not yet through."""
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Started:
    """A server of this test; everything of it is killed at the end."""

    def __init__(self, folder: Path, *words: str, node: str = "2x-h200-nvlink", **env: str) -> None:
        self._lease = lease_port()
        self.url = f"http://127.0.0.1:{self._lease.port}"
        self.log = folder / "server.log"
        names = ["--served-model-name", "m", "--max-model-len", "4096"]
        command = [sys.executable, "-m", "runner.simulator", "serve", "qwen3-8b", "--host", "127.0.0.1"]
        self.process = subprocess.Popen(
            [*command, "--port", str(self._lease.port), *names, *words],
            env=os.environ
            | {"SIMULATED_NODE": node, "SIMULATED_START_S": "0.2", "VLLM_SERVER_DEV_MODE": "1", "SIM_TEST": folder.name}
            | env,
            cwd=ROOT,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.marker = folder.name

    def ready(self) -> "Started":
        return self.logged("Application startup complete")

    def logged(self, text: str) -> "Started":
        until_s = time.monotonic() + 60
        while text not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < until_s, self.text()
            time.sleep(0.02)
        return self

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def post(self, path: str = "/v1/completions", **fields: Any) -> requests.Response:
        return requests.post(self.url + path, json={"model": "m", "prompt": [5, 6, 7], **fields}, timeout=20)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=20)

    def everybody(self) -> list[psutil.Process]:
        """All living processes that carry this test's environment."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("SIM_TEST") == self.marker and process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            found += [process] if mine else []
        return found

    def stop(self, within_s: float = 60) -> int:
        self.process.terminate()
        return self.process.wait(within_s)

    def clean(self) -> None:
        for process in self.everybody():
            process.kill()
        self.process.wait(10)
        self._lease.release()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Started] = []

    def begin(*words: str, node: str = "2x-h200-nvlink", **env: str) -> Started:
        folder = tmp_path / f"{tmp_path.name}-{len(started)}"
        folder.mkdir()
        started.append(Started(folder, *words, node=node, **env))
        return started[-1]

    yield begin
    for server in started:
        server.clean()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One server for all tests that only ask."""
    started = Started(tmp_path_factory.mktemp("asked"), "-tp", "2").ready()
    yield started
    started.clean()


def events(response: requests.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]


def test_it_says_that_it_is_simulated(server: Started) -> None:
    """In its first log line, in /version and in /server_info."""
    assert "simulated" in server.text().splitlines()[0]
    assert "simulated" in server.get("/version").json()["version"]
    assert server.get("/server_info?config_format=json").json()["simulated"] is True


def test_a_stream_has_vllms_shape(server: Started) -> None:
    """Usage and ids in each chunk, a finish reason, a usage chunk, DONE; keys as recorded from vLLM 0.32."""
    chunks = events(server.post(**EXACT, **USAGE, return_token_ids=True))
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, 9))
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 8
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 7 + ["length"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [5, 6, 7]
    assert chunks[1]["choices"][0]["prompt_token_ids"] is None
    assert set(chunks[0]) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(chunks[0]["choices"][0]) == {
        "index",
        "text",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "prompt_token_ids",
        "token_ids",
    }


def test_a_whole_answer_is_the_streamed_one(server: Started) -> None:
    """The same prompt gets the same text, streamed or not, by completion."""
    whole = server.post(**EXACT).json()
    streamed = "".join(chunk["choices"][0]["text"] for chunk in events(server.post(**EXACT, stream=True))[:-1])
    assert whole["choices"][0]["text"] == streamed
    assert whole["usage"] == {"prompt_tokens": 3, "total_tokens": 11, "completion_tokens": 8}


def test_chat(server: Started) -> None:
    """A role first, then content; usage only when asked for."""
    messages = [{"role": "user", "content": "hello"}]
    chunks = events(server.post("/v1/chat/completions", messages=messages, **EXACT, stream=True))[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:])
    assert "usage" not in chunks[1]
    whole = server.post("/v1/chat/completions", messages=messages, **EXACT).json()
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["role"] == "assistant"


def test_several_prompts_and_connections(server: Started) -> None:
    """One choice a prompt; a connection carries many requests."""
    assert [choice["index"] for choice in server.post(prompt=["a b", "c d"], **EXACT).json()["choices"]] == [0, 1]
    with requests.Session() as session:
        for _ in range(3):
            assert session.get(server.url + "/health", timeout=5).status_code == 200


def test_requests_in_pieces_and_in_a_row(server: Started) -> None:
    """Bytes may come one by one, and a second request before the first is answered: answers keep their order."""
    body = json.dumps({"model": "m", "prompt": [5, 6, 7], **EXACT}).encode()
    first = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    second = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
        for byte in first:
            connection.sendall(bytes([byte]))
        connection.sendall(second)
        answer = b""
        while received := connection.recv(65536):
            answer += received
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.index(b"text_completion") < answer.index(b"+simulated")


def test_a_client_that_leaves_frees_its_place(server: Started) -> None:
    """Its request is aborted: nothing runs any more, and the next client is served."""
    with pytest.raises(requests.Timeout):
        requests.post(
            server.url + "/v1/completions",
            json={"model": "m", "prompt": [1, 2], "max_tokens": 3000, "ignore_eos": True},
            timeout=0.3,
        )
    until_s = time.monotonic() + 10
    while 'num_requests_running{engine="0",model_name="m"} 0.0' not in server.get("/metrics").text:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    assert server.post(**EXACT).status_code == 200


def test_errors(server: Started) -> None:
    """As vLLM's: 404 for a model it does not serve, 400 for nonsense, 404 and 405 for paths."""
    assert server.post(model="other").status_code == 404
    assert server.post(max_tokens=99999).json()["error"]["type"] == "BadRequestError"
    assert server.get("/nowhere").status_code == 404
    assert server.get("/v1/completions").status_code == 405


def test_the_small_endpoints(server: Started) -> None:
    """Models, load, tokenize and back, cache reset, ping."""
    card = server.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("m", 4096)
    assert server.get("/load").json() == {"server_load": 0}
    tokens = server.post("/tokenize", prompt="hello wonderful world").json()
    assert tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", tokens=tokens["tokens"]).json()["prompt"] == "hello wonderful world"
    assert server.post("/reset_prefix_cache").json() == {"success": True}
    assert server.get("/ping").status_code == 200


def test_metrics_count_what_was_sent(server: Started) -> None:
    """Token and request counters move by exactly what clients saw."""

    def counters() -> dict[str, float]:
        lines = [line.rpartition(" ") for line in server.get("/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    labels = '{engine="0",model_name="m"}'
    before = counters()
    server.post(**EXACT)
    after = counters()
    assert after[f"vllm:generation_tokens_total{labels}"] - before[f"vllm:generation_tokens_total{labels}"] == 8
    assert after[f"vllm:prompt_tokens_total{labels}"] - before[f"vllm:prompt_tokens_total{labels}"] == 3
    name = f"vllm:time_to_first_token_seconds_count{labels}"
    assert after[name] - before[name] == 1
    assert after[f"vllm:num_requests_running{labels}"] == 0


def test_the_process_tree(start: Any) -> None:
    """An engine core below the API server and a worker a GPU below that, all with its environment; gone on SIGTERM."""
    server = start("-tp", "2").ready()
    leader = psutil.Process(server.process.pid)
    engine = leader.children()
    assert len(engine) == 1
    assert len(engine[0].children()) == 2
    assert len(server.everybody()) == 4
    assert server.stop() == 0
    assert until(lambda: server.everybody() == []), "the leader does not wait for those below"


def test_a_killed_api_server_leaves_its_engine(start: Any) -> None:
    """As vLLM's: nobody below watches the leader, but its port is free; a killed engine takes its workers along."""
    server = start("-tp", "2").ready()
    engine = psutil.Process(server.process.pid).children()[0]
    server.process.kill()
    server.process.wait(5)
    time.sleep(0.3)  # They would have time to go.
    assert len(server.everybody()) == 3
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))
    engine.kill()
    assert until(lambda: server.everybody() == [])


@pytest.mark.parametrize(
    ("words", "env", "code", "says"),
    [
        (["--no-such-flag"], {}, 2, "unrecognized arguments: --no-such-flag"),
        (["-tp", "3"], {}, 1, "must be divisible by tensor parallel size"),
        (["-tp", "2"], {"NCCL_PROTO": "quick"}, 1, "ncclInvalidUsage"),
        (["--gpu-memory-utilization", "0.05"], {}, 1, "No available memory for the cache blocks"),
        ([], {"SIMULATED_FAULT": "crash_at:weights:RuntimeError: broken file"}, 1, "RuntimeError: broken file"),
    ],
)
def test_starts_that_fail(start: Any, words: list[str], env: dict[str, str], code: int, says: str) -> None:
    """Exit code 2 from the command line, 1 from anything later, with the reason in the log and nothing left."""
    server = start(*words, **env)
    assert server.process.wait(60) == code
    assert says in server.text()
    assert until(lambda: server.everybody() == [])


def test_a_taken_port(start: Any) -> None:
    """The port is bound before the engine starts, so a second server fails at once."""
    first = start("-tp", "2").ready()
    second = start("--port", first.url.rpartition(":")[2])
    assert second.process.wait(60) == 1
    assert "Address already in use" in second.text()


def test_the_port_answers_only_when_ready(start: Any) -> None:
    """Bound from the first second, but nothing accepts before the engine is ready."""
    server = start("-tp", "2", SIMULATED_FAULT="hang_at:capture").logged("KV cache size")
    with pytest.raises(requests.ConnectionError):
        server.get("/health")
    assert server.stop() == 1


def test_a_dead_engine(start: Any) -> None:
    """Open streams end with an error object, health says 503, the API server lives."""
    server = start("-tp", "2", SIMULATED_FAULT="engine_dead_after:5").ready()
    last = events(server.post(**LONG, **USAGE))[-2]
    assert last["error"]["code"] == 500
    assert server.get("/health").status_code == 503
    assert server.post(**EXACT).status_code == 500
    assert server.process.poll() is None


def test_a_stuck_engine(start: Any) -> None:
    """Nothing comes any more and health says 200."""
    server = start("-tp", "2", SIMULATED_FAULT="engine_stuck_after:3").ready()
    with pytest.raises(requests.Timeout):
        requests.post(server.url + "/v1/completions", json={"model": "m", "prompt": [1], **LONG}, timeout=4)
    assert server.get("/health").status_code == 200


def test_a_broken_stream(start: Any) -> None:
    """The connection ends in the middle of a chunked body."""
    server = start("-tp", "2", SIMULATED_FAULT="truncate_after:3").ready()
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        server.post(**EXACT, **USAGE)


def test_gathered_tokens(start: Any) -> None:
    """Several tokens a chunk, and the sum still right."""
    server = start("-tp", "2", SIMULATED_FAULT="tokens_per_chunk:3").ready()
    chunks = events(server.post(**EXACT, **USAGE, return_token_ids=True))[:-2]
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 3, 3, 1]


@pytest.mark.parametrize(("fault", "left"), [("orphan", 1), ("double_fork", 1), ("sigterm_deaf", 4)])
def test_what_stays_behind(start: Any, fault: str, left: int) -> None:
    """Orphans outlive the server, and a deaf server its SIGTERM; all carry its environment."""
    server = start("-tp", "2", SIMULATED_FAULT=fault).ready()
    if fault == "sigterm_deaf":
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)  # It would have time to obey.
        assert len(server.everybody()) == left
    else:
        server.stop()
        assert until(lambda: len(server.everybody()) == left)
