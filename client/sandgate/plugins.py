"""``sandgate plugin list`` and ``check``, and what the front itself asks plugins: their defaults.

Plugins are found and loaded as the core finds them (:mod:`sandgate_plugin_api.loading`), in this process; one whose import
never returns holds this command up, and no gateway.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import click
from packaging.utils import canonicalize_name

from sandgate.config import Settings
from sandgate.logs import printable
from sandgate.tables import show_table
from sandgate_errors import FailedPrecondition, NotFound, SandgateError
from sandgate_plugin_api import VERSION
from sandgate_plugin_api.loading import Examined, Plugins, examine_all, installed_plugins
from sandgate_plugin_api.settings import nearest
from sandgate_plugin_api.version import API_VERSION, DISTRIBUTION

__all__ = ["check", "defaults_of", "show_all"]

#: What a plugin may not choose for the operator: what else is loaded, and where the state lies.
_NOT_A_DEFAULT = frozenset({"plugins", "profile", "backends", "state_dir", "database"})


def show_all(*, as_json: bool) -> None:
    """Print every entry point of the group."""
    found = examine_all(installed_plugins())
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found]))
        return
    rows = [
        (
            each.name,
            f"{each.distribution} {each.version}",
            ", ".join(each.backends) or "-",
            str(len(each.hooks)) if each.hooks else "-",
            each.made_for or "not said",
            "ok" if each.fault is None else printable(each.fault),
        )
        for each in found
    ]
    headings = ("NAME", "DISTRIBUTION", "BACKENDS", "HOOKS", f"API ({VERSION})", "STATE")
    show_table(headings, rows, nothing="no plugin is installed")


def check(name: str) -> bool:
    """Print what is right and wrong with a plugin; whether it can be used. Raises NotFound for one that is not installed."""
    wanted = canonicalize_name(name)
    installed = examine_all(installed_plugins())
    found = [each for each in installed if each.name == name or canonicalize_name(each.distribution) == wanted]
    if not found:
        meant = nearest(name, {word for each in installed for word in (each.name, each.distribution)})
        raise NotFound(f"no plugin '{name}' is installed{meant}: sandgate plugin list shows those that are")
    # Not by all() alone: every one is to be seen.
    verdicts = [_checked(each) for each in found]
    return all(verdicts)


def _checked(plugin: Examined) -> bool:
    title = f"{plugin.name} of {plugin.distribution} {plugin.version}"
    if plugin.fault is not None:
        click.echo(f"broken  {title}: {printable(plugin.fault)}")
        return False
    if plugin.made_for is None:
        click.echo(
            f"note    {title} does not say which version of the plugin API it was made for: "
            f"let it require '{DISTRIBUTION}~={API_VERSION}.0'"
        )
    offered = [f"backend '{backend}'" for backend in plugin.backends] + [f"hook {hook}" for hook in plugin.hooks]
    click.echo(f"ok      {title}: {', '.join(offered) or 'what it offers was found with another entry point'}")
    for backend in plugin.backends:
        click.echo(
            f"        to check the backend itself: python -m pytest --pyargs sandgate_plugin_api.testsuite --backend {backend}"
        )
    return True


def defaults_of(names: Iterable[str]) -> Mapping[str, object]:
    """What plugins want of the configuration where the operator says nothing; of two, the first. Raises
    FailedPrecondition with one line that names the plugin.
    """
    plugins = Plugins(installed_plugins())
    wanted: dict[str, object] = {}
    for name in names:
        loaded = plugins.policy(name)
        hook = loaded.hooks.get("sandgate_defaults")
        if hook is None:
            continue
        try:
            given = dict(hook.function())
        except SandgateError as error:
            raise FailedPrecondition(f"{loaded.described}: {error.message}") from error
        except (Exception, SystemExit) as error:
            raise FailedPrecondition(
                f"{loaded.described} is faulty in sandgate_defaults: {type(error).__name__}: {error}"
            ) from error
        if wrong := sorted(key for key in given if key not in Settings.model_fields or key in _NOT_A_DEFAULT):
            raise FailedPrecondition(f"{loaded.described} has a default for '{wrong[0]}', which is no key it may set")
        wanted = {**given, **wanted}
    return wanted
