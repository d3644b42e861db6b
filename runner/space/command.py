"""A configuration as the words of ``vllm serve``: a list, never a shell string."""

import json

from runner.schema.base import FlagValue
from runner.schema.launch import LaunchConfig


def argv(config: LaunchConfig, *, model: str, host: str, port: int, served_name: str) -> list[str]:
    """Words after ``vllm``; the same configuration always gives the same words, flags in alphabetical order.

    Args:
        config: What to launch.
        model: What ``vllm serve`` is given as MODEL.
        host: Address to listen on.
        port: Port to listen on.
        served_name: Name that ``/v1/models`` will list.
    """
    words = ["serve", model, "--host", host, "--port", str(port), "--served-model-name", served_name]
    for name, value in sorted(config.flags.items()):
        words += _flag_words(name, value)
    for name, fields in sorted(config.structured.items()):
        words += [f"--{name}", json.dumps(fields, sort_keys=True, separators=(",", ":"))]
    return words


def _flag_words(name: str, value: FlagValue) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)]
    text = str(value)
    # A value that starts with a dash would be read as a flag of its own.
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
