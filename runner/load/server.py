"""The server's own word: what it serves, counts, holds in its cache, and whether its engine lives.

Plain blocking requests from the parent, outside the load's connections.
"""

import re
import time

import requests
from pydantic import PositiveInt

from runner.errors import UsageError
from runner.schema.base import Model

REPLY_S = 10.0
"""Longest wait for an answer under load."""

RESET_S = 5.0
"""Longest time the prefix cache may refuse to be reset (vLLM refuses while blocks are held)."""


class Target(Model):
    """The server under load.

    Attributes:
        base_url: Without ``/v1``, e.g. ``http://127.0.0.1:8000``.
        model: Name it serves.
        vocabulary: Ids below it are valid prompts; for random token ids.
        max_model_len: Longest prompt plus answer, tokens.
        api_server_pids: Processes of the server's front end, when they run on this machine.
        api_key: Sent as bearer token.
    """

    base_url: str
    model: str
    vocabulary: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    api_server_pids: tuple[int, ...] = ()
    api_key: str | None = None


class Counters(Model):
    """Counters and gauges of vLLM, summed over engines. None: the server has no such series.

    Source: https://docs.vllm.ai/en/stable/usage/metrics.html
    """

    generation_tokens: float | None = None
    prompt_tokens: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    preemptions: float | None = None
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    running: float | None = None
    waiting: float | None = None


_SERIES = {
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
_SAMPLE = re.compile(rf"^({'|'.join(_SERIES)})(?:\{{.*\}})? (\S+)", re.MULTILINE)


def read_counters(text: str) -> Counters:
    """Pick the series that matter out of a Prometheus text, summed over their labels."""
    found: dict[str, float] = {}
    for series, value in _SAMPLE.findall(text):
        name = _SERIES[series]
        found[name] = found.get(name, 0.0) + float(value)
    return Counters(**found)


class Server:
    """The target's endpoints beside the completions. Not thread-safe."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._http = requests.Session()
        self._http.trust_env = False  # proxy variables must not come between the client and a server next door
        if target.api_key is not None:
            self._http.headers["Authorization"] = f"Bearer {target.api_key}"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _url(self, path: str) -> str:
        return f"{self.target.base_url.rstrip('/')}{path}"

    def counters(self) -> Counters | None:
        """Scrape ``/metrics``; None when the server has none or does not answer."""
        try:
            reply = self._http.get(self._url("/metrics"), timeout=REPLY_S)
        except requests.RequestException:
            return None
        return read_counters(reply.text) if reply.ok else None

    def health(self) -> int | None:
        """Status of ``/health``; None when nothing answers."""
        try:
            return self._http.get(self._url("/health"), timeout=REPLY_S).status_code
        except requests.RequestException:
            return None

    def reset_prefix_cache(self) -> bool | None:
        """Empty the prefix cache, asking again while blocks are held.

        Returns:
            Whether the server says it did; None when it has no such endpoint (vLLM: development mode only).
        """
        deadline = time.monotonic() + RESET_S
        while True:
            try:
                reply = self._http.post(self._url("/reset_prefix_cache"), timeout=REPLY_S)
            except requests.RequestException:
                return None
            if not reply.ok:
                return None
            if _says_success(reply):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def token_ids(self, text: str) -> list[int] | None:
        """``text`` in the model's tokens; None when the server cannot say (or finds it too long)."""
        asked = {"model": self.target.model, "prompt": text, "add_special_tokens": False}
        try:
            reply = self._http.post(self._url("/tokenize"), json=asked, timeout=REPLY_S)
            tokens = reply.json().get("tokens") if reply.ok else None
        except (requests.RequestException, AttributeError):
            return None
        return tokens if isinstance(tokens, list) else None

    def prompt_tokens(self, path: str, body: dict[str, object]) -> int | None:
        """How many tokens the server finds in a prompt, by sending it; None when it does not tell."""
        try:
            reply = self._http.post(self._url(path), json=body, timeout=REPLY_S * 6)
            usage = reply.json().get("usage") if reply.ok else None
        except (requests.RequestException, AttributeError):
            return None
        return usage.get("prompt_tokens") if isinstance(usage, dict) else None


def find_target(base_url: str, *, model: str | None = None, api_key: str | None = None) -> Target:
    """Ask a server what it serves.

    Args:
        base_url: With or without a trailing ``/v1``; ``http://`` may be left out.
        model: One of the names it serves; None takes the first.
        api_key: Bearer token.

    Raises:
        UsageError: Nothing answers there, or not with models.
    """
    base_url = base_url.rstrip("/").removesuffix("/v1")
    base_url = base_url if "://" in base_url else f"http://{base_url}"
    server = Server(Target(base_url=base_url, model="", api_key=api_key))
    try:
        reply = server._http.get(server._url("/v1/models"), timeout=REPLY_S)
        reply.raise_for_status()
        models = {entry["id"]: entry for entry in reply.json()["data"]}
    except (requests.RequestException, KeyError, TypeError) as error:
        raise UsageError(
            f"no OpenAI-compatible server at {base_url}: {_why_not(error)}", remedy="check --url"
        ) from error
    finally:
        server.close()
    if not models or (model is not None and model not in models):
        raise UsageError(f"{base_url} does not serve {model or 'any model'}", remedy=f"it serves: {', '.join(models)}")
    name = model or next(iter(models))
    return Target(base_url=base_url, model=name, max_model_len=models[name].get("max_model_len"), api_key=api_key)


def _why_not(error: Exception) -> str:
    """In a user's words, where the library's own say more about itself than about the server."""
    if isinstance(error, requests.Timeout):
        return f"no answer within {REPLY_S:.0f} s"
    if isinstance(error, requests.ConnectionError):
        return "nothing answers there"
    if isinstance(error, requests.HTTPError | requests.exceptions.InvalidSchema):
        return str(error)
    return "its /v1/models is not a list of models"


def _says_success(reply: requests.Response) -> bool:
    """vLLM up to 0.8 answers an empty 200; later ones say it in the body."""
    if not reply.content.strip():
        return True
    try:
        return bool(reply.json().get("success", True))
    except (requests.JSONDecodeError, AttributeError):
        return True
