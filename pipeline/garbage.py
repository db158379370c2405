"""What of a run may go: remains of processes that died, and what its retention no longer keeps.

Nothing goes that a record needs. A file that is not known is named and left alone.
"""

import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline import artifacts, environment, runs
from pipeline.artifacts import RECORD, UPLOADED, Artifact
from pipeline.config import Schedule, parse
from pipeline.loop import Round, best_policy, step_name
from pipeline.mirror import BEST, CONFIG, LATEST, LEDGER, ORIGIN, REPORT, Mirror

DAY_S = 86_400
DRAFT = re.compile(r"\.draft-.+-\d+")
PARTIAL = re.compile(r"\.partial-(?P<artifact>.+)-(?P<recipe>[0-9a-f]{12})")
PLACE = re.compile(r"step_\d{4,}|round_\d+")  # directories that hold artifacts
VARIANT = re.compile(r".+\.variant-\d+")
OF_THE_RUN = {".lock", CONFIG, LATEST, BEST, LEDGER, ORIGIN, REPORT, "tracker"}
REPLACED = (RECORD, CONFIG, LATEST, BEST, REPORT)  # by way of a file beside it
CUT_OFF = {str(Path(name).with_suffix(".partial")) for name in REPLACED}


@dataclass(frozen=True)
class Garbage:
    """Something that may go. `remove`: all of it; `retire`: its weights and optimizer state;
    `trim`: its optimizer state."""

    path: Path
    why: str
    bytes: int
    how: Literal["remove", "retire", "trim"] = "remove"

    def document(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**vars(self), "path": str(self.path)}


@dataclass(frozen=True)
class Findings:
    """What may go of a run, and what lies in it that is no part of one."""

    run: Path
    garbage: list[Garbage]
    unknown: list[Path]


def find(
    run: Path,
    *,
    keep_policies: int | None = None,
    keep_optimizers: int | None = None,
    variants: bool = False,
) -> Findings:
    """Everything in the run's directory that may go, and everything that nobody knows.

    Args:
        keep_policies: newest weights to keep; None: as the run's own schedule says.
        keep_optimizers: newest optimizer states to keep; None: the same.
        variants: also the variants of `dapo rerun` that nothing was made from.

    Raises `InputError` if a record or the run's configuration cannot be read.
    """
    run = Path(os.path.abspath(run))
    schedule = parse((run / CONFIG).read_text()).schedule
    asked = {"keep_policies": keep_policies, "keep_optimizers": keep_optimizers}
    schedule = schedule.model_copy(update={k: v for k, v in asked.items() if v is not None})
    inventory = Inventory.of(run)
    users = _users(inventory)
    garbage = [
        *_remains(inventory),
        *_retention(inventory, schedule, users),
        *(_unused_variants(inventory, users) if variants else ()),
        *_unnamed_locks(inventory),
    ]
    return Findings(run, sorted(garbage, key=lambda each: each.path), sorted(inventory.unknown))


def clear(findings: Findings, mirror: Mirror | None = None) -> list[Garbage]:
    """Remove the garbage; returns what stays, for a stage is reading it.

    The caller owns the run (`mirror.owned`), and has since before it was looked at.
    """
    for garbage in findings.garbage:
        variant = garbage.how == "remove" and VARIANT.fullmatch(garbage.path.name)
        if mirror and variant:
            mirror.drop(garbage.path)
        _remove(garbage)
        if mirror and garbage.how != "remove":
            mirror.push(garbage.path)
    return [garbage for garbage in findings.garbage if _is_there(garbage)]


def _remove(garbage: Garbage) -> None:
    path = garbage.path
    if garbage.how != "remove":
        artifacts.retire(artifacts.load(path), keep_weights=garbage.how == "trim")
    elif VARIANT.fullmatch(path.name):
        artifacts.remove(path)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_there(garbage: Garbage) -> bool:
    if garbage.how == "remove":
        return garbage.path.exists()
    artifact = artifacts.load(garbage.path)
    names = artifacts.retirable(artifact, keep_weights=garbage.how == "trim")
    return any((garbage.path / name).exists() for name in names)


