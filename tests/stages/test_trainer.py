"""The trainer against the formulas written out plainly, one response at a time."""

import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from updates import (
    CPU,
    ROWS,
    Bench,
    assert_near,
    build_policy,
    faithful,
    hashes,
    logprobs_alone,
    row,
    table,
    weights,
    write,
)

from stages import adapter, ranks, responses, speed, tables, trainer, update
from stages.errors import InputError
from stages.settings import Machine

GSPO = {"objective": "gspo", "eps_low": 0.02, "eps_high": 0.03}
CISPO = {"objective": "cispo", "eps_low": 1.0, "eps_high": 0.05}
SETTINGS: dict[str, dict[str, Any]] = {
    "clip": {"eps_low": 0.05, "eps_high": 0.1, "dual_clip": 1.1},
    "gspo": {**GSPO, "aggregation": "seq-mean-token-mean"},
    "cispo": CISPO,
    "prompt mean": {"aggregation": "prompt-mean"},
    "fixed divisor": {"aggregation": "seq-mean-token-sum-norm", "divisor": 9.0},
    "k1": {"kl": "k1", "kl_coef": 0.3},
    "k2": {"kl": "k2", "kl_coef": 0.3},
    "k3": {"kl": "k3", "kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.2},
    "token weights": {"tis": "token", "tis_cap": 1.2},
    "sequence weights": {"tis": "sequence", "tis_cap": 1.2},
    "dropping": {"tis": "token", "tis_drop_outside": (0.8, 1.25)},
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four policies that differ a little: every ratio of theirs is a number of its own."""
    root, found = tmp_path_factory.mktemp("policies"), {}
    base = AutoModelForCausalLM.from_pretrained(build_policy(root / "old"))
    for name in ("old", "new", "sampler", "reference"):
        found[name] = build_policy(root / name)
        if name == "old":
            continue
        torch.manual_seed(len(name))
        for parameter in base.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        base.save_pretrained(found[name])
    return found


@pytest.fixture
def bench(tmp_path: Path, policies: dict[str, Path]) -> Bench:
    return Bench(tmp_path, policies["old"])


@pytest.fixture(scope="module")
def sampled(policies: dict[str, Path]) -> list[dict[str, Any]]:
    return faithful(policies["sampler"], ROWS)


def found(
    policies: dict[str, Path],
    rows: list[dict[str, Any]],
    machine: Machine = CPU,
    **settings: Any,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradient and statistics of all rows as one mini-batch, at the new policy."""
    config = update.Config(max_grad_norm=1e9, **settings)
    before = trainer.Trainer.of(policies["old"], config=config, machine=machine)
    batch = responses.responses_of(table(rows))
    whole = trainer.MiniBatch(batch, before.dealt(batch))
    reference = None
    if config.kl != "off":
        reference = trainer.scorer_of(
            policies["reference"], config=config, machine=machine, frozen=True
        )
    before.recompute_old([whole], reference)
    after = trainer.Trainer.of(policies["new"], config=config, machine=machine)
    row = after.gradient(whole)
    return {n: p.grad for n, p in after.parameters.items() if p.grad is not None}, row


def plain(
    policies: dict[str, Path], rows: list[dict[str, Any]], **settings: Any
) -> tuple[dict[str, Tensor], float]:
    """The same, with every formula written out for one response after the other."""
    c = update.Config(**settings)
    model = AutoModelForCausalLM.from_pretrained(policies["new"])
    kept: list[tuple[dict[str, Any], Tensor, Tensor]] = []  # row, token losses, counts
    for r in rows:
        new = logprobs_alone(policies["new"], r, model=model)
        with torch.no_grad():
            old = logprobs_alone(policies["old"], r)
            ref = logprobs_alone(policies["reference"], r)
        gap = old - torch.tensor(r["sampler_logprobs"])
        a = r["advantage"]
        log_ratio = new - old
        if c.objective == "gspo":
            log_ratio = log_ratio.detach().mean() + new - new.detach()
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - c.eps_low, 1 + c.eps_high)
        loss = -torch.minimum(ratio * a, clipped * a)
        if c.dual_clip and a < 0:
            loss = torch.minimum(loss, torch.tensor(-a * c.dual_clip))
        if c.objective == "cispo":
            loss = -clipped.detach() * a * new
        counts = torch.ones_like(new)
        if c.tis != "off":
            weight = gap.exp() if c.tis == "token" else gap.sum().exp().expand_as(gap)
            if c.tis_drop_outside:
                low, high = c.tis_drop_outside
                counts = ((weight >= low) & (weight <= high)).float()
            loss = loss * weight.clamp(max=c.tis_cap)
        if c.kl != "off":
            d = new - ref
            loss = loss + c.kl_coef * {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() + d - 1}[c.kl]
        if c.entropy_coef:
            loss = loss - c.entropy_coef * entropies_alone(model, r)
        kept.append((r, loss * counts, counts))
    total = aggregated(kept, c)
    total.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return grads, total.item()


def aggregated(kept: list[tuple[dict[str, Any], Tensor, Tensor]], c: update.Config) -> Tensor:
    if c.aggregation == "token-mean":
        return torch.cat([loss for _, loss, _ in kept]).sum() / sum(n.sum() for *_, n in kept)
    if c.aggregation == "prompt-mean":
        means = []
        for group in {r["group_id"] for r, *_ in kept}:
            of = [(loss, n) for r, loss, n in kept if r["group_id"] == group]
            means.append(sum(loss.sum() for loss, _ in of) / sum(n.sum() for _, n in of))
        return torch.stack(means).mean()
    return torch.stack([loss.sum() / (c.divisor or n.sum()) for _, loss, n in kept]).mean()


def entropies_alone(model: Any, r: dict[str, Any]) -> Tensor:
    ids = torch.tensor([r["prompt_ids"] + r["response_ids"]])
    spread = (model(ids).logits[0, len(r["prompt_ids"]) - 1 : -1] / r["temperature"]).softmax(-1)
    return torch.distributions.Categorical(spread).entropy()


# --- the loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_are_those_of_the_plain_formula(
    policies: dict[str, Path], sampled: list[dict[str, Any]], name: str
) -> None:
    wanted, loss = plain(policies, sampled, **SETTINGS[name])
    gradient, row = found(policies, sampled, **SETTINGS[name])
    assert row["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert_near(gradient, wanted, 2e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradient_does_not_depend_on_budget_or_packing(
    policies: dict[str, Path], sampled: list[dict[str, Any]], name: str
) -> None:
    whole, _ = found(policies, sampled, **SETTINGS[name])
    for machine, relative in (
        (Machine(micro_batch_tokens=1), 1e-6),
        (Machine(micro_batch_tokens=30), 1e-6),
        (Machine(micro_batch_tokens=30, packed=True), 3e-6),  # attention with a mask rounds more
    ):
        parts, _ = found(policies, sampled, machine, **SETTINGS[name])
        assert_near(parts, whole, relative)


