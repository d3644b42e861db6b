"""The event splitter, wherever the network cuts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.load.sse import EventSplitter, decode_chunk, has_text

PAYLOADS = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=6)


def fed(data: bytes, cuts: list[int]) -> list[bytes]:
    """Feed ``data`` cut at ``cuts``."""
    splitter = EventSplitter()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [event for start, end in itertools.pairwise(edges) for event in splitter.feed(data[start:end])]


@given(payloads=PAYLOADS, cuts=st.lists(st.integers(0, 10_000)), eol=st.sampled_from(["\n", "\r\n", "\r"]))
def test_events_do_not_depend_on_the_cuts(payloads: list[str], cuts: list[int], eol: str) -> None:
    """Any text, any line end, comments between, cut anywhere (also inside a character): the same payloads."""
    data = "".join(f": ping{eol}{eol}event: x{eol}data: {text}{eol}{eol}" for text in payloads).encode()
    assert fed(data, cuts) == [text.encode() for text in payloads]


def test_several_data_lines_make_one_payload() -> None:
    """They are joined by a line feed; one space after the colon is taken off, and only one."""
    assert fed(b"data: a\ndata:b\ndata:  c\n\n", []) == [b"a\nb\n c"]


def test_an_event_that_never_ended_is_none() -> None:
    """Without its blank line an event is not dispatched."""
    assert fed(b"data: a\n\ndata: b\n", []) == [b"a"]


def test_two_events_at_once() -> None:
    """Both come out of one feed."""
    assert fed(b"data: a\n\ndata: b\n\n", []) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"choices":[{"text":"a"}]}', True),
        (b'{"choices":[{"text":""}]}', False),
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        (b'{"choices":[{"delta":{"content":"a"}}]}', True),
        (b'{"choices":[{"delta":{"reasoning_content":"a"}}]}', True),
        (b'{"choices":[]}', False),
    ],
)
def test_text_is_seen_in_both_apis(payload: bytes, expected: bool) -> None:
    """A role-only first chunk is no token."""
    assert has_text(payload) is expected


def test_nulls_are_absent() -> None:
    """``usage: null`` and ``error: null`` say nothing."""
    chunk = decode_chunk(b'{"choices":[],"usage":null,"error":null,"other":{"x":[1]}}')
    assert chunk.usage is None
    assert chunk.error is None
