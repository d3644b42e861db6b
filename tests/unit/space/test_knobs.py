"""The language: labels, conditions, unset, ranges, bundles, includes, pinned settings, contradictions."""

from pathlib import Path

import pytest

from runner.errors import Infeasible, UsageError
from runner.schema.base import Scalar
from runner.space.command import argv
from tests.spaces import experiment_of, infeasible, refusal, space_of

NESTED = """
knobs:
  tokens: {json: speculative-config.num_speculative_tokens, int: {low: 1, high: 4}, required: true, when: {spec: ngram}}
  spec: {choices: {none: {}, ngram: {json: {speculative-config: {method: ngram}}}}, when: {mode: [fast, unset]}}
  mode: {flag: performance-mode, choices: [interactivity, {value: throughput, label: fast}]}
"""


def test_parents_come_before_the_knobs_that_need_them(tmp_path: Path) -> None:
    """Order is by dependency, whatever the file's order."""
    assert [knob.name for knob in space_of(tmp_path, NESTED).knobs] == ["mode", "spec", "tokens"]


def test_conditions_nest(tmp_path: Path) -> None:
    """A knob exists only where its parent exists and has one of the labels asked for."""
    space = space_of(tmp_path, NESTED)
    mode, spec, tokens = space.knobs
    assert space.is_active(mode, {})
    assert space.is_active(spec, {})
    assert not space.is_active(tokens, {})
    assert space.is_active(tokens, {"spec": "ngram"})
    assert not space.is_active(tokens, {"spec": "ngram", "mode": "interactivity"})


def test_params_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Unknown knobs and labels, values outside a range, inactive and missing required knobs."""
    space = space_of(tmp_path, NESTED)
    cases: tuple[tuple[dict[str, Scalar], str], ...] = (
        ({"nome": "x"}, "no knob `nome`"),
        ({"mode": "slow"}, "no value `slow`"),
        ({"spec": "ngram", "tokens": 5}, "no value `5`"),
        ({"spec": "ngram", "tokens": 1.5}, "no value `1.5`"),
        ({"spec": "ngram", "tokens": True}, "no value `True`"),
        ({"tokens": 2}, "does not exist"),
        ({"spec": "ngram"}, "`tokens` is required"),
    )
    for params, words in cases:
        with pytest.raises(UsageError, match=words):
            space.resolve(params)


def test_the_empty_bundle_is_the_unset(tmp_path: Path) -> None:
    """It is no label of its own, and naming it is leaving the knob out."""
    space = space_of(tmp_path, NESTED)
    spec = space.knobs[1]
    assert (spec.labels, spec.unset_label) == (("ngram",), "none")
    assert space.resolve({"spec": "none"}) == space.baseline()


def test_unset_leaves_the_experiments_default_standing(tmp_path: Path) -> None:
    """A knob overrides a default; without it the default stands; a `false` becomes a no-flag."""
    experiment = experiment_of(defaults={"flags": {"max-num-seqs": 64, "enable-prefix-caching": True}})
    text = """
knobs:
  seqs: {flag: max_num_seqs, choices: [128]}
  caching: {flag: enable-prefix-caching, choices: [false]}
"""
    space = space_of(tmp_path, text, experiment)
    assert space.baseline().flags["max-num-seqs"] == 64
    words = argv(space.resolve({"seqs": "128", "caching": "false"}), model="M", host="H", port=1, served_name="n")
    assert words == [
        *["serve", "M", "--host", "H", "--port", "1", "--served-model-name", "n"],
        *["--no-enable-prefix-caching", "--max-num-seqs", "128"],
    ]


def test_structured_flags_merge_field_by_field_into_one_literal(tmp_path: Path) -> None:
    """Defaults, bundles and single fields meet in one compact JSON per flag."""
    experiment = experiment_of(defaults={"json": {"compilation-config": {"pass_config": {"eliminate_noops": True}}}})
    text = """
knobs:
  mode: {json: compilation-config.cudagraph_mode, choices: [FULL]}
  fusion: {choices: {x: {}, off: {json: {compilation-config: {pass_config: {fuse_allreduce_rms: false}}}}}}
