"""A run as tables, in a notebook: `run("demo").responses.filter(pl.col("step") == 3).collect()`.

Every table is a lazy Polars frame over the whole run. Only files that records name are read, and
of these only the columns, and the steps, that a query asks for.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
from polars.io.plugins import register_io_source

from pipeline import lineage, mirror, runs, summary
from pipeline.artifacts import Artifact
from pipeline.loop import CONFIG, Round, Step
from stages import columns, tables

FILES_AT_A_TIME = 32  # that are in memory together
ROUND = ("select", "rollout", "score", "filter")
ORDER = ("prompts", "heldout", "warmstart", *ROUND, "update", "evaluate")  # of a run's stages
PLACE = re.compile(r"(?:step_(\d+)/(?:round_(\d+)/)?)?([a-z]+)(?:\.variant-(\d+))?")


class View(NamedTuple):
    """One table over the whole run."""

    table: str
    stages: tuple[str, ...]  # the directories that hold it
    place: tuple[str, ...]  # the columns that say where it comes from


_OF_ROUND, _OF_STEP = ("step", "round"), ("step",)
VIEWS: dict[str, View] = {
    "prompts": View("prompts", ("prompts",), ()),
    "heldout": View("prompts", ("heldout",), ()),
    "unusable": View("unusable", ("prompts", "heldout"), ()),
    "selection": View("selection", ("select",), _OF_ROUND),
    "beliefs": View("beliefs", ("select",), _OF_ROUND),
    "rollouts": View("rollouts", ("rollout",), _OF_ROUND),
    "skipped": View("skipped", ("rollout", "evaluate"), _OF_ROUND),
    "scores": View("scores", ("score",), _OF_ROUND),
    "groups": View("groups", ("filter",), _OF_ROUND),
    "batch": View("batch", ("filter",), _OF_ROUND),
    "carried": View("carried", ("filter",), _OF_ROUND),
    "metrics": View("metrics", ("update",), _OF_STEP),
    "timings": View("timings", ("update",), _OF_STEP),
    "tokens": View("tokens", ("update",), _OF_STEP),
    "samples": View("samples", ("evaluate",), _OF_STEP),
    "evaluations": View("evaluations", ("evaluate",), _OF_STEP),
    "results": View("results", ("evaluate",), _OF_STEP),
    "probe": View("probe", ("warmstart", "update"), _OF_STEP),
}
RENAMED = {"beliefs": {"step": "faded_to"}}  # for `step` is where the table lies
PLACE_COLUMNS = {
    "step": "of the directory: the training step, 0 before the first",
    "round": "of the directory: the round of dynamic sampling; null for an evaluation",
    "variant": "number that `dapo rerun` gave it; null: of the run itself",
}
# what the joined tables hold beside the columns of `rollouts` and `scores`
FATE = {
    "decision": "the last one on its group: kept, dropped or carried; null: not decided yet",
    "reason": columns.meaning("groups", "reason"),
    "decided_in": "the step of that decision: a carried group is decided on again",
    "task": columns.COMMON["task"],
    "answer": columns.COMMON["answer"],
    "meta": columns.COMMON["meta"],
}
CURVES = {
    "step": "the training step; 0: the policy that training starts from",
    "acc": "mean raw accuracy of the step's samples",
    "reward": "mean reward of the same",
    "length": "mean tokens of a response",
    "truncated": "share of responses that were cut",
    "held_out": "avg@k on the first evaluation set, where the step was evaluated",
    "rounds": "of dynamic sampling",
    "sampled_tokens": "tokens generated for training, over all rounds",
    "seconds": "of all stages, as their records say",
    **{f"seconds_{stage}": f"of {stage}" for stage in (*ROUND, "update", "evaluate")},
}
ARTIFACTS = {
    "place": "its directory in the run",
    "step": PLACE_COLUMNS["step"],
    "round": PLACE_COLUMNS["round"],
    "variant": PLACE_COLUMNS["variant"],
    "stage": "that made it",
    "state": "whole, stale, changed, retired, trimmed or pinned, as `dapo ls` says",
    "digest": "of its content",
    "code": "version and commit of this program that made it",
    "packages": "digest of all packages that it was made with; null: the record does not say",
    "seconds": "that it took",
    "started": "when, UTC",
    "metrics": "what the stage measured, by name",
    "rows": "rows of each of its tables, by name",
}


class Place(NamedTuple):
    """Where in a run an artifact lies; `stage` is the name of its directory."""

    step: int | None
    round: int | None
    stage: str
    variant: int | None

    @classmethod
    def of(cls, path: Path, run: Path) -> "Place | None":
        """The place of a directory; None where no run would put a stage."""
        found = PLACE.fullmatch(str(path.relative_to(run)))
        if found is None or found[3] not in ORDER:
            return None
        step, round, variant = (found[i] and int(found[i]) for i in (1, 2, 4))
        return cls(step, round, found[3], variant)  # type: ignore[arg-type]

    def __str__(self) -> str:
        step = "" if self.step is None else f"step_{self.step:04d}/"
        round = "" if self.round is None else f"round_{self.round}/"
        return step + round + self.stage + (f".variant-{self.variant}" if self.variant else "")

    @property
    def order(self) -> tuple[float, ...]:
        """Sorts places as a run makes them."""
        late = float("inf") if self.stage in ("update", "evaluate") else 0
        round = late if self.round is None else self.round
        return (self.step or 0, round, ORDER.index(self.stage), self.variant or 0)


class Found(NamedTuple):
    """A published artifact of the run."""

    place: Place
    artifact: Artifact


def files_of(artifact: Artifact, table: str) -> list[Path]:
    """The files of a table, by the record."""
    names = sorted(artifact.record["files"])
    return [artifact.path / name for name in names if name.startswith(f"{table}/")]


def run(name: str | Path, *, variants: bool = False) -> "Run":
    """A run by its name below the data root, by its directory or by its URL: what is published
    by now. Of a run in a store, files are brought here when a query reads them.

    Args:
        variants: also what `dapo rerun` put beside originals, with their number in a column
            `variant`, which is null for the originals.

    Raises `InputError` if there is no such run, or a record cannot be read.
    """
    if isinstance(name, Path) and (name / CONFIG).is_file():
        return Run(mirror.looked_at(name.absolute()), variants=variants)
    return Run(runs.find(str(name)), variants=variants)


class Run:
    """The tables of one run; `data/README.md` describes their columns.

    `step` and `round` say where a row comes from. `groups`, `batch` and `carried` are those of a
    step's last round, which decides on all of the step; a group that is carried is decided on in
    the next step again. Where a stage has not run yet, its tables are empty.
    """

    def __init__(self, directory: Path, *, variants: bool = False) -> None:
        self.directory, self.name, self.variants = directory, directory.name, variants
        self.found = _found(directory, variants=variants)
        self.prompts = self.frame("prompts")
        self.heldout = self.frame("heldout")
        self.unusable = self.frame("unusable")
        self.selection = self.frame("selection")
        self.beliefs = self.frame("beliefs")
        self.rollouts = self.frame("rollouts")
        self.skipped = self.frame("skipped")
        self.scores = self.frame("scores")
        self.groups = self.frame("groups")
        self.batch = self.frame("batch")
        self.carried = self.frame("carried")
        self.metrics = self.frame("metrics")
        self.timings = self.frame("timings")
        self.tokens = self.frame("tokens")
        self.samples = self.frame("samples")
        self.evaluations = self.frame("evaluations")
        self.results = self.frame("results")
        self.probe = self.frame("probe")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}: {len(self.found)} artifacts)"

    @cached_property
    def responses(self) -> pl.LazyFrame:
        """A row per sampled response: rollout, score, what became of its group, and its prompt.

        `rollouts` joined to `scores` by step, round and response_id, to the last decision on its
        group by group_id, and to task, answer and meta of its prompt by prompt_id. What is not
        known yet is null.
        """
        frames = {name: self._originals(name) for name in ("rollouts", "scores", "prompts")}
        groups = self._originals("groups").select("group_id", "decision", "reason", "step")
        fate = groups.group_by("group_id").agg(
            pl.col("decision", "reason").sort_by("step").last(), decided_in=pl.col("step").max()
        )
        return (
            frames["rollouts"]
            .join(
                frames["scores"],
                on=["step", "round", "response_id"],
                how="left",
                maintain_order="left",
            )
            .join(fate, on="group_id", how="left", maintain_order="left")
            .join(
                frames["prompts"].select("prompt_id", "task", "answer", "meta"),
                on="prompt_id",
                how="left",
                maintain_order="left",
            )
        )

    @cached_property
    def curves(self) -> pl.LazyFrame:
        """A row per step that has an update, and step 0: means over its rounds, the counts of the
        filter, the figures of the update, held-out accuracy, tokens and seconds."""
        rows = list(_curve_rows(self.steps(), self._evaluation(0)))
        names = list(dict.fromkeys([*CURVES, *(name for row in rows for name in row)]))
        schema = dict.fromkeys(names, pl.Float64()) | {"step": pl.Int32()}
        frame = pl.DataFrame(
            [{name: row.get(name) for name in names} for row in rows], schema=schema
        )
        counts = [name for name in names if name.startswith("reason_")]
        trained = pl.col("step") > 0
        return (
            frame.lazy()
            .fill_nan(None)
            .with_columns(
                pl.when(trained).then(pl.col(name).fill_null(0)).alias(name) for name in counts
            )
        )

    @cached_property
    def artifacts(self) -> pl.LazyFrame:
        """A row per record, in the order of the run: place, stage, state, metrics, rows."""
        rows = list(self.artifact_rows())
        schema: dict[str, Any] = {
            "place": pl.String,
            "step": pl.Int32,
            "round": pl.Int32,
            "variant": pl.Int32,
            "stage": pl.String,
            "state": pl.String,
            "digest": pl.String,
            "code": pl.String,
            "packages": pl.String,
            "seconds": pl.Float64,
            "started": pl.Datetime("us", "UTC"),
            "metrics": _struct((row["metrics"] for row in rows), pl.Float64()),
            "rows": _struct((row["rows"] for row in rows), pl.Int64()),
        }
        started = pl.col("started").str.to_datetime(time_unit="us", time_zone="UTC")
        frame = pl.DataFrame(rows, schema=schema | {"started": pl.String}).with_columns(started)
        return frame.lazy() if self.variants else frame.lazy().drop("variant")

    def artifact_rows(self) -> Iterator[dict[str, Any]]:
        """`artifacts` as plain values; metrics and rows are dicts."""
        for place, artifact in self.found:
            yield {
                "place": str(place),
                "step": place.step,
                "round": place.round,
                "variant": place.variant,
                "stage": artifact.stage,
                "state": runs.state(artifact),
                "digest": artifact.digest,
                "code": artifact.record["code"],
                "packages": lineage.packages(artifact),
                "seconds": float(artifact.record["seconds"]),
                "started": artifact.record["started"],
                "metrics": artifact.metrics,
                "rows": artifact.record["rows"],
            }

    def frame(self, name: str) -> pl.LazyFrame:
        """The table of that name; see `VIEWS`."""
        view = VIEWS[name]
        place = {column: pl.Int32() for column in self.place_columns(name)}
        stored = dict(self.schema(name))
        files = self.files(name)
        return _scan(
            files.select("path", *place),
            stored,
            RENAMED.get(view.table, {}),
            bring=lambda paths: self._bring(paths, view.table),
        )

    def bring(self, name: str) -> None:
        """Have the files of a view here, if the run is in a store."""
        self._bring(self.files(name)["path"], VIEWS[name].table)

    def _bring(self, paths: Iterable[str], table: str) -> None:
        holders = {Path(path).parents[1] for path in paths}
        mirror.bring(self.directory, holders, lambda name: name.startswith(f"{table}/"))

    def place_columns(self, name: str) -> list[str]:
        """The columns of a view that say where a row comes from."""
        return [*VIEWS[name].place, *(["variant"] if self.variants else [])]

    def schema(self, name: str) -> pl.Schema:
        """The columns of a view's files: those of its table, and the further reward parts."""
        table = VIEWS[name].table
        parts = self._parts() if table == "scores" else []
        return pl.Schema({**tables.polars_schema(table), **dict.fromkeys(parts, pl.Float32())})

    def files(self, name: str) -> pl.DataFrame:
        """Path, step, round, variant and code version of each file of a view, in run order."""
        view = VIEWS[name]
        rows = [
            (str(path), *found.place[:2], found.place.variant, found.artifact.record["code"])
            for found in self.found
            if found.place.stage in view.stages
            for path in files_of(found.artifact, view.table)
            if view.stages != ("filter",) or found.place.round == self._last_round(found.place.step)
        ]
        numbers = dict.fromkeys(PLACE_COLUMNS, pl.Int32())
        schema = {"path": pl.String(), **numbers, "code": pl.String()}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def steps(self) -> list[Step]:
        """The steps that have an update, with the artifacts of their rounds."""
        made = {place: artifact for place, artifact in self.found if place.variant is None}
        steps = []
        for place, update in made.items():
            if place.stage != "update" or place.step is None:
                continue
            rounds = _whole_rounds(made, place.step)
            if rounds:
                evaluation = made.get(Place(place.step, None, "evaluate", None))
                steps.append(Step(place.step, rounds, update, evaluation))
        return steps

    def artifact(self, place: Place) -> Artifact | None:
        """The artifact at a place, if there is one."""
        return next((artifact for there, artifact in self.found if there == place), None)

    def _evaluation(self, step: int) -> Artifact | None:
        return self.artifact(Place(step, None, "evaluate", None))

    def _originals(self, name: str) -> pl.LazyFrame:
        frame: pl.LazyFrame = getattr(self, name)
        return frame.filter(pl.col("variant").is_null()).drop("variant") if self.variants else frame

    @cached_property
    def _last_rounds(self) -> dict[int | None, int | None]:
        originals = [place for place, _ in self.found if place.variant is None]
        return {place.step: place.round for place in originals if place.stage == "filter"}

    def _last_round(self, step: int | None) -> int | None:
        return self._last_rounds.get(step)

    def _parts(self) -> list[str]:
        """The columns of the further reward parts that any of the run's scores have."""
        configs = (a.recipe.config for place, a in self.found if place.stage == "score")
        return sorted({f"part_{name}" for config in configs for name in config.get("parts", {})})


