"""Calculated values: capture sizes in tokens from requests, CPU bindings from the CPUs there are."""

from pathlib import Path

import pytest

from runner.errors import Infeasible
from runner.space.presets import cpu_list
from runner.space.space import Space
from runner.space.surroundings import Machine
from tests.spaces import dense, experiment_of, infeasible, refusal, space_of


def sizes(space: Space, params: dict[str, bool | int | float | str]) -> list[int]:
    found = space.resolve(params).structured["compilation-config"]
    assert set(found) == {"cudagraph_capture_sizes"}, "an explicit list and no bare maximum"
    listed: list[int] = found["cudagraph_capture_sizes"]
    return listed


def test_capture_sizes_are_tokens_with_speculation(tmp_path: Path) -> None:
    """Six requests of 1 + 6 tokens: every multiple of 7 up to 42, and no maximum that vLLM would cut to 40."""
    experiment = experiment_of(defaults={"flags": {"max-num-seqs": 6, "max-num-batched-tokens": 2048}})
    text = """
knobs:
  spec: {choices: {none: {}, ngram: {json: {speculative-config: {method: ngram, num_speculative_tokens: 6}}}}}
  capture: {json: compilation-config.cudagraph_capture_sizes, choices: [{preset: upto_max}]}
"""
    space = space_of(tmp_path, text, experiment, facts=dense(num_attention_heads=32, num_hidden_layers=28))
    assert sizes(space, {"spec": "ngram", "capture": "upto_max"}) == [7, 14, 21, 28, 35, 42]
    assert sizes(space, {"capture": "upto_max"}) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("ladder", [1, 10, 64, 200]),
        ("powers_of_two", [1, 2, 4, 8, 16, 32, 64, 128, 200]),
        ("upto_8", [1, 2, 4, 8]),
        ("upto_32", list(range(1, 33))),
        ("upto_max", [*range(1, 33), *range(40, 201, 8)]),
    ],
)
def test_each_preset_ends_at_the_most_sequences(tmp_path: Path, preset: str, expected: list[int]) -> None:
    """A ladder of 256 and 200 sequences: nothing above 200 is captured."""
    text = (
        f"knobs: {{capture: {{json: compilation-config.cudagraph_capture_sizes, choices: [{{preset: {preset}}}]}}}}\n"
    )
    space = space_of(tmp_path, text, experiment_of(defaults={"flags": {"max-num-seqs": 200}}))
    assert sizes(space, {"capture": preset}) == expected


def test_sizes_above_a_steps_tokens_are_left_out(tmp_path: Path) -> None:
    """vLLM would drop them with a warning; where none is left the choice is pruned."""
    text = """
knobs:
  capture: {json: compilation-config.cudagraph_capture_sizes, choices: [{preset: powers_of_two}]}
  tokens: {flag: max-num-batched-tokens, choices: [64, 4]}
  seqs: {flag: max-num-seqs, choices: [4]}
  spec: {choices: {none: {}, ngram: {json: {speculative-config: {method: ngram, num_speculative_tokens: 7}}}}}
"""
    space = space_of(tmp_path, text)
    assert sizes(space, {"capture": "powers_of_two", "tokens": "64", "seqs": "4", "spec": "ngram"}) == [8, 16, 32]
    few: dict[str, bool | int | float | str] = {"capture": "powers_of_two", "tokens": "4", "seqs": "4", "spec": "ngram"}
    assert "no capture size fits" in infeasible(space, few)


def test_large_gpus_take_more_sequences_by_themselves(tmp_path: Path) -> None:
    """vLLM's own default counts where the experiment says nothing: 1024 from 70 GiB on, 256 below and on an A100."""
    text = "knobs: {capture: {json: compilation-config.cudagraph_capture_sizes, choices: [{preset: powers_of_two}]}}\n"
    large = space_of(tmp_path, text)
    small = space_of(tmp_path, text, machine=Machine(gpu_memory_gib=24))
    a100 = space_of(tmp_path, text, machine=Machine(gpu_memory_gib=80, gpu_name="NVIDIA A100-SXM4-80GB"))
    assert sizes(a100, {"capture": "powers_of_two"})[-1] == 256
    assert sizes(large, {"capture": "powers_of_two"})[-1] == 1024
    assert sizes(small, {"capture": "powers_of_two"})[-1] == 256


def test_each_draft_length_has_its_own_sizes(tmp_path: Path) -> None:
    """Where drafts become fewer by batch, a batch's graph is a multiple of its own length."""
    text = """
knobs:
  capture: {json: compilation-config.cudagraph_capture_sizes, choices: [{preset: powers_of_two}]}
  by_batch:
    json: speculative-config.num_speculative_tokens_per_batch_size
    choices: [{preset: fewer_as_batches_grow}]
"""
    speculation = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 4}}
    space = space_of(tmp_path, text, experiment_of(defaults={"flags": {"max-num-seqs": 64}, "json": speculation}))
    config = space.resolve({"capture": "powers_of_two", "by_batch": "fewer_as_batches_grow"})
    expected = sorted({5, 10, 20, 40} | {16 * 3, 32 * 3} | {64 * 2})
    assert config.structured["compilation-config"]["cudagraph_capture_sizes"] == expected


def test_a_cpu_takes_its_own_defaults(tmp_path: Path) -> None:
    """128 sequences a worker, whatever GPUs the machine has."""
    text = "knobs: {capture: {json: compilation-config.cudagraph_capture_sizes, choices: [{preset: powers_of_two}]}}\n"
    space = space_of(tmp_path, text, experiment_of(cpu=True))
    assert sizes(space, {"capture": "powers_of_two"})[-1] == 128


