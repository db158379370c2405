"""Runs in an S3 bucket, on a real server: whatever is lost here, the store has what counts."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from small_run import SMALL, digests, run
from typer.testing import CliRunner

from pipeline import artifacts, mirror, read, runs, samples
from pipeline.artifacts import RECORD, Artifact
from pipeline.cli import app
from pipeline.config import composed, load, parse
from pipeline.lease import LOCK, STALE_S, Lease, Owner
from pipeline.mirror import owned
from pipeline.storage import Store
from stages.errors import InputError, StorageError

BUCKET = "experiments"
KEYS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "a-secret-key",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "2",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Gate:
    """The way to a server: while it is shut, every connection is closed without an answer."""

    def __init__(self, server: int) -> None:
        self.server, self.shut, self.refused = server, False, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.shut = True
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            self.shut = False

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self.shut:
                self.refused += 1
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.server))
            self._open += [client, server]
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """The way to an S3 server in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None and time.monotonic() < deadline
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        yield Gate(port)
    finally:
        server.kill()
        server.wait()


@pytest.fixture(autouse=True)
def cache(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for mirrors, and an environment that knows the server."""
    from s3fs import S3FileSystem

    known = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{gate.port}"}
    for name, value in {**known, "DAPO_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DAPO_DATA", raising=False)
    S3FileSystem.clear_instance_cache()
    S3FileSystem().mkdirs(BUCKET, exist_ok=True)
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A data root in the bucket that no other test knows."""
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def stored(root: str, finished: Path, cache: Path) -> str:
    """The finished run, in the store and nowhere else."""
    upload(finished, root)
    shutil.rmtree(cache)
    return f"{root}/runs/small"


def upload(data: Path, root: str) -> None:
    """As if the run had been trained there: what is here and not in the store is uploaded."""
    place = mirror.run_place(root, "small")
    shutil.copytree(data / "runs" / "small", mirror.directory(place))
    with owned(place) as ours:
        assert ours
        ours.push_text("config.yaml")
        ours.push_text("latest")


def asked(*arguments: str, cache: Path, root: str) -> str:
    """What the command prints, in this process."""
    environment = {"DAPO_CACHE": str(cache), "DAPO_DATA": root}
    ended = CliRunner().invoke(app, arguments, env=environment, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def dapo(*arguments: str, cache: Path, root: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a child process, with mirrors in `cache`."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "DAPO_CACHE": str(cache), "DAPO_DATA": root},
        check=False,
    )


def objects(url: str, below: str = "") -> set[str]:
    return set(Store(url).versions(below))


def weights_below(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


SCORE, UPDATE = "step_0001/round_0/score", "step_0001/update"
SHARD = "scores/part-00000.parquet"


@pytest.mark.slow
def test_a_run_killed_halfway_whose_mirror_is_lost_ends_in_the_same_weights(
    root: str, finished: Path, tmp_path: Path
) -> None:
    command = ["train", "--direct", *SMALL, f"data={root}"]
    with (tmp_path / "output").open("w") as output:
        victim = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *command],
            env={**os.environ, "DAPO_CACHE": str(tmp_path / "lost")},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while not list((tmp_path / "lost").glob("*/runs/small/step_0001/.draft-update-*")):
            assert victim.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    url = f"{root}/runs/small"
    assert any(name.startswith(LOCK) for name in objects(url))  # it had no time to give it back
    done = {name: Store(url).read([name]) for name in objects(url) if name.endswith(RECORD)}
    assert f"{SCORE}/{RECORD}" in done and f"{UPDATE}/{RECORD}" not in done
    shutil.rmtree(tmp_path / "lost")
    again = dapo(*command, cache=tmp_path / "new", root="")
    assert again.returncode == 0, again.stderr
    assert {name: Store(url).read([name]) for name in done} == done  # nothing was done twice
    seen = mirror.looked_at(url, mirror.everything)  # by a third machine
    assert digests(seen) == digests(finished / "runs" / "small")
    assert runs.verify(seen) == (len(digests(seen)), [])
    assert (seen / "latest").read_text() == "step_0002/update"
    assert (seen / "best").read_text() == "step_0000/warmstart"  # never right: a tie
    assert not any(name.startswith(LOCK) for name in objects(url))


def test_a_stage_is_rerun_from_the_store_alone_and_brings_no_weights(
    stored: str, root: str, cache: Path
) -> None:
    rerun = ("rerun", "--run", "small", "--step", "1", "--stage", "score")
    asked(*rerun, "score.overlong_factor=0.5", cache=cache, root=root)
    variant = f"{SCORE}.variant-1"
    assert objects(stored, variant) == {f"{variant}/{RECORD}", f"{variant}/{SHARD}"}
    assert weights_below(cache) == []
    record = artifacts.load(mirror.looked_at(stored) / variant)
    assert record.recipe.config["overlong_factor"] == 0.5


def test_every_command_that_looks_finds_what_it_needs_in_the_store(
    stored: str, root: str, cache: Path, tmp_path: Path
) -> None:
    def look(*arguments: str) -> str:
        return asked(*arguments, cache=cache, root=root)

    assert {row["state"] for row in json.loads(look("ls", "small", "--json"))} == {"whole"}
    (listed,) = json.loads(look("ls", "--json"))
    assert (listed["run"], listed["steps"], listed["directory"]) == ("small", 2, stored)
    assert not list(cache.rglob("*.parquet"))  # the records say it all
    shown = json.loads(look("show", f"{stored}/{SCORE}", "--json"))
    assert (shown["record"]["stage"], shown["tables"]["scores"]["count"]) == ("score", 24)
    assert len(list(cache.rglob("*.parquet"))) == 1
    assert "24 rows" in look("show", str(mirror.directory(stored) / SCORE))
    assert "settings: the same" in look("compare", f"{stored}/{SCORE}", f"{stored}/{SCORE}")
    assert "as it ran" in look("simulate", "small", "--repeats", "1")
    again = ("score", "--rollouts", f"{stored}/step_0001/round_0/rollout")
    prompts, out = f"{stored}/prompts", tmp_path / "out"
    assert look(*again, "--prompts", prompts, "--out", str(out), *SMALL).startswith("built")
    assert artifacts.load(out).digest == artifacts.load(mirror.directory(stored) / SCORE).digest
    assert weights_below(cache) == []
    assert "15 artifacts, 0 problems" in look("verify", stored)
    assert weights_below(cache)


def test_a_run_is_asked_about_in_the_store_and_brings_only_the_tables_that_a_query_names(
    stored: str, root: str, cache: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*arguments: str) -> str:
        return asked(*arguments, cache=cache, root=root)

    def brought() -> set[str]:
        return {path.parent.name for path in cache.rglob("*.parquet")}

    there = finished / "runs/small"
    curves = read.run(there).curves.select("step", "acc").collect().to_dicts()
    shown = json.loads(look("metrics", "small", "--columns", "acc", "--json"))
    assert [{"step": row["step"], "acc": row["acc"]} for row in shown] == curves
    assert not brought()  # the records say it all
    states = json.loads(look("sql", "select distinct state from artifacts", "--json"))
    assert states == [{"state": "whole"}] and not brought()
    (count,) = json.loads(look("sql", "select count(*) as n from scores", "--json"))
    assert (count["n"], brought()) == (36, {"scores"})
    monkeypatch.setenv("DAPO_DATA", root)
    groups = read.run(stored).groups
    assert brought() == {"scores"}
    assert groups.filter(step=1).collect().equals(read.run(there).groups.filter(step=1).collect())
    assert len(list(cache.rglob("groups/*.parquet"))) == 1  # of that step
    (sampled,) = json.loads(look("samples", stored, "--limit", "1", "--json"))
    assert sampled in samples.find(read.run(there), samples.Wanted(), limit=1)[0].to_dicts()
    told = json.loads(look("explain", sampled["response_id"], "--run", stored, "--json"))
    assert told[1]["texts"]["text"] == sampled["text"]
    assert "nothing" not in look("lineage", sampled["response_id"])
    assert "made from" in look("lineage", f"{stored}/{SCORE}")
    assert "first difference: none" in look("compare", stored, str(there))
    assert weights_below(cache) == []


def test_a_finished_run_is_served_from_the_store_without_work(
    stored: str, root: str, cache: Path
) -> None:
    assert run(root) == []
    assert weights_below(cache) == []


def test_an_upload_that_ended_before_the_record_is_no_artifact_and_is_made_again(
    stored: str, root: str, finished: Path
) -> None:
    store = Store(stored)
    store.remove([f"{SCORE}/{RECORD}"])
    store.write(f"{SCORE}/scores/part-00007.parquet", b"of another attempt")
    seen = mirror.looked_at(stored)
    assert not (seen / SCORE).exists()
    assert run(root) == ["step-1 / round-0 / score"]
    assert digests(seen) == digests(finished / "runs" / "small")
    assert objects(stored, SCORE) == {f"{SCORE}/{name}" for name in (RECORD, SHARD)}


def test_a_short_failure_is_waited_out(stored: str, gate: Gate) -> None:
    store = Store(stored)
    store.versions()
    with gate.closed():
        threading.Timer(0.3, lambda: setattr(gate, "shut", False)).start()
        store.write("note", b"arrived")
    assert gate.refused and store.read(["note"]) == {"note": b"arrived"}


def test_work_that_was_not_all_uploaded_is_no_artifact_until_the_next_command_ends_it(
    stored: str, root: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "step_0001/round_0/filter"
    Store(stored).remove(objects(stored, place))
    upload = Store.upload

    def interrupted(self: Store, files: dict[str, Path]) -> None:
        first, *rest = sorted(files)
        upload(self, {first: files[first]})
        with gate.closed():
            upload(self, {name: files[name] for name in rest})

    with monkeypatch.context() as patched:
        patched.setattr(Store, "upload", interrupted)
        with pytest.raises(StorageError, match=f"{stored}: .*the same command goes on from here"):
            run(root)
    record = (mirror.directory(stored) / place / RECORD).read_bytes()
    assert len(objects(stored, place)) == 1  # and it is no record
    assert run(root) == []
    assert Store(stored).read([f"{place}/{RECORD}"]) == {f"{place}/{RECORD}": record}
    seen = mirror.looked_at(f"{stored}/{place}", mirror.everything)
    assert artifacts.load(seen).changed_files(full=True) == []


def test_a_store_that_is_away_is_one_clear_message_and_the_same_command_goes_on(
    stored: str, root: str, gate: Gate, cache: Path
) -> None:
    command = ("train", "--direct", *SMALL)
    with gate.closed():
        failed = dapo(*command, cache=cache, root=root)
    assert failed.returncode == 1
    assert "the same command goes on from here" in failed.stderr and stored in failed.stderr
    assert "Traceback" not in failed.stderr and "a-secret-key" not in failed.stderr
    again = dapo(*command, cache=cache, root=root)
    assert again.returncode == 0, again.stderr


def test_a_second_owner_is_refused_until_the_first_is_dead(stored: str, tmp_path: Path) -> None:
    script = (
        "from pipeline.lease import Lease; from pipeline.storage import Store; import time\n"
        f"with Lease(Store({stored!r})).held(): print('held', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert owner.stdout and owner.stdout.readline()
        refusal = f"{stored} is in use by pid {owner.pid} on {socket.gethostname()}"
        with pytest.raises(InputError, match=refusal), owned(stored):
            pass
    finally:
        owner.kill()
        owner.wait()
    with owned(stored):  # a dead process of this machine needs no waiting
        pass
    assert not any(name.startswith(LOCK) for name in objects(stored))


def test_an_owner_elsewhere_is_believed_while_it_gives_signs_of_life(stored: str) -> None:
    store = Store(stored)
    theirs = replace(Owner.here(), token="theirs", host="node7", boot="another")

    def heard(seconds_ago: float) -> None:
        owner = replace(theirs, beat=time.time() - seconds_ago)
        store.write(f"{LOCK}/00000004", json.dumps(asdict(owner)).encode())

    heard(STALE_S - 20)
    with pytest.raises(InputError, match=r"in use by pid \d+ on node7, last heard of 40 s ago"):
        Lease(store)._acquire()
    heard(STALE_S + 1)
    ours = Lease(store)
    with ours.held():
        assert objects(stored, LOCK) == {f"{LOCK}/00000005"}
        # and now somebody takes us for dead
        store.write(f"{LOCK}/00000006", json.dumps(asdict(replace(theirs))).encode())
        ours._owner = replace(ours._owner, beat=0)
        with pytest.raises(StorageError, match=r"was lost.* on node7 owns it now"):
            ours.check()
    assert objects(stored, LOCK) == {f"{LOCK}/00000006"}  # not ours to remove


def test_an_object_is_created_once_however_many_try(root: str) -> None:
    store, created = Store(root), list[bool]()
    threads = [
        threading.Thread(target=lambda i=i: created.append(store.create("lock", b"%d" % i)))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False] * 5 + [True]


def test_of_many_that_want_a_run_at_once_one_gets_it(stored: str) -> None:
    wanting = [Lease(Store(stored)) for _ in range(6)]
    won: list[Lease] = []

    def want(lease: Lease) -> None:
        with suppress(InputError):
            lease._acquire()
            won.append(lease)

    threads = [threading.Thread(target=want, args=(lease,)) for lease in wanting]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = won
    winner._release()


def without_weights(stored: str) -> bool:
    left = objects(stored, UPDATE)
    assert f"{UPDATE}/config.json" in left and f"{UPDATE}/{RECORD}" in left
    return not [name for name in left if name.endswith(".safetensors") or "/optimizer/" in name]


def test_retired_weights_go_from_the_store_and_from_every_mirror(
    stored: str, root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "elsewhere"))
    elsewhere = mirror.looked_at(f"{stored}/{UPDATE}", mirror.everything)
    assert weights_below(elsewhere) and not without_weights(stored)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "here"))
    assert run(root, ["schedule.keep_policies=1"]) == []
    assert without_weights(stored)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "elsewhere"))
    assert mirror.looked_at(f"{stored}/{UPDATE}", mirror.everything) == elsewhere
    assert not weights_below(elsewhere)
    assert runs.state(artifacts.load(elsewhere)) == "retired"


