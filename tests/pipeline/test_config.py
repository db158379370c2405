"""A run's configuration: typed, typo-proof, and refused before anything starts."""

import os
import threading
from pathlib import Path

import pytest

from pipeline import config
from pipeline.config import CONFIG_DIR, composed, load, parse, understood
from stages.errors import InputError


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


CHOICES = [(group, option) for group in config.GROUPS for option in options(group)]
NEEDS = {
    **{("prompts", name): ["warmstart=sentiment"] for name in ("sentiment", "sentiment_heldout")},
    ("warmstart", "sentiment"): ["prompts=sentiment"],
    **{
        ("prompts", name): ["warmstart=translation"]
        for name in ("translation", "translation_heldout")
    },
    ("warmstart", "translation"): ["prompts=translation"],
    ("prompts", "file"): ["prompts.file=a.parquet"],
    ("select", "weighted"): ["select.weight_by=level"],
    ("select", "curriculum"): ["select.curriculum.start=3", "select.curriculum.end=6"],
}


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_config_file_composes(group: str, option: str) -> None:
    load([f"{group}={option}", *NEEDS.get((group, option), [])])


def test_pruning_follows_the_evaluation_and_is_no_setting_of_a_run() -> None:
    plain, other = load(), load(["evaluate.n=3", "prune.max_loss=0.2"])
    assert (other.prune.n, other.prune.max_loss) == (3, 0.2)
    before, after = plain.stage_settings(), other.stage_settings()
    assert {key for key in after if after[key] != before[key]} == {"evaluate.n"}


def test_the_papers_setting_is_complete() -> None:
    paper = load(["experiment=dapo_math_32b"])
    assert (paper.filter.batch_groups, paper.rollout.n, paper.select.size) == (512, 16, 1536)
    assert (paper.update.eps_low, paper.update.eps_high) == (0.2, 0.28)
    assert (paper.score.l_max, paper.score.l_cache) == (20480, 4096)
    assert (paper.update.lr, paper.update.weight_decay) == (1e-6, 0.1)
    assert (paper.update.max_grad_norm, paper.update.mini_batch) == (1.0, 512)
    assert (paper.rollout.temperature, paper.evaluate.top_p, paper.evaluate.n) == (1.0, 0.7, 32)


@pytest.mark.parametrize("name", ["sentiment", "translation"])
def test_a_demo_of_a_task_asks_holds_out_and_reads_that_task(name: str) -> None:
    demo = load([f"experiment={name}_demo", "seed=3"])
    assert demo.warmstart is not None
    generators = (demo.prompts.generator, demo.heldout.generator, demo.warmstart.generator)
    assert set(generators) == {name}
    assert (demo.prompts.split, demo.heldout.split) == ("train", "heldout")
    assert (demo.prompts.seed, demo.warmstart.seed, demo.heldout.seed) == (3, 3, 0)
    assert demo.evaluate.tasks == demo.score.tasks


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("update.epshigh=1", "unknown key 'update.epshigh', did you mean 'update.eps_high'"),
        ("+update.epshigh=1", "unknown key 'update.epshigh', did you mean 'update.eps_high'"),
        ("experimnt=demo", "unknown key 'experimnt', did you mean 'experiment'"),
        ("experiment=nope", "Available options in 'experiment'"),
        ("update.lr=abc", "update.lr: .*valid number.*got 'abc'"),
        ("rollout.n=1", "rollout.n: .*greater than or equal to 2, got 1"),
        ("filter.batch_groups=0", "filter.batch_groups: .*got 0"),
        ("select.size=-3", "select.size: .*got -3"),
        ("score.l_cache=100", "0 < l_cache <= l_max, got l_cache 100, l_max 80"),
        ("score.l_max=60", "score.l_max=60 but rollout.max_tokens=80"),
        ("rollout.context=80", "rollout.context=80 leaves no prompt room"),
        ("score.task=chess", "'chess' has no checker; known tasks: arithmetic, math"),
        ("score.parts={Form: {task: format}}", "'Form' names a column"),
        ("score.parts={form: {task: chess}}", "'chess' has no checker"),
        ("score.tasks={custom: {function: 'no.such:judge'}}", "cannot import 'no.such:judge'"),
        ("score.tasks={translation: {metrik: bleu}}", "unknown key 'score.tasks.translation.metr"),
        ("rollout.top_p=0.9", "full vocabulary"),
        ("evaluate.k=[16]", "evaluate: sets.heldout: pass@16 needs 16 .* n is 8"),
        ("evaluate.sets=5", "evaluate.sets: .*dictionary"),
        ("evaluate.sets.hard=5", "evaluate.sets.hard: .*Set"),
        ("evaluate.sets.hard={level: [5]}", "unknown key 'evaluate.sets.hard.level'"),
        ("evaluate.sets.hard.n=0", "sets.hard.n: .*greater than or equal to 1"),
        ("evaluate.best.metric=avg", "'heldout' has no 'avg'; it has avg@8"),
        ("~evaluate.sets.heldout", "evaluate.sets: .*at least 1 item"),
        ("run=a/b", "run: .*pattern"),
        ("prompts=sentiment", "would have read nothing of what it is asked"),
        (
            "warmstart=translation",
            "arithmetic but warmstart.generator=translation",
        ),
        ("prompts.generator=poetry", "prompts.generator: .*'sentiment', got 'poetry'"),
        ("prompts=file", "prompts.file is required"),
        ("~warmstart", "from model.path or from warmstart"),
        ("model.path=m", "from model.path or from warmstart"),
        ("update", "quote a value"),
    ],
)
def test_a_bad_setting_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load([override])


