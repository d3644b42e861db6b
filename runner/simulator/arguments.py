"""The command line of ``serve``: vLLM's flags that the search spaces and the runner use, refused as vLLM refuses.

Dashes and underscores are the same, a JSON flag may also come as dotted pieces (which then replace the literal), and
``-O2`` is ``--optimization-level 2``. Flags of vLLM that change nothing here are taken and ignored (``INERT``); flags
vLLM does not know end the process with argparse's exit code 2, as there.

Source: ``vllm serve --help`` of vLLM 0.32 and 0.33.
"""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from runner.space.installed import flags_of_help

JSON_FLAGS = {
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "--compilation-config": "--compilation-config",
    "--speculative-config": "--speculative-config",
    "--hf-overrides": "--hf-overrides",
    "--kernel-config": "--kernel-config",
    "--attention-config": "--attention-config",
    "--additional-config": "--additional-config",
}
INTEGERS = (
    ("--port", 8000),
    ("--tensor-parallel-size", 1),
    ("--pipeline-parallel-size", 1),
    ("--data-parallel-size", 1),
    ("--decode-context-parallel-size", 1),
    ("--max-num-seqs", None),
    ("--max-num-batched-tokens", None),
    ("--max-num-active-seqs", None),
    ("--kv-cache-memory-bytes", None),
    ("--block-size", None),
    ("--stream-interval", 1),
    ("--api-server-count", 1),
    ("--max-cudagraph-capture-size", None),
    ("--num-gpu-blocks-override", None),
    ("--shutdown-timeout", 0),
)
SWITCHES = (
    "--enforce-eager",
    "--disable-custom-all-reduce",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--async-scheduling",
    "--enable-expert-parallel",
    "--enable-force-include-usage",
    "--disable-log-stats",
    "--disable-uvicorn-access-log",
    "--fail-on-environ-validation",
    "--skip-tokenizer-init",
    "--cudagraph-metrics",
)
INERT_SWITCHES = (
    "--trust-remote-code",
    "--enable-log-requests",
    "--scheduler-reserve-full-isl",
    "--enable-mfu-metrics",
    "--disable-log-requests",
    "--numa-bind",
)
INERT_VALUES = (
    "--tokenizer",
    "--seed",
    "--quantization",
    "--kv-cache-dtype",
    "--generation-config",
    "--uvicorn-log-level",
    "--attention-backend",
    "--max-logprobs",
    "--prefill-schedule-interval",
    "--long-prefill-token-threshold",
    "--api-key",
    "--download-dir",
    "--revision",
    "--tokenizer-mode",
    "--chat-template",
    "--moe-backend",
    "--all2all-backend",
    "--disable-access-log-for-endpoints",
)
SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-O": "--optimization-level",
}
LOAD_FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "pt",
    "npcache",
    "dummy",
    "sharded_state",
    "tensorizer",
    "runai_streamer",
    "runai_streamer_sharded",
    "bitsandbytes",
    "mistral",
    "gguf",
)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the words after ``serve``; argparse ends the process with code 2 when it cannot."""
    return _parser().parse_args(_normal(words))


def flags() -> frozenset[str]:
    """Names of the flags that ``serve`` takes, as ``installed_flags`` names a real one's."""
    return flags_of_help(_parser().format_help())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm serve", allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--max-model-len", type=_model_len)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--dtype", choices=("auto", "half", "float16", "bfloat16", "float", "float32"), default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--optimization-level", type=int, choices=(0, 1, 2, 3), default=2)
    parser.add_argument("--performance-mode", choices=("balanced", "interactivity", "throughput"), default="balanced")
    parser.add_argument("--distributed-executor-backend", choices=("uni", "mp", "ray", "external_launcher"))
    parser.add_argument("--cudagraph-capture-sizes", type=int, nargs="+")
    for flag in sorted(set(JSON_FLAGS.values())):
        parser.add_argument(flag, type=_json_object)
    for flag, default in INTEGERS:
        parser.add_argument(flag, type=int, default=default)
    for flag in SWITCHES + INERT_SWITCHES:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction)
    for flag in INERT_VALUES:
        parser.add_argument(flag)
    return parser


def _normal(words: Sequence[str]) -> list[str]:
    """Long flags with dashes, short ones spelt out, dotted JSON pieces gathered into one literal at the end."""
    plain: list[str] = []
    gathered: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=") if word.startswith("-") else (word, "", "")
        if flag.startswith("--"):
            head, dot, tail = flag.partition(".")
            flag = head.replace("_", "-") + dot + tail
        elif re.fullmatch(r"-O\d", flag):
            flag, equals, value = "-O", "=", flag[2:]
        head, dot, path = flag.partition(".")
        if dot and head in JSON_FLAGS:
            text = value if equals else (rest.pop(0) if rest else "")
            _put(gathered.setdefault(JSON_FLAGS[head], {}), path.split("."), _literal(text))
            continue
        flag = SHORT.get(flag, JSON_FLAGS.get(flag, flag))
        plain.append(flag + equals + value)
    return plain + [f"{flag}={json.dumps(value)}" for flag, value in gathered.items()]


def _put(target: dict[str, Any], path: Sequence[str], value: object) -> None:
    for step in path[:-1]:
        target = target.setdefault(step, {})
    target[path[-1]] = value


def _literal(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to json: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to a JSON object")
    return value


def _model_len(text: str) -> int:
    """``4096``, ``4k`` (decimal), ``4K`` (binary), ``-1`` or ``auto`` (what fits)."""
    if text in ("auto", "-1"):
        return -1
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"invalid integer value: {text!r}")
    scale = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}[match[2]]
    return int(float(match[1]) * scale)
