"""Prompts from the generator, or from somebody's own file: checked before anything wakes."""

import json
from pathlib import Path

import polars as pl
import pytest
from conftest import CPU, VECTORS, fresh, rows

from stages import prompts, tables
from stages.errors import InputError
from stages.prompts import Config


def run(tmp_path: Path, source: Path | None = None, **settings: object) -> pl.DataFrame:
    out = fresh(tmp_path)
    prompts.run(source=source, out=out, config=Config(**settings), machine=CPU)
    return tables.read(out, "prompts")


def lines(tmp_path: Path, *objects: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in objects) + "\n\n", encoding="utf-8")
    return path


def test_the_generator_fills_a_table_by_its_config(tmp_path: Path) -> None:
    frame = run(tmp_path, count=10, levels=(3,), seed=4)
    assert frame["prompt_id"].n_unique() == 10
    assert {json.loads(meta)["level"] for meta in frame["meta"]} == {3}
    assert frame.equals(run(tmp_path, count=10, levels=(3,), seed=4))
    assert not frame.equals(run(tmp_path, count=10, levels=(3,), seed=5))


def test_a_plain_text_prompt_and_a_number_answer_mean_their_text(tmp_path: Path) -> None:
    source = lines(tmp_path, {"prompt_id": 7, "prompt": "1+2", "answer": 3, "meta": {"level": 2}})
    assert run(tmp_path, source).row(0, named=True) == {
        "prompt_id": "7",
        "prompt": [{"role": "user", "content": "1+2"}],
        "answer": "3",
        "task": "arithmetic",
        "meta": '{"level": 2}',
    }


def test_a_chat_and_a_task_of_its_own_stay_as_they_are(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2 é"}]
    source = lines(tmp_path, {"prompt_id": "a", "prompt": chat, "answer": "3", "task": "exact"})
    row = run(tmp_path, source).row(0, named=True)
    assert (row["prompt"], row["task"]) == (chat, "exact")


def test_a_line_ends_at_a_newline_and_at_nothing_else_that_unicode_calls_one(
    tmp_path: Path,
) -> None:
    text = "1+2\u2028\u0085 what is it?"
    row = {"prompt_id": "a", "prompt": text, "answer": "3"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert run(tmp_path, tmp_path / "p.jsonl")["prompt"][0][0]["content"] == text


def test_rows_without_a_task_get_the_configured_one(tmp_path: Path) -> None:
    source = lines(tmp_path, {"prompt_id": "a", "prompt": "1+2", "answer": "3"})
    assert run(tmp_path, source, task="exact")["task"].to_list() == ["exact"]


def test_a_parquet_file_of_somebody_else_is_taken(tmp_path: Path) -> None:
    frame = rows("prompts", {"prompt_id": "b"}, {"prompt_id": "a"})
    frame.write_parquet(tmp_path / "mine.parquet")
    assert run(tmp_path, tmp_path / "mine.parquet").equals(frame)


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{name} does not exist"):
        run(tmp_path, tmp_path / name)


def test_a_missing_column_is_named_with_its_line(tmp_path: Path) -> None:
    good = {"prompt_id": "a", "prompt": "1+2", "answer": "3"}
    source = lines(tmp_path, good, {"prompt_id": "b", "prompt": "1+2"})
    with pytest.raises(InputError, match=r"prompts\.jsonl, line 2.*'answer'"):
        run(tmp_path, source)


def test_a_missing_parquet_column_is_named(tmp_path: Path) -> None:
    rows("prompts", {"prompt_id": "a"}).drop("answer").write_parquet(tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"p\.parquet .*'answer'"):
        run(tmp_path, tmp_path / "p.parquet")


@pytest.mark.parametrize("line", ["{", "3", "[]", '{"prompt_id": "a", "prompt": 3, "answer": 1}'])
def test_a_line_that_is_no_prompt_is_an_input_error(line: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(InputError, match=r"p\.jsonl"):
        run(tmp_path, tmp_path / "p.jsonl")


def test_zero_rows_are_refused(tmp_path: Path) -> None:
    rows("prompts").write_parquet(tmp_path / "p.parquet")
    with pytest.raises(InputError, match="no rows"):
        run(tmp_path, tmp_path / "p.parquet")
    with pytest.raises(InputError, match="no rows"):
        run(tmp_path, lines(tmp_path))


def test_an_id_that_occurs_twice_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    row = {"prompt_id": "same", "prompt": "1+2", "answer": "3"}
    with pytest.raises(InputError, match="'same' occurs more than once"):
        run(tmp_path, lines(tmp_path, row, row))
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_null_answer_is_refused_with_its_row(suffix: str, tmp_path: Path) -> None:
    given = [{"prompt_id": i, "prompt": "1+2", "answer": a} for i, a in (("a", "3"), ("b", None))]
    source = lines(tmp_path, *given)
    if suffix == "parquet":
        source = tmp_path / "p.parquet"
        rows("prompts", *given).write_parquet(source)
    with pytest.raises(InputError, match="'answer' is null in row 1"):
        run(tmp_path, source)


def test_prompts_of_equal_text_stay_separate_and_are_counted(tmp_path: Path) -> None:
    config = Config()
    out = fresh(tmp_path)
    metrics = prompts.run(source=VECTORS / "prompts_dup.jsonl", out=out, config=config, machine=CPU)
    assert tables.read(out, "prompts")["prompt_id"].to_list() == ["q1", "q2", "q3", "q4"]
    assert metrics == {"prompts": 4, "repeated_texts": 2}  # q3 differs by a space


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_id": None, "prompt": "1+1", "answer": 2}, "'prompt_id' is null in row 0"),
        ({"prompt_id": "a", "prompt": [{"role": "user"}], "answer": 2}, "row 0 lacks its role"),
        ({"prompt_id": "a", "prompt": [{"content": "1"}], "answer": 2}, "row 0 lacks its role"),
    ],
)
def test_a_row_that_nobody_could_ask_is_named(
    tmp_path: Path, row: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path, lines(tmp_path, row))


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(InputError, match=r"mine\.jsonl is not UTF-8"):
        run(tmp_path, tmp_path / "mine.jsonl")
