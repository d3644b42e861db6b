"""Where a started server runs something else than it was asked to. Pure; knows the server's settings by their names."""

import json
from collections.abc import Iterator
from typing import Any

from runner.schema.launch import Effective, LaunchConfig
from runner.space.settings import flattened, spoken

_COLLECTIVES = frozenset(
    f"NCCL_{name}"
    for name in (
        *("PROTO", "ALGO", "NTHREADS", "LL128_NTHREADS", "BUFFSIZE", "LL_BUFFSIZE", "LL128_BUFFSIZE"),
        *("MIN_NCHANNELS", "MAX_NCHANNELS", "MIN_CTAS", "MAX_CTAS"),
    )
)
"""How NCCL does a collective."""

_OTHERS = ("CUSTOM", "FLASHINFER", "SYMM_MEM", "QUICK")
"""All-reduce backends of vLLM that leave NCCL to larger messages, as its log begins their names."""


def asked_and_effective(config: LaunchConfig, effective: Effective) -> tuple[str, ...]:
    """``max-num-seqs: asked 1024 -> effective 512`` for each asked setting that the server tells and that differs.

    A setting that the server does not tell, or tells under a name of its own, is not compared.
    """
    inert = inert_environment(config, effective)
    return tuple(
        f"{spoken(target)}: asked {_shown(value)} -> effective {_shown(real)}"
        for target, value, real in _compared(config, effective)
        if real is not None and _plain(value) != _plain(real)
    ) + tuple(
        f"{name}: asked {config.env[name]} -> inert: all-reduces take {(effective.all_reduce or ('',))[0]}"
        for name in inert
    )


def inert_environment(config: LaunchConfig, effective: Effective) -> tuple[str, ...]:
    """Variables of NCCL's that change nothing because the server's all-reduces take another backend first.

    Only where tensor parallelism alone communicates: pipelines and experts use NCCL by themselves. What is left to
    NCCL then is the gathering of logits, and all-reduces of prompts beyond the backend's limit (8 MiB for custom).
    """
    first = (effective.all_reduce or ("",))[0].upper()
    alone = not any(config.flags.get(f"{name}-parallel-size", 1) != 1 for name in ("pipeline", "data"))
    if not first.startswith(_OTHERS) or not alone or config.flags.get("enable-expert-parallel"):
        return ()
    return tuple(name for name in sorted(config.env) if name in _COLLECTIVES)


def untold(config: LaunchConfig, effective: Effective) -> dict[str, Any]:
    """What was asked for and the server does not tell: all that is known of it is the asking."""
    return {spoken(target): value for target, value, real in _compared(config, effective) if real is None}


def _compared(config: LaunchConfig, effective: Effective) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Each asked setting: its target, its value, and the server's own (None when it does not tell)."""
    by_last = _unique_by_last_name(effective)
    for target, value, _ in flattened(config.flags, config.structured, {}):
        kind, *names = (name.replace("-", "_") for name in target)
        if target[1:] == ("compilation-config", "cudagraph_mode"):
            real: Any = effective.graph_mode
        elif names[-1] == "cudagraph_capture_sizes":
            real = effective.capture_sizes
        elif kind == "json":
            real = effective.settings.get(".".join(names))
        else:
            real = by_last.get(names[0])
        yield target, value, real


def _unique_by_last_name(effective: Effective) -> dict[str, Any]:
    """Settings by the last part of their dotted name, where only one has it."""
    names = [name.rpartition(".")[2] for name in effective.settings]
    return {
        last: value for last, value in zip(names, effective.settings.values(), strict=True) if names.count(last) == 1
    }


def _plain(value: Any) -> str:
    """Spelling aside: ``torch.bfloat16`` is ``bfloat16``, a list is a tuple, ``True`` is ``true``."""
    if isinstance(value, list | tuple):
        return json.dumps(sorted(str(item) for item in value))
    return str(value).lower().removeprefix("torch.")


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | tuple) else str(value)
