"""What the documents say can be done: every command and every file named in them is there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "results/README.md")
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS if (ROOT / name).is_file()}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


def code(text: str) -> str:
    """Code blocks and code spans of a document."""
    indented = re.findall(r"^ {4}.*$", text, re.M)
    fenced = re.findall(r"```.*?```", text, re.S)
    return "\n".join([*indented, *fenced, *re.findall(r"`([^`\n]+)`", text)])


COMMANDS = sorted(
    {(name, word) for name, text in TEXT.items() for word in re.findall(r"\bmake ([a-z][a-z-]+)", code(text))}
)
MODULES = sorted(
    {
        (name, module, flags)
        for name, text in TEXT.items()
        for module, flags in re.findall(r"python -m (runner\.[a-z.]+)([^\n`#]*)", code(text))
    }
)


def test_the_documents_are_there_and_name_commands() -> None:
    """The README's first screen has the two commands."""
    first_screen = "\n".join(TEXT["README.md"].splitlines()[:40])
    assert "make sweep SPACE=cpu.yaml" in first_screen
    assert "make test" in first_screen


@pytest.mark.parametrize(("name", "target"), COMMANDS)
def test_every_make_target_named_exists(name: str, target: str) -> None:
    """``make X`` in a document is a target."""
    assert target in TARGETS, f"{name} names `make {target}`"


@pytest.mark.parametrize(("name", "module", "flags"), MODULES)
def test_every_module_named_exists_and_takes_the_flags_named(name: str, module: str, flags: str) -> None:
    """``python -m runner.X --flag`` in a document: the module is there and its help names the flag."""
    assert importlib.util.find_spec(module) is not None, f"{name} names {module}"
    wanted = set(re.findall(r"--[a-z-]+", flags))
    if not wanted:
        return
    helped = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert wanted <= set(re.findall(r"--[a-z-]+", helped.stdout)), f"{name}: {module}{flags}"


@pytest.mark.parametrize("name", sorted(TEXT))
def test_every_file_named_exists(name: str) -> None:
    """Paths in code spans that look like files of the project are there."""
    spans = re.findall(
        r"`((?:runner|experiments|search_spaces|tests|requirements|results/recorded)/[\w./-]+)`", TEXT[name]
    )
    missing = [span for span in spans if not (ROOT / span).exists()]
    assert not missing


@pytest.mark.parametrize("name", sorted(TEXT))
def test_every_link_within_the_project_leads_somewhere(name: str) -> None:
    """Relative links of a document are files."""
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", TEXT[name])
    missing = [link for link in links if not ((ROOT / name).parent / link).exists()]
    assert not missing
