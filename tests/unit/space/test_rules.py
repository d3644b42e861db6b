"""What vLLM refuses, crashes on or hangs on is pruned without a launch, with its reason."""

from pathlib import Path
from typing import Any

import pytest

from runner.space.surroundings import Machine
from tests.spaces import dense, experiment_of, infeasible, reasons, refusal, space_of


def only(found: tuple[str, ...]) -> str:
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("flags", "changes", "reason"),
    [
        ({"tensor-parallel-size": 3}, {}, "attention heads (32) must be divisible by tensor parallel size (3)"),
        ({"tensor-parallel-size": 4}, {"num_key_value_heads": 6}, "KV heads (6) and tensor parallel size (4)"),
        ({"tensor-parallel-size": 8}, {"intermediate_size": 12284}, "feed-forward width (12284)"),
        ({"pipeline-parallel-size": 8}, {"num_hidden_layers": 4}, "pipeline parallel size (8) exceeds the layers (4)"),
        ({"tensor-parallel-size": 8, "pipeline-parallel-size": 2}, {}, "takes 16 GPUs, there are 8"),
        ({"enable-expert-parallel": True}, {}, "needs a mixture-of-experts model"),
        ({"decode-context-parallel-size": 3, "tensor-parallel-size": 4}, {}, "must divide tensor parallel size (4)"),
        ({}, {"num_hidden_layers": 800}, "weights take"),
    ],
)
def test_what_the_model_and_the_gpus_rule_out(flags: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    """Divisibility of heads, KV heads and width; layers; GPUs; experts; memory."""
    assert reason in reasons(defaults={"flags": flags}, facts=dense(**changes))[0]


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ({"tensor-parallel-size": 8}, {}),
        ({"tensor-parallel-size": 8}, {"num_key_value_heads": 4}),  # replicated
        ({"tensor-parallel-size": 2, "pipeline-parallel-size": 4}, {"num_hidden_layers": 37}),  # need not divide
        ({"enable-expert-parallel": True}, {"num_experts": 128, "moe_intermediate_size": 768}),
    ],
)
def test_what_the_model_and_the_gpus_allow(flags: dict[str, Any], changes: dict[str, Any]) -> None:
    """No more is ruled out than vLLM would refuse."""
    assert reasons(defaults={"flags": flags}, facts=dense(**changes)) == ()


def test_weights_are_spread_over_tensor_and_pipeline_parallel() -> None:
    """13.4 GiB of weights do not fit a GPU of 12 GiB, half of them do."""
    small = Machine(gpu_memory_gib=12)
    one = only(reasons(defaults={}, facts=dense(), machine=small))
    assert one == "weights take 13.4 GiB of each GPU, usable are 11.0 GiB"
    for flag in ("tensor-parallel-size", "pipeline-parallel-size"):
        assert reasons(defaults={"flags": {flag: 2}}, facts=dense(), machine=small) == ()


def test_without_facts_nothing_is_ruled_out() -> None:
    """What is not known cannot be judged."""
    flags = {"tensor-parallel-size": 3, "pipeline-parallel-size": 50}
    assert reasons(defaults={"flags": flags}, gpus=None, machine=Machine()) == ()


def test_layer_partition() -> None:
    """As many stages as pipeline parallel, and the layers' sum; ignored without stages."""

    def judged(partition: str, stages: int) -> tuple[str, ...]:
        defaults = {"flags": {"pipeline-parallel-size": stages}, "env": {"VLLM_PP_LAYER_PARTITION": partition}}
        return reasons(defaults=defaults, facts=dense())

    assert "names 3 stages" in only(judged("12,12,12", 2))
    assert "sums to 35 layers" in only(judged("18,17", 2))
    assert judged("19,17", 2) == ()
    assert judged("19,17", 1) == ()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"max-num-batched-tokens": 512, "max-num-seqs": 1024}, "(512) is below max-num-seqs (1024)"),
        ({"max-num-batched-tokens": 512}, "(512) is below max-num-seqs (1024)"),  # the default on a large GPU
        (
            {"max-num-batched-tokens": 2048, "max-model-len": 4096, "enable-chunked-prefill": False},
            "without chunked prefill",
        ),
        ({"max-num-active-seqs": 300, "max-num-seqs": 256}, "max-num-active-seqs (300) is above"),
    ],
)
def test_the_schedulers_numbers(flags: dict[str, Any], reason: str) -> None:
    """Tokens, sequences and lengths that do not go together."""
    assert reason in only(reasons(defaults={"flags": flags}))


