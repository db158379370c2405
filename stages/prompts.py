"""Where prompts come from: the embedded task's generator, or a file of somebody's own."""

import json
from pathlib import Path
from typing import Literal

import polars as pl
from pydantic import Field

from stages import arithmetic, tables
from stages.errors import InputError
from stages.settings import Machine, Settings


class Config(Settings):
    """`file` (Parquet or JSON lines) is an input, so it counts by content, not by its path."""

    file: Path | None = Field(None, exclude=True)
    task: Literal["arithmetic", "exact"] = "arithmetic"  # of rows that do not name their own
    # the generator's, when there is no file
    count: int = Field(1024, ge=1)
    split: Literal["train", "heldout"] = "train"
    levels: tuple[int, ...] = arithmetic.LEVELS
    seed: int = 0


def run(
    *, source: Path | None = None, out: Path, config: Config, machine: Machine
) -> dict[str, float]:
    """Write a checked `prompts` table."""
    frame = (
        _from_file(source, config)
        if source
        else arithmetic.prompts(config.count, config.seed, config.split, config.levels)
    )
    tables.write(out, "prompts", frame)
    repeated = int(frame.select(pl.col("prompt").hash()).is_duplicated().sum())
    return {"prompts": len(frame), "repeated_texts": repeated}


def _from_file(source: Path, config: Config) -> pl.DataFrame:
    if source.suffix not in (".jsonl", ".ndjson"):
        return tables.read_prompts(source)
    rows = [_row(source, number, line, config) for number, line in enumerate(_lines(source), 1)]
    frame = pl.DataFrame(rows, schema=tables.polars_schema("prompts"))
    return tables.check_prompts(frame, source)


def _lines(source: Path) -> list[str]:
    if not source.is_file():
        raise InputError(f"{source} does not exist (looked for prompts)")
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text: {error}") from error
    return [line for line in text.split("\n") if line.strip()]


def _row(source: Path, number: int, line: str, config: Config) -> dict[str, object]:
    """One JSON line; a prompt may be plain text, an answer a number: both mean their text."""
    try:
        row = json.loads(line)
        prompt, answer = row["prompt"], row["answer"]
        meta = row.get("meta")
        return {
            "prompt_id": _text(row["prompt_id"]),
            "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            "answer": _text(answer),
            "task": _text(row.get("task", config.task)),
            "meta": meta if meta is None or isinstance(meta, str) else json.dumps(meta),
        }
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(
            f"{source}, line {number}: expected an object with prompt_id, prompt and answer "
            f"({type(error).__name__}: {error})"
        ) from error


def _text(value: object) -> str | None:
    """A number's text; null stays null, for the check of the whole table to name its row."""
    return None if value is None else str(value)
