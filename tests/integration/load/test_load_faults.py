"""Servers that lie, stall, break and hold back: none of it may end up as a number."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from runner.errors import EngineDead, EnvironmentFault, Hang, LoadFailed, ServerExited, TrialFailure, UsageError
from runner.load.measure import Bench, measure
from runner.load.samples import read
from runner.schema.experiment import Protocol, Workload
from runner.schema.trial import Measurement
from tests.fakes.trials import until
from tests.fakes.truth import QUICK, load_clients, nothing, raising, serving, undisturbed

WORKLOAD = Workload(input_tokens=16, output_tokens=24)
SHORT = QUICK.model_copy(update={"windows": 1, "max_windows": 1, "warmup_min_s": 0.1, "warmup_max_s": 1.0})


def level(
    tmp_path: Path,
    *switches: str,
    protocol: Protocol = SHORT,
    workload: Workload = WORKLOAD,
    concurrency: int = 4,
) -> Measurement:
    """One level at a truth server with ``switches``."""

    def attempt() -> Measurement:
        with serving("--ttft-ms", "10", "--tpot-ms", "2", *switches) as served:
            return measure(
                served.target,
                workload,
                protocol,
                concurrency,
                3,
                on_phase=nothing,
                check=nothing,
                samples_path=tmp_path / "s.parquet",
            )

    return undisturbed(attempt)


BROKEN = {
    "--error-after 5": "the engine is gone",
    "--no-done": "without [DONE]",
    "--break-after 5": "broke in the middle",
    "--stop-at 5": "finish_reason 'stop' after 5 of",
    "--usage-off 1": "final usage says",
    "--usage final --usage-off 1": "were asked for",
    "--usage both --usage-off 1": "final usage says",
    "--refuse-every 3": "HTTP 503",
}
ODD = (
    "",
    "--split",
    "--merge",
    "--comments",
    "--crlf",
    "--crlf --merge --comments --split",
    "--close",
    "--empty-first",
    "--usage token_ids",
    "--usage both --tokens-per-chunk mix:1,2,4,8",
    "--tokens-per-chunk mix:1,2,4,8 --first-chunk-tokens 4",
    "--refuse-resets 2",
    "--max-running 2",
)
DOUBTFUL = {
    "--usage none": "does not say how many tokens",
    "--counter-off 0.01": "the server counted",
    "--conn-cap 2": "did not reach the server",
    "--prefix-hits 0.5": "prefix cache",
    "--refuse-resets 1000": "refused to reset",
}

STEADY, NAIVE = None, 12
"""Requests of the protocol. The naive cell lasts 1 s, or 2 s where half is held back: hardly time to prove it in."""

Outcomes = dict[tuple[int | None, str], Measurement | LoadFailed]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Every server of the three tables measured, several at a time: they mostly wait."""

    def outcome(case: tuple[int | None, str], folder: Path) -> Measurement | LoadFailed:
        requests, switches = case
        protocol = SHORT.model_copy(update={"windows": 3, "max_windows": 3, "requests": requests})
        workload = WORKLOAD if requests is None else WORKLOAD.model_copy(update={"output_tokens": 160})
        try:
            return level(folder, *switches.split(), protocol=protocol, workload=workload)
        except LoadFailed as failure:
            return failure

    every = [(STEADY, one) for one in (*BROKEN, *ODD, *DOUBTFUL)] + [(NAIVE, one) for one in (*BROKEN, *DOUBTFUL)]
    folders = [tmp_path_factory.mktemp("level") for _ in every]  # Not in the threads: they would race for the name.
    with ThreadPoolExecutor(max_workers=6) as pool:
        return dict(zip(every, pool.map(outcome, every, folders), strict=True))


@pytest.mark.parametrize("requests", [STEADY, NAIVE])
@pytest.mark.parametrize("switches", BROKEN)
def test_a_broken_answer_fails_the_level_and_is_quoted(switches: str, requests: int | None, outcomes: Outcomes) -> None:
    """What the peers count as success is a failed level here, with the first error's text."""
    failure = outcomes[requests, switches]
    assert isinstance(failure, LoadFailed)
    assert BROKEN[switches] in failure.message
    assert any(BROKEN[switches] in error for error in failure.evidence["errors"])


@pytest.mark.parametrize("switches", ODD)
def test_an_odd_but_right_stream_counts_exactly(switches: str, outcomes: Outcomes) -> None:
    """However the bytes are cut and dressed, every token is counted once, and the server agrees."""
    found = outcomes[STEADY, switches]
    assert isinstance(found, Measurement)
    assert found.valid, found.reason
    assert found.tokens_client == found.tokens_server
    assert found.requests_failed == 0
    assert found.protocol == "steady"


