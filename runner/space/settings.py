"""Settings as a flat map from target to value, so that defaults, pinned settings and knobs merge by one rule.

A target is ``("flag", NAME)``, ``("env", NAME)`` or ``("json", FLAG, KEY, ...)``: the deepest key that a structured
flag's value is set at. Knows how targets are spelt and nested, not what any of them does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from runner.schema.base import FlagValue

Target = tuple[str, ...]
State = dict[Target, Any]
"""Target -> value. A value is a scalar, a list, or, before presets are calculated, a ``Preset``."""

STRUCTURED_FLAGS = frozenset(
    {
        "compilation-config",
        "speculative-config",
        "hf-overrides",
        "attention-config",
        "kernel-config",
        "kv-transfer-config",
        "kv-events-config",
        "ec-transfer-config",
        "structured-outputs-config",
        "override-generation-config",
        "additional-config",
        "pooler-config",
        "profiler-config",
        "eplb-config",
        "aux-output-config",
        "diffusion-config",
        "ec-manager-config",
        "engram-config",
        "fault-tolerance-config",
        "quantization-config",
        "reasoning-config",
        "watermark-config",
        "weight-transfer-config",
        "ir-op-priority",
        "limit-mm-per-prompt",
        "media-io-kwargs",
        "mm-processor-kwargs",
        "model-class-overrides",
        "model-loader-extra-config",
        "default-chat-template-kwargs",
    }
)
"""Flags of ``vllm serve`` whose value is one JSON object, as 0.32 names them."""

_SHORT_FORMS = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
    "ep": "enable-expert-parallel",
    "O": "optimization-level",
    "cc": "compilation-config",
    "sc": "speculative-config",
    "q": "quantization",
}


def flag_name(written: str) -> str:
    """The one spelling of a flag that this package uses: long, with dashes, none in front.

    Raises:
        ValueError: It is written in a form that could name the same flag twice; the message says the right one.
    """
    name = written.replace("_", "-")
    bare = name.lstrip("-")
    if bare in _SHORT_FORMS:
        raise ValueError(f"write `{_SHORT_FORMS[bare]}` in full, not `{written}`")
    if name != bare or not bare or " " in bare or "=" in bare:
        raise ValueError(f"write a flag as its bare name, e.g. `{bare.split('=')[0].split(' ')[0]}`, not `{written}`")
    if "." in bare:
        raise ValueError(f"`{written}` is a field of a structured flag: set it under `json`")
    if bare.startswith("no-"):
        raise ValueError(f"write `{bare.removeprefix('no-')}: false`, not `{written}`")
    return bare


def flag_target(written: str) -> Target:
    """Target of a plain flag. Raises ValueError as ``flag_name`` does, and for structured flags."""
    name = flag_name(written)
    if name in STRUCTURED_FLAGS:
        raise ValueError(f"`{name}` takes a JSON object: set its fields under `json`")
    return ("flag", name)


def field_target(dotted: str) -> Target:
    """Target of ``FLAG.KEY.KEY``. Raises ValueError for a flag in the wrong form."""
    flag, *keys = dotted.split(".")
    if not all(keys):
        raise ValueError(f"`{dotted}` has an empty key")
    return ("json", structured_flag(flag), *(_key(flag, key) for key in keys))


def structured_flag(written: str) -> str:
    """Name of a flag whose value is a JSON object. Raises ValueError for any other."""
    name = flag_name(written)
    if name not in STRUCTURED_FLAGS and not name.endswith("-config"):  # which a newer vLLM may have
        raise ValueError(f"`{name}` takes no JSON object: set it under `flag`")
    return name


def env_target(name: str) -> Target:
    """Target of an environment variable. Raises ValueError for a name the shell could not have."""
    if not name.isidentifier() or not name.isascii():
        raise ValueError(f"`{name}` is not the name of an environment variable")
    return ("env", name)


def _key(flag: str, key: str) -> str:
    """vLLM takes dashes for underscores inside ``--speculative-config``; two spellings would be two settings."""
    return key.replace("-", "_") if flag_name(flag) == "speculative-config" else key


def flattened(
    flags: Mapping[str, Any], structured: Mapping[str, Mapping[str, Any]], env: Mapping[str, Any]
) -> Iterator[tuple[Target, Any, tuple[str, ...]]]:
    """Target, value and the place below the settings where it is written, one by one. Raises ValueError."""
    for name, value in flags.items():
        yield flag_target(name), value, ("flags", name)
    for flag, fields in structured.items():
        base = ("json", structured_flag(flag))
        yield from _leaves(base, fields, ("json", flag))
    for name, value in env.items():
        yield env_target(name), value, ("env", name)


def _leaves(
    base: Target, fields: Mapping[str, Any], written: tuple[str, ...]
) -> Iterator[tuple[Target, Any, tuple[str, ...]]]:
    for key, value in fields.items():
        target, place = (*base, _key(base[1], key)), (*written, key)
        if isinstance(value, dict) and value:
            yield from _leaves(target, value, place)
        else:
            yield target, value, place


def overlap(one: Target, other: Target) -> bool:
    """Whether setting one touches the other: they are the same, or one lies inside the other."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def assign(state: State, target: Target, value: Any) -> None:
    """Sets ``target`` in place; what it overlaps gives way."""
    if target[0] == "json" and target not in state:
        for old in [known for known in state if overlap(known, target)]:
            del state[old]
    state[target] = value


def nested(state: Mapping[Target, Any]) -> tuple[dict[str, FlagValue], dict[str, dict[str, Any]], dict[str, str]]:
    """Flags, structured flags and environment as a launch configuration holds them."""
    flags: dict[str, FlagValue] = {}
    structured: dict[str, dict[str, Any]] = {}
    env: dict[str, str] = {}
    for (kind, name, *keys), value in state.items():
        if kind == "flag":
            flags[name] = tuple(value) if isinstance(value, list) else value
        elif kind == "env":
            env[name] = value
        else:
            below = structured.setdefault(name, {})
            for key in keys[:-1]:
                below = below.setdefault(key, {})
            below[keys[-1]] = list(value) if isinstance(value, tuple) else value
    return flags, structured, env


def spoken(target: Target) -> str:
    """The target as a user writes it: ``--max-num-seqs``, ``NCCL_PROTO``, ``compilation-config.cudagraph_mode``."""
    kind, *names = target
    return f"--{names[0]}" if kind == "flag" else ".".join(names)
