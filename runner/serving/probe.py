"""Asks a server by HTTP: health, models, one completion, counters, settings. Loopback only; no proxies, no retries."""

import re
from typing import Any

import requests

PROBE_TOKENS = 8
"""Tokens of the completion that proves a server ready; short, and more than one engine step."""

_LONGEST = 500
"""Characters of a server's own words that are kept."""

_PROMPT = (11, 12, 13, 14)
"""Token ids that every vocabulary has; they also work without a tokenizer."""

_COUNTERS = re.compile(
    r"^vllm:(?P<name>generation_tokens_total|prompt_tokens_total|iteration_tokens_total_sum|num_requests_running"
    r"|num_requests_waiting)(\{[^}]*\})? (?P<value>\S+)$",
    re.MULTILINE,
)


class Unreachable(Exception):
    """No whole answer.

    Args:
        message: What happened.
        timed_out: Whether time ran out; otherwise the connection was refused or broke.
    """

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Refused(Exception):
    """An answer that is not what was asked for.

    Args:
        status: HTTP status.
        text: What the server said, shortened.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.text = text


class Probe:
    """Asks one server. Safe to use from one thread at a time.

    Args:
        base_url: E.g. ``http://127.0.0.1:20000``.
        served_name: The model name that only this trial's server knows.
        api_key: Sent as bearer token.
    """

    def __init__(self, base_url: str, served_name: str, api_key: str | None = None) -> None:
        self._base_url = base_url
        self.served_name = served_name
        self._session = requests.Session()
        self._session.trust_env = False  # A proxy of the shell has no business on loopback.
        if api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def health(self, timeout_s: float = 5.0) -> int:
        """HTTP status of ``/health``: 200, or 503 once the engine is known to be dead."""
        return self._get("/health", timeout_s).status_code

    def models(self, timeout_s: float = 10.0) -> tuple[str, ...]:
        """Names the server answers to."""
        return tuple(str(model["id"]) for model in self._json(self._get("/v1/models", timeout_s))["data"])

    def completion(self, timeout_s: float) -> int:
        """Ask for a few tokens of exact number; return how many the server says it made."""
        body = {
            "model": self.served_name,
            "prompt": _PROMPT,
            "max_tokens": PROBE_TOKENS,
            "min_tokens": PROBE_TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        answer = self._json(response := self._ask("POST", "/v1/completions", timeout_s, body))
        if "error" in answer or "usage" not in answer:
            raise Refused(response.status_code, _words(response, answer))
        return int(answer["usage"]["completion_tokens"])

    def server_info(self, timeout_s: float = 20.0) -> dict[str, Any] | None:
        """The resolved configuration; None when the server has no such endpoint."""
        response = self._get("/server_info?config_format=json", timeout_s)
        return self._json(response) if response.status_code == 200 else None

    def counters(self, timeout_s: float = 5.0) -> dict[str, float]:
        """The counters that tell progress, summed over engines; empty when the server has none of them."""
        found: dict[str, float] = {}
        for match in _COUNTERS.finditer(self._get("/metrics", timeout_s).text):
            found[match["name"]] = found.get(match["name"], 0.0) + float(match["value"])
        return found

    def close(self) -> None:
        """Drop the connections."""
        self._session.close()

    def _get(self, path: str, timeout_s: float) -> requests.Response:
        return self._ask("GET", path, timeout_s)

    def _ask(
        self, method: str, path: str, timeout_s: float, body: dict[str, object] | None = None
    ) -> requests.Response:
        try:
            return self._session.request(method, f"{self._base_url}{path}", json=body, timeout=timeout_s)
        except requests.RequestException as error:
            raise Unreachable(str(error), timed_out=isinstance(error, requests.Timeout)) from error

    def _json(self, response: requests.Response) -> dict[str, Any]:
        try:
            answer = response.json()
        except requests.JSONDecodeError as error:
            raise Refused(response.status_code, response.text[:_LONGEST]) from error
        if not isinstance(answer, dict):
            raise Refused(response.status_code, response.text[:_LONGEST])
        if response.status_code != 200 and "error" not in answer:
            raise Refused(response.status_code, response.text[:_LONGEST])
        return answer


def _words(response: requests.Response, answer: dict[str, Any]) -> str:
    """The message of an OpenAI error object, else the whole text."""
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or response.text)[:_LONGEST]