@pytest.mark.parametrize("requests", [STEADY, NAIVE])
@pytest.mark.parametrize("switches", DOUBTFUL)
def test_a_doubtful_level_is_void(switches: str, requests: int | None, outcomes: Outcomes) -> None:
    """No figure to rank by is left, the reason says why, and what explains it stays."""
    found = outcomes[requests, switches]
    assert isinstance(found, Measurement)
    assert not found.valid
    assert DOUBTFUL[switches] in (found.reason or "")
    assert found.output_tok_s is None
    assert found.requests_ok > 0


def test_an_empty_first_chunk_is_no_first_token(tmp_path: Path) -> None:
    """TTFT is the first chunk with a token in it: 10 ms here, not the empty one that leaves at once."""
    found = level(tmp_path, "--empty-first")
    assert found.ttft_ms is not None
    assert found.ttft_ms.p50 is not None
    assert found.ttft_ms.p50 >= 10


def test_final_usage_only_gives_the_naive_figure(tmp_path: Path) -> None:
    """Without a count in each chunk there is no steady figure, and the row says which protocol it is."""
    found = level(tmp_path, "--usage", "final")
    assert found.valid, found.reason
    assert found.protocol == "requests"
    assert found.output_tok_s == found.naive_tok_s
    assert found.windows_tok_s == ()
    assert found.itl_ms is None
    assert found.tpot_ms is not None
    assert found.tpot_ms.p50 == pytest.approx(2, rel=0.5)


def test_a_server_without_counters_is_valid_and_says_what_was_not_checked(tmp_path: Path) -> None:
    """No ``/metrics``: the number stands, marked."""
    found = level(tmp_path, "--no-metrics", "--no-tokenize")
    assert found.valid, found.reason
    assert found.unchecked == ("server_counter", "server_in_flight", "prefix_cache")
    assert found.tokens_server is None


def test_a_shared_prefix_may_hit_the_cache_and_is_shown(tmp_path: Path) -> None:
    """Hits are a mistake only where every prompt is fresh."""
    workload = WORKLOAD.model_copy(update={"shared_prefix_tokens": 8})
    found = level(tmp_path, "--prefix-hits", "0.5", "--acceptance", "0.75", workload=workload)
    assert found.valid, found.reason
    assert found.prefix_hit_rate == pytest.approx(0.5)
    assert found.acceptance_rate == pytest.approx(0.75)
    assert found.acceptance_length == pytest.approx(4)


@pytest.mark.parametrize(("reuse", "valid"), [("0", True), ("0.1", False)])
def test_a_chat_template_may_hit_the_cache_and_nothing_more(reuse: str, valid: bool, tmp_path: Path) -> None:
    """Its 4 tokens open each prompt of 16 more: a fifth is no reuse of a prompt, anything beyond is."""
    workload = WORKLOAD.model_copy(update={"endpoint": "chat"})
    found = level(tmp_path, "--template-tokens", "4", "--prefix-hits", reuse, workload=workload)
    assert found.prefix_hit_rate == pytest.approx(4 / 20 + float(reuse))
    assert found.valid is valid, found.reason
    assert valid or "the chat template explains 20.0%" in (found.reason or "")


def test_failures_under_the_allowed_rate_are_counted_not_hidden(tmp_path: Path) -> None:
    """A third refused, half allowed: the level stands, the failures beside it."""
    protocol = SHORT.model_copy(update={"max_error_rate": 0.5})
    found = level(tmp_path, "--refuse-every", "3", protocol=protocol, concurrency=8)
    assert found.requests_failed > 0
    assert found.errors
    assert "HTTP 503" in found.errors[0]


def test_a_dead_engine_is_named(tmp_path: Path) -> None:
    """The error is in a 200 stream, the process lives on, ``/health`` says 503."""
    with pytest.raises(EngineDead):
        level(tmp_path, "--error-after", "5", "--die")


def test_silence_is_a_hang_whatever_health_says(tmp_path: Path) -> None:
    """Streams open, no token for ``stall_s``: a hang, with the healthy ``/health`` as evidence."""
    with pytest.raises(Hang) as caught:
        level(tmp_path, "--stall-after", "5", protocol=SHORT.model_copy(update={"stall_s": 1.0}))
    assert caught.value.evidence["health"] == 200


def test_one_blocked_stream_times_out(tmp_path: Path) -> None:
    """Half of the streams wait 1.4 s for their turn and take 1.4 s then: each of those fails by its own limit, 2 s."""
    protocol = SHORT.model_copy(update={"request_timeout_s": 2})
    with pytest.raises(LoadFailed, match="no complete answer within"):
        level(tmp_path, "--conn-cap", "2", protocol=protocol, workload=Workload(input_tokens=8, output_tokens=700))


