"""What the page asks of a run: responses by filters, groups, tokens. It only reads.

A row per response, without texts and token ids, is kept in memory (some 140 bytes each); what else
is shown is read from the files of the steps that it lies in.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import mirror, read, story
from pipeline.read import Place, Run, asked
from stages.errors import InputError

SAMPLED = ("response_id", "group_id", "prompt_id", "sample", "length", "finish_reason")
JUDGED = ("verdict", "acc", "reward")
WORDS = ("task", "verdict", "finish_reason", "decision", "reason")  # columns of a few words each
SORTED_BY = ("step", "length", "reward", "acc", "sample", *WORDS)
TEXTS_KEPT = 8  # results of searches, for the next page of the same
SHOWN_LETTERS = 240  # of a text in the table


@dataclass(frozen=True)
class Filters:
    """Which responses; empty or None: any. Ranges include both of their ends."""

    step_from: int | None = None
    step_to: int | None = None
    task: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    finish_reason: tuple[str, ...] = ()
    decision: tuple[str, ...] = ()
    reward_from: float | None = None
    reward_to: float | None = None
    length_from: int | None = None
    length_to: int | None = None
    text: str = ""  # found anywhere in the response, letter by letter

    @classmethod
    def of(cls, given: Mapping[str, Sequence[str]]) -> "Filters":
        """From a query string, as `parse_qs` reads it. Other names in it are left alone.

        Raises `InputError` for a number that is none.
        """
        return cls(**{f.name: _value(f.name, f.type, given[f.name]) for f in fields(cls)
                      if f.name in given})  # fmt: skip

    def query(self) -> dict[str, list[str]]:
        """As a query string has it; what is not asked for is left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: [str(item) for item in (value if isinstance(value, tuple) else (value,))]
            for name, value in values.items()
            if value not in (None, "", ())
        }

    def predicates(self) -> list[pl.Expr]:
        """What must hold of a row of the index; `text` is looked for in the files."""
        ranges = {
            "step": (self.step_from, self.step_to),
            "reward": (self.reward_from, self.reward_to),
            "length": (self.length_from, self.length_to),
        }
        words = {name: getattr(self, name) for name in WORDS if hasattr(self, name)}
        return [
            *(pl.col(name) >= low for name, (low, _) in ranges.items() if low is not None),
            *(pl.col(name) <= high for name, (_, high) in ranges.items() if high is not None),
            *(_one_of(name, chosen) for name, chosen in words.items() if chosen),
        ]


def _value(name: str, kind: object, given: Sequence[str]) -> Any:
    if get_origin(kind) is tuple:
        return tuple(given)
    if kind is str:
        return given[-1]
    number = next(each for each in get_args(kind) if each is not type(None))
    try:
        return number(given[-1])
    except ValueError:
        expected = "a whole number" if number is int else "a number"
        raise InputError(f"{name}={given[-1]}: expected {expected}") from None


def _one_of(name: str, chosen: tuple[str, ...]) -> pl.Expr:
    """`-` stands for null: not judged, not decided yet."""
    words = [word for word in chosen if word != "-"]
    found = pl.col(name).cast(pl.String).is_in(words)
    return found | pl.col(name).is_null() if "-" in chosen else found


@dataclass(frozen=True)
class Order:
    """The column that rows are sorted by; None: as the run made them."""

    column: str | None = None
    descending: bool = False


@dataclass(frozen=True)
class Page:
    """Some rows of a table, and how many there are in all."""

    rows: list[dict[str, Any]]
    total: int


Rounds = dict[tuple[str, ...], pl.DataFrame]  # by place and digests


