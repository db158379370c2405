"""Prompts from the generator, from files, or from a dataset: checked before anything wakes."""

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
import pytest
from conftest import CPU, VECTORS, fresh, rows, save
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config import load
from stages import prompts, tables
from stages.errors import InputError
from stages.prompts import Config, last_boxed

SUM = {"prompt_id": "a", "prompt": "1+2", "answer": 3}


def run(tmp_path: Path, source: Path | None = None, **changes: object) -> pl.DataFrame:
    return whole(tmp_path, source, **changes)[0]


def whole(
    tmp_path: Path, source: Path | None = None, **changes: object
) -> tuple[pl.DataFrame, pl.DataFrame, dict[str, float]]:
    """The prompts, the unusable rows, and the metrics."""
    out = fresh(tmp_path)
    metrics = prompts.run(source=source, out=out, config=Config(**changes), machine=CPU)
    unusable = tables.read(out, "unusable") if (out / "unusable").exists() else rows("unusable")
    return tables.read(out, "prompts"), unusable, metrics


def lines(tmp_path: Path, *objects: object, name: str = "prompts.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(one) for one in objects) + "\n\n", encoding="utf-8")
    return path


def asked(frame: pl.DataFrame) -> list[str]:
    """What the user says in each prompt."""
    return [messages[-1]["content"] for messages in frame["prompt"].to_list()]


# the generator


def test_the_generator_fills_a_table_by_its_config(tmp_path: Path) -> None:
    frame = run(tmp_path, count=10, levels=(3,), seed=4)
    assert frame["prompt_id"].n_unique() == 10
    assert {json.loads(meta)["level"] for meta in frame["meta"]} == {3}
    assert frame.equals(run(tmp_path, count=10, levels=(3,), seed=4))
    assert not frame.equals(run(tmp_path, count=10, levels=(3,), seed=5))


# files


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


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(SUM), encoding="utf-8-sig")
    assert run(tmp_path, tmp_path / "p.jsonl")["prompt_id"].to_list() == ["a"]


def test_rows_without_a_task_get_the_configured_one(tmp_path: Path) -> None:
    source = lines(tmp_path, {**SUM, "task": None})
    assert run(tmp_path, source, task="exact")["task"].to_list() == ["exact"]
    assert run(tmp_path, lines(tmp_path, SUM), task="exact")["task"].to_list() == ["exact"]


def test_a_parquet_file_of_somebody_else_is_taken(tmp_path: Path) -> None:
    frame = rows("prompts", {"prompt_id": "b"}, {"prompt_id": "a", "prompt": "5+1"})
    frame.write_parquet(tmp_path / "mine.parquet")
    assert run(tmp_path, tmp_path / "mine.parquet").equals(frame)


def test_the_prompts_of_another_run_are_taken(tmp_path: Path) -> None:
    frame = rows("prompts", {"prompt_id": "b"}, {"prompt_id": "a", "prompt": "5+1"})
    assert run(tmp_path, save(tmp_path / "theirs", "prompts", frame)).equals(frame)


def test_everything_in_a_csv_file_is_text(tmp_path: Path) -> None:
    text = 'prompt_id,prompt,answer,level\n007,"Add 1,\nand ""2""",3,low\n008,4+4,8.0,\n'
    (tmp_path / "p.csv").write_text(text, encoding="utf-8-sig")
    frame = run(tmp_path, tmp_path / "p.csv", meta_columns=("level",))
    assert frame["prompt_id"].to_list() == ["007", "008"]
    assert asked(frame) == ['Add 1,\nand "2"', "4+4"]
    assert frame["answer"].to_list() == ["3", "8.0"]
    assert frame["meta"].to_list() == ['{"level": "low"}', '{"level": null}']


def test_the_shards_of_a_directory_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "README.md").write_text("what this is")
    lines(shards, {**SUM, "prompt_id": "2", "prompt": "2+1"}, name="part-1.jsonl")
    first = [{**SUM, "prompt_id": "0"}, {"prompt_id": "1", "prompt": "no answer"}]
    lines(shards, *first, name="part-0.jsonl")
    frame, unusable, _ = whole(tmp_path, shards, max_unusable=0.5)
    assert frame["prompt_id"].to_list() == ["0", "2"]
    assert unusable.select("file", "row").rows() == [("part-0.jsonl", 2)]


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet", "absent"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{name} does not exist"):
        run(tmp_path, tmp_path / name)


