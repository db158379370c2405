"""Right or wrong first, the overlong punishment beside it, and the reward as their sum."""

import json
from pathlib import Path

import polars as pl
import pytest
from conftest import CPU, VECTORS, fresh, rows, save
from pydantic import ValidationError

from stages import score, tables
from stages.errors import InputError
from stages.score import Config

OVERLONG = json.loads((VECTORS / "overlong.json").read_text())
PLAIN = Config(overlong=False)


def run(
    tmp_path: Path, *responses: dict[str, object], answer: str = "6", config: Config = PLAIN
) -> pl.DataFrame:
    given = [{"response_id": f"r{i}"} | row for i, row in enumerate(responses)]
    out = fresh(tmp_path)
    score.run(
        rollouts=save(fresh(tmp_path), "rollouts", rows("rollouts", *given)),
        prompts=save(
            fresh(tmp_path), "prompts", rows("prompts", {"prompt_id": "p", "answer": answer})
        ),
        out=out,
        config=config,
        machine=CPU,
    )
    return tables.read(out, "scores")


def settings(case: dict[str, object]) -> dict[str, object]:
    names = {"enable": "overlong", "buffer": "l_cache", "max_resp_len": "l_max"}
    return {names[name]: value for name, value in case.items()}


@pytest.mark.parametrize("case", OVERLONG["cases"], ids=str)
def test_the_penalty_at_the_edges(case: dict[str, float], tmp_path: Path) -> None:
    config = Config(
        l_max=case["max_resp_len"], l_cache=case["buffer"], overlong_factor=case["factor"]
    )
    scores = run(tmp_path, {"length": case["length"]}, config=config)
    assert scores["penalty"].to_list() == [case["penalty"]]
    assert scores["reward"].to_list() == [1 + case["penalty"]]


@pytest.mark.parametrize("case", OVERLONG["must_reject"], ids=str)
def test_a_buffer_that_does_not_fit_is_refused(case: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"0 < l_cache <= l_max.*overlong=false"):
        Config(**settings(case))


@pytest.mark.parametrize("case", OVERLONG["must_accept"], ids=str)
def test_a_buffer_that_fits_or_does_not_matter_is_accepted(case: dict[str, object]) -> None:
    assert Config(**settings(case)).overlong == case["enable"]


def test_acc_penalty_and_reward_are_columns_of_their_own(tmp_path: Path) -> None:
    config = Config(right=2, wrong=-1, l_max=10, l_cache=4)
    scores = run(
        tmp_path,
        {"length": 8, "text": "Answer: 6"},
        {"length": 8, "text": "Answer: 7"},
        {"length": 6, "text": "Answer: 6"},
        config=config,
    )
    assert scores["acc"].to_list() == [1, 0, 1]
    assert scores["penalty"].to_list() == [-0.5, -0.5, 0]
    assert scores["reward"].to_list() == [1.5, -1.5, 2]


def test_the_penalty_is_zero_when_switched_off(tmp_path: Path) -> None:
    scores = run(tmp_path, {"length": 10**6}, config=Config(overlong=False, l_max=10, l_cache=4))
    assert scores["penalty"].to_list() == [0]


def test_the_length_is_counted_in_tokens_not_in_characters(tmp_path: Path) -> None:
    config = Config(l_max=10, l_cache=4)
    scores = run(tmp_path, {"length": 6, "text": "x" * 500 + "\nAnswer: 6"}, config=config)
    assert scores["penalty"].to_list() == [0]


def test_an_unscorable_response_has_no_reward_but_keeps_its_penalty(tmp_path: Path) -> None:
    config = Config(l_max=10, l_cache=4)
    scores = run(tmp_path, {"length": 10}, answer="many", config=config)
    row = scores.row(0, named=True)
    assert (row["acc"], row["reward"], row["verdict"]) == (None, None, "unscorable")
    assert row["penalty"] == -1


def test_further_parts_are_columns_with_weights_in_the_reward(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "overlong": False,
            "parts": {
                "form": {"task": "format", "weight": 0.5},
                "letters": {"task": "exact", "weight": -1.0},
            },
            "tasks": {"format": {"tags": ["think"]}},
        }
    )
    given = [{"text": "<think>3+3</think>\nAnswer: 6"}, {"text": "Answer: 6.0"}]
    scores = run(tmp_path, *given, config=config)
    assert scores["acc"].to_list() == [1, 1]
    assert scores["reward"].to_list() == [1 + 0.5 - 1, 1]
    [file] = tmp_path.rglob("scores/part-*.parquet")
    written = pl.read_parquet(file)
    assert written.select("part_form", "part_letters").rows() == [(1, 1), (0, 0)]


def test_one_task_can_be_set_for_every_prompt(tmp_path: Path) -> None:
    scores = run(
        tmp_path, {"text": "so \\boxed{\\frac{12}{2}}"}, config=Config(task="math", overlong=False)
    )
    assert scores["verdict"].to_list() == ["right"]


def test_a_checker_that_fails_makes_no_reward(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"overlong": False, "task": "custom", "tasks": {"custom": {"function": f"{__name__}:fail"}}}
    )
    scores = run(tmp_path, {}, config=config)
    assert scores.select("acc", "reward", "verdict").row(0) == (None, None, "unscorable")
    assert "ZeroDivisionError" in scores["extracted"][0]


def fail(text: str, gold: str) -> float:
    return 1 / 0


def test_a_truncated_response_is_wrong_by_the_engines_word_only(tmp_path: Path) -> None:
    scores = run(tmp_path, {"finish_reason": "length"}, {"finish_reason": "stop"})
    assert scores["verdict"].to_list() == ["truncated", "right"]
    assert scores["reward"].to_list() == [-1, 1]


def test_a_response_to_an_unknown_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'lost' of the rollouts is not in the prompts"):
        run(tmp_path, {}, {"prompt_id": "lost"})


def test_a_prompt_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    twice = rows("prompts", {"prompt_id": "p"}, {"prompt_id": "p", "answer": "7"})
    with pytest.raises(InputError, match="'p' occurs more than once"):
        score.run(
            rollouts=save(fresh(tmp_path), "rollouts", rows("rollouts", {"response_id": "r"})),
            prompts=save(fresh(tmp_path), "prompts", twice),
            out=fresh(tmp_path),
            config=PLAIN,
            machine=CPU,
        )


def test_no_responses_give_an_empty_table_of_the_same_schema(tmp_path: Path) -> None:
    assert run(tmp_path).schema == tables.polars_schema("scores")


def test_the_metrics_count_what_was_judged(tmp_path: Path) -> None:
    rollouts = rows(
        "rollouts",
        {"response_id": "a", "length": 8},
        {"response_id": "b", "prompt_id": "q"},
        {"response_id": "c", "text": "no"},
    )
    prompts = rows("prompts", {"prompt_id": "p"}, {"prompt_id": "q", "answer": "many"})
    metrics = score.run(
        rollouts=save(fresh(tmp_path), "rollouts", rollouts),
        prompts=save(fresh(tmp_path), "prompts", prompts),
        out=fresh(tmp_path),
        config=Config(l_max=10, l_cache=4),
        machine=CPU,
    )
    counts = {"penalised": 1, "unscorable": 1, "failed_checks": 0}
    assert metrics == {"acc": 0.5, "reward": -0.25} | counts
