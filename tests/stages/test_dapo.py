"""The equations against the paper, other projects' numbers, and the properties they must have."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages import dapo

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "policy_loss.json").read_text())["cases"]
ADVANTAGES = CASES["advantages"]

VERL = {"verl_vanilla_c10": 10.0, "verl_vanilla_c3": 3.0, "verl_no_dual(c=1e9)": None}
TRL = {"trl_no_delta": None, "trl_delta10": 10.0}
TRL_NAMES = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
AGGREGATIONS = get_args(dapo.Aggregation)
HANDS = ("hand", "hand_plus_fully_masked_row")


def tensors(inputs: dict[str, Any]) -> dict[str, Tensor]:
    names = {"new_logprobs": "new_logp", "old_logprobs": "old_logp"}
    return {
        name: torch.tensor(inputs[names.get(name, name)], dtype=torch.float64)
        for name in ("new_logprobs", "old_logprobs", "advantages", "mask")
    }


def loss_of(data: dict[str, Tensor], **settings: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient with respect to the new log-probs, statistics."""
    new = data["new_logprobs"].clone().requires_grad_()
    settings = {"eps_low": 0.2, "eps_high": 0.28} | settings
    loss, statistics = dapo.policy_loss(**(data | {"new_logprobs": new}), **settings)
    (grad,) = torch.autograd.grad(loss, new)
    return loss.detach(), grad, statistics


def random_data(seed: int, rows: int = 4, width: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    normal = {"generator": generator, "dtype": torch.float64}
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    old = -torch.rand(rows, width, **normal) * 3
    return {
        "new_logprobs": old + 0.4 * torch.randn(rows, width, **normal),
        "old_logprobs": old,
        "advantages": torch.randn(rows, **normal),
        "mask": torch.arange(width) < lengths,
    }


def close(found: Tensor, wanted: Any, tolerance: float = 1e-9) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=tolerance)


# --- the loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("project", VERL)
def test_loss_and_gradient_are_those_of_verl(project: str, aggregation: str, hand: str) -> None:
    golden = CASES[hand][project][aggregation]
    loss, grad, statistics = loss_of(
        tensors(CASES[hand]["inputs"]), dual_clip=VERL[project], aggregation=aggregation
    )
    close(loss, golden["loss"])
    close(grad, golden["grad"])
    shares = dapo.summarise([statistics])
    clipped = shares["clip_fraction_low"] + shares["clip_fraction_high"]
    assert clipped == pytest.approx(golden["actor/pg_clipfrac"], abs=1e-9)
    assert shares["clip_fraction_dual"] == pytest.approx(
        golden["actor/pg_clipfrac_lower"], abs=1e-9
    )
    assert shares["approx_kl"] == pytest.approx(golden["actor/ppo_kl"], abs=1e-9)


@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("name", TRL_NAMES)
@pytest.mark.parametrize("project", TRL)
def test_loss_and_gradient_are_those_of_trl(project: str, name: str, hand: str) -> None:
    golden = CASES[hand][project][name]
    data = tensors(CASES[hand]["inputs"])
    rows = len(data["mask"])  # TRL counts a row without tokens as a sequence, verl does not
    loss, grad, statistics = loss_of(
        data,
        dual_clip=TRL[project],
        aggregation=TRL_NAMES[name],
        denominator=rows if TRL_NAMES[name].startswith("seq") else None,
    )
    # verl has 1e-8 in a sequence's token count, TRL has not: they differ by 2.7e-9 between them
    tolerance = 5e-9 if name == "grpo" else 1e-9
    close(loss, golden["loss"], tolerance)
    close(grad, golden["grad"], tolerance)
    shares = dapo.summarise([statistics])
    assert shares["clip_fraction_low"] == pytest.approx(golden["clip_ratio/low_mean"], abs=1e-8)
    assert shares["clip_fraction_high"] == pytest.approx(golden["clip_ratio/high_mean"], abs=1e-8)


@pytest.mark.parametrize("hand", HANDS)
def test_five_projects_agree_on_the_token_mean(hand: str) -> None:
    for name, golden in CASES[hand]["cross_check"].items():
        dual_clip = None if "no_dual" in name else 10.0
        close(loss_of(tensors(CASES[hand]["inputs"]), dual_clip=dual_clip)[0], golden)