def test_throughput_mode_doubles_what_is_not_said(tmp_path: Path) -> None:
    """vLLM's own default only; an explicit number stands."""
    text = "knobs: {capture: {json: compilation-config.cudagraph_capture_sizes, choices: [{preset: powers_of_two}]}}\n"
    mode = {"performance-mode": "throughput"}
    doubled = space_of(tmp_path, text, experiment_of(defaults={"flags": mode}), machine=Machine(gpu_memory_gib=24))
    assert sizes(doubled, {"capture": "powers_of_two"})[-1] == 512
    said = space_of(tmp_path, text, experiment_of(defaults={"flags": {**mode, "max-num-seqs": 16}}))
    assert sizes(said, {"capture": "powers_of_two"})[-1] == 16


def test_cpu_lists() -> None:
    """Runs are joined, single CPUs stand alone."""
    assert cpu_list((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert cpu_list((3,)) == "3"


BINDING = """
knobs:
  bind:
    env: VLLM_CPU_OMP_THREADS_BIND
    choices: [{preset: all_cpus}, {preset: first_cpu}, {preset: all_but_one}, {preset: two_halves}]
"""


def test_bindings_come_from_the_cpus_this_process_may_use(tmp_path: Path) -> None:
    """Not from the machine's: CPUs 4, 5, 8 and 9 are bound as such."""
    space = space_of(tmp_path, BINDING, experiment_of(cpu=True), machine=Machine(cpus=(4, 5, 8, 9)))
    found = {label: space.resolve({"bind": label}).env["VLLM_CPU_OMP_THREADS_BIND"] for label in space.knobs[0].labels}
    assert found == {"all_cpus": "4-5,8-9", "first_cpu": "4", "all_but_one": "4-5,8", "two_halves": "4-5|8-9"}


def test_bindings_that_need_more_cpus_leave_the_space(tmp_path: Path) -> None:
    """With one CPU there are no halves."""
    space = space_of(tmp_path, BINDING, experiment_of(cpu=True), machine=Machine(cpus=(0,)))
    assert space.knobs[0].labels == ("all_cpus", "first_cpu")
    assert {r.label: r.reason for r in space.ruled_out}["two_halves"] == "needs 2 CPUs, this process may use 1"


PARTITION = """
knobs:
  split: {choices: {one: {}, pp2: {flags: {pipeline-parallel-size: 2}}, pp8: {flags: {pipeline-parallel-size: 8}}}}
  layers:
    env: VLLM_PP_LAYER_PARTITION
    choices: [{preset: last_stage_minus_1}, {preset: last_stage_minus_2}]
    when: {split: [pp2, pp8]}
"""


def test_layer_partitions_sum_to_the_models_layers(tmp_path: Path) -> None:
    """Whatever the remainder, every stage has a layer and the last has fewer than vLLM gives it."""
    space = space_of(tmp_path, PARTITION, facts=dense())
    for split, stages in (("pp2", 2), ("pp8", 8)):
        for less in (1, 2):
            partition = space.resolve({"split": split, "layers": f"last_stage_minus_{less}"}).env
            counts = [int(part) for part in partition["VLLM_PP_LAYER_PARTITION"].split(",")]
            assert (len(counts), sum(counts)) == (stages, 36)
            assert min(counts) >= 1
            assert counts[-1] == 36 // stages - less


def test_layer_partitions_need_the_models_layers(tmp_path: Path) -> None:
    """Without a config.json nothing is guessed."""
    with pytest.raises(Infeasible, match="number of layers"):
        space_of(tmp_path, PARTITION).resolve({"split": "pp2", "layers": "last_stage_minus_1"})


def test_drafts_become_fewer_as_batches_grow(tmp_path: Path) -> None:
    """All of K, then half, then one, over every batch up to the most sequences, without gaps."""
    text = """
knobs:
  spec: {choices: {none: {}, ngram: {json: {speculative-config: {method: ngram}}}}}
  k: {json: speculative-config.num_speculative_tokens, int: {low: 1, high: 6}, required: true, when: {spec: ngram}}
  by_batch:
    json: speculative-config.num_speculative_tokens_per_batch_size
    choices: [{preset: fewer_as_batches_grow}]
    when: {spec: ngram}
"""
    space = space_of(tmp_path, text, experiment_of(defaults={"flags": {"max-num-seqs": 64}}))
    schedule = space.resolve({"spec": "ngram", "k": 6, "by_batch": "fewer_as_batches_grow"}).structured
    key = "num_speculative_tokens_per_batch_size"
    assert schedule["speculative-config"][key] == [[1, 8, 6], [9, 32, 3], [33, 64, 1]]
    single = space.resolve({"spec": "ngram", "k": 1, "by_batch": "fewer_as_batches_grow"}).structured
    assert single["speculative-config"][key] == [[1, 8, 1], [9, 32, 1], [33, 64, 0]]


def test_a_preset_inside_a_bundle_is_calculated(tmp_path: Path) -> None:
    """In its JSON too, where `preset` would else be sent to vLLM as a key; a name that does not fit is refused."""
    text = """
knobs:
  graphs: {choices: {a: {}, b: {json: {compilation-config: {cudagraph_capture_sizes: {preset: %s}}}}}}
"""
    config = space_of(tmp_path, text % "upto_8").resolve({"graphs": "b"})
    assert config.structured == {"compilation-config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
    error = refusal(tmp_path, text % "all_cpus")
    assert (error.line, error.problem) == (
        3,
        "preset `all_cpus` is no value of compilation-config.cudagraph_capture_sizes",
    )
