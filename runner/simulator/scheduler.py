"""Continuous batching as vLLM's V1 scheduler does it, on token counts instead of tensors. Pure; knows no clock.

Each step: running requests first (one decode query each, drafts included, or the next piece of a long prefill), then
waiting ones while ``max_num_seqs``, the token budget and the KV cache allow. When a running request finds no free
block, the youngest one is preempted: its blocks are freed and it computes everything again.

What it does not know: priorities, LoRA, several cache groups.

Source: vllm/v1/core/sched/scheduler.py and vllm/v1/core/block_pool.py (behaviour, not code).
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.simulator.launch import Launch

FIRST_DRAFT_AFTER = 3
"""Output tokens before an n-gram drafter finds a match (measured: 2.8 undrafted steps a request)."""


@dataclass(eq=False, slots=True)
class Request:
    """One request and how far it is. Sizes in tokens.

    Attributes:
        prefix: Hashes of the prompt's full blocks, each including all before it.
        repetitiveness: How much of the prompt repeats itself, 0..1; n-gram drafts live from it.
        streamed: Whether each token is sent at once.
        computed: Tokens whose keys and values are in the cache.
        generated: Output tokens so far.
        room: Tokens that its KV blocks hold.
    """

    prompt_tokens: int
    output_tokens: int
    prefix: Sequence[int] = ()
    repetitiveness: float = 0.0
    streamed: bool = True
    arrived_s: float = 0.0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    computed: int = 0
    generated: int = 0
    sent: int = 0
    unsent: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    in_flight: bool = False
    aborted: bool = False
    private_blocks: int = 0
    room: int = 0
    shared: list[int] = field(default_factory=list)

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far: what must be computed before the next token."""
        return self.prompt_tokens + self.generated

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is uncomputed."""
        return self.generated > 0 and self.computed >= self.known_tokens - 1

    @property
    def finished(self) -> bool:
        """Whether it has all its tokens, or nobody wants them any more."""
        return self.aborted or self.generated >= self.output_tokens


@dataclass(slots=True)
class Work:
    """A request's part of a step; ``decoding`` when it is one uniform decode query."""

    request: Request
    tokens: int
    drafts: int
    decoding: bool


class BlockPool:
    """KV-cache blocks: private ones are counted, full prompt blocks are shared by hash and stay until evicted."""

    def __init__(self, blocks: int, *, caching: bool) -> None:
        self.blocks = blocks
        self.caching = caching
        self.private = 0
        self.held: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    @property
    def usage(self) -> float:
        """Share of the blocks that running requests hold."""
        return (self.private + len(self.held)) / self.blocks if self.blocks else 0.0

    def take(self, count: int) -> bool:
        """Take private blocks, evicting idle cached ones if need be."""
        missing = self.private + len(self.held) + len(self.idle) + count - self.blocks
        if missing > len(self.idle):
            return False
        for _ in range(missing):
            self.idle.popitem(last=False)
        self.private += count
        return True

    def find(self, prefix: Sequence[int], at_most: int) -> list[int]:
        """The leading hashes that are cached, and hold them."""
        found = []
        for block in prefix[:at_most] if self.caching else ():
            if block not in self.held and block not in self.idle:
                break
            self.idle.pop(block, None)
            self.held[block] = self.held.get(block, 0) + 1
            found.append(block)
        return found

    def publish(self, request: Request) -> None:
        """Make the computed full prompt blocks of a request findable."""
        if not self.caching:
            return
        full = len(request.prefix)
        for block in request.prefix[len(request.shared) : full]:
            self.private -= 1
            request.private_blocks -= 1
            if block in self.held or block not in self.idle:
                self.held[block] = self.held.get(block, 0) + 1
            else:
                self.idle.pop(block)
                self.held[block] = 1
            request.shared.append(block)

    def give_back(self, request: Request) -> None:
        """Free a request's blocks; shared ones stay cached while there is room."""
        self.private -= request.private_blocks
        request.private_blocks = request.room = 0
        for block in reversed(request.shared):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                self.idle[block] = None
        request.shared.clear()

    def reset(self) -> bool:
        """Forget what is cached; refused while blocks are held, as in vLLM."""
        if self.private or self.held:
            return False
        self.idle.clear()
        return True


