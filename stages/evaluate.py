"""Measure a policy on named sets of held-out prompts: avg@k, pass@k and more, every sample kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import polars as pl
from pydantic import Field, StringConstraints, ValidationError, field_serializer, model_validator

from stages import measures, tables, verify
from stages.errors import InputError
from stages.sampling import Part, Sampled, Sampling, sample, sample_part
from stages.settings import Machine, Settings
from stages.shards import explained

HELDOUT = "heldout"  # the set whose samples have the ids and seeds of their prompts alone
SAMPLING = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p")
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]*$")]
Ks = tuple[Annotated[int, Field(ge=1)], ...]


class Set(Settings):
    """Which prompts a set has, and what differs in how they are sampled; None: nothing does."""

    # a prompts table, such as `dapo prompts` makes; none: the held-out prompts. It is an input, so
    # it counts by content
    file: Path | None = None
    tasks: tuple[str, ...] | None = None  # those of these tasks
    levels: tuple[str | int, ...] | None = None  # those of these difficulties
    limit: int | None = Field(None, ge=1)  # the first so many by prompt_id
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    k: Ks | None = None

    @field_serializer("file")
    def _by_name(self, file: Path | None) -> str | None:
        return None if file is None else file.name


class Best(Settings):
    """Which policy of a run is its best: the one with the most, or least, of a figure."""

    metric: str
    set: str = HELDOUT
    mode: Literal["max", "min"] = "max"


class Config(Sampling):
    """avg@k with k = n; top_p, top_k and min_p may be anything here (the paper: 0.7)."""

    tasks: verify.Tasks = verify.Tasks()
    sets: dict[Name, Set] = Field({HELDOUT: Set()}, min_length=1)  # the first names a run's figures
    k: Ks | None = None  # of pass@k and maj@k, each ≤ n; None: the powers of two up to n, and n
    difficulty: str = "level"  # key of the prompts' meta
    resamples: int = Field(1000, ge=100)  # of the prompts, for intervals
    level: float = Field(0.95, gt=0, lt=1)  # of the intervals
    best: Best | None = Field(None, exclude=True)  # no evaluation depends on it

    @model_validator(mode="after")
    def _sets_can_be_measured(self) -> Self:
        for name, given in self.sets.items():
            try:
                n = self.sampling(name).n
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"]))
                raise ValueError(f"sets.{name}.{key}: {first['msg']}") from error
            if unknown := [task for task in given.tasks or () if task not in verify.TASKS]:
                raise ValueError(f"sets.{name}.tasks: '{unknown[0]}' is no task")
            if large := [k for k in self.ks(name) if k > n]:
                raise ValueError(
                    f"sets.{name}: pass@{large[0]} needs {large[0]} responses to each prompt, and "
                    f"n is {n}: raise n, or name no k above it"
                )
        if self.best is not None:
            self._check_best(self.best)
        return self

    def _check_best(self, best: Best) -> None:
        if best.set not in self.sets:
            raise ValueError(f"best.set: there is no set '{best.set}' in {', '.join(self.sets)}")
        known = measures.names(self.sampling(best.set).n, self.ks(best.set))
        if best.metric not in known:
            raise ValueError(
                f"best.metric: the set '{best.set}' has no '{best.metric}'; it has "
                f"{', '.join(known)}"
            )

    def sampling(self, name: str) -> Sampling:
        """How the set is sampled."""
        given = self.sets[name]
        own = {key: value for key in SAMPLING if (value := getattr(given, key)) is not None}
        return Sampling(**{key: getattr(self, key) for key in Sampling.model_fields} | own)

    def ks(self, name: str) -> list[int]:
        """Which k of pass@k and maj@k the set has."""
        given = self.sets[name].k or self.k
        return sorted(set(given)) if given else measures.default_ks(self.sampling(name).n)

    @property
    def files(self) -> list[Path]:
        """Of the sets that have prompts of their own, in their order."""
        return [each.file for each in self.sets.values() if each.file is not None]

    def metric_name(self, metric: str, of: str) -> str:
        """How a figure is called in the artifact's record: the first set's go by their own name."""
        return metric if of == next(iter(self.sets)) else f"{of}/{metric}"


class Exam(NamedTuple):
    """A set with its prompts: those of a prompts table, their `difficulty` and `group_id`."""

    name: str
    sampling: Sampling
    asked: pl.DataFrame


def run(
    *,
    prompts: Path,
    policy: Path,
    more: Sequence[Path] = (),
    out: Path,
    config: Config,
    machine: Machine,
    partial: Path | None = None,
    gathered: bool = False,
) -> dict[str, float]:
    """Write `samples` (responses with verdicts), `evaluations` (a row per prompt) and `results`.

    The seeds depend on set, prompt and sample only, so that two policies are compared on the same
    random numbers.

    Args:
        more: the prompts tables of the sets that name a file, in their order.
        partial: a directory that keeps finished prompts if this fails, for the next attempt.
        gathered: whether `run_part` has sampled every part into it.

    Raises `InputError` before anything is sampled for sets without prompts; see `exams`.
    """
    sampled = [
        (
            exam,
            sample(
                exam.asked.select("group_id", "prompt_id", "prompt"),
                policy_path=policy,
                config=exam.sampling,
                machine=machine,
                partial=partial,
                gathered=gathered,
            ),
        )
        for exam in exams(config, prompts=prompts, more=more)
    ]
    with verify.Judges(config.tasks, workers=machine.checkers) as judges:
        samples = pl.concat(
            verify.judged(found.rows, exam.asked, judges).with_columns(set=pl.lit(exam.name))
            for exam, found in sampled
        )
    evaluations, results, metrics = [], [], dict[str, float]()
    for exam, _ in sampled:
        of_set = samples.filter(set=exam.name)
        asked = exam.asked.join(of_set, on="prompt_id", how="semi", maintain_order="left")
        evaluations.append(measures.per_prompt(of_set).join(asked, on="prompt_id", how="left"))
        figures = list(_figures(exam, of_set, asked, config))
        results += [{"set": exam.name, **row} for row in figures]
        metrics |= {
            config.metric_name(str(row["metric"]), exam.name): float(str(row["value"]))
            for row in figures
            if row["task"] is None and row["difficulty"] is None
        }
    every = pl.concat(evaluations)
    skipped = pl.concat([found.skipped for _, found in sampled])
    order = pl.col("set").replace_strict({name: i for i, name in enumerate(config.sets)})
    with explained(out):
        tables.write(out, "samples", samples)
        tables.write(out, "skipped", skipped)
        tables.write(out, "evaluations", every.sort(order, "prompt_id"))
        tables.write(out, "results", pl.DataFrame(results, schema=tables.polars_schema("results")))
    return {
        **metrics,
        "length_mean": tables.mean(samples["length"]),
        "prompts": len(every),
        "skipped": len(skipped),
        "tokens": int(samples["length"].sum()),
        **_engine_metrics([found for _, found in sampled]),
    }


def run_part(
    *,
    prompts: Path,
    policy: Path,
    more: Sequence[Path] = (),
    config: Config,
    machine: Machine,
    partial: Path,
    part: Part,
) -> dict[str, float]:
    """Sample some of each set's prompts into `partial`, where `run` finds them."""
    return _joined(
        [
            sample_part(
                exam.asked.select("group_id", "prompt_id", "prompt"),
                part,
                policy_path=policy,
                config=exam.sampling,
                machine=machine,
                partial=partial,
            )
            for exam in exams(config, prompts=prompts, more=more)
        ]
    )


