"""What other settings of dynamic sampling would have cost: a run's loop again, without a GPU.

The groups that a run recorded stand for its prompts. Each time that a simulated selection asks a
prompt, its recorded group nearest in time is drawn from: n of its responses, without replacement
(with, if n is larger than what was recorded). A prompt that was never asked is represented by
another one, of the same meta if there is one. Selection, filter and the sizes of rounds are the
real ones; nothing trains, so the pass rates are those of the recorded run, whatever is selected.
A run that selected by `shuffle` is the fairest record: an adaptive one has seen few of the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import polars as pl

from pipeline.config import RunConfig, combinations, parse
from pipeline.loop import CONFIG, round_size, step_name
from stages import beliefs, filter, select, tables
from stages.errors import InputError

STAGES = ("select.", "filter.", "rollout.n", "schedule.steps", "schedule.max_rounds")
NOWHERE = Path("the simulated prompts")


class Sampled(NamedTuple):
    """What one group of responses came to: a value per response."""

    acc: np.ndarray
    metric: np.ndarray
    tokens: np.ndarray


class Population(Protocol):
    """Prompts, and what a policy would answer."""

    prompts: pl.DataFrame  # prompt_id, meta; by prompt_id

    def sample(self, prompt_id: str, step: int, n: int, draw: np.random.Generator) -> Sampled: ...


@dataclass(frozen=True)
class Outcome:
    """The costs of one simulated run; of all its steps."""

    steps: int
    kept: int  # groups that were trained
    tokens: float  # generated
    groups: int  # generated
    wasted: int  # informative groups that were generated and never trained
    waiting: int  # those that still waited when the run ended
    rounds: int
    age: float  # mean, of the trained groups
    short: int  # steps without a full batch
    prompts: int  # different ones that were trained

    def row(self) -> dict[str, float]:
        """The costs as they are compared."""
        return {
            "kept_groups": self.kept,
            "tokens_per_kept": self.tokens / max(self.kept, 1),
            "asked_per_kept": self.groups / max(self.kept, 1),
            "wasted": self.wasted,
            "rounds_per_step": self.rounds / max(self.steps, 1),
            "age": self.age,
            "short_steps": self.short,
            "prompts": self.prompts,
        }


class Recorded:
    """The groups of a run, response by response."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        self.prompts = tables.read_prompts(run / "prompts").sort("prompt_id")
        responses = _responses(run, config)
        self.groups: dict[str, list[tuple[int, Sampled]]] = {}
        for (prompt_id, _, step), rows in responses.group_by(
            "prompt_id", "group_id", "step", maintain_order=True
        ):
            values = (rows[name].to_numpy() for name in Sampled._fields)
            self.groups.setdefault(str(prompt_id), []).append((int(step), Sampled(*values)))
        self.stand_ins = self._stand_ins(config.seed)

    def _stand_ins(self, seed: int) -> dict[str, str]:
        """Who represents whom of those that were never asked."""
        draw = np.random.default_rng(seed)
        metas = dict(self.prompts.select("prompt_id", "meta").iter_rows())
        asked = sorted(self.groups)
        of_meta: dict[str | None, list[str]] = {}
        for prompt_id in asked:
            of_meta.setdefault(metas.get(prompt_id), []).append(prompt_id)
        return {
            prompt_id: str(draw.choice(of_meta.get(meta, asked)))
            for prompt_id, meta in metas.items()
            if prompt_id not in self.groups
        }

    def sample(self, prompt_id: str, step: int, n: int, draw: np.random.Generator) -> Sampled:
        """n responses of the prompt's group that was sampled nearest to the step."""
        recorded = self.groups[self.stand_ins.get(prompt_id, prompt_id)]
        _, group = min(recorded, key=lambda found: abs(found[0] - step))
        size = len(group.acc)
        chosen = draw.choice(size, n, replace=n > size)
        return Sampled(*(values[chosen] for values in group))


