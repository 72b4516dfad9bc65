"""From entry points to loaded plugins: the one way in, for built-in plugins and strangers' alike.

Used by the core (backends and policy), the edge (policy), the front (a profile's defaults) and the command line. Only what
the configuration needs is loaded, so a faulty plugin that nobody configured cannot keep the gateway from starting; every
error names the distribution it comes from. By convention an entry point has the name of its backend; where none has, all
are asked.

Before anything of a plugin is imported, the version of the plugin API that its distribution requires is compared with
this one (:mod:`sandgate_plugin_api.version`): code made for another version may fail in ways that explain nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sandgate_errors import FailedPrecondition, SandgateError
from sandgate_plugin_api import hookspecs
from sandgate_plugin_api.backend import Backend
from sandgate_plugin_api.settings import nearest
from sandgate_plugin_api.version import DISTRIBUTION, VERSION

__all__ = [
    "ENTRY_POINT_GROUP",
    "Examined",
    "Hook",
    "Installed",
    "Loaded",
    "Plugins",
    "examine_all",
    "find_backends",
    "installed_plugins",
]

ENTRY_POINT_GROUP = "sandgate.plugins"
_REGISTER = "sandgate_register_backends"
#: It is a folder's name and a table's in the configuration.
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
#: The gateway calls hooks in the order in which the operator names plugins, one after the other.
_ORDERING = ("tryfirst", "trylast", "wrapper", "hookwrapper")


@dataclass(frozen=True)
class Installed:
    """A backend class and the distribution it came from."""

    backend: type[Backend]
    distribution: str


@dataclass(frozen=True)
class Hook:
    """One implementation of a hook."""

    function: Any
    #: The arguments it wants.
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A plugin that was imported and whose hooks are what they must be."""

    name: str
    distribution: str
    hooks: dict[str, Hook]

    @property
    def described(self) -> str:
        """How errors and log lines name it."""
        return f"plugin '{self.name}' of '{self.distribution}'"


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What ``sandgate plugin list`` shows of one entry point."""

    name: str
    distribution: str
    version: str
    #: What the distribution requires of the plugin API; None: it does not say.
    made_for: str | None
    backends: tuple[str, ...] = ()
    #: Policy hooks that it implements.
    hooks: tuple[str, ...] = ()
    #: Why it cannot be used; None: it can.
    fault: str | None = None


@dataclass
class Plugins:
    """Loads plugins and keeps what they offer."""

    entries: Sequence[EntryPoint]
    backends: dict[str, Installed] = field(default_factory=dict)
    _loaded: dict[str, tuple[object, Loaded]] = field(default_factory=dict)

    def load(self, entry: EntryPoint) -> Loaded:
        """Import one plugin and take the backends it registers. Raises FailedPrecondition naming the distribution."""
        key = f"{entry.name} = {entry.value} of {_distribution_of(entry)}"
        if key in self._loaded:
            return self._loaded[key][1]
        source = _distribution_of(entry)
        _check_version(entry)
        try:
            plugin = entry.load()
        except (Exception, SystemExit) as error:
            raise FailedPrecondition(f"plugin '{source}' cannot be imported: {_one_line(error)}") from error
        try:
            loaded = Loaded(name=entry.name, distribution=source, hooks=_hooks_of(plugin, source))
            # Two entry points may name one object: it registers once.
            if not any(known is plugin for known, _ in self._loaded.values()):
                self._register_backends(loaded)
        except SandgateError as error:
            if f"'{source}'" in error.message:
                raise
            raise FailedPrecondition(f"plugin '{source}' cannot be used: {error.message}") from error
        except Exception as error:
            raise FailedPrecondition(f"plugin '{source}' cannot be used: {_one_line(error)}") from error
        self._loaded[key] = (plugin, loaded)
        return loaded

    def backend(self, name: str) -> Installed:
        """The class of a backend. Raises FailedPrecondition with one line for the operator."""
        for entry in self.entries:
            if entry.name == name:
                loaded = self.load(entry)
                if _REGISTER not in loaded.hooks and name not in self.backends:
                    raise FailedPrecondition(
                        f"plugin '{loaded.distribution}' does not implement the hook {_REGISTER}, so it has no backend '{name}'"
                    )
        if name in self.backends:
            return self.backends[name]
        failures = [failure for entry in self.entries if (failure := self._tried(entry)) is not None]
        if name in self.backends:
            return self.backends[name]
        text = _unknown("backend", name, self.backends)
        raise FailedPrecondition(f"{text} ({'; '.join(failures)})" if failures else text)

    def policy(self, name: str) -> Loaded:
        """The plugin with policy hooks of an entry point's name. Raises FailedPrecondition with one line for the operator."""
        named = [entry for entry in self.entries if entry.name == name]
        if not named:
            raise FailedPrecondition(_unknown("plugin", name, {entry.name for entry in self.entries}))
        if len({_distribution_of(entry) for entry in named}) > 1:
            both = " and ".join(f"'{_distribution_of(entry)}'" for entry in named)
            raise FailedPrecondition(f"plugin '{name}' is offered by both {both}: uninstall one of them")
        loaded = self.load(named[0])
        if not loaded.hooks.keys() - {_REGISTER}:
            raise FailedPrecondition(
                f"{loaded.described} has no policy hooks: a backend is chosen by 'backend' or a table in 'backends'"
            )
        return loaded

    def _tried(self, entry: EntryPoint) -> str | None:
        """Load a plugin that may or may not offer the backend looked for; its fault is only worth a mention."""
        try:
            self.load(entry)
        except FailedPrecondition as error:
            return error.message
        return None

    def _register_backends(self, plugin: Loaded) -> None:
        hook = plugin.hooks.get(_REGISTER)
        if hook is not None:
            registrar = _Registrar(self.backends, plugin.distribution)
            hook.function(**({"registrar": registrar} if hook.arguments else {}))
            if not registrar.used and plugin.hooks.keys() == {_REGISTER}:
                raise FailedPrecondition(f"plugin '{plugin.distribution}' registers no backend and has no other hook")


