"""A policy handed to others: it loads, it computes the same, and its card says what is known."""

import json
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import artifacts, card, export
from pipeline.card import Made
from pipeline.config import load, parse
from stages import policy as policies
from stages.errors import InputError


@pytest.fixture
def small(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a finished run, found by its name."""
    monkeypatch.setenv("DAPO_DATA", str(finished))
    return finished / "runs/small"


def exported(small: Path, out: Path, step: int = 2) -> Path:
    export.export(small / f"step_{step:04d}/update", out)
    return out


def test_what_is_exported_loads_computes_the_same_and_generates(
    small: Path, tmp_path: Path
) -> None:
    out = exported(small, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(out)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path) for path in (out, small / "step_0002/update")
    )
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+5-2"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        assert torch.equal(ours(**inputs).logits, theirs(**inputs).logits)
    config = ours.generation_config
    assert (config.do_sample, config.temperature, config.max_new_tokens) == (True, 1.0, 24)
    assert config.eos_token_id == policies.eos_ids(small / "step_0002/update")
    assert ours.generate(**inputs).shape[1] <= inputs["input_ids"].shape[1] + 24


def test_it_is_a_policy_without_what_only_training_reads(small: Path, tmp_path: Path) -> None:
    out = exported(small, tmp_path / "out")
    policies.check(out)
    assert policies.digest(out) == policies.digest(small / "step_0002/update")
    assert not [path for path in out.iterdir() if path.is_dir()]
    assert not (out / artifacts.RECORD).exists()


def test_the_card_says_what_the_records_say(small: Path, tmp_path: Path) -> None:
    text = (exported(small, tmp_path / "out") / "README.md").read_text()
    policy, evaluation = (artifacts.load(small / "step_0002" / n) for n in ("update", "evaluate"))
    found = ModelCard(text)
    assert found.data.pipeline_tag == "text-generation"
    assert found.data.eval_results[0].metric_value == evaluation.metrics["avg@2"]
    assert found.data.tags == ["dapo", "reinforcement-learning"]
    assert policy.digest in text and evaluation.digest in text
    assert f"{policy.metrics['total_optimizer_steps']:.0f} optimizer steps" in text
    assert "trained on: 40 prompts of arithmetic" in text
    assert "| heldout | avg@2 | 0 | 0 – 0 |" in text
    assert "| rollout.n | `4` |" in text


def test_the_command_on_the_card_has_the_very_settings_of_the_run(
    small: Path, tmp_path: Path
) -> None:
    config = parse((small / "config.yaml").read_text())
    command = card.command(Made(small / "step_0002/update"), config)
    dapo, train, *overrides = shlex.split(command.replace("\\\n", " "))
    again = load(overrides)
    assert (dapo, train) == ("dapo", "train")
    assert again.stage_settings() == config.stage_settings()
    assert (again.run, again.seed, again.schedule.steps) == ("small", 0, 2)


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=translation_demo"],
        ["~warmstart", "model.path=/models/a=b"],
        ["score.parts={form: {task: format, weight: 0.2}}", "score.tasks.format={tags: [a]}"],
        ["evaluate.sets.hard={levels: [5, 6], n: 16}", r'rollout.stop=["\\", "a\"b", "it\'s"]'],
        ["experiment=dapo_math_32b"],
    ],
)
def test_any_settings_come_back_from_such_a_command(overrides: list[str], tmp_path: Path) -> None:
    config = load(overrides)
    command = card.command(Made(tmp_path), config)
    again = load(shlex.split(command.replace("\\\n", " "))[2:])
    assert again.stage_settings() == config.stage_settings()


def test_a_policy_that_nobody_recorded_has_a_card_of_what_is_known(
    policy: Path, tmp_path: Path
) -> None:
    export.export(policy, tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    assert "of which no training is on record" in text
    assert "## Evaluation" not in text and "## Lineage" not in text
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "transformers"
    before, after = (
        json.loads((path / "generation_config.json").read_text())
        for path in (policy, tmp_path / "out")
    )
    assert (after["top_k"], after["temperature"]) == (before["top_k"], before["temperature"])


def test_nothing_is_overwritten_and_nothing_half_written_is_left(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="taken exists already"):
        exported(small, tmp_path / "taken")

    def failing(*_: object, **__: object) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(card, "text", failing)
    with pytest.raises(OSError, match="no space"):
        exported(small, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_of_a_run_the_best_the_newest_or_any_step_is_taken(small: Path) -> None:
    best = (small / "best").read_text()
    assert export.policy_of("small") == export.policy_of("small", which="best") == small / best
    assert export.policy_of("small", which="newest") == small / "step_0002/update"
    assert export.policy_of("small", which="1") == small / "step_0001/update"
    assert export.policy_of("small", which="0") == small / "step_0000/warmstart"
    assert export.policy_of(str(small / "step_0001/update")) == small / "step_0001/update"


@pytest.mark.parametrize(
    ("given", "which", "message"),
    [
        ("small", "7", "no policy of step 7"),
        ("small", "last", "expected best, newest or the number of a step"),
        ("absent", None, "there is no run 'absent'"),
    ],
)
def test_what_is_not_there_is_named(
    given: str, which: str | None, message: str, small: Path
) -> None:
    with pytest.raises(InputError, match=message):
        export.policy_of(given, which=which)


def test_weights_that_were_retired_cannot_be_exported(small: Path, data: Path) -> None:
    step = data / "runs/small/step_0001/update"
    artifacts.retire(artifacts.load(step))
    with pytest.raises(InputError, match="weights were retired"):
        export.policy_of(str(data / "runs/small"), which="1")