def test_tokens_that_importance_drops_leave_the_denominator_too(
    policies: dict[str, Path], sampled: list[dict[str, Any]]
) -> None:
    band = {"tis": "token", "tis_drop_outside": (0.8, 1.25)}
    _, row = found(policies, sampled, **band)
    every = sum(len(r["response_ids"]) for r in sampled)
    assert 0 < row["tokens"] < every
    assert row["importance_dropped"] == pytest.approx(1 - row["tokens"] / every)
    assert row["importance_mean"] == pytest.approx(1, abs=0.25)


def test_when_every_token_is_dropped_no_step_is_made(bench: Bench) -> None:
    out, metrics = bench(ROWS, tis="token", tis_drop_outside=(1e6, 1e7))
    assert set(tables.read(out, "metrics")["status"]) == {"no_tokens"}
    assert metrics["optimizer_steps"] == metrics["skipped"] == 0
    before, after = weights(bench.policy), weights(out)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_statistics_are_those_of_the_tokens(
    policies: dict[str, Path], sampled: list[dict[str, Any]]
) -> None:
    _, row = found(policies, sampled, eps_low=0.01, eps_high=0.02)
    pairs = [
        (
            logprobs_alone(policies["new"], r).detach(),
            logprobs_alone(policies["old"], r).detach(),
            r,
        )
        for r in sampled
    ]
    ratio = torch.cat([(new - old).exp() for new, old, _ in pairs])
    advantage = torch.cat([torch.full_like(new, r["advantage"]) for new, _, r in pairs])
    low = ((advantage < 0) & (ratio < 0.99)).float().mean().item()
    high = ((advantage > 0) & (ratio > 1.02)).float().mean().item()
    assert low > 0 and high > 0
    wanted = {
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "ratio_min": ratio.min().item(),
        "ratio_mean": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
        "kl_k1": -ratio.log().mean().item(),
        "kl_k3": (ratio - 1 - ratio.log()).mean().item(),
        "gap_max": max(
            (old - torch.tensor(r["sampler_logprobs"])).abs().max().item() for _, old, r in pairs
        ),
        "length_max": max(len(r["response_ids"]) for r in sampled),
    }
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


