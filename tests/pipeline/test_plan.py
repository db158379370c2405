"""Whether a run fits its GPUs, and the recipes that do."""

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from pipeline import rehearse
from pipeline.config import CONFIG_DIR, load, parse
from pipeline.plan import Plan
from stages import scaled
from stages.errors import InputError
from stages.published import CONFIGS

RECIPES = ("dapo_math_32b", "dapo_math_7b", "dapo_math_7b_lora", "gsm8k_1_5b")


def plan(*overrides: str, gpu_gib: float = 80, gpus: int | None = None) -> Plan:
    return Plan.of(load(overrides), gpu_gib=gpu_gib, gpus=gpus)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_and_its_comment_says_what_the_plan_says(recipe: str) -> None:
    made = plan(f"experiment={recipe}")
    made.check()
    text = (CONFIG_DIR / "experiment" / f"{recipe}.yaml").read_text()
    comment = " ".join(" ".join(line.lstrip("#") for line in text.splitlines()[1:]).split())
    for line in made.summary():
        assert " ".join(line.split()) in comment


def test_what_does_not_fit_is_refused_with_its_largest_part_and_what_would_fit() -> None:
    tight = plan("experiment=gsm8k_1_5b", gpu_gib=24)
    with pytest.raises(InputError, match=r"most of it optimizer, 11\.5") as refused:
        tight.check()
    remedies = tight.remedies()
    assert "update.lora_rank=16" in remedies and remedies[0] in str(refused.value)
    for remedy in remedies:
        plan("experiment=gsm8k_1_5b", *remedy.split(), gpu_gib=24).check()


def test_settings_that_fit_only_together_are_found() -> None:
    poor = (
        "experiment=dapo_math_7b_lora",
        "update.lora_rank=null",
        "machine.gradient_checkpointing=false",
        "machine.micro_batch_tokens=81920",
    )
    tight = plan(*poor, gpu_gib=40, gpus=8)
    (remedy,) = tight.remedies()
    assert len(remedy.split()) > 1
    plan(*poor, *remedy.split(), gpu_gib=40, gpus=8).check()


def test_where_nothing_helps_it_says_so() -> None:
    with pytest.raises(InputError, match="use more or larger GPUs"):
        plan("experiment=dapo_math_32b", gpu_gib=8).check()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.max_tokens=131072", "rollout.context=null"], "leaves no prompt room in the con"),
        (["evaluate.context=200000"], r"evaluate.context=200000, .* is 131072"),
        (["machine.gpu_memory_utilization=0.25"], "cannot hold one sequence of 10240 tokens"),
        (["machine.tensor_parallel_size=3"], "does not divide 28 heads"),
        (["machine.nproc=16"], "16 ranks need more than 8 GPUs"),
        (["machine.engines=16"], "16 GPUs and there are 8"),
        (["machine.attention=eager"], "attention=eager keeps scores"),
        (["model.path=Mixtral-8x7B"], "these are known by name: Qwen2.5-0.5B"),
        (["machine.device=cpu", "machine.engine_between=stay"], "add machine=gpu"),
        (["rollout=hf"], "choose rollout=vllm"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan("experiment=dapo_math_7b", *overrides, gpus=8).check()


def test_an_engine_that_stays_takes_its_share_from_the_trainer() -> None:
    asleep, beside = (
        plan("experiment=gsm8k_1_5b", f"machine.engine_between={how}") for how in ("sleep", "stay")
    )
    assert not asleep.problems()
    assert beside.free("trainer") == beside.gpu_bytes - beside.trainer_alone - beside.engine_bytes
    with pytest.raises(InputError, match=r"machine\.engine_between=sleep"):
        beside.check()


def test_a_server_elsewhere_takes_nothing_here() -> None:
    served = plan("experiment=gsm8k_1_5b", "rollout=endpoint", "evaluate=endpoint")
    assert served.engine is None and "engine asleep" not in served.trainer
    assert served.work()["full sequences in flight"] == 0


def test_a_directory_is_read_rather_than_its_name(tmp_path: Path) -> None:
    path = tmp_path / "Qwen2.5-1.5B"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS["Qwen2.5-0.5B"]))
    made = plan("experiment=gsm8k_1_5b", f"model.path={path}")
    assert (made.source, made.model.hidden) == (str(path / "config.json"), 896)


def test_the_command_prints_a_document_and_refuses_with_exit_code_2() -> None:
    command = [sys.executable, "-m", "pipeline", "plan", "experiment=gsm8k_1_5b", "--json"]
    done = subprocess.run([*command, "--gpu-gib", "24"], capture_output=True, text=True)
    document = json.loads(done.stdout)
    assert (done.returncode, document["fits"]) == (2, False)
    assert document["remedies"] and document["remedies"][0] in done.stderr
    assert sum(document["trainer"].values()) == 24 * 2**30


@pytest.mark.parametrize("name", CONFIGS)
def test_a_scaled_model_keeps_the_kind_and_the_grouping_of_heads(name: str) -> None:
    before, after = CONFIGS[name], scaled.small(CONFIGS[name], positions=96)
    kept = ("model_type", "tie_word_embeddings", "rope_theta", "hidden_act", "rms_norm_eps")
    assert [after[key] for key in kept] == [before[key] for key in kept]
    ratios = [c["num_attention_heads"] / c["num_key_value_heads"] for c in (before, after)]
    assert ratios[0] == ratios[1]
    assert after["hidden_size"] == after["num_attention_heads"] * after["head_dim"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rehearsal_keeps_a_recipes_options_and_ratios(recipe: str, tmp_path: Path) -> None:
    whole = load([f"experiment={recipe}"])
    small = rehearse.small_config(whole, path=tmp_path, data=tmp_path, steps=2)
    parse(json.dumps(small.model_dump(mode="json")))  # every check of a run passes
    for key in ("objective", "aggregation", "tis", "eps_high", "dual_clip", "kl", "lr"):
        assert getattr(small.update, key) == getattr(whole.update, key)
    updates = [c.filter.batch_groups * c.rollout.n / c.update.mini_batch for c in (small, whole)]
    buffers = [c.score.l_cache / c.score.l_max for c in (small, whole)]
    assert updates[0] == updates[1]
    assert buffers[0] == pytest.approx(buffers[1], abs=1 / small.score.l_max)
    assert small.filter.dynamic_sampling == whole.filter.dynamic_sampling


@pytest.mark.slow
def test_a_recipe_with_adapters_is_rehearsed_from_selection_to_evaluation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "rehearse", "experiment=dapo_math_7b_lora"]
    keep = tmp_path / "kept"
    done = subprocess.run(
        [*command, "rollout=hf", "evaluate=hf", "--keep", keep], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "in place of BytedTsinghua-SIA/DAPO-Math-17k" in done.stdout
    for stage in ("select", "rollout", "score", "filter", "update", "evaluate"):
        assert f"/ {stage}: " in done.stdout
    step = keep / "runs/dapo_math_7b_lora/step_0001"
    metrics = pl.read_parquet(step / "update/metrics/*.parquet")
    assert (metrics["status"] == "stepped").all() and len(metrics) == 4
    assert (step / "update/lora").is_dir()
