"""This load benchmark beside ``vllm bench serve`` and guidellm, at a server that knows the truth.

Server on the first core, the client's whole process tree on the second. CPU seconds are user + system of the tree, less
those of a run with one request of one token (start-up). Every client reports its own tok/s and TPOT; the server's own
clock says what they should have been.

    python -m tests.bench.load.side_by_side [--concurrency 1,64,256,1024] [--out results/bench]

guidellm gets an environment of its own under the user's cache folder, installed the first time it is needed.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.fakes.truth import Truth, serving

GUIDELLM = "guidellm==0.8.1"
INPUT_TOKENS = 32
OUTPUT_TOKENS = 124
TTFT_MS, TPOT_MS = 200.0, 50.0
ROUNDS = 3
"""Requests a stream, where a client counts requests."""

LEAST_FOR_CPU = 256
"""With fewer streams the start-up that is taken off is larger than what is left."""

VLLM_CLI = Path(__file__).parents[3] / "runner" / "serving" / "launcher.py"


@dataclass(frozen=True, slots=True)
class Reported:
    """What a client said. ``tpot_ms`` is its median of what vLLM calls TPOT."""

    tok_s: float
    tpot_ms: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Row:
    """One client at one concurrency. Errors are relative to the server's own clock."""

    client: str
    concurrency: int
    tok_s: float
    held_tok_s: float
    error_percent: float
    tpot_error_percent: float
    ttft_error_percent: float
    mean_in_flight: float
    peak_in_flight: int
    cpu_s_per_mtok: float


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a client: at ``url``, C streams, so many requests of so many tokens; files under ``folder``."""

    url: str
    concurrency: int
    requests: int
    output_tokens: int
    folder: Path


Client = tuple[Callable[[Job], list[str]], Callable[[Job], Reported]]


def ours_steady(job: Job) -> list[str]:
    """The default protocol: the window is inside the closed loop."""
    how = ["--window-s", "4", "--windows", "3", "--warmup-s", "10"]
    return [*_ours(job), *(how if job.output_tokens > 1 else ["--requests", "1"])]


def ours_requests(job: Job) -> list[str]:
    """The naive protocol, as the peers do it."""
    return [*_ours(job), "--requests", str(job.requests)]


def _ours(job: Job) -> list[str]:
    lengths = ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(job.output_tokens)]
    return [
        *(sys.executable, "-m", "runner.load", "--url", job.url, "--concurrency", str(job.concurrency)),
        *(*lengths, "--json", str(job.folder / "ours.json")),
    ]


def read_ours(job: Job) -> Reported:
    level = json.loads((job.folder / "ours.json").read_text())["levels"][0]
    tpot = level["tpot_ms"] or {"p50": float("nan")}
    return Reported(level["output_tok_s"], tpot["p50"], level["ttft_ms"]["p50"])


def vllm(job: Job) -> list[str]:
    """``vllm bench serve`` of this environment."""
    port = job.url.rsplit(":", 1)[1]
    return [
        *(sys.executable, str(VLLM_CLI), "bench", "serve", "--backend", "vllm", "--host", "127.0.0.1", "--port", port),
        *("--model", "truth", "--tokenizer", str(job.folder / "tokenizer"), "--dataset-name", "random"),
        *("--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(job.output_tokens), "--ignore-eos"),
        *("--num-prompts", str(job.requests), "--max-concurrency", str(job.concurrency), "--disable-tqdm"),
        *("--save-result", "--result-dir", str(job.folder), "--result-filename", "vllm.json"),
    ]


def read_vllm(job: Job) -> Reported:
    found = json.loads((job.folder / "vllm.json").read_text())
    return Reported(found["output_throughput"], found["median_tpot_ms"], found["median_ttft_ms"])


def guidellm(job: Job) -> list[str]:
    """guidellm from its own environment."""
    data = f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={job.output_tokens}"
    return [
        *(str(guidellm_environment() / "bin" / "guidellm"), "run", "--disable-progress", "--data", data),
        *("--backend", f"kind=openai_http,target={job.url},model=truth,request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={job.concurrency}"),
        *("--constraint", f"kind=max_requests,count={job.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={job.folder / 'tokenizer'}"),
        *("--output", f"kind=json,path={job.folder / 'guidellm.json'}"),
    ]


def read_guidellm(job: Job) -> Reported:
    """Its ITL is what vLLM calls TPOT; its tok/s over all requests is the less wrong of its two."""
    metrics = json.loads((job.folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    return Reported(
        metrics["output_tokens_per_second"]["total"]["mean"],
        metrics["inter_token_latency_ms"]["successful"]["median"],
        metrics["time_to_first_token_ms"]["successful"]["median"],
    )


CLIENTS: dict[str, Client] = {
    "runner.load (steady)": (ours_steady, read_ours),
    "runner.load (requests)": (ours_requests, read_ours),
    "vllm bench serve": (vllm, read_vllm),
    "guidellm": (guidellm, read_guidellm),
}


def guidellm_environment() -> Path:
    """Where guidellm is installed; installs it when it is not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "tok100" / GUIDELLM
    if not (folder / "bin" / "guidellm").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", GUIDELLM], check=True)
    return folder


