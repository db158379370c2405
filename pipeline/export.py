"""A policy as a directory that anybody loads: weights, tokenizer, generation config, model card."""

import json
from pathlib import Path
from typing import Any

from pipeline import artifacts, card, loop, mirror, runs
from pipeline.artifacts import RECORD
from pipeline.card import Made
from stages import policy as policies
from stages.errors import InputError

GENERATION, CARD = "generation_config.json", "README.md"
LEFT = (policies.PROBE, *policies.STATE)


def policy_of(given: str, *, which: str | None = None) -> Path:
    """The policy that a run, or a policy itself, means.

    Args:
        given: a run's name, directory or URL; or a policy's.
        which: of a run: best, newest or a step; None: the best, or the newest where none is.

    Raises `InputError` if it is not there, or if its weights were retired.
    """
    place = mirror.looked_at(given if "://" in given else Path(given).absolute(), mirror.everything)
    if (place / "config.json").is_file():
        if which is not None:
            raise InputError(f"--policy {which}: {given} is a policy already, and no run")
        return _whole(place)
    run = runs.find(given)
    found = _of_run(run, which)
    mirror.bring(run, [found])
    return _whole(found)


def _of_run(run: Path, which: str | None) -> Path:
    best = loop.best_policy(run)
    if which == "best" and best is None:
        raise InputError(f"{run.name} names no best policy; take --policy newest")
    if which in (None, "best") and best is not None:
        return best
    if which in (None, "newest"):
        number = loop.newest_step(run)
    elif which and which.isdecimal():
        number = int(which)
    else:
        raise InputError(f"--policy {which}: expected best, newest or the number of a step")
    place = run / loop.step_name(number) / ("update" if number else "warmstart")
    if not (place / RECORD).is_file():
        raise InputError(
            f"{run.name} has no policy of step {number} ({place}); `dapo ls {run.name}` shows what "
            "there is"
        )
    return place


def _whole(policy: Path) -> Path:
    if (policy / RECORD).is_file() and artifacts.load_unchanged(policy).retired:
        raise InputError(f"{policy}: its weights were retired; take a later step")
    policies.check(policy)
    return policy


def export(policy: Path, out: Path) -> None:
    """Write the policy to `out`, whole or not at all.

    Raises `InputError` if something stands there.
    """
    if out.exists():
        raise InputError(f"--out {out} exists already: choose another name, or remove it")
    made = Made(policy)
    generation = _generation(policy) | card.generation(made)
    generation["eos_token_id"] = policies.eos_ids(policy)
    with artifacts.draft(out) as building:
        policies.copy(policy, building, without=LEFT)
        (building / GENERATION).write_text(json.dumps(generation, indent=2) + "\n")
        text = card.text(made, directory=out.name, generation=generation)
        (building / CARD).write_text(text, encoding="utf-8")
        building.rename(out)


def _generation(policy: Path) -> dict[str, Any]:
    """What the policy's own file says, but for the version that wrote it."""
    path = policy / GENERATION
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return {key: value for key, value in found.items() if key != "transformers_version"}