@dataclass
class Inventory:
    """What lies in a run's directory, by kind; links are unknown, what they name is not ours."""

    run: Path
    artifacts: dict[Path, Artifact] = field(default_factory=dict)
    drafts: list[Path] = field(default_factory=list)
    partials: list[Path] = field(default_factory=list)
    cut_off: list[Path] = field(default_factory=list)  # writes that did not end
    left_over: list[Path] = field(default_factory=list)  # files that their record calls retired
    locks: list[Path] = field(default_factory=list)
    unknown: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, run: Path) -> "Inventory":
        """All of it, every record read once."""
        inventory = cls(run)
        inventory._walk(run)
        return inventory

    def _walk(self, directory: Path) -> None:
        for path in sorted(directory.iterdir()):
            if path.is_symlink():
                self.unknown.append(path)
            elif directory == self.run and path.name in OF_THE_RUN:
                continue
            elif path.is_dir():
                self._directory(path)
            elif path.name in CUT_OFF:
                self.cut_off.append(path)
            elif path.suffix != ".log":
                self.unknown.append(path)

    def _directory(self, path: Path) -> None:
        at_top = path.parent == self.run
        if DRAFT.fullmatch(path.name):
            self.drafts.append(path)
        elif PARTIAL.fullmatch(path.name):
            self.partials.append(path)
        elif (path / RECORD).is_file():
            self._artifact(artifacts.load(path))
        elif PLACE.fullmatch(path.name):
            self._walk(path)
        elif at_top and path.name == environment.DIRECTORY:
            self._files(path, known=".txt", to=self.locks)
        else:
            self.unknown.append(path)

    def _files(self, directory: Path, *, known: str, to: list[Path]) -> None:
        for path in sorted(directory.iterdir()):
            if path.suffix == known and path.is_file():
                to.append(path)
            elif path.suffix == ".partial" and path.is_file():
                self.cut_off.append(path)
            else:
                self.unknown.append(path)

    def _artifact(self, artifact: Artifact) -> None:
        self.artifacts[artifact.path] = artifact
        files = artifact.record["files"]
        for path in sorted(artifact.path.rglob("*")):
            known = files.get(str(path.relative_to(artifact.path)))
            if path.name in CUT_OFF and path.parent == artifact.path:
                self.cut_off.append(path)
            elif known and known.get("retired"):
                self.left_over.append(path)
            elif not known and not path.is_dir() and path.name not in (RECORD, UPLOADED):
                self.unknown.append(path)


def _remains(inventory: Inventory) -> Iterator[Garbage]:
    """What processes left that died, and what served its end."""
    for path in inventory.drafts:
        if artifacts.abandoned(path):
            yield Garbage(path, "a draft whose process is gone", _size(path))
    for path in inventory.partials:
        if why := _why_partial(path, inventory):
            yield Garbage(path, why, _size(path))
    for path in inventory.cut_off:
        yield Garbage(path, "a write that was cut off", _size(path))
    for path in inventory.left_over:
        yield Garbage(path, "retired, says the record", _size(path))


def _why_partial(path: Path, inventory: Inventory) -> str:
    """Why nobody will go on from what an attempt kept; empty if somebody may."""
    name = PARTIAL.fullmatch(path.name)
    assert name
    made = inventory.artifacts.get(path.with_name(name["artifact"]))
    if made and made.recipe.digest.startswith(name["recipe"]):
        return "its artifact is published"
    newest = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    return "of an attempt older than a day" if time.time() - newest > DAY_S else ""


