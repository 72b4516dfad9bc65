"""Groups of version 2: a gateway that was given a group divides it, whatever is in it; any other group is left as it is.

Tried with whichever controller version 2 has here, each in a process of its own, as it moves.
"""

import errno
import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandgate_plugin_process.freezing import remove_group
from sandgate_plugin_process.hierarchies import hierarchies

BEGIN = """
import os, sys
from pathlib import Path
from sandgate_plugin_process.hierarchies import hierarchies, settle
group = Path(sys.argv[1])
wanted = frozenset(sys.argv[2:])
def found():
    return next(found for found in hierarchies() if found.version == 2)
def join(group):
    (group / "cgroup.procs").write_text("0")
"""


@pytest.fixture
def given() -> Iterator[tuple[Path, str]]:
    """An empty group of version 2 whose children can get a controller, and which one."""
    second = next((found for found in hierarchies() if found.version == 2), None)
    if second is None or not second.controllers:
        pytest.skip("version 2 has no controllers here")
    controller = min(second.controllers)
    group = second.own / f"sandgate-test-{secrets.token_hex(6)}"
    try:
        (second.own / "cgroup.subtree_control").write_text(f"+{controller}")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no groups can be made here: {os.strerror(error.errno or errno.EACCES)}")
    yield group, controller
    remove_group(group)


def in_a_process(group: Path, controller: str, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(code), str(group), controller],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gateway_moves_out_of_the_way_in_a_group_that_was_given_to_it(given):
    group, controller = given
    os.setxattr(group, "trusted.delegate", b"1")
    said = in_a_process(
        group,
        controller,
        """
        import subprocess
        join(group)
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
            settled = settle(found(), wanted)
            print(sorted(settled.controllers), settled.place == group, found().place == group)
            # A start after a crash, from the leaf.
            again = settle(found(), wanted)
            print(again == settled, (group / "cgroup.procs").read_text() == "", found().own.name)
            box = settled.place / "sandgate-box"
            box.mkdir()
            print(wanted <= set((box / "cgroup.controllers").read_text().split()))
            box.rmdir()
        """,
    )
    assert said.splitlines() == [f"['{controller}'] True True", "True True sandgate-gateway", "True"]


def test_group_that_nobody_gave_is_left_as_it_is(given):
    group, controller = given
    said = in_a_process(
        group,
        controller,
        """
        join(group)
        print(sorted(settle(found(), wanted).controllers), found().own == group, sorted(p.name for p in group.iterdir() if p.is_dir()))
        """,
    )
    assert said == "[] True []\n"


def test_leaf_that_the_service_manager_made_is_used(given):
    """As with ``DelegateSubgroup=``: the group is the gateway's, and the gateway is in a leaf of it already."""
    group, controller = given
    os.setxattr(group, "user.delegate", b"1")
    said = in_a_process(
        group,
        controller,
        """
        (group / "main").mkdir()
        join(group / "main")
        settled = settle(found(), wanted)
        print(sorted(settled.controllers), settled.place == group, sorted(p.name for p in group.iterdir() if p.is_dir()))
        """,
    )
    assert said == f"['{controller}'] True ['main']\n"
