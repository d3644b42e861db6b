"""Named values that follow from the rest of a configuration: CUDA-graph capture sizes and CPU bindings.

Capture sizes are tokens. A decode step of one request takes 1 + K tokens with K draft tokens, so a list is made in
requests and multiplied: a size that is no multiple of 1 + K serves no decode batch, and crashed PIECEWISE graphs.
The list is always explicit and never a bare maximum, which vLLM rounds down to its stride of 8 or 16.
"""

from collections.abc import Callable

from runner.errors import Infeasible
from runner.schema.space import Preset
from runner.space.settings import State, Target
from runner.space.surroundings import Reading

Calculated = list[int] | list[list[int]] | str

_UNKNOWN_MAX_SEQS = 256
"""vLLM's own default on GPUs of unknown size; it takes 1024 on large ones."""

_DENSE_UP_TO = 32
"""Requests up to which every batch gets its own graph in ``upto_max``; also vLLM's `interactivity` mode."""


def calculate_presets(state: State, reading: Callable[[], Reading]) -> None:
    """Puts values in the place of presets, those that depend on others last.

    Args:
        state: Settings, changed in place.
        reading: Makes a fresh reading of ``state``.

    Raises:
        Infeasible: A preset has no value here.
    """
    open_presets = [(target, value) for target, value in state.items() if isinstance(value, Preset)]
    # Capture sizes ask for the drafts of each batch size, which may be a preset too.
    for target, value in sorted(open_presets, key=lambda item: "cudagraph" in item[0][-1]):
        state[target] = PRESETS[value.preset](reading())


def _capture_sizes(requests: Callable[[int], list[int]]) -> Callable[[Reading], list[int]]:
    def sizes(config: Reading) -> list[int]:
        most = config.max_seqs or _UNKNOWN_MAX_SEQS
        counts = {min(count, most) for count in requests(most)}
        wanted: set[int] = set()
        for first, last, draft_tokens in config.draft_tiers:
            end = most if last is None else min(last, most)
            largest = {end} if any(count > end for count in counts) else set()
            wanted |= {count * (1 + draft_tokens) for count in counts | largest if first <= count <= end}
        limit = config.batched_tokens
        kept = sorted(size for size in wanted if limit is None or size <= limit)
        if not kept:
            raise Infeasible(f"no capture size fits max-num-batched-tokens {limit}, the smallest is {min(wanted)}")
        return kept

    return sizes


def _powers_of_two(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())] + [most]


def _up_to_max(most: int) -> list[int]:
    return [*range(1, min(most, _DENSE_UP_TO) + 1), *range(40, min(most, 256) + 1, 8), *range(272, most + 1, 16), most]


def _ladder_sizes(config: Reading) -> list[int]:
    return _capture_sizes(lambda most: list(config.around.ladder))(config)


def _fewer_as_batches_grow(config: Reading) -> list[list[int]]:
    """[first batch, last batch, draft tokens]: all of K up to 8 requests, half up to 32, then one (none of one)."""
    most, all_of_them = config.max_seqs or _UNKNOWN_MAX_SEQS, config.draft_tokens
    few = min(1, all_of_them - 1)
    steps = [[1, 8, all_of_them], [9, 32, max(1, all_of_them // 2)], [33, most, few]]
    return [[first, min(last, most), tokens] for first, last, tokens in steps if first <= most]


def _lighter_last_stage(layers_less: int) -> Callable[[Reading], str]:
    def partition(config: Reading) -> str:
        stages, facts = config.pipeline_parallel, config.around.facts
        if facts is None:
            raise Infeasible("the number of layers of the model is not known")
        each, rest = divmod(facts.layers, stages)
        # vLLM's own split: what remains goes to the stages before the last, from the back.
        counts = [each + (stages - 1 - rest <= stage < stages - 1) for stage in range(stages)]
        counts[-1] -= layers_less
        for stage in range(layers_less):
            counts[stage % max(1, stages - 1)] += 1
        if stages < 2 or counts[-1] < 1:
            raise Infeasible(f"{facts.layers} layers over {stages} stages leave no layer to move")
        return ",".join(map(str, counts))

    return partition


def _cpus(config: Reading, needed: int) -> tuple[int, ...]:
    cpus = config.around.machine.cpus
    if len(cpus) < needed:
        raise Infeasible(f"needs {needed} CPUs, this process may use {len(cpus)}")
    return cpus


def cpu_list(cpus: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` -> ``0-2,5``, the form of ``VLLM_CPU_OMP_THREADS_BIND``."""
    spans: list[list[int]] = []
    for cpu in cpus:
        if spans and cpu == spans[-1][-1] + 1:
            spans[-1].append(cpu)
        else:
            spans.append([cpu])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def _all_cpus(config: Reading) -> str:
    return cpu_list(_cpus(config, 1))


def _first_cpu(config: Reading) -> str:
    return cpu_list(_cpus(config, 1)[:1])


def _all_but_one(config: Reading) -> str:
    return cpu_list(_cpus(config, 3)[:-1])


def _two_halves(config: Reading) -> str:
    cpus = _cpus(config, 2)
    half = len(cpus) // 2
    return f"{cpu_list(cpus[:half])}|{cpu_list(cpus[half : 2 * half])}"


_Calculation = Callable[[Reading], Calculated]

_CAPTURE_SIZES: dict[str, _Calculation] = {
    # Every request count up to 32, then vLLM's own strides, up to max-num-seqs.
    "upto_max": _capture_sizes(_up_to_max),
    "powers_of_two": _capture_sizes(_powers_of_two),
    "upto_8": _capture_sizes(lambda most: [1, 2, 4, 8]),
    "upto_32": _capture_sizes(lambda most: list(range(1, 33))),
    "ladder": _ladder_sizes,
}
_DRAFTS_BY_BATCH: dict[str, _Calculation] = {"fewer_as_batches_grow": _fewer_as_batches_grow}
_LAYERS_OF_STAGES: dict[str, _Calculation] = {
    "last_stage_minus_1": _lighter_last_stage(1),
    "last_stage_minus_2": _lighter_last_stage(2),
}
_CPU_BINDINGS: dict[str, _Calculation] = {
    "all_cpus": _all_cpus,
    "all_but_one": _all_but_one,
    "first_cpu": _first_cpu,
    "two_halves": _two_halves,
}

PRESETS: dict[str, _Calculation] = {**_CAPTURE_SIZES, **_DRAFTS_BY_BATCH, **_LAYERS_OF_STAGES, **_CPU_BINDINGS}


def presets_for(target: Target) -> tuple[str, ...]:
    """Names of the presets whose values are of ``target``'s kind."""
    if target[-1] in ("cudagraph_capture_sizes", "cudagraph-capture-sizes"):
        return tuple(_CAPTURE_SIZES)
    if target[-1] == "num_speculative_tokens_per_batch_size":
        return tuple(_DRAFTS_BY_BATCH)
    if target == ("env", "VLLM_PP_LAYER_PARTITION"):
        return tuple(_LAYERS_OF_STAGES)
    return tuple(_CPU_BINDINGS) if target == ("env", "VLLM_CPU_OMP_THREADS_BIND") else ()