def test_a_file_or_directory_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.xlsx").write_text("?")
    with pytest.raises(InputError, match=r"p\.xlsx: .*none of \.parquet, \.jsonl"):
        run(tmp_path, tmp_path / "p.xlsx")
    with pytest.raises(InputError, match="holds no file"):
        run(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["p.parquet", "p.csv"])
def test_a_file_that_is_not_what_its_name_says_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe\x00 broken, \xff\n1,2,3,4\n")
    with pytest.raises(InputError, match=rf"{name} is not a readable"):
        run(tmp_path, tmp_path / name)


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(InputError, match=r"mine\.jsonl is not UTF-8"):
        run(tmp_path, tmp_path / "mine.jsonl")


def test_zero_rows_are_refused(tmp_path: Path) -> None:
    rows("prompts").write_parquet(tmp_path / "p.parquet")
    with pytest.raises(InputError, match="no rows"):
        run(tmp_path, tmp_path / "p.parquet")
    with pytest.raises(InputError, match="no rows"):
        run(tmp_path, lines(tmp_path))


# columns


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_dot_leads_into_structs_and_lists(suffix: str, tmp_path: Path) -> None:
    row = {
        "turns": [{"say": "1+2"}, {"say": "again"}],
        "reward": {"gold": {"text": "3"}},
        "about": {"level": 4, "index": "x7"},
    }
    source = lines(tmp_path, row)
    if suffix == "parquet":
        source = tmp_path / "p.parquet"
        pl.DataFrame([row]).write_parquet(source)
    frame = run(
        tmp_path,
        source,
        prompt_column="turns.0.say",
        answer_column="reward.gold.text",
        id_column="about.index",
        meta_columns=("about.level", "reward"),
    )
    assert frame.drop("prompt").row(0, named=True) == {
        "prompt_id": "x7",
        "answer": "3",
        "task": "arithmetic",
        "meta": '{"about.level": 4, "reward": {"gold": {"text": "3"}}}',
    }
    assert asked(frame) == ["1+2"]


def test_a_missing_column_is_named_with_its_line(tmp_path: Path) -> None:
    source = lines(tmp_path, SUM, {"prompt_id": "b", "prompt": "1+2"})
    with pytest.raises(
        InputError,
        match=r"prompts\.jsonl, row 2, column 'answer': is missing; .* prompt_id, prompt",
    ):
        run(tmp_path, source)


@pytest.mark.parametrize("column", ["answer_column", "id_column", "task_column"])
def test_a_named_column_that_a_table_lacks_is_named_with_those_it_has(
    column: str, tmp_path: Path
) -> None:
    rows("prompts", {"prompt_id": "a"}).write_parquet(tmp_path / "p.parquet")
    with pytest.raises(
        InputError, match=r"p\.parquet has no column 'gold', only prompt_id, .*meta"
    ):
        run(tmp_path, tmp_path / "p.parquet", **{column: "gold"})


def test_a_missing_parquet_column_is_named(tmp_path: Path) -> None:
    rows("prompts", {"prompt_id": "a"}).drop("answer").write_parquet(tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"p\.parquet .*'answer'"):
        run(tmp_path, tmp_path / "p.parquet")


def test_a_template_goes_around_plain_text_and_leaves_its_braces_alone(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "4+4"}]
    source = lines(
        tmp_path,
        {"prompt": r"\frac{1}{2} {prompt}", "answer": 3},
        {"prompt": chat, "answer": 8},
    )
    frame = run(tmp_path, source, template="Solve {prompt}!")
    assert asked(frame) == [r"Solve \frac{1}{2} {prompt}!", "4+4"]


