"""Programs are judged by what they do, and can do nothing else."""

import ast
import concurrent.futures
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stages.checkers import Verdict, code
from stages.checkers.code import Code, last_program
from stages.errors import InputError

SQUARE = "def f(x):\n    return x * x"
TESTS = json.dumps({"tests": "assert f(2) == 4\nassert f(3) == 9"})
NAP = "import subprocess, time\nsubprocess.Popen(['sleep', '{}'], start_new_session=True)\n"
NO_UNSHARE = f"""
import ctypes
number = {272 if platform.machine() == "x86_64" else 97}
lines = (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)
code = (ctypes.c_uint64 * 4)(*(op | yes << 16 | no << 24 | k << 32 for op, yes, no, k in lines))
program = (ctypes.c_uint64 * 2)(4, ctypes.addressof(code))
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
ctypes.CDLL(None).prctl(22, 2, program)
"""  # a seccomp filter in which unshare is not permitted, as Docker's


def cases(*pairs: tuple[str, str]) -> str:
    return json.dumps({"cases": [{"input": given, "output": out} for given, out in pairs]})


def judged(program: str, gold: str = TESTS, settings: Code | None = None) -> Verdict:
    return (settings or Code()).check(f"So:\n```python\n{program}\n```\n", gold)


def printed(program: str) -> str:
    """What `program` prints in the box, from the verdict on a wrong output."""
    found = judged(program, cases(("", "another output")))
    assert found.verdict == "wrong", found
    return str(ast.literal_eval(str(found.extracted).split("printed ")[1]))


