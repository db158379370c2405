"""Programs: the last fenced block of a response runs against tests, in a box of its own.

A supervisor process forks the judged one, keeps the clock, and ends it with all that it started.
The box is made of Linux' namespaces (from 5.14 on): no network, no process but its own in sight, no
files but the interpreter and /usr, read-only, and a small /tmp in memory. A program has the
standard library, nothing of the caller's environment, and bounded memory, output, processes and CPU
time; root's are run by nobody (uid 65534).

It is no security boundary. There is no seccomp filter: a bug of the kernel is a way out. Memory is
bounded per process, of which there may be 32; files in memory are bounded in size and number only.
A program shares its interpreter with gold's `tests`: exits, faked output and patched built-ins earn
nothing, but one that searches the stack's frames can read the tests and forge success, and an
object that equals everything passes `==`. `cases` show it nothing but their input. Hashes are
seeded; time, random numbers and the machine's speed are not: what depends on them may be judged
differently next time.

network=allowed does without namespaces. Then a program has the network, and whatever files and
processes are in its user's reach, but it can start no thread and no process. Let its user be root,
which becomes nobody, or one made for it.
"""

import _ast
import ast
import ctypes
import inspect
import json
import marshal
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any, Literal, NamedTuple

from pydantic import Field

from stages.checkers import Checker, Verdict, unscorable
from stages.errors import InputError

PYTHON = os.path.realpath(sys.executable)  # not the virtual environment's link, which has no stdlib
FAILURES = {"wrong", "error", "memory", "timeout"}
LANGUAGES = {"", "python", "py"}
SHOWN = 2000  # characters of `extracted`
MAX_FILE = 8 * 2**20  # bytes that a program may print, or write to one file
START_S = 60  # for the interpreter to start on a busy machine; not the program's time
TESTS = (ast.Assert, ast.Expr, ast.If, ast.For, ast.While, ast.With, ast.Try)  # others prepare
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "TMPDIR": "."}


class Gold(NamedTuple):
    """Either tests, and which of their statements count, or (stdin, stdout) of each case."""

    tests: str
    counts: list[bool]
    cases: list[tuple[str, str]]


class Run(NamedTuple):
    """`passed` are the tests that passed; `failure` is what went wrong first: verdict and why."""

    passed: set[int]
    failure: tuple[str, str] | None
    seconds: float = 0.0