def test_a_system_prompt_comes_first_unless_a_chat_has_its_own(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "4+4"}]
    source = lines(tmp_path, {"prompt": "1+2", "answer": 3}, {"prompt": own, "answer": 8})
    first, second = run(tmp_path, source, system="Add.")["prompt"].to_list()
    assert first == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"}]
    assert second == own


@pytest.mark.parametrize(
    ("answer", "means"),
    [(8.0, "8"), (0.5, "0.5"), (["8"], "8"), (" 2,280 ", "2280"), ("-1,234.50", "-1234.50")],
)
def test_a_number_is_the_same_however_it_is_stored(
    answer: object, means: str, tmp_path: Path
) -> None:
    assert run(tmp_path, lines(tmp_path, {**SUM, "answer": answer}))["answer"].to_list() == [means]


def test_text_keeps_its_commas_and_a_list_its_items(tmp_path: Path) -> None:
    source = lines(
        tmp_path,
        {"prompt": "a", "answer": "1,234\n or so"},
        {"prompt": "b", "answer": ["x", 2]},
    )
    answers = run(tmp_path, source, task="exact")["answer"].to_list()
    assert answers == ["1,234 or so", '["x", 2]']


def test_an_answer_pattern_takes_its_last_match(tmp_path: Path) -> None:
    source = lines(tmp_path, {**SUM, "answer": "#### 1 is wrong\nso <<1+2=3>>\n#### 3"})
    assert run(tmp_path, source, answer_pattern="#### (.+)")["answer"].to_list() == ["3"]
    with pytest.raises(InputError, match="nothing in it matches answer_pattern: '#### 1 is"):
        run(tmp_path, source, answer_pattern="=> (.+)")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{4}$, or rather $\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"$\boxed{\left\{1, 2\right\}}$ and {more}", r"\left\{1, 2\right\}"),
        (
            r"$\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}$",
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        ),
        (r"thus \fbox{12}", "12"),
        (r"we get $\boxed 2\pi$.", r"2\pi"),
        (r"\boxed{1 + {2}", None),
        ("no box", None),
    ],
)
def test_the_last_box_is_taken_with_its_braces_balanced(
    solution: str, answer: str | None, tmp_path: Path
) -> None:
    assert last_boxed(solution) == answer
    boxed = {"answer_pattern": "boxed", "task": "exact", "max_unusable": 0.5}
    other = {"prompt": "other", "answer": r"\boxed{0}"}
    source = lines(tmp_path, {**SUM, "answer": solution}, {**other, "prompt_id": "b"})
    assert run(tmp_path, source, **boxed)["answer"].to_list() == [answer, "0"][answer is None :]


def test_a_prompt_without_an_id_is_known_by_its_content(tmp_path: Path) -> None:
    plain = lines(tmp_path, {"prompt": "What is\n 1+2? ", "answer": 3})
    (tmp_path / "p.csv").write_text("prompt,answer\nWhat is 1+2?,3\n")
    chat = [{"role": "user", "content": "What is 1+2?"}]
    pl.DataFrame([{"prompt": chat, "answer": 3}]).write_parquet(tmp_path / "p.parquet")
    ids = [
        run(tmp_path, plain)["prompt_id"][0],
        run(tmp_path, tmp_path / "p.csv", template="Add: {prompt}")["prompt_id"][0],
        run(tmp_path, tmp_path / "p.parquet", system="Add.")["prompt_id"][0],
    ]
    assert ids == ["52567b8f08ded110"] * 3  # for good: artifacts and tables remember it


# unusable rows


