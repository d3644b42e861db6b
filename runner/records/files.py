"""Writing that a crash, a kill or a full disk cannot half-do. Knows paths and bytes, not what they mean."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.errors import StoreError, UsageError

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_folder(path: Path) -> None:
    """Makes ``path`` readable by its owner only; parents that are missing too.

    Raises:
        StoreError: It cannot be made.
    """
    with _writing(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def write_beside(path: Path, content: bytes) -> None:
    """Replaces ``path`` by ``content`` in one step: written beside it, fsynced, renamed. Mode 0600.

    Raises:
        StoreError: It cannot be written; the old content, if any, still stands.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _writing(path):
        try:
            beside.unlink(missing_ok=True)
            _write_new(beside, content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Appends one line and fsyncs it; on any failure the file is cut back to what it was.

    Raises:
        StoreError: It cannot be written.
    """
    if b"\n" in line:
        raise ValueError("a line holds no line feed")
    with _writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, line + b"\n")
                os.fsync(descriptor)
                if size == 0:
                    sync_folder(path.parent)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


def make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Makes the database ``path`` by ``make`` unless it is there: in a folder beside it, then moved in one step.

    Makers of databases take a second and many transactions; killed in the middle, they leave one that nobody can open.
    Two processes that want the same one wait for each other.

    Args:
        path: Where it shall lie.
        make: Makes it at the path it is given, and has closed it when it returns.

    Raises:
        StoreError: It cannot be written.
    """
    workshop = path.with_name(f".{path.name}.new")
    with _writing(path):
        waiting = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(waiting, fcntl.LOCK_EX)
            if path.exists() and path.stat().st_size > 0:
                return
            shutil.rmtree(workshop, ignore_errors=True)
            workshop.mkdir(mode=FOLDER_MODE)
            beside = workshop / path.name
            beside.touch(mode=FILE_MODE)
            make(beside)
            beside.replace(path)
            sync_folder(path.parent)
            workshop.rmdir()
        finally:
            os.close(waiting)


def sync_folder(folder: Path) -> None:
    """Makes a rename or a new file in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path: Path) -> int:
    """Takes the lock file at ``path`` for this process; returns the descriptor that holds it until it is closed.

    The kernel lets go when the process ends, however it ends, so a lock is never stale.

    Raises:
        UsageError: Another live process holds it.
        StoreError: The file cannot be made.
    """
    with _writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as taken:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise UsageError(
            f"another sweep (process {holder or 'unknown'}) is writing this study",
            remedy="Wait for it, or give this one another name with STUDY=.",
            path=path.parent,
        ) from taken
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        _write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            remedy = "Free some space and run the same command again: nothing that was finished is lost."
            raise StoreError("cannot be written: the disk is full", path, remedy) from error
        raise StoreError(f"cannot be written: {error.strerror or error}", path) from error
