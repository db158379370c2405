"""Update: improve the policy with the DAPO loss on one batch, in several optimizer steps.

`old_logprobs` are recomputed here, from the stored token ids, before the first optimizer step;
`sampler_logprobs` come from the engine and serve to measure (and correct) the gap between the two.
Legend: B responses, S tokens of prompt and response, T response tokens, N = Σ T, V vocabulary.
"""

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import polars as pl
from pydantic import Field, model_validator

from stages import dapo, tables
from stages import policy as policies
from stages.errors import EngineMismatch, InputError, NonFinite
from stages.logprobs import padded, token_logprobs
from stages.progress import report
from stages.responses import Response, micro_batches, read, responses_of, trainable
from stages.settings import Machine, Settings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Config(Settings):
    # the loss
    eps_low: float = Field(0.2, ge=0, lt=1)  # ε_low
    eps_high: float = Field(0.28, ge=0)  # ε_high
    dual_clip: float | None = Field(None, gt=1)  # c
    aggregation: dapo.Aggregation = "token-mean"
    divisor: float | None = Field(None, gt=0)  # of seq-mean-token-sum-norm, tokens
    mask_truncated: bool = False  # overlong filtering: cut responses count nowhere in the loss
    tis: Literal["off", "token"] = "off"  # truncated importance sampling, min(π_old/π_sampler, cap)
    tis_cap: float = Field(2.0, gt=0)
    max_gap: float | None = Field(None, gt=0)  # of mean |sampler - old log-prob|, fresh responses
    # the optimizer steps
    mini_batch: int = Field(512, ge=1)  # responses per optimizer step, at most
    epochs: int = Field(1, ge=1)  # passes over the batch
    max_grad_norm: float = Field(1.0, gt=0)
    # AdamW; all parameters decay, as in the paper's code
    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: int = Field(0, ge=0)  # optimizer steps over the whole run; the first has lr > 0
    schedule: Literal["constant", "linear"] = "constant"  # after the warm-up
    total_steps: int | None = Field(None, ge=1)  # optimizer steps until linear reaches 0
    seed: int = 0

    @model_validator(mode="after")
    def _combinations(self) -> "Config":
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.divisor is not None):
            raise ValueError(
                "divisor (tokens, for example the longest response) belongs to "
                "aggregation=seq-mean-token-sum-norm: give both or neither"
            )
        if (self.schedule == "linear") != (self.total_steps is not None):
            raise ValueError("total_steps belongs to schedule=linear: give both or neither")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps {self.total_steps} must be above warmup_steps {self.warmup_steps}"
            )
        return self


def run(
    *, batch: Path, policy: Path, out: Path, config: Config, machine: Machine
) -> dict[str, float]:
    """Write the updated policy directory to `out`, and `metrics`, a row per optimizer step.

    Every row is validated before the model is loaded, and nothing is written before the last
    optimizer step is done. Rows without a reward carry no tokens; if no row carries any, no step
    is made: weights, optimizer state and counters stay as they are, byte for byte.

    Raises `InputError` for bad rows, `EngineMismatch` when the gap exceeds `max_gap`,
    `NonFinite` when a loss, gradient or weight stops being a number.
    """
    policies.check(policy)
    rows = trainable(read(batch), mask_truncated=config.mask_truncated)
    done, moments = policies.load_optimizer(policy)
    if rows.is_empty():
        policies.copy(policy, out)
        tables.write(out, "metrics", pl.DataFrame(schema=tables.polars_schema("metrics")))
        return {"optimizer_steps": 0.0, "total_optimizer_steps": float(done), "tokens": 0.0}

    total = config.epochs * math.ceil(len(rows) / config.mini_batch)
    check_schedule(config, done=done, ahead=total)
    trainer = Trainer(load(policy, rows, machine), done, moments, config=config, machine=machine)
    responses = responses_of(rows)
    first_epoch = trainer.mini_batches(responses)
    trainer.recompute_old(first_epoch)
    gap = measure_gap(responses, config)

    steps = []
    for epoch in range(config.epochs):
        for mini_batch in first_epoch if epoch == 0 else trainer.mini_batches(responses):
            steps.append(trainer.step(mini_batch))
            report(len(steps), total, "optimizer steps")

    policies.save(trainer.model, out, like=policy)
    policies.save_optimizer(out, optimizer_steps=trainer.done, moments=trainer.moments())
    frame = pl.DataFrame(steps)
    tables.write(out, "metrics", frame)
    return summary(frame) | gap