@pytest.mark.parametrize(
    ("row", "column", "reason"),
    [
        ({**SUM, "prompt_id": None}, "prompt_id", "is null"),
        ({**SUM, "prompt_id": " "}, "prompt_id", "is empty"),
        ({**SUM, "prompt": None}, "prompt", "expected text or messages.*None"),
        ({**SUM, "prompt": 3}, "prompt", "expected text or messages.*3"),
        ({**SUM, "prompt": " \n"}, "prompt", "is empty"),
        ({**SUM, "prompt": []}, "prompt", "is empty"),
        ({**SUM, "prompt": ["1+2"]}, "prompt", "expected text or messages"),
        ({**SUM, "prompt": [{"role": "user"}]}, "prompt", "lacks its role or content"),
        ({**SUM, "prompt": [{"content": "1"}]}, "prompt", "lacks its role or content"),
        ({**SUM, "prompt": "half \ud800"}, "prompt", "no valid Unicode"),
        ({**SUM, "answer": None}, "answer", "is null"),
        ({**SUM, "answer": float("nan")}, "answer", "is nan"),
        ({**SUM, "answer": ""}, "answer", "is empty"),
        ({**SUM, "answer": []}, "answer", "expected text, a number or a list"),
        ({**SUM, "answer": True}, "answer", "expected text, a number or a list, found True"),
        ({**SUM, "answer": {"gold": 3}}, "answer", "expected text, a number or a list"),
        ({**SUM, "answer": "three"}, "answer", "checker 'arithmetic' would not take 'three'"),
        (
            {**SUM, "task": "chess"},
            "task",
            "'chess' has no checker; known tasks: arithmetic, class",
        ),
        ({"answer": 3}, "prompt", "is missing; the row has answer"),
        ([], None, r"expected a JSON object, found \[\]"),
    ],
)
def test_a_row_that_is_no_prompt_is_recorded_with_its_reason(
    row: object, column: str | None, reason: str, tmp_path: Path
) -> None:
    source = lines(tmp_path, row, {"prompt_id": "z", "prompt": "9+1", "answer": 10})
    with pytest.raises(InputError, match=rf"1 of 2 rows .*\n  prompts\.jsonl, row 1.*{reason}"):
        run(tmp_path, source)
    frame, unusable, metrics = whole(tmp_path, source, max_unusable=0.5)
    assert frame["prompt_id"].to_list() == ["z"]
    assert unusable.select("file", "row", "column").rows() == [("prompts.jsonl", 1, column)]
    assert (metrics["rows"], metrics["prompts"], metrics["unusable"]) == (2, 1, 1)


@pytest.mark.parametrize("line", ["{", "3", "[]", '{"prompt_id": "a", "prompt": 3, "answer": 1}'])
def test_a_line_that_is_no_prompt_is_an_input_error(line: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\n" + line)
    with pytest.raises(InputError, match=r"p\.jsonl, row 2"):
        run(tmp_path, tmp_path / "p.jsonl")


def test_an_unusable_row_is_known_by_its_id_where_it_has_one(tmp_path: Path) -> None:
    source = lines(tmp_path, {**SUM, "answer": None}, SUM)
    assert whole(tmp_path, source, max_unusable=0.5)[1]["prompt_id"].to_list() == ["a"]


def test_the_error_shows_the_first_rows_and_counts_the_others(tmp_path: Path) -> None:
    bad = [{"prompt_id": str(i), "prompt": f"1+{i}"} for i in range(8)]
    with pytest.raises(InputError, match="8 of 9 rows cannot be used") as error:
        run(tmp_path, lines(tmp_path, SUM, *bad), max_unusable=0.5)
    assert "row 6, column 'answer'" in str(error.value) and "row 7" not in str(error.value)
    assert "… and 3 more" in str(error.value) and "raise max_unusable" in str(error.value)


def test_the_allowed_share_of_unusable_rows_is_allowed_and_no_more(tmp_path: Path) -> None:
    good = [{"prompt_id": str(i), "prompt": f"1+{i}", "answer": i + 1} for i in range(9)]
    source = lines(tmp_path, *good, {"prompt_id": "bad", "prompt": "?"})
    assert len(run(tmp_path, source, max_unusable=0.1)) == 9
    with pytest.raises(InputError, match=r"allows a share of 0\.09"):
        run(tmp_path, source, max_unusable=0.09)


def test_nothing_is_written_when_too_many_rows_are_unusable(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run(tmp_path, lines(tmp_path, {**SUM, "answer": None}))
    assert not list(tmp_path.rglob("*.parquet"))


def test_an_id_that_occurs_twice_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    other = {**SUM, "prompt": "2+1"}
    with pytest.raises(InputError, match=r"row 2, column 'prompt_id': 'a' occurs more than once"):
        run(tmp_path, lines(tmp_path, SUM, other))
    assert not list(tmp_path.rglob("*.parquet"))


# equal texts


def test_prompts_of_equal_text_are_one_prompt_and_counted(tmp_path: Path) -> None:
    frame, _, metrics = whole(tmp_path, VECTORS / "prompts_dup.jsonl")
    assert frame["prompt_id"].to_list() == ["q1", "q4"]  # q2 is q1, q3 differs by a space
    assert metrics == {"rows": 4, "prompts": 2, "duplicates": 2} | dict.fromkeys(
        ("unusable", "other_split", "over_limit"), 0
    )


def test_prompts_of_equal_text_stay_separate_where_dedup_is_off(tmp_path: Path) -> None:
    frame, _, metrics = whole(tmp_path, VECTORS / "prompts_dup.jsonl", dedup=False)
    assert frame["prompt_id"].to_list() == ["q1", "q2", "q3", "q4"]
    assert metrics["duplicates"] == 0
    frame = run(tmp_path, VECTORS / "prompts_dup.jsonl", dedup=False, id_column=None)
    first, second, third, _ = frame["prompt_id"]
    assert (second, third) == (f"{first}-2", f"{first}-3")


def test_what_another_role_says_is_another_prompt(tmp_path: Path) -> None:
    chats = [
        [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}],
        [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}],
        [{"role": "user", "content": "1 2"}],
    ]
    source = lines(tmp_path, *({"prompt": chat, "answer": 3} for chat in chats))
    assert len(run(tmp_path, source)) == 3


