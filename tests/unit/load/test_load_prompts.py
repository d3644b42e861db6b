"""What is sent: fresh, of the right length, from the seed and nothing else."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runner.errors import UsageError
from runner.load.bodies import Bodies, draw
from runner.load.orders import orders
from runner.load.prompts import Source, read_prompts
from runner.load.server import Server, Target
from runner.load.wire import Lengths
from runner.schema.experiment import Normal, Protocol, Uniform, Workload

TARGET = Target(base_url="http://127.0.0.1:9/", model="m", vocabulary=1000)


class Words(Server):
    """A server without a network: a word is a token, or nothing is known."""

    def __init__(self, *, knows: bool = True) -> None:
        super().__init__(TARGET)
        self._knows = knows
        self._ids: dict[str, int] = {}

    def token_ids(self, text: str) -> list[int] | None:
        if not self._knows:
            return None
        return [self._ids.setdefault(word, len(self._ids)) for word in text.split()]

    def prompt_tokens(self, path: str, body: dict[str, object]) -> int | None:
        if "messages" in body:
            return 7 + 1  # a template of 7 tokens around one word
        return 2 * len(str(body["prompt"]).split())


def bodies(
    workload: Workload, *, seed: int = 1, processes: int = 1, streams: int = 4, knows: bool = True
) -> list[Bodies]:
    prompts = Source(workload, Words(knows=knows)).for_cell(seed, processes)
    return [Bodies(order) for order in orders(TARGET, workload, Protocol(), streams, seed, prompts)]


def parsed(one: Bodies, stream: int, *, first: bool = False) -> dict[str, Any]:
    body, asked = one.next(stream, first=first)
    found: dict[str, Any] = json.loads(body)
    assert found["max_tokens"] == found["min_tokens"] == asked
    return found


@pytest.mark.parametrize("prompts", ["text", "random_tokens"])
@pytest.mark.parametrize("shared", [0, 20])
def test_prompts_have_the_length_asked_for_and_nothing_in_common(prompts: str, shared: int) -> None:
    """Token ids: exact length, the shared prefix the same in every cell, the rest fresh from the first token on."""
    workload = Workload.model_validate(
        {"prompts": prompts, "input_tokens": 50, "output_tokens": 9, "shared_prefix_tokens": shared}
    )
    found = [
        parsed(one, stream)["prompt"]
        for seed in (1, 2)
        for one in bodies(workload, seed=seed)
        for stream in (0, 1, 2, 3)
        for _ in range(20)
    ]
    assert {len(ids) for ids in found} == {50}
    assert len({tuple(ids[:shared]) for ids in found}) == 1
    assert len({tuple(ids[shared : shared + 6]) for ids in found}) == len(found)
    if prompts == "random_tokens":
        assert all(0 < token < 1000 for ids in found for token in ids)


def test_the_same_seed_gives_the_same_prompts_however_the_streams_are_shared_out() -> None:
    """One process or two: stream 3 sends the same."""
    workload = Workload(input_tokens=Uniform(low=10, high=60), output_tokens=Uniform(low=1, high=50))
    (alone,) = bodies(workload)
    _, second = bodies(workload, processes=2)
    assert [alone.next(3, first=n == 0) for n in range(5)] == [second.next(3, first=n == 0) for n in range(5)]


def test_a_request_says_everything_that_makes_it_exact() -> None:
    """ignore_eos, temperature, usage in every chunk."""
    (one,) = bodies(Workload(input_tokens=8, output_tokens=5, temperature=0.7))
    found = parsed(one, 0)
    assert found["ignore_eos"] is True
    assert found["temperature"] == 0.7
    assert found["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert found["model"] == "m"


def test_first_requests_are_out_of_phase() -> None:
    """Their lengths are spread over 1..N; later ones have N."""
    (one,) = bodies(Workload(input_tokens=8, output_tokens=100), streams=200)
    first = [parsed(one, stream, first=True)["max_tokens"] for stream in range(200)]
    assert min(first) < 15
    assert max(first) > 85
    assert {parsed(one, stream)["max_tokens"] for stream in range(200)} == {100}


def test_without_a_tokenizer_text_goes_out_as_words_of_measured_length() -> None:
    """The server finds two tokens a word: 50 tokens are 25 words."""
    (one,) = bodies(Workload(input_tokens=50, output_tokens=5), knows=False)
    prompt = parsed(one, 0)["prompt"]
    assert isinstance(prompt, str)
    assert len(prompt.split(" ")) == 25


def test_chat_sends_messages() -> None:
    """The same text as one user turn."""
    (one,) = bodies(Workload(input_tokens=20, output_tokens=5, endpoint="chat"))
    (message,) = parsed(one, 0)["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split(" ")) == 20


def test_the_tokens_of_a_chat_template_are_learnt() -> None:
    """What the server counts in a chat of one word, less that word; text completions have none."""
    for endpoint, expected in (("chat", 7), ("completions", 0)):
        source = Source(Workload.model_validate({"endpoint": endpoint}), Words())
        source.for_cell(1, 1)
        assert source.template_tokens == expected


def test_random_ids_need_a_vocabulary_and_completions() -> None:
    """Refused with what would be right."""
    server = Words()
    server.target = TARGET.model_copy(update={"vocabulary": None})
    with pytest.raises(UsageError, match="vocabulary"):
        Source(Workload(prompts="random_tokens"), server).for_cell(1, 1)
    with pytest.raises(UsageError, match="token ids"):
        Source(Workload(prompts="random_tokens", endpoint="chat"), Words()).for_cell(1, 1)


def test_lengths_are_drawn_within_their_bounds() -> None:
    """Uniform covers both ends, normal is clipped, fixed is fixed."""
    from_rng = Random(1)
    uniform = {draw(Lengths(3, 6), from_rng) for _ in range(200)}
    normal = [draw(Lengths(5, 15, 10, 5), from_rng) for _ in range(500)]
    assert uniform == {3, 4, 5, 6}
    assert (min(normal), max(normal)) == (5, 15)
    assert 9 < sum(normal) / len(normal) < 11
    assert draw(Lengths(4, 4), from_rng) == 4
    assert Workload(input_tokens=Normal(mean=10, stddev=5, low=5, high=15))


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "one"}\n\n{"prompt": "two", "output_tokens": 5}\n',
        '[{"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}]}, {"prompt": "two"}]',
    ],
)
def test_users_files(text: str, tmp_path: Path) -> None:
    """JSONL and ShareGPT; every prompt is used once before any is used again, over two processes."""
    path = tmp_path / "p"
    path.write_text(text, encoding="utf-8")
    assert read_prompts(path) == ["one", "two"]
    workload = Workload(prompts="file", file=str(path), output_tokens=5)
    sent = [parsed(one, stream)["prompt"] for one, stream in zip(bodies(workload, processes=2), (0, 1), strict=True)]
    assert sorted(sent) == ["one", "two"]


@pytest.mark.parametrize(("text", "problem"), [("{", "not JSON"), ("", "no prompt"), ('{"x": 1}', "without a prompt")])
def test_a_bad_file_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    """With the file named."""
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=problem) as caught:
        read_prompts(path)
    assert caught.value.path == path


@pytest.mark.parametrize(("concurrency", "processes"), [(1, 1), (10, 3), (2048, 7)])
def test_shares_are_exact(concurrency: int, processes: int) -> None:
    """Every stream is held by exactly one process, requests sum up, nobody has more than one over another."""
    workload = Workload()
    prompts = Source(workload, Words()).for_cell(1, processes)
    told = orders(TARGET, workload, Protocol(requests=concurrency + 5), concurrency, 1, prompts)
    assert sorted(stream for order in told for stream in order.streams) == list(range(concurrency))
    requests = [order.requests for order in told if order.requests is not None]
    assert sum(requests) == concurrency + 5
    assert max(requests) - min(requests) <= 1


def test_a_window_under_a_second_is_refused() -> None:
    """Only whole-second bins count; it would hold none."""
    prompts = Source(Workload(), Words()).for_cell(1, 1)
    with pytest.raises(UsageError, match="no whole second"):
        orders(TARGET, Workload(), Protocol(window_s=0.5), 1, 1, prompts)


def test_fewer_requests_than_streams_are_refused() -> None:
    """They could never reach C."""
    prompts = Source(Workload(), Words()).for_cell(1, 1)
    with pytest.raises(UsageError, match="4 requests cannot keep 8 streams busy"):
        orders(TARGET, Workload(), Protocol(requests=4), 8, 1, prompts)