def test_weights_that_were_retired_here_but_not_in_the_store_go_with_the_next_command(
    root: str, finished: Path
) -> None:
    upload(finished, root)
    stored = f"{root}/runs/small"
    artifacts.retire(artifacts.load(mirror.directory(stored) / UPDATE))
    assert not without_weights(stored)
    assert artifacts.load(mirror.looked_at(stored) / UPDATE).retired  # looking takes nothing back
    with owned(stored):
        pass
    assert without_weights(stored)


def test_what_is_replaced_is_gone_before_the_new_one_is_there(
    stored: str, root: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = SCORE.replace("0001", "0002")
    during: list[set[str]] = []
    publish = artifacts.publish

    def watched(*args: Any, **details: Any) -> Artifact:
        during.append(objects(stored, place))
        return publish(*args, **details)

    monkeypatch.setattr(artifacts, "publish", watched)
    rerun = ("rerun", "--run", "small", "--step", "2", "--stage", "score", "--replace")
    printed = asked(*rerun, "score.overlong_factor=0.5", cache=cache, root=root)
    assert "stale now" in printed and during == [set()]
    record = json.loads(Store(stored).read([f"{place}/{RECORD}"])[f"{place}/{RECORD}"])
    assert record["pinned"] and record["recipe"]["config"]["overlong_factor"] == 0.5
    with owned(stored) as ours:
        assert ours
        ours.drop(ours.directory / place)  # … and killed before the new one was published
    assert not (mirror.looked_at(stored) / place).exists()


def test_an_artifact_that_another_machine_built_again_takes_the_place_of_ours(
    stored: str, root: str, data: Path
) -> None:
    here = mirror.looked_at(stored, mirror.everything)
    theirs = data / "runs" / "small" / SCORE
    old = artifacts.load(theirs)
    shutil.copytree(theirs / "scores", data / "draft" / "scores")
    made = artifacts.publish(
        data / "draft",
        theirs,
        recipe=old.recipe,
        metrics={"acc": 0.5},
        started=0,
        replace_existing=True,
        sources=old.record["sources"],
    )
    store = Store(stored)
    store.write(f"{SCORE}/{RECORD}", (theirs / RECORD).read_bytes())
    found = artifacts.load(mirror.looked_at(f"{stored}/{SCORE}", mirror.tables))
    assert found.path == here / SCORE and found.metrics == made.metrics
    assert found.changed_files(full=True) == []


def test_a_file_that_is_not_as_its_record_says_is_refused_by_name(stored: str) -> None:
    shard = f"{SCORE}/{SHARD}"
    Store(stored).write(shard, b"PAR1 something else")
    with pytest.raises(InputError, match=f"{stored}/{shard} is not the file that the record"):
        mirror.looked_at(f"{stored}/{SCORE}", mirror.tables)


def test_a_run_that_is_gone_from_the_store_is_not_taken_from_the_mirror_in_silence(
    stored: str,
) -> None:
    here = mirror.looked_at(stored)
    store = Store(stored)
    store.remove(objects(stored))
    with pytest.raises(InputError, match=f"{stored} is gone, and {here} has a part of it"):
        mirror.looked_at(stored)
    assert (here / SCORE / RECORD).exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://me:a-secret-key@bucket/x", "must not carry a user, a secret or a query"),
        ("https://host/x?sig=a-secret-key", "must not carry a user, a secret or a query"),
        ("s3://bucket/run*", r"\* has a meaning of its own"),
        ("s3://", "expected a bucket"),
    ],
)
def test_a_url_with_a_secret_or_a_pattern_is_refused_and_not_repeated(
    url: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        load([f"data={url}"])
    assert "a-secret-key" not in str(refused.value)
    with pytest.raises(InputError, match=message) as refused:
        parse(composed(["data=/tmp"]).replace("data: /tmp", f"data: '{url}'"))
    assert "a-secret-key" not in str(refused.value)


def test_a_bucket_that_is_not_there_and_an_unknown_kind_of_store_are_named() -> None:
    with pytest.raises(
        InputError, match=r"s3://nowhere-at-all/x/.*FileNotFoundError.*make the buc"
    ):
        run("s3://nowhere-at-all/x")
    with pytest.raises(InputError, match=r"s4://bucket/x.*expected s3://bucket/prefix, or a path"):
        Store("s4://bucket/x")


def test_a_url_stays_what_it_is_in_a_saved_configuration(cache: Path) -> None:
    config = parse(composed(["data=s3://bucket/prefix/", "run=mine"]))
    assert (config.data, config.place) == ("s3://bucket/prefix", "s3://bucket/prefix/runs/mine")
    assert config.directory.parent.parent.parent == cache
    other = parse(composed(["data=s3://bucket/prefix2", "run=mine"]))
    assert other.directory != config.directory


@pytest.mark.parametrize("kind", ["memory://anywhere", "file://{}/store"])
def test_any_store_that_fsspec_knows_will_do(kind: str, finished: Path, tmp_path: Path) -> None:
    root = kind.format(tmp_path)
    upload(finished, root)
    shutil.rmtree(tmp_path / "cache")
    seen = mirror.looked_at(f"{root}/runs/small", mirror.everything)
    assert digests(seen) == digests(finished / "runs" / "small")
    found: list[Artifact] = list(runs.artifacts_below(seen))
    for artifact in found:
        assert artifact.changed_files(full=True) == []
        for name, known in artifact.record["files"].items():  # so that no file is hashed again
            assert (artifact.path / name).stat().st_mtime_ns == known["mtime_ns"]


def test_tables_that_one_query_joins_are_brought_together(finished: Path, cache: Path) -> None:
    upload(finished, "memory://joined")
    shutil.rmtree(cache)
    there, here = (read.run(run) for run in ("memory://joined/runs/small", finished / "runs/small"))
    assert there.responses.collect().equals(here.responses.collect())
    store = Store("memory://joined/runs/small")
    store.write("step_0001/update/metrics/part-00000.parquet", b"something else")
    with pytest.raises(InputError, match="is not the file that the record describes"):
        there.metrics.collect()


def test_a_local_run_knows_nothing_of_stores(data: Path) -> None:
    script = (
        "import sys; from pipeline import runs, loop; from pipeline.mirror import owned\n"
        "run = runs.find(sys.argv[1])\n"
        "with owned(run) as mirror: assert mirror is None\n"
        "print(*(name for name in ('fsspec', 's3fs') if name in sys.modules))"
    )
    place = str(data / "runs" / "small")
    ended = subprocess.run(
        [sys.executable, "-c", script, place], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == ""
