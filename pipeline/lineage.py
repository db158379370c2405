"""Where an artifact came from, and what was made from it: read from the records alone.

The graph of a run is large and tangled; what is shown of it is two trees. Back: every input, and
theirs; forward: every use, down to the policies that were trained and what these made. What a run
passes on from step to step (its policies, selections, carried groups) is shown as a chain.
"""

import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import polars as pl

from pipeline import artifacts, mirror, runs
from pipeline.artifacts import RECORD, Artifact
from pipeline.loop import CONFIG
from stages import tables
from stages.errors import InputError

# an input that is a chain: which input of its source leads on, if any does
CHAINS = {
    "policy": "policy",
    "reference": "policy",
    "previous": "previous",
    "carried": "carried",
    "groups": None,  # what an adaptive selection has seen: the step before, a tree of its own
}
POLICIES = ("update", "warmstart")
HEAD, TAIL = 3, 2  # shown of what is longer
ROOM = HEAD + TAIL + 1
VARIANT = re.compile(r"\.variant-\d+$")
TABLES = ("prompts", "selection", "rollouts", "scores", "groups", "batch")  # that tell of responses
UNTRUSTED = ("prompt", "text", "extracted", "answer")  # what models and data wrote


class Link(NamedTuple):
    """`product` was made from `source`, whose content was `digest` then."""

    role: str
    source: Path
    product: Path
    digest: str


class Records:
    """The records of a run, each read once; others are read where a source leads out of it."""

    def __init__(self, found: Iterable[Artifact] = ()) -> None:
        self._known: dict[Path, Artifact | None] = {each.path: each for each in found}
        self._uses: dict[Path, list[Link]] = defaultdict(list)
        for path in list(self._known):
            for link in self.inputs(path):
                self._uses[link.source].append(link)

    def artifact(self, path: Path) -> Artifact | None:
        """What stands at `path`; None where that is no artifact."""
        if path not in self._known:
            there = (path / RECORD).is_file()
            self._known[path] = artifacts.load(path) if there else None
        return self._known[path]

    def inputs(self, path: Path) -> list[Link]:
        """What the artifact at `path` was made from; nothing is known of what is none."""
        artifact = self.artifact(path)
        if artifact is None:
            return []
        return [Link(role, source, path, sha) for role, source, sha in runs.inputs(artifact)]

    def uses(self, path: Path) -> list[Link]:
        """What was made from it, the oldest first."""
        return self._uses[path]

    def mark(self, link: Link) -> str:
        """`gone` or `stale`, if the source is not there or has another content now; else empty.

        A file that is no artifact is not read for it.
        """
        source = self.artifact(link.source)
        if source is None:
            return "" if link.source.exists() else "gone"
        return "" if source.digest == link.digest else "stale"


@dataclass(frozen=True)
class Node:
    """One artifact, or a file or directory that is none (`artifact` is None), or is gone.

    `facts`: what it says of the one response that is looked at.
    """

    place: str  # in the run, or the path of what lies elsewhere
    path: Path
    artifact: Artifact | None
    facts: dict[str, Any]

    @property
    def marks(self) -> list[str]:
        """Of `retired`, `trimmed`, `pinned`: see `runs.state`."""
        marks = ("retired", "trimmed", "pinned")
        return [mark for mark in marks if self.artifact and getattr(self.artifact, mark)]

    def document(self) -> dict[str, Any]:
        """All of it as plain values."""
        plain: dict[str, Any] = {"place": self.place, "path": str(self.path)}
        if self.artifact:
            record = self.artifact.record
            plain |= {
                "stage": self.artifact.stage,
                "digest": self.artifact.digest,
                "rows": record["rows"],
                "started": record["started"],
                "code": record["code"],
                "packages": packages(self.artifact),
                "marks": self.marks,
            }
        return plain | ({"facts": self.facts} if self.facts else {})


@dataclass(frozen=True)
class Gap:
    """So many that are not shown."""

    count: int
    what: str

    def __str__(self) -> str:
        return f"… {self.count} more {self.what}".rstrip()


@dataclass
class Branch:
    """A node, its part in what stands above it, and what stands behind it.

    `mark`: of the link, see `Records.mark`. `chain`: what follows it one by one.
    """

    role: str
    node: Node
    mark: str = ""
    repeated: bool = False  # its branches are shown elsewhere
    branches: list["Branch | Gap"] = field(default_factory=list)
    chain: list["Branch | Gap"] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """All of it as plain values."""
        plain: dict[str, Any] = {"role": self.role, **self.node.document()}
        plain |= {"state": self.mark} if self.mark else {}
        plain |= {"repeated": True} if self.repeated else {}
        for name, each in (("branches", self.branches), ("chain", self.chain)):
            plain |= {name: _documents(each)} if each else {}
        return plain


