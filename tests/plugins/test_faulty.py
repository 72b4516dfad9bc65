"""Faulty plugins: an error that names the distribution, and a gateway that goes on with everything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sandgate.cli import cli
from sandgate_core.checked_backend import CheckedBackend
from sandgate_errors import (
    CapabilityMissing,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    SandgateError,
    Unavailable,
)
from sandgate_plugin_api import VERSION, BackendContext, Capability
from sandgate_plugin_api.loading import Hook, Loaded, Plugins, find_backends, installed_plugins
from sandgate_plugin_api.policies import Policies
from sandgate_testing.gateway import Gateway, GatewayFailed, wait_until

pytestmark = pytest.mark.xdist_group("plugins")

FAULTY = (Path(__file__).parent / "faulty.py").read_text()
HOOK = "from sandgate_plugin_api import hookimpl\n@hookimpl\n{}\n"


@pytest.fixture(scope="module")
def mixed(shared: Callable[..., Gateway]) -> Gateway:
    """A gateway whose second backend is faulty in create."""
    config = "create_timeout = 3\n[backends.process]\nwarm = 0\n[backends.faulty]\n"
    return shared(FAULTY, distribution="dist-faulty", entry="faulty", config=config)


@pytest.mark.parametrize(
    "fault", ["create raises", "handle", "address", "token", "type", "exit", "cancel", "reserve raises", "create hangs"]
)
def test_faulty_create_is_an_error_and_nothing_else(mixed: Gateway, fault: str) -> None:
    failed = mixed.rest("POST", "/v2/sandboxes", {"templateID": fault})
    assert failed.status == (504 if fault == "create hangs" else 500), failed.body
    assert b"secret text" not in failed.body
    assert "'faulty' of 'dist-faulty'" in failed.json()["message"]
    # The log passes through another process, so it may come after the answer.
    wait_until(lambda: "dist-faulty" in mixed.log())
    # The gateway, and its other backend, go on.
    made = mixed.create_sandbox()
    assert mixed.rest("DELETE", f"/sandboxes/{made['sandboxID']}").status == 204
    assert mixed.rest("GET", "/v2/sandboxes").json() == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("open raises", "backend 'faulty' of plugin 'dist-faulty' failed to open: ZeroDivisionError"),
        ("capabilities", "backend 'faulty' of 'dist-faulty' is faulty in capabilities"),
        ("lacks", "backend 'faulty' of 'dist-faulty' is faulty in lacks"),
        ("survey raises", "backend 'faulty' cannot say which sandboxes exist.*'dist-faulty' is faulty in survey"),
        ("survey of another type", "'dist-faulty' is faulty in survey"),
    ],
)
def test_backend_that_cannot_start_is_one_line(
    install: Any, plugged: Any, tmp_path: Path, fault: str, said: str
) -> None:
    install("dist-faulty", FAULTY, entry="faulty")
    (config := tmp_path / "gateway.toml").write_text(
        f'[backends.process]\nwarm=0\n[backends.faulty]\nfault = "{fault}"\n'
    )
    with pytest.raises(GatewayFailed, match=said):
        plugged(config)


@pytest.mark.parametrize("fault", ["templates raises", "templates of another type", "templates hangs", "close raises"])
def test_backend_that_fails_later_leaves_the_others_alone(
    install: Any, plugged: Any, tmp_path: Path, fault: str
) -> None:
    install("dist-faulty", FAULTY, entry="faulty")
    (config := tmp_path / "gateway.toml").write_text(
        f'[backends.process]\nwarm=0\n[backends.faulty]\nfault = "{fault}"\n'
    )
    gateway = plugged(config)
    started = time.monotonic()
    assert gateway.create_sandbox()["templateID"] == "base"
    assert time.monotonic() - started < 60
    gateway.stop()


async def test_capability_that_is_claimed_and_refused_is_a_fault(install: Any, tmp_path: Path) -> None:
    install("dist-faulty", FAULTY, entry="faulty")
    found = find_backends(["faulty"])["faulty"]

    construct: type[Any] = found.backend
    context = BackendContext(state_dir=tmp_path, runtime_dir=tmp_path)
    backend = CheckedBackend(construct(context), found.distribution)
    await backend.open()
    assert Capability.PAUSE in backend.capabilities
    with pytest.raises(Internal, match="'faulty' of 'dist-faulty' is faulty in pause"):
        await backend.pause({}, memory=True)
    # Not claimed: an honest refusal.
    with pytest.raises(CapabilityMissing):
        await backend.pause({}, memory=False)
    with pytest.raises(Internal, match="faulty in snapshot"):
        await backend.snapshot({}, snapshot_id="s")
    with pytest.raises(Internal, match="faulty in address"):
        await backend.address({})


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        ("sandgate-plugin-api~=1.0", True),
        ("sandgate_plugin_api >=1,<2", True),
        ("sandgate-plugin-api~=2.0", False),
        ("sandgate-plugin-api<1", False),
        ("sandgate-plugin-api>=1.99,<2", False),
        ("", True),
        ("sandgate-plugin-api", True),
        ("another-plugin-api~=2.0", True),
        ('sandgate-plugin-api~=2.0; python_version < "3"', True),
    ],
)
def test_plugin_for_another_version_is_refused_by_name_before_it_is_imported(
    install: Any, requires: str, fits: bool
) -> None:
    code = FAULTY if fits else "raise AssertionError('it was imported')"
    install("dist-faulty", code, entry="faulty", requires=requires)
    if fits:
        assert find_backends(["faulty"])["faulty"].distribution == "dist-faulty"
        return
    with pytest.raises(FailedPrecondition) as refused:
        find_backends(["faulty"])
    assert refused.value.message.startswith("plugin 'dist-faulty' 0.3 was made for version ")
    assert VERSION in refused.value.message


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            HOOK.format("def sandgate_create_request(request): pass"),
            "must implement the hook sandgate_create_request as async",
        ),
        (HOOK.format("async def sandgate_register_backends(registrar): pass"), "as def, not async def"),
        (HOOK.format("async def sandgate_no_such_hook(): pass"), "sandgate_no_such_hook"),
        (HOOK.format("async def sandgate_create_request(wish): pass"), "wish"),
        (
            HOOK.format("async def sandgate_create_request(request): pass").replace(
                "impl\nasync", "impl(tryfirst=True)\nasync"
            ),
            "asks for an order",
        ),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit"),
    ],
)
def test_policy_plugin_that_is_wrong_is_named_by_its_distribution(install: Any, code: str, said: str) -> None:
    install("dist-wrong", code, entry="wrong")
    with pytest.raises(FailedPrecondition) as refused:
        Plugins(installed_plugins()).policy("wrong")
    assert "dist-wrong" in refused.value.message
    assert said in refused.value.message


def test_policy_plugin_offered_twice_names_both(install: Any) -> None:
    code = HOOK.format("async def sandgate_create_request(request): pass")
    install("dist-one", code, entry="same")
    install("dist-two", code, entry="same")
    with pytest.raises(FailedPrecondition, match="'dist-one' and 'dist-two'"):
        Plugins(installed_plugins()).policy("same")


def test_backend_with_a_blocking_method_is_refused(install: Any) -> None:
    install("dist-faulty", FAULTY.replace("async def locate", "def locate"), entry="faulty")
    with pytest.raises(
        FailedPrecondition, match="'faulty' of plugin 'dist-faulty' must implement locate as 'async def'"
    ):
        find_backends(["faulty"])


@pytest.mark.parametrize(
    ("written", "wrong", "wanted"),
    [
        ("pause(self, handle, *, memory)", "pause(self, handle, keep)", "pause(self, handle, *, memory)"),
        ("create(self, request, handle)", "create(self, request)", "create(self, request, handle)"),
        ("locate(self, handle)", "locate(self, handle, where)", "locate(self, handle)"),
    ],
)
def test_backend_that_cannot_be_called_as_it_will_be_is_refused(
    install: Any, written: str, wrong: str, wanted: str
) -> None:
    install("dist-faulty", FAULTY.replace(f"async def {written}", f"async def {wrong}"), entry="faulty")
    with pytest.raises(FailedPrecondition) as refused:
        find_backends(["faulty"])
    assert refused.value.message == f"backend 'faulty' of plugin 'dist-faulty' must implement {wanted}"


@pytest.mark.parametrize(
    ("register", "said"),
    [
        ("pass", "registers no backend and has no other hook"),
        ("raise FailedPrecondition('not here')", "cannot be used: not here"),
        ("registrar.ad(None)", "cannot be used: AttributeError: "),
        ("registrar.add(Backend)", "registers Backend without a usable name"),
        ("registrar.add(object())", "which is not a Backend class"),
    ],
)
def test_plugin_that_does_not_register_as_it_must_is_named(install: Any, register: str, said: str) -> None:
    head = "from sandgate_errors import FailedPrecondition\nfrom sandgate_plugin_api import Backend\n"
    install(
        "dist-wrong", head + HOOK.format(f"def sandgate_register_backends(registrar):\n    {register}"), entry="wrong"
    )
    with pytest.raises(FailedPrecondition) as refused:
        find_backends(["wrong"])
    assert "dist-wrong" in refused.value.message
    assert said in refused.value.message
    checked = CliRunner().invoke(cli, ["plugin", "check", "wrong"])
    assert checked.exit_code == 1
    assert said in checked.output


def test_unknown_plugin_is_told_with_what_was_meant(install: Any) -> None:
    install("dist-faulty", FAULTY, entry="faulty")
    asked = CliRunner().invoke(cli, ["plugin", "check", "fautly"])
    assert isinstance(asked.exception, NotFound)
    assert "'fautly' is installed (did you mean 'faulty'?)" in asked.exception.message


def test_list_shows_faults_and_check_has_an_exit_status(install: Any) -> None:
    install("dist-faulty", FAULTY, entry="faulty")
    install("dist-broken", "import no_such_module", entry="broken")
    install("dist-old", FAULTY, entry="old", requires="sandgate-plugin-api~=7.0")
    install("dist-twice", FAULTY, entry="twice", requires="")
    run = CliRunner().invoke
    listed = run(cli, ["plugin", "list"]).output
    assert "dist-faulty 0.3" in listed
    assert "cannot be imported" in listed
    assert "was made for version ~=7.0" in listed
    assert "offered by both 'dist-faulty' and 'dist-twice'" in listed
    assert run(cli, ["plugin", "check", "faulty"]).exit_code == 0
    for name in ("broken", "dist-old", "dist_twice"):
        checked = run(cli, ["plugin", "check", name])
        assert checked.exit_code == 1, checked.output
        assert checked.output.startswith("broken")


# Hooks, without a gateway


def policies(*functions: Callable[..., Any], seconds: float = 0.2) -> Policies:
    hooks = [
        {function.__name__: Hook(function, tuple(function.__code__.co_varnames[: function.__code__.co_argcount]))}
        for function in functions
    ]
    loaded = [Loaded(name=f"p{n}", distribution=f"dist-{n}", hooks=each) for n, each in enumerate(hooks)]
    return Policies(loaded, seconds=seconds)


async def test_plugins_see_what_those_before_them_made() -> None:
    async def first(request):
        return request + 1

    async def second(request):
        return request * 10

    async def third(request):
        return None

    for function in (first, second, third):
        function.__name__ = "hook"
    assert await policies(first, second, third).amend("hook", 1, argument="request") == 20


async def test_refusal_of_a_hook_is_passed_on_as_it_is() -> None:
    async def hook(request):
        raise InvalidArgument("not so")

    with pytest.raises(InvalidArgument, match=r"^not so$"):
        await policies(hook).amend("hook", 1, argument="request")


async def test_hook_that_does_not_answer_is_bounded_even_if_it_does_not_obey() -> None:
    ended = asyncio.Event()

    async def hook(request):
        try:
            while not ended.is_set():
                try:
                    await ended.wait()
                except asyncio.CancelledError:
                    continue
        finally:
            ended.set()

    hanging = policies(hook, seconds=0.05)
    with pytest.raises(Unavailable, match="'p0' of 'dist-0' did not answer in hook"):
        await hanging.amend("hook", 1, argument="request")
    assert await hanging.collect("hook", request=1) == []
    ended.set()
    await hanging.close()


async def test_hook_that_hangs_for_ever_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandgate_plugin_api.policies._GRACE", 0.0)
    ended, calls = asyncio.Event(), 0

    async def hook(request):
        nonlocal calls
        calls += 1
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue

    hanging = policies(hook, seconds=0.001)
    for _ in range(50):
        with pytest.raises(Unavailable):
            await hanging.amend("hook", 1, argument="request")
    assert calls == 32
    ended.set()
    await hanging.close()


async def test_caller_that_leaves_cancels_the_hook() -> None:
    cancelled = asyncio.Event()

    async def hook(request):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    asking = asyncio.create_task(policies(hook, seconds=100).amend("hook", 1, argument="request"))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(cancelled.wait(), 10)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
)
async def test_fault_of_a_hook_is_told_without_its_text(error: BaseException) -> None:
    async def hook(request):
        raise error

    with pytest.raises(Internal, match=r"^plugin 'p0' of 'dist-0' is faulty in hook$"):
        await policies(hook).amend("hook", 1, argument="request")


async def test_observers_neither_refuse_nor_fail(caplog: pytest.LogCaptureFixture) -> None:
    async def refuses(request):
        raise InvalidArgument("not so")

    async def fails(request):
        raise ZeroDivisionError

    async def works(request):
        return request + 1

    for function in (refuses, fails, works):
        function.__name__ = "hook"
    assert await policies(refuses, fails, works).collect("hook", request=1) == [2]
    assert "'p0' of 'dist-0' raised in hook, which observes only: not so" in caplog.text
    assert "'p1' of 'dist-1' is faulty" in caplog.text


async def test_errors_may_be_replaced_by_other_classes_and_nothing_else() -> None:
    async def hook(error):
        return Unavailable("other") if error.message == "one" else "no error"

    asked = policies(hook)
    changed = await asked.amend("hook", InvalidArgument("one"), argument="error", kind=SandgateError)
    assert isinstance(changed, Unavailable)
    with pytest.raises(Internal):
        await asked.amend("hook", InvalidArgument("two"), argument="error", kind=SandgateError)