class _Registrar:
    """What a plugin's hook gets: adds backends in the name of its distribution."""

    def __init__(self, backends: dict[str, Installed], source: str) -> None:
        self._backends = backends
        self._source = source
        self.used = False

    def add(self, backend: type[Backend]) -> None:
        if not (inspect.isclass(backend) and issubclass(backend, Backend)):
            raise FailedPrecondition(f"plugin '{self._source}' registers {backend!r}, which is not a Backend class")
        name = getattr(backend, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise FailedPrecondition(f"plugin '{self._source}' registers {backend.__name__} without a usable name")
        missing = sorted(getattr(backend, "__abstractmethods__", ()))
        if missing:
            raise FailedPrecondition(
                f"backend '{name}' of plugin '{self._source}' does not implement {', '.join(missing)}"
            )
        blocking = [method for method in sorted(_ASYNC) if not inspect.iscoroutinefunction(getattr(backend, method))]
        if blocking:
            raise FailedPrecondition(
                f"backend '{name}' of plugin '{self._source}' must implement {', '.join(blocking)} as 'async def'"
            )
        if (wrong := next(_called_otherwise(backend), None)) is not None:
            raise FailedPrecondition(f"backend '{name}' of plugin '{self._source}' must implement {wrong}")
        self.used = True
        known = self._backends.get(name)
        if known is not None and known.backend is not backend:
            raise FailedPrecondition(
                f"backend '{name}' is offered by both '{known.distribution}' and '{self._source}': uninstall one of them"
            )
        self._backends[name] = Installed(backend, self._source)


def _called_otherwise(backend: type[Backend]) -> Iterator[str]:
    """Methods that cannot be called as the core calls them, as they must be written."""
    for method, specified in vars(Backend).items():
        if method.startswith("_") or not inspect.isfunction(specified):
            continue
        wanted = inspect.signature(specified)
        given = [each for each in wanted.parameters.values() if each.kind is not each.KEYWORD_ONLY]
        named = {each.name: None for each in wanted.parameters.values() if each.kind is each.KEYWORD_ONLY}
        try:
            inspect.signature(getattr(backend, method)).bind(*given, **named)
        except TypeError:
            yield f"{method}({', '.join(_written(wanted))})"


def _written(signature: inspect.Signature) -> Iterator[str]:
    """The parameters, without their types."""
    starred = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield parameter.name


_ASYNC = frozenset(
    name for name, method in vars(Backend).items() if inspect.iscoroutinefunction(method) and not name.startswith("_")
)


def installed_plugins() -> list[EntryPoint]:
    """Every entry point of the group, by name and distribution."""
    return sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, _distribution_of(entry)))


