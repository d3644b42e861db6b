"""A server that fails to start, in every way: the right kind, with its facts, nothing left, and the next one starts."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from runner.errors import (
    Cancelled,
    EngineDead,
    EnvironmentFault,
    Hang,
    InvalidConfig,
    OutOfMemory,
    ServerExited,
    StartTimeout,
    TrialFailure,
)
from runner.schema.launch import TrialOrder
from runner.serving import starting, supervised
from runner.serving.server import Server
from tests.fakes.trials import PATIENT, left_of, order, until


def fails(trial: TrialOrder, folder: Path) -> TrialFailure:
    """Run a start that must fail, take it down, and check that nothing of it is left and the next one starts."""
    server = Server(trial, folder / "trial", (), lambda name, detail: None)
    with pytest.raises(TrialFailure) as raised:
        server.start()
    server.stop()
    assert left_of(trial.marker) == []
    starts(order(folder, number=trial.number + 1), folder)
    return raised.value


def kill_the_supervisor_of(server: Server) -> None:
    """SIGKILL it a moment after it is there: a busy machine may take long to start one."""
    assert until(lambda: server._process is not None)
    assert server._process is not None
    time.sleep(0.3)
    os.kill(server._process.supervisor_pid, signal.SIGKILL)


def starts(trial: TrialOrder, folder: Path) -> None:
    server = Server(trial, folder / "next", (), lambda name, detail: None)
    server.start()
    server.stop()
    assert left_of(trial.marker) == []


@pytest.mark.parametrize("phase", ["process", "weights", "compile", "capture"])
def test_silence_is_a_hang_named_by_its_phase(tmp_path: Path, phase: str) -> None:
    """A server that goes quiet is a hang of the phase it reached, with the stacks of its processes."""
    failure = fails(order(tmp_path, f"hang:{phase}"), tmp_path)
    assert isinstance(failure, Hang)
    assert (
        failure.phase == {"process": "process", "weights": "weights", "compile": "compile", "capture": "capture"}[phase]
    )
    assert phase in failure.message
    assert failure.evidence["processes"]


def test_an_unanswered_first_completion_is_a_hang(tmp_path: Path) -> None:
    """Healthy but without a first token: a hang, whatever /health says."""
    failure = fails(order(tmp_path, "hang:first token"), tmp_path)
    assert isinstance(failure, Hang)
    assert failure.phase == "first token"


def test_saying_the_same_again_is_no_progress(tmp_path: Path) -> None:
    """A message that repeats with other numbers does not keep a hang alive."""
    assert isinstance(fails(order(tmp_path, "repeats"), tmp_path), Hang)


def test_a_phase_that_outlives_its_deadline_while_the_log_moves(tmp_path: Path) -> None:
    """Progress that is too slow is a start timeout, not a hang."""
    failure = fails(order(tmp_path, "dawdles", deadlines=PATIENT.model_copy(update={"weights_s": 1.5})), tmp_path)
    assert isinstance(failure, StartTimeout)
    assert failure.phase == "weights"


def test_workers_that_wait_for_each_other(tmp_path: Path) -> None:
    """The same broadcast warning twice ends a start long before the silence limit."""
    trial = order(tmp_path, "stuck_workers")
    failure = fails(trial, tmp_path)
    assert isinstance(failure, Hang)
    assert failure.phase == "capture"


@pytest.mark.parametrize("phase", ["process", "weights", "compile", "capture"])
@pytest.mark.parametrize("code", [0, 1])
def test_any_exit_before_ready_is_a_failure(tmp_path: Path, phase: str, code: int) -> None:
    """Exit code 0 is not success: nobody asked the server to end."""
    failure = fails(order(tmp_path, f"exit:{phase},{code}"), tmp_path)
    assert isinstance(failure, ServerExited)
    assert failure.exit_code == code
    assert failure.log_tail


@pytest.mark.parametrize(
    ("line", "kind", "told"),
    [
        ("vllm serve: error: unrecognized arguments: --warp-speed 9", InvalidConfig, "--warp-speed 9"),
        ("ValueError: max_num_batched_tokens (8) is below max_num_seqs (16)", InvalidConfig, "is below max_num_seqs"),
        ("  Value error, not with this model [type=value_error, input_value=1]", InvalidConfig, "not with this model"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", OutOfMemory, "CUDA out of memory"),
        ("OSError: [Errno 98] Address already in use", EnvironmentFault, "port"),
        ("OSError: [Errno 28] No space left on device", EnvironmentFault, "disk is full"),
        ("Free memory on device (9/80 GiB) on startup is less than desired GPU memory utilization (0.9, 72 GiB)",
         EnvironmentFault, "held by something else"),
    ],
)  # fmt: skip
def test_an_exit_is_judged_by_the_line_that_tells(
    tmp_path: Path, line: str, kind: type[TrialFailure], told: str
) -> None:
    """The server's own words say why it ended, and the failure carries the line."""
    failure = fails(order(tmp_path, f"says:{line}"), tmp_path)
    assert type(failure) is kind
    assert told in failure.message
    assert failure.line == line.strip()
    assert failure.exit_code == 1