def test_a_step_must_hold_the_drafts() -> None:
    """Tokens of a step exceed one request's drafts."""
    defaults = {
        "flags": {"max-num-batched-tokens": 4, "max-num-seqs": 2},
        "json": {"speculative-config": {"method": "ngram", "num_speculative_tokens": 4}},
    }
    assert "no slots for 4 draft tokens" in only(reasons(defaults=defaults))


NGRAM6 = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 6}}


@pytest.mark.parametrize(
    ("defaults", "reason"),
    [
        ({"json": {"compilation-config": {"cudagraph_capture_sizes": []}}}, "is empty while graphs are on"),
        (
            {"json": {"compilation-config": {"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 4}}},
            "is said to be 4, the list's own is 2",
        ),
        (
            {
                "flags": {"cudagraph-capture-sizes": [1, 2]},
                "json": {"compilation-config": {"cudagraph_capture_sizes": [1, 2]}},
            },
            "mutually exclusive",
        ),
        (
            {
                "flags": {"max-cudagraph-capture-size": 8},
                "json": {"compilation-config": {"max_cudagraph_capture_size": 8}},
            },
            "mutually exclusive",
        ),
        ({"flags": {"max-cudagraph-capture-size": 42}}, "truncated to 40"),
        ({"flags": {"max-cudagraph-capture-size": 264}}, "truncated to 256"),
        ({"flags": {"max-cudagraph-capture-size": 252}}, "truncated to 248"),
        ({"flags": {"max-cudagraph-capture-size": 6}}, "truncated to 4"),
        ({"flags": {"max-cudagraph-capture-size": 64}, "json": NGRAM6}, "no multiple of 1 + draft tokens"),
        (
            {"flags": {"max-cudagraph-capture-size": 42}, "json": NGRAM6},
            "truncated to 40",
        ),
        (
            {"json": {**NGRAM6, "compilation-config": {"cudagraph_capture_sizes": [7, 15]}}},
            "capture size 15 is no multiple of 1 + draft tokens (7)",
        ),
        (
            {
                "flags": {"tensor-parallel-size": 2, "pipeline-parallel-size": 2},
                "json": {"compilation-config": {"pass_config": {"fuse_allreduce_rms": True}}},
            },
            "hangs at warm-up",
        ),
    ],
)
def test_capture_sizes_and_fusion(defaults: dict[str, Any], reason: str) -> None:
    """Lists and maxima that vLLM refuses, truncates or crashes on; fusion where it hangs."""
    assert reason in only(reasons(defaults=defaults))


@pytest.mark.parametrize(
    "defaults",
    [
        {"flags": {"max-cudagraph-capture-size": 40}},
        {"flags": {"max-cudagraph-capture-size": 512}},
        {"flags": {"max-cudagraph-capture-size": 31, "performance-mode": "interactivity"}},
        {"flags": {"max-cudagraph-capture-size": 1500, "max-num-batched-tokens": 1500}},
        {"json": {"compilation-config": {"cudagraph_capture_sizes": [7, 14], **{"max_cudagraph_capture_size": 14}}}},
        {"json": {**NGRAM6, "compilation-config": {"cudagraph_capture_sizes": [7, 42]}}},
        {"json": {"compilation-config": {"cudagraph_capture_sizes": [], "cudagraph_mode": "NONE"}}},
        # Eager wins over sizes: they are inert, not wrong.
        {"flags": {"enforce-eager": True}, "json": {"compilation-config": {"cudagraph_capture_sizes": []}}},
        # A size above a step's tokens is dropped, and the largest is the largest that is kept.
        {
            "flags": {"max-num-batched-tokens": 1024, "max-num-seqs": 8},
            "json": {
                "compilation-config": {"cudagraph_capture_sizes": [8, 2048], "max_cudagraph_capture_size": 8},
            },
        },
    ],
)
def test_capture_sizes_that_vllm_takes(defaults: dict[str, Any]) -> None:
    """No more is pruned than must be."""
    assert reasons(defaults=defaults) == ()


@pytest.mark.parametrize(
    ("speculation", "changes", "reason"),
    [
        (
            {"method": "dspark", "model": "org/draft", "enable_adaptive_verification": True},
            {},
            "needs full CUDA graphs",
        ),
        ({"method": "ngram"}, {}, "needs speculative-config.num_speculative_tokens"),
        ({"num_speculative_tokens": 3}, {}, "is set without a method"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            {},
            "prompt_lookup_min (4) is above prompt_lookup_max (2)",
        ),
        ({"method": "mtp", "num_speculative_tokens": 1}, {}, "no MTP layers"),
        ({"method": "mtp", "num_speculative_tokens": 3}, {"num_nextn_predict_layers": 2}, "divisible by"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, {}, "there is no draft for `eagle3`"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 4},
            {},
            "must be 1 or the model's own (1)",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "synthetic_acceptance_length": 2.5},
            {},
            "without `rejection_sample_method: synthetic`",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"},
            {},
            "exactly one of",
        ),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 4.5,
            },
            {},
            "must lie in 1..4",
        ),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [0.5, 0.8],
            },
            {},
            "never rise",
        ),
    ],
)
def test_speculation_that_cannot_run(speculation: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    """Lengths, windows, sources and acceptance that vLLM refuses."""
    eager = {"enforce-eager": "enable_adaptive_verification" in speculation}
    defaults = {"flags": eager, "json": {"speculative-config": speculation}}
    assert reason in only(reasons(defaults=defaults, facts=dense(**changes)))


@pytest.mark.parametrize(
    ("speculation", "changes"),
    [
        ({"method": "mtp"}, {"num_nextn_predict_layers": 1}),
        ({"method": "mtp", "num_speculative_tokens": 3}, {"num_nextn_predict_layers": 1}),
        ({"method": "mtp", "num_speculative_tokens": 4}, {"num_nextn_predict_layers": 2}),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 9}, {}),
        ({"method": "suffix"}, {}),
        ({"method": "eagle3", "num_speculative_tokens": 3, "model": "org/draft"}, {}),
    ],
)
def test_speculation_that_runs(speculation: dict[str, Any], changes: dict[str, Any]) -> None:
    """One layer may be repeated, one end of the window is both, a hub's draft is trusted."""
    assert reasons(defaults={"json": {"speculative-config": speculation}}, facts=dense(**changes)) == ()