def naps(seconds: str) -> int:
    """How many processes `NAP` has begun, and are there."""
    found = psutil.process_iter(["cmdline"])
    return sum(process.info["cmdline"] == ["sleep", seconds] for process in found)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def box() -> None:
    try:
        judged(SQUARE)
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def unboxed(monkeypatch: pytest.MonkeyPatch) -> Code:
    """Settings that do without namespaces, and an interpreter that nobody may read."""
    if os.getuid() == 0 and any(not path.stat().st_mode & 1 for path in Path(os.__file__).parents):
        python = "/usr/bin/python{}.{}".format(*sys.version_info)
        if not os.path.exists(python):
            pytest.skip(f"nobody may not read {os.__file__}, and there is no {python}")
        monkeypatch.setattr(code, "PYTHON", python)
    return Code(network="allowed")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a"),
        ("```\na\nb\n```\nand\n```py\nc\n```  \nso", "c"),
        ("```Python\r\na\r\n```\r\n", "a\r"),
        ("````python\n```\n````", "```"),
        ("```python\na\n```\n```bash\nls\n```\n```python\nunfinished", "a"),
        ("```python\nprint('```')\n```", "print('```')"),
        ("```python\n```", ""),
        ("```python\na", None),
        ("```bash\nls\n```", None),
        ("`a` ```b```", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_closed_block_of_python(text: str, program: str | None) -> None:
    assert last_program(text) == program


@pytest.mark.parametrize(
    "text",
    [
        "`" * 100_000,
        "```\n" * 100_001,
        "```" + " " * 100_000 + "`",
        "```python\n" + "`\n" * 100_000,
    ],
    ids=["ticks", "fences", "spaces", "lines"],
)
def test_no_text_is_long_enough_to_hang_the_extraction(text: str) -> None:
    started = time.perf_counter()
    last_program(text)
    assert time.perf_counter() - started < 1


def test_a_response_without_a_program_is_no_answer() -> None:
    assert Code().check("I would square it.", TESTS) == (0.0, "no_answer", None)


@pytest.mark.parametrize(
    "gold",
    [
        *("", "34", "[" * 100_000, "{}", '{"tests": 3}', '{"tests": ""}', '{"tests": "x = 1"}'),
        *('{"tests": "assert ("}', '{"tests": "return"}', '{"tests": "a()", "cases": []}'),
        *('{"cases": []}', '{"cases": ["2"]}', '{"cases": [{"input": "2", "ouptut": "4"}]}'),
        '{"cases": [{"input": "\\ud800", "output": "4"}]}',
    ],
)
def test_an_unusable_gold_is_told_without_running_anything(gold: str) -> None:
    why = Code.gold_problem(gold)
    assert why
    assert judged(SQUARE, gold) == (None, "unscorable", why)


def test_a_usable_gold_has_no_problem() -> None:
    assert Code.gold_problem(TESTS) is None
    assert Code.gold_problem(cases(("2", "4"))) is None


@pytest.mark.usefixtures("box")
class TestVerdicts:
    def test_a_program_that_passes_the_tests_is_right(self) -> None:
        assert judged(SQUARE) == (1.0, "right", SQUARE)

    def test_a_failed_assert_is_wrong_and_shown(self) -> None:
        found = judged("def f(x): return 4")
        assert found[:2] == (0.0, "wrong")
        assert str(found.extracted).startswith("assert f(3) == 9")

    def test_output_is_compared_but_for_white_space_at_the_ends(self) -> None:
        program = "x = int(input())\nprint(x, ' ')\nprint(x * x)\nprint()"
        assert judged(program, cases(("2\n", "2\n4"), ("3\n", "3 \n9\n"))).verdict == "right"
        found = judged(program, cases(("2\n", "2\n4"), ("3\n", "3\n 9")))
        assert found == (0.0, "wrong", r"case 2 of 2: expected '3\n 9', printed '3  \n9\n\n'")

    def test_the_main_guard_runs_for_cases_and_not_for_tests(self) -> None:
        program = f"{SQUARE}\nif __name__ == '__main__':\n    print(f(int(input())))"
        assert judged(program, cases(("2", "4"))).verdict == "right"
        assert judged(program).verdict == "right"

    def test_dataclasses_and_scripts_that_exit_are_programs_too(self) -> None:
        program = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        program += "@dataclass\nclass A:\n    x: int = 4\nprint(A().x)\nexit()"
        assert judged(program, cases(("", "4"))).verdict == "right"

    def test_partial_credit_is_the_share_of_passed_tests(self) -> None:
        partial = Code(partial=True, timeout_s=0.5)
        found = judged("def f(x): return 9", settings=partial)
        assert found[:2] == (0.5, "partial")
        assert judged("def f(x): return 5", settings=partial)[:2] == (0.0, "wrong")
        slow = "x = input()\nwhile x == '2': pass\nprint(9)"
        found = judged(slow, cases(("3", "9"), ("2", "4"), ("3", "9")), partial)
        assert found[:2] == (1 / 3, "partial")  # the clock is one for all
        assert str(found.extracted).startswith("case 2 of 3: not done after")

    @pytest.mark.parametrize(
        ("program", "verdict", "why"),
        [
            ("def f(x: return", "error", "SyntaxError"),
            ("'\ud800'", "error", "UnicodeEncodeError"),
            ("1 / 0", "error", "ZeroDivisionError: division by zero"),
            ("def f(x): return 1 / 0", "error", "assert f(2) == 4 → ZeroDivisionError"),
            ("input()", "error", "EOFError"),
            ("import ctypes\nctypes.string_at(0)", "error", "Segmentation fault"),
            ("import numpy", "error", "ModuleNotFoundError"),
            ("x = bytes(2 ** 30)", "memory", "MemoryError"),
            ("x = []\nwhile True: x.append(bytes(10 ** 6))", "memory", "MemoryError"),
        ],
    )
    def test_what_goes_wrong_is_told(self, program: str, verdict: str, why: str) -> None:
        found = judged(program)
        assert found[:2] == (0.0, verdict)
        assert why in str(found.extracted)

    @pytest.mark.parametrize(
        "program",
        [
            "import os\nos._exit(0)",
            "import sys\nsys.exit(0)",
            "print('passed 0')\nprint('passed 1')",
            "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None",
            "import os\nos.write = lambda *a: None\nos._exit(0)",
            "import builtins, sys\nbuiltins.AssertionError = ValueError\nsys.exit = print",
            "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'passed 0\\npassed 1\\n')\n"
            "    except OSError: pass",
            "import os\nos.closerange(0, 64)",
            "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nos.kill(1, signal.SIGKILL)",
        ],
    )
    def test_a_program_that_does_not_do_its_task_cannot_pass_for_one_that_does(
        self, program: str
    ) -> None:
        assert judged(program).acc == 0

    def test_a_program_cannot_hide_its_end_from_the_supervisor(self) -> None:
        program = "import os\nfor fd in range(3, 64):\n    try: os.ftruncate(fd, 0)\n"
        program += "    except OSError: pass\nprint(4)"
        assert judged(program, cases(("", "4"))).verdict == "right"
        assert judged(f"{program}\n1 / 0", cases(("", "4"))).verdict == "error"

    def test_the_same_program_gets_the_same_hashes(self) -> None:
        assert printed("print(hash('a'), list({'a', 'b', 'c'}))") == printed(
            "print(hash('a'), list({'a', 'b', 'c'}))"
        )


@pytest.mark.usefixtures("box")
class TestBox:
    @pytest.mark.parametrize(
        ("program", "why"),
        [
            ("import socket\nsocket.create_connection(('1.1.1.1', 53))", "Network is unreachable"),
            ("import socket\nsocket.create_connection(('127.0.0.1', 22))", "unreachable"),
            (f"open({__file__!r})", "FileNotFoundError"),
            ("open('/usr/x', 'w')", "Read-only file system"),
            ("open('x', 'wb').write(bytes(10 ** 7))", "File too large"),
            ("for i in range(9): open(str(i), 'wb').write(bytes(7 * 2 ** 20))", "No space left"),
            ("x = [open(f'{i}', 'w') for i in range(99)]", "Too many open files"),
            (f"import os\nos.kill({os.getpid()}, 0)", "No such process"),
        ],
        ids=["reach", "reach itself", "read", "write", "fill", "litter", "hoard", "kill"],
    )
    def test_there_is_no_way_to(self, program: str, why: str) -> None:
        found = judged(program)
        assert found[:2] == (0.0, "error")
        assert why in str(found.extracted)

    def test_nothing_of_the_caller_is_in_sight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SENTINEL", "a secret")
        assert "a secret" not in printed("import os\nprint(os.environ)")
        program = "import os\nprint(os.getpid(), os.getppid(), os.path.exists('/proc'))"
        assert printed(program) == "1 0 False\n"

    def test_the_working_directory_is_empty_and_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        program = "import os\nprint(os.listdir())\nopen('x', 'w').write('y')\nprint(os.listdir())"
        assert printed(program) == "[]\n['x']\n"
        assert not list(tmp_path.iterdir())

    def test_threads_and_processes_are_to_be_had(self) -> None:
        program = "import multiprocessing\nwith multiprocessing.Pool(2) as pool:\n"
        program += "    print(sum(pool.map(abs, [-1, -3])))"
        assert judged(program, cases(("", "4"))).verdict == "right"

    def test_a_program_without_end_is_killed_with_all_that_it_started(self) -> None:
        nap = f"{os.getpid()}.1"
        started = time.monotonic()
        program = NAP.format(nap) + "print(1, flush=True)\ntime.sleep(60)"
        found = judged(program, settings=Code(timeout_s=0.5))
        assert found == (0.0, "timeout", "not done after 0.5 s")
        assert time.monotonic() - started < 5
        assert naps(nap) == 0

    def test_what_a_program_leaves_behind_ends_with_it(self) -> None:
        nap = f"{os.getpid()}.2"
        assert judged(NAP.format(nap) + "print(4)", cases(("", "4"))).verdict == "right"
        assert naps(nap) == 0

    def test_a_fork_bomb_goes_off_in_the_box(self) -> None:
        before = set(psutil.Process().children(recursive=True))
        count = "import os, time\nn = 0\ntry:\n    while os.fork() or time.sleep(60): n += 1\n"
        assert int(printed(f"{count}except OSError: print(n)")) < 32
        nap = f"{os.getpid()}.4"
        bomb = "import os\nwhile True:\n    try: os.fork(), os.setsid()\n    except OSError: pass"
        found = judged(NAP.format(nap) + bomb, settings=Code(timeout_s=0.5))
        assert found.verdict == "timeout"
        assert naps(nap) == 0
        assert set(psutil.Process().children(recursive=True)) <= before

    def test_a_program_that_prints_forever_fills_nothing(self) -> None:
        found = judged("while True: print('x' * 1000)", cases(("", "x")))
        assert found[:2] == (0.0, "error")
        assert "File too large" in str(found.extracted)
        found = judged("while True: print('x' * 1000)", settings=Code(timeout_s=0.3))
        assert found.verdict == "timeout"

    def test_a_program_ends_when_its_caller_is_killed(self) -> None:
        nap = f"{os.getpid()}.3"
        program = NAP.format(nap) + "time.sleep(60)"
        call = f"Code(timeout_s=60).check({f'```{chr(10)}{program}{chr(10)}```'!r}, {TESTS!r})"
        caller = subprocess.Popen(
            [sys.executable, "-c", f"from stages.checkers.code import Code\n{call}"],
            cwd=Path(code.__file__).parents[2],
        )
        assert eventually(lambda: naps(nap) == 1)
        caller.kill()
        caller.wait()
        assert eventually(lambda: naps(nap) == 0)

    def test_many_are_judged_at_once_from_threads_and_from_worker_processes(self) -> None:
        programs = [SQUARE, "def f(x): return 4", "import os\nos._exit(0)", SQUARE]
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            verdicts = [found.verdict for found in threads.map(judged, programs)]
        assert verdicts == ["right", "wrong", "wrong", "right"]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as workers:
            assert workers.submit(Code().check, f"```\n{SQUARE}\n```", TESTS).result().acc == 1


def test_nothing_runs_where_the_kernel_forbids_namespaces(
    monkeypatch: pytest.MonkeyPatch, unboxed: Code
) -> None:
    monkeypatch.setattr(code, "SUPERVISOR", NO_UNSHARE + code.SUPERVISOR)
    with pytest.raises(InputError, match=r"unshare.*not permitted.*network=allowed"):
        judged(SQUARE)
    assert judged(SQUARE, settings=unboxed).verdict == "right"


def test_nothing_runs_with_more_memory_than_the_caller_may_give(
    monkeypatch: pytest.MonkeyPatch, unboxed: Code
) -> None:
    bound = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, ({2**29}, {2**29}))\n"
    monkeypatch.setattr(code, "SUPERVISOR", bound + code.SUPERVISOR)
    with pytest.raises(InputError, match="over the caller's own of 536870912"):
        judged(SQUARE, settings=unboxed)


def test_without_namespaces_a_program_starts_nothing_and_is_not_root(unboxed: Code) -> None:
    fork = judged("import os\nos.fork()", settings=unboxed)
    thread = judged("import threading\nthreading.Thread(target=print).start()", settings=unboxed)
    assert fork.verdict == thread.verdict == "error"
    user = "import os\nprint(os.getuid() > 0)"
    assert judged(user, cases(("", "True")), unboxed).verdict == "right"
    stopped = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    assert judged(stopped, settings=unboxed).verdict == "error"
    program = "import time\nopen('x', 'w').write('y')\ntime.sleep(60)"
    slow = Code(network="allowed", timeout_s=0.3)
    assert judged(program, settings=slow).verdict == "timeout"
