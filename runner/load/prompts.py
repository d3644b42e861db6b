"""What request bodies are cut from: real English text, random token ids, or a user's file.

Runs in the parent, once a server for text (its tokens are the server's own) and once a cell for random ids. The
client processes draw from it (``bodies.py``).
"""

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from pydoc_data import topics
from random import Random
from typing import Any

from runner.errors import UsageError
from runner.load.server import Server
from runner.load.wire import Lengths, Listed, Passages
from runner.schema.experiment import Length, Normal, Uniform, Workload

TEXT_TOKENS = 16_384
"""Least row of text; a longer one is only made for longer prompts."""

TEXT_CHARS_PER_TOKEN = 6
"""More than English has with any current tokenizer (about 4.5), so that the row is long enough."""

TOKENIZE_CHARS = 8_000
"""Text sent to ``/tokenize`` at once; short, because a server may hold it against its context length."""

SAMPLE_WORDS = 400
"""Words that the tokens per word are measured on, where prompts go out as text."""

WORDS_PER_TOKEN = 0.75
"""Where the server tells nothing. Source: the rule of thumb in OpenAI's tokenizer page (100 tokens ~ 75 words)."""

_SHARED_SEED = "shared prefix"


def lengths(length: Length) -> Lengths:
    """The experiment's length, as the client processes draw it."""
    if isinstance(length, Uniform):
        return Lengths(length.low, length.high)
    if isinstance(length, Normal):
        return Lengths(length.low, length.high, length.mean, length.stddev)
    return Lengths(length, length)