def _retention(
    inventory: Inventory, schedule: Schedule, users: dict[Path, list[Path]]
) -> Iterator[Garbage]:
    """Weights and optimizer states that the schedule no longer keeps, and that nobody needs.

    As `loop.retire_old_policies`, but for a run that may have been changed since by hand: what an
    unfinished step builds on stays, and so does the best policy.
    """
    updates = _updates(inventory)
    newest = max(updates, default=0)
    best = best_policy(inventory.run)
    trained_on, sampled_by = _needed(inventory, schedule, updates)
    for number, update in sorted(updates.items()):
        elsewhere = any(not user.is_relative_to(inventory.run) for user in users[update.path])
        if number in trained_on or elsewhere:
            continue
        milestone = schedule.keep_every is not None and number % schedule.keep_every == 0
        runs_still = milestone or number in sampled_by or update.path == best
        if _old(number, newest, schedule.keep_policies) and not runs_still:
            yield from _retired(update, f"not of the newest {schedule.keep_policies} policies")
            continue
        if _old(number, newest, schedule.keep_optimizers):
            why = f"not of the newest {schedule.keep_optimizers} optimizer states"
            yield from _retired(update, why, keep_weights=True)


def _old(number: int, newest: int, keep: int | None) -> bool:
    return keep is not None and number <= newest - keep


def _retired(update: Artifact, why: str, *, keep_weights: bool = False) -> Iterator[Garbage]:
    files = update.record["files"]
    names = artifacts.retirable(update, keep_weights=keep_weights)
    if going := [name for name in names if not files[name].get("retired")]:
        size = sum(files[name]["bytes"] for name in going)
        yield Garbage(update.path, why, size, "trim" if keep_weights else "retire")


def _updates(inventory: Inventory) -> dict[int, Artifact]:
    """The run's policies by step; step 0 and variants are none of its schedule's business."""
    return {
        int(path.parent.name.removeprefix("step_")): artifact
        for path, artifact in inventory.artifacts.items()
        if (artifact.stage, path.name) == ("update", "update")
        if path.parent.parent == inventory.run
    }


def _needed(
    inventory: Inventory, schedule: Schedule, updates: dict[int, Artifact]
) -> tuple[set[int], set[int]]:
    """The policies that the run's unfinished steps train, and those that are only run for them."""
    newest = max(updates, default=0)
    open_steps = [n for n in range(1, newest + 2) if not _finished(inventory, n)]
    trained = {number - 1 for number in open_steps}
    # one step off, the first round is sampled by the policy before
    sampling = {number - 2 for number in open_steps} if schedule.one_step_off else set()
    every = schedule.evaluate_every
    evaluated = {
        number
        for number in updates
        if number == schedule.steps or (every and number % every == 0)
        if inventory.run / step_name(number) / "evaluate" not in inventory.artifacts
    }
    return trained, sampling | evaluated


def _finished(inventory: Inventory, number: int) -> bool:
    """Whether every artifact of the step is there and was made from what its inputs are now."""
    step = inventory.run / step_name(number)
    rounds = {path.parent for path in inventory.artifacts if path.parent.parent == step}
    wanted = [step / "update", *(each / stage for each in rounds for stage in Round._fields)]
    made = [inventory.artifacts.get(path) for path in wanted]
    return bool(rounds) and all(each and not runs.stale_inputs(each) for each in made)


def _users(inventory: Inventory) -> dict[Path, list[Path]]:
    """Who was made from what, in this run and in those beside it."""
    users: dict[Path, list[Path]] = defaultdict(list)
    beside = [path.parent for path in inventory.run.parent.glob(f"*/{CONFIG}")]
    others = [a for run in beside if run != inventory.run for a in runs.artifacts_below(run)]
    for artifact in (*inventory.artifacts.values(), *others):
        for _, source, _ in runs.inputs(artifact):
            users[source].append(artifact.path)
    return users


def _unused_variants(inventory: Inventory, users: dict[Path, list[Path]]) -> Iterator[Garbage]:
    for path in inventory.artifacts:
        if VARIANT.fullmatch(path.name) and not users[path]:
            yield Garbage(path, "a variant that nothing was made from", _size(path))


def _unnamed_locks(inventory: Inventory) -> Iterator[Garbage]:
    described = (each.record.get("environment") for each in inventory.artifacts.values())
    named = {environment.file_name(each["packages"]) for each in described if each}
    for path in inventory.locks:
        if path.name not in named:
            yield Garbage(path, "an environment that no record names", _size(path))


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(each.lstat().st_size for each in files if each.is_symlink() or each.is_file())
