"""avg@k on held-out prompts, with every sample kept and the same random numbers each time."""

from collections.abc import Generator
from pathlib import Path

import polars as pl
import pytest
from conftest import CPU, fresh, rows, save

from stages import engines, evaluate, tables
from stages import policy as policies
from stages.engines import Decoding, Loaded, Request, Response
from stages.errors import InputError
from stages.evaluate import Best, Config, Set
from stages.sampling import Part

CONFIG = Config(engine="hf", n=4, max_tokens=16, context=64)
ASKED = (
    {"prompt_id": "b", "prompt": "3+5-2", "answer": "6", "meta": '{"level": 3}'},
    {"prompt_id": "a", "prompt": "1+2+3", "answer": "6"},
    {"prompt_id": "empty", "prompt": ""},
)


class Scripted:
    """An engine that answers 6, 7 or nothing, in a fixed turn, and finishes the last one first."""

    def load(self, path: Path) -> Loaded:
        self.tokenizer = policies.tokenizer(path)
        return Loaded("scripted")

    def generate(
        self, requests: list[Request], decoding: Decoding, *, until: float
    ) -> Generator[tuple[int, Response], None, None]:
        turn = ("Answer: 6", "Answer: 7", "Answer: 6", "hm", "Answer: 6", "hm", "hm")
        ids = [self.tokenizer.encode(turn[i % len(turn)]) for i in range(len(requests))]
        # the fifth has the right number, but was cut off
        reasons = ["length" if i == 4 else "stop" for i in range(len(requests))]
        for i in reversed(range(len(requests))):
            yield i, Response(ids[i], [-0.5] * len(ids[i]), reasons[i])


def run(
    tmp_path: Path, policy: Path, *asked: dict[str, object], config: Config = CONFIG
) -> tuple[Path, dict[str, float]]:
    out = fresh(tmp_path)
    prompts = save(fresh(tmp_path), "prompts", rows("prompts", *asked or ASKED))
    return out, evaluate.run(prompts=prompts, policy=policy, out=out, config=config, machine=CPU)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "resident", lambda *_, **__: Scripted())


def test_avg_at_k_is_the_mean_of_the_samples(scripted: None, policy: Path, tmp_path: Path) -> None:
    out, metrics = run(tmp_path, policy)
    acc = tables.read(out, "samples").select("prompt_id", "acc").rows()
    assert acc[:4] == [("a", 1), ("a", 0), ("a", 1), ("a", 0)]
    assert acc[4:] == [("b", 0), ("b", 0), ("b", 0), ("b", 1)]
    assert metrics["avg@4"] == 3 / 8
    assert metrics["truncated"] == 1 / 8
    assert metrics["prompts"] == 2


def test_every_prompt_has_its_row_of_numbers(scripted: None, policy: Path, tmp_path: Path) -> None:
    out, _ = run(tmp_path, policy)
    assert tables.read(out, "evaluations").rows(named=True) == [
        {"set": "heldout", "prompt_id": "a", "task": "arithmetic", "difficulty": None}
        | {"answer": "6", "meta": None, "n": 4, "n_scored": 4, "n_right": 2}
        | {"acc_mean": 0.5, "length_mean": 7.25, "truncated_mean": 0.0},
        {"set": "heldout", "prompt_id": "b", "task": "arithmetic", "difficulty": "3"}
        | {"answer": "6", "meta": '{"level": 3}', "n": 4, "n_scored": 4, "n_right": 1}
        | {"acc_mean": 0.25, "length_mean": 5.5, "truncated_mean": 0.25},
    ]


def test_an_unscorable_answer_is_not_counted_as_wrong(
    scripted: None, policy: Path, tmp_path: Path
) -> None:
    out, metrics = run(tmp_path, policy, ASKED[1], {"prompt_id": "c", "answer": "many"})
    means = tables.read(out, "evaluations").select("prompt_id", "acc_mean").rows()
    # the sample that was cut off is wrong whatever the answer is
    assert means == [("a", 0.5), ("c", 0.0)]
    verdicts = tables.read(out, "samples")["verdict"].to_list()[4:]
    assert verdicts == ["truncated", *["unscorable"] * 3]
    assert metrics["avg@4"] == 0.25


