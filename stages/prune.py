"""Prune a policy: zero the weights that contribute least, as many as its accuracy bears.

A ladder of ratios is evaluated on the same prompts and random numbers as the unpruned policy, and
the largest ratio whose loss stays within a bound is published. It has nothing to do with the clip
of the loss, and no training step is part of it.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

import numpy as np
import polars as pl
from pydantic import Field, model_validator

from stages import bootstrap, engines, measures, probe, tables, verify
from stages import policy as policies
from stages.bootstrap import Floats
from stages.errors import InputError
from stages.measures import Measure
from stages.progress import report
from stages.responses import Response
from stages.sampling import Sampled, Sampling, sample
from stages.settings import Machine
from stages.shards import explained

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from stages.pruning import Layers

CHOSEN, CANDIDATE = "chosen", "candidate"  # policies within `out` while the ladder is climbed
LOWER_IS_BETTER = ("truncated", "length", "length_stopped")
Ratio = Annotated[float, Field(gt=0, lt=1)]


class Config(Sampling):
    """What is cut, and how the policies are sampled: as in evaluate, where the words are the same.

    `ratios` are shares of all weights in the linear layers of the blocks. With 2:4, whole layers
    are cut by half while the share allows it, so that 0.5 is all of them.
    """

    method: Literal["magnitude", "wanda"] = "magnitude"
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    ratios: tuple[Ratio, ...] = Field((0.05, 0.1, 0.15, 0.2), min_length=1)
    max_loss: float = Field(0.05, ge=0, lt=1)  # of the metric, relative to the unpruned policy's
    metric: str | None = None  # of those of evaluate; None: avg@n
    calibration: int = Field(128, ge=1)  # rollouts that wanda measures activations on, at most
    tasks: verify.Tasks = verify.Tasks()
    resamples: int = Field(1000, ge=100)  # of the prompts, for the interval of a loss
    level: float = Field(0.95, gt=0, lt=1)  # of the interval

    @model_validator(mode="after")
    def _can_be_climbed(self) -> Self:
        if list(self.ratios) != sorted(set(self.ratios)):
            raise ValueError(f"ratios must rise, got {list(self.ratios)}")
        if self.pattern == "2:4" and self.ratios[-1] > 0.5:
            raise ValueError(f"ratios: 2:4 cuts half of all weights at most, got {self.ratios[-1]}")
        if self.engine == "endpoint":
            raise ValueError("engine: an endpoint serves a policy of its own; take vllm or hf")
        known = [name for name in measures.names(self.n, self.ks) if name not in LOWER_IS_BETTER]
        if self.measure not in known:
            raise ValueError(f"metric: there is no '{self.measure}' among {', '.join(known)}")
        return self

    @property
    def measure(self) -> str:
        """The metric's name."""
        return self.metric or f"avg@{self.n}"

    @property
    def ks(self) -> list[int]:
        """Of pass@k and maj@k."""
        return measures.default_ks(self.n)


