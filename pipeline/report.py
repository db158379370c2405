"""A run as one page that needs nothing else: charts, sample groups, settings, artifacts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl

from pipeline import figures, page, samples
from pipeline.config import RunConfig, load, parse
from pipeline.figures import Figure
from pipeline.mirror import CONFIG, ORIGIN, REPORT
from pipeline.read import Place, Run
from pipeline.samples import Wanted
from stages.errors import InputError

SECTIONS = {
    "learning": "Learning",
    "sampling": "Dynamic sampling",
    "update": "The update",
    "cost": "Cost",
}
RESPONSES, HEAD, TAIL = 8, 1200, 400  # of a group; letters of a text at its start and its end
MANY = 2**31
SIGNS = {"right": "✓", "partial": "◐", "wrong": "✗", "no_answer": "∅", "truncated": "✂"}
ENDINGS = {"stop": "ended by itself", "length": "cut at the limit"}
FATES = {"kept": "trained on", "dropped": "dropped", "carried": "waits for the next step"}
DIGEST = 12  # letters of a digest
LOCAL_KEYS = ("run", "data")  # settings that say nothing of what was done
ABSENT = "–"
NUMBERS = (
    *("held_out", "acc", "reward", "length", "truncated", "entropy", "clip_fraction_low"),
    *("clip_fraction_high", "kept", "groups", "grad_norm", "gap_max", "sampled_tokens", "seconds"),
)


@dataclass(frozen=True)
class Response:
    """One response as it is shown; numbers are text, and empty where they are not known."""

    text: str
    sample: int
    verdict: str
    sign: str  # of the verdict
    extracted: str
    ending: str
    length: int
    reward: str
    advantage: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Response":
        """From a row of `samples.find`."""
        verdict = row["verdict"] or "not scored"
        return cls(
            text=legible(row["text"]),
            sample=row["sample"],
            verdict=verdict.replace("_", " "),
            sign=SIGNS.get(verdict, "!"),
            extracted=legible(row["extracted"] or ""),
            ending=ENDINGS.get(row["finish_reason"], row["finish_reason"]),
            length=row["length"],
            reward=_signed(row["reward"]),
            advantage=_signed(row["advantage"]),
        )


@dataclass(frozen=True)
class Group:
    """A group of responses to one prompt, as it is shown."""

    kind: str  # why it was chosen
    name: str
    step: int
    prompt: str
    answer: str
    fate: str
    responses: list[Response]
    count: int  # of all its responses


@dataclass(frozen=True)
class Setting:
    """One key of the configuration; values are text."""

    key: str
    value: str
    default: str

    @property
    def differs(self) -> bool:
        return self.value != self.default


def default_path(run: Run) -> Path:
    """Where the report of a run goes: beside its artifacts; of a run in a store, to where we are.

    For what is here of a store is a mirror, where nobody looks.
    """
    stored = (run.directory / ORIGIN).is_file()
    return Path(f"{run.name}.html") if stored else run.directory / REPORT


def write(run: Run, out: Path) -> int:
    """Write the report of a run, whole or not at all; returns its bytes.

    Raises `InputError` if `out` has no directory to lie in.
    """
    return page.write(render(run), out)


def render(run: Run) -> str:
    """The report of a run as HTML."""
    curves = figures.curves(run)
    shown, steps_per_point = figures.thinned(curves)
    drawn, absent = figures.draw(shown)
    groups, no_groups = exhibits(run)
    settings, unreadable = _settings(run)
    return page.filled(
        "report.html",
        charts={figure.plan.name: figure.spec for figure in drawn},
        datasets={figures.DATA: shown.to_dicts()},
        run=run,
        facts=_facts(run, curves),
        tiles=_tiles(run, curves),
        notes=_notes(run, curves, absent),
        sections=_sections(drawn),
        steps_per_point=steps_per_point,
        numbers=_numbers(curves),
        groups=groups,
        no_groups=no_groups,
        settings=settings,
        unreadable=unreadable,
        artifacts=list(run.artifact_rows()),
        digest=DIGEST,
    )


def _sections(drawn: Sequence[Figure]) -> list[tuple[str, str, list[Figure]]]:
    """Name, title and figures of each section that has any."""
    figures_of = {
        name: [figure for figure in drawn if figure.plan.section == name] for name in SECTIONS
    }
    return [(name, SECTIONS[name], found) for name, found in figures_of.items() if found]


def _facts(run: Run, curves: pl.DataFrame) -> dict[str, str]:
    """What the run is, as pairs of words; what is not known is left out."""
    records = [found.artifact.record for found in run.found]
    tasks = run.prompts.group_by("task").len().sort("len", "task", descending=[True, False])
    devices = {(r["host"], r.get("machine", {}).get("device", "")) for r in records}
    facts = {
        "Steps": str(_last_step(curves) or "none yet"),
        "When": _period(records),
        "Task": ", ".join(f"{name} ({n:,} prompts)" for name, n in tasks.collect().iter_rows()),
        "Model": _model(run),
        "Code": ", ".join(sorted({r["code"] for r in records})),
        "Machine": ", ".join(sorted(f"{host} {device}".strip() for host, device in devices)),
    }
    return {name: value for name, value in facts.items() if value}


def _last_step(curves: pl.DataFrame) -> int:
    """The number of the newest step that has an update, or 0."""
    return int(curves["step"].max() or 0)  # type: ignore[arg-type]


def _period(records: Sequence[Mapping[str, Any]]) -> str:
    """From the first start to the last end, in UTC."""
    starts = [datetime.fromisoformat(r["started"]).astimezone(UTC) for r in records]
    if not starts:
        return ""
    ends = [
        start + timedelta(seconds=r["seconds"]) for start, r in zip(starts, records, strict=True)
    ]
    first, last = min(starts), max(ends)
    day = "" if first.date() == last.date() else f"{last:%Y-%m-%d} "
    return f"{first:%Y-%m-%d %H:%M} to {day}{last:%H:%M} UTC"


def _model(run: Run) -> str:
    """The policy that training starts from."""
    made = run.artifact(Place(0, None, "warmstart", None))
    if made is not None:
        return f"made from scratch, {made.metrics['parameters']:,.0f} parameters"
    config = _config(run)
    return str(config.model.path or "") if isinstance(config, RunConfig) else ""


def _config(run: Run) -> RunConfig | InputError:
    """The run's settings, or why this version cannot read them."""
    try:
        return parse((run.directory / CONFIG).read_text(encoding="utf-8"))
    except InputError as error:
        return error


