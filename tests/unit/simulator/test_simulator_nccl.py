"""NCCL's variables are read as NCCL reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.simulator.describe import load_node
from runner.simulator.nccl import InvalidUsage, read_nccl

BOX = load_node("8x-rtx-pro-6000")
OFF = load_node("2x-h200-p2p-off")


@pytest.mark.parametrize(
    ("text", "protocols"),
    [
        ("", ("LL", "LL128", "Simple")),
        ("ll", ("LL",)),
        ("LL,Simple", ("LL", "Simple")),
        ("^LL", ("LL128", "Simple")),
        ("allreduce:LL", ("LL",)),
        ("broadcast:Simple;allreduce:LL128", ("LL128",)),
        ("broadcast:Simple", ("LL", "LL128", "Simple")),
    ],
)
def test_protocols(text: str, protocols: tuple[str, ...]) -> None:
    """Lists, negation, functions, any case."""
    assert read_nccl({"NCCL_PROTO": text}).protocols == protocols


@pytest.mark.parametrize(
    "env",
    [
        {"NCCL_PROTO": "fast"},
        {"NCCL_PROTO": "LL,^Simple"},
        {"NCCL_PROTO": "sendrecv:LL"},
        {"NCCL_ALGO": "Tree"},
        {"NCCL_ALGO": "NVLS"},
        {"NCCL_ALGO": "allreduce:CollNetDirect"},
        {"NCCL_ALGO": "ring;tree"},
    ],
)
def test_invalid_usage(env: dict[str, str]) -> None:
    """Unknown tokens, and lists that leave a function vLLM issues without an algorithm."""
    with pytest.raises(InvalidUsage):
        read_nccl(env)


def test_a_tree_for_all_reduce_alone() -> None:
    """Both forms that keep the ring for the other functions."""
    assert read_nccl({"NCCL_ALGO": "allreduce:tree"}).algorithms == ("Tree",)
    assert read_nccl({"NCCL_ALGO": "ring,tree;allreduce:tree"}).algorithms == ("Tree",)


def test_its_own_pick_by_size() -> None:
    """Two H200 without peer access: LL up to 256 KB, Simple above; the box: always Simple; forced: as forced."""
    unset = read_nccl({})
    assert [unset.protocol(OFF.shm, kib * 1024) for kib in (8, 256, 512)] == ["LL", "LL", "Simple"]
    assert BOX.p2p is not None
    assert unset.protocol(BOX.p2p, 12 * 1024) == "Simple"
    assert read_nccl({"NCCL_PROTO": "LL"}).protocol(BOX.p2p, 2**26) == "LL"


@pytest.mark.parametrize(
    ("env", "through_host"),
    [
        ({}, False),
        ({"NCCL_P2P_LEVEL": "SYS"}, False),
        ({"NCCL_P2P_LEVEL": "PHB"}, False),
        ({"NCCL_P2P_LEVEL": "PIX"}, True),
        ({"NCCL_P2P_LEVEL": "pix"}, False),
        ({"NCCL_P2P_LEVEL": "0"}, True),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, True),
    ],
)
def test_the_path(env: dict[str, str], through_host: bool) -> None:
    """A level nearer than the ring's farthest hop sends it through host memory; a misspelt one is ignored."""
    assert (read_nccl(env).path(BOX) is BOX.shm) is through_host


@given(low=st.integers(0, 200), high=st.integers(-5, 200))
def test_channels_stay_within_bounds(low: int, high: int) -> None:
    """At least one, at most 64, the maximum wins."""
    nccl = read_nccl({"NCCL_MIN_NCHANNELS": str(low), "NCCL_MAX_NCHANNELS": str(high)})
    assert 1 <= nccl.channels(BOX.shm) <= 64
    assert nccl.channels(BOX.shm) <= max(high, 1)


@pytest.mark.parametrize(("text", "threads"), [("", None), ("65", 512), ("32", 64), ("128", 128), ("1024", 512)])
def test_threads(text: str, threads: int | None) -> None:
    """A value NCCL does not take becomes 512."""
    assert read_nccl({"NCCL_NTHREADS": text} if text else {}).threads == threads
