"""Plugin loading: real distributions in a folder, found by their entry points."""

from __future__ import annotations

import importlib.metadata
import itertools

import pytest

from sandgate_core.backends import open_backends
from sandgate_errors import FailedPrecondition
from sandgate_plugin_api.loading import find_backends

BACKEND = """
from sandgate_errors import FailedPrecondition
from sandgate_plugin_api import Backend, hookimpl

class {name}(Backend):
    name = "{name}"
    def __init__(self, context): self.context = context
    async def open(self): {open}
    async def close(self): self.closed = True
    async def templates(self): return []
    def reserve(self, request): return {{}}
    async def create(self, request, handle): raise NotImplementedError
    async def locate(self, handle): return None
    async def survey(self): return []
    async def destroy(self, handle): pass

@hookimpl
def sandgate_register_backends(registrar):
    registrar.add({name})
"""

HOOK = "from sandgate_plugin_api import hookimpl\n@hookimpl\ndef sandgate_register_backends({}):\n    {}\n"
numbers = itertools.count()


def backend(name: str, *, opening: str = "pass") -> str:
    return BACKEND.format(name=name, open=opening)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution with one module and one entry point; returns all entry points so far."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(distribution: str, code: str, *, entry: str):
        module = f"plugin_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[sandgate.plugins]\n{entry} = {module}\n")
        found = importlib.metadata.distributions(path=[str(tmp_path)])
        return [point for dist in found for point in dist.entry_points]

    return install


def refusal(names, entries) -> str:
    with pytest.raises(FailedPrecondition) as error:
        find_backends(names, installed=entries)
    assert "\n" not in error.value.message
    return error.value.message


def test_finds_a_backend_by_the_name_of_its_entry_point(install):
    found = find_backends(["one"], installed=install("dist-one", backend("one"), entry="one"))
    assert found["one"].backend.name == "one"
    assert found["one"].distribution == "dist-one"


def test_finds_a_backend_whose_entry_point_has_another_name(install):
    install("dist-broken", "raise ImportError('no such library')", entry="broken")
    found = find_backends(["one"], installed=install("dist-one", backend("one"), entry="whatever"))
    assert found["one"].distribution == "dist-one"


def test_faulty_plugin_that_is_not_configured_never_matters(install):
    install("dist-broken", "import sys; sys.exit(3)", entry="broken")
    entries = install("dist-one", backend("one"), entry="one")
    assert set(find_backends(["one"], installed=entries)) == {"one"}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("raise SystemExit(3)", "SystemExit"),
        ("a = (", "SyntaxError"),
        ("x = 1", "does not implement the hook sandgate_register_backends"),
        (
            HOOK.format("registrar", "registrar.add(int)"),
            "registers <class 'int'>, which is not a Backend class",
        ),
        (
            HOOK.format("registrar", "registrar.add('name')"),
            "not a Backend class",
        ),
        (
            HOOK.format("wrong", "pass"),
            "wrong",
        ),
        (
            HOOK.format("registrar", "1 / 0"),
            "ZeroDivisionError",
        ),
        (backend("one").replace('    name = "one"\n', ""), "without a usable name"),
        (backend("one").replace('"one"', '"../one"'), "without a usable name"),
        (backend("one").replace("async def destroy", "async def other"), "does not implement destroy"),
    ],
)
def test_faulty_plugin_is_named_by_its_distribution(install, code, text):
    message = refusal(["one"], install("dist-one", code, entry="one"))
    assert "dist-one" in message
    assert text in message


def test_backend_offered_twice_names_both(install):
    install("dist-one", backend("one"), entry="one")
    message = refusal(["one"], install("dist-two", backend("one"), entry="one"))
    assert "dist-one" in message
    assert "dist-two" in message


def test_unknown_backend_says_what_is_installed_and_how_to_get_it(install):
    install("dist-broken", "raise ImportError('no such library')", entry="broken")
    message = refusal(["docker"], install("dist-one", backend("one"), entry="one"))
    assert "no backend 'docker'" in message
    assert "'one'" in message
    assert "pip install sandgate-plugin-docker" in message
    assert "no such library" in message


def test_slip_in_a_name_is_pointed_out_and_nothing_is_to_be_installed_for_it(install):
    message = refusal(["oen"], install("dist-one", backend("one"), entry="one"))
    assert "no backend 'oen' (did you mean 'one'?)" in message
    assert "pip install" not in message


class TestOpening:
    @pytest.fixture
    def opened(self, install, tmp_path, monkeypatch):
        """Opens backends of given code; folders below tmp_path."""

        def opened(tables, **codes):
            for name, code in codes.items():
                entries = install(f"dist-{name}", code, entry=name)
            monkeypatch.setattr("sandgate_plugin_api.loading.entry_points", lambda group: entries)
            return open_backends(tables, state_dir=tmp_path / "s", runtime_dir=tmp_path / "r")

        return opened

    @pytest.fixture(autouse=True)
    def short_paths_do_not_matter_here(self, monkeypatch):
        monkeypatch.setattr("sandgate_core.backends._SOCKET_PATH", 10_000)

    async def test_each_backend_gets_its_own_private_folders_and_its_table(self, opened):
        async with opened({"one": {"a": 1}, "two": {}}, one=backend("one"), two=backend("two")) as backends:
            contexts = [backends[name].inner.context for name in ("one", "two")]
            folders = {folder for context in contexts for folder in (context.state_dir, context.runtime_dir)}
            assert len(folders) == 4
            assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
            assert contexts[0].settings == {"a": 1}
        assert backends["one"].inner.closed

    async def test_what_a_backend_lacks_is_one_line_and_the_others_are_closed(self, opened):
        lacking = backend("two", opening="raise FailedPrecondition('install bubblewrap')")
        with pytest.raises(FailedPrecondition, match=r"^backend 'two': install bubblewrap$"):
            async with opened({"one": {}, "two": {}}, one=backend("one"), two=lacking):
                pass

    async def test_fault_in_open_names_the_distribution(self, opened):
        with pytest.raises(FailedPrecondition, match="'one' of plugin 'dist-one' failed to open: ZeroDivisionError"):
            async with opened({"one": {}}, one=backend("one", opening="1 / 0")):
                pass

    async def test_runtime_folder_too_long_for_a_socket_is_refused(self, opened, monkeypatch):
        monkeypatch.setattr("sandgate_core.backends._SOCKET_PATH", 20)
        with pytest.raises(FailedPrecondition, match="too long for sockets"):
            async with opened({"one": {}}, one=backend("one")):
                pass
