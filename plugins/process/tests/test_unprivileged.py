"""The same promises when the gateway runs as an ordinary user: one user id, `nested` identity.

Run by root only, as another user: the tests of this folder once more, in a process that has given up everything. A run
by an ordinary user covers this by itself.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NOBODY = "65534"
TESTS = (
    "accounts_are_those",
    "another_boot",
    "any_number_of_pauses",
    "cancelled_create",
    "cannot_be_kept",
    "without_control_groups",
    "destroying_a_paused",
    "failed_start",
    "files_are_what",
    "find",
    "half_made",
    "host_files",
    "host_processes",
    "hostile_tree",
    "hostile_file_tree",
    "internet",
    "leaves_no_process",
    "link_in_place",
    "mounts_and_devices",
    "neither_paused",
    "network_of_a_copy",
    "no_process_of",
    "nobody_outside",
    "root_may_make",
    "run_no_instruction",
    "runs_commands",
    "several_sandboxes",
    "shared_places",
    "starts_anew",
    "stays_stopped",
    "takes_a_warm_one",
)


def as_nobody(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    drop = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--inh-caps=-all"]
    # Through `env`: setpriv's own exec still has root's capabilities, so it alone may start what nobody else can.
    return subprocess.run([*drop, "env", *command], capture_output=True, text=True, timeout=580, check=False, **options)


def interpreter() -> str:
    """One of this version that another user may run: root's own may be under /root."""
    wanted = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (os.path.realpath(sys.executable), shutil.which(wanted, path="/usr/local/bin:/usr/bin")):
        if candidate and as_nobody([candidate, "-c", "pass"]).returncode == 0:
            return candidate
    pytest.skip(f"no {wanted} that another user may run")


@pytest.fixture
def place():
    """A folder for another user's use: the code under test, the tests, and room for what they make."""
    path = Path(tempfile.mkdtemp(prefix="sg-nobody-"))
    library = path / "library"
    for name in (
        "sandgate_agent",
        "sandgate_api",
        "sandgate_bundle",
        "sandgate_errors",
        "sandgate_plugin_api",
        "sandgate_plugin_process",
        "sandgate_testing",
    ):
        source = next(iter(importlib.util.find_spec(name).submodule_search_locations))
        shutil.copytree(source, library / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(__file__).parent, path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (path / "tests" / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\ntimeout = 100\nfilterwarnings = error\n"
    )
    (path / "tmp").mkdir()
    for entry in (path, *path.rglob("*")):
        os.chown(entry, int(NOBODY), int(NOBODY), follow_symlinks=False)
    yield path
    shutil.rmtree(path)


# For all tests of a file. Each has its own, which is the one that finds what hangs.
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
@pytest.mark.parametrize("isolation", ["bubblewrap", "none"], indirect=True)
@pytest.mark.parametrize(
    "file",
    ["test_isolation.py", "test_lifecycle.py", "test_limits.py", "test_pause.py", "test_snapshots.py", "test_warm.py"],
)
def test_backend_works_without_privileges(place, isolation, file):
    if file in {"test_isolation.py", "test_snapshots.py"} and isolation == "none":
        pytest.skip("without isolation there is nothing to test")
    packages = str(Path(pytest.__file__).parent.parent)
    done = as_nobody(
        [
            interpreter(),
            *("-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-x", "-n0"),
            *("-k", f"{isolation} and ({' or '.join(TESTS)})", file),
        ],
        cwd=place / "tests",
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{place / 'library'}:{packages}",
            "TMPDIR": str(place / "tmp"),
            "SANDGATE_REQUIRE": isolation,
        },
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
