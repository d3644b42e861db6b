"""Where studies lie, and which one was written last."""

import os
from pathlib import Path

RESULTS_VARIABLE = "TOK100_RESULTS"
RECORDS = "trials.jsonl"
COMMITTED = frozenset({"recorded", "bench"})
"""Folders of ``results/`` that are committed for others to read; they count only when named."""


def results_root(given: Path | str | None) -> Path:
    """``given``, else ``$TOK100_RESULTS``, else ``results`` of the current folder; absolute."""
    return Path(given or os.environ.get(RESULTS_VARIABLE) or "results").expanduser().absolute()


def studies(root: Path) -> tuple[Path, ...]:
    """Folders of studies under ``root``, last written first; committed ones never count."""
    found = [path.parent for path in root.glob(f"*/{RECORDS}") if path.parent.name not in COMMITTED]
    return tuple(sorted(found, key=lambda folder: (folder / RECORDS).stat().st_mtime_ns, reverse=True))


def latest_study(root: Path) -> Path | None:
    """The study last written on this machine, or None."""
    return next(iter(studies(root)), None)
