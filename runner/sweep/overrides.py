"""What the command line changes about an experiment. Pure."""

import json
import shlex

from runner.errors import UsageError
from runner.schema.base import FlagValue
from runner.schema.experiment import Experiment, Settings
from runner.space.settings import STRUCTURED_FLAGS, State, assign, flag_name, flattened, nested


def serve_settings(line: str) -> Settings:
    """``--max-model-len 4096 --no-enable-prefix-caching`` as settings.

    Raises:
        UsageError: It is not a list of flags as ``vllm serve`` takes them.
    """
    flags: dict[str, FlagValue] = {}
    structured: dict[str, dict[str, object]] = {}
    for name, words in _grouped(line):
        if name in STRUCTURED_FLAGS:
            structured[name] = _json_object(name, words)
        elif name.startswith("no-") and not words:
            flags[_checked(name.removeprefix("no-"))] = False
        else:
            flags[_checked(name)] = _value(words)
    return Settings(flags=flags, structured=structured)


def _grouped(line: str) -> list[tuple[str, list[str]]]:
    """Each flag with the words after it."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"SERVE={line!r} cannot be split into words: {error}", remedy="close the quotes") from error
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise UsageError(f"SERVE begins with {word!r}", remedy="give flags, e.g. SERVE='--max-model-len 4096'")
    return found


def _checked(name: str) -> str:
    try:
        return flag_name(name)
    except ValueError as error:
        raise UsageError(f"SERVE: {error}", remedy="write flags as `vllm serve --help` does, in full") from error


def _json_object(name: str, words: list[str]) -> dict[str, object]:
    try:
        value = json.loads(" ".join(words))
    except json.JSONDecodeError as error:
        raise UsageError(f"SERVE: --{name} takes a JSON object, not {' '.join(words)!r}: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"SERVE: --{name} takes a JSON object, not {' '.join(words)!r}")
    return value


def _value(words: list[str]) -> FlagValue:
    if not words:
        return True
    values = [_scalar(word) for word in words]
    return values[0] if len(values) == 1 else tuple(v if isinstance(v, int | str) else str(v) for v in values)


def _scalar(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def merged(base: Settings, over: Settings) -> Settings:
    """``base`` with every setting of ``over`` in its place."""
    state: State = {}
    for settings in (base, over):
        for target, value, _ in flattened(settings.flags, settings.structured, settings.env):
            assign(state, target, value)
    flags, structured, env = nested(state)
    return Settings(flags=flags, structured=structured, env=env)


def with_overrides(
    experiment: Experiment,
    *,
    model: str | None = None,
    trials: int | None = None,
    defaults: Settings | None = None,
    weak: bool = False,
) -> Experiment:
    """The experiment with the command line's changes, validated again.

    Args:
        experiment: As loaded.
        model: In place of the experiment's; settings that only fit dummy weights go.
        trials: Of the whole study.
        defaults: Merged into the experiment's.
        weak: The experiment's own defaults win over ``defaults``.
    """
    changes: dict[str, object] = {}
    kept = experiment.defaults
    if model is not None:
        changes["model"] = model
        kept = _for_real_weights(kept)
    if trials is not None:
        changes["budget"] = experiment.budget.model_copy(update={"trials": trials})
    if defaults is not None:
        kept = merged(defaults, kept) if weak else merged(kept, defaults)
    changes["defaults"] = kept
    return Experiment.model_validate(experiment.model_copy(update=changes).model_dump(by_alias=True))


def _for_real_weights(defaults: Settings) -> Settings:
    """A user's model has weights and a tokenizer: what stands in for them goes."""
    if defaults.flags.get("load-format") != "dummy":
        return defaults
    stand_ins = ("load-format", "skip-tokenizer-init")
    flags = {name: value for name, value in defaults.flags.items() if name not in stand_ins}
    return defaults.model_copy(update={"flags": flags})
