"""A completion or chat request as vLLM reads it, and the errors it gives. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runner.simulator.text import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""``max_tokens`` of /v1/completions when it is absent."""


class BadRequest(Exception):
    """An answer with an error object.

    Args:
        message: As vLLM words it.
        status: HTTP status.
        kind: ``type`` of the error object.
        param: Field at fault.
    """

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self._error = {"message": message, "type": kind, "param": param, "code": status}

    @property
    def body(self) -> bytes:
        """The reply's body."""
        return msgspec.json.encode({"error": self._error})


@dataclass(frozen=True)
class Asked:
    """One prompt of a request, checked.

    Attributes:
        stops_early: The model may end by itself: neither ``ignore_eos`` nor ``min_tokens`` forbids it.
        usage_each: Usage in every chunk; ``usage_last`` only in one of its own at the end.
    """

    chat: bool
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    usage_each: bool
    usage_last: bool
    token_ids: bool
    stops_early: bool


def read_request(
    body: bytes,
    *,
    chat: bool,
    names: Sequence[str],
    tokenizer: Tokenizer,
    vocabulary: int,
    max_model_len: int,
    force_usage: bool = False,
) -> list[Asked]:
    """All prompts of a request. ``force_usage`` is ``--enable-force-include-usage``: usage whether asked for or not.

    Raises:
        BadRequest: As vLLM refuses.
    """
    fields = _fields(body)
    model = fields.get("model") or names[0]
    if model not in names:
        message = f"The model `{model}` does not exist. Valid aliases: {', '.join(names)}."
        raise BadRequest(message, status=404, kind="NotFoundError", param="model")
    stream = bool(fields.get("stream"))
    options = fields.get("stream_options") or {}
    _check_options(options, stream, fields.get("temperature"))
    prompts = _chat_prompts(fields, tokenizer) if chat else _prompts(fields, tokenizer, vocabulary)
    return [
        Asked(
            chat=chat,
            model=model,
            prompt=tuple(prompt),
            max_tokens=_max_tokens(fields, len(prompt), chat, max_model_len),
            stream=stream,
            usage_each=force_usage or bool(options.get("include_usage") and options.get("continuous_usage_stats")),
            usage_last=force_usage or bool(options.get("include_usage")),
            token_ids=bool(fields.get("return_token_ids")),
            stops_early=not fields.get("ignore_eos") and not fields.get("min_tokens"),
        )
        for prompt in prompts
    ]


def _check_options(options: object, stream: bool, temperature: object) -> None:
    if options and not stream:
        raise BadRequest(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)", param="stream_options"
        )
    if isinstance(temperature, int | float) and temperature < 0:
        given = float(temperature)
        raise BadRequest(
            f"temperature must be non-negative, got {given}. (parameter=temperature, value={given})",
            param="temperature",
        )


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        message = "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.0', 'msg': 'JSON decode error'}"
        raise BadRequest(message, kind="Bad Request", param="body.0") from None
    if not isinstance(fields, dict):
        raise BadRequest("1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body'}", kind="Bad Request")
    return fields


def _prompts(fields: dict[str, Any], tokenizer: Tokenizer, vocabulary: int) -> list[list[int]]:
    prompt = fields.get("prompt")
    if not prompt:
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise BadRequest(message, param="prompt")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    found = [tokenizer.encode(one) if isinstance(one, str) else list(one) for one in (prompt if several else [prompt])]
    for ids in found:
        highest = max(ids, default=0)
        if highest >= vocabulary:
            raise BadRequest(f"Token id {highest} is out of vocabulary")
    return found


def _chat_prompts(fields: dict[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("1 validation error:\n  {'type': 'missing', 'loc': 'body.messages'}", kind="Bad Request")
    text = ""
    for message in messages:
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        text += f"\n{message.get('role')}\n" + "".join(str(part.get("text", "")) for part in parts)
    return [tokenizer.encode(text + "\nassistant\n")]


def _max_tokens(fields: dict[str, Any], prompt_tokens: int, chat: bool, max_model_len: int) -> int:
    asked = fields.get("max_completion_tokens") or fields.get("max_tokens")
    room = max_model_len - prompt_tokens
    limit = asked if asked is not None else (room if chat else DEFAULT_MAX_TOKENS)
    if not isinstance(limit, int) or limit < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {limit}. (parameter=max_tokens, value={limit})")
    least = fields.get("min_tokens") or 0
    if least > limit:
        raise BadRequest(f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.")
    if limit > max_model_len:
        raise BadRequest(
            f"max_tokens={limit} cannot be greater than max_model_len={max_model_len}. Please request fewer output "
            f"tokens. (parameter=max_tokens, value={limit})",
            param="max_tokens",
        )
    if room < 1 or (asked is not None and limit > room):
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {limit} output "
            f"tokens and your prompt contains {prompt_tokens} input tokens, for a total of {limit + prompt_tokens} "
            f"tokens. (parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    return limit
