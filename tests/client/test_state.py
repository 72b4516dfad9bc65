"""The state directory: private, held by one gateway, its secrets whole and readable by nobody else."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys

import pytest

from sandgate import state
from sandgate_errors import FailedPrecondition


def _mode(path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_made_private_with_its_parents(tmp_path):
    folder = tmp_path / "a" / "b"
    with state.locked(folder):
        assert _mode(folder) == 0o700
        assert _mode(folder / state.LOCK) == 0o600


def test_an_empty_open_directory_is_closed(tmp_path):
    (folder := tmp_path / "s").mkdir()
    folder.chmod(0o755)
    with state.locked(folder):
        assert _mode(folder) == 0o700


def test_a_directory_of_other_things_is_left_alone(tmp_path):
    (folder := tmp_path / "s").mkdir()
    folder.chmod(0o1777)
    (folder / "somebody's").touch()
    with pytest.raises(FailedPrecondition, match="open to other users"), state.locked(folder):
        pass
    assert _mode(folder) == 0o1777
    assert os.listdir(folder) == ["somebody's"]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_path_that_cannot_be_a_directory_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(FailedPrecondition, match=f"state directory .*{name}"), state.locked(tmp_path / name):
        pass


def test_what_a_refused_start_put_into_a_new_directory_goes_again(tmp_path):
    made, empty = tmp_path / "a" / "made", tmp_path / "empty"
    empty.mkdir()
    for folder, left in ((made, False), (empty, True)):
        with state.locked(folder):
            state.secret_of(folder, state.SEED)
            (folder / "backends").mkdir()
            (folder / "backends" / "file").touch()
            (folder / "run").symlink_to(tmp_path)
        assert folder.exists() is left
    assert os.listdir(empty) == []


def test_what_is_to_be_kept_or_was_there_before_stays(tmp_path):
    with state.locked(tmp_path) as held:
        seed = state.secret_of(tmp_path, state.SEED)
        held.keep()
    with state.locked(tmp_path):
        state.secret_of(tmp_path, state.TOKEN)
    assert state.secret_of(tmp_path, state.SEED) == seed
    assert sorted(os.listdir(tmp_path)) == [state.TOKEN, state.LOCK, state.SEED]


def test_lock_that_went_with_its_holder_holds_nothing(tmp_path):
    """Of two that wait for one file, the second does not hold what the first has taken away."""
    waiting = os.open(tmp_path / state.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with state.locked(tmp_path):
            pass
        with state.locked(tmp_path):
            assert os.fstat(waiting).st_nlink == 0
            assert state.holder(tmp_path) == str(os.getpid())
    finally:
        os.close(waiting)


def test_a_second_holder_is_told_who_the_first_is(tmp_path):
    program = "import sys, pathlib; from sandgate import state\nwith state.locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        assert state.holder(tmp_path) == str(first.pid)
        with pytest.raises(FailedPrecondition, match=rf"process id {first.pid}\b"), state.locked(tmp_path):
            pass
        # The lock goes with its holder, however that ends.
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert state.holder(tmp_path) is None
        with state.locked(tmp_path):
            pass


def test_a_secret_is_made_once_and_is_private(tmp_path):
    first = state.secret_of(tmp_path, state.SEED)
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert state.secret_of(tmp_path, state.SEED) == first
    assert state.secret_of(tmp_path, state.TOKEN) != first
    assert _mode(tmp_path / state.SEED) == 0o600
    assert sorted(os.listdir(tmp_path)) == sorted([state.SEED, state.TOKEN])


def test_a_wide_umask_does_not_open_a_secret(tmp_path):
    before = os.umask(0)
    try:
        state.secret_of(tmp_path, state.SEED)
    finally:
        os.umask(before)
    assert _mode(tmp_path / state.SEED) == 0o600


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    state.secret_of(tmp_path, state.SEED)
    (tmp_path / state.SEED).chmod(0o640)
    with pytest.raises(FailedPrecondition, match="chmod 600"):
        state.secret_of(tmp_path, state.SEED)


@pytest.mark.parametrize("content", ["", "short", "g" * 64, "a" * 63])
def test_a_damaged_secret_is_refused_and_not_replaced(tmp_path, content):
    (path := tmp_path / state.SEED).write_text(content)
    path.chmod(0o600)
    with pytest.raises(FailedPrecondition, match="damaged"):
        state.secret_of(tmp_path, state.SEED)
    assert path.read_text() == content


def test_a_planted_link_or_pipe_is_not_followed(tmp_path):
    (target := tmp_path / "target").write_text("a" * 64)
    target.chmod(0o600)
    (tmp_path / state.SEED).symlink_to(target)
    os.mkfifo(tmp_path / state.TOKEN, 0o600)
    for name in (state.SEED, state.TOKEN):
        with pytest.raises(FailedPrecondition):
            state.secret_of(tmp_path, name)