"""
    config = space_of(tmp_path, text, experiment).resolve({"mode": "FULL", "fusion": "off"})
    words = argv(config, model="M", host="H", port=1, served_name="n")
    literal = '{"cudagraph_mode":"FULL","pass_config":{"eliminate_noops":true,"fuse_allreduce_rms":false}}'
    assert words[-2:] == ["--compilation-config", literal]


def test_values_reach_environment_variables_as_text(tmp_path: Path) -> None:
    """Numbers become text; a truth value would be a guess and is refused."""
    space = space_of(tmp_path, "knobs: {a: {env: SOME_VARIABLE, choices: [16, x]}}\n")
    assert space.resolve({"a": "16"}).env == {"SOME_VARIABLE": "16"}
    assert 'write "1" or "0"' in str(refusal(tmp_path, "knobs: {a: {env: SOME_VARIABLE, choices: [true]}}\n"))


def test_float_and_stepped_ranges(tmp_path: Path) -> None:
    """Numbers outside a range or off its step are refused; the ends are not."""
    text = """
knobs:
  memory: {flag: gpu-memory-utilization, float: {low: 0.8, high: 0.95}}
  seqs: {flag: max-num-seqs, int: {low: 16, high: 64, step: 16}}
"""
    space = space_of(tmp_path, text)
    config = space.resolve({"memory": 0.95, "seqs": 48})
    assert (config.flags["gpu-memory-utilization"], config.flags["max-num-seqs"]) == (0.95, 48)
    for params in ({"memory": 0.96}, {"seqs": 40}, {"seqs": 80}):
        with pytest.raises(UsageError):
            space.resolve(params)
    assert space.size() is None
    assert space.count() is None


@pytest.mark.parametrize(
    ("written", "problem", "remedy"),
    [
        ("env: NCCL_NTHREADS, int: {low: 64, high: 512}", "`65` is no value of NCCL_NTHREADS", "use `step: 32`"),
        (
            "env: NCCL_BUFFSIZE, int: {low: 1048576, high: 8388608, log: true}",
            "`1048577` is no value of NCCL_BUFFSIZE",
            "use `choices`",
        ),
        ("env: NCCL_BUFFSIZE, int: {low: 2097152, high: 8388608, step: 2097152}", "`6291456` is no", "use `choices`"),
        ("env: NCCL_MIN_NCHANNELS, int: {low: 1, high: 65}", "`65` is no value", "a whole number 1..64"),
    ],
)
def test_a_range_with_a_wrong_value_inside_is_refused(tmp_path: Path, written: str, problem: str, remedy: str) -> None:
    """Between right ends NCCL would take its maximum for most numbers, and say so in its log only."""
    error = refusal(tmp_path, f"knobs:\n  x: {{{written}}}\n")
    assert error.line == 2
    assert problem in error.problem
    assert remedy in error.remedy


def test_a_range_that_keeps_to_the_grammar_loads(tmp_path: Path) -> None:
    """By its step, or because every number in it is right."""
    stepped = "knobs: {x: {env: NCCL_NTHREADS, int: {low: 64, high: 512, step: 32}}}\n"
    assert space_of(tmp_path, stepped).size() == 16
    assert space_of(tmp_path, "knobs: {x: {env: NCCL_MIN_NCHANNELS, int: {low: 1, high: 64, log: true}}}\n")


def test_a_condition_on_a_range_names_numbers_of_it(tmp_path: Path) -> None:
    """By the number itself; what lies outside, or is no number, is refused."""
    text = """
knobs:
  seqs: {flag: max-num-seqs, int: {low: 16, high: 64}}
  tokens: {flag: max-num-batched-tokens, choices: [4096], when: {seqs: [16, %s]}}
