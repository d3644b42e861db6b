"""The bundled model's folder: whole or made again, by one caller at a time. Needs the `cpu` extra."""

import json
import threading
from pathlib import Path

import pytest

from runner.errors import UsageError
from runner.serving import bundled
from runner.serving.bundled import MANIFEST, bundled_model_folder, cache_folder, is_whole

NAME = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, with a conversion that only writes two small files and counts its calls."""
    monkeypatch.setenv("TOK100_CACHE", str(tmp_path / "cache"))

    def convert(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights")
        with (tmp_path / "conversions").open("a") as file:
            file.write("x")

    monkeypatch.setattr(bundled, "_convert", convert)
    return tmp_path


def conversions(cache: Path) -> int:
    return len((cache / "conversions").read_text())


def test_made_once_then_reused(cache: Path) -> None:
    """The second call finds it whole; the licence stands beside the weights."""
    folder = bundled_model_folder(NAME)
    assert folder == bundled_model_folder(NAME.upper())
    assert conversions(cache) == 1
    assert "Apache-2.0" in (folder / "LICENCE.txt").read_text()
    assert folder.is_relative_to(cache_folder())


@pytest.mark.parametrize("damage", ["changed", "missing", "no manifest", "bad manifest", "older format"])
def test_a_damaged_folder_is_made_again(cache: Path, damage: str) -> None:
    """Every kind of damage is found by hash and mended."""
    folder = bundled_model_folder(NAME)
    manifest = json.loads((folder / MANIFEST).read_text())
    match damage:
        case "changed":
            (folder / "model.safetensors").write_bytes(b"Weights")
        case "missing":
            (folder / "config.json").unlink()
        case "no manifest":
            (folder / MANIFEST).unlink()
        case "bad manifest":
            (folder / MANIFEST).write_text("{")
        case _:
            (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 0}))
    assert bundled_model_folder(NAME) == folder
    assert conversions(cache) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_concurrent_callers_convert_once(cache: Path) -> None:
    """All get the same whole folder."""
    threads = [threading.Thread(target=bundled_model_folder, args=(NAME,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert conversions(cache) == 1


def test_a_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half-made folder is ever served."""

    def fail(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise UsageError("no")

    monkeypatch.setattr(bundled, "_convert", fail)
    with pytest.raises(UsageError):
        bundled_model_folder(NAME)
    assert [path.name for path in (cache_folder() / "models").iterdir()] == [f"{NAME}.lock"]


def test_an_unknown_name_lists_the_known() -> None:
    """The message says what there is."""
    with pytest.raises(UsageError, match=NAME):
        bundled_model_folder("gpt-5")


def test_another_source_is_another_model(cache: Path) -> None:
    """A newer package is converted anew."""
    folder = bundled_model_folder(NAME)
    other = cache / "other.gguf"
    other.write_bytes(b"another file")
    assert not is_whole(folder, other)