def find_backends(names: Iterable[str], *, installed: Iterable[EntryPoint] | None = None) -> dict[str, Installed]:
    """The classes of the backends ``names``. Raises FailedPrecondition with one line for the operator."""
    plugins = Plugins(installed_plugins() if installed is None else list(installed))
    return {name: plugins.backend(name) for name in names}


def examine_all(entries: Iterable[EntryPoint]) -> list[Examined]:
    """Each plugin tried by itself but for names that two of them claim. Raises nothing on behalf of a plugin."""
    seen = Plugins(list(entries))
    return [_examined(entry, seen) for entry in seen.entries]


def _examined(entry: EntryPoint, seen: Plugins) -> Examined:
    about = {
        "name": entry.name,
        "distribution": _distribution_of(entry),
        "version": entry.dist.version if entry.dist is not None else "",
        "made_for": None if entry.dist is None else _made_for(entry.dist),
    }
    before = set(seen.backends)
    try:
        loaded = seen.load(entry)
    except FailedPrecondition as error:
        return Examined(**about, fault=error.message)  # type: ignore[arg-type]
    offered = tuple(sorted(set(seen.backends) - before))
    return Examined(**about, backends=offered, hooks=tuple(sorted(loaded.hooks.keys() - {_REGISTER})))  # type: ignore[arg-type]


def _hooks_of(plugin: object, source: str) -> dict[str, Hook]:
    """The hooks that a plugin implements, each known and of the form that its specification has."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    # A name of its own: pluggy would refuse one that it has seen in another form.
    manager.register(plugin, name=source)
    manager.check_pending()
    hooks: dict[str, Hook] = {}
    for caller in manager.get_hookcallers(plugin) or ():
        (found,) = caller.get_hookimpls()
        if caller.spec is None:
            continue  # Marked as optional: a hook of a later version of this API.
        if any(found.opts.get(option) for option in _ORDERING):
            raise FailedPrecondition(
                f"plugin '{source}' asks for an order in hook {caller.name}: the operator's order of plugins is the only one"
            )
        _check_async(caller.name, specified=caller.spec.function, found=found.function, source=source)
        hooks[caller.name] = Hook(found.function, tuple(found.argnames))
    if not hooks:
        raise FailedPrecondition(f"plugin '{source}' does not implement the hook {_REGISTER}, nor any other")
    return hooks


def _check_async(name: str, *, specified: object, found: object, source: str) -> None:
    wanted = inspect.iscoroutinefunction(specified)
    if wanted is not inspect.iscoroutinefunction(found):
        raise FailedPrecondition(
            f"plugin '{source}' must implement the hook {name} as {'async def' if wanted else 'def, not async def'}"
        )


def _check_version(entry: EntryPoint) -> None:
    """Raises FailedPrecondition for a plugin that was made for another version of the plugin API."""
    if entry.dist is None:
        return
    wanted = _made_for(entry.dist)
    if wanted is not None and not Requirement(f"{DISTRIBUTION}{wanted}").specifier.contains(VERSION, prereleases=True):
        raise FailedPrecondition(
            f"plugin '{entry.dist.name}' {entry.dist.version} was made for version {wanted} of the plugin API, and this "
            f"gateway has {VERSION}: install a release of '{entry.dist.name}' that fits"
        )


def _made_for(distribution: Distribution) -> str | None:
    """What a distribution requires of the plugin API. Without a bound it says nothing."""
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) == DISTRIBUTION and applies and requirement.specifier:
            return str(requirement.specifier)
    return None


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    listed = ", ".join(f"'{other}'" for other in sorted(known)) or "none"
    meant = nearest(name, known)
    # To install what a slip of the pen names would be to run whatever somebody has published under that name.
    how = "" if meant or not _NAME.fullmatch(name) else f"; to get it: pip install sandgate-plugin-{name}"
    return f"there is no {kind} '{name}'{meant}; installed: {listed}{how}"


def _distribution_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