"""
    space = space_of(tmp_path, text % 32)
    assert space.is_active(space.knobs[1], {"seqs": 32})
    assert not space.is_active(space.knobs[1], {"seqs": 33})
    assert "`seqs` has no value `65`" in str(refusal(tmp_path, text % 65))
    error = refusal(tmp_path, text % "many")
    assert ("`seqs` has no value `many`" in str(error), "16..64" in error.remedy) == (True, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("knobs: {a: {flag: max-num-seqs, choices: [16, '16']}}", "the label `16` is taken"),
        ("knobs: {a: {flag: max-num-seqs, choices: [unset]}}", "implicit and never written"),
        ("knobs: {a: {choices: {unset: {}, x: {env: {A: '1'}}}}}", "implicit and never written"),
        ("knobs: {a: {choices: {x: {}, y: {}}}}", "several choices are empty"),
        ("knobs: {a-b: {flag: max-num-seqs, choices: [16]}}", "cannot name a knob"),
        ("knobs: {a: {flag: max-num-seqs, choices: [16], when: {b: x}}}", "no knob `b`"),
        ("knobs: {a: {flag: max-num-seqs, choices: [16], when: {a: '16'}}}", "waits for itself"),
        (
            "knobs: {a: {flag: max-num-seqs, choices: [16], when: {b: y}}, b: {flag: dtype, choices: [half]}}",
            "`b` has no value `y`",
        ),
        ("knobs: {a: {flag: --max-num-seqs, choices: [16]}}", "bare name"),
        ("knobs: {a: {flag: tp, choices: [16]}}", "write `tensor-parallel-size` in full"),
        ("knobs: {a: {flag: no-enable-prefix-caching, choices: [true]}}", "`enable-prefix-caching: false`"),
        ("knobs: {a: {flag: compilation-config, choices: [x]}}", "takes a JSON object"),
        ("knobs: {a: {flag: compilation-config.mode, choices: [3]}}", "set it under `json`"),
        ("knobs: {a: {env: A-B, choices: [x]}}", "not the name of an environment variable"),
        ("knobs: {a: {flag: port, choices: [8000]}}", "not for a configuration to set"),
        ("knobs: {a: {env: CUDA_VISIBLE_DEVICES, choices: ['0']}}", "not for a configuration to set"),
        ("knobs: {a: {flag: max-num-seqs, choices: [{preset: nope}]}}", "no preset `nope`"),
        ("knobs: {a: {flag: max-num-seqs, choices: [0]}}", "a whole number from 1"),
        ("knobs: {a: {choices: {b: {flags: {max-num-seqs: 1, max_num_seqs: 2}}}}}", "--max-num-seqs is set twice"),
        ("knobs: {a: {flag: max-num-seqs, int: {low: 0, high: 4}}}", "a whole number from 1"),
    ],
)
def test_a_knob_in_a_wrong_form_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    """Each refusal stands at a line and says what would be right."""
    error = refusal(tmp_path, text + "\n")
    assert words in str(error)
    assert error.line == 1


def test_a_pinned_setting_cannot_be_varied(tmp_path: Path) -> None:
    """Refused at load, also when the knob only touches a field of a pinned structured flag."""
    experiment = experiment_of(pinned={"flags": {"max-num-seqs": 8}, "json": {"compilation-config": {"mode": 3}}})
    error = refusal(tmp_path, "knobs:\n  a: {flag: max-num-seqs, choices: [16]}\n", experiment)
    assert "which experiment `test` pins" in str(error)
    assert error.line == 2
    assert "pins" in str(refusal(tmp_path, "knobs: {a: {json: compilation-config.mode, choices: [0]}}\n", experiment))
    free = space_of(tmp_path, "knobs: {a: {json: compilation-config.cudagraph_mode, choices: [NONE]}}\n", experiment)
    assert free.resolve({"a": "NONE"}).structured == {"compilation-config": {"mode": 3, "cudagraph_mode": "NONE"}}


def test_two_knobs_that_set_the_same_thing_are_refused_unless_they_never_meet(tmp_path: Path) -> None:
    """Mutually exclusive conditions, or always the same value, are no contradiction."""
    both = """
knobs:
  path: {choices: {a: {}, b: {env: {SOME_SWITCH: "1"}}}}
  switch: {env: SOME_SWITCH, choices: ["0", "1"]%s}