def test_a_log_ratio_beyond_20_is_bounded_and_has_no_gradient() -> None:
    golden = CASES["numeric"]["ratio_clamp"]
    for log_ratio, ratio in zip(golden["log_ratio"], golden["verl_ratio"], strict=True):
        data = {
            "new_logprobs": torch.tensor([[float(log_ratio)]], dtype=torch.float64),
            "old_logprobs": torch.zeros(1, 1, dtype=torch.float64),
            "advantages": torch.tensor([-1.0 if log_ratio > 0 else 1.0]),
            "mask": torch.ones(1, 1),
        }
        loss, grad, statistics = loss_of(data)
        assert abs(loss.item()) == pytest.approx(ratio, rel=1e-12)
        assert statistics["ratio_max"].item() == pytest.approx(ratio, rel=1e-12)
        assert grad.item() == 0.0


@given(seed=st.integers(0, 10**6), junk=st.sampled_from([math.inf, -math.inf, math.nan, 1e30]))
@settings(max_examples=25, deadline=None)
def test_what_stands_at_pads_reaches_neither_loss_nor_gradient(seed: int, junk: float) -> None:
    clean = random_data(seed)
    weights = torch.rand_like(clean["old_logprobs"])
    wide = clean["advantages"].unsqueeze(-1).expand_as(weights)
    dirty = {
        name: torch.where(clean["mask"], value, junk)
        for name, value in (clean | {"advantages": wide}).items()
        if name != "mask"
    } | {"mask": clean["mask"]}
    for aggregation in AGGREGATIONS:
        common = {"aggregation": aggregation, "dual_clip": 3.0}
        loss, grad, statistics = loss_of(clean, weights=weights, **common)
        spoiled = loss_of(dirty, weights=torch.where(clean["mask"], weights, junk), **common)
        assert torch.equal(spoiled[0], loss)
        assert torch.equal(spoiled[1], grad)
        assert dapo.summarise([spoiled[2]]) == dapo.summarise([statistics])


