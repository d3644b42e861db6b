"""``python -m runner.load`` as somebody else would use it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.fakes.truth import disturbed, serving, tried

QUICK = ("--window-s", "1", "--windows", "1", "--warmup-s", "1", "--output-tokens", "24", "--input-tokens", "8-16")


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own; again where a busy machine made a level void."""
    command = [sys.executable, "-m", "runner.load", *args]
    return tried(
        lambda: subprocess.run(command, capture_output=True, text=True, check=False),
        lambda done: not disturbed(done.stdout),
    )


def test_a_ladder_prints_the_table_and_writes_every_figure(tmp_path: Path) -> None:
    """One line a level, JSON with ``levels``, exit code 0; samples recompute to the same line."""
    out = tmp_path / "out.json"
    with serving("--tpot-ms", "2") as served:
        done = run(
            "--url",
            f"{served.base_url}/v1",
            "--concurrency",
            "1,4",
            *QUICK,
            "--json",
            str(out),
            "--samples",
            str(tmp_path),
        )
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.startswith("truth at http://127.0.0.1:")
    assert "seed" in head
    assert [line[:6] for line in lines] == ["C=   1", "C=   4"]
    assert all(" ok (0 err) | wall=" in line and " tok/s | steady 1 x 1 s" in line for line in lines)
    levels = json.loads(out.read_text())["levels"]
    assert [(level["concurrency"], level["valid"], level["reason"]) for level in levels] == [
        (1, True, None),
        (4, True, None),
    ]
    assert all(level["output_tok_s"] > 0 for level in levels)
    again = run("--recompute", str(tmp_path / "C4.parquet"))
    assert again.returncode == 0
    assert again.stdout.strip() == lines[1]


def test_a_void_level_is_exit_code_1_and_the_ladder_goes_on(tmp_path: Path) -> None:
    """The failed level has no number, quotes the reason, and the next one is still tried."""
    out = tmp_path / "out.json"
    with serving("--no-done") as served:
        done = run("--url", served.base_url, "--concurrency", "1,2", *QUICK, "--json", str(out))
    assert done.returncode == 1
    assert done.stdout.count("void: load_failed") == 2
    levels = json.loads(out.read_text())["levels"]
    assert [(level["output_tok_s"], level["valid"]) for level in levels] == [(None, False), (None, False)]
    assert all("[DONE]" in level["reason"] and level["errors"] for level in levels)


def test_the_naive_protocol_says_so(tmp_path: Path) -> None:
    """``--requests 10``: ten requests, whole wall, the row names it."""
    with serving("--tpot-ms", "2") as served:
        done = run("--url", served.base_url, "--concurrency", "2", "--requests", "10", "--output-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "C=   2 |  10/ 10 ok (0 err) | wall=" in done.stdout
    assert " tok/s | requests" in done.stdout


def test_chat_prompts_from_a_file(tmp_path: Path) -> None:
    """The chat endpoint with a user's prompts is counted as exactly as completions."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two"}\n{"prompt": "three \\"four\\" five"}\n', encoding="utf-8")
    with serving("--tpot-ms", "2") as served:
        done = run("--url", served.base_url, "--concurrency", "2", "--chat", "--prompts", str(prompts), *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
