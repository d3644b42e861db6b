"""The exported winner: ``profile.yaml``."""

from typing import Literal, Self

from pydantic import Field, model_validator

from runner.schema.base import Model
from runner.schema.launch import LaunchConfig
from runner.schema.trial import Provenance


class ProfileLevel(Model):
    """Measured output tok/s at one concurrency, the baseline's beside it. None: not measured.

    ``limited_by`` names what the limit was if not the engine.
    """

    concurrency: int
    output_tok_s: float | None
    baseline_output_tok_s: float | None
    change_percent: float | None = None
    verdict: str
    limited_by: Literal["api_server"] | None = None


class Chosen(Model):
    """How the winner was chosen."""

    study: str
    trial: int
    rule: str
    trials: int
    starts: int
    runner_up: int | None = None
    margin_percent: float | None = None


class Profile(Model):
    """A launch configuration ready to serve, with the numbers that chose it.

    ``engine`` stands first: ``simulated`` says that no real engine made the numbers.
    """

    engine: str
    note: str | None = None
    fingerprint: str
    config: LaunchConfig
    goal_concurrency: int
    goal_output_tok_s: float
    levels: tuple[ProfileLevel, ...] = Field(default=())
    synthetic_acceptance: float | None = None
    chosen: Chosen
    provenance: Provenance = Provenance()

    @model_validator(mode="after")
    def _as_measured(self) -> Self:
        if self.config.fingerprint != self.fingerprint:
            raise ValueError(
                f"the configuration was edited: its fingerprint is {self.config.fingerprint}, the measured one's "
                f"{self.fingerprint}; export it again, the figures only hold for what was measured"
            )
        return self
