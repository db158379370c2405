"""Compose a run's configuration with Hydra and check all of it before anything starts."""

import difflib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

import conf
from pipeline import mirror, storage
from stages import evaluate, filter, prompts, prune, rollout, score, select, update, warmstart
from stages.errors import InputError
from stages.settings import Machine, Settings, without_credentials

CONFIG_DIR = Path(conf.__file__).parent.resolve()
CHECKOUT = CONFIG_DIR.parent
SETS = "evaluate.sets"
AS_TYPED = r"""["'\[{]|\$\{|choice\("""  # how a value begins that Hydra is to read
_composing = threading.Lock()  # Hydra's state is global


class Model(Settings):
    """`path`: a Hugging Face directory to start from; none: `warmstart` makes one from scratch."""

    path: Path | None = None


class Schedule(Settings):
    """How long to train, and what to do when dynamic sampling falls short."""

    steps: int = Field(1, ge=0)
    # of select=shuffle: the run ends with the round in which the last of them ends
    epochs: int | None = Field(None, ge=1)
    max_rounds: int = Field(4, ge=1)  # of generation per step
    on_shortage: Literal["fail", "train_short", "carry"] = "fail"
    evaluate_every: int = Field(0, ge=0)  # steps; 0: only before the first and after the last
    # the first round of a step is sampled while the step before is updated, by the policy before
    one_step_off: bool = False
    keep_policies: int | None = Field(None, ge=1)  # newest weights to keep; None: all
    keep_every: int | None = Field(None, ge=1)  # and those of every so many steps
    keep_optimizers: int | None = Field(None, ge=1)  # newest optimizer states; None: all


class Track(Settings):
    """Which experiment tracker gets the figures; part of no artifact's identity.

    Its keys come from the environment, never from here.
    """

    kind: Literal["off", "tensorboard", "mlflow", "wandb"] = "off"
    project: str = "dapo"  # of wandb; mlflow calls it an experiment
    directory: Path | None = None  # of local files; None: `tracker` below the run's
    uri: str | None = None  # of mlflow; None: a database in `directory`
    mode: Literal["online", "offline"] = "online"  # of wandb
    patience_s: float = Field(60, gt=0)  # the end of a run waits so long for the tracker

    @field_validator("uri", mode="before")
    @classmethod
    def _without_password(cls, uri: object) -> object:
        return without_credentials(uri, "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")

    @model_validator(mode="after")
    def _uri_has_a_reader(self) -> "Track":
        if self.uri is not None and self.kind != "mlflow":
            raise ValueError(f"uri is of track=mlflow, not of {self.kind}")
        return self


# a field hides the module of its own name
Prompts = prompts.Config
Prune = prune.Config
Warmstart = warmstart.Config


