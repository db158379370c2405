"""What an evaluation measures: avg@k, pass@k, maj@k, lengths, corpus BLEU and chrF, macro-F1.

Each measure is a few sums over a prompt's responses and a function from sums over prompts to a
figure; so one bootstrap serves all of them, and a policy can be compared with another.

Legend: P prompts, C columns that are summed; a figure takes sums [..., C] and gives [...].
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stages import bootstrap
from stages.bootstrap import Floats
from stages.checkers import Checker
from stages.checkers.texts import Classification, Translation, forget_texts, golds
from stages.verify import BY_ANSWER, Tasks

ANSWERED = ("right", "partial", "wrong")  # verdicts on an answer that was found
MOST_LABELS = 256  # that a classification may have: more are free text, and no classes
ORDERS = 4  # of BLEU's n-grams
DECIMALS = 9  # the last bits of a product of matrices depend on the number of threads


Figure = Callable[[Floats], Floats]


class Measure(NamedTuple):
    """A figure of a set of prompts, not yet summed; see the file's head."""

    name: str
    parts: Floats  # [P, C]
    figure: Figure
    counted: NDArray[np.bool_]  # [P]: the prompts that it is about
    samples: NDArray[np.int64]  # [P]: how many responses of each
    signature: str | None = None  # how it was computed, in sacrebleu's words


def names(n: int, ks: Sequence[int]) -> list[str]:
    """The measures of n responses to each prompt, whatever its task; those of tasks follow."""
    of_k = [f"{name}@{k}" for name in ("pass", "maj") for k in ks]
    return [f"avg@{n}", *of_k, "truncated", "length", "length_stopped", *OF_TASK]


OF_TASK = {  # measures that only the prompts of one task have
    "bleu": "translation",
    "chrf": "translation",
    "accuracy": "classification",
    "macro_f1": "classification",
}


def default_ks(n: int) -> list[int]:
    """The powers of two up to n, and n."""
    return sorted({n, *(2**i for i in range(n.bit_length()) if 2**i <= n)})


def pass_at_k(n: NDArray[np.int64], c: NDArray[np.int64], k: int) -> Floats:
    """1 - C(n - c, k) / C(n, k) = 1 - ∏_{i=n-c+1}^{n} (1 - k / i), for n ≥ k.

    The probability that k of n responses, of which c are right, hold a right one: unbiased, where
    1 - (1 - c/n)^k is not, and without factorials (Chen et al. 2021, arXiv 2107.03374, Sec. 2.1).
    """
    j = np.arange(max(int(c.max(initial=0)), 1))
    i = np.maximum(n[:, None] - j, 1)
    return np.asarray(1 - np.where(j < c[:, None], 1 - k / i, 1.0).prod(axis=1))


def majority(samples: pl.DataFrame, k: int) -> pl.DataFrame:
    """`prompt_id` and the acc of what most of its first k responses answer; 0 if none answers.

    maj@k (cons@k, self-consistency: Wang et al. 2022, arXiv 2203.11171). Responses are independent
    draws, so that the first k are as good as any k. An answer is the text that the checker
    found: two spellings are two answers. Of answers with equally many votes, the one that was
    given first wins. Prompts of which no response could be scored are left out.
    """
    first = samples.lazy().filter(pl.col("sample") < k).filter(pl.col("acc").is_not_null())
    answer = pl.col("verdict").is_in(ANSWERED) & pl.col("extracted").is_not_null()
    given_first = pl.col("sample").min()
    votes = (
        first.filter(answer)
        .group_by("prompt_id", "extracted")
        .agg(pl.col("acc").sort_by("sample").first(), votes=pl.len(), sample=given_first)
        .group_by("prompt_id")
        .agg(pl.col("acc").sort_by("votes", "sample", descending=[True, False]).first())
    )
    return (
        first.select(pl.col("prompt_id").unique())
        .join(votes, on="prompt_id", how="left")
        .with_columns(pl.col("acc").fill_null(0).cast(pl.Float64))
        .collect()
    )