def _documents(branches: Sequence[Branch | Gap]) -> list[dict[str, Any]]:
    return [b.document() if isinstance(b, Branch) else {"more": b.count} for b in branches]


@dataclass(frozen=True)
class Lineage:
    """Of one artifact: what it was made from and what was made from it."""

    start: Node
    run: Path | None
    made_from: list[Branch | Gap]
    made_of_it: list[Branch | Gap]
    response: str | None = None

    @cached_property
    def nodes(self) -> list[Node]:
        """Every node that is shown, once."""
        found = {self.start.path: self.start}
        waiting = deque([*self.made_from, *self.made_of_it])
        while waiting:
            branch = waiting.popleft()
            if isinstance(branch, Branch):
                found.setdefault(branch.node.path, branch.node)
                waiting.extend([*branch.branches, *branch.chain])
        return list(found.values())

    def spread(self, name: str) -> dict[str, int]:
        """How many of the artifacts that are shown have which `code` or `packages`."""
        known = [node.artifact for node in self.nodes if node.artifact]
        of = packages if name == "packages" else lambda artifact: artifact.record["code"]
        return dict(Counter(of(artifact) or "unknown" for artifact in known))

    @property
    def outcome(self) -> str:
        """Of a response: whether it was trained on, and else why not."""
        by_stage = {
            stage: [
                node.facts
                for node in self.nodes
                if node.artifact and node.artifact.stage == stage
                if node.facts and not VARIANT.search(node.path.name)
            ]
            for stage in ("filter", "update")
        }
        if trained := by_stage["update"]:
            steps = ", ".join(str(facts["step"]) for facts in trained)
            return f"trained on in step {steps}, advantage {trained[0]['advantage']:+.4g}"
        if not (decided := by_stage["filter"]):
            return "not decided yet"
        last = decided[-1]
        if last["batch"]:
            return f"in a batch that no update has used yet, advantage {last['advantage']:+.4g}"
        why = f": {last['reason']}" if "reason" in last else ""
        return f"in no batch: its group was {last['decision']}{why}"

    def document(self) -> dict[str, Any]:
        """All of it as plain values, with the settings and the environment of the start."""
        assert self.start.artifact
        record = self.start.artifact.record
        said = {"response_id": self.response, "outcome": self.outcome} if self.response else {}
        return {
            **said,
            "run": self.run and str(self.run),
            "start": self.start.document(),
            "config": record["recipe"]["config"],
            "environment": record.get("environment"),
            "code": self.spread("code"),
            "packages": self.spread("packages"),
            "made_from": _documents(self.made_from),
            "made_of_it": _documents(self.made_of_it),
        }


def packages(artifact: Artifact) -> str | None:
    """The digest of the packages that it was made with; None in records that do not say."""
    found = artifact.record.get("environment", {}).get("packages")
    return found and str(found)


def trace(path: Path, *, full: bool = False) -> Lineage:
    """The lineage of the artifact at `path`, or of that which a table or file at `path` is in.

    Args:
        full: show all of what is long, instead of its ends.

    Raises `InputError` if there is no artifact.
    """
    start = _artifact_around(path)
    return _Tracer.around(start, full=full).lineage(start)


def trace_response(response_id: str, *, run: Path | None = None, full: bool = False) -> Lineage:
    """The lineage of one response, from its rollout, with what every artifact says of it.

    Args:
        run: where to look; None: in every run below the data root.

    Raises `InputError` if it is nowhere, or in more runs than one.
    """
    rollout = _rollout_of(response_id, run)
    own = next(each for each in rollout.parents if (each / CONFIG).is_file())
    mirror.bring(own, [each.parent for each in own.rglob(RECORD)], _of_responses)
    response = Response.of(response_id, rollout)
    return _Tracer.around(rollout, full=full, response=response).lineage(rollout)


def _artifact_around(path: Path) -> Path:
    place = Path(os.path.abspath(path))
    if not place.exists():
        raise InputError(f"{path} does not exist; give an artifact, a file in it or a response id")
    for candidate in (place, *place.parents):
        if (candidate / RECORD).is_file():
            return candidate
    raise InputError(f"{path} is in no artifact: no {RECORD} stands there or above it")