def test_kl_and_reference_come_together(bench: Bench) -> None:
    with pytest.raises(InputError, match="needs both"):
        bench(ROWS, kl="k3")


# --- state -------------------------------------------------------------------------------------


def test_a_restart_between_two_optimizer_steps_changes_no_bit(
    bench: Bench, sampled: list[dict[str, Any]]
) -> None:
    config = update.Config(lr=1e-3, mini_batch=8, warmup_steps=3, weight_decay=0.1)

    def step(of: trainer.Trainer, rows: list[dict[str, Any]]) -> None:
        (mini_batch,) = of.mini_batches(responses.responses_of(table(rows)))
        of.recompute_old([mini_batch])
        assert of.step(mini_batch)["status"] == "stepped"

    through = trainer.Trainer.of(bench.policy, config=config, machine=CPU)
    step(through, sampled)
    stopped = bench.out()
    through.save(stopped, like=bench.policy)
    resumed = trainer.Trainer.of(stopped, config=config, machine=CPU)
    for one in (through, resumed):
        step(one, [row(i) for i in range(20, 28)])
    assert through.done == resumed.done == 2
    for name, parameter in resumed.parameters.items():
        assert torch.equal(parameter, through.parameters[name]), name


def test_the_cosine_falls_from_the_peak_to_zero() -> None:
    config = update.Config(lr=1.0, schedule="cosine", warmup_steps=2, total_steps=6)
    rates = [trainer.learning_rate(config, done) for done in range(7)]
    wanted = [0.5, 1, *((1 + math.cos(math.pi * k / 4)) / 2 for k in range(5))]
    assert rates == pytest.approx(wanted)


# --- low-rank adapters -------------------------------------------------------------------------

LORA = {"lora_rank": 2, "lora_alpha": 4.0, "lr": 1e-2}


def test_an_adapter_is_trained_saved_and_merged_for_others(bench: Bench) -> None:
    from peft import PeftModel

    out, metrics = bench(ROWS, **LORA)
    assert metrics["optimizer_steps"] == 2
    assert adapter.base(out) == out / "lora" / "base"
    before, base, merged = (weights(p) for p in (bench.policy, adapter.base(out), out))
    assert merged.keys() == before.keys()
    assert all(torch.equal(base[name], before[name]) for name in before)
    moved = {name for name in before if not torch.equal(merged[name], before[name])}
    assert moved == {name for name in before if ".layers." in name and "proj" in name}
    attached = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(adapter.base(out)), out / "lora"
    )
    for r in ROWS[:2]:
        alone = logprobs_alone(out, r)
        torch.testing.assert_close(alone, logprobs_alone(out, r, model=attached), atol=1e-5, rtol=0)