def test_skipped_prompts_are_recorded_by_name(policy: Path, tmp_path: Path) -> None:
    out, metrics = run(tmp_path, policy)
    assert tables.read(out, "skipped").select("prompt_id", "reason").rows() == [("empty", "empty")]
    assert metrics["skipped"] == 1
    assert tables.read(out, "evaluations")["prompt_id"].to_list() == ["a", "b"]


def test_the_same_policy_twice_gives_the_same_bytes_whatever_the_order_of_the_prompts(
    policy: Path, tmp_path: Path
) -> None:
    once, first = run(tmp_path, policy)
    again, second = run(tmp_path, policy, *ASKED[::-1])
    assert timeless(first) == timeless(second)
    for table in ("samples", "skipped", "evaluations"):
        left, right = (out / table / "part-00000.parquet" for out in (once, again))
        assert left.read_bytes() == right.read_bytes()


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    """But for what the clock says, and whether the engine was started or kept."""
    return {n: v for n, v in metrics.items() if not n.endswith(("_s", "_per_second"))}


def test_all_samples_are_kept_with_their_tokens(policy: Path, tmp_path: Path) -> None:
    samples = tables.read(run(tmp_path, policy)[0], "samples")
    assert len(samples) == 8
    assert samples["response_ids"].list.len().to_list() == samples["length"].to_list()
    assert samples.filter(pl.col("verdict").is_null()).is_empty()


