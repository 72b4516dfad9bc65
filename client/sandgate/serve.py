"""``sandgate serve``: the front. Holds the listening socket and the lock, and keeps the gateway's processes running.

It does no work of the gateway itself: no gRPC, no HTTP. The core starts first, then the edge workers; they stop in the
other order, so that no request meets a core that is gone. A child that dies is started again, and the others stay up
meanwhile. Child processes and their lines: :mod:`sandgate.children` and ``docs/architecture.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import sandgate_tracing
from sandgate import listening, runtime, state
from sandgate.children import Child, Kind, Refused
from sandgate.config import Configuration, Settings
from sandgate.logs import Log
from sandgate_errors import SandgateError, Unavailable

__all__ = ["run"]

#: The core may wait 10 s for a predecessor that is still ending, and look after every sandbox there is.
_CORE = Kind(name="core", module="sandgate_core", ready_within=90.0)
_EDGE = Kind(name="edge", module="sandgate_edge", ready_within=30.0)
#: Time to finish requests.
_EDGE_GRACE = 15.0
#: Time to drain; with ``kill``, time to end every sandbox.
_CORE_GRACE = {"keep": 20.0, "kill": 120.0}
#: What is left of both after a second signal. The core still gets a moment, since it may be ending sandboxes.
_HURRIED_EDGE = 0.0
_HURRIED_CORE = 5.0
#: A child that lived shorter than this died quickly; so many in a row, and starting it again helps nobody.
_QUICK = 10.0
_QUICK_DEATHS = 5
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """All that the children's settings lines are made of."""

    settings: Settings
    runtime_dir: Path
    internal_token: str = field(repr=False)
    seed: str = field(repr=False)
    api_key: str | None = field(repr=False)
    listener: socket.socket
    #: Becomes a key only if there is none at all.
    candidate_key: str = field(default_factory=lambda: "e2b_" + secrets.token_hex(20), repr=False)

    @property
    def core_target(self) -> str:
        return f"unix:{self.runtime_dir / runtime.CORE_SOCKET}"

    def core(self, *, first_start: bool) -> Mapping[str, object]:
        s = self.settings
        # A core that is started again must not bring back a key that was revoked meanwhile.
        first_key = (self.api_key or self.candidate_key) if first_start else None
        return {
            "state_dir": str(s.state_dir),
            "runtime_dir": str(self.runtime_dir),
            "database": s.database,
            "listen": [self.core_target, *s.grpc_listen],
            "address": s.core_address,
            "lease": s.core_lease,
            "default_backend": s.backend,
            "backends": {s.backend: {}, **s.backends},
            "plugins": s.plugins,
            "internal_token": self.internal_token,
            "seed": self.seed,
            "first_key": first_key,
            "first_key_given": first_start and self.api_key is not None,
            "on_exit": s.on_exit,
            "envd_version": s.envd_version,
            "max_timeout": s.max_timeout,
            "create_timeout": s.create_timeout,
            "metrics_listen": s.metrics_listen,
            "audit_days": s.audit_days,
            "traces": s.traces,
            "log_commands": s.log_commands,
            "log_level": s.log_level,
        }

    def edge(self, *, worker: int) -> Mapping[str, object]:
        return {
            "worker": worker,
            "metrics": self.settings.metrics_listen is not None,
            "traces": self.settings.traces,
            "core": self.core_target,
            "internal_token": self.internal_token,
            "listen_fd": self.listener.fileno(),
            "domain": self.settings.domain,
            "trusted_proxies": self.settings.trusted_proxies,
            "max_rpc_bytes": self.settings.max_rpc_bytes,
            "max_rpc_request_bytes": self.settings.max_rpc_request_bytes,
            "max_upload_bytes": self.settings.max_upload_bytes,
            "max_upload_files": self.settings.max_upload_files,
            "max_list_depth": self.settings.max_list_depth,
            "max_list_entries": self.settings.max_list_entries,
            "plugins": self.settings.plugins,
            "log_level": self.settings.log_level,
        }


