"""The log on disk: capped, cleaned, readable while it grows, harmless when the disk is full."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from runner.serving.log import CappedLog, LogFollower


def same(text: str) -> str:
    return text


def test_a_small_log_is_kept_whole(tmp_path: Path) -> None:
    """Lines arrive in any pieces; carriage returns end lines too; the file is the user's only."""
    path = tmp_path / "log"
    log = CappedLog(path, same)
    for piece in (b"one\ntw", b"o\n10%\r20%\r", b"last"):
        log.feed(piece)
    log.close()
    assert path.read_text() == "one\ntwo\n10%\n20%\nlast\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_large_log_keeps_head_and_tail(tmp_path: Path) -> None:
    """What is left out is counted, and the newest lines survive."""
    path = tmp_path / "log"
    log = CappedLog(path, same, head_bytes=100, tail_bytes=100)
    for number in range(1000):
        log.feed(f"line {number:04}\n".encode())
    log.close()
    lines = path.read_text().splitlines()
    assert lines[0] == "line 0000"
    assert lines[-1] == "line 0999"
    assert any("bytes left out" in line for line in lines)
    assert path.stat().st_size < 400


def test_every_line_is_cleaned(tmp_path: Path) -> None:
    """Also the last one without an end, and one that arrives in pieces."""
    path = tmp_path / "log"
    log = CappedLog(path, lambda text: text.replace("secret", "***"))
    log.feed(b"a sec")
    log.feed(b"ret\nthe sec")
    log.feed(b"ret")
    log.close()
    assert path.read_text() == "a ***\nthe ***\n"


def test_a_full_disk_costs_text_only(tmp_path: Path) -> None:
    """The writer goes on, and says what happened."""
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log = CappedLog(path, same)
    log.feed(b"one\n")
    log.feed(b"two\n")
    log.close()
    assert log.error is not None
    assert "No space left" in log.error


@given(st.lists(st.binary(max_size=30), max_size=30))
def test_a_follower_sees_every_line_once(pieces: list[bytes]) -> None:
    """However the writes are cut, the lines read are those of the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        log, follower, seen = CappedLog(path, same), LogFollower(path), []
        for piece in pieces:
            log.feed(piece)
            seen += follower.lines()
        log.close()
        seen += follower.lines()
        wanted = [line for line in path.read_bytes().decode(errors="replace").split("\n") if line.strip()]
        assert seen == wanted