"""
    assert "`switch` and `path` both set SOME_SWITCH" in str(refusal(tmp_path, both % ""))
    space = space_of(tmp_path, both % ", when: {path: a}")
    assert space.resolve({"switch": "0"}).env == {"SOME_SWITCH": "0"}
    agreeing = "knobs: {p: {choices: {a: {}, b: {env: {S: '1'}}}}, q: {choices: {a: {}, b: {env: {S: '1'}}}}}\n"
    assert space_of(tmp_path, agreeing).resolve({"p": "b", "q": "b"}).env == {"S": "1"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("{env: {NCCL_MIN_NCHANNELS: '16', NCCL_MAX_NCHANNELS: '8'}}", "NCCL_MIN_NCHANNELS (16) is above"),
        ("{env: {NCCL_MIN_CTAS: '4', NCCL_MIN_NCHANNELS: '4'}}", "steer the same thing"),
        ("{env: {NCCL_ALGO: 'allreduce:nvls', NCCL_PROTO: LL}}", "NVLS speaks Simple only"),
        ("{flags: {max-num-seqs: 64, max-num-batched-tokens: 32}}", "is below max-num-seqs (64)"),
    ],
)
def test_a_choice_that_contradicts_itself_is_refused(tmp_path: Path, settings: str, reason: str) -> None:
    """At its own place, unless it is kept to fail; left in the space it would only be missing from what is tried."""
    text = f"knobs:\n  x:\n    choices:\n      a: {{}}\n      b: {settings}\n"
    error = refusal(tmp_path, text)
    assert error.line == 5
    assert "`b` contradicts itself" in error.problem
    assert reason in error.problem
    kept = text.replace("b: {", "b: {keep_failing: on purpose, ")
    assert reason in infeasible(space_of(tmp_path, kept), {"x": "b"})


def test_a_choice_that_lacks_what_another_knob_sets_is_no_contradiction(tmp_path: Path) -> None:
    """Half a pair, a method without its length, more GPUs than there are: ruled out or completed, never refused."""
    text = """
knobs:
  least: {choices: {a: {}, b: {env: {NCCL_MIN_NCHANNELS: "16"}}}}
  most: {choices: {a: {}, b: {env: {NCCL_MAX_NCHANNELS: "8"}}}}
  spec: {choices: {a: {}, b: {json: {speculative-config: {method: ngram}}}}}
  split: {choices: {a: {}, b: {flags: {tensor-parallel-size: 8, pipeline-parallel-size: 8}}}}
"""
    space = space_of(tmp_path, text)
    assert [knob.name for knob in space.knobs] == ["least", "most"]
    assert "is above" in infeasible(space, {"least": "b", "most": "b"})


def test_a_constraint_sees_resolved_values(tmp_path: Path) -> None:
    """Defaults count where a knob is unset; the baseline is not judged; broken combinations are pruned."""
    text = """
knobs:
  tp: {flag: tensor-parallel-size, choices: [1, 2, 4, 8]}
  pp: {flag: pipeline-parallel-size, choices: [1, 2, 4, 8]}
constraints:
  - tp * pp == gpus
