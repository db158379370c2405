"""The equations against the paper, other projects' numbers, and the properties they must have."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

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
HANDS = ("hand", "hand_plus_fully_masked_row")

AGGREGATIONS = get_args(dapo.Aggregation)
EVERY = list(product(get_args(dapo.Objective), AGGREGATIONS))
SEEDS = st.integers(0, 10**6)
few = settings(max_examples=15)


class Batch(NamedTuple):
    """N tokens of B responses, end to end; the first four are [N], the others [B]."""

    new: Tensor
    old: Tensor
    advantages: Tensor
    rows: Tensor
    tokens: Tensor
    prompts: Tensor


def random_batch(seed: int) -> Batch:
    """5 responses to up to 3 prompts, of up to 5 tokens; some ratios lie beyond the clips."""
    generator = torch.Generator().manual_seed(seed)
    normal: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    tokens = torch.randint(0, 6, (5,), generator=generator)
    tokens[0] = tokens[0].clamp(min=1)
    rows = torch.arange(5).repeat_interleave(tokens)
    old = -3 * torch.rand(len(rows), **normal)
    new = old + 0.4 * torch.randn(len(rows), **normal)
    prompts = torch.randint(0, 3, (5,), generator=generator)
    return Batch(new, old, torch.randn(5, **normal)[rows], rows, tokens, prompts)


def part_of(batch: Batch, responses: Sequence[int]) -> tuple[Batch, Tensor]:
    """Some of the responses, in the order given, and where their tokens stood in the batch."""
    chosen = torch.tensor(responses, dtype=torch.long)
    row, at = (chosen.unsqueeze(-1) == batch.rows).nonzero(as_tuple=True)
    new, old, advantages = (values[at] for values in batch[:3])
    tokens, prompts = batch.tokens[chosen], batch.prompts[chosen]
    return Batch(new, old, advantages, row, tokens, prompts), at


def flattened(padded: dict[str, Tensor]) -> tuple[Batch, Tensor]:
    """Tensors [B, T] (advantages [B]) without what the mask leaves out, and the mask."""
    mask = padded["mask"] > 0
    rows, tokens = mask.nonzero()[:, 0], mask.sum(dim=1)
    new, old = padded["new_logp"][mask], padded["old_logp"][mask]
    return Batch(new, old, padded["advantages"][rows], rows, tokens, torch.arange(len(mask))), mask


def golden_inputs(hand: str) -> dict[str, Tensor]:
    names = ("new_logp", "old_logp", "advantages", "mask", "ratio")
    inputs = CASES[hand]["inputs"]
    return {name: torch.tensor(inputs[name], dtype=torch.float64) for name in names}


def weights_of(batch: Batch, aggregation: Any, divisor: float = 6.0) -> Tensor:
    needed = divisor if aggregation == "seq-mean-token-sum-norm" else None
    return dapo.token_weights(batch.tokens, batch.prompts, aggregation=aggregation, divisor=needed)


def loss_of(
    batch: Batch, weights: Tensor | str = "token-sum", **settings: Any
) -> tuple[Tensor, Tensor, dapo.TokenLosses]:
    """Loss, its gradient with respect to the new log-probs [N], what each token went through."""
    weights = weights_of(batch, weights) if isinstance(weights, str) else weights
    new = batch.new.clone().requires_grad_()
    settings = {"eps_low": 0.2, "eps_high": 0.28} | settings
    tokens = dapo.token_losses(new, batch.old, batch.advantages, batch.rows, **settings)
    loss = (weights[batch.rows] * tokens.losses).sum()
    (grad,) = torch.autograd.grad(loss, new)
    return loss.detach(), grad, tokens._replace(losses=tokens.losses.detach())


def close(found: Tensor, wanted: Any, tolerance: float = 1e-9) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=tolerance)


def share(flags: Tensor) -> float:
    return flags.double().mean().item()


# --- the loss: other projects' numbers ---------------------------------------------------------

GSPO, CISPO = {"objective": "gspo"}, {"objective": "cispo"}
VERL: dict[str, dict[str, Any]] = {
    "verl_vanilla_c10": {"dual_clip": 10.0},
    "verl_vanilla_c3": {"dual_clip": 3.0},
    "verl_no_dual(c=1e9)": {},
    "verl_gspo": GSPO | {"eps_low": 3e-4, "eps_high": 4e-4},
    "verl_gspo_eps.2_.28": GSPO,
    "verl_cispo": CISPO,
}
TRL: dict[str, dict[str, Any]] = {
    "trl_no_delta": {},
    "trl_delta10": {"dual_clip": 10.0},
    "trl_gspo(grpo,sequence,eps3e-4/4e-4)": GSPO | {"eps_low": 3e-4, "eps_high": 4e-4},
    # its eps_high is the greatest weight, ours is how far it may be above 1
    "trl_cispo(eps_high=5)": CISPO | {"eps_low": 1.0, "eps_high": 4.0},
}
TRL_NAMES = {
    **dict.fromkeys(("dapo", "bnpo", "cispo"), "token-mean"),
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def check_golden(
    golden: dict[str, Any], batch: Batch, mask: Tensor, weights: Tensor, **settings: Any
) -> None:
    """Loss, gradient put back to [B, T], and all the statistics that the project tells."""
    loss, grad, tokens = loss_of(batch, weights, **settings)
    close(loss, golden["loss"])
    close(torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, grad), golden["grad"])
    statistics = {
        "actor/pg_clipfrac": share(tokens.clipped_low | tokens.clipped_high),
        "actor/pg_clipfrac_lower": share(tokens.clipped_dual),
        "actor/ppo_kl": dapo.divergence(batch.old, batch.new, "k1").mean().item(),
        "clip_ratio/low_mean": share(tokens.clipped_low),
        "clip_ratio/high_mean": share(tokens.clipped_high),
        "cispo_clip_ratio": share(tokens.clipped_high & (batch.advantages > 0)),
    }
    for name in statistics.keys() & golden.keys():  # TRL's are float32
        tolerance = 1e-9 if name.startswith("actor") else 1e-8
        assert statistics[name] == pytest.approx(golden[name], abs=tolerance)


@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize(
    ("project", "name"),
    [(project, name) for project in VERL for name in CASES["hand"][project] if name != "eps"],
)
def test_loss_and_gradient_are_those_of_verl(project: str, name: str, hand: str) -> None:
    batch, mask = flattened(golden_inputs(hand))
    counted = batch.tokens.double()
    if name == "seq-mean-token-mean":  # verl adds 1e-8 to the tokens of a response
        counted = counted + 1e-8 * (counted > 0)
    weights = weights_of(batch._replace(tokens=counted), name, divisor=mask.shape[1])
    check_golden(CASES[hand][project][name], batch, mask, weights, **VERL[project])


@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize(
    ("project", "name"), [(project, name) for project in TRL for name in CASES["hand"][project]]
)
def test_loss_and_gradient_are_those_of_trl(project: str, name: str, hand: str) -> None:
    batch, mask = flattened(golden_inputs(hand))
    weights = weights_of(batch, TRL_NAMES[name], divisor=mask.shape[1])
    if TRL_NAMES[name].startswith("seq"):  # TRL counts a response without tokens as one
        weights = weights * share(batch.tokens > 0)
    check_golden(CASES[hand][project][name], batch, mask, weights, **TRL[project])


@pytest.mark.parametrize("hand", HANDS)
def test_five_projects_agree_on_the_token_mean(hand: str) -> None:
    inputs = golden_inputs(hand)
    batch, mask = flattened(inputs)
    for name, golden in CASES[hand]["cross_check"].items():
        dual_clip = None if "no_dual" in name else 10.0
        loss, _, tokens = loss_of(batch, "token-mean", dual_clip=dual_clip)
        close(loss, golden)
        close(tokens.ratios, inputs["ratio"][mask])


@pytest.mark.parametrize("objective", ["clip", "gspo"])
@pytest.mark.parametrize("beyond", [0, 1])
def test_a_log_ratio_beyond_20_is_bounded_and_has_no_gradient(beyond: int, objective: str) -> None:
    golden = CASES["numeric"]["ratio_clamp"]
    log_ratio, ratio = golden["log_ratio"][beyond], golden["verl_ratio"][beyond]
    one, row = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    advantage = -one if log_ratio > 0 else one
    batch = Batch(log_ratio * one, 0 * one, advantage, row, one, row)
    loss, grad, tokens = loss_of(batch, objective=objective)
    assert abs(loss.item()) == pytest.approx(ratio, rel=1e-12)
    assert tokens.ratios.item() == pytest.approx(ratio, rel=1e-12)
    assert grad.item() == 0.0


# --- the loss: what must not matter ------------------------------------------------------------


@given(seed=SEEDS, order=st.permutations(range(5)), dealt=st.lists(st.integers(0, 5), min_size=5))
@few
def test_responses_dealt_anyhow_to_micro_batches_and_ranks_add_up_to_the_mini_batch(
    seed: int, order: list[int], dealt: list[int]
) -> None:
    batch = random_batch(seed)
    parts = [[i for i in order if dealt[i] == part] for part in range(6)]  # one has none, at least
    for objective, aggregation in EVERY:
        common: dict[str, Any] = {"objective": objective, "dual_clip": 1.3}
        weights = weights_of(batch, aggregation)
        loss, grad, _ = loss_of(batch, weights, **common)
        total, grads = torch.zeros_like(loss), torch.full_like(grad, math.nan)
        for responses in parts:
            part, at = part_of(batch, responses)
            share_of_loss, grads[at], _ = loss_of(part, weights[responses], **common)
            total += share_of_loss
        close(total, loss, 1e-12)
        close(grads, grad, 1e-12)


@given(seed=SEEDS, order=st.permutations(range(5)))
@few
def test_the_order_of_responses_does_not_matter(seed: int, order: list[int]) -> None:
    batch = random_batch(seed)
    other, at = part_of(batch, order)
    other = other._replace(prompts=2 - other.prompts)  # nor does what a prompt is called
    for objective, aggregation in EVERY:
        loss, grad, _ = loss_of(batch, aggregation, objective=objective)
        shuffled = loss_of(other, aggregation, objective=objective)
        close(shuffled[0], loss, 1e-12)
        close(shuffled[1], grad[at], 1e-12)


@pytest.mark.parametrize("junk", [math.inf, math.nan, 1e30])
def test_neither_more_padding_nor_what_stands_there_matters(junk: float) -> None:
    inputs = golden_inputs("hand_plus_fully_masked_row")
    wide = {n: torch.nn.functional.pad(v, (0, 3)) if v.dim() > 1 else v for n, v in inputs.items()}
    for name in ("new_logp", "old_logp"):
        wide[name][wide["mask"] == 0] = junk
    for objective, aggregation in EVERY:
        loss, grad, _ = loss_of(flattened(inputs)[0], aggregation, objective=objective)
        padded = loss_of(flattened(wide)[0], aggregation, objective=objective)
        assert torch.equal(padded[0], loss)
        assert torch.equal(padded[1], grad)


# --- the loss: what it does to a token ---------------------------------------------------------


@given(seed=SEEDS, eps=st.sampled_from([0.0, 0.2]))
@few
def test_at_ratio_one_the_gradient_is_the_policy_gradient(seed: int, eps: float) -> None:
    batch = random_batch(seed)
    batch = batch._replace(new=batch.old)
    for objective, aggregation in EVERY:
        common = {"eps_low": eps, "eps_high": eps, "dual_clip": 10.0, "objective": objective}
        _, grad, tokens = loss_of(batch, aggregation, **common)
        assert torch.equal(grad, -batch.advantages * weights_of(batch, aggregation)[batch.rows])
        assert (tokens.ratios == 1.0).all() and not tokens.ratios.requires_grad
        assert not (tokens.clipped_low | tokens.clipped_high | tokens.clipped_dual).any()


@given(seed=SEEDS, eps=st.floats(0.01, 0.9), objective=st.sampled_from(get_args(dapo.Objective)))
@few
def test_each_epsilon_acts_on_its_own_side_only(seed: int, eps: float, objective: str) -> None:
    batch = random_batch(seed)
    _, grad, tokens = loss_of(batch, objective=objective)
    _, grad_low, low = loss_of(batch, objective=objective, eps_low=eps)
    _, grad_high, high = loss_of(batch, objective=objective, eps_high=eps)
    # ε_high: tokens to be made likelier only; CISPO: those that have become likelier
    up = tokens.ratios > 1 if objective == "cispo" else batch.advantages > 0
    assert torch.equal(grad_high[~up], grad[~up])
    assert torch.equal(grad_low[up], grad[up])
    assert torch.equal(high.losses[~up], tokens.losses[~up])
    assert torch.equal(low.losses[up], tokens.losses[up])
    assert torch.equal(high.clipped_low, tokens.clipped_low)
    assert torch.equal(low.clipped_high, tokens.clipped_high)


def test_beyond_its_epsilon_a_token_loses_the_bound_and_has_no_gradient() -> None:
    ratios = torch.tensor([1.29, 1.27, 0.5, 0.79, 0.81, 1.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    rows = torch.arange(6)
    batch = Batch(ratios.log(), 0 * ratios, advantages, rows, rows + 1, rows)
    _, grad, tokens = loss_of(batch)
    close(grad, [0.0, -1.27, -0.5, 0.0, 0.81, 1.5], 1e-12)
    close(tokens.losses, [-1.28, -1.27, -0.5, 0.8, 0.81, 1.5], 1e-12)


@given(seed=SEEDS, objective=st.sampled_from(["clip", "gspo"]))
@few
def test_a_token_is_called_clipped_where_it_gives_no_gradient(seed: int, objective: str) -> None:
    batch = random_batch(seed)
    _, grad, tokens = loss_of(batch, objective=objective, dual_clip=1.3)
    clipped = tokens.clipped_low | tokens.clipped_high | tokens.clipped_dual
    assert torch.equal(clipped, grad == 0)
    assert not (batch.advantages > 0)[tokens.clipped_low | tokens.clipped_dual].any()
    assert (batch.advantages > 0)[tokens.clipped_high].all()


@given(seed=SEEDS)
@few
def test_under_cispo_no_token_is_silenced(seed: int) -> None:
    batch = random_batch(seed)
    loss, grad, tokens = loss_of(batch, objective="cispo")
    weights = (batch.new - batch.old).exp().clamp(0.8, 1.28)
    assert grad.all()
    close(grad, -weights * batch.advantages, 1e-12)
    close(loss, (grad * batch.new).sum(), 1e-12)
    assert torch.equal(tokens.clipped_low, weights == 0.8)
    assert torch.equal(tokens.clipped_high, weights == 1.28)


@given(seed=SEEDS)
@few
def test_under_gspo_all_tokens_of_a_response_share_one_ratio_and_gradient(seed: int) -> None:
    batch = random_batch(seed)
    _, grad, tokens = loss_of(batch, objective="gspo")
    for response in batch.rows.unique():
        own = batch.rows == response
        assert len(tokens.ratios[own].unique()) == len(grad[own].unique()) == 1
        close(tokens.ratios[own][0].log(), (batch.new - batch.old)[own].mean(), 1e-12)


def test_the_sequence_log_ratio_is_a_mean_whose_gradient_is_the_tokens_own() -> None:
    log_ratios = torch.tensor([1.0, 2.0, 6.0, -4.0], dtype=torch.float64)
    rows = torch.tensor([0, 0, 0, 2])
    assert dapo.sequence_log_ratio(log_ratios, rows).tolist() == [3.0, 3.0, 3.0, -4.0]
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    loss = (weights * dapo.sequence_log_ratio(log_ratios.requires_grad_(), rows)).sum()
    assert torch.equal(torch.autograd.grad(loss, log_ratios)[0], weights)


# --- the weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("token-sum", [1, 0, 1, 1]),
        ("token-mean", [1 / 9, 0, 1 / 9, 1 / 9]),
        ("prompt-mean", [1 / 4 / 2, 0, 1 / 5 / 2, 1 / 5 / 2]),
        ("seq-mean-token-mean", [1 / 4 / 3, 0, 1 / 2 / 3, 1 / 3 / 3]),
        ("seq-mean-token-sum", [1 / 3, 0, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", [1 / 10 / 3, 0, 1 / 10 / 3, 1 / 10 / 3]),
    ],
)
def test_a_response_without_tokens_has_no_weight_and_does_not_count(
    aggregation: str, wanted: list[float]
) -> None:
    tokens, prompts = torch.tensor([4, 0, 2, 3]), torch.tensor([0, 3, 2, 2])
    divisor = 10.0 if aggregation.endswith("norm") else None
    settings: dict[str, Any] = {"aggregation": aggregation, "divisor": divisor}
    close(dapo.token_weights(tokens, prompts, **settings), wanted, 1e-15)
    assert not dapo.token_weights(0 * tokens, prompts, **settings).any()


@given(seed=SEEDS)
@few
def test_a_mean_gives_the_tokens_of_a_mini_batch_weights_that_sum_to_one(seed: int) -> None:
    batch = random_batch(seed)
    for aggregation in ("token-mean", "prompt-mean", "seq-mean-token-mean"):
        assert weights_of(batch, aggregation)[batch.rows].sum().item() == pytest.approx(1.0)


@given(seed=SEEDS)
@few
def test_the_prompt_mean_is_equation_8_read_literally(seed: int) -> None:
    batch = random_batch(seed)
    loss, _, tokens = loss_of(batch, "prompt-mean")
    means = []
    for prompt in set(batch.prompts[batch.rows].tolist()):
        losses = [
            tokens.losses[t].item()
            for i in range(5)
            for t in range(len(batch.rows))
            if batch.prompts[i] == prompt and batch.rows[t] == i
        ]
        means.append(sum(losses) / len(losses))
    assert loss.item() == pytest.approx(sum(means) / len(means), abs=1e-12)
    alone = batch._replace(prompts=torch.zeros_like(batch.prompts))
    close(weights_of(alone, "prompt-mean"), weights_of(alone, "token-mean"), 1e-15)


def test_the_token_mean_is_not_a_mean_of_means() -> None:
    case = json.loads((VECTORS / "token_mean.json").read_text())
    losses = [torch.tensor(row, dtype=torch.float64) for row in case["loss_per_token"]]
    tokens = torch.tensor([len(row) for row in losses])
    flat, rows = torch.cat(losses), torch.arange(2).repeat_interleave(tokens)
    batch = Batch(0 * flat, 0 * flat, -flat, rows, tokens, torch.arange(2))
    close(loss_of(batch, "token-mean")[0], case["full_batch"])


def test_an_unknown_aggregation_and_a_missing_divisor_are_refused() -> None:
    counts = (torch.tensor([2, 3]), torch.tensor([0, 0]))
    unknown: Any = "mean"
    for divisor in (None, 6.0):
        with pytest.raises(ValueError, match="'mean' is none of"):
            dapo.token_weights(*counts, aggregation=unknown, divisor=divisor)
    with pytest.raises(ValueError, match="needs a divisor"):
        dapo.token_weights(*counts, aggregation="seq-mean-token-sum-norm")


# --- importance weights ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "drop_outside", "wanted", "counted"),
    [
        ("token", None, [2.0, 0.5, 2.5, 2.5, 1.0], [2, 2, 1]),
        ("sequence", None, [1.0, 1.0, 2.5, 2.5, 1.0], [2, 2, 1]),  # the products 1, 12, 1
        ("token", (0.6, 3.5), [2.0, 0.0, 2.5, 0.0, 1.0], [1, 1, 1]),
        ("sequence", (0.6, 3.5), [1.0, 1.0, 0.0, 0.0, 1.0], [2, 0, 1]),
        ("token", (1.0, 1.0), [0.0, 0.0, 0.0, 0.0, 1.0], [0, 0, 1]),  # the bounds lie inside
    ],
)
def test_importance_is_capped_and_what_lies_outside_leaves_every_count(
    of: Any, drop_outside: tuple[float, float] | None, wanted: list[float], counted: list[int]
) -> None:
    rows = torch.tensor([0, 0, 1, 1, 2])
    log_ratios = torch.tensor([2.0, 0.5, 3.0, 4.0, 1.0], dtype=torch.float64).log()
    weights, counts = dapo.importance_weights(
        log_ratios, rows, of=of, cap=2.5, drop_outside=drop_outside
    )
    close(weights, wanted, 1e-12)
    assert torch.bincount(rows[counts], minlength=3).tolist() == counted


def test_importance_has_a_bounded_exponent_and_drops_what_is_no_number() -> None:
    log_ratios = torch.tensor([25.0, -25.0, math.nan], dtype=torch.float64)
    given_bounds: dict[str, Any] = {"cap": math.inf, "drop_outside": (0.0, math.inf)}
    weights, counts = dapo.importance_weights(log_ratios, torch.arange(3), **given_bounds)
    close(weights[:2].log(), [20.0, -20.0], 1e-12)
    assert (weights[2].item(), counts.tolist()) == (0.0, [True, True, False])


# --- divergence from a reference ---------------------------------------------------------------


def two_policies(scale: float) -> tuple[Tensor, Tensor]:
    """Logits of a policy over 6 tokens, and the log-probs of its reference."""
    generator = torch.Generator().manual_seed(0)
    logits, change = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    return logits, (logits + scale * change).log_softmax(dim=0)


def test_k1_k2_and_k3_are_their_formulas() -> None:
    d = [0.0, 2.0, -1.3, 15.0, -15.0]
    new = torch.tensor(d, dtype=torch.float64)
    k2, k3 = [x**2 / 2 for x in d], [math.exp(-x) + x - 1 for x in d]
    wanted = {"k1": d, "k2": k2, "k3": k3}
    for kind in get_args(dapo.Divergence):
        close(dapo.divergence(new - 1, 0 * new - 1, kind), wanted[kind])
    assert dapo.divergence(-1000 + 0 * new, 0 * new, "k3").isfinite().all()


def test_k3_is_never_negative_and_true_where_the_policies_are_close_even_in_float32() -> None:
    size = 10 ** torch.linspace(-7, 1, 10_001)
    d = torch.cat([-size, torch.zeros(1), size])
    k3 = dapo.divergence(d, torch.zeros_like(d), "k3")
    assert k3.min() >= 0
    near = d.abs() < 1e-3
    torch.testing.assert_close(k3[near], d[near] ** 2 / 2, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize(("kind", "bias"), [("k1", 0.0), ("k2", 0.1), ("k3", 0.0)])
def test_over_many_samples_an_estimate_approaches_the_divergence(kind: Any, bias: float) -> None:
    logits, reference = two_policies(0.3)
    new = logits.log_softmax(dim=0)
    exact = (new.exp() * (new - reference)).sum().item()
    generator = torch.Generator().manual_seed(1)
    drawn = torch.multinomial(new.exp(), 100_000, replacement=True, generator=generator)
    found = dapo.divergence(new[drawn], reference[drawn], kind)
    error = found.std().item() / len(drawn) ** 0.5
    assert error < 0.1 * exact
    assert found.mean().item() == pytest.approx(exact, abs=4 * error + bias * exact)


def test_as_a_loss_k2_has_the_gradient_of_the_divergence_and_the_others_do_not() -> None:
    logits, reference = two_policies(1.0)
    new = logits.requires_grad_().log_softmax(dim=0)

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    def on_policy(kind: Any) -> Tensor:  # every token, as often as it is sampled
        return gradient((new.exp().detach() * dapo.divergence(new, reference, kind)).sum())

    close(on_policy("k2"), gradient((new.exp() * (new - reference)).sum()), 1e-12)
    close(on_policy("k1"), torch.zeros(6), 1e-12)
    close(on_policy("k3"), gradient((reference.exp() * (reference - new)).sum()), 1e-12)


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