class RunConfig(Settings):
    """One run, whole: a field per stage, and how and where to execute it."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    data: Path | str  # a directory, or a URL such as s3://bucket/prefix
    seed: int
    model: Model
    machine: Machine
    schedule: Schedule
    track: Track = Track()
    prompts: Prompts
    heldout: Prompts
    warmstart: Warmstart | None = None  # none: model.path is given
    select: select.Config
    rollout: rollout.Config
    score: score.Config
    filter: filter.Config
    update: update.Config
    evaluate: evaluate.Config
    prune: Prune = Prune()  # of no step: `dapo prune` alone

    @field_validator("data", mode="before")
    @classmethod
    def _default_root(cls, path: object) -> object:
        """The checkout's own `data/`; where the package is installed, the working directory's."""
        root = CHECKOUT if (CHECKOUT / "pyproject.toml").exists() else Path.cwd()
        if storage.is_url(path):
            return storage.checked(str(path))
        return root / "data" if path is None else Path(path) if isinstance(path, str) else path

    @property
    def place(self) -> Path | str:
        """Where the run is: a directory, or a URL."""
        return mirror.run_place(self.data, self.run)

    @property
    def directory(self) -> Path:
        """The run's files on this machine; of a URL, those that it has."""
        return mirror.directory(self.place)

    @model_validator(mode="after")
    def _stages_agree(self) -> "RunConfig":
        if self.score.overlong and self.score.l_max != self.rollout.max_tokens:
            raise ValueError(
                f"score.l_max={self.score.l_max} but rollout.max_tokens="
                f"{self.rollout.max_tokens}: the overlong buffer must end where responses do"
            )
        context = self.rollout.context
        if self.score.overlong and context is not None and context <= self.rollout.max_tokens:
            raise ValueError(
                f"rollout.context={context} leaves no prompt room beside rollout.max_tokens="
                f"{self.rollout.max_tokens}: responses would be cut before the overlong buffer ends"
            )
        ours, theirs = self.prompts, self.heldout
        if (ours.file, ours.dataset) == (theirs.file, theirs.dataset) != (None, None) and (
            (ours.split_fraction, ours.split_seed) != (theirs.split_fraction, theirs.split_seed)
        ):
            raise ValueError(
                "prompts and heldout read the same source: give both the same split_fraction and "
                "split_seed, or they share prompts"
            )
        if self.schedule.epochs is not None and self.select.policy != "shuffle":
            raise ValueError(
                f"select.policy={self.select.policy} has no epochs; set schedule.steps"
            )
        if self.schedule.one_step_off:
            self._check_one_step_off()
        if (self.warmstart is None) != (self.model.path is not None):
            raise ValueError(
                "the first policy comes from model.path or from warmstart: give one of them "
                "(dapo train ~warmstart model.path=DIR)"
            )
        embedded = ours.file is None and ours.dataset is None
        if self.warmstart and embedded and self.warmstart.generator != ours.generator:
            raise ValueError(
                f"prompts.generator={ours.generator} but warmstart.generator="
                f"{self.warmstart.generator}: the first policy would have read nothing of what it "
                "is asked; choose both, as experiment=sentiment_demo does"
            )
        return self

    def _check_one_step_off(self) -> None:
        for holds, key, reason in (
            (self.filter.max_age >= 1, "filter.max_age>=1", "responses are one step old"),
            (self.update.tis != "off", "update.tis=token or sequence", "which corrects their age"),
            (
                self.schedule.keep_policies != 1,
                "schedule.keep_policies>=2",
                "a round is sampled by the policy before the newest",
            ),
            (
                self.machine.engine_between == "stay",
                "machine.engine_between=stay",
                "engine and trainer work at once",
            ),
        ):
            if not holds:
                raise ValueError(f"schedule.one_step_off needs {key}: {reason}")

    def stage_settings(self) -> dict[str, Any]:
        """Dotted keys of what decides a run's artifacts; not how long, where or on what machine.

        Nor `prune`, which is no part of a run, and follows `evaluate` by interpolation.
        """
        stages = self.model_dump(
            mode="json", exclude={"run", "data", "seed", "machine", "schedule", "track", "prune"}
        )
        return {"schedule.one_step_off": self.schedule.one_step_off} | {
            f"{stage}.{key}": value
            for stage, settings in stages.items()
            for key, value in (settings or {}).items()
        }


