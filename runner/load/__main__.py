"""``python -m runner.load``: benchmark any OpenAI-compatible server and print one line a concurrency.

The exit code is 0 when every level is valid, 1 when any is void, 2 when nothing could be tried.
"""

import argparse
import json
import logging
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from runner.errors import TrialFailure, UsageError
from runner.load.measure import Bench, recompute
from runner.load.server import Target, find_target
from runner.load.table import level_line
from runner.schema.experiment import Length, Protocol, Slo, Uniform, Workload
from runner.schema.trial import Measurement

MOST_STREAMS = 4096


def parser() -> argparse.ArgumentParser:
    """The command line."""
    default = Protocol()
    p = argparse.ArgumentParser(
        prog="python -m runner.load", description="Measure an OpenAI-compatible server's tok/s at each concurrency."
    )
    p.add_argument("--url", help="base URL, e.g. http://127.0.0.1:8000")
    p.add_argument("--model", help="one of the names the server serves (default: its first)")
    p.add_argument("--api-key", help="sent as bearer token")
    p.add_argument("--concurrency", type=_ladder, default=(1, 2, 10), help="levels, e.g. 1,2,10 (default: 1,2,10)")
    load = p.add_argument_group("workload")
    load.add_argument("--input-tokens", type=_length, default=128, metavar="N", help="a number, or LOW-HIGH (uniform)")
    load.add_argument("--output-tokens", type=_length, default=128, metavar="N", help="exact; a number, or LOW-HIGH")
    load.add_argument("--prompts", metavar="FILE", help="prompts from JSONL or ShareGPT instead of built-in text")
    load.add_argument("--random-tokens", action="store_true", help="random token ids of exact length")
    load.add_argument("--vocabulary", type=int, help="for --random-tokens: ids are drawn below it")
    load.add_argument("--shared-prefix-tokens", type=int, default=0, help="tokens that open every prompt")
    load.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--seed", type=int, help="seed of the prompts (default: a fresh one, printed)")
    how = p.add_argument_group("protocol")
    how.add_argument("--requests", type=int, help="naive protocol: so many requests, whole wall time")
    how.add_argument("--window-s", type=float, default=default.window_s)
    how.add_argument("--windows", type=int, default=default.windows)
    how.add_argument("--max-windows", type=int, help="with --interval: most windows")
    how.add_argument("--interval", type=float, help="repeat until the 95 %% interval is so narrow, e.g. 0.02")
    how.add_argument("--warmup-s", type=float, default=default.warmup_max_s, help="budget of the warm-up")
    how.add_argument("--max-error-rate", type=float, default=default.max_error_rate)
    how.add_argument("--stall-s", type=float, default=default.stall_s)
    how.add_argument("--request-timeout-s", type=float, default=default.request_timeout_s)
    how.add_argument("--slo-ttft-ms", type=float)
    how.add_argument("--slo-tpot-ms", type=float)
    how.add_argument("--slo-e2el-ms", type=float)
    out = p.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", type=Path, help="write every figure")
    out.add_argument("--samples", metavar="FOLDER", type=Path, help="keep the raw samples there, one file a level")
    out.add_argument("--recompute", metavar="SAMPLES", type=Path, help="only compute a level's figures again")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        found = [recompute(args.recompute)] if args.recompute else _measure_all(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ValidationError as error:
        print(f"error: {error.errors()[0]['msg']}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.recompute:
        print(level_line(found[0]))
    if args.json is not None:
        text = json.dumps({"levels": [level.model_dump(mode="json") for level in found]}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0 if all(level.valid for level in found) else 1


def _measure_all(args: argparse.Namespace) -> list[Measurement]:
    if args.url is None:
        raise UsageError("no server given", remedy="--url http://HOST:PORT")
    workload, protocol = _workload(args), _protocol(args)
    target = find_target(args.url, model=args.model, api_key=args.api_key)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    print(f"{target.model} at {target.base_url}, {_describe(workload, protocol)}, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as scratch, Bench(target, workload) as bench:
        folder = args.samples or Path(scratch)
        found = []
        for concurrency in args.concurrency:
            level = _measure(bench, target, protocol, concurrency, seed, folder)
            print(level_line(level), flush=True)
            found.append(level)
    return found


def _measure(
    bench: Bench, target: Target, protocol: Protocol, concurrency: int, seed: int, folder: Path
) -> Measurement:
    try:
        return bench.measure(
            protocol,
            concurrency,
            seed,
            on_phase=_say_nothing,
            check=_say_nothing,
            samples_path=folder / f"C{concurrency}.parquet",
        )
    except TrialFailure as failure:
        return Measurement(
            concurrency=concurrency,
            valid=False,
            reason=f"{failure.kind}: {failure.message}",
            protocol="requests" if protocol.requests else "steady",
            requests_ok=failure.evidence.get("ok", 0),
            requests_failed=failure.evidence.get("failed", 0),
            errors=tuple(failure.evidence.get("errors", ())),
            seed=seed,
        )


def _say_nothing(phase: str = "") -> None:
    """A foreign server has no process to check, and the lines themselves are the progress."""


def _workload(args: argparse.Namespace) -> Workload:
    return Workload(
        prompts="file" if args.prompts else "random_tokens" if args.random_tokens else "text",
        file=args.prompts,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        shared_prefix_tokens=args.shared_prefix_tokens,
        temperature=args.temperature,
        endpoint="chat" if args.chat else "completions",
        vocabulary=args.vocabulary,
    )


def _protocol(args: argparse.Namespace) -> Protocol:
    slo = Slo(ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms, e2el_ms=args.slo_e2el_ms)
    return Protocol(
        warmup_min_s=min(Protocol().warmup_min_s, args.warmup_s),
        warmup_max_s=args.warmup_s,
        window_s=args.window_s,
        windows=args.windows,
        max_windows=max(args.windows, args.max_windows or 0),
        interval=args.interval,
        requests=args.requests,
        request_timeout_s=args.request_timeout_s,
        stall_s=args.stall_s,
        max_error_rate=args.max_error_rate,
        slo=slo if slo != Slo() else None,
    )


def _describe(workload: Workload, protocol: Protocol) -> str:
    how = (
        f"{protocol.requests} requests over the whole wall"
        if protocol.requests
        else f"steady state over {protocol.windows} windows of {int(protocol.window_s)} s"
    )
    tokens = f"{_say_length(workload.input_tokens)} tokens in, {_say_length(workload.output_tokens)} out"
    return f"{workload.prompts} prompts, {tokens}, {how}"


def _say_length(length: Length) -> str:
    return f"{length.low}-{length.high}" if isinstance(length, Uniform) else str(length)


def _length(text: str) -> Length:
    low, dash, high = text.partition("-")
    try:
        return Uniform(low=int(low), high=int(high)) if dash else int(low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no token count, e.g. 128 or 64-256") from None


def _ladder(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, e.g. 1,2,10") from None
    if not all(1 <= level <= MOST_STREAMS for level in levels):
        raise argparse.ArgumentTypeError(f"levels are between 1 and {MOST_STREAMS}")
    return levels


if __name__ == "__main__":
    sys.exit(main())
