"""The runtime directory: short enough for sockets, in one place for as long as it is needed, and never somebody else's."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from sandgate import runtime
from sandgate_errors import FailedPrecondition


@pytest.fixture
def deep(tmp_path) -> Path:
    (folder := tmp_path / ("d" * 80)).mkdir(mode=0o700)
    return folder


@pytest.fixture
def shallow(tmp_path_factory, monkeypatch):
    folder = Path("/tmp") / f"sg-{os.getpid()}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def login(shallow, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shallow))
    return shallow


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_it_lies_in_the_state_directory_where_that_is_short(shallow):
    with runtime.opened(shallow) as folder:
        assert folder == shallow / "run"
        assert _mode(folder) == 0o700
        assert runtime.core_socket(shallow) == folder / "core.sock"
    assert not folder.exists()


def test_a_deep_state_directory_gets_a_short_private_folder(deep, login):
    with runtime.opened(deep) as folder:
        assert folder.parent == login
        assert _mode(folder) == 0o700
        assert len(os.fsencode(folder)) + len("/" + "i" * 21 + "/agent.sock.files") <= 107
        assert runtime.core_socket(deep) == folder / "core.sock"
    assert not folder.exists()
    assert os.listdir(deep) == []


def test_without_a_login_it_lies_in_tmp(deep, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with runtime.opened(deep) as folder:
        assert folder.parent == Path("/tmp")
    assert not folder.exists()


def test_it_stays_where_sandboxes_have_their_sockets(deep, login, monkeypatch):
    with runtime.opened(deep) as first:
        (first / "process").mkdir()
        (first / "process" / "agent.sock").touch()
    assert first.exists()
    # As after a login, when the service starts it again.
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with runtime.opened(deep) as second:
        assert second == first


def test_it_moves_when_the_login_took_its_folder_away(deep, login, monkeypatch):
    with runtime.opened(deep) as first:
        (first / "agent.sock").touch()
    shutil.rmtree(login)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with runtime.opened(deep) as second:
        assert second != first
    login.mkdir()


def test_empty_folders_and_the_dead_core_socket_are_taken_away(shallow):
    with runtime.opened(shallow) as folder:
        (folder / "process" / "x").mkdir(parents=True)
        (folder / "core.sock").touch()
    assert not folder.exists()


@pytest.mark.parametrize("trap", ["link", "file", "open"])
def test_a_folder_that_somebody_planted_is_refused(deep, login, tmp_path, trap):
    with runtime.opened(deep) as folder:
        pass
    if trap == "link":
        (target := tmp_path / "target").mkdir(mode=0o700)
        folder.symlink_to(target)
    elif trap == "file":
        folder.touch(mode=0o600)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(FailedPrecondition, match="runtime directory"), runtime.opened(deep):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_refused(deep, login):
    with runtime.opened(deep) as folder:
        pass
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(FailedPrecondition, match="somebody else"), runtime.opened(deep):
        pass


def test_another_users_login_folder_is_not_used(deep, login):
    if os.geteuid() == 0:
        os.chown(login, 65534, 65534)
        with runtime.opened(deep) as folder:
            assert folder.parent == Path("/tmp")
