"""The small parts: counters, frames, processes, samples on disk, the table, the command line."""

import io
import itertools
import resource
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import UsageError
from runner.load.__main__ import main, parser
from runner.load.clients import processes_for, refusal, shares
from runner.load.level import until_next_poll_ns
from runner.load.samples import read
from runner.load.server import read_counters
from runner.load.table import level_line
from runner.load.wire import Drop, Frames, Order, Stop, write_frame
from runner.schema.trial import Measurement


def test_counters_are_summed_over_engines() -> None:
    """Labels, comments and other series are passed over; what is not there is None."""
    text = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:generation_tokens_total{engine="0",model_name="a b"} 10.0
vllm:generation_tokens_total{engine="1",model_name="a b"} 5.0
vllm:generation_tokens_created{engine="0"} 1.7e+09
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting_by_reason{engine="0"} 9.0
"""
    found = read_counters(text)
    assert found.generation_tokens == 15
    assert found.running == 3
    assert found.waiting is None


@given(st.lists(st.integers(0, 400), max_size=10))
def test_frames_survive_any_cut(cuts: list[int]) -> None:
    """Messages come out whole and in order however the pipe hands out its bytes."""
    pipe = io.BytesIO()
    for message in (Stop(), Drop(), Stop()):
        write_frame(pipe, message)
    data = pipe.getvalue()
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    frames = Frames(msgspec.msgpack.Decoder(Order | Stop | Drop))
    found = [one for start, end in itertools.pairwise(edges) for one in frames.feed(data[start:end])]
    assert found == [Stop(), Drop(), Stop()]


@pytest.mark.parametrize(
    ("concurrency", "cores", "expected"), [(1, 64, 1), (256, 64, 1), (257, 64, 2), (2048, 64, 8), (2048, 2, 1)]
)
def test_processes_follow_streams_and_cores(concurrency: int, cores: int, expected: int) -> None:
    """One for every 256 streams, at most half the cores."""
    assert processes_for(concurrency, cores) == expected


@given(st.integers(0, 5000), st.integers(1, 64))
def test_shares_sum_up(total: int, parts: int) -> None:
    """Exactly, and evenly."""
    found = shares(total, parts)
    assert sum(found) == total
    assert max(found) - min(found) <= 1


def test_levels_beyond_the_descriptor_limit_are_refused() -> None:
    """The reason names both numbers; what fits is not refused."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        assert str(hard) in (refusal(hard, 1) or "")
    assert refusal(1, 1) is None


def test_the_tables_line() -> None:
    """The form people know, then what the number is, then what explains it and what nobody could check."""
    naive = Measurement(concurrency=1, valid=True, protocol="requests", requests_ok=10, wall_s=22.8, output_tok_s=56.1)
    assert level_line(naive) == "C=   1 |  10/ 10 ok (0 err) | wall=  22.8s |    56.1 tok/s | requests"
    steady = naive.model_copy(
        update={
            "protocol": "steady",
            "windows_tok_s": (55.0, 56.0, 57.3),
            "window_s": 10.0,
            "interval_tok_s": (53.0, 59.2),
            "acceptance_rate": 0.61,
            "acceptance_length": 2.83,
            "unchecked": ("server_counter", "server_in_flight"),
            "limited_by": "api_server",
        }
    )
    assert level_line(steady).endswith(
        "56.1 tok/s | steady 3 x 10 s ±5.5% | accepted 61%, 2.83 a step | unchecked: server_counter, server_in_flight"
        " | limited by the server's API process"
    )


def test_a_void_line_has_no_number() -> None:
    """A dash where the number would be, and the reason."""
    void = Measurement(concurrency=64, valid=False, reason="hang: no token for 60 s", requests_failed=3)
    assert level_line(void) == (
        "C=  64 |   0/  3 ok (3 err) | wall=     - |       - tok/s | steady | void: hang: no token for 60 s"
    )


def test_a_file_that_holds_no_samples_is_refused(tmp_path: Path) -> None:
    """Absent, or any other Parquet file."""
    with pytest.raises(UsageError):
        read(tmp_path / "absent.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UsageError):
        read(tmp_path / "other.parquet")


@pytest.mark.parametrize("argv", [[], ["--url", "http://127.0.0.1:9"], ["--recompute", "absent.parquet"]])
def test_nothing_to_measure_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No server named, none there, no samples: one line, no traceback."""
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("ladder", ["", "0", "a", "1,,2", "99999"])
def test_a_bad_ladder_is_refused(ladder: str) -> None:
    """argparse says so."""
    with pytest.raises(SystemExit):
        parser().parse_args(["--concurrency", ladder])


@pytest.mark.parametrize(("shown", "soon"), [((), True), ((7.0, 6.0), True), ((7.0, 8.0, 6.0), False), ((8.0,), False)])
def test_a_server_is_asked_sooner_until_it_has_shown_the_concurrency(shown: tuple[float, ...], soon: bool) -> None:
    """A slow server shows all its requests only for moments; once seen, scrapes are as seldom as planned."""
    planned_ns = 10**9
    assert (until_next_poll_ns(planned_ns, shown, 8) < planned_ns) is soon
    assert (until_next_poll_ns(planned_ns, shown, 8, 0) == 0) is soon