def _rollout_of(response_id: str, run: Path | None) -> Path:
    """The artifact that holds the response; the original, where a variant holds it too."""
    among = [run] if run else runs.directories()
    found = {each: holding for each in among if (holding := _holding(response_id, each))}
    if not found:
        where = f"run {run.name}" if run else "any run; `dapo ls` lists them"
        raise InputError(
            f"'{response_id}' is no path and no rollout of {where}; a response_id stands in the "
            "table rollouts; of a sample of an evaluation, give the evaluation's directory"
        )
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise InputError(f"there is a response {response_id} in {names}: say which with --run")
    ((original, *_),) = found.values()
    return original


def _holding(response_id: str, run: Path) -> list[Path]:
    rollouts = [each.parent for each in run.glob(f"step_*/round_*/rollout*/{RECORD}")]
    mirror.bring(run, rollouts, lambda name: name.startswith("rollouts/"))
    shards = sorted(
        run.glob("step_*/round_*/rollout*/rollouts/*.parquet"),
        key=lambda path: (bool(VARIANT.search(path.parents[1].name)), path),
    )
    if not shards:
        return []
    # one scan, not one for each: there may be thousands
    rows = pl.scan_parquet(shards, include_file_paths="shard", extra_columns="ignore")
    held = rows.filter(response_id=response_id).select("shard")
    found = set(tables.collect(held, f"rollouts of {run}")["shard"])
    return [Path(os.path.abspath(each.parents[1])) for each in shards if str(each) in found]


def _of_responses(file: str) -> bool:
    """Whether `Response` looks into that file of an artifact."""
    return file.partition("/")[0] in TABLES


@dataclass(frozen=True)
class Response:
    """One sampled response, and what the artifacts say of it."""

    response_id: str
    group_id: str
    prompt_id: str

    @classmethod
    def of(cls, response_id: str, rollout: Path) -> Self:
        """As `rollout` knows it."""
        row = _row(rollout, "rollouts", response_id=response_id)
        assert row
        return cls(response_id, row["group_id"], row["prompt_id"])

    def facts(self, artifact: Artifact) -> dict[str, Any]:
        """What the artifact says of it; nothing if it is not in it."""
        by_stage = {
            "prompts": self._prompt,
            "select": self._selection,
            "rollout": self._rollout,
            "score": self._score,
            "filter": self._decision,
        }
        look = by_stage.get(artifact.stage)
        return look(artifact.path) if look else {}

    def _prompt(self, path: Path) -> dict[str, Any]:
        row = _row(path, "prompts", prompt_id=self.prompt_id)
        if not row:
            return {}
        text = row["prompt"][-1]["content"]
        return {"prompt_id": self.prompt_id, "prompt": text} | _some(row, "answer", "task")

    def _selection(self, path: Path) -> dict[str, Any]:
        row = _row(path, "selection", group_id=self.group_id)
        names = ("group_id", "why", "weight", "pass_rate", "evidence", "position", "epoch")
        return _some(row, *names)

    def _rollout(self, path: Path) -> dict[str, Any]:
        row = _row(path, "rollouts", response_id=self.response_id)
        return _some(row, "response_id", "length", "finish_reason", "seed", "temperature", "text")

    def _score(self, path: Path) -> dict[str, Any]:
        row = _row(path, "scores", response_id=self.response_id)
        parts = [name for name in row if name.startswith("part_")]
        return _some(row, "verdict", "extracted", "acc", "penalty", *parts, "reward")

    def _decision(self, path: Path) -> dict[str, Any]:
        group = _row(path, "groups", group_id=self.group_id)
        if not group:
            return {}
        row = _row(path, "batch", response_id=self.response_id)
        said = {"advantage": row["advantage"]} if row else {}
        return _some(group, "decision", "reason", "acc_mean", "age") | {"batch": bool(row)} | said


def _row(path: Path, table: str, **key: str) -> dict[str, Any]:
    """The row with that key and every column that it has; empty if there is none."""
    for file in tables.files(path, table):
        found = tables.collect(pl.scan_parquet(file).filter(**key).head(1), str(file))
        if len(found):
            return found.row(0, named=True)
    return {}


def _some(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names if row.get(name) is not None}