def _tiles(run: Run, curves: pl.DataFrame) -> list[tuple[str, str, str]]:
    """The run in a few figures: title, figure, and a remark."""

    def known(name: str) -> pl.DataFrame:
        there = name in curves.columns
        return curves.select("step", name).drop_nulls() if there else curves.head(0)

    def total(name: str) -> float:
        return float(known(name)[name].sum()) if len(known(name)) else 0.0

    tiles = []
    held_out = known("held_out")
    if len(held_out):
        best = held_out.sort("held_out", "step", descending=[True, False]).row(0, named=True)
        ends = [f"{value:.1%}" for value in _ends(held_out["held_out"])]
        remark = f"{_measure(run)}; best {best['held_out']:.1%}, after step {best['step']}"
        tiles.append(("Held-out accuracy", " → ".join(ends), remark))
    if len(lengths := known("length")):
        ends = [f"{value:.0f}" for value in _ends(lengths["length"])]
        cut = known("truncated")["truncated"][-1]
        tiles.append(
            ("Response length", " → ".join(ends), f"tokens; {cut:.1%} cut in the last step")
        )
    if groups := total("sampled"):
        share = total("kept") / groups
        tiles.append(("Groups trained on", f"{share:.0%}", f"of {groups:,.0f} groups sampled"))
    if sampled := total("sampled_tokens"):
        remark = f"sampled to train; {_amount(total('tokens'))} trained on"
        tiles.append(("Tokens", _amount(sampled), remark))
    if seconds := sum(found.artifact.record["seconds"] for found in run.found):
        steps = known("seconds").filter(pl.col("step") > 0)
        median = f"; a step {_duration(_median(steps))} in the median" if len(steps) else ""
        tiles.append(("Work", _duration(seconds), f"all stages{median}"))
    return tiles


def _ends(values: pl.Series) -> list[float]:
    """The first value and the last, if that is another one."""
    return values.gather([0, -1] if len(values) > 1 else [0]).to_list()


def _signed(number: float | None) -> str:
    """With its sign, and a minus as wide as the plus; empty where there is none."""
    return "" if number is None else f"{number:+.2f}".replace("-", "\u2212")


def _median(steps: pl.DataFrame) -> float:
    return float(steps["seconds"].median())  # type: ignore[arg-type]


def _measure(run: Run) -> str:
    """Such as `avg@8`."""
    names = [n for f in run.found if f.place.stage == "evaluate" for n in f.artifact.metrics]
    return next((name for name in names if name.startswith("avg@")), "avg@k")