def measure_gap(responses: list[Response], config: Config) -> dict[str, float]:
    """|sampler - old log-prob| over tokens; more than `max_gap` on average stops the run.

    Carried responses come from an older policy: they differ rightly, and are counted apart.
    """
    import torch

    def gaps(fresh: bool) -> "Tensor":
        each = [r.sampler_logprobs - r.old_logprobs for r in responses if r.fresh == fresh]
        return torch.cat([*each, torch.empty(0)]).double().abs()

    fresh, stale = gaps(True), gaps(False)
    mean, largest = (fresh.mean().item(), fresh.max().item()) if len(fresh) else (0.0, 0.0)
    if config.max_gap is not None and not mean <= config.max_gap:
        raise EngineMismatch(
            f"mean |sampler - old log-prob| is {mean:.3g} (max {largest:.3g}) over {len(fresh)} "
            f"tokens, more than max_gap {config.max_gap:.3g}: the engine did not sample from this "
            "policy, or its log-probs are not of the recorded temperature and full vocabulary"
        )
    return {
        "gap_mean": mean,
        "gap_max": largest,
        "stale_gap_mean": stale.mean().item() if len(stale) else 0.0,
    }


def load(policy: Path, rows: pl.DataFrame, machine: Machine) -> "PreTrainedModel":
    """The policy's model, ready to train on `rows`; torch is set up for the machine."""
    import torch

    torch.set_num_threads(machine.threads)
    torch.use_deterministic_algorithms(machine.device == "cuda", warn_only=True)
    model = policies.load_model(policy, machine)
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) not in (None, 1.0):
            raise InputError(f"{policy}: models with {name} are not supported: logits = head(h)")
    vocabulary = model.get_input_embeddings().num_embeddings
    for column in ("prompt_ids", "response_ids"):
        ids = pl.col(column).list
        bad = rows.filter((ids.max() >= vocabulary) | (ids.min() < 0))
        if len(bad):
            raise InputError(
                f"{column} of response '{bad['response_id'][0]}' has a token outside the "
                f"vocabulary of {policy}, 0 to {vocabulary - 1}: it belongs to another policy"
            )
    if machine.gradient_checkpointing:
        _checkpoint(model)
    return model


def _checkpoint(model: "PreTrainedModel") -> None:
    """Trade time for memory. Transformers does so in train mode only: dropout off by hand."""
    import torch

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def learning_rate(config: Config, done: int) -> float:
    """Of the optimizer step that follows `done` steps: linear warm-up, then the schedule."""
    if done < config.warmup_steps:
        return config.lr * (done + 1) / config.warmup_steps
    if config.total_steps is None:
        return config.lr
    left = (config.total_steps - done) / (config.total_steps - config.warmup_steps)
    return config.lr * max(0.0, left)


def check_schedule(config: Config, *, done: int, ahead: int) -> None:
    """Refuse optimizer steps at learning rate 0: they would do nothing, and look like training."""
    if config.total_steps is not None and done + ahead > config.total_steps:
        raise InputError(
            f"optimizer steps {done + 1} to {done + ahead} go beyond total_steps "
            f"{config.total_steps}, where the learning rate is 0: raise total_steps"
        )


