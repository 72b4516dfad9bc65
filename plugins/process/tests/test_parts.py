"""The parts of the process backend that can be seen alone."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sandgate_errors import FailedPrecondition, Internal, Unavailable
from sandgate_plugin_process import bundle, rootfs
from sandgate_plugin_process.backend import ProcessBackend
from sandgate_plugin_process.boxes import Box, Shelf
from sandgate_plugin_process.bubblewrap import _check_places
from sandgate_plugin_process.pids import ProcessId, descendants, end, end_all
from sandgate_plugin_process.removal import remove_tree
from sandgate_plugin_process.settings import ProcessSettings
from sandgate_plugin_process.warm import WarmPool


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"isolatoin": "none"}, "unknown key 'isolatoin' (did you mean 'isolation'?)"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"isolation": "docker"}, "'isolation': input should be 'bubblewrap' or 'none'"),
        ({"warm": -1}, "'warm': input should be greater than or equal to 0"),
        ({"warm": "2"}, "'warm': input should be a valid integer"),
        ({"warm": True}, "'warm': input should be a valid integer"),
        ({"bwrap": ""}, "'bwrap': "),
        ({"limits": "off", "pids": 20}, "'pids' is a limit, and limits are off"),
        ({"warm": -1, "pids": 1}, "; 'pids': input should be greater than or equal to 16"),
    ],
)
def test_wrong_setting_is_named_in_one_line(table, text):
    with pytest.raises(FailedPrecondition) as caught:
        ProcessSettings.read(table)
    assert text in caught.value.message
    assert "\n" not in caught.value.message


def test_missing_bubblewrap_names_the_two_ways_out():
    (row,) = ProcessBackend.diagnose({"bwrap": "/nonexistent/bwrap"})
    assert row[1] is False
    assert "apt-get install bubblewrap" in row[2]
    assert "--isolation none" in row[2]


@pytest.mark.parametrize("place", ["/usr/local/share/sandgate", "/usr", "/etc/ssl/certs"])
def test_state_that_sandboxes_could_see_is_refused(place):
    with pytest.raises(FailedPrecondition, match="every sandbox can see"):
        _check_places([Path("/var/lib/sandgate"), Path(place)])


def test_host_paths_are_shared_by_an_allow_list():
    shared = dict(rootfs.binds())
    assert "/usr" in shared
    for path in shared:
        assert not {"private", "shadow", "ssh", "sudoers", "machine-id"} & set(Path(path).parts)
        assert path.startswith(("/usr", "/etc/", "/bin", "/sbin", "/lib"))


def test_doctor_warns_of_no_isolation():
    rows = {what: how for what, _, how in ProcessBackend.diagnose({"isolation": "none"})}
    assert "gateway's user" in rows["isolation"]


def test_doctor_says_how_much_can_be_watched_and_how_to_raise_it():
    rows = {what: (works, how) for what, works, how in ProcessBackend.diagnose({"isolation": "none"})}
    most = Path("/proc/sys/fs/inotify/max_user_instances").read_text().strip()
    works, how = rows["watches"]
    assert works
    assert f"{most} queues (sysctl fs.inotify.max_user_instances)" in how


def test_bundle_is_made_once_and_shows_no_host_path(tmp_path):
    first = bundle.make(tmp_path)
    assert bundle.make(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    compiled = list(first.rglob("*.pyc"))
    assert len(compiled) == len(list(first.rglob("*.py")))
    assert not [path for path in compiled if str(tmp_path).encode() in path.read_bytes()]
    assert all(path.stat().st_mode & 0o005 for path in (first, *first.rglob("*")))


def test_unused_bundles_are_forgotten(tmp_path):
    for name in ("bundle-a", "bundle-b", "bundle-new-1"):
        (tmp_path / name / "x").mkdir(parents=True)
    bundle.forget(tmp_path, {"bundle-b"})
    assert [path.name for path in tmp_path.iterdir()] == ["bundle-b"]


def test_removal_follows_no_link(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    doomed = tmp_path / "doomed"
    (doomed / "sub").mkdir(parents=True)
    (doomed / "sub" / "link").symlink_to(kept)
    (doomed / "link").symlink_to(kept)
    remove_tree(doomed)
    assert not doomed.exists()
    assert (kept / "file").exists()


def test_removal_of_a_link_is_refused(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "link").symlink_to(kept)
    with pytest.raises(OSError):
        remove_tree(tmp_path / "link")
    assert kept.exists()


def test_removal_of_nothing_is_success(tmp_path):
    remove_tree(tmp_path / "nothing")


def test_removal_has_no_limit_of_depth(tmp_path):
    deep = tmp_path / "deep"
    deep.mkdir()
    here = os.open(deep, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    remove_tree(deep)
    assert not deep.exists()


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_process_is_known_by_pid_and_start(sleeper):
    process = ProcessId.of(sleeper.pid)
    assert process is not None
    assert process.is_alive()
    stranger = ProcessId(process.pid, process.start + 1)
    assert not stranger.is_alive()
    stranger.signal(signal.SIGKILL)
    end(stranger)
    assert sleeper.poll() is None
    end(process)
    assert not process.is_alive()
    assert sleeper.wait() == -signal.SIGKILL


def test_process_name_cannot_forge_its_status(tmp_path):
    """The kernel puts the name in parentheses and a name may hold them."""
    program = tmp_path / "a) Z 1 ("
    program.symlink_to("/bin/sleep")
    with subprocess.Popen(["sleep", "600"], executable=program) as process:
        known = ProcessId.of(process.pid)
        assert known is not None
        assert known in descendants({ProcessId.of(os.getpid())})
        process.kill()


def test_whole_tree_is_found_and_ended():
    with subprocess.Popen(["bash", "-c", "sleep 600 & (sleep 600 & sleep 600) & wait"]) as root:
        process = ProcessId.of(root.pid)
        while len(descendants({process})) < 4:
            time.sleep(0.01)
        end_all(lambda: descendants({process}))
        assert not descendants({process})
        assert root.wait() == -signal.SIGKILL


def test_what_never_ends_is_reported(sleeper, monkeypatch):
    monkeypatch.setattr("sandgate_plugin_process.pids.END_LIMIT_SECONDS", 0.05)
    process = ProcessId.of(sleeper.pid)
    monkeypatch.setattr(ProcessId, "signal", lambda self, number: None)
    with pytest.raises(Unavailable):
        end(process)


async def test_pool_refills_after_a_take_and_discards_at_the_end():
    made, discarded, third = [], [], asyncio.Event()

    async def make():
        made.append(len(made))
        if len(made) == 3:
            third.set()
        return made[-1]

    async def discard(item):
        discarded.append(item)

    pool = WarmPool(2, make=make, discard=discard)
    pool.open()
    await asyncio.sleep(0.05)
    assert pool.take() == 0
    await asyncio.wait_for(third.wait(), 10)
    await asyncio.sleep(0)
    await pool.close()
    assert discarded == [1, 2]


async def test_pool_lets_what_was_taken_go_first(monkeypatch):
    """A refill shares the processor, and this process, with the create that took the last one."""
    monkeypatch.setattr("sandgate_plugin_process.warm.REFILL_DELAY_SECONDS", 3600)
    made, filled = [], asyncio.Event()

    async def make():
        made.append("x")
        filled.set()
        return made[-1]

    async def discard(item):
        pass

    pool = WarmPool(1, make=make, discard=discard)
    pool.open()
    await asyncio.wait_for(filled.wait(), 10)
    await asyncio.sleep(0)
    assert pool.take() == "x"
    await asyncio.sleep(0.05)
    assert made == ["x"]
    await pool.close()


async def test_pool_of_size_nothing_makes_nothing():
    async def fail(*_):
        raise AssertionError

    pool = WarmPool(0, make=fail, discard=fail)
    pool.open()
    assert pool.take() is None
    await pool.close()


async def test_pool_tries_again_after_a_failure(monkeypatch):
    monkeypatch.setattr("sandgate_plugin_process.warm.FIRST_RETRY_SECONDS", 0.01)
    attempts, made = [], asyncio.Event()

    async def make():
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError
        made.set()
        return "x"

    async def discard(item):
        pass

    pool = WarmPool(1, make=make, discard=discard)
    pool.open()
    await asyncio.wait_for(made.wait(), 10)
    await pool.close()


async def test_state_of_records_is_not_read_from_a_link(tmp_path):
    """A folder that somebody made a link is not a box."""
    state, runtime = tmp_path / "state", tmp_path / "run"
    for path in (state, runtime, Path(tmp_path, "else")):
        path.mkdir()
    shelf = Shelf(state=state, runtime=runtime)
    shelf.open()
    (state / "boxes" / "Not-A-Box").mkdir()
    (state / "boxes" / "file").write_text("")
    assert list(shelf.all()) == []


def test_only_a_socket_gets_the_name_that_is_dialled(tmp_path):
    box = Box("i1", tmp_path / "folder", tmp_path / "run")
    box.inner_socket_folder.mkdir(parents=True)
    (box.inner_socket_folder / "agent.sock").symlink_to("/run/other.sock")
    with pytest.raises(Internal):
        box.show_socket(seal=False)
    assert not box.socket.is_symlink()