def _amount(number: float) -> str:
    """Such as `12.3 k`, which no line breaks."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}\u00a0{letter}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    """Such as `1.9 s` or `2 h 5 min`, which no line breaks."""
    if seconds < 60:
        return f"{seconds:.3g}\u00a0s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    return text.replace(" ", "\u00a0")


def _notes(run: Run, curves: pl.DataFrame, absent: Sequence[str]) -> list[str]:
    """What is not there, in words."""
    notes = []
    last, config = _last_step(curves), _config(run)
    places = [found.place for found in run.found]
    if not places:
        return ["Nothing has been made yet: the run has settings, and no artifact."]
    if not last:
        notes.append("There is no update yet, so there are no curves of training.")
    elif curves.filter(pl.col("step") > 0).height == 1:
        notes.append("There is one step only: its curves are single points.")
    sampled = [(p.step or 0, p.stage) for p in places if p.round is not None]
    for step in sorted({step for step, _ in sampled if step > last}):
        done = dict.fromkeys(stage for number, stage in sampled if number == step)
        notes.append(f"Step {step} has no update yet; it has {', '.join(done)}.")
    evaluated = [p.step for p in places if p.stage == "evaluate"]
    if not evaluated:
        notes.append("No policy has been evaluated: there is no held-out accuracy.")
    elif isinstance(config, RunConfig) and last == config.schedule.steps not in evaluated:
        notes.append(
            f"Step {last} is the last, but its evaluation is not there: it failed, or has yet "
            "to run."
        )
    if last and absent:
        notes.append(f"Not drawn, for nothing of it is on record: {', '.join(absent)}.")
    return notes


def _numbers(curves: pl.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The most asked-for columns of the curves as text; what is not known is empty."""
    names = [name for name in NUMBERS if name in curves.columns]
    rows = [
        [str(row["step"]), *("" if row[n] is None else f"{row[n]:.4g}" for n in names)]
        for row in curves.iter_rows(named=True)
    ]
    return ["step", *names], rows


def exhibits(run: Run) -> tuple[list[Group], list[str]]:
    """A few groups of the newest step that is scored; and which kinds of groups it has none of."""
    step = run.scores.select(pl.col("step").max()).collect().item()
    if step is None:
        return [], ["No response has been scored yet, so there is none to read."]
    acc, cut = pl.col("acc"), (pl.col("finish_reason") == "length").mean()
    found = (
        run.responses.filter(pl.col("step") == step)
        .group_by("group_id")
        .agg(least=acc.min(), most=acc.max(), mean=acc.mean(), cut=cut)
        .sort("group_id")
        .collect()
    )
    kinds = {
        "partly right": found.filter(pl.col("least") < pl.col("most")).sort(
            (pl.col("mean") - 0.5).abs(), maintain_order=True
        ),
        "all wrong": found.filter(pl.col("most") <= 0),
        "partly cut at the limit": found.filter(pl.col("cut") > 0).sort(
            "cut", descending=True, maintain_order=True
        ),
    }
    groups: list[Group] = []
    missing = []
    for kind, candidates in kinds.items():
        shown = {group.name for group in groups}
        others = [name for name in candidates["group_id"] if name not in shown]
        if others:
            groups.append(_group(run, kind, step, others[0]))
        elif candidates.is_empty():
            missing.append(f"Step {step} has no group that is {kind}.")
    return groups, missing


def _group(run: Run, kind: str, step: int, name: str) -> Group:
    rows, _ = samples.find(run, Wanted(step=step, group=name), limit=MANY)
    rows = rows.sort("sample")
    first = rows.row(0, named=True)
    reason = (first["reason"] or "").replace("_", " ")
    fate = FATES.get(first["decision"], "not decided yet") + (f": {reason}" if reason else "")
    return Group(
        kind=kind,
        name=name,
        step=step,
        prompt=legible(first["prompt"] or ""),
        answer=legible(first["answer"] or ""),
        fate=fate,
        responses=[Response.of(row) for row in _extremes(rows).iter_rows(named=True)],
        count=len(rows),
    )


def _extremes(rows: pl.DataFrame) -> pl.DataFrame:
    """At most `RESPONSES` of them, the best and the worst, in their order."""
    if len(rows) <= RESPONSES:
        return rows
    ranked = rows.sort("reward", "sample", descending=[True, False], nulls_last=True)
    half = RESPONSES // 2
    return pl.concat([ranked.head(half), ranked.tail(RESPONSES - half)]).sort("sample")


def legible(text: str) -> str:
    """What a person reads of a text: control characters marked, and a long middle left out."""
    left_out = len(text) - HEAD - TAIL
    if left_out > 0:
        text = f"{text[:HEAD]}\n[… {left_out:,} letters left out …]\n{text[-TAIL:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _settings(run: Run) -> tuple[list[Setting], str]:
    """The run's settings beside the defaults, or what is wrong with them."""
    ours = _config(run)
    if isinstance(ours, InputError):
        return [], str(ours)
    mine, default = dict(_flat(ours)), dict(_flat(load()))
    keys = [*mine, *(key for key in default if key not in mine)]
    return [
        Setting(key, mine.get(key, ABSENT), default.get(key, ABSENT))
        for key in keys
        if key not in LOCAL_KEYS
    ], ""


def _flat(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as text."""

    def walk(prefix: str, value: object) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else str(key), item)
        else:
            yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    yield from walk("", config.model_dump(mode="json"))