class Snapshot:
    """What a run had published at one moment; its index is made when it is first asked for."""

    def __init__(self, directory: Path, mark: str, known: "Rounds | None" = None) -> None:
        self.mark, self.run = mark, read.run(directory)
        self.rounds: Rounds = known or {}  # of snapshots before, until the index is made
        self._making = threading.Lock()
        self._index: pl.DataFrame | None = None
        self._searched = lru_cache(TEXTS_KEPT)(self._search)

    @property
    def index(self) -> pl.DataFrame:
        """A row per response in the run's order, without text and tokens."""
        with self._making:
            if self._index is None:
                self.rounds = dict(self._rounds())
                self._index = _with_fate(self.run, list(self.rounds.values()))
            return self._index

    def _rounds(self) -> "Iterator[tuple[tuple[str, ...], pl.DataFrame]]":
        """Each round's responses; what is known is not read again."""
        for place, artifact in self.run.found:
            if place.stage != "rollout":
                continue
            score = self.run.artifact(place._replace(stage="score"))
            key = (str(place), artifact.digest, score.digest if score else "")
            yield key, self.rounds[key] if key in self.rounds else _round(self.run, place)

    def find(self, wanted: Filters) -> pl.DataFrame:
        """The rows of the index that are so, in the run's order."""
        rows = self.index.filter(*wanted.predicates())
        if not wanted.text:
            return rows
        steps = rows["step"].unique().sort()
        found = self._searched(wanted.text, *(steps[[0, -1]] if len(steps) else (0, 0)))
        return rows.join(found, on=["step", "round", "response_id"], how="semi",
                         maintain_order="left")  # fmt: skip

    def _search(self, text: str, first: int, last: int) -> pl.DataFrame:
        contains = pl.col("text").str.contains(text, literal=True)
        in_steps = pl.col("step").is_between(first, last)
        found = self.run.rollouts.filter(in_steps).filter(contains)
        return found.select("step", "round", "response_id").collect()

    def page(
        self, wanted: Filters, *, first: int = 0, rows: int = 25, order: Order | None = None
    ) -> Page:
        """Some of the responses that are so, each with the head of its text."""
        found = _sorted(self.find(wanted), order or Order())
        shown = found.slice(first, rows)
        texts = _of_these(self.run.rollouts, shown, "response_id").select(
            "step", "response_id", pl.col("text").str.slice(0, SHOWN_LETTERS)
        )
        joined = shown.join(texts.collect(), on=["step", "response_id"], how="left",
                            maintain_order="left")  # fmt: skip
        return Page(joined.to_dicts(), len(found))

    def words(self) -> dict[str, list[str]]:
        """The values that the columns of few values have, the most frequent first."""
        return {name: _words(self.index[name]) for name in WORDS}

    def group(self, group_id: str) -> list[dict[str, Any]]:
        """All responses of a group by their number, with prompt, reward parts and advantage.

        Raises `InputError` if there is no such group.
        """
        rows = self.index.filter(pl.col("group_id") == group_id)
        if rows.is_empty():
            raise InputError(f"run '{self.run.name}' sampled no group '{group_id}'")
        texts = _of_these(self.run.rollouts, rows, "group_id")
        scores = _of_these(self.run.scores, rows, "response_id")
        batch = self.run.batch.filter(
            pl.col("step").is_in(rows["decided_in"].drop_nulls().unique().to_list()),
            pl.col("group_id") == group_id,
        )
        prompts = self.run.prompts.filter(pl.col("prompt_id") == rows["prompt_id"][0])
        joined = (
            rows.lazy()
            .join(texts.select("response_id", "text", "temperature", "policy"), on="response_id")
            .join(
                scores.select("response_id", "extracted", "penalty", "^part_.*$"),
                on="response_id",
                how="left",
            )
            .join(batch.select("response_id", "advantage", "age"), on="response_id", how="left")
            .join(
                prompts.select("prompt_id", "answer", "meta", prompt=asked()),
                on="prompt_id",
                how="left",
            )
        )
        return joined.sort("sample").collect().to_dicts()

    def response(self, response_id: str) -> "Response":
        """One response and what is known of each of its tokens.

        Raises `InputError` if there is no such response.
        """
        rows = self.index.filter(pl.col("response_id") == response_id)
        if rows.is_empty():
            raise InputError(f"run '{self.run.name}' sampled no response '{response_id}'")
        row = rows.row(0, named=True)
        place = Place(row["step"], row["round"], "rollout", None)
        sampled = _of_these(self.run.rollouts, rows, "response_id").collect().row(0, named=True)
        chapters = story.tell(self.run.directory, response_id)
        advantages = [c.facts["advantage"] for c in chapters if "advantage" in c.facts]
        trained = [chapter for chapter in chapters if chapter.rows]
        if trained:
            return Response(
                row, chapters, trained[-1].title, _columns(trained[-1].rows, advantages)
            )
        made = self.run.artifact(place)
        policy = made.sources.get("policy") if made else None
        if policy:
            mirror.bring(self.run.directory, [policy], lambda name: name == story.TOKENIZER)
        pieces = story.decoder(policy)(sampled["response_ids"]) if policy else []
        figures = [
            {"position": i, "token": token, "piece": pieces[i] if pieces else "",
             "sampler_logprob": logprob}
            for i, (token, logprob) in enumerate(
                zip(sampled["response_ids"], sampled["sampler_logprobs"], strict=True)
            )
        ]  # fmt: skip
        return Response(row, chapters, "as it was sampled", _columns(figures, advantages))

    def write(self, wanted: Filters, path: Path) -> int:
        """Write the responses that are so, with all that is known of them, as one Parquet file.

        Returns the number of rows. A step at a time is in memory.
        """
        found = self.find(wanted)
        steps = found["step"].unique(maintain_order=True).to_list()
        prompts = self.run.prompts.select("prompt_id", "answer", "meta").collect()
        with _Writer(path) as writer:
            for step in steps:
                rows = found.filter(pl.col("step") == step)
                writer.add(_whole(self.run, rows, prompts))
            if not steps:
                writer.add(_whole(self.run, found, prompts))
        return len(found)