def test_the_next_update_goes_on_with_the_adapter_and_its_moments(bench: Bench) -> None:
    first, _ = bench(faithful(bench.policy, ROWS), **LORA)
    second, metrics = bench(faithful(first, ROWS), policy=first, **LORA, max_gap=1e-5)
    assert metrics["total_optimizer_steps"] == 4
    assert tables.read(second, "metrics")["ratio_max"][0] == 1.0
    assert hashes(adapter.base(second)) == hashes(adapter.base(first))
    with pytest.raises(InputError, match="lora_rank 2 and lora_alpha 4"):
        bench(ROWS, policy=first)


# --- what is written ---------------------------------------------------------------------------


def test_every_token_is_on_record_when_asked(bench: Bench, sampled: list[dict[str, Any]]) -> None:
    out, _ = bench(sampled, epochs=2, record_tokens=True, eps_low=0.001, eps_high=0.001)
    tokens = tables.read(out, "tokens")
    assert len(tokens) == 16
    assert tokens["optimizer_step"].unique().sort().to_list() == [1, 2, 3, 4]
    flat = tokens.explode(tokens.columns[2:])
    assert len(flat) == 2 * sum(len(r["response_ids"]) for r in ROWS)
    ratios = (flat["new_logprobs"] - flat["old_logprobs"]).exp()
    assert ratios.to_list() == pytest.approx(flat["ratios"].to_list(), rel=1e-5)
    steps = tables.read(out, "metrics")
    by_step = flat.group_by("optimizer_step").agg(
        pl.col("clipped_low", "clipped_high").mean(), pl.col("weights").sum()
    )
    by_step = by_step.sort("optimizer_step")
    for which in ("low", "high"):
        shares = by_step[f"clipped_{which}"].to_list()
        assert shares == pytest.approx(steps[f"clip_fraction_{which}"].to_list())
    assert by_step["weights"].to_list() == pytest.approx([1.0] * 4)
    assert not (bench(sampled)[0] / "tokens").exists()


def test_timings_stand_beside_the_metrics(bench: Bench) -> None:
    out, _ = bench(ROWS)
    timings = tables.read(out, "timings")
    assert len(timings) == len(tables.read(out, "metrics")) == 2
    assert (timings["tokens_per_second"] > 0).all() and (timings["peak_memory_gib"] > 0).all()
    assert timings["mfu"].null_count() == 2  # nobody knows a CPU's peak


def test_flops_are_those_that_torch_counts(policies: dict[str, Path]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = AutoModelForCausalLM.from_pretrained(policies["old"], attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 64, dtype=torch.long)).logits.sum().backward()
    counted = counter.get_total_flops()
    # eager attention computes the masked half too, and the first layer needs no input gradient
    assert speed.training_flops(model, [64]) == pytest.approx(counted, rel=0.25)


def test_a_dry_run_computes_the_loss_under_other_settings_and_changes_nothing(
    policies: dict[str, Path], sampled: list[dict[str, Any]], bench: Bench
) -> None:
    before = {name: hashes(path) for name, path in policies.items()}
    settings = {"tight": {"eps_low": 0.01, "eps_high": 0.01}, "wide": {}}
    compared = update.dry(
        batch=write(bench.root / "dry", sampled),
        policy=policies["old"],
        updated=policies["new"],
        configs={name: update.Config(**config) for name, config in settings.items()},
        machine=CPU,
    )
    assert compared.columns == ["metric", "tight", "wide"]
    values = {name: dict(zip(compared["metric"], compared[name], strict=True)) for name in settings}
    for name, config in settings.items():
        grads, loss = plain(policies, sampled, **config)
        norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
        assert values[name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert values[name]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert values["tight"]["clip_fraction_high"] > values["wide"]["clip_fraction_high"]
    assert {name: hashes(path) for name, path in policies.items()} == before


# --- machine options ---------------------------------------------------------------------------


def test_alone_there_is_one_rank_and_no_message() -> None:
    assert (ranks.rank(), ranks.size(), ranks.gather("x")) == (0, 1, ["x"])