class Trainer:
    """Model and AdamW, and the count of optimizer steps since the run began."""

    def __init__(
        self,
        model: "PreTrainedModel",
        done: int,
        moments: "dict[str, dict[str, Tensor]]",
        *,
        config: Config,
        machine: Machine,
    ) -> None:
        import torch

        self.model, self.done, self.config, self.machine = model, done, config, machine
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for name, pair in moments.items():
            parameter = self.parameters.get(name)
            if parameter is None or parameter.shape != pair["exp_avg"].shape:
                raise InputError(
                    f"{policies.OPTIMIZER} knows a {name} that this model has not: it belongs to "
                    "another policy; remove it to start the optimizer afresh"
                )
            state = {kind: moment.to(parameter.device) for kind, moment in pair.items()}
            step = torch.tensor(float(done), device=parameter.device)
            self.optimizer.state[parameter] = {"step": step, **state}

    def moments(self) -> "dict[str, dict[str, Tensor]]":
        state = self.optimizer.state
        return {
            name: {kind: state[parameter][kind] for kind in ("exp_avg", "exp_avg_sq")}
            for name, parameter in self.parameters.items()
            if parameter in state  # a parameter that is never used gets no gradient
        }

    def mini_batches(self, responses: list[Response]) -> list[list[list[Response]]]:
        """One epoch: shuffled by seed and optimizer step, in equal parts of `mini_batch` at most.

        Equal, since a small remainder would be a noisy step at the full learning rate. Each part
        is a list of micro-batches.
        """
        order = list(responses)
        random.Random(f"{self.config.seed}/{self.done}").shuffle(order)
        n = math.ceil(len(order) / self.config.mini_batch)
        parts = [order[i * len(order) // n : (i + 1) * len(order) // n] for i in range(n)]
        budget = self.machine.micro_batch_tokens
        return [list(micro_batches(part, budget=budget)) for part in parts]

    def logprobs(self, micro: list[Response]) -> "tuple[Tensor, Tensor]":
        return token_logprobs(self.model, micro, bfloat16=self.machine.dtype == "bfloat16")

    def recompute_old(self, mini_batches: list[list[list[Response]]]) -> None:
        """Set every response's `old_logprobs`, and from them its `weights`.

        In the very micro-batches that are trained on first, so that the first ratio is exactly 1.
        """
        import torch

        for micro in (micro for mini_batch in mini_batches for micro in mini_batch):
            with torch.no_grad():
                old = self.logprobs(micro)[0].cpu()
            if not old.isfinite().all():
                raise NonFinite("the policy gives log-probs that are not finite: is it broken?")
            parts = torch.split(old, [len(r.response_ids) for r in micro])
            for response, old_logprobs in zip(micro, parts, strict=True):
                response.old_logprobs = old_logprobs
                weights = (old_logprobs - response.sampler_logprobs).exp()
                response.weights = weights.clamp(max=self.config.tis_cap)

    def step(self, mini_batch: list[list[Response]]) -> dict[str, float]:
        """One optimizer step on one mini-batch; its row of `metrics`."""
        import torch

        sequences = sum(len(micro) for micro in mini_batch)
        tokens = sum(len(r.response_ids) for micro in mini_batch for r in micro)
        count = tokens if self.config.aggregation == "token-mean" else sequences
        self.optimizer.zero_grad(set_to_none=True)
        parts = [self.backward(micro, denominator=count) for micro in mini_batch]
        norm = torch.nn.utils.clip_grad_norm_(
            self.parameters.values(), self.config.max_grad_norm
        ).item()
        loss = sum(part["loss"].item() for part in parts)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFinite(
                f"optimizer step {self.done + 1}: loss {loss}, gradient norm {norm}; "
                "nothing was saved, the policy before this update is whole"
            )
        lr = learning_rate(self.config, self.done)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.done += 1
        return {
            "optimizer_step": self.done,
            "loss": loss,
            "entropy": sum(part["entropy_sum"].item() for part in parts) / tokens,
            **dapo.summarise(parts),
            "grad_norm": norm,
            "lr": lr,
            "sequences": sequences,
            "tokens": tokens,
        }

    def backward(self, micro: list[Response], *, denominator: int) -> "dict[str, Tensor]":
        """Add the gradient of one micro-batch's share of the loss; returns its statistics."""
        import torch

        config, device = self.config, self.model.device
        # from lengths, never from ids: the pad may be the end token
        length_B1 = torch.tensor([[len(r.response_ids)] for r in micro], device=device)
        mask_BT = torch.arange(int(length_B1.max()), device=device) < length_B1
        new_N, entropy_N = self.logprobs(micro)
        loss, statistics = dapo.policy_loss(
            padded(new_N, mask_BT),
            padded([r.old_logprobs for r in micro], mask_BT),
            torch.tensor([r.advantage for r in micro], device=device),
            mask_BT,
            eps_low=config.eps_low,
            eps_high=config.eps_high,
            dual_clip=config.dual_clip,
            aggregation=config.aggregation,
            denominator=denominator,
            divisor=config.divisor,
            weights=padded([r.weights for r in micro], mask_BT) if config.tis != "off" else None,
        )
        loss.backward()
        return {**statistics, "loss": loss.detach(), "entropy_sum": entropy_N.sum()}


def summary(steps: pl.DataFrame) -> dict[str, float]:
    """The stage's metrics: means over optimizer steps, but for extremes, counts and the last lr."""
    means = steps.mean().row(0, named=True)
    del means["optimizer_step"]
    return means | {
        "ratio_min": steps["ratio_min"].min(),
        "ratio_max": steps["ratio_max"].max(),
        "lr": steps["lr"][-1],
        "sequences": float(steps["sequences"].sum()),
        "tokens": float(steps["tokens"].sum()),
        "optimizer_steps": float(len(steps)),
        "total_optimizer_steps": float(steps["optimizer_step"][-1]),
    }