def test_short_flags_and_json_exclude_each_other() -> None:
    """`--spec-method` and the same field of the JSON."""
    defaults = {"flags": {"spec-method": "ngram"}, "json": NGRAM6}
    assert "mutually exclusive" in only(reasons(defaults=defaults))


def test_async_scheduling_with_drafts_of_the_cpu_depends_on_the_version() -> None:
    """Up to 0.32 n-gram drafts exclude it on any runner; 0.33 makes them on the GPU."""
    defaults = {"flags": {"async-scheduling": True}, "json": NGRAM6}
    for version in ("0.24.0", "0.32.0+cpu"):
        assert "no async scheduling with `ngram` drafts" in only(reasons(defaults=defaults, version=version))
    assert reasons(defaults=defaults, version="0.33.0") == ()


def test_a_pass_that_a_version_no_longer_has(tmp_path: Path) -> None:
    """Sequence parallelism was a pass of 0.24 and is gone from 0.32."""
    defaults = {"json": {"compilation-config": {"pass_config": {"enable_sp": True}}}}
    assert reasons(defaults=defaults, version="0.24.0") == ()
    assert "is gone from this vLLM" in only(reasons(defaults=defaults, version="0.32.0"))


def test_async_scheduling_on_the_old_runner() -> None:
    """Only where both are asked for explicitly."""
    old = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    staged = {"flags": {"async-scheduling": True, "pipeline-parallel-size": 2}}
    assert "no async scheduling with pipeline" in only(reasons(defaults={**staged, "env": old}))
    drafts = {"flags": {"async-scheduling": True}, "json": NGRAM6}
    assert "`ngram` drafts" in only(reasons(defaults={**drafts, "env": old}))
    assert reasons(defaults=staged) == ()


DRAFTS = """
knobs:
  spec:
    choices:
      none: {}
      eagle3: {json: {speculative-config: {method: eagle3, num_speculative_tokens: 3}}}
      draft_model: {json: {speculative-config: {method: draft_model, num_speculative_tokens: 3}}}
"""


