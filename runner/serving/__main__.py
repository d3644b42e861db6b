"""Serves an exported profile with real vLLM, in the foreground: ``python -m runner.serving --profile profile.yaml``.

What this program does not know (``--api-key``, ``--max-model-len``, ...) goes to ``vllm serve`` after the profile's
own flags. It replaces itself by vLLM: signals, exit code and output are vLLM's own.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.errors import UsageError
from runner.schema.profile import Profile
from runner.serving.bundled import PREFIX, bundled_model_folder
from runner.serving.command import LAUNCHER, interpreter
from runner.serving.lease import LOOPBACK, is_free
from runner.serving.redaction import redact_argv
from runner.space.command import argv
from runner.space.document import read_model
from runner.space.environment import server_env

_BAD_INPUT = 2


def main(words: Sequence[str] | None = None) -> int:
    """Entry point; returns only when nothing was started."""
    options, extra = _parser().parse_known_args(words)
    try:
        command, env = prepare(options, extra)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return _BAD_INPUT
    sys.stderr.write(f"{shlex.join(redact_argv(command))}\n")
    if options.dry_run:
        return 0
    os.execve(command[0], command, env)


def prepare(options: argparse.Namespace, extra: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment for a profile.

    Raises:
        UsageError: The profile cannot be read, holds a simulated winner, or the port is taken.
    """
    profile = read_model(Path(options.profile), Profile)
    if "simulated" in profile.engine and not options.accept_simulated:
        raise UsageError(
            "this profile was chosen by a simulated engine: no real server made its numbers",
            remedy="measure for real first, or say --accept-simulated to serve the configuration all the same",
            path=options.profile,
        )
    if not is_free(options.port, options.host):
        raise UsageError(
            f"port {options.port} on {options.host} is taken or not ours to use", remedy="give another with --port"
        )
    model = options.model or profile.config.model
    if model.startswith(PREFIX):
        model = str(bundled_model_folder(model.removeprefix(PREFIX)))
    name = options.served_model_name or profile.config.model.removeprefix(PREFIX)
    served = argv(profile.config, model=model, host=options.host, port=options.port, served_name=name)
    return [interpreter(), str(LAUNCHER), *served, *extra], server_env(profile.config, os.environ)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runner.serving", description=__doc__, allow_abbrev=False)
    parser.add_argument("--profile", required=True, help="file written by `python -m runner.best --export`")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--model", help="folder or hub name, when it lies elsewhere on this machine")
    parser.add_argument("--served-model-name", help="what clients call the model (default: the profile's model)")
    parser.add_argument("--accept-simulated", action="store_true", help="serve a profile that only a simulation chose")
    parser.add_argument("--dry-run", action="store_true", help="print the command line and start nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