def run(
    *,
    policy: Path,
    prompts: Path,
    rollouts: Path | None = None,
    out: Path,
    config: Config,
    machine: Machine,
    partial: Path | None = None,
) -> dict[str, float]:
    """Write the pruned policy to `out`, with `ladder` (a row per ratio), `layers` and the samples.

    If no ratio is within the bound, it is the unpruned policy, byte for byte: `ratio` is 0.

    Args:
        rollouts: responses that wanda measures the activations on; of any policy with the same
            tokens.
        partial: a directory that keeps finished prompts if this fails, for the next attempt.

    Raises `InputError` before anything is sampled if rollouts are lacking or the pattern does not
    fit the model; and if the unpruned policy has nothing to lose.
    """
    asked = _asked(prompts, config)
    pruner = Pruner.of(policy, rollouts, config=config, machine=machine)
    with verify.Judges(config.tasks, workers=machine.checkers) as judges:
        exam = Exam(asked, judges=judges, config=config, machine=machine, partial=partial)
        unpruned = exam.sat(policy)
        _check_something_to_lose(unpruned, policy, prompts)
        rungs = [Rung(0.0, unpruned, Loss(0.0, None, None), [])]
        for ratio in config.ratios:
            layers = pruner.write(out / CANDIDATE, ratio, probes=_probes(unpruned.rows))
            sat = exam.sat(out / CANDIDATE)
            rungs.append(Rung(ratio, sat, lost(unpruned.measure, sat.measure, config), layers))
            _keep_or_drop(out, keep=rungs[-1].loss.value <= config.max_loss)
            report(len(rungs) - 1, len(config.ratios), f"ratio {ratio:g}, {rungs[-1].loss}")
    within = [rung for rung in rungs if rung.loss.value <= config.max_loss]
    chosen = within[-1]
    with explained(out):
        if chosen is rungs[0]:
            pruner.copy(out, probes=_probes(unpruned.rows))
        else:
            _lift(out / CHOSEN, out)
        _write(out, rungs, chosen, config)
    return {
        "ratio": chosen.ratio,
        "reached": chosen.reached,
        "loss": chosen.loss.value,
        config.measure: chosen.sat.value,
        f"unpruned/{config.measure}": unpruned.value,
        "rungs": len(config.ratios),
        "within": len(within) - 1,
        "prunable": pruner.prunable,
        "skipped": len(unpruned.found.skipped),
        "tokens": sum(int(rung.sat.rows["length"].sum()) for rung in rungs),
        "probe_gap_max": max(rung.sat.found.metrics.get("probe_gap_max", 0.0) for rung in rungs),
    }


def _asked(prompts: Path, config: Config) -> pl.DataFrame:
    """The prompts; their ids and seeds are those that evaluate gives its held-out ones."""
    asked = tables.read_prompts(prompts).sort("prompt_id").with_columns(group_id="prompt_id")
    task = measures.OF_TASK.get(config.measure)
    if task is not None and task not in asked["task"]:
        raise InputError(f"metric={config.measure} is of task {task}, and no prompt has it")
    return asked


@dataclass(frozen=True)
class Pruner:
    """A policy whose weights can be scored; each rung starts from the unpruned ones again.

    `prunable`: the share of its parameters that may be pruned. `norms`: of wanda, by layer.
    """

    policy: Path
    config: Config
    machine: Machine
    prunable: float
    norms: "dict[str, Tensor] | None"

    @classmethod
    def of(cls, policy: Path, rollouts: Path | None, *, config: Config, machine: Machine) -> Self:
        """Raises `InputError` if the model cannot be pruned so, or the rollouts are not its own."""
        import torch

        from stages import pruning

        torch.set_num_threads(machine.threads)
        sequences = _calibration(rollouts, config)
        model = policies.load_model(policy, device="cpu")
        layers = pruning.layers_of(model)
        if config.pattern == "2:4" and (least := pruning.least_ratio(layers)) > config.ratios[0]:
            raise InputError(
                f"ratios: 2:4 takes {least:.3g} of all weights at least, half of the smallest "
                f"layer; {config.ratios[0]:g} is less"
            )
        vocabulary = model.get_input_embeddings().num_embeddings
        if max(map(max, sequences), default=0) >= vocabulary:
            raise InputError(
                f"{rollouts} has a token outside the vocabulary of {policy}, 0 to "
                f"{vocabulary - 1}: it belongs to another policy"
            )
        share = pruning.weights_in(layers) / model.num_parameters()
        norms = pruning.input_norms(_placed(model, machine), sequences) if sequences else None
        return cls(policy, config, machine, prunable=share, norms=norms)

    def write(self, out: Path, ratio: float, *, probes: list[Response]) -> list["Layer"]:
        """The policy pruned by `ratio`, with a probe of its own; what became of each layer."""
        from stages import pruning

        model = policies.load_model(self.policy, device="cpu")
        layers = pruning.layers_of(model)
        cut = pruning.cut_two_of_four if self.config.pattern == "2:4" else pruning.cut_unstructured
        cut(layers, self._scores(layers), ratio)
        out.mkdir()
        with explained(out):
            policies.save(model, dict(model.named_parameters()), out, like=self.policy)
            probe.measure(out, _placed(model, self.machine), probes)
        return [
            Layer(name, layer.weight.numel(), pruning.zeros_in(layer))
            for name, layer in layers.items()
        ]

    def copy(self, out: Path, *, probes: list[Response]) -> None:
        """The unpruned policy, byte for byte; a probe, where it has none."""
        policies.copy(self.policy, out)
        if policies.probe(self.policy) is None:
            model = policies.load_model(self.policy, device="cpu")
            probe.measure(out, _placed(model, self.machine), probes)

    def _scores(self, layers: "Layers") -> "dict[str, Tensor]":
        """How much each weight contributes; weights of other rows compare, or they do not."""
        from stages import pruning

        weights = {name: layer.weight.detach() for name, layer in layers.items()}
        if self.norms is None:
            return {name: pruning.magnitude(weight) for name, weight in weights.items()}
        scores = {n: pruning.wanda(weight, self.norms[n]) for n, weight in weights.items()}
        if self.config.pattern == "2:4":
            return scores
        return {name: pruning.within_rows(each) for name, each in scores.items()}