def load(overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of `conf/config.yaml` with Hydra `overrides`.

    Raises `InputError` that names the key, what was expected, and a close match for a typo.
    """
    return parse(composed(overrides))


def composed(overrides: Sequence[str] = ()) -> str:
    """`conf/config.yaml` and its groups with `overrides`, as YAML with its interpolations.

    Relative paths become absolute, so that the text means the same from any working directory.
    """
    try:
        # Hydra keeps one global state: threads that compose must take turns
        with _composing, initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            config = compose("config", [understood(override) for override in overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(_explained(error, overrides)) from error
    for key in (key for key, kind in KEYS.items() if kind is Path):
        if value := OmegaConf.select(config, key):
            url = key == "data" and storage.is_url(value)
            whole = storage.checked(value) if url else os.path.abspath(value)
            OmegaConf.update(config, key, whole)
    sets = OmegaConf.select(config, SETS)
    for given in sets.values() if OmegaConf.is_dict(sets) else ():
        if OmegaConf.is_dict(given) and given.get("file"):
            given.file = os.path.abspath(given.file)
    return OmegaConf.to_yaml(config)


def parse(text: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of a composed YAML text, with `key=value` overrides (no groups)."""
    config = OmegaConf.create(text)
    try:
        for override in OverridesParser.create().parse_overrides(
            [understood(o) for o in overrides]
        ):
            OmegaConf.update(config, override.key_or_group, override.value())
        content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise InputError("\n".join(_problem(problem) for problem in error.errors())) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(_explained(error, overrides)) from error


def resolved(text: str) -> str:
    """A composed YAML text with its interpolations filled in, once it has passed every check."""
    parse(text)
    return OmegaConf.to_yaml(OmegaConf.create(text), resolve=True)


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Each choice among the values of overrides such as `update.lr=1e-4,1e-5 seed=0,1`.

    An override of one value stays as it was typed, also one that Hydra alone knows (`~warmstart`).

    Raises `InputError` for what Hydra cannot read.
    """
    try:
        read = OverridesParser.create().parse_overrides([understood(o) for o in overrides])
    except HydraException as error:
        raise InputError(_explained(error, overrides)) from error
    choices = []
    for typed, each in zip(overrides, read, strict=True):
        key = typed.partition("=")[0]
        swept = each.sweep_string_iterator() if each.is_sweep_override() else None
        choices.append([typed] if swept is None else [f"{key}={value}" for value in swept])
    return [list(one) for one in product(*choices)]


def understood(override: str) -> str:
    """`override` as Hydra takes it: every known key may be set, and a text value stays as typed.

    Hydra alone would refuse a key that no YAML file names, read `run=1e3` as a number, and stumble
    over `=`, `#` or `<` in a path.
    """
    key, assigned, value = override.partition("=")
    kind = KEYS.get(key.lstrip("+"))
    if assigned and re.match(rf"\+*{re.escape(SETS)}\.[^.]+(\.|$)", key):
        return f"++{key.lstrip('+')}={value}"  # names are the user's
    if not assigned or kind is None:
        return override
    if kind in (str, Path) and value != "null" and not re.match(AS_TYPED, value):
        value = '"' + value.replace('"', '\\"') + '"'
    return f"++{key.lstrip('+')}={value}"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of the configuration and its type, `X | None` counting as X.

    A path that may also be a URL counts as a path.
    """
    for name, field in model.model_fields.items():
        kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else Path if Path in kinds else field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            if prefix:  # else it is a group
                yield f"{prefix}{name}", kind
        else:
            yield f"{prefix}{name}", kind


KEYS: dict[str, Any] = dict(_keys(RunConfig))


def _explained(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's message, shortened, with the nearest known key when one was mistyped."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is required: add {error.full_key}=…"
    message = str(error).partition("Config search path")[0]
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key not in KEYS and key not in GROUPS and f"'{key}'" in str(error):
            return f"unknown key '{key}'{_meant(key)}; `dapo config` prints every key"
    quoting = "; quote a value with special characters: 'key=\"a=b\"'"
    parsing = isinstance(error, OverrideParseException)
    return " ".join(message.split()) + (quoting if parsing else "")


def _problem(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'{_meant(key)}; `dapo config` prints every key"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "string_type":
        message += " (YAML reads an unquoted 1e3, 010 or no as a number or a switch: quote it)"
    where = f"{key}: " if key else ""
    got = "" if problem["type"] == "value_error" else f", got {problem['input']!r}"
    return where + message + got


def _meant(key: str) -> str:
    close = difflib.get_close_matches(key, [*KEYS, *GROUPS], n=1)
    return f", did you mean '{close[0]}'?" if close else ""


GROUPS = sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir() and path.name[0] != "_")
