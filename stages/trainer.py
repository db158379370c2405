"""How a policy is trained on a batch: mini-batches, their gradients, and the optimizer's steps.

Legend: B responses, N tokens of theirs end to end (see `stages.dapo`). A mini-batch is what one
optimizer step sees; its micro-batches are what one forward pass sees, dealt out to the ranks.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from stages import adapter, dapo, ranks, speed
from stages import policy as policies
from stages.errors import InputError
from stages.responses import Response, flat, micro_batches, rows_of
from stages.settings import Machine, Settings
from stages.statistics import Micro, Part, described, summarised

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Config(Settings):
    # the loss
    objective: dapo.Objective = "clip"
    eps_low: float = Field(0.2, ge=0, le=1)  # ε_low; 1: no lower clip
    eps_high: float = Field(0.28, ge=0)  # ε_high
    dual_clip: float | None = Field(None, gt=1)  # c
    aggregation: dapo.Aggregation = "token-mean"
    divisor: float | None = Field(None, gt=0)  # of seq-mean-token-sum-norm, tokens
    mask_truncated: bool = False  # overlong filtering: cut responses count nowhere in the loss
    kl: Literal["off"] | dapo.Divergence = "off"  # to the reference, the first policy of the run
    kl_coef: float = Field(1e-3, gt=0)
    entropy_coef: float = Field(0.0, ge=0)  # of a bonus; 0: none
    # truncated importance sampling, min(π_old / π_sampler, cap), and what it drops altogether
    tis: Literal["off"] | dapo.Sampled = "off"
    tis_cap: float = Field(2.0, gt=0)
    tis_drop_outside: tuple[float, float] | None = None  # [low, high]
    max_gap: float | None = Field(None, gt=0)  # of mean |sampler - old log-prob|, fresh responses
    # the optimizer steps
    mini_batch: int = Field(512, ge=1)  # responses per optimizer step, at most
    epochs: int = Field(1, ge=1)  # passes over the batch
    max_grad_norm: float = Field(1.0, gt=0)
    max_skipped: float = Field(0.25, ge=0, le=1)  # share of steps that a NaN or inf may cost
    # AdamW; all parameters decay, as in the paper's code
    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: int = Field(0, ge=0)  # optimizer steps over the whole run; the first has lr > 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    total_steps: int | None = Field(None, ge=1)  # optimizer steps until linear, cosine reach 0
    # low-rank adapters in all linear layers but the head; None: every weight is trained
    lora_rank: int | None = Field(None, ge=1)
    lora_alpha: float = Field(32.0, gt=0)
    record_tokens: bool = False  # write `tokens`: every token's ratio, clips and weight
    seed: int = 0

    @model_validator(mode="after")
    def _combinations(self) -> "Config":
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.divisor is not None):
            raise ValueError(
                "divisor (tokens, for example the longest response) belongs to "
                "aggregation=seq-mean-token-sum-norm: give both or neither"
            )
        if (self.schedule == "constant") != (self.total_steps is None):
            raise ValueError(
                "total_steps belongs to schedule=linear and schedule=cosine: give both or neither"
            )
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps {self.total_steps} must be above warmup_steps {self.warmup_steps}"
            )
        if self.objective == "cispo" and self.dual_clip is not None:
            raise ValueError("dual_clip does nothing under objective=cispo: set it to null")
        if self.tis_drop_outside is not None:
            low, high = self.tis_drop_outside
            if self.tis == "off" or not 0 <= low < high:
                raise ValueError(
                    f"tis_drop_outside needs tis=token or tis=sequence, and 0 <= low < high, "
                    f"got tis={self.tis} and [{low}, {high}]"
                )
        return self


@dataclass(eq=False)
class MiniBatch:
    """The responses of one optimizer step, and this rank's share of them as micro-batches."""

    responses: list[Response]
    micros: list[Micro]
    weights: dict[str, float] = field(default_factory=dict)  # of each token, by response_id

    def weigh(self, config: Config) -> int:
        """Set the weights of the whole mini-batch; returns how many tokens count in it.

        Every rank knows all lengths, so that a sum over the ranks needs no message.
        """
        import torch

        tokens = torch.stack([r.counts.sum() for r in self.responses])
        _, prompts = torch.unique(
            torch.tensor([r.group for r in self.responses]), return_inverse=True
        )
        weights = dapo.token_weights(
            tokens, prompts, aggregation=config.aggregation, divisor=config.divisor
        )
        ids = (r.response_id for r in self.responses)
        self.weights = dict(zip(ids, weights.tolist(), strict=True))
        return int(tokens.sum())