def test_drafts_of_the_experiment_are_filled_in_and_checked(tmp_path: Path) -> None:
    """A method takes the experiment's draft; a folder that is not there, or speaks another vocabulary, is out."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    for folder in (model, draft):
        folder.mkdir()
    (draft / "config.json").write_text(
        '{"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 100}'
    )
    drafts = {"eagle3": str(tmp_path / "nowhere"), "draft_model": str(draft)}
    experiment = experiment_of(drafts=drafts, model=str(model))
    space = space_of(tmp_path, DRAFTS, experiment, facts=dense())
    assert [r.reason for r in space.ruled_out] == [
        f"the draft `{tmp_path / 'nowhere'}` does not exist",
        "the draft's vocabulary (100) is not the model's (32000)",
    ]
    same = space_of(tmp_path, DRAFTS, experiment, facts=dense(vocab_size=100))
    config = same.resolve({"spec": "draft_model"})
    assert config.structured["speculative-config"]["model"] == str(draft)


def test_a_draft_for_a_method_that_takes_none_is_refused(tmp_path: Path) -> None:
    """A misspelt method would silently draft with nothing."""
    error = refusal(tmp_path, DRAFTS, experiment_of(drafts={"eagle4": "org/draft"}))
    assert "`eagle4` under `drafts` takes none" in str(error)
    assert "eagle3" in error.remedy


def test_a_draft_that_is_missing_is_pruned(tmp_path: Path) -> None:
    """Where the experiment names none for the method, whatever else is chosen."""
    space = space_of(tmp_path, DRAFTS, facts=dense())
    assert space.knobs == ()
    assert "there is no draft for `eagle3`" in space.ruled_out[0].reason


def test_a_rule_judges_what_knobs_set_together(tmp_path: Path) -> None:
    """Neither choice alone is wrong; the pair is pruned when it is proposed."""
    text = """
knobs:
  seqs: {flag: max-num-seqs, choices: [64, 4096]}
  tokens: {flag: max-num-batched-tokens, choices: [2048, 8192]}
