"""Keeps tokens, keys and passwords out of logs and records. Standard library only (the supervisor uses it).

It knows secrets by the name of the variable or flag that carries them, by their place in a URI, and by the prefix of
a hub token. A secret in any other shape is not known.
"""

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"

_NAME = re.compile(r"TOKEN(?!S|IZ)|SECRET|PASSW(OR)?D|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH(?!OR)", re.I)
_URI_PASSWORD = re.compile(r"(?P<head>://[^\s/:@]*:)[^\s/@]+(?=@)")
_URI_QUERY = re.compile(r"(?P<head>[?&](?:token|api_?key|access_?key|password|secret|signature)=)[^\s&#]+", re.I)
_BEARER = re.compile(r"(?P<head>\bBearer\s+)[A-Za-z0-9._~+/=-]{8,}")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_SHORTEST = 6
"""Shorter values are not replaced wherever they occur: they would blank ordinary words."""


def is_secret(name: str) -> bool:
    """Whether a variable or flag of this name carries a secret (``HF_TOKEN``, ``--api-key``; not ``MAX_TOKENS``)."""
    return _NAME.search(name.replace("-", "_")) is not None


def secrets(env: Mapping[str, str], argv: Sequence[str] = ()) -> tuple[str, ...]:
    """Values that must not be shown, longest first."""
    found = {value for name, value in env.items() if is_secret(name)}
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith("--") and is_secret(word):
            found.add(word.partition("=")[2] or following)
    return tuple(sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True))


def redact(text: str, hidden: Sequence[str] = ()) -> str:
    """``text`` without the values in ``hidden``, passwords in URIs, bearer and hub tokens."""
    for value in hidden:
        text = text.replace(value, HIDDEN)
    for pattern in (_URI_PASSWORD, _URI_QUERY, _BEARER):
        text = pattern.sub(rf"\g<head>{HIDDEN}", text)
    return _HUB_TOKEN.sub(HIDDEN, text)


def redact_env(env: Mapping[str, str], hidden: Sequence[str] = ()) -> dict[str, str]:
    """The same variables, with secret values hidden, also where they stand inside other values."""
    return {name: HIDDEN if is_secret(name) else redact(value, hidden) for name, value in env.items()}


def redact_argv(argv: Sequence[str], hidden: Sequence[str] = ()) -> tuple[str, ...]:
    """The same words, with the values of secret flags hidden, also where they stand inside other words."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide_next:
            shown.append(HIDDEN)
        elif name.startswith("--") and is_secret(name) and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redact(word, hidden))
        hide_next = word.startswith("--") and is_secret(word) and not equals
    return tuple(shown)
