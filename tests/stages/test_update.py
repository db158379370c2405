"""The update stage and the policy directory, on a random Qwen3 model of a few thousand weights."""

import hashlib
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
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stages import logprobs, responses, tables, update
from stages import policy as policies
from stages.errors import EngineMismatch, InputError, NonFinite
from stages.settings import Machine

VECTORS = Path(__file__).parents[1] / "vectors"
WORDS = ["<eos>", "<user>", "<bot>", "he", "llo", "hello", *"abcdefghijklmn"]
VOCABULARY = len(WORDS)  # 20; <eos> is the pad too, on purpose
CPU = Machine()

torch.set_num_threads(1)


# --- builders ----------------------------------------------------------------------------------


def build_policy(path: Path, **settings: Any) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    architecture = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**(architecture | settings)))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"))


def row(name: int, **columns: Any) -> dict[str, Any]:
    """One response of 2 to 9 tokens to a prompt of 1 to 4."""
    rng = random.Random(name)
    ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 9))]
    return {
        "response_id": f"r{name:03d}",
        "group_id": f"g{name // 4}",
        "prompt_id": "p",
        "prompt_ids": [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))],
        "response_ids": ids,
        "sampler_logprobs": [-3.0] * len(ids),
        "temperature": 1.0,
        "finish_reason": "stop",
        "acc": 1.0,
        "reward": 1.0,
        "advantage": rng.uniform(-1, 1),
        "policy": "x",
        "age": 0,
    } | columns


def table(rows: list[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=tables.polars_schema("batch"))


def write(path: Path, rows: list[dict[str, Any]] | pl.DataFrame) -> Path:
    path.mkdir()
    frame = rows if isinstance(rows, pl.DataFrame) else table(rows)
    tables.write(path, "batch", frame)
    return path


class Bench:
    """Runs updates in numbered directories."""

    def __init__(self, root: Path, policy: Path) -> None:
        self.root, self.policy, self.count = root, policy, 0

    def out(self) -> Path:
        self.count += 1
        path = self.root / f"out{self.count}"
        path.mkdir()
        return path

    def __call__(
        self,
        rows: list[dict[str, Any]] | pl.DataFrame,
        *,
        policy: Path | None = None,
        machine: Machine = CPU,
        **config: Any,
    ) -> tuple[Path, dict[str, float]]:
        out = self.out()
        metrics = update.run(
            batch=write(self.root / f"batch{self.count}", rows),
            policy=policy or self.policy,
            out=out,
            config=update.Config(**({"lr": 1e-3, "mini_batch": 4} | config)),
            machine=machine,
        )
        return out, metrics


@pytest.fixture
def bench(tmp_path: Path, policy: Path) -> Bench:
    return Bench(tmp_path, policy)


def weights(path: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path).state_dict())


