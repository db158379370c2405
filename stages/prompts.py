"""Where prompts come from: an embedded task's generator, somebody's files, or a dataset by name.

A row that no prompt can be made of is never dropped in silence: it goes to `unusable` with the
reason, and more of them than the settings allow end the stage.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import polars as pl
from pydantic import Field, field_validator, model_validator

from stages import embedded, questions, sources, tables, verify
from stages.checkers.answers import last_boxed
from stages.errors import InputError
from stages.questions import Messages, Place, Prompt, Questions, Refused, Unusable
from stages.settings import Machine, Settings
from stages.verify import Judges

USUAL = ("prompt_id", "task", "meta")  # columns that a table may also lack
PROMPT = "{prompt}"  # where a template has the text
BOXED = "boxed"  # an answer_pattern: the last \boxed{…}, which no regular expression can balance
THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
SHOWN = 5  # unusable rows that an error spells out
ABSENT = object()


class Config(Settings):
    """Which rows, which of their columns is what, and which of them to take.

    `file` is an input, so it counts by content, not by its path.
    """

    file: Path | None = Field(None, exclude=True)  # Parquet, JSON lines, CSV, or a directory of one
    dataset: str | None = None  # by its name on the Hugging Face hub, instead of a file
    dataset_config: str | None = None
    dataset_split: str = "train"
    dataset_revision: str | None = None
    # what is where; a dot leads into a struct: reward_model.ground_truth
    prompt_column: str = "prompt"  # text, or messages with role and content
    answer_column: str = "answer"  # text, a number, or a list of them
    id_column: str | None = "prompt_id"  # none: a hash of the text
    task_column: str | None = "task"
    task: str = "arithmetic"  # of rows that do not name their own
    meta_columns: tuple[str, ...] = ("meta",)
    answer_pattern: str | None = None  # its group in the answer's last match, or `boxed`
    # what the model reads
    system: str | None = None  # unless a row's messages begin with their own
    template: str = PROMPT  # around plain text
    # which of them
    dedup: bool = True  # one prompt per text, whatever its white space
    split: embedded.Split = "train"
    split_fraction: float = Field(0, ge=0, lt=1)  # held out, by a hash of each text
    split_seed: int = 0
    limit: int | None = Field(None, ge=1)
    max_unusable: float = Field(0, ge=0, le=1)  # share of the rows
    # the generator's, when there is neither file nor dataset
    generator: embedded.Name = "arithmetic"
    count: int = Field(1024, ge=1)
    levels: tuple[int, ...] = ()  # of difficulty; none: all that the generator has
    seed: int = 0

    @field_validator("task")
    @classmethod
    def _has_a_checker(cls, task: str) -> str:
        if task not in verify.TASKS:
            raise ValueError(f"expected one of {', '.join(sorted(verify.TASKS))}")
        return task

    @field_validator("template")
    @classmethod
    def _has_a_place_for_the_prompt(cls, template: str) -> str:
        if PROMPT not in template:
            raise ValueError(f"expected {PROMPT} somewhere in the template")
        return template

    @field_validator("answer_pattern")
    @classmethod
    def _has_one_group(cls, pattern: str | None) -> str | None:
        if pattern is None or pattern == BOXED:
            return pattern
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if groups != 1:
            raise ValueError(f"expected a regular expression with one group, found {groups}")
        return pattern

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.file and self.dataset:
            raise ValueError(
                "file and dataset are two sources: give one, and set the other to null"
            )
        return self


def run(
    *, source: Path | None = None, out: Path, config: Config, machine: Machine
) -> dict[str, float]:
    """Write a checked `prompts` table, and `unusable` with the rows that are not in it, and why.

    Of the metrics, `rows` is the sum of the others. Raises `InputError` that names the first
    unusable rows if they are a larger share than `max_unusable`, or if no prompt is left.
    """
    if source is None and config.dataset is None:
        task = embedded.TASKS[config.generator]
        frame = embedded.prompts(task, config.count, config.seed, config.split, config.levels)
        tables.write(out, "prompts", frame)
        return {"prompts": len(frame)}
    with Judges() as judges:
        gathered, unusable = _gather(_rows(source, config), config, judges)
    rows = len(unusable) + gathered.rows
    unusable += gathered.contradictions(config.answer_column)
    usable = [found for question in gathered for found in question.found()]
    duplicates = rows - len(unusable) - len(usable)
    asked = [found for found in usable if _in_split(found.content, config)]
    unique, clashes = questions.unique(asked, config.id_column)
    unusable = sorted([*unusable, *clashes], key=lambda refused: refused[0][:2])
    taken = unique[: config.limit]
    _check(unusable, rows, taken, config, where=str(source or config.dataset))
    tables.write(out, "prompts", pl.DataFrame(taken, tables.polars_schema("prompts"), orient="row"))
    tables.write(out, "unusable", _report(unusable))
    return {
        "rows": rows,
        "prompts": len(taken),
        "duplicates": duplicates,
        "unusable": len(unusable),
        "other_split": len(usable) - len(asked),
        "over_limit": len(unique) - len(taken),
    }


def _rows(source: Path | None, config: Config) -> Iterator[sources.Row]:
    if source is not None and config.dataset is not None:
        raise InputError(f"{source} and dataset={config.dataset} are two sources: give one")
    named = [config.id_column, config.task_column, *config.meta_columns]
    columns = sources.Columns(
        required=[config.prompt_column, config.answer_column]
        + [column for column in named if column and column not in USUAL],
        optional=[column for column in named if column in USUAL],
    )
    if source is not None:
        return sources.from_files(source, columns)
    assert config.dataset is not None
    return sources.from_hub(
        config.dataset,
        columns,
        config=config.dataset_config,
        split=config.dataset_split,
        revision=config.dataset_revision,
    )


def _gather(
    rows: Iterator[sources.Row], config: Config, judges: Judges
) -> tuple[Questions, list[Refused]]:
    """What the rows ask, and those that are no prompt."""
    gathered = Questions(judges, dedup=config.dedup)
    unusable: list[Refused] = []
    for row in rows:
        prompt_id: str | None = None
        try:
            if isinstance(row.values, str):
                raise Unusable(row.values)
            prompt_id = _id(row.values, config)
            content, prompt = _prompt(row.values, prompt_id, config)
            if problem := judges.gold_problem(prompt.task, prompt.answer):
                raise Unusable(
                    f"the checker '{prompt.task}' would not take {prompt.answer!r} for right: "
                    f"{problem}",
                    config.answer_column,
                )
        except Unusable as why:
            unusable.append((Place(row.file, row.number, prompt_id), why))
        else:
            gathered.add(content, prompt, Place(row.file, row.number, prompt_id))
    return gathered, unusable


def _in_split(content: bytes, config: Config) -> bool:
    heldout = questions.held_out(content, fraction=config.split_fraction, seed=config.split_seed)
    return heldout == (config.split == "heldout")


def _prompt(values: dict[str, Any], prompt_id: str | None, config: Config) -> tuple[bytes, Prompt]:
    """The hash of what a row asks, before system prompt and template, and the row as a prompt."""
    found = _value(values, config.prompt_column)
    messages = _messages(found, config.prompt_column)
    content = questions.content(messages)
    if isinstance(found, str):
        messages = [{"role": "user", "content": config.template.replace(PROMPT, found)}]
    if config.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system}, *messages]
    task = _task(values, config)
    return content, Prompt(
        prompt_id=prompt_id or questions.name(content),
        prompt=messages,
        answer=_answer(values, task, config),
        task=task,
        meta=_meta(values, config),
    )


def _value(values: dict[str, Any], column: str) -> Any:
    """What the column holds, `ABSENT` where a usual column does not exist."""
    try:
        return sources.value(values, column)
    except KeyError:
        if column in USUAL:
            return ABSENT
        raise Unusable(f"is missing; the row has {', '.join(values)}", column) from None


def _id(values: dict[str, Any], config: Config) -> str | None:
    """The id that the row gives itself, once in memory however often it is repeated."""
    column = config.id_column
    if column is None or (found := _value(values, column)) is ABSENT:
        return None
    return sys.intern(_text(found, column))


def _task(values: dict[str, Any], config: Config) -> str:
    column = config.task_column
    if column is None or (found := _value(values, column)) in (ABSENT, None):
        return config.task
    task = _text(found, column)
    if task not in verify.TASKS:
        known = ", ".join(sorted(verify.TASKS))
        raise Unusable(f"'{task}' has no checker; known tasks: {known}", column)
    return task


def _messages(found: Any, column: str) -> Messages:
    """A chat, plain text being what a user says."""
    if isinstance(found, str):
        found = [{"role": "user", "content": found}]
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        wanted = "text or messages, each with role and content"
        raise Unusable(f"expected {wanted}, found {_shown(found)}", column)
    for message in found:
        if not all(isinstance(message.get(part), str) for part in ("role", "content")):
            raise Unusable(f"a message lacks its role or content: {_shown(message)}", column)
    if not any(message["content"].strip() for message in found):
        raise Unusable("is empty", column)
    return [
        {part: _unicode(message[part], column) for part in ("role", "content")} for message in found
    ]


def _answer(values: dict[str, Any], task: str, config: Config) -> str:
    """The answer on one line, as a response would give it; a number without thousands commas."""
    column = config.answer_column
    text = _text(_value(values, column), column)
    if config.answer_pattern is not None:
        found = _last_match(config.answer_pattern, text)
        if found is None:
            raise Unusable(f"nothing in it matches answer_pattern: {_shown(text)}", column)
        text = found
    answer = " ".join(text.split())
    if not answer:
        raise Unusable("is empty", column)
    if task == "arithmetic" and THOUSANDS.fullmatch(answer):
        return answer.replace(",", "")
    return answer


def _last_match(pattern: str, text: str) -> str | None:
    if pattern == BOXED:
        return last_boxed(text)
    matches = list(re.finditer(pattern, text))
    return matches[-1].group(1) if matches else None


def _meta(values: dict[str, Any], config: Config) -> str | None:
    """JSON by column; a column called `meta` is taken as it is."""
    if config.meta_columns == ("meta",):
        found = _value(values, "meta")
        if found is ABSENT or found is None:
            return None
        return _unicode(found, "meta") if isinstance(found, str) else json.dumps(found, default=str)
    named = {column: _meta_value(values, column) for column in config.meta_columns}
    return json.dumps(named, default=str) if named else None


def _meta_value(values: dict[str, Any], column: str) -> Any:
    """Null where a line lacks it: no reason to lose the prompt."""
    try:
        return sources.value(values, column)
    except KeyError:
        return None


def _text(found: Any, column: str) -> str:
    """Text, a number or a list as text: 8.0 is 8, and a list of one is what it holds."""
    if found is None or (isinstance(found, float) and not math.isfinite(found)):
        raise Unusable(f"is {'null' if found is None else found}", column)
    if isinstance(found, str):
        if not found.strip():
            raise Unusable("is empty", column)
        return _unicode(found, column)
    if isinstance(found, int | float | Decimal) and not isinstance(found, bool):
        return str(int(found)) if found == int(found) else str(found)
    if isinstance(found, list) and found:
        return _text(found[0], column) if len(found) == 1 else json.dumps(found, default=str)
    raise Unusable(f"expected text, a number or a list, found {_shown(found)}", column)


def _unicode(text: str, column: str) -> str:
    """The text itself; half a surrogate pair, which JSON can spell, could not be stored."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable(f"is no valid Unicode: {error}", column) from error
    return text