class _Tracer:
    """Builds the two trees around a start."""

    def __init__(
        self, records: Records, *, run: Path | None, full: bool, response: Response | None
    ) -> None:
        self.records = records
        self.run = run
        self.full = full
        self.response = response
        self._nodes: dict[Path, Node] = {}

    @classmethod
    def around(cls, start: Path, *, full: bool, response: Response | None = None) -> Self:
        """With the records of the run that `start` lies in, if it lies in one."""
        run = next((path for path in start.parents if (path / CONFIG).is_file()), None)
        records = Records(runs.artifacts_below(run) if run else ())
        return cls(records, run=run, full=full, response=response)

    def lineage(self, start: Path) -> Lineage:
        return Lineage(
            start=self._node(start),
            run=self.run,
            made_from=self._made_from(start),
            made_of_it=self._made_of(start),
            response=self.response.response_id if self.response else None,
        )

    def _node(self, path: Path) -> Node:
        if path not in self._nodes:
            artifact = self.records.artifact(path)
            inside = self.run and path.is_relative_to(self.run)
            place = str(path.relative_to(self.run)) if self.run and inside else str(path)
            facts = self.response.facts(artifact) if self.response and artifact else {}
            self._nodes[path] = Node(place, path, artifact, facts)
        return self._nodes[path]

    def _made_from(self, start: Path) -> list[Branch | Gap]:
        """Breadth first, so that what several were made from is shown where it is nearest."""
        root, seen = Branch("", self._node(start)), {start}
        waiting = deque([root])
        while waiting:
            parent = waiting.popleft()
            for link in self.records.inputs(parent.node.path):
                branch = self._branch(link, link.source, repeated=link.source in seen)
                parent.branches.append(branch)
                if branch.repeated:
                    continue
                seen.add(link.source)
                if link.role in CHAINS:
                    chain = self._back(link)
                    seen.update(each.source for each in chain)
                    branch.chain = self._branches(chain, back=True)
                else:
                    waiting.append(branch)
        return root.branches

    def _back(self, link: Link) -> list[Link]:
        """What leads on from the source of `link`, input by input."""
        chain, seen = [link], {link.product, link.source}
        while self._carries(chain[-1]):
            inputs = self.records.inputs(chain[-1].source)
            on = next((each for each in inputs if each.role == CHAINS[link.role]), None)
            if on is None or on.source in seen:
                break
            seen.add(on.source)
            chain.append(on)
        return chain[1:]

    def _made_of(self, start: Path) -> list[Branch | Gap]:
        """Every use, and theirs, as far as the next policies and what these made."""
        root, seen = Branch("", self._node(start)), {start}
        waiting = deque([root])
        while waiting:
            parent = waiting.popleft()
            policy = parent.node.artifact is not None and parent.node.artifact.stage in POLICIES
            for group in self._uses(parent.node):
                alike = [link for link in group if link.product not in seen]
                seen.update(link.product for link in alike)
                branches = self._branches(alike, back=False)
                parent.branches += branches
                for link, branch in self._paired(alike, branches):
                    passed_on = link.role == "carried" and self.response is not None
                    if policy or len(alike) > ROOM or (link.role in CHAINS and not passed_on):
                        branch.chain = self._branches(self._on(link, seen), back=False)
                    else:
                        waiting.append(branch)
        return root.branches

    def _paired(
        self, links: Sequence[Link], branches: Sequence[Branch | Gap]
    ) -> Iterator[tuple[Link, Branch]]:
        """The branches that are shown, each with its link."""
        by_product = {link.product: link for link in links}
        for branch in branches:
            if isinstance(branch, Branch):
                yield by_product[branch.node.path], branch

    def _uses(self, node: Node) -> list[list[Link]]:
        """What was made from it, alike ones together; of a response, only what it passed into."""
        alike: dict[tuple[str, str], dict[Path, Link]] = defaultdict(dict)
        for link in self.records.uses(node.path):
            stage = self._stage(link.product)
            if self._carries(link) and self._concerns(link, stage):
                alike[link.role, stage].setdefault(link.product, link)
        return [list(links.values()) for links in alike.values()]

    def _concerns(self, link: Link, stage: str) -> bool:
        """Whether the response, if one is looked at, passed from source to product."""
        if self.response is None:
            return True
        if stage == "update" and link.role == "batch":
            batch = self._node(link.source).facts
            if batch.get("batch"):
                self._train(link.product, batch)
            return bool(batch.get("batch"))
        return stage not in ("score", "filter") or bool(self._node(link.product).facts)

    def _train(self, update: Path, batch: dict[str, Any]) -> None:
        node = self._node(update)
        step = re.search(r"step_(\d+)", node.place)
        facts = {"step": int(step[1]) if step else node.place, "advantage": batch["advantage"]}
        self._nodes[update] = Node(node.place, node.path, node.artifact, facts)

    def _on(self, link: Link, seen: set[Path]) -> list[Link]:
        """The policies or selections that follow on its product, originals and no variants."""
        stage, chain = self._stage(link.product), [link]
        while (link.role, stage) in (("policy", "update"), ("previous", "select")):
            on = next(
                (
                    each
                    for each in self.records.uses(chain[-1].product)
                    if (each.role, self._stage(each.product)) == (link.role, stage)
                    and each.product not in seen
                    and not VARIANT.search(each.product.name)
                ),
                None,
            )
            if on is None:
                break
            seen.add(on.product)
            chain.append(on)
        return chain[1:]

    def _carries(self, link: Link) -> bool:
        """Whether anything was handed over: an input of carried groups may hold none."""
        source = self.records.artifact(link.source)
        return link.role != "carried" or source is None or source.record["rows"]["carried"] > 0

    def _stage(self, path: Path) -> str:
        artifact = self.records.artifact(path)
        return artifact.stage if artifact else ""

    def _branch(self, link: Link, at: Path, *, repeated: bool = False) -> Branch:
        return Branch(link.role, self._node(at), self.records.mark(link), repeated)

    def _branches(self, links: Sequence[Link], *, back: bool) -> list[Branch | Gap]:
        """A branch for each link to its source, or to its product; both ends of what is long."""
        ends = [link.source if back else link.product for link in links]
        if self.full or len(links) <= ROOM:
            return [self._branch(link, at) for link, at in zip(links, ends, strict=True)]
        shown = [*zip(links, ends, strict=True)]
        what = "steps" if self._stage(ends[0]) == "update" else ""
        return [
            *(self._branch(link, at) for link, at in shown[:HEAD]),
            Gap(len(links) - HEAD - TAIL, what),
            *(self._branch(link, at) for link, at in shown[-TAIL:]),
        ]


