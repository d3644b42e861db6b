"""What the installed ``vllm serve`` knows: its flags, from its own help, asked once per installed version.

The only part of this room that starts a process; ``flags_of_help`` is pure.
"""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from runner.errors import UsageError

_HELP_TIMEOUT_S = 180.0
"""Printing its help makes vLLM import torch: 10 to 45 s on a small machine."""

_OPTION = re.compile(r"^ {2}(-{1,2}[A-Za-z].*)$")
_NAME = re.compile(r"(?:^|, )--([A-Za-z0-9][A-Za-z0-9_.-]*)")


def flags_of_help(text: str) -> frozenset[str]:
    """Names of all long options in argparse's help, without dashes; ``--no-x`` as ``no-x``."""
    names: set[str] = set()
    for line in text.splitlines():
        option = _OPTION.match(line)
        if option is not None:
            names.update(found.replace("_", "-") for found in _NAME.findall(option[1]))
    return frozenset(names)


def installed_flags(command: Sequence[str], version: str, cache: Path) -> frozenset[str]:
    """Flags that the installed ``vllm serve`` takes; the help is only asked for when ``cache`` has no answer yet.

    Args:
        command: What runs vLLM's command line, e.g. ``[python, launcher.py]``.
        version: Of the installed vLLM; each version has its own answer.
        cache: Folder for the answers.

    Raises:
        UsageError: The help cannot be had: vLLM is missing or broken.
    """
    answer = _answer(version, cache)
    if answer.is_file():
        return frozenset(json.loads(answer.read_text(encoding="utf-8")))
    flags = flags_of_help(_help([*command, "serve", "--help=all"]))
    if not flags:
        raise UsageError(f"`{' '.join(command)} serve --help=all` names no flag", remedy="is it vLLM's command line?")
    cache.mkdir(parents=True, exist_ok=True)
    beside = answer.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps(sorted(flags)), encoding="utf-8")
    beside.replace(answer)
    return flags


def is_known(version: str, cache: Path) -> bool:
    """Whether ``installed_flags`` has its answer already and need not start vLLM."""
    return _answer(version, cache).is_file()


def _answer(version: str, cache: Path) -> Path:
    return cache / f"vllm-serve-flags-{re.sub(r'[^A-Za-z0-9.+-]', '_', version)}.json"


def _help(command: Sequence[str]) -> str:
    remedy = "install vLLM (`make sweep` does), or name a Python that has it with PYTHON="
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_HELP_TIMEOUT_S, check=False)
    except OSError as error:
        raise UsageError(f"cannot run `{command[0]}`: {error.strerror}", remedy=remedy) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"`vllm serve --help` gave no answer in {_HELP_TIMEOUT_S:.0f} s", remedy=remedy) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"`vllm serve --help` failed: {last}", remedy=remedy)
    return done.stdout