class Scheduler:
    """Decides what the next step works on."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.pool = BlockPool(launch.kv_cache_tokens // launch.block_size, caching=launch.prefix_caching)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def schedule(self, now_s: float) -> list[Work]:
        """The work of the next step; requests of a step still in flight are left out."""
        budget = self.launch.max_num_batched_tokens
        batch: list[Work] = []
        # Under pipeline parallelism requests spread over the batches in flight; in vLLM their groups form by arrival.
        most = -(-(len(self.running) + len(self.waiting)) // self.launch.pipeline_parallel)
        index = 0
        while index < len(self.running) and budget > 0 and len(batch) < most:
            request = self.running[index]
            index += 1
            if request.in_flight or request.finished:
                continue
            work = self._next_work(request, budget)
            if request.computed + work.tokens > request.room and not self._make_room(request, work.tokens, batch):
                break
            batch.append(work)
            budget -= work.tokens
        self._admit(batch, budget, most, now_s)
        for work in batch:
            work.request.in_flight = True
        return batch

    def retire(self, request: Request) -> None:
        """Take a finished request out."""
        self.pool.give_back(request)
        if request in self.running:
            self.running.remove(request)

    def _next_work(self, request: Request, budget: int) -> Work:
        missing = request.prompt_tokens + request.generated - request.computed
        if missing > 1 or not request.generated:
            return Work(request, min(missing, budget), 0, decoding=False)
        drafts = self._drafts(request) if self.launch.draft_tokens else 0
        drafts = min(drafts, budget - 1)
        return Work(request, 1 + drafts, drafts, decoding=True)

    def _drafts(self, request: Request) -> int:
        if self.launch.draft_method in ("ngram", "ngram_gpu") and request.generated < FIRST_DRAFT_AFTER:
            return 0
        for low, high, drafts in self.launch.drafts_by_batch:
            if low <= len(self.running) <= high:
                return min(drafts, self.launch.draft_tokens)
        return self.launch.draft_tokens

    def _make_room(self, request: Request, tokens: int, batch: list[Work]) -> bool:
        """Blocks for ``tokens`` more; preempts from the youngest on. False when the request itself had to go."""
        while not self._allocate(request, request.computed + tokens):
            victim = self.running[-1]
            if victim.in_flight or any(work.request is victim for work in batch):
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _allocate(self, request: Request, tokens: int) -> bool:
        wanted = -(-tokens // self.launch.block_size) - request.private_blocks - len(request.shared)
        if wanted > 0:
            if not self.pool.take(wanted):
                return False
            request.private_blocks += wanted
        request.room = (request.private_blocks + len(request.shared)) * self.launch.block_size
        return True

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.pool.give_back(victim)
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def _admit(self, batch: list[Work], budget: int, most: int, now_s: float) -> None:
        seats = self.launch.max_num_seqs
        while self.waiting and budget > 0 and len(self.running) < seats and len(batch) < most:
            request = self.waiting[0]
            if request.finished:
                self.waiting.popleft()
                continue
            request.shared = self.pool.find(request.prefix, (request.known_tokens - 1) // self.launch.block_size)
            hits = len(request.shared) * self.launch.block_size
            tokens = min(request.known_tokens - hits, budget)
            whole = self.launch.chunked_prefill or tokens == request.known_tokens - hits
            if not whole or not self._allocate(request, hits + tokens):
                self.pool.give_back(request)
                return
            self.waiting.popleft()
            request.computed = hits
            if not request.preemptions:
                request.scheduled_s, request.cached_tokens = now_s, hits
                self.prefix_queries += request.prompt_tokens if self.launch.prefix_caching else 0
                self.prefix_hits += hits
            self.running.append(request)
            batch.append(Work(request, tokens, 0, decoding=False))
            budget -= tokens