def exams(config: Config, *, prompts: Path, more: Sequence[Path] | None) -> list[Exam]:
    """Every set with its prompts.

    Raises `InputError` that names the set if it has no prompts, if two sets would give one id to
    two samples, if `more` are not as many as the files, or if `best` asks for a measure that none
    of its prompts has.
    """
    tables_left = list(more or ())
    if len(tables_left) != len(config.files):
        raise InputError(
            f"{len(config.files)} of the sets name a file, and {len(tables_left)} prompts tables "
            "are given for them (more): give one for each, in their order"
        )
    held_out = _asked(prompts, config)
    found = []
    for name, given in config.sets.items():
        source = prompts if given.file is None else tables_left.pop(0)
        every = held_out if given.file is None else _asked(source, config)
        asked = _chosen(every, given)
        if asked.is_empty():
            raise InputError(
                f"evaluate.sets.{name}: none of the {len(every)} prompts in {source} is chosen by "
                f"tasks={given.tasks} and levels={given.levels}; their tasks are "
                f"{_values(every, 'task')}, and meta.{config.difficulty} is "
                f"{_values(every, 'difficulty')}"
            )
        prefix = "" if name == HELDOUT else f"{name}/"
        ids = pl.lit(prefix) + pl.col("prompt_id")
        asked = asked.with_columns(set=pl.lit(name), group_id=ids)
        found.append(Exam(name, config.sampling(name), asked))
    every_id = pl.concat([exam.asked["group_id"] for exam in found])
    if twice := every_id.filter(every_id.is_duplicated()).to_list():
        raise InputError(
            f"evaluate.sets: '{twice[0]}' is a prompt of the set heldout, and names a prompt of "
            "another set, too; call that set something else"
        )
    if config.best is not None:
        _check_best(config.best, {exam.name: exam.asked for exam in found})
    return found


