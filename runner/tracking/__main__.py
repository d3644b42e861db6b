"""``python -m runner.tracking``: MLflow's UI on the results, on loopback unless told otherwise."""

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.errors import UsageError
from runner.records import results_root
from runner.tracking.runs import ARTEFACTS, DATABASE

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs MLflow's server until Ctrl-C. Returns the exit code."""
    options = _options(arguments)
    try:
        command = server_command(results_root(options.results), options.host, options.port)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    sys.stderr.write(f"MLflow on http://{options.host}:{options.port}, Ctrl-C ends it\n")
    sys.stderr.flush()
    return _until_interrupted(command)


def _until_interrupted(command: Sequence[str]) -> int:
    """In a session of its own: MLflow's command line answers a terminal's Ctrl-C with pages of traceback."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    # Its job runners (for evaluations of models) would be seven more processes that nobody needs here.
    server = subprocess.Popen(
        command, start_new_session=True, env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    )
    try:
        return server.wait()
    except KeyboardInterrupt:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        return 0


def server_command(root: Path, host: str, port: int) -> list[str]:
    """MLflow's server on the stores of ``root``.

    Raises:
        UsageError: Nothing was tracked there yet, or the port is taken.
    """
    database = root / DATABASE
    if not database.is_file():
        raise UsageError("nothing was tracked here yet", remedy="Run a sweep first, or name its --results.", path=root)
    with socket.socket() as probe:
        # As the server will bind: a port that only waits for old connections to be forgotten is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as taken:
            raise UsageError(
                f"{host}:{port} cannot be used: {taken.strerror}", remedy="Give another one: make ui PORT=5001."
            ) from taken
    store, artefacts = f"sqlite:///{database}", (root / ARTEFACTS).as_uri()
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", store, "--default-artifact-root", artefacts),
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runner.tracking", description="MLflow's UI on the results.")
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1; MLflow asks nobody for a password")
    parser.add_argument("--results", type=Path, help="results folder (default: $TOK100_RESULTS, else ./results)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
