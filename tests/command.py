"""The command `dapo`: in this process, which has imported all that it needs, or in a child."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from pipeline import cli

Ended = subprocess.CompletedProcess[str]


def dapo(*arguments: str | Path, data: Path | str = "/nonexistent") -> Ended:
    """Run the command on the runs below `data`."""
    told = ["dapo", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    code: str | int | None = 0
    with (
        patch.dict(os.environ, {"DAPO_DATA": str(data)}),
        patch.object(sys, "argv", told),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    return Ended(told, int(code or 0), out.getvalue(), err.getvalue())


def said(*arguments: str | Path, data: Path | str = "/nonexistent") -> tuple[int, str]:
    """The exit code of the command, and all that it printed."""
    ended = dapo(*arguments, data=data)
    return ended.returncode, ended.stdout + ended.stderr


def dapo_alone(*arguments: str | Path, data: Path | str = "/nonexistent") -> Ended:
    """Run the command in a process of its own, outside any terminal."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "DAPO_DATA": str(data)},
        check=False,
    )