def run(configuration: Configuration) -> None:
    """Serve until a signal says to stop. Raises SandgateError with one line when that cannot begin or go on."""
    settings = configuration.settings
    if settings.traces == "otlp":
        sandgate_tracing.check()
    log = Log(form=settings.log_format, level=settings.log_level)
    # The lock before the port: of two gateways with the same directory and port, the second should hear of the first.
    with (
        state.locked(settings.state_dir) as held,
        contextlib.closing(listening.bind(settings.host, settings.port)) as listener,
        runtime.opened(settings.state_dir) as runtime_dir,
    ):
        plan = _Plan(
            settings=settings,
            runtime_dir=runtime_dir,
            internal_token=state.secret_of(settings.state_dir, state.TOKEN),
            seed=configuration.seed or state.secret_of(settings.state_dir, state.SEED),
            api_key=configuration.api_key,
            listener=listener,
        )
        asyncio.run(_Gateway(plan, log, core_began=held.keep).run())


class _Signals:
    """The first signal asks to stop, a second to hurry; one that comes after the end changes nothing any more."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._arrived)
        try:
            yield
        finally:
            # For good: what is left is to tidy up, and a signal would end that half-way and pass for a failure.
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            for number in numbers:
                loop.remove_signal_handler(number)

    def _arrived(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


class _Gateway:
    """The running processes. Tasks: the supervisors, which end at the signal, and the readers of the children's output."""

    def __init__(self, plan: _Plan, log: Log, *, core_began: Callable[[], None]) -> None:
        """``core_began`` is called once a core may have made what is worth keeping."""
        self._plan = plan
        self._core_began = core_began
        self._log = log
        self._core: Child | None = None
        self._edges: dict[int, Child] = {}
        self._signals = _Signals()
        #: From then on there may be sandboxes.
        self._announced = False

    async def run(self) -> None:
        with self._signals.installed():
            try:
                async with asyncio.TaskGroup() as readers:
                    try:
                        await self._until_stopped(readers)
                    finally:
                        await self._stop()
            except BaseExceptionGroup as group:
                # What the operator is told is the first cause, not the shape of our tasks.
                raise _first(group) from None

    async def _until_stopped(self, readers: asyncio.TaskGroup) -> None:
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self._serve(readers))
            await self._signals.stop.wait()
            work.cancel()

    async def _serve(self, readers: asyncio.TaskGroup) -> None:
        """Start everything, say so, and keep it running. Ends by cancellation, or by an error that stops the gateway."""
        core = await self._start_core(readers, first_start=True)
        async with asyncio.TaskGroup() as starting:
            for number in range(self._plan.settings.workers):
                starting.create_task(self._start_edge(number, readers))
        self._announce(key_created=core.ready.get("first_key_created") is True)
        async with asyncio.TaskGroup() as supervisors:
            supervisors.create_task(self._keep(core, lambda: self._start_core(readers, first_start=False)))
            for number, edge in self._edges.items():
                supervisors.create_task(self._keep(edge, partial(self._start_edge, number, readers)))

    async def _start_core(self, readers: asyncio.TaskGroup, *, first_start: bool) -> Child:
        settings = self._plan.core(first_start=first_start)
        self._core = None
        try:
            self._core = await Child.start(self._kind(_CORE), settings, log=self._log, tasks=readers)
        except Refused:
            raise
        except BaseException:
            # It was cut off: what it had begun to make, sandboxes in advance for example, the next start has to find.
            self._core_began()
            raise
        self._core_began()
        return self._core

    async def _start_edge(self, number: int, readers: asyncio.TaskGroup) -> Child:
        kind = replace(self._kind(_EDGE), pass_fds=(self._plan.listener.fileno(),))
        self._edges[number] = await Child.start(kind, self._plan.edge(worker=number), log=self._log, tasks=readers)
        return self._edges[number]

    def _kind(self, kind: Kind) -> Kind:
        return replace(kind, state_dir=str(self._plan.settings.state_dir))

    async def _keep(self, child: Child, again: Callable[[], Coroutine[None, None, Child]]) -> None:
        """Start a child again whenever it ends. Raises Unavailable when it keeps ending."""
        quick = 0
        running: Child | None = child
        while True:
            if running is not None:
                lived = await self._lifetime(running)
                quick = quick + 1 if lived < _QUICK else 0
            else:
                quick += 1
            if quick >= _QUICK_DEATHS:
                raise Unavailable(
                    f"{child.kind.name} ended {quick} times in a row right after its start: the log says why"
                )
            await asyncio.sleep(min(_FIRST_PAUSE * 2**quick, _LONGEST_PAUSE))
            running = await self._started(again, child.kind.name)

    async def _lifetime(self, child: Child) -> float:
        """Wait for a child's end; how long it lived as a ready one."""
        await child.ended()
        await child.stop(grace=0)
        self._log.say(
            "error",
            "a process of the gateway ended and is started again",
            name=child.kind.name,
            pid=child.pid,
            how=child.manner_of_end,
        )
        return time.monotonic() - child.ready_since

    async def _started(self, again: Callable[[], Coroutine[None, None, Child]], name: str) -> Child | None:
        try:
            child = await again()
        except SandgateError as error:
            self._log.say(
                "error", "a process of the gateway could not be started again", name=name, error=error.message
            )
            return None
        self._log.say("info", "a process of the gateway was started again", name=name, pid=child.pid)
        return child

    async def _stop(self) -> None:
        """Edge before core, each within its time. Raises Unavailable when sandboxes may be left that should not be."""
        hurry = self._signals.hurry
        # The edges have it too, for as long as they drain. Nobody is to wait for a gateway that is gone.
        self._plan.listener.close()
        async with asyncio.TaskGroup() as stopping:
            for edge in self._edges.values():
                stopping.create_task(edge.stop(grace=_EDGE_GRACE, hurry=hurry, hurried_grace=_HURRIED_EDGE))
        on_exit = self._plan.settings.on_exit
        core = self._core
        if core is not None and not core.is_running:
            core = None
        obeyed = core is not None and await core.stop(
            grace=_CORE_GRACE[on_exit], hurry=hurry, hurried_grace=_HURRIED_CORE
        )
        if not obeyed and self._announced:
            self._log.say("error", "the core did not stop in time and was killed, or was not running")
            if on_exit == "kill":
                raise Unavailable("the core could not end all sandboxes: start the gateway again and stop it once more")

    def _announce(self, *, key_created: bool) -> None:
        """The exports that make an SDK use this gateway: the only thing on standard output."""
        plan = self._plan
        url = listening.url_of(plan.settings.host, plan.listener)
        lines = [f"export E2B_API_URL={url}", f"export E2B_SANDBOX_URL={url}", _key_line(plan, key_created=key_created)]
        self._announced = True
        try:
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
        except OSError:
            # Nobody reads any more. What is left in the buffer must not become an error at the interpreter's end.
            sys.stdout = None
        self._log.say(
            "info",
            "the gateway is ready",
            url=url,
            backend=plan.settings.backend,
            state_dir=str(plan.settings.state_dir),
        )


def _key_line(plan: _Plan, *, key_created: bool) -> str:
    if plan.api_key is not None:
        # Not the key itself: whoever reads the output may not be who set the variable.
        return "export E2B_API_KEY=$SANDGATE_API_KEY"
    if key_created:
        return f"export E2B_API_KEY={plan.candidate_key}"
    return "# E2B_API_KEY: a key that was made before; for a new one: sandgate keys create"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single exception in nested groups; one meant for the operator before any other."""
    chosen = group.subgroup(SandgateError) or group
    error: BaseException = chosen
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
