"""Tokens, keys and passwords do not come through; ordinary words do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.serving.redaction import HIDDEN, is_secret, redact, redact_argv, redact_env, secrets


@pytest.mark.parametrize("name", ["HF_TOKEN", "--api-key", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
def test_names_of_secrets(name: str) -> None:
    """Variables and flags that carry secrets."""
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["MAX_TOKENS", "--max-num-batched-tokens", "TOKENIZERS_PARALLELISM", "--tokenizer", "NCCL_PROTO", "PATH"]
)
def test_names_that_only_look_like_it(name: str) -> None:
    """Counting tokens is no secret."""
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("postgresql://user:hunter2@db.example/x", "hunter2"),
        ("GET https://host/a?token=abcdef&x=1", "abcdef"),
        ("Authorization: Bearer abc.def-ghi12345", "abc.def-ghi12345"),
        ("downloading with hf_" + "a" * 30, "a" * 30),
        ("args: {'api_key': ['s3cr3t-value']}", "s3cr3t-value"),
    ],
)
def test_secrets_in_text(text: str, gone: str) -> None:
    """By value, by place in a URI, by prefix."""
    shown = redact(text, ("s3cr3t-value",))
    assert gone not in shown
    assert HIDDEN in shown


def test_argv_and_env() -> None:
    """Flags in both spellings, and variables by name."""
    argv = ("vllm", "serve", "m", "--api-key", "abcdefgh", "--x=1", "--hf-token=ijklmnop", "--max-num-seqs", "8")
    env = {"HF_TOKEN": "qrstuvwx", "NCCL_PROTO": "LL"}
    assert set(secrets(env, argv)) == {"qrstuvwx", "abcdefgh", "ijklmnop"}
    assert redact_argv(argv) == (
        "vllm", "serve", "m", "--api-key", HIDDEN, "--x=1", f"--hf-token={HIDDEN}", "--max-num-seqs", "8",
    )  # fmt: skip
    assert redact_env(env) == {"HF_TOKEN": HIDDEN, "NCCL_PROTO": "LL"}


@given(st.text(alphabet="abcdefgh0123456789:/@ .\n", max_size=300))
def test_redacting_twice_changes_nothing(text: str) -> None:
    """What was hidden stays hidden, and nothing else is touched by a second pass."""
    once = redact(text)
    assert redact(once) == once


def test_a_long_word_is_no_trouble() -> None:
    """A megabyte without a space is read in one pass (a slow pattern would take minutes)."""
    assert redact("x" * 1_000_000) == "x" * 1_000_000