def mermaid(lineage: Lineage) -> str:
    """The lineage as a Mermaid flowchart: arrows go from what was used to what was made of it."""
    ids: dict[Path, str] = {}
    lines = ["flowchart LR"]

    def name(node: Node) -> str:
        if node.path not in ids:
            ids[node.path] = f"n{len(ids)}"
            lines.append(f'  {ids[node.path]}["{_label(node)}"]')
        return ids[node.path]

    def arrow(source: str, product: str, role: str, mark: str = "") -> None:
        said = f'|"{_quoted(", ".join(filter(None, (role, mark))))}"|' if role or mark else ""
        lines.append(f"  {source} {'-.->' if mark or not role else '-->'}{said} {product}")

    def draw(above: str, branches: Sequence[Branch | Gap], *, back: bool) -> None:
        for branch in branches:
            if isinstance(branch, Branch):
                here = name(branch.node)
                ends = (here, above) if back else (above, here)
                arrow(*ends, branch.role, branch.mark)
                draw(here, branch.branches, back=back)
                draw_chain(here, branch.chain, back=back)
            else:
                arrow(*((gap(branch), above) if back else (above, gap(branch))), "")

    def draw_chain(above: str, chain: Sequence[Branch | Gap], *, back: bool) -> None:
        after_gap = False
        for link in chain:
            shown = isinstance(link, Branch)
            here = name(link.node) if isinstance(link, Branch) else gap(link)
            role, mark = (link.role, link.mark) if isinstance(link, Branch) else ("", "")
            ends = (here, above) if back else (above, here)
            arrow(*ends, "" if after_gap else role, mark)
            above, after_gap = here, not shown

    def gap(of: Gap) -> str:
        lines.append(f'  g{len(lines)}(["{of}"])')
        return lines[-1].split("(")[0].strip()

    start = name(lineage.start)
    draw(start, lineage.made_from, back=True)
    draw(start, lineage.made_of_it, back=False)
    lines.append(f"  style {start} stroke-width:3px")
    return "\n".join(lines) + "\n"


def _label(node: Node) -> str:
    facts = "".join(f"<br/>{_quoted(line)}" for line in _short_facts(node.facts))
    marks = "".join(f"<br/>{mark}" for mark in node.marks)
    return _quoted(node.place) + marks + facts


def _short_facts(facts: dict[str, Any]) -> Iterator[str]:
    """Without what models and data wrote."""
    for name, value in facts.items():
        if name not in UNTRUSTED:
            yield f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def _quoted(text: str) -> str:
    """For a quoted Mermaid text, which knows characters by their numbers."""
    return re.sub(r'["#<>&`;\\\n|\[\]{}]', lambda found: f"#{ord(found[0])};", text)
