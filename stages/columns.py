"""What every column of every table means, in one place: Parquet files and data/README.md say it."""

from collections.abc import Mapping

import pyarrow as pa

# table: the artifacts that hold it, and what a row is
TABLES: dict[str, tuple[str, str]] = {
    "prompts": ("prompts, heldout", "a prompt"),
    "unusable": ("prompts, heldout", "a row of a source that no prompt could be made of"),
    "selection": ("select", "a prompt that is asked in this round, by one group of responses"),
    "beliefs": ("select, unless shuffled", "a prompt that was asked: what was seen of it"),
    "rollouts": ("rollout", "a sampled response"),
    "skipped": ("rollout, evaluate, prune", "a selected prompt that was not sampled"),
    "scores": ("score", "a response, judged"),
    "groups": ("filter", "a group, over all rounds of the step so far, and what became of it"),
    "batch": ("filter", "a response to train on, with all that update needs"),
    "carried": ("filter", "a response that waits for the next step"),
    "metrics": ("update", "a mini-batch"),
    "timings": ("update", "a mini-batch: how fast it went; part of no digest"),
    "tokens": ("update, with record_tokens", "a response in one optimizer step, token by token"),
    "probe": ("warmstart, update, prune", "a sequence, and what these very weights compute for it"),
    "samples": ("evaluate", "a sampled response to a held-out prompt, judged"),
    "evaluations": ("evaluate", "a held-out prompt, in one evaluation set"),
    "results": ("evaluate", "a figure of a set: of all its prompts, a task's, a difficulty's"),
    "ladder": ("prune", "a ratio that was tried; 0: the unpruned policy"),
    "layers": ("prune", "a linear layer of a policy that was pruned by a ratio"),
    "ladder_samples": ("prune", "a sampled response of the policy pruned by a ratio, judged"),
}

# columns that mean the same in every table
COMMON: dict[str, str] = {
    "prompt_id": "names the prompt; unique in a prompts table",
    "group_id": "names the group: the responses to one prompt in one round",
    "response_id": "names the response; unique in a run",
    "prompt": "the chat messages, each with role and content",
    "answer": "the gold answer, as text",
    "task": "names the checker of stages/verify.py that judges responses",
    "meta": "whatever else is known of the prompt, a JSON object as text, or null",
    "step": "the training step",
    "round": "the round of dynamic sampling within the step, from 0",
    "sample": "the number of the response within its group, from 0",
    "prompt_ids": "token ids of the prompt, chat template included",
    "response_ids": "token ids of the response, end token included",
    "sampler_logprobs": "log-prob of each response token as the engine sampled it, in nats",
    "text": "the response, decoded without special tokens",
    "length": "tokens of the response, end token included",
    "finish_reason": "stop: it ended by itself; length: it was cut",
    "seed": "of the engine's random numbers for this response",
    "temperature": "that it was sampled with",
    "policy": "digest of the weights and config that sampled it",
    "acc": "raw accuracy, 1 (right) to 0 (wrong), before any shaping; null: nobody could score it",
    "penalty": "soft overlong punishment, 0 or less",
    "reward": "wrong + acc · (right - wrong) + weighted parts + penalty; null where a term is",
    "extracted": "the answer that the checker found in the text",
    "verdict": (
        "right, partial, wrong, no_answer, truncated, timeout, memory, crash, error or unscorable"
    ),
    "set": "name of the evaluation set, of evaluate.sets",
    "difficulty": "what meta says of evaluate.difficulty, as text; null where it says nothing",
    "n": "responses",
    "n_scored": "responses that have a score",
    "acc_mean": "mean acc of the scored responses",
    "age": "steps between the policy that sampled it and the one that it is to train",
    "advantage": "(reward - mean of its group) / (std + eps), or without std",
    "optimizer_step": "optimizer steps of the run so far, this one included",
    "mini_batch": "its number within the update, from 0",
    "tokens": "response tokens that carry loss",
    "reason": "why",
}