def bleu(sums: Floats) -> Floats:
    """100 · min(1, e^(1 - r/h)) · (∏ p_i)^(1/4), p_i = matches / n-grams of order i.

    sacrebleu's, with its smoothing `exp`: the i-th order without a match has 2^-i matches. Sums:
    length h of the responses, r of the nearest references, 4 counts of matches, 4 of n-grams.
    """
    h, r, match, total = np.split(sums, [1, 2, 2 + ORDERS], axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        smoothed = np.where(match > 0, match, 0.5 ** np.cumsum(match == 0, axis=-1))
        brevity = np.where(h < r, np.exp(1 - r / h), 1.0)[..., 0]
        score = 100 * brevity * np.exp(np.log(smoothed / total).mean(axis=-1))
    return np.where((match > 0).any(axis=-1) & (total > 0).all(axis=-1), score, 0.0)


def chrf(sums: Floats) -> Floats:
    """100 · (1 + β²) · P · R / (β² · P + R), P and R means over the orders of n-grams, β = 2.

    sacrebleu's chrF2. Sums, for each order: n-grams of the responses, of the references, of both.
    """
    hyp, ref, match = np.moveaxis(sums.reshape(*sums.shape[:-1], -1, 3), -1, 0)
    there = (hyp > 0) & (ref > 0)
    orders = np.maximum(there.sum(axis=-1), 1)
    precision = (np.where(there, match, 0) / np.maximum(hyp, 1)).sum(axis=-1) / orders
    recall = (np.where(there, match, 0) / np.maximum(ref, 1)).sum(axis=-1) / orders
    below = np.where(precision + recall > 0, 4 * precision + recall, 1.0)
    return np.asarray(100 * 5 * precision * recall / below)


def macro_f1(sums: Floats) -> Floats:
    """The mean over labels of F1 = 2 · right / (answered so + gold is so); sums: those, by label.

    A label that a resample neither has nor answers counts in no mean.
    """
    right, answered, gold = np.split(sums, 3, axis=-1)
    there = answered + gold > 0
    f1 = np.where(there, 2 * right / np.maximum(answered + gold, 1), 0.0)
    return np.asarray(f1.sum(axis=-1) / np.maximum(there.sum(axis=-1), 1))


def ratio(sums: Floats) -> Floats:
    """The first sum ÷ the second."""
    return np.asarray(sums[..., 0] / sums[..., 1])


def per_prompt(samples: pl.DataFrame) -> pl.DataFrame:
    """A row per prompt: counts and means over its responses."""
    acc, cut = pl.col("acc"), pl.col("finish_reason") == "length"
    return (
        samples.group_by("prompt_id")
        .agg(
            n=pl.len(),
            n_scored=acc.count(),
            n_right=(acc >= 1).sum(),
            acc_mean=acc.cast(pl.Float64).mean(),
            length_mean=pl.col("length").mean(),
            truncated_mean=cut.mean(),
            n_stopped=(~cut).sum(),
            length_stopped=pl.col("length").filter(~cut).sum(),
        )
        .sort("prompt_id")
    )


def measured(
    samples: pl.DataFrame, asked: pl.DataFrame, *, n: int, ks: Sequence[int], tasks: Tasks
) -> list[Measure]:
    """Every measure of `samples`, its rows those of `asked`: a row per prompt that has samples.

    Args:
        samples: prompt_id, sample, length, finish_reason, acc, extracted, verdict.
        asked: prompt_id, answer, task.
    """
    by_prompt = asked.select("prompt_id").join(
        per_prompt(samples), on="prompt_id", how="left", maintain_order="left"
    )
    count = {
        name: by_prompt[name].cast(pl.Int64).to_numpy()
        for name in ("n", "n_scored", "n_right", "n_stopped")
    }
    scored, stopped = count["n_scored"] > 0, count["n_stopped"] > 0
    every = np.ones(len(asked), dtype=bool)
    acc = by_prompt["acc_mean"].fill_null(0).to_numpy()
    measures = [_mean(f"avg@{n}", acc, scored, count["n_scored"])]
    for k in ks:
        enough = count["n_scored"] >= k
        found = pass_at_k(count["n_scored"], count["n_right"], k)
        measures.append(_mean(f"pass@{k}", found, enough, count["n_scored"]))
    by_answer = asked["task"].is_in(list(BY_ANSWER)).to_numpy()
    for k in ks:
        voted = asked.select("prompt_id").join(
            majority(samples, k), on="prompt_id", how="left", maintain_order="left"
        )["acc"]
        counted = by_answer & voted.is_not_null().to_numpy()
        measures.append(
            _mean(f"maj@{k}", voted.fill_null(0).to_numpy(), counted, np.minimum(count["n"], k))
        )
    lengths = np.stack([by_prompt["length_stopped"].to_numpy(), count["n_stopped"]], axis=1)
    return [
        *measures,
        _mean("truncated", by_prompt["truncated_mean"].to_numpy(), every, count["n"]),
        _mean("length", by_prompt["length_mean"].to_numpy(), every, count["n"]),
        Measure("length_stopped", lengths.astype(np.float64), ratio, stopped, count["n_stopped"]),
        *_of_translation(samples, asked, tasks.translation),
        *_of_classification(samples, asked, tasks.classification),
    ]


def _mean(
    name: str, values: Floats, counted: NDArray[np.bool_], samples: NDArray[np.int64]
) -> Measure:
    """The mean over prompts of one value each."""
    parts = np.stack([np.where(counted, values, 0), counted], axis=1).astype(np.float64)
    return Measure(name, parts, ratio, counted, np.where(counted, samples, 0))


def _responses_to(
    samples: pl.DataFrame, asked: pl.DataFrame, task: str, checker: Checker
) -> pl.DataFrame:
    """The scored responses to the task's prompts: row of `asked`, gold answer, found answer."""
    found = pl.when(pl.col("verdict").is_in(ANSWERED)).then("extracted")
    prompts = asked.with_row_index("row").filter(task=task).select("prompt_id", "row", "answer")
    usable = [checker.gold_problem(gold) is None for gold in prompts["answer"]]
    return (
        samples.drop_nulls("acc")
        .select("prompt_id", "sample", "acc", found=found)
        .join(prompts.filter(pl.Series(usable, dtype=pl.Boolean)), on="prompt_id")
        .sort("row", "sample")
    )


def _summed(rows: NDArray[np.int64], values: Floats, prompts: int) -> Floats:
    """[P, C]: the sums of values [N, C] by row of `asked`."""
    sums = np.zeros((prompts, values.shape[1]))
    np.add.at(sums, rows, values)
    return sums


def _of_translation(
    samples: pl.DataFrame, asked: pl.DataFrame, checker: Translation
) -> Iterator[Measure]:
    """Corpus BLEU and chrF2 of all responses; one without an answer is an empty text."""
    responses = _responses_to(samples, asked, "translation", checker)
    if responses.is_empty():
        return
    import sacrebleu  # half a second, for this task alone

    rows = responses["row"].to_numpy().astype(np.int64)
    counts = np.bincount(rows, minlength=len(asked))
    references = [[g for g in golds(gold) if g.strip()] for gold in responses["answer"]]
    most = max(map(len, references))
    # streams: the i-th references of all texts; None where there are fewer
    streams = [[r[i] if i < len(r) else None for r in references] for i in range(most)]
    hypotheses = responses["found"].fill_null("").to_list()
    metrics = (
        ("bleu", sacrebleu.BLEU(tokenize=checker.tokenize, force=True), bleu),
        ("chrf", sacrebleu.CHRF(), chrf),
    )
    for name, metric, figure in metrics:
        # its public functions give no statistics of each text, which the bootstrap needs
        stats = metric._extract_corpus_statistics(hypotheses, streams)  # type: ignore[arg-type]
        parts = _summed(rows, np.asarray(stats, dtype=np.float64), len(asked))
        yield Measure(name, parts, figure, counts > 0, counts, str(metric.get_signature()))
    forget_texts(metrics[0][1])


def _of_classification(
    samples: pl.DataFrame, asked: pl.DataFrame, checker: Classification
) -> Iterator[Measure]:
    """Mean acc, and F1 averaged over the labels that golds have.

    An answer that is none of them, or none at all, misses its gold's label and is a false alarm of
    no other: a class of its own that the mean leaves out.
    """
    responses = _responses_to(samples, asked, "classification", checker)
    if responses.is_empty():
        return
    rows = responses["row"].to_numpy().astype(np.int64)
    counts = np.bincount(rows, minlength=len(asked))
    right = responses.select(pl.col("acc").cast(pl.Float64), n=pl.lit(1.0)).to_numpy()
    yield Measure("accuracy", _summed(rows, right, len(asked)), ratio, counts > 0, counts)
    gold = [checker.label(text) for text in responses["answer"]]
    labels = {label: index for index, label in enumerate(sorted(set(gold)))}
    if len(labels) > MOST_LABELS:
        return
    golds_N = np.array([labels[label] for label in gold])
    found_N = np.array(
        [-1 if text is None else labels.get(checker.label(text), -1) for text in responses["found"]]
    )
    one_hot = np.eye(len(labels) + 1)[:, :-1]  # of -1, the last row: nothing
    parts = [one_hot[np.where(found_N == golds_N, golds_N, -1)], one_hot[found_N], one_hot[golds_N]]
    sums = _summed(rows, np.concatenate(parts, axis=1), len(asked))
    yield Measure("macro_f1", sums, macro_f1, counts > 0, counts)


def difficulties(asked: pl.DataFrame, key: str) -> pl.Series:
    """What each prompt's meta says of `key`, as text; null where it says nothing."""
    return pl.Series("difficulty", [_said(meta, key) for meta in asked["meta"]], dtype=pl.String)


def _said(meta: str | None, key: str) -> str | None:
    try:
        values = json.loads(meta or "{}")
    except ValueError:  # somebody's own words
        return None
    value = values.get(key) if isinstance(values, dict) else None
    return value if value is None or isinstance(value, str) else json.dumps(value)


class Group(NamedTuple):
    """Some prompts of a set; `task` or `difficulty` None: whatever it is."""

    task: str | None
    difficulty: str | None
    rows: NDArray[np.int64]


def groups(asked: pl.DataFrame) -> list[Group]:
    """All prompts, those of each task, of each difficulty, and of each pair of them."""
    rows = asked.select("task", "difficulty", row=pl.int_range(pl.len(), dtype=pl.Int64))
    found = [Group(None, None, rows["row"].to_numpy())]
    for keys in (["task"], ["difficulty"], ["task", "difficulty"]):
        parts = rows.drop_nulls(keys).group_by(keys, maintain_order=True).agg("row").sort(keys)
        found += [
            Group(each.get("task"), each.get("difficulty"), np.array(each["row"]))
            for each in parts.iter_rows(named=True)
        ]
    return found


def results(
    measures: Sequence[Measure], asked: pl.DataFrame, *, resamples: int, level: float, seed: int
) -> Iterator[dict[str, object]]:
    """A row of `results` for each group of prompts and each measure that it has, but for its set.

    The interval is null where there is one prompt, which says nothing of others.
    """
    known: dict[bytes, dict[str, tuple[float, float]]] = {}  # of one task, all prompts are its own
    for group in groups(asked):
        if (intervals := known.get(group.rows.tobytes())) is None:
            intervals = known[group.rows.tobytes()] = _intervals(
                measures, group.rows, resamples=resamples, level=level, seed=seed
            )
        for measure in measures:
            rows = group.rows[measure.counted[group.rows]]
            if not len(rows):
                continue
            low, high = intervals.get(measure.name, (None, None))
            yield {
                "task": group.task,
                "difficulty": group.difficulty,
                "metric": measure.name,
                "value": float(measure.figure(measure.parts[rows].sum(axis=0))),
                "low": low,
                "high": high,
                "n_prompts": len(rows),
                "n_samples": int(measure.samples[rows].sum()),
                "signature": measure.signature,
            }


def _intervals(
    measures: Sequence[Measure],
    rows: NDArray[np.int64],
    *,
    resamples: int,
    level: float,
    seed: int,
) -> dict[str, tuple[float, float]]:
    """The interval of each measure; those of the same prompts share their resamples."""
    found = {}
    for measure, figures in resampled(measures, rows, resamples=resamples, seed=seed):
        low, high = bootstrap.interval(figures, level=level)
        found[measure.name] = round(low, DECIMALS), round(high, DECIMALS)
    return found


def resampled(
    measures: Sequence[Measure], rows: NDArray[np.int64], *, resamples: int, seed: int
) -> Iterator[tuple[Measure, Floats]]:
    """Each measure of the prompts `rows` with its figures [B] on resamples of them."""
    of_prompts: dict[bytes, list[Measure]] = {}
    for measure in measures:
        of_prompts.setdefault(measure.counted[rows].tobytes(), []).append(measure)
    for alike in of_prompts.values():
        counted = rows[alike[0].counted[rows]]
        if len(counted) < 2:
            continue
        parts = np.concatenate([measure.parts[counted] for measure in alike], axis=1)
        sums = bootstrap.resampled(parts, resamples=resamples, seed=seed)
        ends = np.cumsum([measure.parts.shape[1] for measure in alike])[:-1]
        for measure, columns in zip(alike, np.split(sums, ends, axis=1), strict=True):
            yield measure, measure.figure(columns)


def pairs(of_a: list[Measure], of_b: list[Measure]) -> Iterator[Measure]:
    """Measures whose figure is both figures [..., 2], of the prompts that count in both."""
    theirs = {_kind(measure.name): measure for measure in of_b}
    for ours in of_a:
        if (other := theirs.get(_kind(ours.name))) is None:
            continue
        counted = ours.counted & other.counted
        yield Measure(
            ours.name if ours.name == other.name else f"{ours.name} → {other.name}",
            np.concatenate([ours.parts, other.parts], axis=1),
            _both(ours, other),
            counted,
            ours.samples + other.samples,
        )


def _both(ours: Measure, other: Measure) -> Figure:
    columns = ours.parts.shape[1]
    return lambda sums: np.stack(
        [ours.figure(sums[..., :columns]), other.figure(sums[..., columns:])], axis=-1
    )


def _kind(name: str) -> str:
    return "avg" if name.startswith("avg@") else name