def asked() -> pl.Expr:
    """The messages of `prompt` as one text; a role is named where there are several messages."""
    message = pl.element().struct
    named = message.field("role") + ": " + message.field("content")
    several = pl.col("prompt").list.eval(named).list.join("\n")
    one = pl.col("prompt").list.eval(message.field("content")).list.join("\n")
    return pl.when(pl.col("prompt").list.len() > 1).then(several).otherwise(one)


def _found(directory: Path, *, variants: bool) -> list[Found]:
    """The run's artifacts in its order, without rounds that its updates no longer know."""
    every = [
        Found(place, artifact)
        for artifact in runs.artifacts_below(directory)
        if (place := Place.of(artifact.path, directory)) and (variants or place.variant is None)
    ]
    trained = {place.step: _round_of(a) for place, a in every if place == _update(place.step)}
    return sorted(
        (f for f in every if not (f.place.round or 0) > trained.get(f.place.step, float("inf"))),
        key=lambda found: found.place.order,
    )


def _update(step: int | None) -> Place:
    return Place(step, None, "update", None)


def _round_of(update: Artifact) -> float:
    """The round whose filter made the update's batch: later ones are left from a run before."""
    batch = update.sources.get("batch")
    found = re.fullmatch(r"round_(\d+)", batch.parent.name) if isinstance(batch, Path) else None
    return int(found[1]) if found else float("inf")