def _check_best(best: Best, asked: dict[str, pl.DataFrame]) -> None:
    task = measures.OF_TASK.get(best.metric)
    if task is not None and task not in asked[best.set]["task"]:
        raise InputError(
            f"evaluate.best.metric={best.metric} is a measure of task {task}, and no prompt of the "
            f"set '{best.set}' has it: they have {_values(asked[best.set], 'task')}"
        )


def _asked(prompts: Path, config: Config) -> pl.DataFrame:
    asked = tables.read_prompts(prompts).sort("prompt_id")
    return asked.with_columns(measures.difficulties(asked, config.difficulty))


def _chosen(asked: pl.DataFrame, given: Set) -> pl.DataFrame:
    if given.tasks is not None:
        asked = asked.filter(pl.col("task").is_in(given.tasks))
    if given.levels is not None:
        asked = asked.filter(pl.col("difficulty").is_in([str(level) for level in given.levels]))
    return asked if given.limit is None else asked.head(given.limit)


def _values(asked: pl.DataFrame, column: str) -> str:
    found = asked[column].drop_nulls().unique().sort().to_list()
    return ", ".join(found[:10]) + (", …" if len(found) > 10 else "") or "not there"


def _figures(
    exam: Exam, samples: pl.DataFrame, asked: pl.DataFrame, config: Config
) -> list[dict[str, object]]:
    found = measures.measured(
        samples, asked, n=exam.sampling.n, ks=config.ks(exam.name), tasks=config.tasks
    )
    return list(
        measures.results(
            found, asked, resamples=config.resamples, level=config.level, seed=config.seed
        )
    )


def _engine_metrics(sampled: Sequence[Sampled]) -> dict[str, float]:
    return _joined([found.metrics for found in sampled])


def _joined(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """What there is to record of one engine that sampled one set after the other.

    Counts add up; the first to be sampled had the engine loaded; the speed is that of the slowest.
    """
    names = dict.fromkeys(name for each in found for name in each)
    there = {name: [each[name] for each in found if name in each] for name in names}
    slowest = {n: min(values) for n, values in there.items() if n == "tokens_per_second"}
    counts = {n: sum(values) for n, values in there.items() if n in ("recovered", "generated")}
    return {n: max(values) for n, values in there.items()} | slowest | counts