def test_an_engine_that_failed_behind_a_living_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial ends although the API server's process lives on."""
    monkeypatch.setattr(starting, "_LAST_WORDS_S", 0.5)
    trial = order(tmp_path, "zombie_api")
    assert isinstance(fails(trial, tmp_path), EngineDead)


@pytest.mark.parametrize("phase", ["process", "weights", "compile", "capture", "first token"])
def test_a_server_killed_at_any_phase(tmp_path: Path, phase: str) -> None:
    """SIGKILL shows as an exit by signal 9."""
    failure = fails(order(tmp_path, f"kill:{phase}"), tmp_path)
    assert isinstance(failure, ServerExited)
    assert failure.exit_code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        ("error_in_200", EngineDead, "fake engine died"),
        ("unhealthy", EngineDead, "503"),
        ("reset", EngineDead, "broke"),
        ("short", EngineDead, "7 tokens"),
        ("not_json", EngineDead, "some proxy"),
        ("refuses", InvalidConfig, "too long"),
        ("wrong_model", EnvironmentFault, "somebody-else"),
    ],
)
def test_a_server_that_answers_wrongly_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, kind: type[TrialFailure], told: str
) -> None:
    """Ready means one right completion from this trial's own server, and nothing less."""
    monkeypatch.setattr(starting, "_LAST_WORDS_S", 0.5)
    monkeypatch.setattr(starting, "_EXIT_SHOWS_S", 0.5)
    failure = fails(order(tmp_path, fault), tmp_path)
    assert type(failure) is kind
    assert told in failure.message


def test_a_port_taken_between_lease_and_start(tmp_path: Path) -> None:
    """Somebody else's listener on the port is the environment's fault; the next lease is another port."""
    trial = order(tmp_path)
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: None)
    thief = socket.socket()

    def steal(name: str, detail: str) -> None:
        if name == "process":
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.bind(("127.0.0.1", int(server.base_url.rsplit(":", 1)[1])))
            thief.listen()

    server._on_phase = steal
    with thief, pytest.raises(EnvironmentFault):
        server.start()
    server.stop()
    assert left_of(trial.marker) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """Unwritable results are the environment's fault, found before anything starts."""
    (tmp_path / "trial").write_text("a file stands here")
    server = Server(order(tmp_path), tmp_path / "trial" / "below", (), lambda name, detail: None)
    with pytest.raises(EnvironmentFault, match="Not a directory"):
        server.start()
    server.stop()


def test_a_full_disk_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that cannot be written ends the start as the environment's fault, not as a silence.

    A limit on the size of files stands in for the full disk.
    """
    # No bytecode: a module compiled under the limit would stay behind, cut off.
    limit = (
        "import resource, sys; sys.dont_write_bytecode = True; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (80, 80)); main()"
    )
    monkeypatch.setattr(supervised, "_PROGRAM", supervised._PROGRAM.removesuffix("main()") + limit)
    # It never becomes healthy, or a busy machine might find it ready before it hears of the log.
    trial = order(tmp_path, "hang:capture", deadlines=PATIENT)
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: None)
    with pytest.raises(EnvironmentFault, match="log cannot be written"):
        server.start()
    server.stop()
    assert left_of(trial.marker) == []


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    """A command that cannot be executed is said at once."""
    trial = order(tmp_path).model_copy(update={"python": str(tmp_path / "nowhere")})
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: None)
    with pytest.raises(EnvironmentFault, match="nowhere"):
        server.start()
    server.stop()


def test_a_flood_of_log_is_capped(tmp_path: Path) -> None:
    """A server that writes tens of megabytes still starts, and its log stays small with head and tail."""
    trial = order(tmp_path, "flood:40")
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: None)
    server.start()
    log = server.stop().files["server.log"]
    assert len(log) < 12 * 2**20
    assert b"fake engine: hello" in log
    assert b"bytes left out" in log
    assert b"Application startup complete" in log


def test_stopping_a_start_under_way(tmp_path: Path) -> None:
    """A stop from another thread ends the start as cancelled, and nothing stays."""
    trial = order(tmp_path, "hang:weights", deadlines=PATIENT)
    seen: list[str] = []
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: seen.append(name))
    caught: list[BaseException] = []

    def run() -> None:
        try:
            server.start()
        except TrialFailure as failure:
            caught.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    assert until(lambda: "weights" in seen)
    server.stop()
    thread.join(10)
    assert [type(one) for one in caught] == [Cancelled]
    assert left_of(trial.marker) == []


@pytest.mark.parametrize("phase", ["process", "weights", "compile", "capture", "first token"])
def test_a_supervisor_killed_at_any_phase(tmp_path: Path, phase: str) -> None:
    """The node notices, ends the server itself, and the trial fails as a server that is gone."""
    trial = order(tmp_path, f"hang:{phase}", deadlines=PATIENT)
    server = Server(trial, tmp_path / "trial", (), lambda name, detail: None)

    def on_phase(name: str, detail: str) -> None:
        if name == phase:
            threading.Thread(target=kill_the_supervisor_of, args=[server]).start()

    server._on_phase = on_phase
    with pytest.raises(ServerExited, match="supervisor"):
        server.start()
    begin = time.monotonic()
    server.stop()
    assert time.monotonic() - begin < 10
    assert left_of(trial.marker) == []
