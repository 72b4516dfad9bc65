"""The ROCK contract as its client sees it: the synchronous e2b 2.34.0, with the profile and without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sandgate_testing.requirements import lacking, need
from sandgate_testing.sdk import CLIENTS, PackageUnavailable, command_of, installed
from sandgate_testing.sides import FOREIGN_KEY, Side

# The first test waits for the installation of the SDK.
pytestmark = [pytest.mark.xdist_group("rock"), pytest.mark.timeout(600)]

CLIENT = CLIENTS["python-2.34.0"]
SCRIPT = Path(__file__).parent / "clients" / "rock_client.py"

#: Step: the rules that it shows, what the client has of ROCK, and of E2B.
STEPS: dict[str, tuple[str, Any, Any]] = {
    "version": ("K1", "0.3.0", "0.6.13"),
    "token is the key": ("K2", True, False),
    "domain": ("K1", "e2b.app", "box.test"),
    "where it is": ("K14", "127.0.0.1", None),
    "metadata": ("K6", "client é", "client é"),
    "state": ("K15", "running", "running"),
    "is running": ("K18", True, True),
    "list without a filter": ("K16", "SandboxException", True),
    "list by metadata": ("K16", True, True),
    "list by other metadata": ("K16", False, False),
    "command": ("K20", "create\nuser\n/home/user\n", "create\nuser\n/home/user\n"),
    "command's variables": ("K13", "request\n", "request\n"),
    "command of root": ("K20", "user\n", "root\n"),
    "command without a limit": ("K21", "InvalidArgumentException", "ran\n"),
    "command with a long limit": ("K21", "InvalidArgumentException", "ran\n"),
    "command with input": ("K22", "SandboxException", "ran\n"),
    "command that fails": ("K23", "CommandExitException", "CommandExitException"),
    "command past its limit": ("K23", "TimeoutException", "TimeoutException"),
    "command in the background": ("K23", "ran\n", "ran\n"),
    "command that is left": ("K26", None, None),
    "command of git": ("K20", 0, 0),
    "command in no folder": ("K22", "InvalidArgumentException", "InvalidArgumentException"),
    "callbacks": ("K23", ["out\n"], ["out\n"]),
    "write": ("K28, K30", "/home/user/hello.txt", "/home/user/hello.txt"),
    "write several": ("K30", ["b", "c"], ["b", "c"]),
    "write as root": ("K29", "InvalidArgumentException", "/root/root.txt"),
    "write with compression": ("K30", "zipped", "zipped"),
    "write with metadata": ("K30", "TemplateException", {"a": "b"}),
    "read bytes": ("K34", "text", "text"),
    "read a stream": ("K34", "text", "text"),
    "read": ("K28", "text", "text"),
    "read nothing": ("K34", "FileNotFoundException", "FileNotFoundException"),
    "read a folder": ("K34", "InvalidArgumentException", "InvalidArgumentException"),
    "exists": ("K33", [True, False], [True, False]),
    "info": ("K34", ["/home/user/hello.txt", None], ["/home/user/hello.txt", None]),
    "list": ("K32", ["/home/user/a/b", "/home/user/a/c"], ["/home/user/a/b", "/home/user/a/c"]),
    "list nothing": ("K33", "InvalidArgumentException", "FileNotFoundException"),
    "list too deep": ("K32", "InvalidArgumentException", 2),
    "make a folder": ("K31", [True, False], [True, False]),
    "set timeout": ("K11", None, None),
    "set timeout of nothing": ("K11", "SandboxNotFoundException", "SandboxNotFoundException"),
    "other lifecycle": ("K12", "SandboxException", True),
    "network rules": ("K12", "SandboxException", True),
    "kill": ("K17", True, True),
    "kill again": ("K17", False, False),
    "is running when gone": ("K18", False, False),
    "info when gone": ("K15", "SandboxNotFoundException", "SandboxNotFoundException"),
    "read when gone": ("K35", "FileNotFoundException", "TimeoutException"),
    "command when gone": ("K18", "TimeoutException", "TimeoutException"),
    "key of another form": ("K2", [True, "ran\n", True], "AuthenticationException"),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("packages")
    try:
        installed(CLIENT)
    except PackageUnavailable as error:
        lacking("packages", str(error))
    return Path(shutil.copy(SCRIPT, tmp_path_factory.mktemp("client")))


def outcomes(side: Side, script: Path) -> Mapping[str, Any]:
    done = subprocess.run(
        command_of(CLIENT, script),
        cwd=script.parent,
        env={
            "HOME": str(script.parent),
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "FOREIGN_KEY": FOREIGN_KEY,
            **side.gateway.sdk_environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return {report["step"]: report["outcome"] for report in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def of_rock(rock: Side, script: Path) -> Mapping[str, Any]:
    return outcomes(rock, script)


@pytest.fixture(scope="module")
def of_plain(plain: Side, script: Path) -> Mapping[str, Any]:
    return outcomes(plain, script)


@pytest.mark.parametrize("step", STEPS, ids=[f"{step} ({rules})" for step, (rules, _, _) in STEPS.items()])
def test_client_sees_what_the_contract_says(step: str, of_rock: Mapping[str, Any], of_plain: Mapping[str, Any]) -> None:
    _, with_profile, without = STEPS[step]
    assert (of_rock[step], of_plain[step]) == (with_profile, without)


def test_every_step_is_written_down(of_rock: Mapping[str, Any], of_plain: Mapping[str, Any]) -> None:
    assert list(of_rock) == list(of_plain) == list(STEPS)