@pytest.mark.parametrize("narrow", [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_narrower_vocabulary_is_allowed_here(
    narrow: dict[str, float], policy: Path, tmp_path: Path
) -> None:
    _, metrics = run(tmp_path, policy, config=Config(**{**CONFIG.model_dump(), **narrow}))
    assert metrics["prompts"] == 2


def test_prompts_that_were_finished_before_a_crash_are_not_asked_again(
    policy: Path, tmp_path: Path
) -> None:
    arguments = {"policy": policy, "config": CONFIG, "machine": CPU, "partial": tmp_path / "kept"}
    arguments["prompts"] = save(fresh(tmp_path), "prompts", rows("prompts", *ASKED))
    outs = [fresh(tmp_path) for _ in range(2)]
    metrics = [evaluate.run(out=out, **arguments) for out in outs]
    assert [each["recovered"] for each in metrics] == [0, 8]
    first, second = (tables.read(out, "samples") for out in outs)
    assert first.equals(second)


def test_no_usable_prompt_ends_the_stage(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none of the 1 prompts"):
        run(tmp_path, policy, ASKED[2])


def test_a_prompt_id_that_occurs_twice_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'b' occurs more than once"):
        run(tmp_path, policy, ASKED[0], ASKED[0])


# --- sets ----------------------------------------------------------------------------------------


def with_sets(best: Best | None = None, **sets: Set) -> Config:
    return Config(**{**CONFIG.model_dump(), "sets": sets, "best": best})


def test_each_set_is_sampled_and_measured_on_its_own(policy: Path, tmp_path: Path) -> None:
    hard = Set(levels=(3,), n=2, temperature=0.5)
    out, metrics = run(tmp_path, policy, config=with_sets(heldout=Set(), hard=hard))
    samples = tables.read(out, "samples")
    assert samples.group_by("set", "prompt_id", "temperature").len().sort(
        "set", "prompt_id"
    ).rows() == [
        ("hard", "b", 0.5, 2),
        ("heldout", "a", 1.0, 4),
        ("heldout", "b", 1.0, 4),
    ]
    assert samples["response_id"].is_unique().all()
    assert tables.read(out, "evaluations").select("set", "prompt_id").rows() == [
        ("heldout", "a"),
        ("heldout", "b"),
        ("hard", "b"),
    ]
    every = tables.read(out, "results").filter(
        pl.col("task").is_null(), pl.col("difficulty").is_null()
    )
    values = {(row["set"], row["metric"]): row["value"] for row in every.to_dicts()}
    assert {"avg@4", "hard/avg@2", "pass@1", "pass@4", "hard/maj@2"} < metrics.keys()
    assert metrics["avg@4"] == values["heldout", "avg@4"]
    assert metrics["hard/avg@2"] == values["hard", "avg@2"]


def test_another_set_changes_no_sample_of_the_held_out_one(policy: Path, tmp_path: Path) -> None:
    alone, both = (
        tables.read(run(tmp_path, policy, config=config)[0], "samples")
        for config in (CONFIG, with_sets(heldout=Set(), warm=Set(temperature=0.5)))
    )
    assert both.filter(set="heldout").equals(alone)


def test_a_set_may_have_prompts_of_its_own(policy: Path, tmp_path: Path) -> None:
    other = save(
        fresh(tmp_path), "prompts", rows("prompts", {"prompt_id": "x"}, {"prompt_id": "y"})
    )
    config = with_sets(heldout=Set(), other=Set(file=other, limit=1))
    assert config.model_dump(mode="json")["sets"]["other"]["file"] == other.name  # not its place
    prompts = save(fresh(tmp_path), "prompts", rows("prompts", *ASKED))
    out = fresh(tmp_path)
    given = {"prompts": prompts, "policy": policy, "config": config, "machine": CPU}
    evaluate.run(out=out, more=[other], **given)
    evaluated = tables.read(out, "evaluations").select("set", "prompt_id").rows()
    assert evaluated == [("heldout", "a"), ("heldout", "b"), ("other", "x")]
    with pytest.raises(InputError, match="1 of the sets name a file, and 0 prompts tables"):
        evaluate.run(out=fresh(tmp_path), **given)


def test_parts_of_all_sets_are_gathered_to_the_same_rows(policy: Path, tmp_path: Path) -> None:
    config = with_sets(heldout=Set(), hard=Set(levels=("3",), n=2))
    given = {"policy": policy, "config": config, "machine": CPU}
    given["prompts"] = save(fresh(tmp_path), "prompts", rows("prompts", *ASKED[:2]))
    whole, gathered, partial = fresh(tmp_path), fresh(tmp_path), tmp_path / "parts"
    evaluate.run(out=whole, **given)
    for start in range(2):
        evaluate.run_part(partial=partial, part=Part(start, 2), **given)
    metrics = evaluate.run(out=gathered, partial=partial, gathered=True, **given)
    assert metrics["recovered"] == 10 and metrics["generated"] == 0
    for table in ("samples", "evaluations", "results"):
        assert tables.read(whole, table).equals(tables.read(gathered, table))


# --- settings that cannot work -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": (8,)}, r"sets.heldout: pass@8 needs 8 responses to each prompt, and n is 4"),
        ({"sets": {"hard": {"n": 2, "k": [4]}}}, "sets.hard: pass@4 needs 4"),
        ({"sets": {"hard": {"temperature": 0}}}, r"sets.hard.temperature: Input should be greater"),
        ({"sets": {"hard": {"tasks": ["poetry"]}}}, "'poetry' is no task"),
        ({"sets": {"Hard set": {}}}, "should match pattern"),
        ({"sets": {}}, "at least 1 item"),
        ({"best": {"metric": "avg@8"}}, "'heldout' has no 'avg@8'; it has avg@4, pass@1"),
        ({"best": {"metric": "avg@4", "set": "hard"}}, "there is no set 'hard' in heldout"),
        ({"level": 1.0}, "less than 1"),
        ({"resamples": 1}, "greater than or equal to 100"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**{**CONFIG.model_dump(), **given})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_sets(hard=Set(levels=(9,))), r"sets.hard: none of the 3 prompts .* meta.level is 3"),
        (
            with_sets(heldout=Set(), best=Best(metric="bleu")),
            "measure of task translation, and no prompt of the set 'heldout' has it",
        ),
    ],
)
def test_what_the_prompts_cannot_give_is_refused_before_anything_is_sampled(
    config: Config, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "resident", None)  # nobody may call it
    with pytest.raises(InputError, match=message):
        run(tmp_path, Path("no policy"), config=config)


def test_two_sets_that_would_give_one_id_to_two_samples_are_refused(tmp_path: Path) -> None:
    asked = ({"prompt_id": "hard/a"}, {"prompt_id": "a"})
    with pytest.raises(InputError, match="'hard/a' is a prompt of the set heldout"):
        run(tmp_path, Path("no policy"), *asked, config=with_sets(heldout=Set(), hard=Set()))