"""
    space = space_of(tmp_path, text)
    assert "is below max-num-seqs" in infeasible(space, {"seqs": "4096", "tokens": "2048"})
    assert space.ruled_out == ()


@pytest.mark.parametrize(
    ("knob", "words"),
    [
        ("{flag: optimization-level, choices: [4]}", "one of 0, 1, 2, 3"),
        ("{flag: performance-mode, choices: [fast]}", "balanced, interactivity, throughput"),
        ("{json: compilation-config.cudagraph_mode, choices: [PARTIAL]}", "FULL_AND_PIECEWISE"),
        ("{json: compilation-config.mode, choices: [4]}", "VLLM_COMPILE"),
        ("{json: compilation-config.pass_config.enable_async_tp, choices: [true]}", "refused at start"),
        (
            "{json: compilation-config.pass_config.fuse_allreduce_rm, choices: [true]}",
            "did you mean fuse_allreduce_rms",
        ),
        ("{json: compilation-config.pass_config.fuse_allreduce_rms, choices: ['yes']}", "true or false"),
        ("{json: compilation-config.cudagraph_mod, choices: [FULL]}", "did you mean cudagraph_mode?"),
        ("{json: compilation-config.max_cudagraph_capture_size, choices: [abc]}", "a whole number from 1"),
        ("{json: speculative-config.num-speculative-token, choices: [3]}", "did you mean num_speculative_tokens?"),
        ("{choices: {a: {}, b: {json: {compilation-config: {cudagraph_mod: FULL}}}}}", "did you mean cudagraph_mode?"),
        ("{json: max-num-seqs.foo, choices: [3]}", "`max-num-seqs` takes no JSON object"),
        ("{json: compilation-config..mode, choices: [3]}", "empty key"),
        ("{flag: max-model-len, choices: [banana]}", "tokens (4096, 4k), or auto"),
        ("{flag: max-model-len, choices: [0]}", "tokens (4096, 4k), or auto"),
        ("{flag: gpu-memory-utilization, choices: [1.1]}", "a share above 0 and up to 1"),
        ("{flag: gpu-memory-utilization, choices: [0]}", "a share above 0 and up to 1"),
        ("{json: speculative-config.method, choices: [oracle]}", "no speculative method"),
        ("{json: speculative-config.tensor_parallel_size, choices: [2]}", "write draft_tensor_parallel_size"),
        ("{json: speculative-config.num_speculative_tokens, int: {low: 0, high: 3}}", "a whole number from 1"),
        ("{env: VLLM_ALLREDUCE_USE_SYMM_MEM, choices: ['yes']}", "0 or 1"),
        ("{env: VLLM_FLASHINFER_ALLREDUCE_BACKEND, choices: [nccl]}", "auto, trtllm or mnnvl"),
        ("{env: VLLM_PP_LAYER_PARTITION, choices: ['18;18']}", "layers of each stage"),
        ("{env: VLLM_KEEP_ALIVE_ON_ENGINE_DEATH, choices: ['1']}", "a dead engine would look alive"),
        ("{env: VLLM_PORT, choices: ['1']}", "each other's ports"),
        ("{flag: disable-log-stats, choices: [true]}", "counters are gone"),
        ("{flag: max-num-queued-reqs, choices: [8]}", "503"),
        ("{flag: load-format, choices: [safetensor]}", "did you mean safetensors?"),
        ("{flag: dtype, choices: [bf16]}", "one of auto, bfloat16"),
        ("{flag: stream-interval, choices: [0]}", "a whole number from 1"),
    ],
)
def test_values_that_can_never_be_right_are_refused_at_load(tmp_path: Path, knob: str, words: str) -> None:
    """With the line, and what would be right."""
    error = refusal(tmp_path, f"knobs:\n  x: {knob}\n")
    assert words in str(error)
    assert error.line == 2


def test_keys_of_a_newer_vllm_are_taken_and_said(tmp_path: Path) -> None:
    """What resembles no known key may be right; lengths may be short for thousands, or whatever fits."""
    text = "knobs: {a: {json: compilation-config.of_another_time, choices: [1]}}\n"
    warning = "compilation-config.of_another_time is none of the fields that vLLM 0.24 to 0.33 list"
    assert any(said.startswith(warning) for said in space_of(tmp_path, text).warnings)
    lengths = "knobs: {a: {flag: max-model-len, choices: [4096, 4k, auto, -1]}}\n"
    assert space_of(tmp_path, lengths).knobs[0].labels == ("4096", "4k", "auto", "-1")


def test_an_experiments_own_values_are_checked_alike(tmp_path: Path) -> None:
    """Defaults and pinned settings, and one may not be both."""
    wrong = experiment_of(defaults={"env": {"NCCL_NTHREADS": "100"}})
    assert "defaults.env.NCCL_NTHREADS" in str(refusal(tmp_path, "knobs: {}\n", wrong))
    preset = experiment_of(defaults={"json": {"compilation-config": {"cudagraph_capture_sizes": {"preset": "ladder"}}}})
    assert "would be taken literally" in str(refusal(tmp_path, "knobs: {}\n", preset))
    both = experiment_of(defaults={"flags": {"max-num-seqs": 8}}, pinned={"flags": {"max_num_seqs": 8}})
    assert "both a default and pinned" in str(refusal(tmp_path, "knobs: {}\n", both))
    short = experiment_of(defaults={"flags": {"tp": 2}})
    assert "in full" in str(refusal(tmp_path, "knobs: {}\n", short))


def test_flags_the_installed_vllm_does_not_have_are_refused(tmp_path: Path) -> None:
    """Also a `false` whose flag has no no-form; without a list of flags nothing is asked."""
    known = Machine(known_flags=frozenset({"max-num-seqs", "no-async-scheduling", "async-scheduling", "seed"}))
    space_of(tmp_path, "knobs: {a: {flag: async-scheduling, choices: [false]}}\n", machine=known)
    error = refusal(tmp_path, "knobs: {a: {flag: max-num-seq, choices: [8]}}\n", machine=known)
    assert "the installed vLLM has no flag --max-num-seq" in str(error)
    assert "did you mean `max-num-seqs`" in error.remedy
    off = refusal(tmp_path, "knobs: {a: {flag: seed, choices: [false]}}\n", machine=known)
    assert "no flag --no-seed" in str(off)
    word = refusal(tmp_path, "knobs: {a: {flag: async-scheduling, choices: ['yes']}}\n", machine=known)
    assert (word.problem, word.remedy) == ("`yes` is no value of --async-scheduling", "true or false, without quotes")
    json = Machine(known_flags=frozenset({"compilation-config"}))
    fusion = "knobs: {a: {json: compilation-config.pass_config.fuse_allreduce_rms, choices: [false]}}\n"
    assert space_of(tmp_path, fusion, machine=json).knobs[0].labels == ("false",)
    structured = refusal(tmp_path, "knobs: {a: {json: compilation-config.mode, choices: [0]}}\n", machine=known)
    assert "no flag --compilation-config" in str(structured)