# what a column means in this table
SPECIAL: dict[str, dict[str, str]] = {
    "unusable": {
        "file": "where the row stands",
        "row": "its number in the file, from 1",
        "prompt_id": "its own, if it has one",
        "column": "the one that is at fault, or null",
        "reason": "what is wrong with it",
    },
    "selection": {
        "position": "in the shuffled stream of prompts, up to which it has been used",
        "weight": "what the policy goes by: probability of a mixed group, a weight, or 1",
        "pass_rate": "what an adaptive policy expects of acc; null elsewhere",
        "evidence": "responses to this very prompt that pass_rate rests on, old ones faded",
        "why": "shuffle, explore, unseen, informative or weighted",
        "epoch": "how often the stream had run through all prompts",
    },
    "beliefs": {
        "right": "right responses so far, faded up to `step`",
        "wrong": "wrong responses so far, faded up to `step`",
        "step": "up to which right and wrong are faded",
        "asked": "step in which the prompt was asked last",
    },
    "skipped": {"reason": "empty, too_long, time_limit or template: with the message"},
    "groups": {
        "metric_min": "least value of what the filter looks at: acc, or a reward part",
        "metric_max": "greatest value of the same",
        "reward_mean": "mean reward of the scored responses",
        "reward_std": "its standard deviation, with n - 1",
        "decision": "kept, dropped or carried",
        "reason": (
            "all_right, all_wrong, all_equal, too_small, unscored, stale, surplus or short; "
            "null where it is kept"
        ),
        "sampled": "in this step; else carried into it",
    },
    "metrics": {
        "status": "stepped, not_finite or no_tokens: whether an optimizer step was made",
        "sequences": "responses in the mini-batch",
        "length_max": "of the longest response, tokens",
        "loss": "of the mini-batch",
        "grad_norm": "before it is clipped",
        "entropy": "of the policy's distribution, mean over tokens, nats",
        "kl_k1": "KL(old ‖ new) by the estimator k1, mean over tokens",
        "kl_k3": "the same by k3",
        "ratio_min": "least π_new / π_old of a token",
        "ratio_mean": "mean of the same",
        "ratio_max": "greatest of the same",
        "clip_fraction_low": "share of tokens clipped at 1 - ε_low",
        "clip_fraction_high": "share of tokens clipped at 1 + ε_high",
        "clip_fraction_dual": "share of tokens where the dual clip acts",
        "importance_mean": "mean weight π_old / π_sampler, after the cap",
        "importance_capped": "share of tokens whose weight is the cap",
        "importance_dropped": "share of tokens outside the band",
        "gap_mean": "mean distance of sampler_logprobs from the old log-probs",
        "gap_max": "greatest of the same",
        "length_mean": "tokens of a response, mean",
        "lr": "learning rate",
        "kl_reference": "divergence from the reference policy; null without one",
    },
    "timings": {
        "seconds": "of the optimizer step",
        "tokens_per_second": "prompts included",
        "peak_memory_gib": "of the process, or of the device",
        "mfu": "share of the device's peak; null where that is not known",
    },
    "tokens": {
        "old_logprobs": "of each response token before the update, nats",
        "new_logprobs": "in this optimizer step, nats",
        "entropies": "of the distribution at each token, nats",
        "ratios": "π_new / π_old",
        "clipped_low": "whether 1 - ε_low clips it",
        "clipped_high": "whether 1 + ε_high clips it",
        "clipped_dual": "whether the dual clip acts",
        "weights": "of each token in the loss, importance included; 0: it does not count",
    },
    "probe": {
        "probe_id": "names the sequence",
        "response_ids": "token ids whose log-probs are given",
        "logprobs": "of each of them, at temperature 1, nats",
    },
    "samples": {"group_id": "the prompt_id; in other sets than heldout, `<set>/<prompt_id>`"},
    "evaluations": {
        "n_right": "responses that are right, acc 1",
        "length_mean": "tokens of a response, mean",
        "truncated_mean": "share of responses that were cut",
    },
    "results": {
        "task": "of the prompts; null: whatever their task",
        "difficulty": "of the prompts; null: whatever their difficulty",
        "metric": (
            "avg@n, pass@k, maj@k, truncated, length, length_stopped (tokens, of all and of those "
            "that were not cut), bleu, chrf, accuracy, macro_f1"
        ),
        "value": "of the figure",
        "low": "lower end of its bootstrap interval over prompts; null where there is one prompt",
        "high": "upper end of the same",
        "n_prompts": "prompts that count in it",
        "n_samples": "responses that count in it",
        "signature": "sacrebleu's, of bleu and chrf",
    },
    "ladder": {
        "method": "magnitude or wanda",
        "pattern": "unstructured or 2:4",
        "ratio": "share of all weights in the linear layers of the blocks that was asked for",
        "reached": "share of them that is 0",
        "metric": "what decides, a figure of evaluate",
        "value": "of the metric",
        "loss": "1 - value / value of the unpruned policy; below 0: a gain",
        "low": "lower end of its paired bootstrap interval; null where there is one prompt",
        "high": "upper end of the same",
        "within": "whether loss is within prune.max_loss",
        "chosen": "whether this policy is the artifact's",
    },
    "layers": {
        "layer": "its name in the model's body",
        "ratio": "that was asked for, of all layers",
        "weights": "in the layer",
        "zeros": "of them",
    },
    "ladder_samples": {
        "response_id": "names the response; the same at every ratio, and so is the seed",
        "ratio": "that the policy was pruned by; 0: unpruned",
    },
}
PART = "a further part of the reward, named in score.parts, 1 to 0; null: nobody could score it"


def meaning(table: str, column: str) -> str:
    """What `column` of `table` holds. `KeyError` if nobody has written it down."""
    return SPECIAL.get(table, {}).get(column) or COMMON[column]


def described(table: str, schema: pa.Schema) -> pa.Schema:
    """`schema` with the meaning of each column in its metadata, under `description`."""
    return pa.schema(
        field.with_metadata({"description": meaning(table, field.name)}) for field in schema
    )


def markdown(schemas: Mapping[str, pa.Schema]) -> str:
    """The chapter of data/README.md that describes every column of every table."""
    return "\n\n".join(_chapter(table, schemas[table]) for table in TABLES)


def _chapter(table: str, schema: pa.Schema) -> str:
    where, row = TABLES[table]
    head = f"### {table}\n\nIn {where}. A row is {row}."
    if table == "carried":
        return f"{head}\nThe columns are those of `batch`."
    lines = [
        f"| {f.name} | `{_kind(f.type)}`{' or null' * f.nullable} | {meaning(table, f.name)} |"
        for f in schema
    ]
    if table == "scores":
        lines.append(f"| part_… | `float` or null | {PART} |")
    return "\n".join([f"{head}\n", "| column | type | meaning |", "|---|---|---|", *lines])


def _kind(kind: pa.DataType) -> str:
    """`list<float>`, without the names of list elements."""
    return f"list<{_kind(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)