"""
    space = space_of(tmp_path, text, experiment_of(defaults={"flags": {"tensor-parallel-size": 8}}))
    assert space.baseline().gpus == 8
    assert space.resolve({"tp": "4", "pp": "2"}).gpus == 8
    assert infeasible(space, {"tp": "4"}) == "breaks `tp * pp == gpus` (tp 4, pp 1, gpus 8)"
    assert space.count() == 4
    unset = space_of(tmp_path, text)
    assert unset.baseline().gpus == 1


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ("tp * nope == 2", "`nope` is not known here"),
        ("tp *", "is not an expression"),
        ("__import__('os').system('x')", "not allowed here"),
        ("a = 1", "is not an expression"),
        ("min > tp", "`min` is a function, not a value"),
    ],
)
def test_a_malformed_constraint_is_refused(tmp_path: Path, constraint: str, words: str) -> None:
    """Not an expression, or an unknown name: file and line are named, nothing is evaluated."""
    text = f'knobs: {{tp: {{flag: tensor-parallel-size, choices: [2]}}}}\nconstraints:\n  - "{constraint}"\n'
    error = refusal(tmp_path, text)
    assert words in str(error)
    assert error.line == 3


def test_a_constraint_cannot_reach_python(tmp_path: Path) -> None:
    """Attributes and calls beyond a few arithmetic functions are refused when the space is loaded."""
    text = 'knobs: {tp: {flag: tensor-parallel-size, choices: [2]}}\nconstraints: ["tp.__class__.__mro__"]\n'
    with pytest.raises(UsageError, match="not allowed here"):
        space_of(tmp_path, text)


def test_includes_join_files(tmp_path: Path) -> None:
    """Knobs of included files belong to the space; the including file's own definition wins; loops are refused."""
    (tmp_path / "one.yaml").write_text("knobs: {a: {flag: max-num-seqs, choices: [16]}}\n")
    (tmp_path / "two.yaml").write_text("knobs: {a: {flag: max-num-seqs, choices: [32]}}\nconstraints: ['a > 1']\n")
    own = "include: [one.yaml, two.yaml]\nknobs: {a: {flag: max-num-seqs, choices: [64]}}\n"
    space = space_of(tmp_path, own)
    assert space.knobs[0].labels == ("64",)
    assert [c.text for c in space.constraints] == ["a > 1"]
    assert "differs from one included before" in str(refusal(tmp_path, "include: [one.yaml, two.yaml]\n"))
    assert "no file `three.yaml`" in str(refusal(tmp_path, "include: [three.yaml]\n"))
    assert "includes itself" in str(refusal(tmp_path, "include: [space.yaml]\n"))


def test_a_value_kept_to_fail_is_proposed_and_pruned_with_its_reason(tmp_path: Path) -> None:
    """It stays in the space although the model rules it out, and its refusal at load is waived."""
    text = """
knobs:
  split:
    choices:
      one: {}
      two: {flags: {tensor-parallel-size: 2}, keep_failing: on purpose}
  threads: {env: NCCL_NTHREADS, choices: [64, {value: 100, keep_failing: NCCL takes 512 instead}]}
"""
    space = space_of(tmp_path, text, gpus=1)
    assert space.knobs[0].keep_failing == {"two": "on purpose"}
    assert space.resolve({"threads": "100"}).env["NCCL_NTHREADS"] == "100"
    with pytest.raises(Infeasible, match="takes 2 GPUs, there is 1"):
        space.resolve({"split": "two"})


def test_labels_that_can_never_run_leave_the_space_with_their_reason(tmp_path: Path) -> None:
    """Ruled out by the node whatever else is chosen; what depends on them goes too."""
    text = """
knobs:
  split: {choices: {one: {}, two: {flags: {tensor-parallel-size: 2}}, four: {flags: {tensor-parallel-size: 4}}}}
  fusion:
    json: compilation-config.pass_config.fuse_allreduce_rms
    choices: [false]
    when: {split: four}
  seqs: {flag: max-num-seqs, choices: [64, 128]}
"""
    space = space_of(tmp_path, text, experiment_of(defaults={"flags": {"max-num-seqs": 64}}), gpus=2)
    assert [(r.knob, r.label) for r in space.ruled_out] == [("split", "four"), ("seqs", "64")]
    assert [r.reason for r in space.ruled_out] == [
        "TP x PP x DP takes 4 GPUs, there are 2",
        "the same as leaving it unset",
    ]
    assert [knob.name for knob in space.knobs] == ["split", "seqs"]


def test_an_experiment_that_no_knob_can_mend_is_refused(tmp_path: Path) -> None:
    """A default that cannot run, in a space that cannot change it, is the user's to mend before anything starts."""
    wide = experiment_of(defaults={"flags": {"tensor-parallel-size": 16}})
    error = refusal(tmp_path, "knobs: {seqs: {flag: max-num-seqs, choices: [64]}}\n", wide)
    assert "nothing in this space can run: TP x PP x DP takes 16 GPUs" in str(error)
    mendable = space_of(tmp_path, "knobs: {tp: {flag: tensor-parallel-size, choices: [8]}}\n", wide)
    assert mendable.resolve({"tp": "8"}).gpus == 8
    assert any("the baseline cannot run" in warning for warning in mendable.warnings)
