"""The journey of a first-time user, by every official SDK that is supported, each in an environment of its own.

The scripts in ``clients/`` hold what each step does and expects; here every step of every SDK is a test, so that a
failure names both. docs/compatibility.md refers to the step names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sandgate_testing.gateway import Gateway
from sandgate_testing.requirements import lacking, need
from sandgate_testing.sdk import CLIENTS, PackageUnavailable, SdkClient, command_of, installed

SCRIPTS = Path(__file__).parent / "clients"

#: What each script must report, in this order. Written out, so that a step that is no longer taken is missed.
STEPS = (
    "create",
    "get_info",
    "list_by_metadata",
    "run_with_envs_and_cwd",
    "envs_last_one_command",
    "output_while_running",
    "failing_command",
    "death_by_signal",
    "command_timeout",
    "missing_cwd",
    "unknown_user",
    "stdin",
    "background_and_connect",
    "background_and_kill",
    "connect_to_unknown_pid",
    "sudo",
    "terminal",
    "terminal_connect",
    "terminal_kill",
    "write_and_read",
    "bytes_and_empty",
    "write_several",
    "list_files",
    "file_info",
    "exists",
    "rename",
    "make_dir",
    "remove",
    "gzip_both_ways",
    "stream_up_and_down",
    "file_metadata",
    "signed_urls",
    "watch_dir",
    "watch_dir_recursive",
    "watch_what_cannot_be_watched",
    "missing_file",
    "wrong_kind_of_path",
    "is_running",
    "set_timeout",
    "connect",
    "unknown_template",
    "wrong_api_key",
    "metrics",
    "pause",
    "pause_again",
    "connect_resumes",
    "pause_files_only",
    "snapshots",
    "pause_at_the_end",
    "traffic_wakes",
    "get_host",
    "kill_while_a_command_runs",
    "kill_again",
    "gone_is_not_running",
    "gone_for_the_control_plane",
    "gone_for_commands",
    "gone_for_files",
    "gone_from_the_list",
)

# The first test of a client waits for the installation of its SDK.
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, kw_only=True)
class Journey:
    """One run of a script: its steps, what it wrote besides, and what the gateway logged meanwhile."""

    steps: dict[str, dict[str, Any]] = field(repr=False)
    stderr: str
    requests: list[dict[str, Any]] = field(repr=False)


@pytest.fixture(
    scope="module",
    # One worker for all tests of a client: the script runs once.
    params=[pytest.param(client, id=name, marks=pytest.mark.xdist_group(name)) for name, client in CLIENTS.items()],
)
def client(request: pytest.FixtureRequest) -> SdkClient:
    chosen: SdkClient = request.param
    need("node" if chosen.source == "npm" else "packages")
    try:
        installed(chosen)
    except PackageUnavailable as error:
        lacking("packages", str(error))
    return chosen


@pytest.fixture(scope="module")
def journey(
    client: SdkClient, gateway: Gateway, tmp_path_factory: pytest.TempPathFactory, reserve_port: Callable[[], int]
) -> Journey:
    folder = tmp_path_factory.mktemp("journey")
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    if client.source == "npm":
        # Node looks for packages beside the script and above it, and nowhere else.
        (folder / "node_modules").symlink_to(client.environment / "node_modules")
    mark = gateway.log_size()
    home = {"HOME": str(folder), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    done = subprocess.run(
        command_of(client, folder / client.script),
        cwd=folder,
        env={**home, **gateway.sdk_environment, "SERVER_PORT": str(reserve_port())},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return Journey(
        steps={report["step"]: report for report in reports},
        stderr=done.stderr,
        requests=gateway.requests_since(mark),
    )


@pytest.mark.parametrize("step", STEPS)
def test_sdk_finds_what_it_expects(journey: Journey, step: str, isolation: str) -> None:
    if (step, isolation) == ("sudo", "none"):
        pytest.skip("without isolation all accounts are one user")
    assert step in set(journey.steps), f"the journey ended before this step: {journey.stderr}"
    report = journey.steps[step]
    assert report["ok"], report["error"]


def test_journey_takes_the_steps_that_are_written_down(journey: Journey) -> None:
    assert tuple(journey.steps) == STEPS


def test_sdk_creates_where_its_version_does(journey: Journey, client: SdkClient) -> None:
    """Releases differ in the create route (rest.md 2); the journey is proof only for the one it took."""
    creates = {
        entry["route"]
        for entry in journey.requests
        if entry["method"] == "POST" and entry["route"].endswith("/sandboxes")
    }
    assert creates == {client.create_route}


def test_no_request_of_the_journey_failed_in_the_gateway(journey: Journey) -> None:
    # 502 is the answer of the data plane for a sandbox that is gone (R4).
    failed = [entry for entry in journey.requests if entry["status"] >= 500 and entry["status"] != 502]
    assert failed == []