def _shown(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _check(
    unusable: list[Refused], rows: int, taken: list[Prompt], config: Config, *, where: str
) -> None:
    """Raise `InputError` if there are more unusable rows than allowed, or no prompts."""
    if len(unusable) > config.max_unusable * rows:
        first = "\n".join(
            f"  {place.file}, row {place.row}"
            + (f", column '{why.column}': {why}" if why.column else f": {why}")
            for place, why in unusable[:SHOWN]
        )
        more = f"\n  … and {len(unusable) - SHOWN} more" if len(unusable) > SHOWN else ""
        raise InputError(
            f"{where}: {len(unusable)} of {rows} rows cannot be used; max_unusable allows a share "
            f"of {config.max_unusable:g}:\n{first}{more}\nMend them, say which column is which "
            "(prompt_column, answer_column, answer_pattern, task, …), or raise max_unusable to go "
            "on without them"
        )
    if not taken:
        hint = "; split=heldout needs a split_fraction" if not config.split_fraction else ""
        raise InputError(
            f"{where}: no rows to ask, of {rows} in all ({len(unusable)} unusable), for "
            f"split={config.split}{hint if config.split == 'heldout' else ''}"
        )


def _report(unusable: list[Refused]) -> pl.DataFrame:
    rows = [
        (place.file, place.row, place.prompt_id, why.column, str(why)) for place, why in unusable
    ]
    return pl.DataFrame(rows, tables.polars_schema("unusable"), orient="row")