class Code(Checker):
    """Right where all tests pass; `extracted` is then the program, else what went wrong first.

    Gold is JSON: {"tests": "asserts, run after the program"}, where the program is a module and
    not __main__, or {"cases": [{"input": "stdin", "output": "stdout"}, …]}, where white space at
    the end of a line or of the output does not count.
    """

    timeout_s: float = Field(5.0, gt=0, le=3600)  # wall clock, for all tests of a program together
    memory_mib: int = Field(512, ge=16)  # address space of a process beyond the interpreter's own
    partial: bool = False  # acc is the share of the tests that passed
    network: Literal["none", "allowed"] = "none"  # allowed: without the box

    def check(self, text: str, gold: str) -> Verdict:
        """Raises `InputError` where there can be no box: no program runs unprotected."""
        try:
            tests, counts, cases = _parsed(gold)
        except ValueError as error:
            return unscorable(str(error))
        if (program := last_program(text)) is None:
            return Verdict(0.0, "no_answer", None)
        of = len(cases) or sum(counts)
        run = self._cases(program, cases) if cases else self._tests(program, tests, counts)
        if run.failure is None and len(run.passed) == of:
            return Verdict(1.0, "right", program[:SHOWN])
        word, why = run.failure or ("wrong", f"it ended after {len(run.passed)} of {of} tests")
        acc = len(run.passed) / of if self.partial else 0.0
        return Verdict(acc, "partial" if acc else word, why[:SHOWN])

    @staticmethod
    def gold_problem(gold: str) -> str | None:
        """Why no response could be judged by it, found without running it; None if one can."""
        try:
            _parsed(gold)
        except ValueError as error:
            return str(error)
        return None

    def _tests(self, program: str, tests: str, counts: list[bool]) -> Run:
        job = {"program": program, "tests": tests, "counts": counts}
        with open(os.devnull, "wb") as printed:
            return self._run(job, "", printed, seconds=self.timeout_s)

    def _cases(self, program: str, cases: list[tuple[str, str]]) -> Run:
        job = {"program": program, "tests": "", "counts": []}
        passed: set[int] = set()
        failure, left = None, self.timeout_s
        for number, (given, expected) in enumerate(cases):
            with tempfile.TemporaryFile() as printed:
                _, problem, seconds = self._run(job, given, printed, seconds=left)
                output = _read(printed)
            left = max(left - seconds, 0)
            if problem is None and _lines(output) == _lines(expected):
                passed.add(number)
                continue
            difference = f"expected {expected[:200]!r}, printed {output[:200]!r}"
            word, why = problem or ("wrong", difference)
            failure = failure or (word, f"case {number + 1} of {len(cases)}: {why}")
            if word == "timeout" or not self.partial:
                break
        return Run(passed, failure)

    def _run(self, job: dict[str, Any], given: str, printed: IO[bytes], *, seconds: float) -> Run:
        nonce = secrets.token_hex()  # proves a report to be no print of the program's
        job |= {"nonce": nonce, "seconds": seconds, "memory": self.memory_mib * 2**20}
        job |= {"boxed": self.network == "none", "partial": self.partial, "max_file": MAX_FILE}
        # the box hides the directory; only without it would something be left there
        place = nullcontext(tempfile.gettempdir()) if job["boxed"] else _passing_directory()
        with (
            place as directory,
            tempfile.TemporaryFile() as job_file,
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as report,  # the supervisor's
            tempfile.TemporaryFile() as marks,  # of the tests, so within the program's reach
        ):
            job_file.write(marshal.dumps(job))
            stdin.write(given.encode())
            job_file.seek(0)
            stdin.seek(0)
            files = [job_file.fileno(), marks.fileno()]
            child = subprocess.Popen(
                [PYTHON, "-s", "-S", "-P", "-X", "utf8", "-c", SUPERVISOR, *map(str, files)],
                cwd=directory,
                env=ENVIRONMENT,
                stdin=stdin,
                stdout=printed,
                stderr=report,
                pass_fds=files,
                start_new_session=True,
            )
            _wait(child, seconds + START_S)
            return _understood(_read(report), _read(marks), nonce)


def last_program(text: str) -> str | None:
    """The last block that ``` or ```python opens and ``` closes, each at the start of a line."""
    program, block, language, fence = None, list[str](), "", 0
    for line in text.split("\n"):
        info = line.rstrip().lstrip("`")
        ticks = len(line.rstrip()) - len(info)
        if fence and ticks >= fence and not info:
            program = "\n".join(block) if language in LANGUAGES else program
            fence = 0
        elif fence:
            block.append(line)
        elif ticks >= 3 and "`" not in info:
            block, language, fence = [], info.strip().lower(), ticks
    return program


def _parsed(gold: str) -> Gold:
    try:
        match json.loads(gold):
            case {"tests": str() as tests, **rest} if not rest:
                compile(tests, "tests", "exec", dont_inherit=True)  # finds what parsing does not
                counts = [isinstance(node, TESTS) for node in ast.parse(tests).body]
                if any(counts):
                    return Gold(tests, counts, [])
                raise ValueError("its tests test nothing")
            case {"cases": [_, *_] as cases, **rest} if not rest:
                return Gold("", [], [_case(case) for case in cases])
        raise ValueError('it is neither {"tests": "…"} nor {"cases": [{…}, …]}')
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"gold is unusable: {error}") from error


def _case(case: object) -> tuple[str, str]:
    match case:
        case {"input": str() as given, "output": str() as expected, **rest} if not rest:
            if max(len(given.encode()), len(expected.encode())) <= MAX_FILE:
                return given, expected
    raise ValueError(f'a case is {{"input": text, "output": text}}, not {str(case)[:200]}')


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]