def hashes(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def logprobs_alone(policy: Path, row: dict[str, Any], *, model: Any = None) -> Tensor:
    """[T] of one row, without padding or batching: the whole model's logits, the plain formula."""
    model = model or AutoModelForCausalLM.from_pretrained(policy)
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    spread = torch.log_softmax(logits.float() / row["temperature"], dim=-1)
    first = len(row["prompt_ids"])
    return spread[first - 1 : -1].gather(-1, ids[0, first:, None])[:, 0]


def faithful(policy: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as an engine that runs this very policy would have recorded them."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        return [
            row | {"sampler_logprobs": logprobs_alone(policy, row, model=model).tolist()}
            for row in rows
        ]


def gradients(
    policy: Path, rows: list[dict[str, Any]], machine: Machine, **config: Any
) -> tuple[dict[str, Tensor], list[int]]:
    """Of one mini-batch of all the rows; and the sizes of its micro-batches."""
    frame = table(rows)
    settings = update.Config(**({"mini_batch": len(rows)} | config))
    model = update.load(policy, frame, machine)
    trainer = update.Trainer(model, 0, {}, config=settings, machine=machine)
    (mini_batch,) = trainer.mini_batches(responses.responses_of(frame))
    trainer.recompute_old([mini_batch])
    count = frame["response_ids"].list.len().sum()
    for micro in mini_batch:
        trainer.backward(micro, denominator=count)
    found = {name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None}
    return found, [len(micro) for micro in mini_batch]


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert (found[name] - one).abs().max() <= relative * one.abs().max(), name


ROWS = [row(i) for i in range(8)]


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
    assert {"model.safetensors", "optimizer.pt", "metrics/part-00000.parquet"} <= found.keys()
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
    assert steps["approx_kl"][0] == 0.0
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


def test_logprobs_are_of_logits_over_temperature() -> None:
    case = json.loads((VECTORS / "temperature.json").read_text())
    logits = torch.tensor([case["logits"]] * 3)
    temperatures = torch.full((3,), case["temperature"])
    found, _ = logprobs.score(torch.nn.Identity(), logits, torch.arange(3), temperatures)
    assert found.tolist() == pytest.approx(case["all_right"], abs=1e-6)


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
    losses = {}
    for shift in (math.log(2), -math.log(1.5), -math.log(8)):
        rows = [
            r | {"sampler_logprobs": [x + shift for x in r["sampler_logprobs"]]} for r in honest
        ]
        losses[shift] = bench(rows, mini_batch=8, tis="token", tis_cap=2.0)[1]["loss"]
    plain = bench(honest, mini_batch=8)[1]["loss"]
    assert [loss / plain for loss in losses.values()] == pytest.approx([0.5, 1.5, 2.0], rel=1e-4)


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
    assert update.learning_rate(config, done=8) == 0.0
    with pytest.raises(InputError, match="raise total_steps"):
        bench(ROWS, policy=second, **settings)


def test_the_warm_up_never_starts_at_zero() -> None:
    config = update.Config(lr=1.0, warmup_steps=4)
    assert [update.learning_rate(config, done) for done in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert update.learning_rate(update.Config(lr=1.0), done=0) == 1.0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"eps_low": 1.0}, "eps_low"),
        ({"mini_batch": 0}, "mini_batch"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "divisor"),
        ({"divisor": 3.0}, "divisor"),
        ({"schedule": "linear"}, "total_steps"),
        ({"total_steps": 5}, "schedule=linear"),
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


def test_a_loss_that_is_not_finite_ends_the_update_with_the_step(bench: Bench) -> None:
    with pytest.raises(NonFinite, match=r"optimizer step [12]: loss .*nothing was saved"):
        bench([*ROWS[:3], row(3, advantage=1e200), *ROWS[4:]])  # finite in float64 only
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
        policies.save(model, bench.out(), like=broken)
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
    shutil.copy(done / "optimizer.pt", other)
    with pytest.raises(InputError, match="another policy"):
        bench(ROWS, policy=other)
    (other / "optimizer.pt").write_bytes(b"no state")
    with pytest.raises(InputError, match="not an optimizer state"):
        bench(ROWS, policy=other)


# --- the policy directory and the machine ------------------------------------------------------


def test_the_result_is_a_whole_policy_that_others_can_load(bench: Bench) -> None:
    generation = broken_copy(bench.policy, bench.root / "generation")
    (generation / "generation_config.json").write_text('{"eos_token_id": [2, 1], "top_p": 0.7}')
    out, _ = bench(ROWS, policy=generation)
    names = {file.name for file in generation.iterdir()}
    assert {file.name for file in out.iterdir()} == names | {"optimizer.pt", "metrics"}
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


def test_logits_in_chunks_and_checkpointed_layers_give_the_same_gradient(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = gradients(policy, ROWS, CPU)
    found, _ = gradients(policy, ROWS, Machine(gradient_checkpointing=True))
    assert_near(found, whole, 1e-6)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 5 * VOCABULARY)
    found, _ = gradients(policy, ROWS, CPU)
    assert_near(found, whole, 1e-6)


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