def test_every_row_of_a_prompt_with_conflicting_answers_is_unusable(tmp_path: Path) -> None:
    source = lines(
        tmp_path,
        {"prompt_id": "a", "prompt": "1+2", "answer": 3},
        {"prompt_id": "b", "prompt": "1+3", "answer": 4},
        {"prompt_id": "c", "prompt": "1+2 ", "answer": 3},
        {"prompt_id": "d", "prompt": "1+2", "answer": 4},
    )
    with pytest.raises(InputError, match=r"row 1, column 'answer': .* the answers '3' and '4'"):
        run(tmp_path, source)
    for dedup in (True, False):
        frame, unusable, metrics = whole(tmp_path, source, max_unusable=0.75, dedup=dedup)
        assert frame["prompt_id"].to_list() == ["b"]
        assert unusable["prompt_id"].to_list() == ["a", "c", "d"]
        assert (metrics["unusable"], metrics["duplicates"]) == (3, 0)


def test_answers_that_the_checker_takes_for_the_same_do_not_conflict(tmp_path: Path) -> None:
    source = lines(tmp_path, {**SUM, "answer": "1/2"}, {**SUM, "answer": "0.50"})
    assert run(tmp_path, source)["answer"].to_list() == ["1/2"]
    with pytest.raises(InputError, match=r"the answers '1/2' and '0\.50'"):
        run(tmp_path, source, task="exact")


SPACES = st.sampled_from(["", " ", "\n", "\t ", "  "])
QUESTIONS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), SPACES, st.integers(0, 11)),
    min_size=1,
    max_size=40,
)


def written(directory: Path, drawn: Sequence[tuple[int, int, str, int]]) -> Path:
    """Sums, some with white space around; an answer of 0 is now and then missing, 1 is wrong."""
    return lines(
        directory,
        *(
            {
                "prompt": f"{space}{a} +{space} {b}",
                "answer": None if wrong == 0 else a + b + (wrong == 1),
            }
            for a, b, space, wrong in drawn
        ),
        name=f"{len(list(directory.iterdir()))}.jsonl",
    )


