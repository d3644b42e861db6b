"""Warnings about a space: knobs that change nothing on the path that runs, values that are known to be trouble."""

from collections.abc import Iterator
from typing import Any

from runner.schema.base import Scalar
from runner.schema.space import Preset
from runner.space import fields, variables
from runner.space.allreduce import fuses_across_stages, takes_nccl
from runner.space.architectures import breakable_graphs
from runner.space.feasibility import activation
from runner.space.knobs import Knob
from runner.space.settings import Target, spoken
from runner.space.space import Space
from runner.space.surroundings import COVERED_VERSIONS, LAST_COVERED, PROTECTIVE, Reading, whole_numbers

_SAFE_UTILISATION = 0.95
"""Above it graph capture runs out of memory although the KV cache fitted (vLLM issues 57475, 19186, 11251)."""

_OWN_CEILING = 512
"""Largest step, in tokens, that vLLM captures by itself (1024 on datacentre Blackwell)."""

_PATH_SETTINGS = (
    "disable-custom-all-reduce: true, VLLM_ALLREDUCE_USE_SYMM_MEM=0, VLLM_ALLREDUCE_USE_FLASHINFER=0 and "
    "compilation-config.pass_config.fuse_allreduce_rms: false"
)


def warnings_for(space: Space) -> tuple[str, ...]:
    """What a user should know before a study starts, one sentence each."""
    return tuple(
        dict.fromkeys(
            [
                *_version(space),
                *_baseline(space),
                *_collectives(space),
                *_compilation(space),
                *_stages(space),
                *_values(space),
                *_names(space),
                *_queues(space),
                *_graphs(space),
            ]
        )
    )


def inert_labels(space: Space) -> Iterator[tuple[Knob, str]]:
    """Labels that change nothing where every other knob is unset; with other knobs set they may."""
    for knob in space.knobs:
        _, params = activation(space, knob)
        for label in () if knob.required else knob.labels:
            alone, _ = space.judged(space.completed({**params, knob.name: label}))
            without, _ = space.judged(space.completed(params))
            if alone is not None and without is not None and space.key(alone) == space.key(without):
                yield knob, label


def _version(space: Space) -> Iterator[str]:
    first, last = COVERED_VERSIONS
    if not first <= space.around.version <= LAST_COVERED:
        version, since, until = (".".join(map(str, shown)) for shown in (space.around.version, first[:2], last[:2]))
        yield f"vLLM {version} is outside {since} to {until}, which the rules were written for"


def _baseline(space: Space) -> Iterator[str]:
    _, reasons = space.judged({})
    if reasons:
        yield f"the baseline cannot run ({reasons[0]}): no gain can be claimed over it"


def _settings(space: Space) -> Iterator[tuple[Knob, str, Target, Any]]:
    for knob in space.knobs:
        for option in knob.options:
            for target, value in option.settings.items():
                yield knob, option.label, target, value
        if knob.range is not None and knob.target is not None:
            yield knob, str(knob.range.high), knob.target, knob.range.high


def _collectives(space: Space) -> Iterator[str]:
    for knob in space.knobs:
        names = sorted(
            t[1] for t in knob.targets if t[0] == "env" and t[1].startswith("NCCL_") and t[1] not in PROTECTIVE
        )
        if not names:
            continue
        reading = Reading(_reached(space, knob), space.around)
        if space.around.device == "cpu":
            yield f"`{knob.name}` ({', '.join(names)}) changes nothing: there is no NCCL on a CPU"
        elif not takes_nccl(reading):
            yield (
                f"`{knob.name}` ({', '.join(names)}) hardly changes anything: all-reduces of decode steps take another "
                f"path than NCCL; make it conditional on {_PATH_SETTINGS}"
            )
        elif not _may_be_parallel(space, reading):
            yield f"`{knob.name}` ({', '.join(names)}) changes nothing: a single GPU has nobody to talk to"
        if "NCCL_P2P_DISABLE" in names and reading.flag("disable-custom-all-reduce") is not True:
            yield f"`{knob.name}`: NCCL_P2P_DISABLE does not stop vLLM's custom all-reduce from using peer-to-peer"


def _reached(space: Space, knob: Knob) -> dict[Target, Any]:
    """Settings that hold at least whenever ``knob`` exists."""
    _, params = activation(space, knob)
    by_name = {k.name: k for k in space.knobs}
    state = dict(space.base)
    for name, value in params.items():
        state.update(by_name[name].settings(value))
    return state


def _may_be_parallel(space: Space, config: Reading) -> bool:
    sizes = {("flag", "tensor-parallel-size"), ("flag", "pipeline-parallel-size"), ("flag", "data-parallel-size")}
    return config.world > 1 or any(sizes & knob.targets for knob in space.knobs)


