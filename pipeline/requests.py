"""What a scheduled or submitted flow run is asked to do: the form in Prefect's UI, and its checks.

The command line makes the same requests, so that one configuration comes out of all three.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from pipeline.config import composed
from pipeline.runner import STAGES

NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
LIMIT = "gpu"  # the concurrency limit that `dapo deploy` makes
Stage = Literal[STAGES]  # type: ignore[valid-type]


def _given(name: str) -> JsonDict:
    """The schema of what has a value for `name`; a server forgets `required` of a deployment's."""
    return {"not": {"properties": {name: {"type": "null"}}}}


class Request(BaseModel):
    """What all flows have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str | None = Field(
        None,
        title="Run",
        pattern=NAME,
        description="Name of the run; what it has on disk is served. Default: the overrides'.",
    )
    overrides: list[str] = Field(
        [],
        title="Overrides",
        description="Hydra overrides, one a line, such as experiment=demo or update.lr=1e-4.",
    )
    limit: str | None = Field(
        None,
        title="Concurrency limit",
        description="Wait for a slot of this global concurrency limit, such as gpu; it must exist.",
    )


class Train(Request):
    """Train a run, or go on where it stopped."""

    model_config = ConfigDict(
        json_schema_extra={"not": {"allOf": [_given("stop"), _given("steps")]}}
    )

    stop: int | None = Field(
        None, title="Stop", ge=0, description="Train up to this step. Default: schedule.steps."
    )
    steps: int | None = Field(
        None,
        title="More steps",
        ge=1,
        description="Train so many steps more than the run has when it begins, instead of up to "
        "a fixed one.",
    )
    approve_every: int | None = Field(
        None,
        title="Approve every",
        ge=1,
        description="Wait for somebody to press Resume after every so many steps.",
    )
    force: bool = Field(
        False,
        title="Force",
        description="Rebuild artifacts of other settings instead of refusing them.",
    )

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.stop is not None and self.steps is not None:
            raise ValueError("give stop, a step to train up to, or steps, how many more: not both")
        return self

    def text(self, *, until: int | None = None) -> str:
        """The composed configuration. `until`: the step to train up to, where that is settled."""
        end = self.stop if until is None else until
        named = [] if self.run is None else [f"run={self.run}"]
        ended = [] if end is None else [f"schedule.steps={end}"]
        return composed([*self.overrides, *named, *ended])


class Prepare(Request):
    """Check prompts and held-out prompts and publish them as a run's."""


class Evaluate(Request):
    """Measure a policy of a run on its held-out prompts."""

    run: str = Field(title="Run", pattern=NAME, description="Name of the run.")
    step: int | None = Field(
        None, title="Step", ge=0, description="Whose policy. Default: the newest."
    )


class RerunStage(Request):
    """Rebuild one artifact of a run on the inputs that it was made from, with other settings."""

    run: str = Field(title="Run", pattern=NAME, description="Name of the run.")
    step: int = Field(title="Step", ge=0, description="0 for what came before the first step.")
    stage: Stage = Field(title="Stage")
    round: int | None = Field(None, title="Round", ge=0, description="Default: the step's last.")
    replace: bool = Field(
        False,
        title="Replace",
        description="Put it in the original's place instead of beside it; what follows is stale.",
    )