@given(seed=st.integers(0, 10**6), more=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_padding_changes_nothing(seed: int, more: int) -> None:
    data = random_data(seed)
    wide = {
        name: value if name == "advantages" else torch.nn.functional.pad(value, (0, more))
        for name, value in data.items()
    }
    for aggregation in AGGREGATIONS:
        loss, grad, _ = loss_of(data, aggregation=aggregation, divisor=6.0)
        padded = loss_of(wide, aggregation=aggregation, divisor=6.0)
        close(padded[0], loss, 1e-12)
        close(padded[1][:, :-more], grad, 1e-12)


@given(seed=st.integers(0, 10**6), cut=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_micro_batches_add_up_to_the_mini_batch(seed: int, cut: int) -> None:
    data = random_data(seed)
    for aggregation in AGGREGATIONS:
        count = data["mask"].sum() if aggregation == "token-mean" else len(data["mask"])
        common = {"aggregation": aggregation, "denominator": count, "divisor": 6.0}
        loss, grad, statistics = loss_of(data, **common)
        halves = [
            loss_of({name: value[part] for name, value in data.items()}, **common)
            for part in (slice(0, cut), slice(cut, None))
        ]
        close(halves[0][0] + halves[1][0], loss, 1e-12)
        close(torch.cat([halves[0][1], halves[1][1]]), grad, 1e-12)
        whole = dapo.summarise([statistics])
        assert dapo.summarise([half[2] for half in halves]) == pytest.approx(whole, abs=1e-12)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    data = random_data(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    shuffled = {name: value[order] for name, value in data.items()}
    for aggregation in AGGREGATIONS:
        loss, grad, _ = loss_of(data, aggregation=aggregation)
        again = loss_of(shuffled, aggregation=aggregation)
        close(again[0], loss, 1e-12)
        close(again[1], grad[order], 1e-12)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_at_ratio_one_the_gradient_is_the_policy_gradient(seed: int) -> None:
    data = random_data(seed)
    data["new_logprobs"] = data["old_logprobs"].clone()
    _, grad, statistics = loss_of(data, dual_clip=10.0)
    close(grad, -data["advantages"].unsqueeze(-1) * data["mask"] / data["mask"].sum(), 1e-12)
    shares = dapo.summarise([statistics])
    assert shares["ratio_min"] == shares["ratio_max"] == shares["ratio_mean"] == 1.0
    assert shares["approx_kl"] == 0.0


@given(seed=st.integers(0, 10**6), eps=st.floats(0.01, 0.9))
@settings(max_examples=25, deadline=None)
def test_each_epsilon_bounds_its_own_side(seed: int, eps: float) -> None:
    data = random_data(seed)
    up = (data["advantages"] > 0).unsqueeze(-1).expand_as(data["mask"])
    _, grad, _ = loss_of(data)
    _, other_high, _ = loss_of(data, eps_high=eps)
    _, other_low, _ = loss_of(data, eps_low=eps)
    assert torch.equal(other_high[~up], grad[~up])  # ε_high: tokens to be made likelier only
    assert torch.equal(other_low[up], grad[up])  # ε_low: tokens to be made rarer only


def test_beyond_the_clip_a_token_gives_no_gradient() -> None:
    ratio = torch.tensor([[1.29, 1.27, 0.5], [0.79, 0.81, 1.5]], dtype=torch.float64)
    data = {
        "new_logprobs": ratio.log(),
        "old_logprobs": torch.zeros(2, 3, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0]),
        "mask": torch.ones(2, 3),
    }
    _, grad, statistics = loss_of(data, aggregation="token-sum")
    close(grad, [[0.0, -1.27, -0.5], [0.0, 0.81, 1.5]], 1e-12)
    assert (statistics["clipped_low"].item(), statistics["clipped_high"].item()) == (1, 1)


def test_the_token_mean_is_not_a_mean_of_means() -> None:
    case = json.loads((VECTORS / "token_mean.json").read_text())
    rows = case["loss_per_token"]
    width = max(map(len, rows))
    data = {
        "new_logprobs": torch.zeros(len(rows), width, dtype=torch.float64),
        "old_logprobs": torch.zeros(len(rows), width, dtype=torch.float64),
        "advantages": -torch.tensor([row + [0] * (width - len(row)) for row in rows]).double(),
        "mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }
    close(loss_of(data)[0], case["full_batch"])
    halves = [
        loss_of({name: value[[row]] for name, value in data.items()}, denominator=10)[0]
        for row in range(2)
    ]
    close(halves[0] + halves[1], case["full_batch"])


def test_weights_multiply_the_token_losses_and_take_no_gradient() -> None:
    data = random_data(3)
    weights = torch.rand_like(data["old_logprobs"]).requires_grad_()
    _, plain, _ = loss_of(data, aggregation="token-sum", dual_clip=3.0)
    _, weighted, _ = loss_of(data, aggregation="token-sum", dual_clip=3.0, weights=weights)
    close(weighted, (plain * weights).detach(), 1e-12)
    assert weights.grad is None


def test_with_every_token_masked_the_loss_is_zero() -> None:
    data = random_data(1) | {"mask": torch.zeros(4, 6)}
    for aggregation in AGGREGATIONS:
        loss, grad, _ = loss_of(data, aggregation=aggregation)
        assert loss.item() == 0.0
        assert not grad.any()


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="token-mean"):
        loss_of(random_data(0), aggregation="mean")


# --- advantages --------------------------------------------------------------------------------


def advantages(rewards: list[float | None], **settings: Any) -> list[float]:
    frame = pl.DataFrame({"reward": pl.Series(rewards, dtype=pl.Float64), "group_id": "g"})
    column = dapo.group_advantages(pl.col("reward"), "group_id", **settings)
    return frame.select(column.alias("advantage"))["advantage"].to_list()


REWARDS = {
    name: [math.nan if value == "nan" else float(value) for value in case["rewards"]]
    for name, case in ADVANTAGES.items()
}


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize(
    ("column", "settings"),
    [
        ("verl_std", {}),
        ("verl_nostd", {"scale": "none"}),
        ("trl_group", {"eps": 1e-4}),
        ("openrlhf_group_norm(1e-9,ddof1)", {"eps": 1e-9}),
    ],
)
def test_advantages_are_those_of_other_projects(
    name: str, column: str, settings: dict[str, Any]
) -> None:
    golden = ADVANTAGES[name].get(column)
    if len(set(REWARDS[name])) == 1:  # others divide rounding errors; here it is 0, exactly
        golden = [0.0] * len(REWARDS[name])
        assert advantages(REWARDS[name], **settings) == golden
    elif golden is not None:
        assert advantages(REWARDS[name], **settings) == pytest.approx(golden, abs=1e-9)


@pytest.mark.parametrize("line", (VECTORS / "zero_variance.jsonl").read_text().splitlines())
def test_equal_rewards_give_exactly_zero_and_different_ones_do_not(line: str) -> None:
    case = json.loads(line)
    dtype = pl.Float32 if case.get("dtype") == "float32" else pl.Float64
    frame = pl.DataFrame({"reward": pl.Series(case["metric"], dtype=dtype), "group_id": "g"})
    column = dapo.group_advantages(pl.col("reward"), "group_id")
    found = frame.select(column.alias("a"))["a"].to_list()
    assert any(found) == case["keep"]
    if "advantage" in case:
        assert found == pytest.approx(case["advantage"], abs=1e-8)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_an_unscored_response_has_no_part_in_its_group(missing: float | None) -> None:
    found = advantages([1.0, 0.0, missing, missing])
    assert found == pytest.approx([0.70710578, -0.70710578, 0, 0], abs=1e-6)
    assert found[2:] == [0.0, 0.0]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_group_with_one_scored_response_or_none_gets_zero(scale: str) -> None:
    assert advantages([0.3, None, math.nan], scale=scale) == [0.0, 0.0, 0.0]
    assert advantages([None, None], scale=scale) == [0.0, 0.0]
    assert advantages([0.7], scale=scale) == [0.0]


def test_groups_are_told_apart_by_id_and_not_by_position() -> None:
    rewards = {"a": [1.0, 0.0, 0.0], "b": [0.5, 0.5, -1.0]}
    rows = [(group, rewards[group][i]) for i in range(3) for group in rewards]
    frame = pl.DataFrame(rows, schema=["group_id", "reward"], orient="row")
    column = dapo.group_advantages(pl.col("reward"), "group_id").alias("advantage")
    for group, found in frame.with_columns(column).group_by("group_id"):
        assert found["advantage"].to_list() == advantages(rewards[str(group[0])])


# --- the overlong penalty ----------------------------------------------------------------------

OVERLONG = json.loads((VECTORS / "overlong.json").read_text())


@pytest.mark.parametrize("case", OVERLONG["cases"], ids=lambda case: str(case["length"]))
def test_the_overlong_penalty_is_exact_at_the_edges(case: dict[str, Any]) -> None:
    settings = (case["max_resp_len"], case["buffer"], case["factor"])
    assert dapo.overlong_penalty(case["length"], *settings) == case["penalty"]
    lengths = pl.Series([case["length"]], dtype=pl.UInt32)
    column = pl.select(dapo.overlong_penalty(pl.lit(lengths), *settings)).to_series()
    assert column.to_list() == [case["penalty"]]


@pytest.mark.parametrize("name", ["overlong", "overlong_small"])
def test_the_overlong_penalty_is_that_of_trl_also_beyond_the_maximum(name: str) -> None:
    case = CASES[name]
    found = [
        dapo.overlong_penalty(length, case["max_response"], case["buffer"])
        for length in case["lengths"]
    ]
    assert found == case["trl"]
    lengths = pl.lit(pl.Series(case["lengths"]))
    column = pl.select(dapo.overlong_penalty(lengths, case["max_response"], case["buffer"]))
    assert column.to_series().to_list() == case["trl"]


@pytest.mark.parametrize("case", [c for c in OVERLONG["must_reject"] if c["max_resp_len"]])
def test_an_overlong_buffer_that_cannot_be_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="l_cache"):
        dapo.overlong_penalty(10, case["max_resp_len"], case["buffer"], 1.0)


def test_the_equations_come_without_torch() -> None:
    code = "import sys, stages.dapo, stages.policy, stages.update; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "False"