def _whole_rounds(made: dict[Place, Artifact], step: int) -> list[Round]:
    """The rounds of a step of which every stage is there."""
    numbers = sorted({p.round for p in made if p.step == step and p.round is not None})
    stages = [[made.get(Place(step, number, stage, None)) for stage in ROUND] for number in numbers]
    return [Round(*every) for every in stages if all(every)]  # type: ignore[arg-type]


def _curve_rows(steps: Iterable[Step], first: Artifact | None) -> Iterator[dict[str, Any]]:
    if first is not None:
        yield {"step": 0, "held_out": summary.accuracy(first)}
    for step in steps:
        numbers = {k.replace("/", "_"): v for k, v in summary.numbers(step).items()}
        seconds = summary.seconds(step)
        yield {
            "step": step.number,
            **{name: float(value) for name, value in numbers.items()},
            "held_out": summary.accuracy(step.evaluate) if step.evaluate else None,
            "sampled_tokens": float(sum(r.rollout.metrics["tokens"] for r in step.rounds)),
            "seconds": seconds.pop("total"),
            **{f"seconds_{stage}": spent for stage, spent in seconds.items()},
        }


def _struct(rows: Iterable[dict[str, Any]], kind: pl.DataType) -> pl.Struct:
    names = dict.fromkeys(name for row in rows for name in row)
    return pl.Struct(dict.fromkeys(names, kind))


