"""The update stage and the policy directory, on a random Qwen3 model of a few thousand weights."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from updates import (
    CPU,
    ROWS,
    VOCABULARY,
    WORDS,
    Bench,
    assert_near,
    build_policy,
    faithful,
    gradients,
    hashes,
    logprobs_alone,
    row,
    table,
    weights,
    write,
)

from stages import policy as policies
from stages import responses, tables, trainer, update
from stages.errors import EngineMismatch, InputError, NonFinite
from stages.settings import Machine


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def bench(tmp_path: Path, policy: Path) -> Bench:
    return Bench(tmp_path, policy)


# --- the algorithm -----------------------------------------------------------------------------


def reference(policy: Path, config: update.Config, batches: list[Any]) -> dict[str, Tensor]:
    """The algorithm written out plainly: one row at a time, torch's own AdamW, no resume."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, weight_decay=config.weight_decay, eps=config.adam_eps
    )
    done = 0
    for rows in batches:
        with torch.no_grad():
            old = {r["response_id"]: logprobs_alone(policy, r, model=model) for r in rows}
        for _ in range(config.epochs):
            order = list(rows)
            random.Random(f"{config.seed}/{done}").shuffle(order)
            for start in range(0, len(order), config.mini_batch):
                part = order[start : start + config.mini_batch]
                total = torch.zeros(())
                for r in part:
                    ratio = (logprobs_alone(policy, r, model=model) - old[r["response_id"]]).exp()
                    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
                    total = (
                        total
                        - torch.minimum(ratio * r["advantage"], clipped * r["advantage"]).sum()
                    )
                optimizer.zero_grad()
                (total / sum(len(r["response_ids"]) for r in part)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                done += 1
                optimizer.param_groups[0]["lr"] = config.lr * min(1, done / config.warmup_steps)
                optimizer.step()
    return dict(model.state_dict())


def test_two_updates_with_a_resume_between_equal_a_plain_loop(bench: Bench) -> None:
    batches = [ROWS, [row(i) for i in range(20, 28)]]
    # a large adam_eps: without it, rounding decides the sign of steps where the gradient is 0
    settings = {"warmup_steps": 5, "epochs": 2, "adam_eps": 1e-4, "max_grad_norm": 0.3, "seed": 3}
    first, _ = bench(batches[0], **settings)
    second, metrics = bench(batches[1], policy=first, **settings)
    config = update.Config(lr=1e-3, mini_batch=4, **settings)
    assert_near(weights(second), reference(bench.policy, config, batches), 1e-5)
    assert metrics["total_optimizer_steps"] == 8


def test_the_gradient_does_not_depend_on_the_micro_batch(policy: Path) -> None:
    lengths = [2, 8, 8, 2, 2, 5, 8]
    rows = [row(i, response_ids=[7] * n, sampler_logprobs=[-1.0] * n)
            for i, n in enumerate(lengths)]  # fmt: skip
    whole, parts = gradients(policy, rows, CPU)
    assert parts == [7]
    for budget, size in ((1, 1), (24, 2), (36, 3)):
        found, parts = gradients(policy, rows, Machine(micro_batch_tokens=budget))
        assert parts[0] == size
        assert len(parts) > 1
        assert_near(found, whole, 1e-6)


def test_a_wasteful_micro_batch_is_cut_by_length(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(i, response_ids=[7] * n, sampler_logprobs=[-1.0] * n, prompt_ids=[1])
            for i, n in enumerate([3, 30, 29, 4])]  # fmt: skip
    whole, _ = gradients(policy, rows, CPU)
    monkeypatch.setattr(responses, "WORTH", 10)
    found, parts = gradients(policy, rows, CPU)
    assert parts == [2, 2]
    assert_near(found, whole, 1e-6)


@pytest.mark.parametrize("aggregation", ["token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_other_aggregations_do_not_depend_on_the_micro_batch(
    bench: Bench, aggregation: str
) -> None:
    losses = [
        bench(ROWS, aggregation=aggregation, mini_batch=8, machine=machine)[1]["loss"]
        for machine in (CPU, Machine(micro_batch_tokens=1))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_order_of_rows_does_not_matter_and_a_rerun_is_identical(bench: Bench) -> None:
    found = hashes(bench(ROWS)[0])
    assert {
        "model.safetensors",
        "optimizer/.metadata",
        "metrics/part-00000.parquet",
    } <= found.keys()
    assert hashes(bench(ROWS)[0]) == found
    for seed in range(2):
        shuffled = table(ROWS).sample(fraction=1.0, shuffle=True, seed=seed)
        assert hashes(bench(shuffled)[0]) == found


def test_another_seed_makes_other_mini_batches(bench: Bench) -> None:
    assert hashes(bench(ROWS, seed=1)[0]) != hashes(bench(ROWS, seed=2)[0])


def test_the_first_ratio_is_exactly_one_and_later_ones_are_not(bench: Bench) -> None:
    rows = [r | {"temperature": 0.7} for r in ROWS]
    out, _ = bench(rows)
    steps = tables.read(out, "metrics")
    assert steps["ratio_min"][0] == steps["ratio_max"][0] == 1.0
    assert steps["kl_k1"][0] == steps["kl_k3"][0] == 0.0
    assert steps["ratio_min"][1] < 1.0 < steps["ratio_max"][1]


def test_equal_mini_batches_leave_no_small_rest(bench: Bench) -> None:
    out, metrics = bench([row(i) for i in range(9)], mini_batch=4)
    assert tables.read(out, "metrics")["sequences"].to_list() == [3, 3, 3]
    assert metrics["sequences"] == 9


def test_entropy_and_loss_are_those_of_the_plain_formula(bench: Bench) -> None:
    _, metrics = bench(ROWS, mini_batch=8)
    model = AutoModelForCausalLM.from_pretrained(bench.policy)
    entropies, loss, tokens = [], 0.0, 0
    for r in ROWS:
        ids = torch.tensor([r["prompt_ids"] + r["response_ids"]])
        with torch.no_grad():
            spread = model(ids).logits[0, len(r["prompt_ids"]) - 1 : -1].softmax(-1)
        entropies.append(torch.distributions.Categorical(spread).entropy())
        tokens += len(r["response_ids"])
        loss -= r["advantage"] * len(r["response_ids"])  # every ratio is 1
    assert metrics["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert metrics["tokens"] == tokens


def test_the_policy_learns_what_has_advantage(bench: Bench) -> None:
    liked = [row(i, advantage=1.0) for i in range(4)]
    disliked = [row(i, advantage=-1.0) for i in range(4, 8)]
    out, _ = bench(liked + disliked, epochs=5, lr=3e-3)
    for rows, sign in ((liked, 1), (disliked, -1)):
        for r in rows:
            with torch.no_grad():
                rise = logprobs_alone(out, r).sum() - logprobs_alone(bench.policy, r).sum()
            assert rise.item() * sign > 0


# --- whose log-probs ---------------------------------------------------------------------------


def test_every_row_is_scored_at_its_own_recorded_temperature(bench: Bench) -> None:
    rows = [r | {"temperature": 0.6 + 0.1 * i} for i, r in enumerate(ROWS)]
    _, metrics = bench(faithful(bench.policy, rows), max_gap=1e-5)
    assert metrics["gap_max"] < 1e-5


def test_an_engine_that_ran_another_policy_is_found_out(bench: Bench) -> None:
    with pytest.raises(EngineMismatch, match=r"mean \|sampler - old log-prob\| is \d.*max_gap"):
        bench(ROWS, max_gap=1e-3)
    assert not any((bench.root / "out1").iterdir())


def test_carried_responses_may_differ_from_the_policy(bench: Bench) -> None:
    rows = faithful(bench.policy, ROWS)
    rows[3] = ROWS[3] | {"age": 1}
    _, metrics = bench(rows, max_gap=1e-4)
    assert metrics["gap_max"] < 1e-4
    assert metrics["stale_gap_mean"] > 1e-2


def test_truncated_importance_weights_are_capped(bench: Bench) -> None:
    honest = faithful(bench.policy, ROWS)
    plain = bench(honest, mini_batch=8)[1]["loss"]
    for ratio, weight in ((0.5, 0.5), (1.5, 1.5), (8.0, 2.0)):
        rows = shifted(honest, ratio)
        out, metrics = bench(rows, mini_batch=8, tis="token", tis_cap=2.0, record_tokens=True)
        assert metrics["loss"] / plain == pytest.approx(weight, rel=1e-4)
        assert metrics["importance_capped"] == (ratio > 2.0)
        weights = tables.read(out, "tokens")["weights"].explode()
        assert weights.sum() == pytest.approx(weight, rel=1e-4)


def test_a_dry_run_weighs_by_the_importance_of_each_setting(bench: Bench) -> None:
    compared = update.dry(
        batch=write(bench.root / "dry", shifted(faithful(bench.policy, ROWS), ratio=8.0)),
        policy=bench.policy,
        configs={
            name: update.Config(tis="token", tis_cap=cap)
            for name, cap in (("two", 2.0), ("six", 6.0))
        },
        machine=CPU,
    )
    two, six = compared.filter(metric="loss").select("two", "six").row(0)
    assert six / two == pytest.approx(3.0, rel=1e-4)


def shifted(rows: list[dict[str, Any]], ratio: float) -> list[dict[str, Any]]:
    """The rows as if the trainer's probabilities were `ratio` times the sampler's."""
    shift = math.log(ratio)
    return [r | {"sampler_logprobs": [x - shift for x in r["sampler_logprobs"]]} for r in rows]


def test_token_ids_are_trained_on_as_stored(bench: Bench, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bench.policy)
    whole, pieces = tokenizer.encode("hello"), tokenizer.encode("he llo")
    assert (len(whole), len(pieces)) == (1, 2)
    rows = [row(i) for i in range(100)] + [row(100, response_ids=pieces, sampler_logprobs=[0, 0])]
    stored = responses.responses_of(responses.read(write(tmp_path / "stored", rows)))
    assert [r.response_ids.tolist() for r in stored] == [r["response_ids"] for r in rows]
    assert [r.prompt_ids.tolist() for r in stored] == [r["prompt_ids"] for r in rows]
    _, metrics = bench(faithful(bench.policy, rows[-1:]))
    assert metrics["tokens"] == 2
    assert metrics["gap_max"] < 1e-5


def test_the_end_token_counts_where_it_was_sampled_though_it_is_the_pad(bench: Bench) -> None:
    rows = [
        row(0, prompt_ids=[0, 11, 12], response_ids=[5, 6, 0], sampler_logprobs=[0, 0, 0]),
        row(1, prompt_ids=[13], response_ids=[7, 0], sampler_logprobs=[0, 0]),
    ]
    _, metrics = bench(faithful(bench.policy, rows))
    assert metrics["tokens"] == 5
    assert metrics["gap_max"] < 1e-5


# --- what counts -------------------------------------------------------------------------------


def test_unscored_and_truncated_rows_contribute_no_tokens(bench: Bench) -> None:
    unscored = row(8, reward=None, acc=None, advantage=0.0)
    cut = row(9, finish_reason="length")
    assert hashes(bench([*ROWS, unscored])[0]) == hashes(bench(ROWS)[0])
    assert hashes(bench([*ROWS, cut], mask_truncated=True)[0]) == hashes(bench(ROWS)[0])
    assert bench([*ROWS, cut])[1]["sequences"] == 9


def test_truncated_is_what_the_engine_says_and_not_the_last_token() -> None:
    rows = [
        row(0, response_ids=[5, 6, 1], finish_reason="stop"),
        row(1, response_ids=[5, 6, 2], finish_reason="stop"),
        row(2, response_ids=[5, 6, 7], finish_reason="length"),
    ]
    kept = responses.trainable(table(rows), mask_truncated=True)
    assert kept["response_id"].to_list() == ["r000", "r001"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(0, reward=None, acc=None, advantage=0.0)],
        [row(0, finish_reason="length"), row(1, finish_reason="length")],
    ],
    ids=["no rows", "unscored", "truncated"],
)
def test_with_nothing_to_learn_from_the_policy_stays_byte_for_byte(
    bench: Bench, rows: list[dict[str, Any]]
) -> None:
    before, _ = bench(ROWS)
    after, metrics = bench(rows, policy=before, mask_truncated=True)
    kept, found = hashes(before), hashes(after)
    del kept["metrics/part-00000.parquet"], found["metrics/part-00000.parquet"]
    assert found == kept
    assert (metrics["optimizer_steps"], metrics["total_optimizer_steps"]) == (0, 2)
    assert len(tables.read(after, "metrics")) == 0


# --- steps and learning rate -------------------------------------------------------------------


def test_the_learning_rate_counts_optimizer_steps_over_batches(bench: Bench) -> None:
    settings = {"mini_batch": 2, "schedule": "linear", "total_steps": 8, "warmup_steps": 2}
    first, _ = bench(ROWS, **settings)
    second, metrics = bench(ROWS, policy=first, **settings)
    steps = pl.concat([tables.read(out, "metrics") for out in (first, second)])
    assert steps["optimizer_step"].to_list() == list(range(1, 9))
    wanted = [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert (steps["lr"] / 1e-3).to_list() == pytest.approx(wanted)
    assert metrics["total_optimizer_steps"] == 8
    config = update.Config(lr=1e-3, **settings)
    assert trainer.learning_rate(config, done=8) == 0.0
    with pytest.raises(InputError, match="raise total_steps"):
        bench(ROWS, policy=second, **settings)


def test_the_warm_up_never_starts_at_zero() -> None:
    config = update.Config(lr=1.0, warmup_steps=4)
    assert [trainer.learning_rate(config, done) for done in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert trainer.learning_rate(update.Config(lr=1.0), done=0) == 1.0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"eps_low": 1.1}, "eps_low"),
        ({"mini_batch": 0}, "mini_batch"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "divisor"),
        ({"divisor": 3.0}, "divisor"),
        ({"schedule": "linear"}, "total_steps"),
        ({"total_steps": 5}, "schedule=linear"),
        ({"schedule": "cosine"}, "total_steps"),
        ({"objective": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"tis_drop_outside": (0.5, 2.0)}, "tis=token"),
        ({"tis": "token", "tis_drop_outside": (2.0, 0.5)}, "low < high"),
        ({"schedule": "linear", "total_steps": 5, "warmup_steps": 5}, "warmup_steps"),
        ({"epslow": 0.2}, "epslow"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        update.Config(**settings)


# --- bad input ---------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"response_ids": [5, 6], "sampler_logprobs": [-1.0, NAN]}, "sampler_logprobs"),
        ({"response_ids": [5, 6], "sampler_logprobs": [-INF, -1.0]}, "sampler_logprobs"),
        ({"response_ids": [5, 6], "sampler_logprobs": [None, -1.0]}, "sampler_logprobs"),
        ({"response_ids": [5, 6], "sampler_logprobs": [-1.0]}, "sampler_logprobs"),
        ({"reward": INF}, "reward"),
        ({"reward": NAN}, "reward"),
        ({"advantage": NAN}, "advantage"),
        ({"advantage": -INF}, "advantage"),
        ({"temperature": 0.0}, "temperature"),
        ({"response_ids": [], "sampler_logprobs": []}, "response_ids"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"response_ids": [5, VOCABULARY], "sampler_logprobs": [0, 0]}, "response_ids"),
        ({"prompt_ids": [-1]}, "prompt_ids"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(
    bench: Bench, columns: dict[str, Any], match: str
) -> None:
    before = hashes(bench.policy)
    with pytest.raises(InputError, match=f"{match} of response 'r003'"):
        bench([*ROWS[:3], row(3, **columns), *ROWS[4:]])
    assert not any((bench.root / "out1").iterdir())
    assert hashes(bench.policy) == before


def test_a_response_that_occurs_twice_is_refused(bench: Bench) -> None:
    with pytest.raises(InputError, match="'r000' occurs more than once"):
        bench([ROWS[0], ROWS[0]])


def test_a_mini_batch_that_is_not_finite_is_left_out_and_counted(bench: Bench) -> None:
    broken = row(3, advantage=1e200)  # finite in float64 only
    rows = [*ROWS[:3], broken, *ROWS[4:]]
    out, metrics = bench(rows, mini_batch=2)
    steps = tables.read(out, "metrics")
    assert sorted(steps["status"]) == ["not_finite", "stepped", "stepped", "stepped"]
    assert (metrics["skipped"], metrics["optimizer_steps"]) == (1, 3)
    assert metrics["total_optimizer_steps"] == steps["optimizer_step"][-1] == 3
    assert all(w.isfinite().all() for w in weights(out).values())
    assert not steps.filter(status="not_finite")["loss"].is_finite().any()


def test_too_many_of_them_end_the_update_and_name_the_responses(bench: Bench) -> None:
    rows = [*ROWS[:3], row(3, advantage=1e200), *ROWS[4:]]
    with pytest.raises(NonFinite, match=r"1 of 2 mini-batches .*responses r003\).*nothing was"):
        bench(rows, mini_batch=4)
    assert not any((bench.root / "out1").iterdir())


def broken_copy(policy: Path, path: Path) -> Path:
    shutil.copytree(policy, path)
    return path


def test_a_policy_with_broken_weights_is_refused(bench: Bench, tmp_path: Path) -> None:
    broken = broken_copy(bench.policy, tmp_path / "nan")
    model = AutoModelForCausalLM.from_pretrained(broken)
    model.lm_head.weight.data[3, 3] = NAN
    model.save_pretrained(broken)
    with pytest.raises(NonFinite, match="not finite"):
        bench(ROWS, policy=broken)
    with pytest.raises(NonFinite, match=r"lm_head\.weight"):
        policies.save(model, dict(model.named_parameters()), bench.out(), like=broken)
    assert not any((bench.root / "out1").iterdir())
    assert not any((bench.root / "out2").iterdir())


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer"),
        ("model.safetensors", "weights"),
    ],
)
def test_an_incomplete_policy_directory_is_refused(
    bench: Bench, tmp_path: Path, lost: str, named: str
) -> None:
    broken = broken_copy(bench.policy, tmp_path / "broken")
    (broken / lost).unlink()
    with pytest.raises(InputError, match=named):
        bench(ROWS, policy=broken)
    with pytest.raises(InputError, match="no directory"):
        bench(ROWS, policy=tmp_path / "nowhere")


def test_weights_that_are_cut_or_lack_a_tensor_are_refused(bench: Bench, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = broken_copy(bench.policy, tmp_path / "broken")
    file = broken / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lack model\.norm\.weight"):
        bench(ROWS, policy=broken)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="does not load"):
        bench(ROWS, policy=broken)


def test_a_foreign_or_broken_optimizer_state_is_refused(bench: Bench, tmp_path: Path) -> None:
    done, _ = bench(ROWS)
    other = build_policy(tmp_path / "other", hidden_size=16)
    shutil.copytree(done / "optimizer", other / "optimizer")
    with pytest.raises(InputError, match="another policy"):
        bench(ROWS, policy=other)
    (other / "optimizer" / ".metadata").write_bytes(b"no state")
    with pytest.raises(InputError, match="not an optimizer state"):
        bench(ROWS, policy=other)


# --- the policy directory and the machine ------------------------------------------------------


def test_the_result_is_a_whole_policy_that_others_can_load(bench: Bench) -> None:
    generation = broken_copy(bench.policy, bench.root / "generation")
    (generation / "generation_config.json").write_text('{"eos_token_id": [2, 1], "top_p": 0.7}')
    out, _ = bench(ROWS, policy=generation)
    names = {file.name for file in generation.iterdir()}
    assert {file.name for file in out.iterdir()} == names | {
        "optimizer",
        "metrics",
        "timings",
        "probe",
    }
    for name in names - {"model.safetensors"}:
        assert (out / name).read_bytes() == (generation / name).read_bytes(), name
    assert all(weight.dtype == torch.float32 for weight in weights(out).values())
    assert policies.digest(out) != policies.digest(generation)
    assert policies.tokenizer(out).chat_template == policies.tokenizer(generation).chat_template


def test_every_end_token_is_known(bench: Bench) -> None:
    path = broken_copy(bench.policy, bench.root / "ends")
    for declared, wanted in (([2, 1], [2, 1, 0]), (2, [2, 0]), (None, [0])):
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
        assert policies.eos_ids(path) == wanted
    (path / "generation_config.json").unlink()
    assert policies.eos_ids(path) == [0]
    assert policies.context_length(path) == 128


def test_a_chat_is_encoded_up_to_the_answer(policy: Path) -> None:
    tokenizer = policies.tokenizer(policy)
    ids = policies.encode(tokenizer, [{"role": "user", "content": "a b"}])
    assert ids == [WORDS.index(word) for word in ("<user>", "a", "b", "<bot>")]


def test_checkpointed_layers_and_packed_sequences_give_the_same_gradient(policy: Path) -> None:
    whole, _ = gradients(policy, ROWS, CPU)
    for machine in (Machine(gradient_checkpointing=True), Machine(packed=True)):
        found, _ = gradients(policy, ROWS, machine)
        assert_near(found, whole, 3e-6)


def test_dropout_is_off_even_with_checkpointed_layers(bench: Bench, tmp_path: Path) -> None:
    dropping = build_policy(tmp_path / "dropping", attention_dropout=0.5)
    whole, _ = gradients(bench.policy, ROWS, CPU)
    found, _ = gradients(dropping, ROWS, Machine(gradient_checkpointing=True))
    assert_near(found, whole, 1e-6)
    out, _ = bench(ROWS, policy=dropping, machine=Machine(gradient_checkpointing=True))
    assert json.loads((out / "config.json").read_text())["attention_dropout"] == 0.5


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(bench: Bench) -> None:
    machine = Machine(dtype="bfloat16")
    exact, _ = gradients(bench.policy, ROWS, CPU)
    found, _ = gradients(bench.policy, ROWS, machine)
    assert_near(found, exact, 0.1)
    out, metrics = bench(faithful(bench.policy, ROWS), machine=machine)
    assert 1e-5 < metrics["gap_mean"] < 0.05
    assert all(weight.dtype == torch.float32 for weight in weights(out).values())


def test_the_policy_holds_what_its_own_weights_compute(bench: Bench) -> None:
    out, _ = bench([r | {"temperature": 0.7} for r in ROWS], mini_batch=8)
    probe = policies.probe(out)
    assert probe is not None and probe["probe_id"].to_list() == [r["response_id"] for r in ROWS]
    for found in probe.iter_rows(named=True):
        wanted = logprobs_alone(out, found | {"temperature": 1.0}).tolist()
        assert found["logprobs"] == pytest.approx(wanted, abs=1e-5)


# --- several processes -------------------------------------------------------------------------

TWO = Machine(nproc=2, micro_batch_tokens=24)


def assert_same_policy(found: Path, wanted: Path) -> None:
    ours, theirs = weights(found), weights(wanted)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_two_processes_end_where_one_does_and_either_goes_on_from_there(bench: Bench) -> None:
    settings = {"mini_batch": 5, "lr": 3e-4, "record_tokens": True, "aggregation": "prompt-mean"}
    rows = faithful(bench.policy, [row(i) for i in range(9)])
    (one, alone), (two, shared) = (bench(rows, machine=m, **settings) for m in (CPU, TWO))
    assert_same_policy(two, one)
    assert shared == pytest.approx(alone, rel=1e-4, abs=1e-6, nan_ok=True)  # nothing is stale
    for table_name in ("metrics", "tokens"):
        key = tables.SCHEMAS[table_name].names[0]
        ours, theirs = (tables.read(out, table_name)[key].to_list() for out in (two, one))
        assert ours == theirs
    third, metrics = bench(rows, policy=two, **settings)  # one process goes on from two
    assert metrics["total_optimizer_steps"] == 4
    assert_same_policy(third, bench(rows, policy=one, **settings)[0])


@pytest.mark.slow
def test_two_processes_train_adapters_against_a_reference(bench: Bench, tmp_path: Path) -> None:
    settings = {"lora_rank": 2, "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.01, "lr": 3e-4}
    reference = build_policy(tmp_path / "reference", initializer_range=0.1)
    one, two = (
        bench(ROWS, machine=machine, reference=reference, **settings)[0]
        for machine in (CPU, Machine(nproc=2, gradient_checkpointing=True))
    )
    assert_same_policy(two, one)
    assert (two / "lora" / "base" / "model.safetensors").exists()