def test_a_dead_server_is_the_checks_to_tell(tmp_path: Path) -> None:
    """The caller's check speaks first: what it raises comes out, and no client process stays."""
    before = set(psutil.Process().children(recursive=True))
    with serving() as served, pytest.raises(ServerExited):
        measure(
            served.target,
            WORKLOAD,
            SHORT,
            4,
            3,
            on_phase=nothing,
            check=raising(ServerExited("gone")),
            samples_path=tmp_path / "s.parquet",
        )
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_killed_server_fails_the_level(tmp_path: Path) -> None:
    """Its connections break; with nobody to check the process it is a failed load, with the reason quoted."""
    with serving() as served:
        killer = threading.Timer(1.0, served.process.kill)
        killer.start()
        with pytest.raises(LoadFailed):
            measure(
                served.target,
                WORKLOAD,
                QUICK,
                4,
                3,
                on_phase=nothing,
                check=nothing,
                samples_path=tmp_path / "s.parquet",
            )
        killer.join()


def test_a_killed_client_process_is_not_the_servers_fault(tmp_path: Path) -> None:
    """It is the environment's, and the level does not go on with fewer streams."""
    with serving() as served, Bench(served.target, WORKLOAD) as bench:
        (client,) = load_clients()
        killer = threading.Timer(0.5, client.kill)
        killer.start()
        with pytest.raises(EnvironmentFault, match="client process"):
            bench.measure(QUICK, 4, 3, on_phase=nothing, check=nothing, samples_path=tmp_path / "s.parquet")
        killer.join()


def test_clients_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL to the parent: the client process ends by itself, under load or not."""
    code = (
        "import sys, pathlib; from runner.load.measure import measure; from runner.load.server import Target;"
        "from tests.fakes.truth import QUICK, nothing; from runner.schema.experiment import Workload;"
        "measure(Target(base_url=sys.argv[1], model='truth'), Workload(), QUICK.model_copy(update={'window_s': 60}),"
        "4, 1, on_phase=nothing, check=nothing, samples_path=pathlib.Path(sys.argv[2]))"
    )
    with serving() as served:
        parent = subprocess.Popen([sys.executable, "-c", code, served.base_url, str(tmp_path / "s")])
        clients = wait_for_children(parent.pid)
        time.sleep(1.0)
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(clients, timeout=60)
    assert clients
    assert alive == []


def wait_for_children(pid: int) -> list[psutil.Process]:
    """The children of ``pid`` as soon as there are any."""
    parent = psutil.Process(pid)
    until(lambda: parent.children() != [], 60)
    return parent.children()


def test_measures_from_a_thread_with_signals_blocked(tmp_path: Path) -> None:
    """As an actor does: off the main thread, signals masked; the client process must not inherit the mask."""
    results: list[Measurement] = []
    masks: list[str] = []

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        with serving("--tpot-ms", "2") as served, Bench(served.target, WORKLOAD) as bench:
            path = tmp_path / "s.parquet"
            results.append(
                undisturbed(lambda: bench.measure(SHORT, 2, 3, on_phase=nothing, check=nothing, samples_path=path))
            )
            clients = load_clients()
            masks.extend(Path(f"/proc/{one.pid}/status").read_text() for one in clients)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results[0].valid, results[0].reason
    assert all("SigBlk:\t0000000000000000" in mask for mask in masks)
    assert masks


def test_levels_of_a_ladder_reuse_the_clients_and_share_no_prompt(tmp_path: Path) -> None:
    """One bench, two levels: the same process, different prompts, each level's own seed recomputable."""
    with serving("--tpot-ms", "2") as served, Bench(served.target, WORKLOAD) as bench:
        pids = {one.pid for one in psutil.Process().children()}
        for concurrency in (1, 4):
            path = tmp_path / f"{concurrency}.parquet"
            found = undisturbed(
                partial(bench.measure, SHORT, concurrency, 3, on_phase=nothing, check=nothing, samples_path=path)
            )
            assert found.valid, found.reason
            assert found.seed == 3
            assert read(path).facts.concurrency == concurrency
        assert {one.pid for one in psutil.Process().children()} == pids


def test_too_few_file_descriptors_refuse_the_level_up_front(tmp_path: Path) -> None:
    """C=64 under a hard limit of 100 open files: void before anything is sent, with the limit named."""
    with serving() as served:
        command = f'ulimit -n 100; exec "{sys.executable}" -m runner.load --url {served.base_url} --concurrency 64'
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, env=dict(os.environ)
        )
    assert done.returncode == 1
    assert "open files" in done.stdout
    assert "hard limit is 100" in done.stdout


def test_a_request_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    """Prompt and answer beyond the server's context length: the user's to mend, before any load."""
    with serving() as served, pytest.raises(UsageError, match="max_model_len"):
        Bench(served.target.model_copy(update={"max_model_len": 30}), WORKLOAD)


def test_every_failure_is_a_trial_failure() -> None:
    """The trial's border knows one type."""
    assert all(issubclass(kind, TrialFailure) for kind in (EngineDead, EnvironmentFault, Hang, LoadFailed))