class Source:
    """Prompts of one workload for one server.

    Attributes:
        template_tokens: What the server's chat template adds to each text, once a cell was asked for.
    """

    def __init__(self, workload: Workload, server: Server) -> None:
        self._workload = workload
        self._server = server
        self.template_tokens = 0
        self._text: Passages | None = None
        self._file: list[str] | None = None

    def for_cell(self, seed: int, processes: int) -> list[Passages] | list[Listed]:
        """Prompts of one cell, one item a process.

        Raises:
            UsageError: The file cannot be used, or random ids lack a vocabulary.
        """
        workload = self._workload
        if workload.prompts == "file":
            return self._listed(seed, processes)
        if workload.prompts == "random_tokens":
            return [self._random(seed)] * processes
        if self._text is None:
            self._text = self._real_text()
        return [self._text] * processes

    def _random(self, seed: int) -> Passages:
        workload = self._workload
        vocabulary = workload.vocabulary or self._server.target.vocabulary
        if workload.endpoint != "completions":
            raise UsageError("prompts: random_tokens are token ids", remedy="use endpoint: completions")
        if vocabulary is None:
            raise UsageError("prompts: random_tokens need the size of the vocabulary", remedy="set `vocabulary`")
        # Special tokens sit at both ends of a vocabulary; an image or control token would change the work.
        ids = range(min(256, vocabulary // 8), max(vocabulary * 7 // 8, 1))
        shared = Random(_SHARED_SEED).choices(ids, k=workload.shared_prefix_tokens)
        row = Random(seed).choices(ids, k=max(TEXT_TOKENS, 2 * self._longest()))
        return self._of_ids(shared + row)

    def _real_text(self) -> Passages:
        words = list(_words(max(TEXT_TOKENS, 2 * self._longest()) * TEXT_CHARS_PER_TOKEN))
        if self._workload.endpoint == "completions":
            ids = self._tokenized(words)
            if ids is not None:
                return self._of_ids(ids)
        per_token = self._words_per_token(words[:SAMPLE_WORDS])
        encoded = [json.dumps(word)[1:-1].encode() for word in words]
        chat = self._workload.endpoint == "chat"
        self.template_tokens = max((self._chat_tokens("a") or 0) - 1, 0) if chat else 0
        return self._passages(
            encoded,
            separator=b" ",
            ends=(b'[{"role":"user","content":"', b'"}]') if chat else (b'"', b'"'),
            units_per_token=per_token,
        )

    def _tokenized(self, words: list[str]) -> list[int] | None:
        limit = min(TOKENIZE_CHARS, 2 * (self._server.target.max_model_len or TOKENIZE_CHARS))
        ids: list[int] = []
        for piece in _pieces(words, limit):
            found = self._server.token_ids(piece)
            if not found:
                return None
            ids += found
        return ids

    def _words_per_token(self, words: list[str]) -> float:
        text = " ".join(words)
        found = self._server.token_ids(text)
        if found:
            return len(words) / len(found)
        if self._workload.endpoint == "chat":
            count = self._chat_tokens(text)
        else:
            asked = {"model": self._server.target.model, "max_tokens": 1, "prompt": text}
            count = self._server.prompt_tokens("/v1/completions", asked)
        return len(words) / count if count else WORDS_PER_TOKEN

    def _chat_tokens(self, text: str) -> int | None:
        """Tokens of a chat of one turn, its template's included."""
        messages = [{"role": "user", "content": text}]
        asked = {"model": self._server.target.model, "max_tokens": 1, "messages": messages}
        return self._server.prompt_tokens("/v1/chat/completions", asked)

    def _of_ids(self, ids: Iterable[int]) -> Passages:
        return self._passages(
            [b"%d" % number for number in ids], separator=b",", ends=(b"[", b"]"), units_per_token=1.0
        )

    def _passages(
        self, units: list[bytes], *, separator: bytes, ends: tuple[bytes, bytes], units_per_token: float
    ) -> Passages:
        starts, place = array("I", [0]), 0
        for unit in units:
            place += len(unit) + len(separator)
            starts.append(place)
        return Passages(
            units=separator.join(units) + separator,
            starts=starts.tobytes(),
            separator=separator,
            opening=ends[0],
            closing=ends[1],
            shared=round(self._workload.shared_prefix_tokens * units_per_token),
            units_per_token=units_per_token,
            input_tokens=lengths(self._workload.input_tokens),
        )

    def _longest(self) -> int:
        return lengths(self._workload.input_tokens).high + self._workload.shared_prefix_tokens

    def _listed(self, seed: int, processes: int) -> list[Listed]:
        if self._file is None:
            assert self._workload.file is not None  # the schema's own rule
            self._file = read_prompts(Path(self._workload.file))
        shuffled = self._file.copy()
        Random(seed).shuffle(shuffled)
        chat = self._workload.endpoint == "chat"
        encoded = [json.dumps([{"role": "user", "content": text}] if chat else text).encode() for text in shuffled]
        return [Listed(encoded[process::processes] or encoded) for process in range(processes)]


def read_prompts(path: Path) -> list[str]:
    """Prompts of a user's file: JSONL with ``prompt``, or ShareGPT's JSON (each conversation's first turn).

    Raises:
        UsageError: The file cannot be read, or an entry has no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read prompts: {error}", path=path) from error
    try:
        if text.lstrip().startswith("["):
            entries = [(1, entry) for entry in json.loads(text)]
        else:
            entries = [(n, json.loads(line)) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg}", path=path, line=error.lineno, column=error.colno) from error
    prompts = [_prompt_of(entry, path, line) for line, entry in entries]
    if not prompts:
        raise UsageError("no prompt in it", path=path)
    return prompts


def _prompt_of(entry: Any, path: Path, line: int) -> str:
    found = entry.get("prompt") if isinstance(entry, dict) else None
    if found is None and isinstance(entry, dict) and isinstance(entry.get("conversations"), list):
        turns = [turn.get("value") for turn in entry["conversations"] if isinstance(turn, dict)]
        found = turns[0] if turns else None
    if not isinstance(found, str) or not found:
        raise UsageError(
            "an entry without a prompt",
            remedy='JSONL: {"prompt": "..."} a line; ShareGPT: [{"conversations": [{"from": ..., "value": ...}]}]',
            path=path,
            line=line,
        )
    return found


def _words(characters: int) -> Iterable[str]:
    """Words of Python's own language reference, at least ``characters`` of them; from the start again at its end."""
    length = 0
    while length < characters:
        for topic in sorted(topics.topics):
            for word in topics.topics[topic].split():
                if any(map(str.isalnum, word)):
                    yield word
                    length += len(word) + 1
            if length >= characters:
                return


def _pieces(words: list[str], limit: int) -> Iterable[str]:
    piece: list[str] = []
    length = 0
    for word in words:
        piece.append(word)
        length += len(word) + 1
        if length >= limit:
            yield " ".join(piece)
            piece, length = [], 0
    if piece:
        yield " ".join(piece)
