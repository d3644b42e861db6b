"""What a study is on disk: ``study.yaml``, and the mark of a trial that is under way."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from runner.schema.base import Model, Scalar
from runner.schema.experiment import Experiment
from runner.schema.launch import LaunchConfig
from runner.schema.trial import Provenance, Role

STUDY_SCHEMA_VERSION: Literal[1] = 1
"""Of ``StudyDescription``; every earlier version stays readable."""


class StudyDescription(Model):
    """An experiment and a search space as they were resolved when the study began.

    Attributes:
        space: The space's name.
        space_content: The space as loaded, includes resolved (JSON-able).
        forked_from: The study whose finished trials this one took over.
    """

    schema_version: Literal[1] = STUDY_SCHEMA_VERSION
    study: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    experiment: Experiment
    space: str
    space_content: dict[str, Any] = {}
    provenance: Provenance = Provenance()
    created_at: datetime
    forked_from: str | None = None


class Running(Model):
    """A trial that was begun. Written before its server starts, removed when its record is safe.

    Attributes:
        marker: Stands in the environment of every process of the trial; leftovers are found by it.
    """

    number: int = Field(ge=0)
    role: Role = Role.SEARCH
    repeat_of: int | None = None
    params: dict[str, Scalar] = {}
    config: LaunchConfig
    marker: str
    started_at: datetime
