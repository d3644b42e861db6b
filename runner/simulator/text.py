"""Words in, token ids out, and back: a stand-in for a tokenizer, and for what a model would say.

A token is a short piece of a word, a digit, a space run or a sign, so English has about as many tokens as with a real
vocabulary. Ids are hashes of the pieces, moved on when taken, and remembered for the way back.
"""

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise

_PIECE = re.compile(r" ?[^\W\d_]{1,7}|\d{1,3}|\s+|[^\w\s]|_")
_ANSWER = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
    "from",
    "or",
    "had",
    "an",
    "they",
    "which",
    "one",
    "you",
    "were",
    "all",
    "her",
    "she",
    "there",
    "would",
)
RESERVED_IDS = 256
"""Ids below it are special tokens and bytes in most vocabularies; text never gets them."""
ANSWER_WORDS = 1 << 10
"""Length of the row of answer tokens that every answer is cut from."""


class Tokenizer:
    """Turns text into ids below ``vocabulary`` and back; knows every piece it has seen."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = max(vocabulary, RESERVED_IDS + 1)
        self._ids: dict[str, int] = {}
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        known = self._ids
        return [known.get(piece) or self._learn(piece) for piece in _PIECE.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; an id nobody has seen becomes a word that names it."""
        return "".join(self._pieces.get(token) or f" t{token}" for token in ids)

    def _learn(self, piece: str) -> int:
        room = self._vocabulary - RESERVED_IDS
        place = zlib.crc32(piece.encode()) % room
        for step in range(room):
            token = RESERVED_IDS + (place + step) % room
            if token not in self._pieces:
                self._pieces[token] = piece
                break
        else:
            token = RESERVED_IDS + place
        self._ids[piece] = token
        return token


class Answers:
    """What the simulated model says: words from a fixed row; where it starts depends on the prompt alone.

    So the same prompt always gets the same answer, as with greedy decoding.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces = [f" {_ANSWER[(index * index + index // 7) % len(_ANSWER)]}" for index in range(ANSWER_WORDS)]
        self.ids = [tokenizer.encode(piece)[0] for piece in self.pieces]

    def start(self, prompt_ids: Sequence[int]) -> int:
        """Where the answer to a prompt begins in the row."""
        return hash(tuple(prompt_ids)) % ANSWER_WORDS

    def text(self, start: int, count: int) -> str:
        """``count`` words from ``start`` on."""
        return "".join(self.pieces[(start + offset) % ANSWER_WORDS] for offset in range(count))

    def tokens(self, start: int, count: int) -> list[int]:
        """Their ids."""
        return [self.ids[(start + offset) % ANSWER_WORDS] for offset in range(count)]


def block_hashes(ids: Sequence[int], block_size: int) -> list[int]:
    """Hash of each full block of a prompt, including everything before it."""
    hashes = []
    before = 0
    for end in range(block_size, len(ids) + 1, block_size):
        before = hash((before, *ids[end - block_size : end]))
        hashes.append(before)
    return hashes


def repetitiveness(ids: Sequence[int]) -> float:
    """Share of the token pairs of a prompt that occurred in it before: what an n-gram drafter can live from."""
    pairs = list(pairwise(ids))
    return 1.0 - len(set(pairs)) / len(pairs) if pairs else 0.0
