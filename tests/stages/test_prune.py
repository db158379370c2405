"""A ladder of ratios, and the largest whose loss is within the bound."""

from collections.abc import Generator
from pathlib import Path

import polars as pl
import pytest
import torch
from conftest import CPU, forward_logprobs, fresh, rows, save
from pydantic import ValidationError
from safetensors.torch import load_file
from updates import hashes

from stages import engines, evaluate, prune, tables
from stages import policy as policies
from stages.engines import Decoding, Loaded, Request, Response
from stages.errors import InputError
from stages.prune import Config

CONFIG = Config(engine="hf", n=2, max_tokens=16, ratios=(0.1, 0.2, 0.3))
PROMPTS = rows("prompts", *({"prompt_id": f"p{i}", "prompt": f"{i}+1"} for i in range(8)))
ROLLOUTS = rows(
    "rollouts",
    *(
        {"response_id": f"r{i}", "prompt_ids": [4, 5, 6 + i], "response_ids": [9, 8]}
        for i in range(3)
    ),
)


def sparsity(path: Path) -> float:
    """The share of the weights in blocks that is 0."""
    weights = load_file(path / "model.safetensors")
    blocks = [w for name, w in weights.items() if "_proj." in name]
    return sum(int((w == 0).sum()) for w in blocks) / sum(w.numel() for w in blocks)


