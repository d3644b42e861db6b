"""The one base of every value: frozen, no unknown keys, no NaN or infinity."""

from typing import Any

from pydantic import BaseModel, ConfigDict

Scalar = bool | int | float | str
"""What a choice, a flag or a default may be. Unset is the absence of the key, never a value."""

FlagValue = bool | int | float | str | tuple[int | str, ...]
"""``True``/``False`` become ``--x``/``--no-x``; a tuple becomes several words after one flag."""

JsonObject = dict[str, Any]
"""A structured flag's value, e.g. of ``--compilation-config``; must survive ``json.dumps``."""


class Model(BaseModel):
    """Base of every value that crosses a file or process border.

    Freezing is shallow: never mutate a dict that was received; make a changed copy and validate it again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_by_name=True)