def _calibration(rollouts: Path | None, config: Config) -> list[list[int]]:
    """Token ids of prompt and response, the first by response_id; none for magnitude."""
    if config.method == "magnitude":
        return []
    if rollouts is None:
        raise InputError(
            "method=wanda measures activations on rollouts: give --rollouts DIR, such as those of "
            "the step that made the policy, or take prune.method=magnitude"
        )
    first = tables.scan(rollouts, "rollouts").sort("response_id").head(config.calibration)
    ids = first.select(pl.concat_list("prompt_ids", "response_ids"))
    found = tables.collect(ids, f"rollouts in {rollouts}").to_series().to_list()
    if not found:
        raise InputError(f"{rollouts} has no rows to measure activations on")
    return found


def _placed(model: "PreTrainedModel", machine: Machine) -> "PreTrainedModel":
    """The model where it computes; the engine makes room where only one of them has it."""
    if machine.engine_between != "stay":
        engines.sleep()
    return model.to(machine.device)


class Sat(NamedTuple):
    """What a policy made of the prompts: `rows` are judged, `measure` is the one that counts."""

    found: Sampled
    rows: pl.DataFrame
    measure: Measure

    @property
    def value(self) -> float:
        """Of the measure; NaN if no prompt counts."""
        counted = self.measure.parts[self.measure.counted]
        return float(self.measure.figure(counted.sum(axis=0))) if len(counted) else float("nan")


@dataclass
class Exam:
    """The prompts that every policy of the ladder is asked."""

    asked: pl.DataFrame
    judges: verify.Judges
    config: Config
    machine: Machine
    partial: Path | None
    taken: int = 0

    def sat(self, policy: Path) -> Sat:
        """The policy's responses, judged and measured."""
        # one directory each: the ids of the responses are the same
        kept = None if self.partial is None else self.partial / f"{self.taken:02d}"
        self.taken += 1
        found = sample(
            self.asked.select("group_id", "prompt_id", "prompt"),
            policy_path=policy,
            config=self.config,
            machine=self.machine,
            partial=kept,
        )
        rows = verify.judged(found.rows, self.asked, self.judges)
        measured = measures.measured(
            rows,
            self.asked.join(rows, on="prompt_id", how="semi", maintain_order="left"),
            n=self.config.n,
            ks=self.config.ks,
            tasks=self.config.tasks,
        )
        (measure,) = (each for each in measured if each.name == self.config.measure)
        return Sat(found, rows, measure)


def _check_something_to_lose(unpruned: Sat, policy: Path, prompts: Path) -> None:
    if not unpruned.value > 0:
        raise InputError(
            f"{policy} has {unpruned.measure.name} {unpruned.value:g} on {prompts}, of which no "
            "share can be lost: ask what it can answer"
        )