class Frail:
    """An engine that is right to as many of the prompts as the policy's sparsity leaves it."""

    def __init__(self, right: dict[float, int]) -> None:
        self.right = right  # by sparsity

    def load(self, path: Path) -> Loaded:
        self.tokenizer = policies.tokenizer(path)
        self.most = self.right[round(sparsity(path), 2)]
        return Loaded(policies.digest(path))

    def generate(
        self, requests: list[Request], decoding: Decoding, *, until: float
    ) -> Generator[tuple[int, Response], None, None]:
        for i in range(len(requests)):
            ids = self.tokenizer.encode("Answer: 6" if i // 2 < self.most else "Answer: 7")
            yield i, Response(ids, [-0.5] * len(ids), "stop")


@pytest.fixture
def frail(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 0.1 as good, at 0.2 worse by 1 of 8, at 0.3 by 3."""
    engine = Frail({0.0: 8, 0.1: 8, 0.2: 7, 0.3: 5})
    monkeypatch.setattr(engines, "resident", lambda *_, **__: engine)


def run(
    tmp_path: Path,
    policy: Path,
    *,
    prompts: pl.DataFrame = PROMPTS,
    rollouts: bool = False,
    **settings: object,
) -> tuple[Path, dict[str, float]]:
    out = fresh(tmp_path)
    config = Config(**(CONFIG.model_dump() | settings))  # type: ignore[arg-type]
    metrics = prune.run(
        policy=policy,
        prompts=save(fresh(tmp_path), "prompts", prompts),
        rollouts=save(fresh(tmp_path), "rollouts", ROLLOUTS) if rollouts else None,
        out=out,
        config=config,
        machine=CPU,
    )
    return out, metrics


def test_the_largest_ratio_within_the_bound_is_published_and_all_are_on_record(
    frail: None, policy: Path, tmp_path: Path
) -> None:
    out, metrics = run(tmp_path, policy, max_loss=0.2)
    ladder = tables.read(out, "ladder")
    columns = ("ratio", "value", "loss", "within", "chosen")
    assert ladder.select(columns).rows() == [
        (0.0, 1.0, 0.0, True, False),
        (0.1, 1.0, 0.0, True, False),
        (0.2, 0.875, 0.125, True, True),
        (0.3, 0.625, 0.375, False, False),
    ]
    assert ladder["reached"].to_list() == pytest.approx([0, 0.1, 0.2, 0.3], abs=1e-3)
    low, high = ladder.select("low", "high").row(3)
    assert 0 <= low < 0.375 < high < 1
    assert (metrics["ratio"], metrics["loss"], metrics["avg@2"]) == (0.2, 0.125, 0.875)
    assert sparsity(out) == pytest.approx(0.2, abs=1e-3)
    assert not (out / prune.CHOSEN).exists() and not (out / prune.CANDIDATE).exists()


def test_a_loss_of_just_the_bound_is_within(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Frail({0.0: 20, 0.1: 19})  # 1 - 19 / 20 is above 0.05 in floats
    monkeypatch.setattr(engines, "resident", lambda *_, **__: engine)
    twenty = rows("prompts", *({"prompt_id": f"p{i}", "prompt": f"{i}+1"} for i in range(20)))
    _, metrics = run(tmp_path, policy, prompts=twenty, ratios=(0.1,), max_loss=0.05)
    assert (metrics["ratio"], metrics["loss"]) == (0.1, 0.05)


def test_without_a_ratio_within_the_bound_the_policy_is_unpruned_byte_for_byte(
    frail: None, policy: Path, tmp_path: Path
) -> None:
    out, metrics = run(tmp_path, policy, ratios=(0.2, 0.3), max_loss=0.1)
    assert (metrics["ratio"], metrics["within"], metrics["loss"]) == (0.0, 0, 0.0)
    assert policies.digest(out) == policies.digest(policy)
    assert hashes(policy).items() <= hashes(out).items()  # the probe, too
    assert tables.read(out, "ladder").filter("chosen")["ratio"].to_list() == [0.0]


def test_every_layer_has_its_zeros_counted_and_only_blocks_have_any(
    frail: None, policy: Path, tmp_path: Path
) -> None:
    out, _ = run(tmp_path, policy, max_loss=0.2)
    layers = tables.read(out, "layers").filter(ratio=0.2)
    before, after = (load_file(path / "model.safetensors") for path in (policy, out))
    for name, weights, zeros in layers.select("layer", "weights", "zeros").iter_rows():
        found = after[f"model.{name}.weight"]
        assert (found.numel(), int((found == 0).sum())) == (weights, zeros)
    pruned = {f"model.{name}.weight" for name in layers["layer"]}
    assert len(pruned) == 14  # 2 blocks of 7
    for name in before.keys() - pruned:
        assert torch.equal(before[name], after[name])


def test_a_pruned_policy_has_a_probe_of_its_own_and_can_be_sampled_from(
    frail: None, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = run(tmp_path, policy, max_loss=0.2)
    found = policies.probe(out)
    assert found is not None
    pairs = found.select("prompt_ids", "response_ids").rows()
    for ours, theirs in zip(found["logprobs"], forward_logprobs(out, pairs), strict=True):
        assert ours.to_list() == pytest.approx(theirs, abs=1e-5)
    unpruned = [each for row in forward_logprobs(policy, pairs) for each in row]
    assert unpruned != pytest.approx(found["logprobs"].explode().to_list(), abs=1e-3)
    monkeypatch.undo()
    metrics = evaluate.run(
        prompts=save(fresh(tmp_path), "prompts", PROMPTS),
        policy=out,
        out=fresh(tmp_path),
        config=evaluate.Config(engine="hf", n=2, max_tokens=8),
        machine=CPU,
    )
    assert metrics["probe_gap_max"] < 1e-4


def babbling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge by a coin that the response's seed tosses: a policy that babbles is right by chance."""
    real = prune.verify.judged

    def lenient(found: pl.DataFrame, *rest: object) -> pl.DataFrame:
        return real(found, *rest).with_columns(acc=(pl.col("seed") % 2).cast(pl.Float32))  # type: ignore[arg-type]

    monkeypatch.setattr(prune.verify, "judged", lenient)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_the_same_inputs_and_seed_give_the_same_bytes(
    pattern: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    babbling(monkeypatch)
    settings = {"method": "wanda", "pattern": pattern, "ratios": (0.2,), "max_tokens": 8}
    once, again = (run(tmp_path, policy, rollouts=True, **settings)[0] for _ in range(2))
    assert hashes(once) == hashes(again)
    assert 0.1 < sparsity(once) <= 0.2


def test_every_ratio_is_asked_with_the_ids_and_seeds_that_evaluate_asks_with(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    babbling(monkeypatch)
    out, _ = run(tmp_path, policy, ratios=(0.2,), max_tokens=8)
    evaluated = fresh(tmp_path)
    evaluate.run(
        prompts=save(fresh(tmp_path), "prompts", PROMPTS),
        policy=policy,
        out=evaluated,
        config=evaluate.Config(engine="hf", n=2, max_tokens=8),
        machine=CPU,
    )
    columns = ["response_id", "seed", "prompt_ids"]
    theirs = tables.read(evaluated, "samples")
    ours = tables.read(out, "ladder_samples")
    for ratio in (0.0, 0.2):
        assert ours.filter(ratio=ratio).select(columns).equals(theirs.select(columns))
    assert ours.filter(ratio=0.0)["text"].equals(theirs["text"])
    assert ours["policy"].n_unique() == 2


def test_wanda_without_rollouts_ends_before_anything_is_sampled(
    policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"method=wanda .* give --rollouts"):
        run(tmp_path, policy, method="wanda")


def test_rollouts_of_another_vocabulary_are_refused(policy: Path, tmp_path: Path) -> None:
    foreign = ROLLOUTS.with_columns(response_ids=pl.lit([99_999], dtype=pl.List(pl.Int32)))
    with pytest.raises(InputError, match=r"outside the vocabulary .* belongs to another policy"):
        prune.run(
            policy=policy,
            prompts=save(fresh(tmp_path), "prompts", PROMPTS),
            rollouts=save(fresh(tmp_path), "rollouts", foreign),
            out=fresh(tmp_path),
            config=Config(engine="hf", method="wanda"),
            machine=CPU,
        )


def test_a_policy_that_is_never_right_has_nothing_to_lose(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has avg@2 0 on .*of which no share can be lost"):
        run(tmp_path, policy, max_tokens=2)


def test_a_rung_below_the_smallest_layer_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ratios: 2:4 takes 0\.\d+ of all weights at least"):
        run(tmp_path, policy, pattern="2:4", ratios=(0.001,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratios": (0.2, 0.1)}, "must rise"),
        ({"ratios": (0.2, 1.0)}, "less than 1"),
        ({"ratios": ()}, "at least 1 item"),
        ({"pattern": "2:4", "ratios": (0.6,)}, "half of all weights at most, got 0.6"),
        ({"metric": "length"}, "no 'length' among avg@8, pass@1"),
        ({"metric": "avg@4"}, "no 'avg@4'"),
        ({"engine": "endpoint"}, "a policy of its own"),
        ({"method": "random"}, "'magnitude' or 'wanda'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config(**settings)  # type: ignore[arg-type]