def make_tokenizer(folder: Path) -> None:
    """A small tokenizer trained on text that ships with Python: the peers insist on having one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(topics.topics.values(), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "model_max_length": 100_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run_client(client: Client, job: Job) -> float:
    """Run a client to its end on the second core; returns the CPU seconds of its process tree."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "VLLM_NO_USAGE_STATS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["taskset", "-c", "1", *client[0](job)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(name: str, concurrency: int, folder: Path, *, one_token: bool = False) -> tuple[float, Reported, Truth]:
    """CPU seconds, the client's word and the server's of one run at a fresh server."""
    requests = 1 if one_token else ROUNDS * concurrency
    pace = ("--ttft-ms", str(TTFT_MS), "--tpot-ms", str(TPOT_MS))
    with serving(*pace, prefix=("taskset", "-c", "0")) as served:
        tokens = 1 if one_token else OUTPUT_TOKENS
        job = Job(served.base_url, 1 if one_token else concurrency, requests, tokens, folder)
        cpu_s = run_client(CLIENTS[name], job)
        return cpu_s, CLIENTS[name][1](job), served.truth()


def row(name: str, concurrency: int, start_cpu_s: float, folder: Path) -> Row:
    """One client at one concurrency."""
    cpu_s, told, truth = measured(name, concurrency, folder)
    held = truth.held_tok_s(concurrency, OUTPUT_TOKENS)
    return Row(
        client=name,
        concurrency=concurrency,
        tok_s=round(told.tok_s, 1),
        held_tok_s=round(held, 1),
        error_percent=round((told.tok_s / held - 1) * 100, 2),
        tpot_error_percent=round((told.tpot_ms / float(np.median(truth.tpot_ms)) - 1) * 100, 2),
        ttft_error_percent=round((told.ttft_ms / float(np.median(truth.ttft_ms)) - 1) * 100, 1),
        mean_in_flight=round(truth.mean_in_flight(), 1),
        peak_in_flight=truth.peak,
        cpu_s_per_mtok=round((cpu_s - start_cpu_s) / truth.tokens * 1e6, 1),
    )


def table(rows: list[Row], machine: str) -> str:
    """The rows as Markdown, with the machine named."""
    lines = [
        "# Load clients side by side",
        "",
        f"{machine}. Server on one core, client on the other, loopback.",
        f"{OUTPUT_TOKENS} one-token chunks a request, {TPOT_MS:g} ms apart, TTFT {TTFT_MS:g} ms.",
        f"{ROUNDS} requests a stream (steady: 3 windows of 4 s). One run a cell.",
        "Errors are against the server's own clock. `C held gives`: C x tokens / mean time of a request at the server,",
        "what a closed loop without a gap between two requests comes to.",
        "CPU: user + system seconds of the client's process tree per million tokens, start-up taken off.",
        "Errors include whatever else the machine was doing during the run.",
        "",
        "| C | client | tok/s | C held gives | error % | TPOT error % | TTFT error % | mean / peak in flight "
        "| CPU s/Mtok |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda one: one.concurrency):
        lines.append(
            f"| {r.concurrency} | {r.client} | {r.tok_s} | {r.held_tok_s} | {r.error_percent:+.2f} "
            f"| {r.tpot_error_percent:+.2f} | {r.ttft_error_percent:+.1f} | {r.mean_in_flight} / {r.peak_in_flight} "
            f"| {r.cpu_s_per_mtok if r.concurrency >= LEAST_FOR_CPU else 'noise'} |"
        )
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Cores, processor, Python, date."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{os.cpu_count()} cores ({cpu}), Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}"


def compare(concurrencies: list[int], out: Path) -> list[Row]:
    """Run all clients at all concurrencies; write ``load.md`` and ``load.json`` to ``out``."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_tokenizer(folder / "tokenizer")
        for name in CLIENTS:
            measured(name, 1, folder, one_token=True)  # The first run installs, or compiles what it imports.
            start_cpu_s, _, _ = measured(name, 1, folder, one_token=True)
            for concurrency in concurrencies:
                rows.append(row(name, concurrency, start_cpu_s, folder))
                print(rows[-1], flush=True)
    out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"machine": machine(), "rows": [asdict(one) for one in rows]}
    (out / "load.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (out / "load.md").write_text(table(rows, facts["machine"]), encoding="utf-8")
    return rows


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--concurrency", default="1,64,256,1024")
    p.add_argument("--out", type=Path, default=Path("results/bench"))
    args = p.parse_args()
    compare([int(level) for level in args.concurrency.split(",")], args.out)
    print((args.out / "load.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