class Loss(NamedTuple):
    """The share of the unpruned policy's figure that is lost, with its interval; below 0: a gain.

    The bound decides on `value`. The interval is None where there is one prompt.
    """

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.1%}, {self.high:.1%}]"
        return f"loss {self.value:.1%}{interval}"


def lost(unpruned: Measure, pruned: Measure, config: Config) -> Loss:
    """1 - pruned / unpruned, by the prompts that count in both; resampled in pairs."""
    (pair,) = measures.pairs([unpruned], [pruned])
    rows = np.flatnonzero(pair.counted)
    # rounded: 38 of 40 right are 5 % less, not 5.000000000000004 %
    value = round(float(_share(pair.figure(pair.parts[rows].sum(axis=0)))), measures.DECIMALS)
    resampled = measures.resampled([pair], rows, resamples=config.resamples, seed=config.seed)
    for _, figures in resampled:
        losses = _share(figures[figures[:, 0] > 0])  # a resample without a right answer has none
        low, high = bootstrap.interval(losses, level=config.level)
        return Loss(value, round(low, measures.DECIMALS), round(high, measures.DECIMALS))
    return Loss(value, None, None)


def _share(figures: Floats) -> Floats:
    """[...]: of figures [..., 2], of the unpruned and of the pruned policy."""
    return np.asarray(1 - figures[..., 1] / figures[..., 0])


class Layer(NamedTuple):
    """How many weights a layer has, and how many of them are 0."""

    layer: str
    weights: int
    zeros: int


class Rung(NamedTuple):
    """One ratio of the ladder, what the policy pruned by it did, and its layers; 0: unpruned."""

    ratio: float
    sat: Sat
    loss: Loss
    layers: list[Layer]

    @property
    def reached(self) -> float:
        """The share of the prunable weights that are 0."""
        every = sum(layer.weights for layer in self.layers)
        return sum(layer.zeros for layer in self.layers) / every if every else 0.0


def _probes(rows: pl.DataFrame) -> list[Response]:
    """What the unpruned policy answered first, for every pruned one to be proved by."""
    import torch

    first = rows.sort("response_id").head(probe.SEQUENCES)
    columns = ("response_id", "prompt_ids", "response_ids", "sampler_logprobs")
    responses = []
    for group, (name, *lists) in enumerate(first.select(columns).iter_rows()):
        prompt, response, logprobs = map(torch.tensor, lists)
        responses.append(Response(name, group, prompt, response, logprobs, 0.0, 1.0, True))
    return probe.chosen(responses)


def _keep_or_drop(out: Path, *, keep: bool) -> None:
    """Have the candidate take the place of the one chosen so far, or go."""
    if not keep:
        shutil.rmtree(out / CANDIDATE)
        return
    shutil.rmtree(out / CHOSEN, ignore_errors=True)
    (out / CANDIDATE).rename(out / CHOSEN)


def _lift(inner: Path, out: Path) -> None:
    """Move all that is in `inner` to `out`."""
    for path in inner.iterdir():
        path.rename(out / path.name)
    inner.rmdir()


def _write(out: Path, rungs: list[Rung], chosen: Rung, config: Config) -> None:
    ladder = [
        {
            "method": config.method,
            "pattern": config.pattern,
            "ratio": rung.ratio,
            "reached": rung.reached,
            "metric": config.measure,
            "value": rung.sat.value,
            "loss": rung.loss.value,
            "low": rung.loss.low,
            "high": rung.loss.high,
            "within": rung.loss.value <= config.max_loss,
            "chosen": rung is chosen,
        }
        for rung in rungs
    ]
    layers = [{**each._asdict(), "ratio": rung.ratio} for rung in rungs for each in rung.layers]
    samples = [rung.sat.rows.with_columns(ratio=rung.ratio) for rung in rungs]
    tables.write(out, "ladder", pl.DataFrame(ladder, tables.polars_schema("ladder")))
    tables.write(out, "layers", pl.DataFrame(layers, tables.polars_schema("layers")))
    tables.write_all(out, "ladder_samples", samples)
    tables.write(out, "skipped", rungs[0].sat.found.skipped)
