"""Configuration: three layers, later ones win, and nothing unknown passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandgate import config
from sandgate_errors import InvalidArgument


def _file(folder: Path, text: str) -> Path:
    path = folder / "sandgate.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_environment_and_environment_over_file(tmp_path):
    path = _file(tmp_path, 'host = "a"\nport = 1\nbackend = "file"\n')
    loaded = config.load(
        {"host": "flag", "port": None}, environment={"SANDGATE_HOST": "env", "SANDGATE_PORT": "2"}, config=path
    )
    assert (loaded.settings.host, loaded.settings.port, loaded.settings.backend) == ("flag", 2, "file")


def test_file_may_be_named_by_the_environment_and_the_flag_wins(tmp_path):
    path = _file(tmp_path, "port = 1\n")
    (other := tmp_path / "other.toml").write_text("port = 2\n")
    environment = {"SANDGATE_CONFIG": str(path)}
    assert config.load({}, environment=environment).settings.port == 1
    assert config.load({}, environment=environment, config=other).settings.port == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot = 1\n", "unknown key 'prot' (did you mean 'port'?)"),
        ("[zzz]\na = 1\n", "unknown key 'zzz'"),
        ('isolation = "none"\n', "[backends.process]"),
        ('port = "x"\n', "sandgate.toml: port: "),
        ("port = true\n", "sandgate.toml: port: should be a number"),
        ("port = 70000\n", "less than or equal to 65535"),
        ("workers = 0\n", "greater than or equal to 1"),
        ('on_exit = "explode"\n', "'keep' or 'kill'"),
        ('backends = "process"\n', "backends"),
        ("[backends]\nprocess = 1\n", "backends.process"),
        ('envd_version = "latest"\n', "envd_version"),
        ('envd_version = "0.0.9"\n', "envd_version"),  # V1
        ('domain = "a b"\n', "domain"),
        ('trusted_proxies = ["localhost"]\n', "trusted_proxies"),
        ("port = \n", "not valid TOML"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, text, expected):
    with pytest.raises(InvalidArgument) as caught:
        config.load({}, environment={}, config=_file(tmp_path, text))
    assert expected in caught.value.message
    assert "\n" not in caught.value.message.strip()


@pytest.mark.parametrize("version", ["0.1.0", "0.3.0", "1.0.0"])
def test_version_that_sandboxes_tell_is_a_setting(tmp_path, version):
    """V4."""
    loaded = config.load({}, environment={}, config=_file(tmp_path, f'envd_version = "{version}"\n'))
    assert loaded.settings.envd_version == version


def test_version_that_sandboxes_tell_by_default_opens_what_the_sdks_suites_need():
    """V2, V3. That what stands behind each gate works is shown by the journey of three releases."""
    version = config.load({}, environment={}).settings.envd_version
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_unreadable_files_are_named(tmp_path):
    (binary := tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing.toml", tmp_path, binary):
        with pytest.raises(InvalidArgument, match=str(path)):
            config.load({}, environment={}, config=path)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SANDGATE_PROT", "1", "unknown variable SANDGATE_PROT (did you mean 'SANDGATE_PORT'?)"),
        ("SANDGATE_BACKENDS", "{}", "unknown variable SANDGATE_BACKENDS"),
        ("SANDGATE_PORT", "tcp://10.0.0.1:8700", "SANDGATE_PORT: "),
        ("SANDGATE_API_KEY", "e2b_SECRET", "SANDGATE_API_KEY should be"),
        ("SANDGATE_SEED", "abcdef", "SANDGATE_SEED should be"),
    ],
)
def test_mistakes_in_the_environment_are_named(name, value, expected):
    with pytest.raises(InvalidArgument) as caught:
        config.load({}, environment={name: value})
    assert expected in caught.value.message


def test_a_wrong_secret_is_not_repeated():
    with pytest.raises(InvalidArgument) as caught:
        config.load({}, environment={"SANDGATE_API_KEY": "e2b_0123456789ABCDEF"})
    assert "0123456789" not in caught.value.message


def test_a_mistake_in_a_flag_names_the_flag():
    with pytest.raises(InvalidArgument, match="--port"):
        config.load({"port": -1}, environment={})


def test_an_empty_variable_counts_as_not_set():
    assert config.load({}, environment={"SANDGATE_PORT": "", "SANDGATE_API_KEY": ""}).settings.port == 8700


def test_secrets_never_show():
    key, seed = "e2b_" + "ab" * 20, "cd" * 32
    loaded = config.load({}, environment={"SANDGATE_API_KEY": key, "SANDGATE_SEED": seed})
    assert (loaded.api_key, loaded.seed) == (key, seed)
    assert key not in repr(loaded)
    assert seed not in repr(loaded)


def test_backend_tables_are_passed_on_as_they_are(tmp_path):
    path = _file(tmp_path, '[backends.process]\nisolation = "bubblewrap"\nanything = [1, 2]\n[backends.other]\n')
    loaded = config.load({}, environment={}, config=path).settings
    assert loaded.backends == {"process": {"isolation": "bubblewrap", "anything": [1, 2]}, "other": {}}


def test_isolation_goes_into_the_table_of_its_backend(tmp_path):
    path = _file(tmp_path, '[backends.process]\nisolation = "bubblewrap"\nwarm = 1\n')
    by_environment = config.load({}, environment={"SANDGATE_ISOLATION": "none"}, config=path).settings
    assert by_environment.backends["process"] == {"isolation": "none", "warm": 1}
    environment = {"SANDGATE_ISOLATION": "bubblewrap"}
    by_flag = config.load({"isolation": "none"}, environment=environment).settings
    assert by_flag.backends["process"] == {"isolation": "none"}


def test_isolation_for_a_backend_that_is_not_used_is_refused():
    with pytest.raises(InvalidArgument, match="--isolation is about the backend 'process'"):
        config.load({"isolation": "none", "backend": "docker"}, environment={})


def test_a_folder_in_the_file_is_relative_to_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    path = _file(tmp_path, 'state_dir = "state"\n')
    assert config.load({}, environment={}, config=path).settings.state_dir == tmp_path / "state"


def test_a_relative_flag_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config.load({"state_dir": "s"}, environment={}).settings.state_dir == tmp_path / "s"


def test_lists_are_written_with_commas_in_the_environment():
    environment = {"SANDGATE_GRPC_LISTEN": "127.0.0.1:1, unix:/x"}
    assert config.load({}, environment=environment).settings.grpc_listen == ("127.0.0.1:1", "unix:/x")


def test_a_home_directory_that_does_not_exist_is_named(tmp_path):
    path = _file(tmp_path, 'state_dir = "~no-such-user/x"\n')
    with pytest.raises(InvalidArgument, match=r"state_dir: no such home directory: ~no-such-user/x"):
        config.load({}, environment={}, config=path)
    with pytest.raises(InvalidArgument, match="--state-dir: no such home directory"):
        config.load({"state_dir": "~no-such-user/x"}, environment={})


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("8701", "127.0.0.1:8701"),
        ("0.0.0.0:8701", "0.0.0.0:8701"),
        ("[::1]:8701", "[::1]:8701"),
        ("unix:/run/x", "unix:/run/x"),
    ],
)
def test_a_grpc_address_without_a_host_is_of_this_machine(given, target):
    """Nothing there is encrypted, so other machines are let in only when they are named."""
    assert config.load({"grpc_listen": given}, environment={}).settings.grpc_listen == (target,)


@pytest.mark.parametrize("given", ["host", ":8701", "host:", "host:99999", "unix:x", "host:1x"])
def test_what_is_no_grpc_address_is_refused(given):
    with pytest.raises(InvalidArgument, match="--grpc-listen"):
        config.load({"grpc_listen": given}, environment={})
