"""The scheduler and the engine in virtual time: nothing is lost, no limit is broken, and what costs time costs time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.schema.node import SimulatedModel, SimulatedNode
from runner.simulator.describe import load_model, load_node
from runner.simulator.engine import Chunk, Engine
from runner.simulator.launch import Launch
from runner.simulator.scheduler import BlockPool, Request, Scheduler, Work

NODE: SimulatedNode = load_node("2x-h200-nvlink")
MODEL: SimulatedModel = load_model("qwen3-8b")
SMALL = Launch(max_num_seqs=4, max_num_batched_tokens=64, kv_cache_tokens=1024, capture_sizes=(1, 2, 4, 8))


def drained(engine: Engine) -> list[Chunk]:
    chunks: list[Chunk] = []
    while (next_s := engine.next_s()) is not None:
        chunks += engine.run_until(next_s)
    return chunks


launches = st.builds(
    Launch,
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(16, 256),
    kv_cache_tokens=st.sampled_from([512, 1024, 4096]),
    pipeline_parallel=st.sampled_from([1, 2]),
    async_scheduling=st.booleans(),
    prefix_caching=st.booleans(),
    stream_interval=st.integers(1, 5),
    draft_method=st.sampled_from([None, "mtp", "ngram", "ngram_gpu"]),
    capture_sizes=st.sampled_from([(), (1, 2, 4, 8)]),
)
requests = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60), st.floats(0, 0.2)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(launch=launches, asked=requests, drafts=st.integers(1, 4))
def test_every_request_gets_its_tokens_and_no_limit_is_broken(
    launch: Launch, asked: list[tuple[int, int, float]], drafts: int
) -> None:
    """Each answer is complete, chunks rise in time, steps obey the limits, and all KV blocks come back."""
    launch = replace(launch, draft_tokens=drafts if launch.draft_method else 0)
    engine = Engine(launch, NODE, MODEL, seed=1)
    sizes: list[tuple[int, int]] = []

    def note(works: list[Work]) -> None:
        sizes.append((len(works), sum(work.tokens for work in works)))

    engine.on_step = note
    sent = [Request(prompt, output) for prompt, output, _ in asked]
    for request, (_, _, at_s) in zip(sent, asked, strict=True):
        engine.submit(request, at_s)
    chunks = drained(engine)
    for request in sent:
        own = [chunk for chunk in chunks if chunk.request is request]
        assert sum(chunk.tokens for chunk in own) == request.output_tokens
        assert [chunk.finished for chunk in own] == [False] * (len(own) - 1) + [True]
        assert all(chunk.tokens > 0 for chunk in own)
    assert [chunk.at_s for chunk in chunks] == sorted(chunk.at_s for chunk in chunks)
    assert all(count <= launch.max_num_seqs and tokens <= launch.max_num_batched_tokens for count, tokens in sizes)
    assert engine.scheduler.pool.usage == 0.0
    assert engine.scheduler.pool.reset()
    assert engine.counters.generation_tokens == sum(output for _, output, _ in asked)


def test_a_full_cache_preempts_and_still_finishes() -> None:
    """Four growing requests do not fit 40 blocks: the youngest waits, computes again and ends in full."""
    engine = Engine(replace(SMALL, kv_cache_tokens=16 * 20), NODE, MODEL)
    sent = [Request(60, 60) for _ in range(4)]
    for request in sent:
        engine.submit(request, 0.0)
    chunks = drained(engine)
    assert engine.scheduler.preemptions > 0
    assert sum(request.preemptions for request in sent) == engine.scheduler.preemptions
    assert sum(chunk.tokens for chunk in chunks) == 240


def test_requests_above_max_num_seqs_wait() -> None:
    """The fifth of four seats begins when one is free."""
    engine = Engine(SMALL, NODE, MODEL)
    sent = [Request(16, 40) for _ in range(5)]
    for request in sent:
        engine.submit(request, 0.0)
    drained(engine)
    assert sent[4].first_token_s > min(request.last_token_s for request in sent[:4])


def test_prefixes_are_shared_and_reset() -> None:
    """A second prompt with the same blocks computes only the rest; after a reset it computes everything."""
    engine = Engine(SMALL, NODE, MODEL)
    prefix = [1, 2, 3]
    for at_s in (0.0, 5.0):
        engine.submit(Request(50, 2, prefix=prefix), at_s)
    drained(engine)
    assert (engine.scheduler.prefix_hits, engine.scheduler.prefix_queries) == (48, 100)
    assert engine.scheduler.pool.reset()
    engine.submit(Request(50, 2, prefix=prefix), 10.0)
    drained(engine)
    assert engine.scheduler.prefix_hits == 48


def test_the_cache_is_not_reset_while_blocks_are_held() -> None:
    """As vLLM, which answers false then."""
    engine = Engine(SMALL, NODE, MODEL)
    engine.submit(Request(16, 50), 0.0)
    engine.run_until(0.05)
    assert not engine.scheduler.pool.reset()


def test_cached_blocks_make_room() -> None:
    """Idle cached blocks are evicted, ends of prefixes first; held ones never."""
    pool = BlockPool(4, caching=True)
    request = Request(64, 1, prefix=[1, 2, 3, 4])
    assert pool.take(4)
    request.private_blocks = 4
    pool.publish(request)
    assert not pool.take(1)
    pool.give_back(request)
    assert pool.take(2)
    assert pool.find([1, 2, 3, 4], 4) == [1, 2]


def test_an_aborted_request_leaves() -> None:
    """Its blocks are free at once or after the step in flight, and the others go on."""
    engine = Engine(SMALL, NODE, MODEL)
    sent = [Request(16, 50) for _ in range(3)]
    for request in sent:
        engine.submit(request, 0.0)
    engine.run_until(0.06)
    engine.abort(sent[0])
    drained(engine)
    assert sent[0].generated < 50
    assert [request.generated for request in sent[1:]] == [50, 50]
    assert engine.scheduler.pool.usage == 0.0


def acceptance_length(launch: Launch, repetitiveness: float = 0.0) -> float:
    engine = Engine(launch, NODE, MODEL, seed=3)
    for index in range(20):
        engine.submit(Request(16, 100, repetitiveness=repetitiveness), index * 2.0)
    drained(engine)
    return 1 + engine.counters.accepted_tokens / engine.counters.drafts


def test_acceptance_follows_workload_and_draft_length() -> None:
    """Repetitive prompts let n-gram drafts be accepted; more draft tokens are accepted less and less."""
    ngram = replace(SMALL, draft_method="ngram", draft_tokens=3, async_scheduling=False)
    assert acceptance_length(ngram, 0.9) > acceptance_length(ngram, 0.0) + 0.3
    gains = [acceptance_length(replace(ngram, draft_tokens=count), 0.5) for count in (1, 3, 6)]
    assert gains[1] - gains[0] > gains[2] - gains[1] > -0.05


def test_synthetic_acceptance_is_what_was_asked() -> None:
    """A length of 2.5 with three drafts: always one, half of the time two, never three."""
    launch = replace(SMALL, draft_method="ngram", draft_tokens=3, synthetic_acceptance=(1.0, 0.5, 0.0))
    assert acceptance_length(launch) == pytest.approx(2.5, abs=0.1)


def test_the_stream_interval_gathers_tokens() -> None:
    """First token at once, then five at a time, and the rest at the end."""
    engine = Engine(replace(SMALL, stream_interval=5), NODE, MODEL)
    engine.submit(Request(16, 13), 0.0)
    assert [chunk.tokens for chunk in drained(engine)] == [1, 5, 5, 2]


def test_a_request_that_does_not_stream_leaves_once() -> None:
    """All its tokens in one piece."""
    engine = Engine(SMALL, NODE, MODEL)
    engine.submit(Request(16, 13, streamed=False), 0.0)
    assert [(chunk.tokens, chunk.finished) for chunk in drained(engine)] == [(13, True)]


def test_the_same_seed_gives_the_same_noise() -> None:
    """Noise is drawn once a start and per step; without it all seeds are alike."""

    def end_s(seed: int, *, noisy: bool, age_h: float = 0.0) -> float:
        engine = Engine(SMALL, NODE, MODEL, seed=seed, noisy=noisy, age_h=age_h)
        engine.submit(Request(16, 50), 0.0)
        return drained(engine)[-1].at_s

    assert end_s(1, noisy=True) == end_s(1, noisy=True) != end_s(2, noisy=True)
    assert end_s(1, noisy=False) == end_s(2, noisy=False)
    assert end_s(1, noisy=True) == pytest.approx(end_s(1, noisy=False), rel=0.1)


def test_drift_slows_an_old_node() -> None:
    """A node with one per cent an hour is ten per cent slower after ten hours."""
    drifting = NODE.model_copy(
        update={"noise": NODE.noise.model_copy(update={"start": 0.0, "step": 0.0, "drift_per_hour": 0.01})}
    )
    ends = []
    for age_h in (0.0, 10.0):
        engine = Engine(SMALL, drifting, MODEL, noisy=True, age_h=age_h)
        request = Request(16, 100)
        engine.submit(request, 0.0)
        drained(engine)
        ends.append(request.last_token_s - request.first_token_s)
    assert ends[1] / ends[0] == pytest.approx(1.1, rel=0.001)


def test_pipeline_batches_share_the_requests() -> None:
    """With two stages no step holds more than half of the requests, once all are in."""
    launch = replace(SMALL, pipeline_parallel=2, max_num_seqs=8)
    scheduler = Scheduler(launch)
    for _ in range(6):
        scheduler.add(Request(4, 10))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert (len(first), len(second)) == (3, 3)
    assert not {id(work.request) for work in first} & {id(work.request) for work in second}


def test_fewer_drafts_as_batches_grow() -> None:
    """Draft lengths by running requests: two for up to two requests, none above."""
    launch = replace(SMALL, draft_method="mtp", draft_tokens=2, drafts_by_batch=((1, 2, 2), (3, 8, 0)))
    for count, drafts in ((2, 2), (3, 0)):
        scheduler = Scheduler(launch)
        sent = [Request(4, 10, generated=1, computed=4) for _ in range(count)]
        scheduler.running.extend(sent)
        assert [work.drafts for work in scheduler.schedule(0.0)] == [drafts] * count