def simulate(
    run: Path, settings: Sequence[str], *, repeats: int = 3
) -> list[dict[str, float | str]]:
    """A row of costs for the run's own settings, and for each combination of the given ones.

    Args:
        settings: Hydra overrides of select, filter, rollout.n and the schedule; several values
            after commas are tried one by one: `select.policy=shuffle,adaptive`.
        repeats: seeds; each row has the means over them, and `±` the standard deviation of the
            tokens per kept group.

    Raises `InputError` for a setting that nothing recorded could tell about.
    """
    text = (run / CONFIG).read_text()
    _check_known(settings)
    given = [[], *(combinations(settings) if settings else [])]
    configs = {" ".join(one) or "as it ran": parse(text, one) for one in given}
    recorded: dict[str, Recorded] = {}
    rows: list[dict[str, float | str]] = []
    for label, config in configs.items():
        metric = config.filter.metric
        if metric not in recorded:
            recorded[metric] = Recorded(run, config)
        found = [simulated(recorded[metric], config, seed=seed).row() for seed in range(repeats)]
        means = {name: float(np.mean([row[name] for row in found])) for name in found[0]}
        spread = float(np.std([row["tokens_per_kept"] for row in found]))
        rows.append({"settings": label, **means, "±": spread})
    return rows


def plot(rows: Sequence[Mapping[str, float | str]], path: Path) -> None:
    """A bar of tokens per kept group for each row, as .svg, .png, .html or .json by its ending.

    Raises `InputError` for another ending.
    """
    import altair as alt

    if path.suffix not in (".svg", ".png", ".html", ".json"):
        raise InputError(f"{path}: expected a name that ends in .svg, .png, .html or .json")
    ends = {"low": alt.datum.tokens_per_kept - alt.datum.spread}
    ends["high"] = alt.datum.tokens_per_kept + alt.datum.spread
    shown = [{**row, "spread": row["±"]} for row in rows]
    base = alt.Chart(alt.Data(values=shown)).encode(y=alt.Y("settings:N", sort=None, title=None))
    tokens = alt.X("tokens_per_kept:Q", title="tokens generated per trained group")
    bars = base.mark_bar().encode(x=tokens)
    spread = base.transform_calculate(**ends).mark_rule(strokeWidth=2, color="black")
    chart = bars + spread.encode(x=alt.X("low:Q", title=""), x2="high:Q")
    chart = chart.properties(width=420).configure_axis(labelLimit=400)
    chart.save(path, inline=True) if path.suffix == ".html" else chart.save(path)


def simulated(population: Population, config: RunConfig, *, seed: int) -> Outcome:
    """Run the loop of `config` over a population."""
    return _Loop(population, config, seed).run()