@contextmanager
def _passing_directory() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="program-")
    try:
        yield directory
    finally:
        with suppress(RecursionError):  # a program can make directories as deep as that
            shutil.rmtree(directory, ignore_errors=True)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Until `child`, which keeps the clock itself, has ended; or `seconds`, should it not."""
    try:
        ended = os.pidfd_open(child.pid)  # Popen.wait(timeout) would poll, up to 50 ms late
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll(seconds * 1000)
        finally:
            os.close(ended)
    finally:
        child.kill()  # what it forked dies with it
        child.wait()


def _understood(report: str, marks: str, nonce: str) -> Run:
    said = _said(report, nonce)
    refused = [why for word, _, why in said if word == "refused"]
    ended = [(int(code), float(seconds)) for word, code, seconds in said if word == "ended"]
    if refused or not ended:
        why = refused[0] if refused else report[-500:] or "the supervisor was killed"
        raise InputError(
            f"no box to run programs in: {why}. It is made of namespaces, which sysctl "
            "(user.max_user_namespaces, kernel.unprivileged_userns_clone) or a container's seccomp "
            "profile may forbid; network=allowed does without: see stages/checkers/code.py"
        )
    marked = _said(marks, nonce)
    failures = [(word, why) for word, _, why in [*marked, *said] if word in FAILURES]
    [(code, seconds)] = ended
    if code:
        how = f"exit code {code}" if code > 0 else f"killed: {signal.strsignal(-code)}"
        failures.append(("error", how))
    passed = {int(number) for word, number, _ in marked if word == "passed"}
    return Run(passed, failures[0] if failures else None, seconds)


def _said(report: str, nonce: str) -> list[list[str]]:
    return [line.split(" ", 3)[1:] for line in report.split("\n") if line.startswith(nonce)]


# What follows runs in the child, from its source: its imports are at SUPERVISOR, and it may use
# nothing else of this module. The constants are those of Linux' headers.


def _supervise() -> None:
    with open(int(sys.argv[1]), "rb") as file:
        job = marshal.load(file)
    nonce = job.pop("nonce")
    say = _reporter(2, nonce)
    try:
        with open("/proc/self/statm") as sizes:
            job["memory"] += int(sizes.read().split()[0]) * resource.getpagesize()
        if job["boxed"]:
            _build_box()
        _call("prctl", 1, signal.SIGTERM)  # PR_SET_PDEATHSIG: should the caller be killed
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM])
        started = time.monotonic()
        if not (judged := os.fork()):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, signal.SIGTERM])
            _lock_in(job)
    except Exception as error:
        say("refused", 0, error)
        os._exit(1)
    if not judged:
        return _judge(job, _reporter(int(sys.argv[2]), nonce))
    event = signal.sigtimedwait([signal.SIGCHLD, signal.SIGTERM], job["seconds"])
    seconds = time.monotonic() - started
    os.kill(judged, signal.SIGKILL)  # and with the first process of its namespace, all others
    code = os.waitstatus_to_exitcode(os.waitpid(judged, 0)[1])
    if event is None:
        say("timeout", 0, f"not done after {job['seconds']:g} s")
    say("ended", code, seconds)
    os._exit(0)


def _reporter(file: int, nonce: str) -> Callable[[str, int, object], None]:
    write = os.write

    def say(word: str, number: int, detail: object) -> None:
        line = f"{nonce} {word} {number} {str(detail)[:500]}".replace("\n", " ")
        write(file, f"{line}\n".encode(errors="backslashreplace"))

    return say


def _build_box() -> None:
    """New namespaces, and over the working directory a file system that becomes their root."""
    os.umask(0o022)
    if os.getuid():
        _own_users()
    _call("unshare", 0x20000 | 0x8000000 | 0x20000000 | 0x40000000)  # mounts, IPC, PIDs, network
    _call("mount", None, "/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
    root = os.getcwd()
    _call("mount", "box", root, "tmpfs", 2 | 4, "size=16m,nr_inodes=4k,mode=755")
    os.chdir(root)
    for path in ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix):
        if os.path.islink(path):
            os.symlink(os.readlink(path), f".{path}")
        elif os.path.isdir(path):
            os.makedirs(f".{path}", exist_ok=True)
            _call("mount", path, f".{path}", None, 0x1000 | 0x4000, None)  # MS_BIND | MS_REC
            read_only = (ctypes.c_uint64 * 4)(1 | 2 | 4)  # and no set-uid programs, no devices
            _call("syscall", 442, -100, f".{path}", 0x8000, read_only, 32)  # mount_setattr
    for path in ("tmp", "dev/shm"):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o1777)
    open("dev/null", "w").close()
    _call("mount", "/dev/null", "dev/null", None, 0x1000, None)


def _own_users() -> None:
    """A user namespace: every capability in it, none outside, and a count of its own processes."""
    uid, gid = os.getuid(), os.getgid()
    maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    _call("unshare", 0x10000000)
    for name, line in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _lock_in(job: dict[str, Any]) -> None:
    """The forked process gives up what it could do; nothing of this can be undone."""
    if root := not os.getuid():
        if not job["boxed"]:
            os.chown(".", 65534, 65534)
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        _call("prctl", 4, 1)  # PR_SET_DUMPABLE, for the files of /proc/self are root's else
    if job["boxed"]:
        if root:
            _own_users()  # the kernel counts processes in each, and never root's
        os.chroot(".")
        os.chdir("/tmp")
        _call("capset", (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)())
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    _call("prctl", 1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if not os.access(os.__file__, os.R_OK):
        raise PermissionError(f"user {os.getuid()} may not read {os.__file__}")
    for what, limit in (
        (resource.RLIMIT_AS, job["memory"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(job["seconds"]) + 2),
        (resource.RLIMIT_FSIZE, job["max_file"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 32 if job["boxed"] else 1),
    ):
        if 0 <= (hard := resource.getrlimit(what)[1]) < limit:
            raise ValueError(f"limit {limit} is over the caller's own of {hard}, rlimit {what}")
        resource.setrlimit(what, (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the supervisor's report, up to here


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*(a.encode() if isinstance(a, str) else a for a in arguments)):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")


def _judge(job: dict[str, Any], say: Callable[[str, int, object], None]) -> None:
    """The program, then the tests, by built-ins from before the program could patch them."""
    build, execute, end = compile, exec, os._exit
    tree: Any = build(job["tests"], "tests", "exec", _ast.PyCF_ONLY_AST)
    lines = job["tests"].splitlines()
    tests = [
        (number, _ast.Module([node], []), f"{lines[node.lineno - 1].strip()[:200]} → ", counts)
        for number, (node, counts) in enumerate(zip(tree.body, job["counts"], strict=True))
    ]
    module = type(sys)("solution" if tests else "__main__")
    module.__dict__.update(exit=sys.exit, quit=sys.exit)  # which site defines, unless left out
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    for number, source, shown, counts in [(-1, job["program"], "", False), *tests]:
        try:
            execute(build(source, "program.py", "exec"), module.__dict__)
        except SystemExit:
            raise
        except BaseException as error:
            failed = "wrong" if counts and isinstance(error, AssertionError) else "error"
            failed = "memory" if isinstance(error, MemoryError) else failed
            say(failed, number, f"{shown}{type(error).__name__}: {error}")
            if not (counts and job["partial"]):
                end(1)
        else:
            if counts:
                say("passed", number, "")
    if tests:
        end(0)


IN_CHILD: list[Any] = [_supervise, _reporter, _build_box, _own_users, _lock_in, _call, _judge]
IMPORTS = "import _ast, ctypes, marshal, os, resource, signal, sys, time"
TYPES = "from collections.abc import Callable\nAny = object"
SUPERVISOR = "\n".join([IMPORTS, TYPES, *map(inspect.getsource, IN_CHILD), "_supervise()"])