@settings(max_examples=40)
@given(QUESTIONS, st.randoms(use_true_random=False))
def test_what_is_kept_does_not_depend_on_order_or_white_space_and_every_row_is_accounted_for(
    drawn: list[tuple[int, int, str, int]], rng: random.Random
) -> None:
    def kept(drawn: Sequence[tuple[int, int, str, int]]) -> set[tuple[str, str]]:
        with tempfile.TemporaryDirectory() as parent:
            directory = Path(parent)
            valid = [*drawn, (50, 50, "", 2)]  # or none might be left
            frame, unusable, metrics = whole(directory, written(directory, valid), max_unusable=1)
        assert metrics["rows"] == len(valid) == sum(metrics.values()) - metrics["rows"]
        assert metrics["unusable"] == len(unusable)
        assert unusable.select("row").to_series().is_sorted()
        return set(zip(frame["prompt_id"], frame["answer"], strict=True))

    shuffled = [(a, b, rng.choice(["", " ", "\n\n"]), wrong) for a, b, _, wrong in drawn]
    rng.shuffle(shuffled)
    assert kept(drawn) == kept(shuffled)


# the split


@settings(max_examples=40)
@given(
    st.sets(st.integers(0, 300), min_size=2),
    st.floats(0.2, 0.8),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_train_and_held_out_share_no_prompt_whatever_the_order_of_the_rows(
    numbers: set[int], fraction: float, seed: int, rng: random.Random
) -> None:
    order = sorted(numbers)
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent)

        def part(split: str, order: Sequence[int], spaces: str) -> set[str]:
            sums = ({"prompt": f"1 +{spaces}{i}", "answer": i + 1} for i in order)
            source = lines(directory, *sums)
            changes = {"split_fraction": fraction, "split_seed": seed, "split": split}
            try:
                return set(run(directory, source, **changes)["prompt_id"])
            except InputError as error:
                assert "no rows to ask" in str(error)
                return set()

        train, heldout = part("train", order, " "), part("heldout", order, " ")
        rng.shuffle(order)
        assert part("train", order, "\n ") == train
        fewer = order[: len(order) // 2]
        assert part("heldout", fewer, " ") <= heldout
    assert not train & heldout
    assert len(train | heldout) == len(numbers)


def test_the_split_is_about_as_large_as_asked_for_and_another_seed_gives_another(
    tmp_path: Path,
) -> None:
    source = lines(tmp_path, *({"prompt": f"1+{i}", "answer": i + 1} for i in range(2000)))
    one, two = (
        whole(tmp_path, source, split="heldout", split_fraction=0.1, split_seed=seed)
        for seed in (0, 1)
    )
    assert 160 < len(one[0]) < 240
    assert one[2]["other_split"] == 2000 - len(one[0])
    assert len(set(one[0]["prompt_id"]) & set(two[0]["prompt_id"])) < 50


def test_without_a_fraction_nothing_is_held_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no rows to ask, of 1 .*needs a split_fraction"):
        run(tmp_path, lines(tmp_path, SUM), split="heldout")


def test_a_limit_takes_the_first_prompts_and_counts_the_others(tmp_path: Path) -> None:
    twice = [{"prompt": f"1+{i // 2}", "answer": 1 + i // 2} for i in range(10)]
    frame, _, metrics = whole(tmp_path, lines(tmp_path, *twice), limit=2)
    assert asked(frame) == ["1+0", "1+1"]
    assert (metrics["over_limit"], metrics["duplicates"]) == (3, 5)


# datasets by name


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The `datasets` library with a cache of its own, and without a network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return


def published(tmp_path: Path, config: str = "default", **splits: list[dict[str, object]]) -> str:
    """A dataset directory as it lies on the hub: Parquet files, named in the card's header."""
    directory = tmp_path / "published"
    (directory / config).mkdir(parents=True)
    files = "".join(f"  - {{split: {s}, path: {config}/{s}.parquet}}\n" for s in splits)
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    (directory / "README.md").write_text(card)
    for split, content in splits.items():
        pl.DataFrame(content).write_parquet(directory / config / f"{split}.parquet")
    return str(directory)


MATH_PROMPT = [{"role": "user", "content": "Solve … Answer: $Answer …\n\nWhat is 1+33?"}]
DAPO = {
    "data_source": "math_dapo",
    "prompt": MATH_PROMPT,
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
GSM8K = {
    "question": "Natalia sold 2,000 clips and then 280. How many?",
    "answer": "She sold 2000+280 = <<2000+280=2280>>2280 clips.\n#### 2,280",
}
MATH = {
    "problem": "What is half of one?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": r"It is $\boxed{\frac{1}{2}}$.",
}


@pytest.mark.parametrize(
    ("name", "published_as", "answer", "meta"),
    [
        ("dapo_math_17k", {"train": [DAPO] * 100}, "34", '{"data_source": "math_dapo"}'),
        ("aime_2024", {"train": [DAPO] * 32}, "34", '{"data_source": "math_dapo"}'),
        (
            "aime_2025",
            {"test": [{"problem": "What is 1+69?", "answer": "070", "id": "0"}]},
            "070",
            '{"id": "0"}',
        ),
        ("gsm8k", {"config": "main", "train": [GSM8K], "test": [GSM8K]}, "2280", None),
        (
            "math",
            {"train": [MATH], "test": [MATH]},
            r"\frac{1}{2}",
            '{"level": "Level 1", "type": "Algebra"}',
        ),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_ready_made_config_reads_its_dataset_to_train_on_or_held_out(
    name: str, published_as: dict[str, object], answer: str, meta: str | None, tmp_path: Path
) -> None:
    dataset = published(tmp_path, **published_as)
    config = load([f"prompts={name}", f"prompts.dataset={dataset}"]).prompts
    assert load([f"prompts@heldout={name}", f"heldout.dataset={dataset}"]).heldout == config
    out = fresh(tmp_path)
    metrics = prompts.run(out=out, config=config, machine=CPU)
    (row,) = tables.read(out, "prompts").to_dicts()
    assert (row["answer"], row["meta"]) == (answer, meta)
    assert "Answer:" in row["prompt"][-1]["content"]  # or no checker would find an answer
    assert metrics["duplicates"] == metrics["rows"] - 1


@pytest.mark.usefixtures("hub")
def test_the_split_of_a_dataset_is_a_setting(tmp_path: Path) -> None:
    test = [{**GSM8K, "question": "How many are left?"}]
    dataset = published(tmp_path, config="main", train=[GSM8K], test=test)
    overrides = [f"prompts.dataset={dataset}", "prompts.dataset_split=test"]
    config = load(["prompts=gsm8k", *overrides, "prompts.template='{prompt}'"]).prompts
    out = fresh(tmp_path)
    prompts.run(out=out, config=config, machine=CPU)
    assert asked(tables.read(out, "prompts")) == ["How many are left?"]


@pytest.mark.usefixtures("hub")
def test_a_dataset_that_cannot_be_had_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"'openai/gsm8k' \(config main, split train.*Check .* network; .*`file`"
    ):
        run(tmp_path, dataset="openai/gsm8k", dataset_config="main")
    dataset = published(tmp_path, train=[GSM8K])
    with pytest.raises(InputError, match=r"split test.*cannot be loaded.*test"):
        run(tmp_path, dataset=dataset, dataset_split="test")
    with pytest.raises(InputError, match=r"config other.*cannot be loaded.*other"):
        run(tmp_path, dataset=dataset, dataset_config="other")


@pytest.mark.usefixtures("hub")
def test_a_column_that_a_dataset_lacks_is_named_with_those_it_has(tmp_path: Path) -> None:
    dataset = published(tmp_path, train=[GSM8K])
    with pytest.raises(InputError, match="no column 'prompt', only question, answer"):
        run(tmp_path, dataset=dataset)


def test_a_file_and_a_dataset_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="two sources"):
        Config(file=tmp_path / "a.csv", dataset="openai/gsm8k")
    with pytest.raises(InputError, match="two sources"):
        run(tmp_path, lines(tmp_path, SUM), dataset="openai/gsm8k")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"task": "chess"}, "expected one of arithmetic, class"),
        ({"template": "Solve this"}, r"expected \{prompt\}"),
        ({"answer_pattern": "#### .+"}, "one group, found 0"),
        ({"answer_pattern": "("}, "not a regular expression"),
        ({"split_fraction": 1.0}, "less than 1"),
        ({"max_unusable": 1.5}, "less than or equal to 1"),
        ({"limit": 0}, "greater than or equal to 1"),
    ],
)
def test_an_impossible_setting_is_refused(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config(**setting)
