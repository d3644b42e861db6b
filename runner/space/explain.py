"""A space in words: its knobs and conditions, how large it is, what is ruled out and why, what changes nothing."""

from collections.abc import Iterator

from runner.schema.space import Preset
from runner.space.advice import inert_labels
from runner.space.knobs import Knob
from runner.space.settings import spoken
from runner.space.space import COUNT_LIMIT, Space


def explain(space: Space) -> str:
    """What a search over ``space`` would try, as plain lines. Needs no GPU."""
    return "\n".join(
        [
            f"Search space {space.name}",
            *_surroundings(space),
            "",
            *_size(space),
            "",
            "Knobs",
            *(line for knob in space.knobs for line in _knob(space, knob)),
            *_section("Constraints", (c.text for c in space.constraints)),
            *_section("Ruled out", (f"{r.knob} = {r.label}: {r.reason}" for r in space.ruled_out)),
            *_section("Kept to fail on purpose", _kept(space)),
            *_section("Changes nothing while everything else is unset", _inert(space)),
            *_section("Mind", space.warnings),
        ]
    )


def _section(title: str, lines: Iterator[str] | tuple[str, ...]) -> list[str]:
    found = [f"  {line}" for line in lines]
    return ["", title, *found] if found else []


def _surroundings(space: Space) -> Iterator[str]:
    around = space.around
    version = ".".join(map(str, around.version))
    if around.device == "cpu":
        yield f"  on {len(around.machine.cpus)} CPUs, vLLM {version}"
    else:
        gpus = "an unknown number of GPUs" if around.gpus is None else f"{around.gpus} GPUs"
        memory = around.machine.gpu_memory_gib
        yield f"  on {gpus}{f' of {memory:.0f} GiB' if memory is not None else ''}, vLLM {version}"
    facts = around.facts
    if facts is None:
        yield "  the model's config.json is not known: nothing is ruled out by the model"
    else:
        experts = f", {facts.experts} experts" if facts.experts else ""
        mtp = f", {facts.mtp_layers} MTP layers" if facts.mtp_layers else ""
        size = facts.weight_bytes / 2**30
        yield (
            f"  model: {facts.heads} heads, {facts.kv_heads} KV heads, {facts.layers} layers{experts}{mtp}, "
            f"{size:.1f} GiB of weights"
        )


def _size(space: Space) -> Iterator[str]:
    size, count = space.size(), space.count()
    if count is not None and size is not None:
        same = size - count
        yield f"{count:,} distinct configurations can run" + (
            f"; {same:,} more are invalid or the same" if same else ""
        )
    elif size is not None:
        yield f"{size:,} combinations, too many to try each (over {COUNT_LIMIT:,}); invalid and equal ones among them"
    else:
        yield "not countable: a range is continuous"


def _knob(space: Space, knob: Knob) -> Iterator[str]:
    target = f" -> {spoken(knob.target)}" if knob.target is not None else ""
    yield f"  {knob.name}{target}"
    unset = () if knob.required else (f"({knob.unset_label})",)
    if knob.range is not None:
        step = f" step {knob.range.step}" if knob.range.step not in (None, 1) else ""
        scale = ", logarithmic" if knob.range.log else ""
        values = (*unset, f"{knob.range.low}..{knob.range.high}{step}{scale}")
    else:
        values = (*unset, *knob.labels)
    yield f"      {' | '.join(values)}"
    for parent, labels in knob.when.items():
        yield f"      only when {parent} is {' or '.join(labels)}"
    if knob.target is None:
        for option in knob.options:
            yield f"      {option.label}: {', '.join(_setting(t, v) for t, v in option.settings.items())}"


def _setting(target: tuple[str, ...], value: object) -> str:
    shown = f"<{value.preset}>" if isinstance(value, Preset) else value
    return f"{spoken(target)}={shown}"


def _kept(space: Space) -> Iterator[str]:
    for knob in space.knobs:
        for label, reason in knob.keep_failing.items():
            yield f"{knob.name} = {label}: {reason}"


def _inert(space: Space) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for knob, label in inert_labels(space):
        found.setdefault(knob.name, []).append(label)
    for name, labels in found.items():
        yield f"{name} = {', '.join(labels)}"
