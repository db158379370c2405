"""A round's responses on disk: n rows for every usable prompt, joined by id."""

from pathlib import Path

import polars as pl
import pytest
from conftest import CPU, fresh, rows, save
from pydantic import ValidationError

from stages import rollout, tables
from stages.errors import InputError
from stages.rollout import Config

CONFIG = Config(engine="hf", n=2, max_tokens=16, context=64)
CONTENTS = {"fits": "1" * 8, "full": "1" * 62, "over": "1" * 63, "empty": ""}


def run(
    tmp_path: Path, policy: Path, *selected: str, config: Config = CONFIG
) -> tuple[Path, dict[str, float]]:
    chosen = [{"group_id": f"s1r0g{i}", "prompt_id": p} for i, p in enumerate(selected)]
    asked = [{"prompt_id": name, "prompt": text} for name, text in CONTENTS.items()]
    out = fresh(tmp_path)
    metrics = rollout.run(
        selection=save(fresh(tmp_path), "selection", rows("selection", *chosen)),
        prompts=save(fresh(tmp_path), "prompts", rows("prompts", *asked)),
        policy=policy,
        out=out,
        config=config,
        machine=CPU,
    )
    return out, metrics


def test_bad_prompts_are_skipped_and_cost_the_others_nothing(policy: Path, tmp_path: Path) -> None:
    out, metrics = run(tmp_path, policy, "empty", "over", "fits", "full")
    rollouts = tables.read(out, "rollouts")
    assert rollouts["prompt_id"].to_list() == ["fits", "fits"]
    assert rollouts["group_id"].to_list() == ["s1r0g2", "s1r0g2"]  # joined by id, not position
    assert tables.read(out, "skipped").rows() == [
        ("s1r0g0", "empty", "empty"),
        ("s1r0g1", "over", "too_long"),
        ("s1r0g3", "full", "too_long"),
    ]
    assert (metrics["responses"], metrics["skipped"]) == (2, 3)


def test_a_prompt_chosen_twice_is_sampled_twice(policy: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"n": 4})
    rollouts = tables.read(run(tmp_path, policy, "fits", "fits", config=config)[0], "rollouts")
    assert rollouts["response_id"].n_unique() == len(rollouts) == 8
    first, second = (rollouts["text"].to_list()[i : i + 4] for i in (0, 4))
    assert first != second


def test_one_seed_gives_the_same_bytes(policy: Path, tmp_path: Path) -> None:
    files = [run(tmp_path, policy, "fits")[0] / "rollouts" / "part-00000.parquet" for _ in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_metrics_are_those_of_the_rows(policy: Path, tmp_path: Path) -> None:
    out, metrics = run(tmp_path, policy, "fits", config=CONFIG.model_copy(update={"n": 32}))
    rollouts = tables.read(out, "rollouts")
    assert metrics["tokens"] == rollouts["length"].sum()
    assert metrics["length_mean"] == pytest.approx(rollouts["length"].mean())
    assert metrics["truncated"] == rollouts.filter(pl.col("finish_reason") == "length").height / 32


def test_a_selected_prompt_that_is_unknown_is_named_and_nothing_is_written(
    policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="prompt_id 'lost' is not in"):
        run(tmp_path, policy, "fits", "lost")
    assert not list(tmp_path.rglob("rollouts"))


def test_a_prompt_id_that_occurs_twice_is_refused(policy: Path, tmp_path: Path) -> None:
    twice = [{"prompt_id": "fits", "prompt": text} for text in ("1+2", "1+3")]
    chosen = rows("selection", {"group_id": "g", "prompt_id": "fits"})
    with pytest.raises(InputError, match="'fits' occurs more than once"):
        rollout.run(
            selection=save(fresh(tmp_path), "selection", chosen),
            prompts=save(fresh(tmp_path), "prompts", rows("prompts", *twice)),
            policy=policy,
            out=fresh(tmp_path),
            config=CONFIG,
            machine=CPU,
        )


@pytest.mark.parametrize(("name", "value", "full"), [("top_p", 0.9, 1), ("top_k", 5, 0)])
def test_a_truncated_vocabulary_is_refused_for_training(
    name: str, value: float, full: float
) -> None:
    with pytest.raises(ValidationError, match=f"{name}={value}.*full vocabulary.*{name}={full}"):
        Config(**{name: value})


def test_a_least_probability_is_refused_for_training() -> None:
    with pytest.raises(ValidationError, match=r"min_p=0\.1: .*full vocabulary.*leave min_p=0"):
        Config(min_p=0.1)


def test_what_is_skipped_for_want_of_time_is_counted(policy: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"time_limit_s": 60.0})
    _, metrics = run(tmp_path, policy, "fits", "empty", config=config)
    assert (metrics["time_limited"], metrics["skipped"]) == (0, 1)


def test_a_full_disk_at_the_end_keeps_the_groups(policy: Path, tmp_path: Path) -> None:
    partial, out = tmp_path / "partial", fresh(tmp_path)
    (out / "rollouts").mkdir()
    (out / "rollouts" / "part-00000.parquet").symlink_to("/dev/full")
    inputs = {
        "selection": rows("selection", {"group_id": "g", "prompt_id": "p"}),
        "prompts": rows("prompts", {"prompt_id": "p", "prompt": "1+2"}),
    }
    arguments = {
        **{name: save(fresh(tmp_path), name, frame) for name, frame in inputs.items()},
        **{"policy": policy, "config": CONFIG, "machine": CPU, "partial": partial},
    }
    with pytest.raises(InputError, match=r"No space left.*Nothing was published"):
        rollout.run(**arguments, out=out)
    assert rollout.run(**arguments, out=fresh(tmp_path))["recovered"] == 2


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValidationError, match="n\n"):
        Config(n=1)