def _scan(
    files: pl.DataFrame,
    stored: dict[str, pl.DataType],
    renamed: dict[str, str],
    *,
    bring: Callable[[Iterable[str]], None],
) -> pl.LazyFrame:
    """A lazy frame over files of one table, which reads only those that can have a row asked for.

    Polars alone would open every file of a union to find that its constant `step` is another one.

    Args:
        files: `path`, and the columns that all rows of a file have in common.
        stored: the columns in the files; one that a file of an older version lacks is null.
        renamed: those that give way to a column of `files`.
        bring: has the files at these paths here before they are read.
    """
    place = [name for name in files.columns if name != "path"]
    kept = [n for n in stored if n in renamed or n not in place]
    names = {renamed.get(name, name): stored[name] for name in kept}
    schema = pl.Schema({**{name: files.schema[name] for name in place}, **names})

    def one(row: dict[str, Any]) -> pl.LazyFrame:
        constants = (pl.lit(row[name], schema[name]).alias(name) for name in place)
        return (
            pl.scan_parquet(
                row["path"],
                schema=stored,
                glob=False,
                missing_columns="insert",
                extra_columns="ignore",
            )
            .select(kept)
            .rename(renamed)
            .select(*constants, *names)
        )

    def read(
        wanted: list[str] | None, predicate: pl.Expr | None, rows: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        left = rows
        for some in _possible(files, predicate).iter_slices(FILES_AT_A_TIME):
            bring(some["path"])
            frame = pl.concat([one(row) for row in some.iter_rows(named=True)])
            frame = frame if predicate is None else frame.filter(predicate)
            frame = frame if wanted is None else frame.select(wanted)
            found = (frame if left is None else frame.head(left)).collect()
            yield found
            left = None if left is None else left - len(found)
            if left == 0:
                return

    return register_io_source(read, schema=schema, is_pure=True)


def _possible(files: pl.DataFrame, predicate: pl.Expr | None) -> pl.DataFrame:
    """The files that may have rows for which `predicate` holds, by the columns of `files`."""
    known = set(files.columns)
    for part in [] if predicate is None else _conjuncts(predicate):
        if known.issuperset(part.meta.root_names()):
            files = files.filter(part)
    return files


def _conjuncts(predicate: pl.Expr) -> Iterator[pl.Expr]:
    """The parts of `a & b & …`, all of which must hold."""
    parts = predicate.meta.pop()
    if len(parts) == 2 and any(predicate.meta.eq(a & b) for a, b in (parts, reversed(parts))):
        for part in parts:
            yield from _conjuncts(part)
    else:
        yield predicate
