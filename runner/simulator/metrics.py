"""``/metrics`` in Prometheus text, with vLLM's names, labels and buckets for what this server knows.

Source: the exposition of a running vLLM 0.32, and https://docs.vllm.ai/en/stable/usage/metrics.html.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from runner.simulator.engine import Engine
from runner.simulator.faults import Faults
from runner.simulator.scheduler import Request, Work

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts per bucket, and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Book a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """Exposition of it."""
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}'
        yield f"{name}_count{{{labels}}} {float(total)}"
        yield f"{name}_sum{{{labels}}} {self.sum}"


class Metrics:
    """What the server counts.

    Args:
        model_name: The first served name; a label of every series.
    """

    def __init__(self, engine: Engine, model_name: str, faults: Faults) -> None:
        self._engine = engine
        self._labels = f'engine="0",model_name="{model_name}"'
        self._faults = faults
        self.finished = dict.fromkeys(REASONS, 0)
        self.ttft = Histogram(TTFT_S)
        self.inter_token = Histogram(TOKEN_S)
        self.per_token = Histogram(TOKEN_S)
        self.e2e = Histogram(REQUEST_S)
        self.queue = Histogram(REQUEST_S)
        self.prefill = Histogram(REQUEST_S)
        self.decode = Histogram(REQUEST_S)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.prompt = Histogram(REQUEST_TOKENS)
        self.generation = Histogram(REQUEST_TOKENS)
        engine.on_step = self._on_step

    def finish(self, request: Request, reason: str, at_s: float) -> None:
        """Book a finished request; ``at_s`` in model time."""
        self.finished[reason] += 1
        self.e2e.add(at_s - request.arrived_s)
        self.prompt.add(request.prompt_tokens)
        self.generation.add(request.generated)
        if not request.generated:
            return
        self.ttft.add(request.first_token_s - request.arrived_s)
        self.queue.add(max(request.scheduled_s - request.arrived_s, 0.0))
        self.prefill.add(request.first_token_s - request.scheduled_s)
        decode_s = request.last_token_s - request.first_token_s
        self.decode.add(decode_s)
        if request.generated > 1:
            self.per_token.add(decode_s / (request.generated - 1))
            self.inter_token.add(decode_s / (request.generated - 1), request.generated - 1)

    def _on_step(self, works: list[Work]) -> None:
        self.step_tokens.add(sum(work.tokens for work in works))

    def render(self, lateness_s: Iterable[float]) -> bytes:
        """The exposition.

        Args:
            lateness_s: How late chunks were sent; told as a summary of this server's own.
        """
        lines: list[str] = []
        for name, kind, labels, value in self._series():
            lines += [f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)}"]
        lines += self._per_position()
        lines.append("# TYPE vllm:request_success_total counter")
        for reason, count in self.finished.items():
            lines.append(f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {float(count)}')
        for name, histogram in self._histograms().items():
            lines += histogram.lines(name, self._labels)
        lines += _lateness(sorted(lateness_s))
        return ("\n".join(lines) + "\n").encode()

    def _series(self) -> list[tuple[str, str, str, float]]:
        counters, scheduler = self._engine.counters, self._engine.scheduler
        generated = counters.generation_tokens * (1.0 + (self._faults.wrong_counter or 0.0) / 100)
        hits = scheduler.prefix_hits + (scheduler.prefix_queries // 2 if self._faults.prefix_hits else 0)
        queries = scheduler.prefix_queries
        tokens = {"vllm:prompt_tokens_total": counters.prompt_tokens, "vllm:generation_tokens_total": int(generated)}
        found: dict[str, float] = {
            **({} if self._faults.no_counters else tokens),
            "vllm:prompt_tokens_cached_total": hits,
            "vllm:prefix_cache_queries_total": queries,
            "vllm:prefix_cache_hits_total": hits,
            "vllm:num_preemptions_total": scheduler.preemptions,
        }
        if self._engine.launch.draft_tokens:
            found["vllm:spec_decode_num_drafts_total"] = counters.drafts
            found["vllm:spec_decode_num_draft_tokens_total"] = counters.draft_tokens
            found["vllm:spec_decode_num_accepted_tokens_total"] = counters.accepted_tokens
        gauges = {
            "vllm:num_requests_running": len(scheduler.running),
            "vllm:num_requests_waiting": len(scheduler.waiting),
            "vllm:kv_cache_usage_perc": scheduler.pool.usage,
        }
        return [(name, "counter", self._labels, value) for name, value in found.items()] + [
            (name, "gauge", self._labels, value) for name, value in gauges.items()
        ]

    def _per_position(self) -> list[str]:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        accepted = self._engine.counters.accepted_at
        lines = [f'{name}{{{self._labels},position="{place}"}} {float(n)}' for place, n in enumerate(accepted)]
        return [f"# TYPE {name} counter", *lines] if lines else []

    def _histograms(self) -> dict[str, Histogram]:
        return {
            "vllm:time_to_first_token_seconds": self.ttft,
            "vllm:inter_token_latency_seconds": self.inter_token,
            "vllm:request_time_per_output_token_seconds": self.per_token,
            "vllm:e2e_request_latency_seconds": self.e2e,
            "vllm:request_queue_time_seconds": self.queue,
            "vllm:request_prefill_time_seconds": self.prefill,
            "vllm:request_decode_time_seconds": self.decode,
            "vllm:iteration_tokens_total": self.step_tokens,
            "vllm:request_prompt_tokens": self.prompt,
            "vllm:request_generation_tokens": self.generation,
        }


def _lateness(ordered_s: list[float]) -> list[str]:
    name = "simulated:send_lateness_seconds"
    lines = [f"# TYPE {name} summary"]
    for quantile in (0.5, 0.9, 0.99) if ordered_s else ():
        lines.append(f'{name}{{quantile="{quantile}"}} {ordered_s[int(quantile * (len(ordered_s) - 1))]}')
    return [*lines, f"{name}_count {len(ordered_s)}"]
