"""What may vary in a study: ``search_spaces/*.yaml``. The language; what its words mean is in ``runner/space``."""

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from runner.schema.base import FlagValue, Model, Scalar


class IntRange(Model):
    """Whole numbers ``low..high``, both included, ``step`` apart; ``log``: searched on a logarithmic scale."""

    low: int
    high: int
    step: int = Field(default=1, ge=1)
    log: bool = False

    @model_validator(mode="after")
    def _usable(self) -> Self:
        _check_range(self.low, self.high, self.log, self.step != 1)
        return self


class FloatRange(Model):
    """Numbers ``low..high``, both included; ``step`` apart, or any when it is None."""

    low: float
    high: float
    step: float | None = Field(default=None, gt=0)
    log: bool = False

    @model_validator(mode="after")
    def _usable(self) -> Self:
        _check_range(self.low, self.high, self.log, self.step is not None)
        return self


def _check_range(low: float, high: float, log: bool, stepped: bool) -> None:
    if low >= high:
        raise ValueError(f"low {low} must be below high {high}")
    if log and low <= 0:
        raise ValueError(f"a logarithmic range starts above 0, low is {low}")
    if log and stepped:
        raise ValueError("`log` and `step` exclude each other")


class Preset(Model):
    """A named value that is calculated from the rest of the configuration or from the machine."""

    preset: str


class Choice(Model):
    """One value of a knob, written out. Plain values need no more than themselves.

    Attributes:
        value: The value; or ``preset`` names one that is calculated.
        label: What the value is called in tables; the value itself, or the preset's name, unless given.
        keep_failing: Why a value that is known to fail is kept all the same.
    """

    value: Scalar | None = None
    preset: str | None = None
    label: str | None = None
    keep_failing: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.value is None) == (self.preset is None):
            raise ValueError("a choice has either `value` or `preset`")
        return self


class Bundle(Model):
    """Several settings that one choice makes together; an empty one is the knob's unset."""

    flags: dict[str, FlagValue | Preset] = {}
    structured: dict[str, dict[str, Any]] = Field(default={}, alias="json")
    env: dict[str, str | Preset] = {}
    keep_failing: str | None = None

    @property
    def empty(self) -> bool:
        """Whether it sets nothing."""
        return not (self.flags or self.structured or self.env)


def _form(value: object) -> str | None:
    if isinstance(value, bool | int | float | str):
        return "plain"
    return "written" if isinstance(value, dict | Choice) else None


def _kind(value: object) -> str:
    return "bundles" if isinstance(value, dict) else "values"


def _number(value: object) -> str:
    return "several" if isinstance(value, list | tuple) else "one"


ChoiceItem = Annotated[
    Annotated[Scalar, Tag("plain")] | Annotated[Choice, Tag("written")],
    Discriminator(
        _form,
        custom_error_type="no_choice",
        custom_error_message="a choice is a plain value, or `{value: ...}`; a list of values is a named preset",
    ),
]
Values = Annotated[tuple[ChoiceItem, ...], Field(min_length=1)]
Bundles = Annotated[dict[str, Bundle], Field(min_length=1)]
Choices = Annotated[Annotated[Values, Tag("values")] | Annotated[Bundles, Tag("bundles")], Discriminator(_kind)]
Several = Annotated[tuple[Scalar, ...], Field(min_length=1)]
Condition = Annotated[Annotated[Scalar, Tag("one")] | Annotated[Several, Tag("several")], Discriminator(_number)]


class KnobSpec(Model):
    """One dimension of the space.

    Attributes:
        flag: Flag of ``vllm serve`` that the value goes to (no dashes in front).
        env: Environment variable that the value goes to.
        json: Field inside a structured flag: ``speculative-config.num_speculative_tokens``.
        choices: The values, or named bundles of settings (then without ``flag``, ``env``, ``json``).
        int: A range of whole numbers instead of choices.
        float: A range of numbers instead of choices.
        when: Knob -> value(s) under which this knob exists; all must hold.
        required: There is no unset: while ``when`` holds, a value is always chosen.
    """

    flag: str | None = None
    env: str | None = None
    field: str | None = Field(default=None, alias="json")
    choices: Choices | None = None
    int_range: IntRange | None = Field(default=None, alias="int")
    float_range: FloatRange | None = Field(default=None, alias="float")
    when: dict[str, Condition] = {}
    required: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        targets = [target for target in (self.flag, self.env, self.field) if target is not None]
        domains = [domain for domain in (self.choices, self.int_range, self.float_range) if domain is not None]
        if len(domains) != 1:
            raise ValueError("a knob has exactly one of `choices`, `int` and `float`")
        if isinstance(self.choices, dict):
            if targets:
                raise ValueError("bundles say themselves what they set: leave out `flag`, `env` and `json`")
        elif len(targets) != 1:
            raise ValueError("say where the value goes: exactly one of `flag`, `env` and `json`")
        if self.field is not None and "." not in self.field:
            raise ValueError(f"`json` names a field inside a structured flag, e.g. `{self.field}.some_field`")
        if self.required and not self.when:
            raise ValueError("`required` needs `when`: a knob that always exists must have its unset for the baseline")
        return self


class SpaceFile(Model):
    """One file of ``search_spaces/``.

    Attributes:
        include: Further files whose knobs and constraints belong to this space too; names are relative to this file.
        knobs: Name -> knob. A knob defined here wins over an included one of the same name.
        constraints: Expressions over resolved values that every configuration fulfils.
    """

    description: str = ""
    include: tuple[str, ...] = ()
    knobs: dict[str, KnobSpec] = {}
    constraints: tuple[str, ...] = ()
