"""A record as MLflow takes it: nothing cut, refused or turned into a lie."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import (
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_TAG_VAL_LENGTH,
    _validate_metric_name,
    _validate_param_name,
    _validate_tag_name,
)

from runner.errors import FailureKind
from runner.schema.trial import Distribution, Measurement, Role
from runner.tracking.entries import PARAM_LENGTH, TAG_LENGTH, Point, entries, name, text, trial_entries
from runner.tracking.runs import METRICS_PER_BATCH
from tests.studies import experiment, record


def test_each_figure_is_logged_by_step_and_under_a_key_of_its_own() -> None:
    """A curve over the concurrency, and a column that the UI's table can sort by."""
    measured = Measurement(
        concurrency=8, valid=True, output_tok_s=300.0, ttft_ms=Distribution(n=20, mean=5.0, p50=4.0, p90=8.0)
    )
    found = trial_entries(record(1, 5.0).model_copy(update={"measurements": (measured,)}), experiment())
    points = {(point.key, point.step): point.value for point in found.metrics}
    assert points[("output_tok_s", 8)] == points[("output_tok_s_c8", 8)] == 300.0
    assert points[("ttft_ms_p50", 8)] == points[("ttft_ms_p50_c8", 8)] == 4.0
    assert not any(key.startswith("ttft_ms_p99") for key, _ in points)


def test_a_void_level_is_a_tag_and_never_a_figure() -> None:
    """What does not count must not be plotted."""
    void = Measurement(concurrency=8, valid=False, reason="counts differ", output_tok_s=999.0)
    found = trial_entries(record(1, 5.0).model_copy(update={"measurements": (void,)}), experiment())
    assert not any(point.value == 999.0 for point in found.metrics)
    assert found.tags["void_c8"] == "counts differ"


def test_a_figure_that_the_front_end_limits_says_so() -> None:
    """Somebody who sorts by it must not take it for the engine's."""
    limited = Measurement(concurrency=256, valid=True, output_tok_s=9000.0, limited_by="api_server")
    found = trial_entries(record(1, 5.0).model_copy(update={"measurements": (limited,)}), experiment())
    assert found.tags["limited_by_c256"] == "api_server"


def test_the_goal_is_a_percentage() -> None:
    """Of the goal's tok/s at the goal's concurrency."""
    found = trial_entries(record(1, {1: 57.0}), experiment())
    assert [p.value for p in found.metrics if p.key == "percent_of_goal"] == [pytest.approx(57.0)]


def test_knobs_and_resolved_settings_are_params() -> None:
    """As chosen, and as launched."""
    found = trial_entries(record(1, 5.0, params={"max-num-seqs": 16}), experiment())
    assert found.params == {"max-num-seqs": "16", "flag.max-num-seqs": "16"}


def test_a_trials_tags_say_what_it_is() -> None:
    """Engine, outcome, failure kind, role, fingerprint; simulated and synthetic are named."""
    failed = record(2, None, role=Role.SEARCH, failure=FailureKind.HANG, simulated=True, synthetic_acceptance=2.5)
    tags = trial_entries(failed, experiment()).tags
    assert tags["engine"] == "simulated"
    assert tags["simulated"] == "true"
    assert tags["outcome"] == "failed"
    assert tags["failure"] == "hang"
    assert tags["fingerprint"] == failed.fingerprint
    assert tags["synthetic_acceptance"] == "2.5"
    assert tags["trial"] == "2"


def test_d9_long_values_become_artefacts_with_a_hash() -> None:
    """Whole in a file, a hash in the param; nothing is cut silently."""
    cmdline, sizes = "x" * 9000, list(range(1, 2049))
    found = entries({"cmdline": cmdline, "sizes": sizes}, (), {"note": "y" * 9000})
    assert found.texts["params/cmdline.txt"] == cmdline
    assert found.texts["params/sizes.txt"] == text(sizes)
    assert found.texts["tags/note.txt"] == "y" * 9000
    assert found.params["cmdline"].startswith("sha256:")
    assert "9000 characters in params/cmdline.txt" in found.params["cmdline"]


def test_d9_names_are_mapped_and_nonfinite_figures_left_out() -> None:
    """``tput@1024`` and ``itl_p99%`` in allowed characters; NaN and infinity named in a tag, never logged."""
    points = [Point("tput@1024", 1.0, 1024), Point("itl_p99%", math.nan), Point("ttft", math.inf)]
    found = entries({}, points, {})
    assert found.metrics == (Point("tput_at_1024", 1.0, 1024),)
    assert found.tags["nonfinite_metrics"] == "itl_p99%, ttft"
    assert name("itl_p99%") == "itl_p99_percent"


@pytest.mark.parametrize(
    ("value", "spelt"),
    [(True, "true"), (1, "1"), (1.0, "1.0"), ("1", "1"), (None, "null"), ({"b": 1, "a": 2}, '{"a":2,"b":1}')],
)
def test_one_value_has_one_spelling(value: object, spelt: str) -> None:
    """Whatever order its keys are in."""
    assert text(value) == spelt


@given(st.text())
def test_every_name_is_one_that_mlflow_takes(key: str) -> None:
    """By MLflow's own checks."""
    mapped = name(key)
    _validate_metric_name(mapped)
    _validate_param_name(mapped)
    _validate_tag_name(mapped)
    assert len(mapped) <= 250


@given(st.text(max_size=20), st.text(max_size=20))
def test_long_names_that_differ_stay_different(one: str, other: str) -> None:
    """Their ends are hashed."""
    if one != other and one.isalnum() and other.isalnum() and one.isascii() and other.isascii():
        assert name("a" * 300 + one) != name("a" * 300 + other)


def test_the_limits_are_those_of_the_installed_mlflow() -> None:
    """A newer MLflow with tighter limits shows here, not in a truncated value."""
    assert PARAM_LENGTH <= MAX_PARAM_VAL_LENGTH
    assert TAG_LENGTH <= MAX_TAG_VAL_LENGTH
    assert METRICS_PER_BATCH <= MAX_METRICS_PER_BATCH