class _Loop:
    """The loop's state: what is believed, what waits, and the accounts."""

    def __init__(self, population: Population, config: RunConfig, seed: int) -> None:
        self.population, self.config = population, config
        self.draw = np.random.default_rng([config.seed, seed])
        self.select = config.select.model_copy(
            update={"seed": config.select.seed + 1000 * seed, "n": config.rollout.n}
        )
        self.known = beliefs.read(None)
        self.start = 0
        self.waiting = _no_responses()
        self.before: list[dict[str, float]] = []
        self.steps: list[pl.DataFrame] = []  # the groups of each step
        self.tokens, self.rounds = 0.0, 0

    def run(self) -> Outcome:
        for step in range(1, self.config.schedule.steps + 1):
            self.step(step)
        groups = pl.concat(self.steps)
        kept = groups.filter(decision="kept")
        lost = groups.filter(decision="dropped", reason="surplus")
        stale = groups.filter(reason="stale")
        batch = self.config.filter.batch_groups
        return Outcome(
            steps=len(self.steps),
            kept=len(kept),
            tokens=self.tokens,
            groups=int(groups["sampled"].sum()),
            wasted=len(lost) + len(stale),
            waiting=self.waiting["group_id"].n_unique(),
            rounds=self.rounds,
            age=tables.mean(kept["age"]),
            short=sum(len(g.filter(decision="kept")) < batch for g in self.steps),
            prompts=kept["prompt_id"].n_unique(),
        )

    def step(self, step: int) -> None:
        config, sampled = self.config, list[pl.DataFrame]()
        last = self.before
        for number in range(config.schedule.max_rounds):
            lacking = config.filter.batch_groups - (last[0]["carried"] if last else 0)
            if number:
                lacking = last[-1]["short"]
            size = round_size(lacking, last, most=config.select.size)
            selection = self._selected(step, number, size)
            sampled.append(self._answered(selection, step))
            self.rounds += 1
            ends = number + 1 == config.schedule.max_rounds
            carry = ends and config.schedule.on_shortage == "carry"
            settings = config.filter.model_copy(update={"on_short": "carry" if carry else "keep"})
            rows = pl.concat([self.waiting, *sampled]).sort("response_id")
            groups = filter.decide(rows.lazy(), settings)
            counts = filter.counts(groups, settings)
            last = [*self.before, counts]
            self._learn(selection, groups)
            if not counts["short"]:
                break
        carried = groups.filter(decision="carried").select("group_id")
        aged = pl.col("age") + int(counts["kept"] > 0)
        self.waiting = rows.join(carried, on="group_id", how="semi").with_columns(
            age=aged, sampled=pl.lit(False)
        )
        self.before = [counts]
        self.steps.append(groups)

    def _selected(self, step: int, number: int, size: int) -> pl.DataFrame:
        settings = self.select.model_copy(update={"step": step, "round": number, "size": size})
        selection = select.choose(
            self.population.prompts,
            self.known,
            self.start,
            settings,
            source=NOWHERE,
        )
        self.start = int(selection["position"].max()) + 1  # type: ignore[arg-type]
        return selection

    def _learn(self, selection: pl.DataFrame, groups: pl.DataFrame) -> None:
        if self.select.policy != "shuffle":
            self.known = beliefs.updated(
                self.known, selection, groups, half_life=self.select.half_life
            )

    def _answered(self, selection: pl.DataFrame, step: int) -> pl.DataFrame:
        n = self.config.rollout.n
        asked = selection.select("group_id", "prompt_id").rows()
        found = [self.population.sample(prompt, step, n, self.draw) for _, prompt in asked]
        self.tokens += float(sum(group.tokens.sum() for group in found))
        metric = np.concatenate([group.metric for group in found])
        return _no_responses().vstack(
            pl.DataFrame(
                {
                    "response_id": [f"{group}n{i:04d}" for group, _ in asked for i in range(n)],
                    "group_id": [group for group, _ in asked for _ in range(n)],
                    "prompt_id": [prompt for _, prompt in asked for _ in range(n)],
                    "policy": "simulated",
                    "age": 0,
                    "sampled": True,
                    "acc": np.concatenate([group.acc for group in found]),
                    "reward": metric,
                    "metric": metric,
                    "in_order": True,
                },
                schema=_no_responses().schema,
            )
        )


def _no_responses() -> pl.DataFrame:
    return pl.DataFrame(
        schema=dict.fromkeys(("response_id", "group_id", "prompt_id", "policy"), pl.String)
        | {"age": pl.Int32, "sampled": pl.Boolean}
        | dict.fromkeys(("acc", "reward", "metric"), pl.Float32)
        | {"in_order": pl.Boolean}
    )


def _check_known(settings: Sequence[str]) -> None:
    for setting in settings:
        if not setting.lstrip("+").startswith(STAGES):
            raise InputError(
                f"{setting}: nothing recorded tells what it would change; simulate settings of "
                "select, filter, rollout.n, schedule.steps or schedule.max_rounds"
            )


def _responses(run: Path, config: RunConfig) -> pl.DataFrame:
    """prompt_id, group_id, step, and what was found of each response that a run recorded."""
    metric = config.filter.metric
    column = metric if metric == filter.ACC else f"{filter.PART}{metric}"
    found = []
    for number in range(1, config.schedule.steps + 1):
        rounds = sorted((run / step_name(number)).glob("round_*"))
        for place in (p for p in rounds if (p / "filter").is_dir()):
            scores = tables.scan(
                place / "score", "scores", more=[] if metric == filter.ACC else [column]
            ).select("response_id", "acc", metric=column)
            rollouts = tables.scan(place / "rollout", "rollouts").select(
                "response_id", "prompt_id", "group_id", tokens="length"
            )
            joined = rollouts.join(scores, on="response_id", maintain_order="left")
            found.append(joined.with_columns(step=pl.lit(number)))
    if not found:
        raise InputError(f"{run}: no step was recorded; train at least one")
    return tables.collect(pl.concat(found), f"rollouts or scores of {run}")
