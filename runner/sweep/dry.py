"""``--dry-run`` and ``--explain``: what would happen, as text. Starts nothing."""

import os
import shlex
from pathlib import Path

import yaml
from rich.console import Console

from runner.schema.launch import TrialOrder
from runner.serving.command import command, environment, served_name
from runner.serving.gpu import gpus
from runner.serving.redaction import redact_env
from runner.serving.server import limits_of
from runner.space import Knob, Space
from runner.space.surroundings import PROTECTIVE
from runner.sweep.plan import Plan

PORT = 8000
SOCKETS = "/tmp/t100"
"""Shown in place of the port that a trial will lease, and of the folder it will make."""


def print_dry_run(plan: Plan, order: TrialOrder, console: Console) -> None:
    """Prints the first trial's exact command line and environment, the knobs, and the resolved experiment."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"study {plan.study}: {plan.experiment.budget.trials} trials, ladder {list(plan.experiment.ladder)}")
    words = command(order, port=PORT, served_name=served_name(order))
    say(f"\nfirst trial, the baseline ({order.config.gpus} GPUs), fingerprint {order.config.fingerprint}:")
    say(f"  {shlex.join(words)}")
    say("environment on top of PATH, HOME, caches and proxies:")
    for name, value in sorted(own_environment(order).items()):
        say(f"  {name}={value}")
    say("(port, served name and the folder for sockets are drawn anew at each start)")
    say("\nknobs (each may be unset too, unless it says required):")
    for knob in plan.space.knobs:
        say(f"  {knob_line(plan.space, knob)}")
    say("\nexperiment, resolved:")
    say(_indented(yaml.safe_dump(plan.experiment.model_dump(mode="json", by_alias=True), sort_keys=False)))
    say("nothing was started")


def own_environment(order: TrialOrder) -> dict[str, str]:
    """What the server gets beside what this shell gives every program: set here, chosen, or passed on to protect."""
    ids = tuple(gpu.id for gpu in gpus())[: order.config.gpus]
    env = environment(order, os.environ, ids, sockets=Path(SOCKETS), ready_s=limits_of(order).total_s)
    chosen = {*order.config.env, *order.allow_env, *PROTECTIVE}
    return redact_env({name: value for name, value in env.items() if name in chosen or os.environ.get(name) != value})


def knob_line(space: Space, knob: Knob) -> str:
    """One knob in one line: where it goes, what it may be, under which condition."""
    values = ", ".join(knob.labels) if knob.range is None else str(knob.range)
    when = "".join(f", when {name} is {' or '.join(wanted)}" for name, wanted in knob.when.items())
    return f"{knob.name}: {values}{' (required)' if knob.required else ''}{when}"


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
