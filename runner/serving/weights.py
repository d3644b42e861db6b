"""How large a model's weights are: from its folder or the hub's cache, without the hub's library and any network."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from runner.schema.launch import LaunchConfig

_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_OF = re.compile(r"-of-(\d+)(\.\w+)$")


def weights_gib(model: str, config: LaunchConfig, env: Mapping[str, str]) -> float | None:
    """Size of a model's weight files, GiB.

    Args:
        model: Folder or hub name, as the server is given it.
        config: May name a revision of the model and a folder for downloads.
        env: Of the server; says where the hub's cache is.

    Returns:
        0 when the folder holds none (dummy weights); None when it is unknown, since some are still to be downloaded.
    """
    if Path(model).is_dir():
        return _gib(_weight_files(Path(model)))
    cache = Path(str(config.flags.get("download-dir") or _hub_cache(env)))
    snapshot = _snapshot(cache / f"models--{model.replace('/', '--')}", str(config.flags.get("revision", "main")))
    files = [] if snapshot is None else _weight_files(snapshot)
    return _gib(files) if files and _are_all(files) else None


def _hub_cache(env: Mapping[str, str]) -> Path:
    """As huggingface_hub/constants.py has it."""
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"]).expanduser()
    caches = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(env.get("HF_HOME") or caches / "huggingface").expanduser() / "hub"


def _snapshot(repository: Path, revision: str) -> Path | None:
    """The cached folder of a branch, tag or commit; None when there is none."""
    reference = repository / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = repository / "snapshots" / commit
    return folder if folder.is_dir() else None


def _weight_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file()]


def _are_all(files: list[Path]) -> bool:
    """Whether every part is there, going by names such as ``model-00002-of-00030.safetensors``."""
    parts = Counter(match.groups() for path in files if (match := _OF.search(path.name)))
    return all(count >= int(total) for (total, _), count in parts.items())


def _gib(files: list[Path]) -> float:
    return sum(path.stat().st_size for path in files) / 2**30