@pytest.mark.parametrize("name", ["695e0514", "010", "no", "1e3", "1_000", "null1"])
def test_identifiers_stay_the_text_that_was_typed(name: str) -> None:
    text = composed([f"run={name}"])
    assert parse(text).run == name
    assert load([f"run={name}"]).directory.name == name


@pytest.mark.parametrize("value", ["ckpt/epoch=999-step=8.ckpt", "a#b", "a</s>", "a,b", "50%"])
def test_paths_with_hydras_special_characters_arrive_unchanged(value: str) -> None:
    assert load(["~warmstart", f"model.path={value}"]).model.path == Path.cwd() / value


def test_quotes_that_a_user_already_set_are_left_alone() -> None:
    assert understood('run="1e3"') == '++run="1e3"'
    assert load(['run="1e3"']).run == "1e3"


def test_a_key_that_no_yaml_file_names_can_be_set() -> None:
    assert load(["update.betas=[0.9,0.95]"]).update.betas == (0.9, 0.95)


def test_numbers_that_yaml_reads_from_an_unquoted_name_are_refused_not_guessed() -> None:
    traps = (Path(__file__).parents[1] / "vectors" / "config_traps.yaml").read_text()
    name = next(line for line in traps.splitlines() if line.startswith("run_name"))
    with pytest.raises(InputError, match=r"run: .*quote it"):
        parse(composed().replace("run: default", name.replace("run_name", "run")))
    assert parse(composed(["update.lr=1e-6"])).update.lr == 1e-6


def test_a_saved_text_keeps_its_interpolations() -> None:
    saved = composed(["experiment=demo"])
    assert parse(saved, ["rollout.max_tokens=50"]).score.l_max == 50


def test_relative_paths_mean_the_directory_in_which_they_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = composed(["prompts=file", "prompts.file=a.parquet"])
    monkeypatch.chdir("/")
    assert parse(text).prompts.file == tmp_path / "a.parquet"


def test_a_set_is_added_beside_the_others_and_its_file_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = composed(["evaluate.sets.aime={file: aime.parquet}", "evaluate.sets.aime.n=32"])
    monkeypatch.chdir("/")
    sets = parse(text).evaluate.sets
    assert list(sets) == ["heldout", "aime"]
    assert (sets["aime"].file, sets["aime"].n) == (tmp_path / "aime.parquet", 32)


def test_composing_in_threads_and_from_any_directory_gives_one_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = composed(["experiment=demo"])
    monkeypatch.chdir("/")
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(composed(["experiment=demo"])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [here] * 4
    assert os.getcwd() == "/"
