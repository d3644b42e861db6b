"""Requests, answers and text: read, refused and worded as vLLM does."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.simulator.asked import Asked, BadRequest, read_request
from runner.simulator.faults import BadFault, Faults, read_faults
from runner.simulator.text import Answers, Tokenizer, block_hashes, repetitiveness


def ask(chat: bool = False, **fields: Any) -> list[Asked]:
    return read_request(
        json.dumps({"model": "m", **fields}).encode(),
        chat=chat,
        names=["m"],
        tokenizer=Tokenizer(1000),
        vocabulary=1000,
        max_model_len=1024,
    )


def test_a_completion_request() -> None:
    """Exact length, continuous usage, token ids."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = ask(
        prompt=[3, 4, 5],
        max_tokens=7,
        min_tokens=7,
        ignore_eos=True,
        stream=True,
        stream_options=options,
        return_token_ids=True,
    )
    assert got == [
        Asked(
            chat=False,
            model="m",
            prompt=(3, 4, 5),
            max_tokens=7,
            stream=True,
            usage_each=True,
            usage_last=True,
            token_ids=True,
            stops_early=False,
        )
    ]


def test_usage_may_be_forced() -> None:
    """By the server's flag, whatever a request says."""
    body = json.dumps({"prompt": [1], "stream": True}).encode()
    got = read_request(
        body, chat=False, names=["m"], tokenizer=Tokenizer(9), vocabulary=9, max_model_len=99, force_usage=True
    )
    assert (got[0].usage_each, got[0].usage_last) == (True, True)


def test_defaults_and_several_prompts() -> None:
    """Sixteen tokens when nothing is asked; a list of prompts is several answers; chat takes what room there is."""
    assert [one.max_tokens for one in ask(prompt=["a b", "c"])] == [16, 16]
    assert len(ask(prompt=[[1, 2], [3]])) == 2
    chat = ask(chat=True, messages=[{"role": "user", "content": "hello"}])
    assert chat[0].max_tokens == 1024 - len(chat[0].prompt)


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"model": "x", "prompt": "a"}, 404, "The model `x` does not exist."),
        ({"prompt": "a", "max_tokens": 5, "min_tokens": 9}, 400, "min_tokens must be less than or equal to"),
        ({"prompt": "a", "max_tokens": 5000}, 400, "cannot be greater than max_model_len=1024"),
        ({"prompt": "a", "max_tokens": 1024}, 400, "maximum context length is 1024"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "Stream options can only be defined"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature must be non-negative, got -1.0"),
        ({}, 400, "Either prompt or prompt_embeds"),
        ({"prompt": [99999]}, 400, "Token id 99999 is out of vocabulary"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], status: int, says: str) -> None:
    """Status and error object as a running vLLM gives them."""
    with pytest.raises(BadRequest) as refused:
        ask(**fields)
    error = json.loads(refused.value.body)["error"]
    assert refused.value.status == error["code"] == status
    assert says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_no_json_is_refused() -> None:
    """With status 400."""
    with pytest.raises(BadRequest) as refused:
        read_request(b"{", chat=False, names=["m"], tokenizer=Tokenizer(10), vocabulary=10, max_model_len=10)
    assert refused.value.status == 400


@given(text=st.text(max_size=200))
def test_text_comes_back_from_its_tokens(text: str) -> None:
    """Encoding loses nothing while there is room in the vocabulary."""
    tokenizer = Tokenizer(32_000)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(256 <= token < 32_000 for token in ids)


def test_a_prompt_has_one_answer() -> None:
    """Greedy decoding: the same prompt, the same words; text and ids tell the same tokens."""
    tokenizer = Tokenizer(32_000)
    answers = Answers(tokenizer)
    start = answers.start([1, 2, 3])
    assert start == answers.start([1, 2, 3])
    assert tokenizer.encode(answers.text(start, 50)) == answers.tokens(start, 50)
    assert answers.text(start, 20) + answers.text(start + 20, 30) == answers.text(start, 50)


def test_blocks_share_what_their_prompts_share() -> None:
    """Two prompts have equal hashes up to the first different block; a part of a block has none."""
    first, second = block_hashes(list(range(40)), 16), block_hashes([*range(20), 99, *range(21, 40)], 16)
    assert (len(first), first[0] == second[0], first[1] == second[1]) == (2, True, False)


def test_repetitiveness() -> None:
    """0 for tokens in new order, near 1 for a loop."""
    assert repetitiveness(list(range(100))) == 0.0
    assert repetitiveness([1, 2] * 50) > 0.95
    assert repetitiveness([1]) == 0.0


def test_faults_are_read() -> None:
    """By name, with and without value, a message with signs in it."""
    text = "hang_at:weights; crash_at=capture:ValueError: a;green_health;exit0_after=2"
    faults = read_faults(text)
    assert faults == Faults(hang_at="weights", crash_at="capture:ValueError: a", green_health=True, exit0_after=2.0)
    assert faults.hangs("weights")
    assert not faults.hangs("init")
    assert faults.crash("capture") == "ValueError: a"
    assert faults.crash("init") is None
    assert read_faults("") == Faults()


@pytest.mark.parametrize("text", ["explode", "hang_at:lunch", "exit0_after:soon", "engine_dead_after"])
def test_unknown_faults_are_refused(text: str) -> None:
    """Or a test would pass because nothing went wrong."""
    with pytest.raises(BadFault):
        read_faults(text)
