"""The policy plugins of one process, and the one way in which their hooks are called.

pluggy's own calls are synchronous, one-to-many and stop at the first exception without saying whose it was. Here hooks
are asked one after the other, each within :data:`~sandgate_plugin_api.hookspecs.HOOK_SECONDS`, and a fault is contained:
named in the log and told to the client as "internal" with the plugin's name. Used by core and edge alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sandgate_errors import FailedPrecondition, Internal, SandgateError, Unavailable
from sandgate_plugin_api.hookspecs import HOOK_SECONDS
from sandgate_plugin_api.loading import Hook, Loaded, Plugins, installed_plugins
from sandgate_plugin_api.policy import PolicyContext

__all__ = ["Policies"]

T = TypeVar("T")

#: Seconds for a hook to give up after its time is over, or after its request was called off.
_GRACE = 1.0
#: Calls of one plugin that did not give up. With so many it is asked nothing more: each holds memory.
_MOST_STRAYS = 32
_log = logging.getLogger("sandgate_plugin.policies")


@dataclass(frozen=True)
class _Implementation:
    plugin: Loaded
    hook: Hook
    name: str

    async def call(self, arguments: Mapping[str, object]) -> Any:
        wanted = {name: arguments[name] for name in self.hook.arguments}
        try:
            return await self.hook.function(**wanted)
        except (SystemExit, KeyboardInterrupt) as error:
            # Out of a task these would end the gateway's event loop.
            raise _Left(type(error).__name__) from error


class Policies:
    """The plugins in their order. Made by :meth:`load`, ended by :meth:`close`."""

    def __init__(self, plugins: Iterable[Loaded] = (), *, seconds: float = HOOK_SECONDS) -> None:
        self._plugins = list(plugins)
        self._seconds = seconds
        self._hooks: dict[str, list[_Implementation]] = {}
        for plugin in self._plugins:
            for name, hook in plugin.hooks.items():
                self._hooks.setdefault(name, []).append(_Implementation(plugin, hook, name))
        self._strays: dict[asyncio.Task[Any], Loaded] = {}

    @classmethod
    def load(cls, names: Iterable[str]) -> Policies:
        """The installed plugins of these names. Raises FailedPrecondition with one line for the operator."""
        names = list(names)
        if not names:
            return cls()
        plugins = Plugins(installed_plugins())
        return cls([plugins.policy(name) for name in names])

    async def configure(
        self, tables: Mapping[str, Mapping[str, object]], context: Callable[[str, Mapping[str, object]], PolicyContext]
    ) -> None:
        """Give each plugin its table. ``context`` makes the rest. Raises FailedPrecondition."""
        for plugin in self._plugins:
            table = tables.get(plugin.name, {})
            hook = plugin.hooks.get("sandgate_configure")
            if hook is None:
                if table:
                    raise FailedPrecondition(f"{plugin.described} takes no settings: remove [plugins.{plugin.name}]")
                continue
            call = _Implementation(plugin, hook, "sandgate_configure")
            try:
                await self._asked(call, {"context": context(plugin.name, table)})
            except SandgateError as error:
                raise FailedPrecondition(f"plugin '{plugin.name}': {error.message}") from error

    async def close(self) -> None:
        """Call off what still runs of hooks that did not give up."""
        for task in self._strays:
            task.cancel()
        if self._strays:
            await asyncio.wait(set(self._strays), timeout=_GRACE)

    def has(self, hook: str) -> bool:
        """Whether anybody implements it: asked first, so that no argument is made for nobody."""
        return hook in self._hooks

    async def amend(
        self, hook: str, subject: T, /, *, argument: str, kind: type[Any] | None = None, **others: object
    ) -> T:
        """The subject as the plugins want it; ``argument`` is its name in the hook. Raises what a hook refuses with.

        ``kind``: what a hook must return; None: the type that the subject has.
        """
        for each in self._hooks.get(hook, ()):
            answer = await self._asked(each, {argument: subject, **others})
            if answer is None:
                continue
            wanted: type[Any] = kind or type(subject)
            if not isinstance(answer, wanted):
                raise self._fault(each, f"returned {type(answer).__name__}, not {wanted.__name__} or None")
            subject = answer
        return subject

    async def amend_part(self, hook: str, record: Any, /, *, argument: str, part: str, **others: object) -> Any:
        """One mapping among the fields of a frozen record, as the plugins want it."""
        for each in self._hooks.get(hook, ()):
            answer = await self._asked(each, {argument: record, **others})
            if answer is None:
                continue
            if not isinstance(answer, Mapping):
                raise self._fault(each, f"returned {type(answer).__name__}, not a mapping or None")
            record = replace(record, **{part: answer})
        return getattr(record, part)

    async def first(self, hook: str, kind: type[T], /, **arguments: object) -> T | None:
        """The first answer that is not None."""
        for each in self._hooks.get(hook, ()):
            answer = await self._asked(each, arguments)
            if isinstance(answer, kind):
                return answer
            if answer is not None:
                raise self._fault(each, f"returned {type(answer).__name__}, not {kind.__name__} or None")
        return None

    async def collect(self, hook: str, /, **arguments: object) -> list[Any]:
        """Every answer that is not None, of an observer: its faults, refusals included, are logged and that is all."""
        answers = []
        for each in self._hooks.get(hook, ()):
            try:
                answer = await self._asked(each, arguments)
            except SandgateError as error:
                if not isinstance(error, _Contained):
                    _log.error("%s raised in %s, which observes only: %s", each.plugin.described, hook, error.message)
                continue
            if answer is not None:
                answers.append(answer)
        return answers

    async def _asked(self, each: _Implementation, arguments: Mapping[str, object]) -> Any:
        if sum(plugin is each.plugin for plugin in self._strays.values()) >= _MOST_STRAYS:
            raise _Hangs(f"{each.plugin.described} hangs in earlier calls")
        task = asyncio.create_task(each.call(arguments))
        try:
            await asyncio.wait({task}, timeout=self._seconds)
        except asyncio.CancelledError:
            # The caller does not wait any longer; whether the hook obeys is seen later.
            self._leave(task, each.plugin)
            raise
        if not task.done():
            self._leave(task, each.plugin)
            await asyncio.wait({task}, timeout=_GRACE)
            _log.error("%s did not answer within %g s in %s", each.plugin.described, self._seconds, each.name)
            raise _Hangs(f"{each.plugin.described} did not answer in {each.name}")
        if task.cancelled():
            raise self._fault(each, "cancelled itself")
        failure = task.exception()
        if failure is None:
            return task.result()
        if isinstance(failure, SandgateError):
            raise failure
        raise self._fault(each, f"raised {type(failure).__name__}", failure) from failure

    def _leave(self, task: asyncio.Task[Any], plugin: Loaded) -> None:
        self._strays[task] = plugin
        task.add_done_callback(self._ended)
        task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._strays.pop(task, None)
        if not task.cancelled():
            task.exception()  # Told already, or nobody waits for it; without this asyncio would complain.

    @staticmethod
    def _fault(each: _Implementation, what: str, error: BaseException | None = None) -> _Faulty:
        _log.error("%s is faulty: %s %s", each.plugin.described, each.name, what, exc_info=error)
        return _Faulty(f"{each.plugin.described} is faulty in {each.name}", should_retry=False)


class _Left(Exception):
    """A plugin tried to end the process."""


class _Contained(SandgateError):
    """What is made of a plugin's fault; it is in the log already."""


class _Faulty(_Contained, Internal):
    """The plugin failed; the client can do nothing about it."""


class _Hangs(_Contained, Unavailable):
    """The plugin does not answer; it may do so later."""