def _compilation(space: Space) -> Iterator[str]:
    base = Reading(space.base, space.around)
    eager = base.eager and not any(("flag", "enforce-eager") in knob.targets for knob in space.knobs)
    for knob in space.knobs:
        fields = {target[1:3] for target in knob.targets}
        if not knob.targets:
            continue
        if eager and all(field[0] in ("compilation-config", "optimization-level") for field in fields):
            yield f"`{knob.name}` changes nothing: the experiment sets enforce-eager, which wins"
        elif breakable_graphs(base) and fields <= {
            ("compilation-config", "mode"),
            ("compilation-config", "pass_config"),
        }:
            name = space.around.facts.architecture if space.around.facts else None
            yield f"`{knob.name}` changes nothing: vLLM does not compile {name or 'models with breakable graphs'}"


def _stages(space: Space) -> Iterator[str]:
    """Whether something that is tried fuses all-reduces across pipeline stages without having been asked to."""
    for params in _splits(space) if space.around.device == "gpu" else ():
        config = Reading(space.state(params), space.around)
        if fuses_across_stages(config) and not space.judged(params)[1]:
            yield (
                f"TP {config.tensor_parallel} x PP {config.pipeline_parallel}: all-reduce fusion, on by itself on "
                "Hopper and Blackwell, is known to hang there at warm-up; set "
                "compilation-config.pass_config.fuse_allreduce_rms: false"
            )
            return


def _splits(space: Space) -> Iterator[dict[str, Scalar]]:
    """The baseline, and every choice of what sets the parallel sizes, with no more beside it than it needs."""
    sizes = {("flag", "tensor-parallel-size"), ("flag", "pipeline-parallel-size")}
    found: list[dict[str, Scalar]] = [{}]
    for knob in (knob for knob in space.knobs if sizes & knob.targets):
        _, needed = activation(space, knob)
        values = knob.labels if knob.range is None else (knob.range.low, knob.range.high)
        found += [{**needed, **params, knob.name: value} for params in found for value in values]
    for params in map(space.completed, found):
        if all(space.is_active(knob, params) for knob in space.knobs if knob.name in params):
            yield params


def _graphs(space: Space) -> Iterator[str]:
    """Batches of the ladder that would run without a graph, and graphs that no batch would use."""
    base = Reading(space.base, space.around)
    sizes = whole_numbers(
        base.field("compilation-config", "cudagraph_capture_sizes") or base.flag("cudagraph-capture-sizes")
    )
    largest = base.count("max-cudagraph-capture-size")
    if space.around.device == "cpu" or base.eager or base.flag("optimization-level") == 0:
        return
    seqs, most = base.max_seqs, max(space.around.ladder, default=0)
    if sizes and seqs is not None and not base.draft_tokens and max(sizes) > seqs:
        yield f"capture sizes above max-num-seqs ({seqs}) serve only steps that read prompts: start-up time and memory"
    movable = any("cudagraph" in target[-1] for knob in space.knobs for target in knob.targets)
    ceiling = max(sizes) if sizes else largest or _OWN_CEILING
    tokens = most * (1 + base.draft_tokens)
    if tokens > ceiling and not movable:
        yield f"at concurrency {most} a step has {tokens} tokens, graphs end at {ceiling}: larger ones run without"


def _values(space: Space) -> Iterator[str]:
    for knob, label, target, value in _settings(space):
        if isinstance(value, Preset):
            continue
        if target == ("flag", "optimization-level") and value == 3:
            yield f"`{knob.name}` {label}: -O3 is the same as -O2; it is launched once for both"
        number = value if isinstance(value, int | float) else 0
        if target == ("flag", "gpu-memory-utilization") and number > _SAFE_UTILISATION:
            yield f"`{knob.name}` {label}: above {_SAFE_UTILISATION} graph capture is known to run out of memory"
        if target == ("env", "NCCL_PROTO") and "LL128" in value and not value.startswith("^"):
            yield f"`{knob.name}` {label}: LL128 corrupts data where NCCL would not choose it by itself (no NVLink)"
        if target == ("env", "NCCL_SHM_DISABLE") and value == "1":
            yield f"`{knob.name}` {label}: with peer-to-peer off too only sockets are left, slow enough to look hung"
        if target == ("flag", "stream-interval") and number > 1:
            yield f"`{knob.name}` {label}: several tokens arrive at once, so latencies between tokens mean less"


def _names(space: Space) -> Iterator[str]:
    for target in sorted({*space.base, *(target for knob in space.knobs for target in knob.targets)}):
        if target[0] == "env" and variables.unlisted(target[1]):
            yield f"{target[1]} is none of the variables that vLLM 0.32 and 0.33 list: it may change nothing"
        if target[0] == "json" and fields.unlisted(target[1:]):
            yield f"{spoken(target)} is none of the fields that vLLM 0.24 to 0.33 list: it may be refused at start"


def _queues(space: Space) -> Iterator[str]:
    most = max(space.around.ladder, default=0)
    low = [label for knob, label, target, value in _settings(space) if _few_seqs(target, value, most)]
    if low:
        yield f"max-num-seqs {', '.join(low)}: below the ladder's highest concurrency {most}, so requests wait there"


def _few_seqs(target: Target, value: Any, most: int) -> bool:
    return target == ("flag", "max-num-seqs") and isinstance(value, int) and value < most
