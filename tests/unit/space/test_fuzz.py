"""Whatever a file holds, it loads or is refused with a usage error; nothing else ever comes out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import UsageError
from runner.schema.experiment import Experiment
from runner.schema.space import SpaceFile
from runner.space.command import argv
from runner.space.document import parse_document
from runner.space.explain import explain
from runner.space.space import Space
from tests.spaces import dense, experiment_of, space_of

FILE = Path("x.yaml")

WORDS = st.sampled_from(
    [
        *("knobs", "flag", "env", "json", "choices", "int", "float", "when", "required", "low", "high", "step", "log"),
        *("value", "preset", "label", "keep_failing", "constraints", "include", "flags", "unset", "a", "b"),
        *("max-num-seqs", "tensor-parallel-size", "enforce-eager", "NCCL_PROTO", "NCCL_ALGO", "NCCL_NTHREADS", "LL"),
        *("compilation-config.cudagraph_mode", "speculative-config.num_speculative_tokens", "upto_max", "ngram"),
        *("compilation-config.cudagraph_capture_sizes", "allreduce:tree", "a > 1", "gpus / 0", "-1", "", ".", "^"),
    ]
)
LEAVES = st.one_of(WORDS, st.integers(-3, 2000), st.booleans(), st.floats(-1, 2, allow_nan=False), st.none())
TREES = st.recursive(
    LEAVES, lambda below: st.lists(below, max_size=4) | st.dictionaries(WORDS, below, max_size=4), max_leaves=20
)

SCALARS = st.one_of(WORDS, st.integers(0, 2000), st.booleans(), st.floats(0, 1, allow_nan=False))
CHOICE = SCALARS | st.builds(lambda value: {"value": value, "keep_failing": "so"}, SCALARS)
PRESETS = st.builds(lambda name: {"preset": name}, st.sampled_from(["upto_max", "all_cpus", "ladder", "two_halves"]))
FLAGS = st.sampled_from(
    [
        *("max-num-seqs", "max-num-batched-tokens", "tensor-parallel-size", "pipeline-parallel-size", "enforce-eager"),
        *("dtype", "gpu-memory-utilization", "stream-interval", "optimization-level", "cudagraph-capture-sizes"),
        *("max-cudagraph-capture-size", "max-model-len", "enable-chunked-prefill", "async-scheduling", "load-format"),
    ]
)
FIELDS = st.sampled_from(
    [
        *("compilation-config.cudagraph_mode", "compilation-config.cudagraph_capture_sizes"),
        *("speculative-config.method", "speculative-config.num_speculative_tokens", "speculative-config.model"),
        *("compilation-config.pass_config.fuse_allreduce_rms", "compilation-config.max_cudagraph_capture_size"),
        *("compilation-config.mode", "compilation-config.splitting_ops", "compilation-config.pass_config"),
        *("speculative-config.prompt_lookup_min", "speculative-config.prompt_lookup_max"),
        *("speculative-config.synthetic_acceptance_length", "speculative-config.synthetic_acceptance_rates"),
        *("speculative-config.rejection_sample_method", "speculative-config.num_speculative_tokens_per_batch_size"),
        *("speculative-config.draft_tensor_parallel_size", "hf-overrides.num_hidden_layers"),
    ]
)
VARIABLES = st.sampled_from(
    [
        *("NCCL_PROTO", "NCCL_ALGO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NVLS_ENABLE", "NCCL_BUFFSIZE"),
        *("VLLM_PP_LAYER_PARTITION", "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_CPU_OMP_THREADS_BIND", "OTHER"),
    ]
)
SPECULATION = {"json": {"speculative-config": {"method": "ngram", "num_speculative_tokens": 3}}}
TARGETS = st.one_of(
    st.builds(lambda name: {"flag": name}, FLAGS),
    st.builds(lambda name: {"json": name}, FIELDS),
    st.builds(lambda name: {"env": name}, VARIABLES),
)
DOMAINS = st.one_of(
    st.builds(lambda values: {"choices": values}, st.lists(CHOICE | PRESETS, min_size=1, max_size=3)),
    st.builds(lambda low, width: {"int": {"low": low, "high": low + width}}, st.integers(0, 600), st.integers(1, 600)),
)
CONDITIONS = st.one_of(
    st.just({}), st.builds(lambda labels: {"when": {"first": labels}}, WORDS | st.lists(SCALARS, max_size=2))
)
KNOBS = st.builds(lambda target, domain, when: {**target, **domain, **when}, TARGETS, DOMAINS, CONDITIONS)
NEARLY_RIGHT = st.builds(
    lambda first, others, constraints: {
        "knobs": {"first": {**first, "when": {}}, **others},
        "constraints": constraints,
    },
    KNOBS,
    st.dictionaries(st.sampled_from(["one", "two"]), KNOBS, max_size=2),
    st.lists(
        st.sampled_from(["first > 1", "gpus == 8", "first + 1", "layers % 2 == 0", "min(first, 3) < 2"]), max_size=1
    ),
)


@given(st.text(max_size=200))
def test_any_text_is_a_document_or_refused(text: str) -> None:
    """Control characters, half a document, nonsense."""
    for model in (SpaceFile, Experiment):
        error = refusal_of(lambda model=model: parse_document(text, FILE).parse(model))  # type: ignore[misc]
        assert error is None or str(error).startswith("x.yaml")


@given(TREES)
def test_any_tree_is_a_space_or_refused(tree: Any) -> None:
    """The language's own words in every wrong order."""
    error = refusal_of(lambda: parse_document(yaml.safe_dump(tree), FILE).parse(SpaceFile))
    assert error is None or error.line is not None


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NEARLY_RIGHT, st.booleans())
def test_nearly_right_spaces_load_and_resolve_or_are_refused(
    tmp_path: Path, content: dict[str, Any], drafts: bool
) -> None:
    """A loaded space proposes only what resolves or has a reason not to."""
    experiment = experiment_of(ladder=(1, 8), defaults=SPECULATION if drafts else {})
    try:
        space = space_of(tmp_path, yaml.safe_dump(content), experiment, facts=dense())
    except UsageError:
        return
    assert explain(space)
    for params in _some(space):
        encoded(space, params)


def refusal_of(attempt: Callable[[], object]) -> UsageError | None:
    try:
        attempt()
    except UsageError as error:
        return error
    return None


def encoded(space: Space, params: dict[str, Any]) -> None:
    config, reasons = space.judged(params)
    assert config is not None or all(reasons)
    if config is not None:
        argv(config, model="M", host="H", port=1, served_name="n")
        space.key(config)


def _some(space: Space) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}]
    for knob in space.knobs:
        values = knob.labels if knob.range is None else (knob.range.low, knob.range.high)
        found += [{**params, knob.name: value} for params in found if space.is_active(knob, params) for value in values]
    return found[:60]


def test_an_integer_of_four_thousand_digits_is_refused() -> None:
    """Python would raise on its own terms."""
    with pytest.raises(UsageError):
        parse_document("budget: {trials: " + "9" * 5000 + "}", FILE).parse(Experiment)
