"""What a step costs: the directions that physics gives, whatever the numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.simulator.costs import Batch, all_reduce_s, all_reduces, graph_of, launches, step_time, total_weights
from runner.simulator.describe import load_model, load_node
from runner.simulator.launch import Launch
from runner.simulator.nccl import Nccl, read_nccl

BOX = load_node("8x-rtx-pro-6000")
H200 = load_node("2x-h200-nvlink")
MOE = load_model("glm5-744b-moe-4.5bit")
DENSE = load_model("qwen3-8b")
GRAPHS = Launch(tensor_parallel=8, capture_sizes=(1, 2, 4, 8, 16, 32))
messages = st.integers(1024, 256 * 2**20)


def decode(tokens: int, context: int = 0) -> Batch:
    return Batch(requests=tokens, tokens=tokens, decode_only=True, context_tokens=context)


def with_env(launch: Launch, **env: str) -> Launch:
    return replace(launch, nccl=read_nccl(env))


@given(first=messages, second=messages, protocol=st.sampled_from(["LL", "LL128", "Simple"]))
def test_larger_messages_take_longer(first: int, second: int, protocol: str) -> None:
    """For a given protocol an all-reduce never gets faster with size."""
    launch = with_env(GRAPHS, NCCL_PROTO=protocol)
    small, large = sorted((first, second))
    assert all_reduce_s(launch, BOX, small) <= all_reduce_s(launch, BOX, large)


@given(size=messages, few=st.integers(1, 32), many=st.integers(1, 32))
def test_more_channels_never_slow_an_all_reduce(size: int, few: int, many: int) -> None:
    """Channels only add bandwidth in this model (they would take GPU from the model, which it does not know)."""
    low, high = sorted((few, many))
    limited = [replace(GRAPHS, nccl=Nccl(min_channels=count, max_channels=count)) for count in (low, high)]
    assert all_reduce_s(limited[0], BOX, size) >= all_reduce_s(limited[1], BOX, size)


def test_ll_is_cheap_small_and_dear_large() -> None:
    """The trade the story is about."""
    ll, simple = with_env(GRAPHS, NCCL_PROTO="LL"), with_env(GRAPHS, NCCL_PROTO="Simple")
    assert all_reduce_s(ll, BOX, 12 * 1024) < 0.8 * all_reduce_s(simple, BOX, 12 * 1024)
    assert all_reduce_s(ll, BOX, 64 * 2**20) > 1.5 * all_reduce_s(simple, BOX, 64 * 2**20)


def test_one_gpu_needs_no_all_reduce() -> None:
    """Nor does pipeline parallelism alone."""
    assert all_reduces(Launch(pipeline_parallel=2), DENSE) == 0
    assert all_reduces(Launch(tensor_parallel=2), DENSE) == 73


def test_custom_all_reduce_takes_what_fits() -> None:
    """Up to 8 MiB it is vLLM's own kernel, beyond that NCCL."""
    launch = Launch(tensor_parallel=2, all_reduce=("CUSTOM", "PYNCCL"))
    plain = Launch(tensor_parallel=2, all_reduce=("PYNCCL",))
    assert all_reduce_s(launch, H200, 8192) < all_reduce_s(plain, H200, 8192)
    assert all_reduce_s(launch, H200, 2**24) == all_reduce_s(plain, H200, 2**24)


def test_the_smallest_graph_that_fits_is_padded_to() -> None:
    """Ten tokens run in the graph of 16; 33 have none; a mixed batch takes a piecewise one."""
    assert graph_of(GRAPHS, decode(10)) == ("FULL", 16)
    assert graph_of(GRAPHS, decode(33)) == ("NONE", 33)
    assert graph_of(GRAPHS, replace(decode(10), decode_only=False)) == ("PIECEWISE", 16)
    assert graph_of(replace(GRAPHS, graph_mode="FULL_DECODE_ONLY"), replace(decode(10), decode_only=False))[0] == "NONE"
    assert launches(GRAPHS, MOE, "FULL") < launches(GRAPHS, MOE, "PIECEWISE") < launches(GRAPHS, MOE, "NONE")


def test_a_step_without_a_graph_is_as_long_as_its_launches() -> None:
    """Eager, small batches cost what the host takes, and the GPU's time hides behind it."""
    eager = replace(GRAPHS, graph_mode="NONE", capture_sizes=())
    slow, fast = step_time(eager, BOX, MOE, decode(1)), step_time(GRAPHS, BOX, MOE, decode(1))
    assert slow.stages_s[0] == pytest.approx(slow.launch_s)
    assert slow.stages_s[0] > 1.8 * fast.stages_s[0]


def test_a_mixture_reads_more_experts_as_the_batch_grows() -> None:
    """Ten tokens cost a mixture much more than one, and a dense model hardly more."""
    alone = replace(GRAPHS, capture_sizes=(1, 10))
    mixture = [step_time(alone, BOX, MOE, decode(count)).stages_s[0] for count in (1, 10)]
    dense = [step_time(alone, BOX, DENSE, decode(count)).stages_s[0] for count in (1, 10)]
    assert mixture[1] / mixture[0] > 2
    assert dense[1] / dense[0] < 1.2


def test_context_costs_time() -> None:
    """The KV cache is read in every step."""
    assert (
        step_time(GRAPHS, BOX, DENSE, decode(8, 80_000)).stages_s[0]
        > step_time(GRAPHS, BOX, DENSE, decode(8)).stages_s[0]
    )


def test_weights() -> None:
    """The models are as large as they are called."""
    assert total_weights(MOE) == pytest.approx(744e9, rel=0.01)
    assert total_weights(DENSE) == pytest.approx(7.2e9, rel=0.03)


def test_whole_experts_wait_for_the_fullest_gpu() -> None:
    """Expert parallelism costs most where few tokens hit few experts, and little for large batches."""
    spread = replace(GRAPHS, expert_parallel=True)
    few, many = (
        step_time(spread, BOX, MOE, decode(count)).stages_s[0] / step_time(GRAPHS, BOX, MOE, decode(count)).stages_s[0]
        for count in (1, 512)
    )
    assert few > many > 1.0


def test_layers_of_a_stage_are_its_time() -> None:
    """The last stage makes the logits, so an even split is uneven in time, and fewer layers there mend it."""
    even = replace(GRAPHS, tensor_parallel=1, pipeline_parallel=2)
    first, last = step_time(even, H200, DENSE, decode(8)).stages_s
    assert last > first
    moved = step_time(replace(even, layer_partition=(19, 17)), H200, DENSE, decode(8)).stages_s
    assert max(moved) < 1.06 * max(first, last)
    assert sum(moved) == pytest.approx(first + last)