@dataclass(frozen=True)
class Response:
    """A response: its row of the index, its story, and its tokens, a list per column."""

    row: dict[str, Any]
    chapters: list[story.Chapter]
    source: str  # of the figures of its tokens
    tokens: dict[str, list[Any]]


class _Writer:
    """One Parquet file, of frames of one schema."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer: pq.ParquetWriter | None = None

    def __enter__(self) -> "_Writer":
        return self

    def add(self, frame: pl.DataFrame) -> None:
        table: pa.Table = frame.to_arrow()
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.path, table.schema, compression="zstd")
        self.writer.write_table(table)

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()


def _round(run: Run, place: Place) -> pl.DataFrame:
    """The responses of one round, judged as far as they are."""
    here = (pl.col("step") == place.step) & (pl.col("round") == place.round)
    sampled = run.rollouts.filter(here).select("step", "round", *SAMPLED).collect()
    scores = run.scores.filter(here).select("response_id", *JUDGED).collect()
    joined = sampled.join(scores, on="response_id", how="left", maintain_order="left")
    return joined.with_columns(pl.col("verdict", "finish_reason").cast(pl.Categorical))


def _with_fate(run: Run, rounds: list[pl.DataFrame]) -> pl.DataFrame:
    """The responses of all rounds, with the last decision on their groups, and their tasks."""
    groups = run.groups.select("group_id", "decision", "reason", "step").collect()
    fate = groups.group_by("group_id").agg(
        pl.col("decision", "reason").sort_by("step").last(), decided_in=pl.col("step").max()
    )
    few = pl.col("decision", "reason").cast(pl.Categorical)
    task = run.prompts.select("prompt_id", pl.col("task").cast(pl.Categorical)).collect()
    if not rounds:
        rounds = [_round(run, Place(0, 0, "rollout", None))]
    return (
        pl.concat(rounds)
        .join(fate.with_columns(few), on="group_id", how="left", maintain_order="left")
        .join(task, on="prompt_id", how="left", maintain_order="left")
    )


def _sorted(rows: pl.DataFrame, order: Order) -> pl.DataFrame:
    """Equal ones stay in the run's order. Raises `InputError` for a column that is not offered."""
    if order.column is None:
        return rows
    if order.column not in SORTED_BY:
        raise InputError(f"cannot sort by {order.column!r}; by one of {', '.join(SORTED_BY)}")
    key = pl.col(order.column)
    words = order.column in WORDS
    return rows.sort(
        key.cast(pl.String) if words else key,
        descending=order.descending,
        nulls_last=True,
        maintain_order=True,
    )


def _words(column: pl.Series) -> list[str]:
    counts = column.value_counts(sort=True).get_column(column.name).cast(pl.String)
    return [word if word is not None else "-" for word in counts]


def _of_these(frame: pl.LazyFrame, rows: pl.DataFrame, key: str) -> pl.LazyFrame:
    """The rows with the same key; only the files of their steps are opened."""
    steps, ids = rows["step"].unique().to_list(), rows[key].unique().to_list()
    return frame.filter(pl.col("step").is_in(steps)).filter(pl.col(key).is_in(ids))


def _whole(run: Run, rows: pl.DataFrame, prompts: pl.DataFrame) -> pl.DataFrame:
    """These responses with all columns of `responses`."""
    fate = rows.select("step", "round", "response_id", "decision", "reason", "decided_in", "task")
    keys = ["step", "round", "response_id"]
    sampled = run.rollouts.filter(pl.col("step").is_in(rows["step"].unique().to_list()))
    scores = run.scores.filter(pl.col("step").is_in(rows["step"].unique().to_list()))
    words = pl.col("decision", "reason", "task").cast(pl.String)
    return (
        sampled.join(fate.lazy().with_columns(words), on=keys, maintain_order="left")
        .join(scores, on=keys, how="left", maintain_order="left")
        .join(prompts.lazy(), on="prompt_id", how="left", maintain_order="left")
        .collect()
    )


def _columns(rows: list[dict[str, Any]], advantages: list[float]) -> dict[str, list[Any]]:
    """A list per column; the advantage, where it was trained on, is that of all its tokens."""
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return columns | ({"advantage": [advantages[-1]] * len(rows)} if advantages else {})