class Trainer:
    """A policy and its AdamW, and the count of optimizer steps since the run began."""

    def __init__(
        self,
        scorer: "Any",
        *,
        config: Config,
        machine: Machine,
        done: int = 0,
        moments: "dict[str, dict[str, Tensor]] | None" = None,
    ) -> None:
        import torch

        self.scorer, self.config, self.machine, self.done = scorer, config, machine, done
        self.model: PreTrainedModel = scorer.model
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for name, pair in (moments or {}).items():
            step = torch.tensor(float(done), device=self.parameters[name].device)
            self.optimizer.state[self.parameters[name]] = {"step": step, **pair}
        self.blamed: list[str] = []  # the responses that the last gradient failed on
        self.skipped: list[str] = []  # why, a mini-batch each
        self.token_records: list[dict[str, Any]] = []

    @classmethod
    def of(cls, policy: Path, *, config: Config, machine: Machine) -> Self:
        """The policy and its optimizer's state, loaded and sharded as the machine says."""
        import torch

        from stages import state

        torch.use_deterministic_algorithms(
            machine.deterministic and machine.device == "cuda", warn_only=True
        )
        scorer = scorer_of(policy, config=config, machine=machine)
        trainable = {n: p for n, p in scorer.model.named_parameters() if p.requires_grad}
        moments, counters = state.load(policy, trainable)
        done = counters.get("optimizer_steps", 0)
        return cls(scorer, config=config, machine=machine, done=done, moments=moments)

    def save(self, out: Path, *, like: Path) -> None:
        """Write the policy that others load, and the state that the next update goes on from.

        Raises `NonFinite`, before anything is written, if a weight is not a finite number.
        """
        from stages import state

        # of the scorer, the root of what is sharded: a forward pass may leave its own part whole
        whole = ranks.full_weights(self.scorer)
        if whole is not None:
            weights = {name.removeprefix("model."): weight for name, weight in whole.items()}
            adapter.save(self.model, weights, out, like=like)
        moments = {
            name: {kind: self.optimizer.state[p][kind] for kind in ("exp_avg", "exp_avg_sq")}
            for name, p in self.parameters.items()
            if p in self.optimizer.state  # a parameter that is never used gets no gradient
        }
        state.save(out, moments, {"optimizer_steps": self.done})

    def logprobs(self, responses: list[Response]) -> "list[Tensor]":
        """Of each response [T], under the weights as they are; on every rank."""
        return scored(self.scorer, self.dealt(responses), responses)

    def mini_batches(self, responses: Sequence[Response]) -> list[MiniBatch]:
        """One epoch: shuffled by seed and optimizer step, in equal parts of `mini_batch` at most.

        Equal, since a small remainder would be a noisy step at the full learning rate.
        """
        order = list(responses)
        random.Random(f"{self.config.seed}/{self.done}").shuffle(order)
        n = math.ceil(len(order) / self.config.mini_batch)
        parts = [order[i * len(order) // n : (i + 1) * len(order) // n] for i in range(n)]
        return [MiniBatch(part, self.dealt(part)) for part in parts]

    def dealt(self, responses: list[Response]) -> list[Micro]:
        """This rank's micro-batches: as many on every rank, for their collectives must meet."""
        size, rank = ranks.size(), ranks.rank()
        budget = min(self.machine.micro_batch_tokens, math.ceil(sum(map(len, responses)) / size))
        if size == 1:
            budget = self.machine.micro_batch_tokens
        parts = list(micro_batches(responses, budget=budget, packed=self.machine.packed))
        shortest = min(responses, key=len)
        fillers = [Micro([shortest], filler=True)] * (-len(parts) % size)
        return [*(Micro(part, filler=False) for part in parts), *fillers][rank::size]

    def recompute_old(self, mini_batches: list[MiniBatch], reference: "Any" = None) -> None:
        """Set the responses' log-probs under the policy as it is, and under `reference`, a scorer.

        In the very micro-batches that are trained on first, so that the first ratio is exactly 1.
        From the old log-probs follow the importance weights.
        """
        responses = [r for mini_batch in mini_batches for r in mini_batch.responses]
        micros = [micro for mini_batch in mini_batches for micro in mini_batch.micros]
        for scorer, name in ((self.scorer, "old_logprobs"), (reference, "reference_logprobs")):
            if scorer is not None:
                logprobs = scored(scorer, micros, responses)
                for response, values in zip(responses, logprobs, strict=True):
                    setattr(response, name, values)
        self.weigh_importance(responses)

    def weigh_importance(self, responses: list[Response]) -> None:
        """Set the weights between sampler and trainer, and which tokens they drop."""
        import torch

        config = self.config
        gaps = flat([r.old_logprobs - r.sampler_logprobs for r in responses])
        importance, counts = torch.ones_like(gaps), torch.ones_like(gaps, dtype=torch.bool)
        if config.tis != "off":
            importance, counts = dapo.importance_weights(
                gaps,
                rows_of(responses),
                of=config.tis,
                cap=config.tis_cap,
                drop_outside=config.tis_drop_outside,
            )
        lengths = [len(r.response_ids) for r in responses]
        for response, weights, counted in zip(
            responses, importance.split(lengths), counts.split(lengths), strict=True
        ):
            response.importance, response.counts = weights, counted

    def step(self, mini_batch: MiniBatch) -> dict[str, Any]:
        """One optimizer step on one mini-batch; its row of `metrics` and of `timings`.

        None is made if no token counts, or if loss or gradient norm is not a finite number: the
        row's `status` says so, and `skipped` names the responses to blame.
        """
        with speed.measured(self.machine, self.model) as clock:
            row = self.gradient(mini_batch)
            finite = math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
            row["status"] = (
                "no_tokens" if not row["tokens"] else "stepped" if finite else "not_finite"
            )
            row["lr"] = learning_rate(self.config, self.done)
            if row["status"] == "stepped":
                self.optimizer.param_groups[0]["lr"] = row["lr"]
                self.optimizer.step()
                self.done += 1
        if row["status"] == "not_finite":
            self.skipped.append(
                f"loss {row['loss']:.3g}, gradient norm {row['grad_norm']:.3g}, "
                f"responses {', '.join(self.blamed)}"
            )
        return row | {"optimizer_step": self.done} | clock.row(mini_batch.responses)

    def gradient(self, mini_batch: MiniBatch) -> dict[str, Any]:
        """Leave the mini-batch's gradient, clipped, in the parameters; its loss and statistics."""
        import torch

        counted = mini_batch.weigh(self.config)
        self.optimizer.zero_grad(set_to_none=True)
        parts = [self.backward(micro, mini_batch) for micro in mini_batch.micros]
        norm: Any = torch.nn.utils.clip_grad_norm_(
            self.parameters.values(), self.config.max_grad_norm
        )
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # over all shards
        row = summarised(parts, cap=self.config.tis_cap)
        if self.config.record_tokens:
            self.token_records += [r for part in parts for r in part.record(self.done + 1)]
        if not (math.isfinite(row["loss"]) and norm.isfinite()):
            named = [name for part in parts for name in part.blamed()]
            everybody = [r.response_id for r in mini_batch.responses]
            self.blamed = [name for each in ranks.gather(named) for name in each] or everybody
        return row | {
            "grad_norm": norm.item(),
            "sequences": len(mini_batch.responses),
            "tokens": counted,
            **described(mini_batch.responses),
        }

    def backward(self, micro: Micro, mini_batch: MiniBatch) -> Part:
        """Add the gradient of one micro-batch's share of the loss; what its tokens went through."""
        import torch

        tokens = self.losses(micro.responses)
        each = [mini_batch.weights[r.response_id] for r in micro.responses]
        weights = torch.tensor(each, device=tokens["loss"].device)[tokens["row"]]
        # not by its weight alone: 0 · inf is no number
        losses = torch.where(tokens["counts"], tokens["loss"], 0.0)
        tokens["weight"] = torch.where(tokens["counts"], weights, 0.0) * tokens["importance"]
        loss = (weights * losses).sum()
        (loss * 0.0 if micro.filler else loss).backward()
        detached = {name: value.detach() for name, value in tokens.items()}
        return Part(micro, loss.detach(), detached)

    def losses(self, responses: list[Response]) -> "dict[str, Tensor]":
        """Every token's loss before its weight, and what it is made of, each [N]:

        l = importance · policy term + kl_coef · divergence from the reference - entropy_coef · H
        """
        import torch

        config = self.config
        new, entropies = self.scorer(responses)
        rows = rows_of(responses).to(new.device)
        advantages = torch.tensor([r.advantage for r in responses], device=new.device)[rows]
        old, counts, importance = (
            flat([getattr(r, name) for r in responses]).to(new.device)
            for name in ("old_logprobs", "counts", "importance")
        )
        policy = dapo.token_losses(
            new,
            old,
            advantages,
            rows,
            eps_low=config.eps_low,
            eps_high=config.eps_high,
            dual_clip=config.dual_clip,
            objective=config.objective,
        )
        tokens = {"row": rows, "counts": counts, "importance": importance}
        tokens |= {"old_logprob": old, "new_logprob": new, "entropy": entropies}
        tokens |= {name: value for name, value in policy._asdict().items() if name != "losses"}
        tokens["loss"] = importance * policy.losses
        if config.kl != "off":
            reference = flat([r.reference_logprobs for r in responses]).to(new.device)
            tokens["kl_reference"] = dapo.divergence(new, reference, config.kl)
            tokens["loss"] = tokens["loss"] + config.kl_coef * tokens["kl_reference"]
        if config.entropy_coef:
            tokens["loss"] = tokens["loss"] - config.entropy_coef * entropies
        return tokens


def scorer_of(policy: Path, *, config: Config, machine: Machine, frozen: bool = False) -> "Any":
    """The policy as a `Scorer`, sharded over the ranks; with its adapters, unless `frozen`."""
    from stages.logprobs import Scorer

    def load() -> "PreTrainedModel":
        device = machine.device if ranks.size() == 1 else "cpu"  # else each rank takes its shard
        weights = policy if frozen else adapter.base(policy)
        model = policies.load_model(weights, device=device, attention=machine.attention)
        if scaled := policies.scaled_logits(model.config):
            raise InputError(f"{policy}: models with {scaled} are not supported")
        if frozen:
            return model.requires_grad_(False)
        return adapter.attached(model, policy, rank=config.lora_rank, alpha=config.lora_alpha)

    def wrap(model: "PreTrainedModel") -> Scorer:
        if machine.gradient_checkpointing and not frozen:
            _checkpoint(model)
        scorer = Scorer(model, bfloat16=machine.dtype == "bfloat16", packed=machine.packed)
        if machine.compile:
            scorer.compile(dynamic=True)
        return scorer

    return ranks.sharded(load, wrap, machine)


def scored(scorer: "Any", micros: list[Micro], responses: list[Response]) -> "list[Tensor]":
    """Log-probs [T] of every response under `scorer`, whichever rank computed them, on the CPU."""
    import torch

    found: dict[str, Tensor] = {}
    for micro in micros:
        with torch.no_grad():
            logprobs = scorer(micro.responses)[0].cpu()
        if not micro.filler:
            parts = logprobs.split([len(r.response_ids) for r in micro.responses])
            ids = (r.response_id for r in micro.responses)
            found |= dict(zip(ids, parts, strict=True))
    zeros = (torch.zeros(len(r.response_ids)) for r in responses)
    mine = [found.get(r.response_id, zero) for r, zero in zip(responses, zeros, strict=True)]
    return list(ranks.total(flat(mine)).split([len(part) for part in mine]))


def learning_rate(config: Config, done: int) -> float:
    """Of the optimizer step that follows `done` steps: linear warm-up, then the schedule."""
    if done < config.warmup_steps:
        return config.lr * (done + 1) / config.warmup_steps
    if config.total_steps is None:
        return config.lr
    left = (config.total_steps - done) / (config.total_steps - config.warmup_steps)
    if config.schedule == "cosine":
        return config.lr * (1 - math.cos(math.pi * min(max(left, 0.0), 1.0))) / 2
    return config.lr * max(0.0, left)


def check_schedule(config: Config, *, done: int, ahead: int) -> None:
    """Refuse optimizer steps at learning rate 0: they would do nothing, and look like training."""
    if config.total_steps is not None and done + ahead > config.total_steps:
        raise InputError(
            f"optimizer steps {done + 1} to {done + ahead} go beyond total_steps "
            f"{config.total_steps}, where the learning rate is 0: raise total_steps"
        )


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
