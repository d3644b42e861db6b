"""The command line's changes to an experiment."""

import pytest

from runner.errors import UsageError
from runner.schema.experiment import Settings
from runner.sweep.overrides import merged, serve_settings, with_overrides
from tests.studies import experiment


def test_flags_keep_their_types() -> None:
    """Numbers become numbers, bare flags true, `--no-x` false, several words a list."""
    found = serve_settings(
        "--max-model-len 4096 --gpu-memory-utilization=0.9 --enforce-eager "
        "--no-enable-prefix-caching --cudagraph-capture-sizes 1 2 4 --dtype bfloat16"
    )
    assert found.flags == {
        "max-model-len": 4096,
        "gpu-memory-utilization": 0.9,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "cudagraph-capture-sizes": (1, 2, 4),
        "dtype": "bfloat16",
    }


def test_a_structured_flag_is_an_object() -> None:
    """A JSON literal goes to the structured flags whole."""
    found = serve_settings("""--compilation-config '{"cudagraph_mode": "FULL"}'""")
    assert found.structured == {"compilation-config": {"cudagraph_mode": "FULL"}}


@pytest.mark.parametrize(
    ("line", "telling"),
    [
        ("max-model-len 4096", "begins with 'max-model-len'"),
        ("--compilation-config notjson", "takes a JSON object"),
        ("--compilation-config [1]", "takes a JSON object"),
        ("--served-name 'open", "cannot be split"),
        ("--tp 2", "tensor-parallel-size"),
        ("--compilation-config.mode 3", "field of a structured flag"),
    ],
)
def test_what_is_no_list_of_flags_is_refused(line: str, telling: str) -> None:
    """The message names what is wrong in the user's own words."""
    with pytest.raises(UsageError, match=telling):
        serve_settings(line)


def test_merging_replaces_settings_one_by_one() -> None:
    """A later setting wins over an earlier one; what it does not name stays."""
    base = Settings(flags={"a": 1, "b": 2}, structured={"compilation-config": {"mode": 3, "x": 1}}, env={"V": "1"})
    over = Settings(flags={"b": 3}, structured={"compilation-config": {"mode": 0}}, env={"W": "2"})
    both = merged(base, over)
    assert both.flags == {"a": 1, "b": 3}
    assert both.structured == {"compilation-config": {"mode": 0, "x": 1}}
    assert both.env == {"V": "1", "W": "2"}


def test_overrides_leave_the_original_alone() -> None:
    """An overridden experiment is a new value."""
    before = experiment(trials=12)
    after = with_overrides(before, model="other", trials=3, defaults=Settings(flags={"x": 1}))
    assert (after.model, after.budget.trials, after.defaults.flags) == ("other", 3, {"x": 1})
    assert (before.model, before.budget.trials, before.defaults.flags) == ("bundled:tiny", 12, {})
