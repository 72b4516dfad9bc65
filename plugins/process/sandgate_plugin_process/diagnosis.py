"""What ``sandgate doctor`` says about this backend: whether sandboxes can be made here, how they are paused and limited."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandgate_errors import FailedPrecondition
from sandgate_plugin_process import bundle
from sandgate_plugin_process.allowance import Allowance
from sandgate_plugin_process.bubblewrap import Bubblewrap
from sandgate_plugin_process.freezing import possible_groups
from sandgate_plugin_process.isolation import Isolation
from sandgate_plugin_process.plain import Plain
from sandgate_plugin_process.settings import ProcessSettings

__all__ = ["diagnose"]

_INOTIFY = Path("/proc/sys/fs/inotify")


def diagnose(settings: Mapping[str, object]) -> Sequence[tuple[str, bool, str]]:
    """As :meth:`sandgate_plugin_api.Backend.diagnose`."""
    try:
        chosen = ProcessSettings.read(settings)
    except FailedPrecondition as error:
        return (("settings", False, error.message),)
    if chosen.isolation == "none":
        text = "none: code in a sandbox can do whatever the gateway's user can"
        return (("isolation", True, text), _limits(chosen, Plain(), Path("/")), _watches())
    with tempfile.TemporaryDirectory(prefix="sandgate-doctor-") as folder:
        return _diagnose_bubblewrap(chosen, Bubblewrap(chosen.bwrap), Path(folder))


def _diagnose_bubblewrap(
    chosen: ProcessSettings, isolation: Bubblewrap, folder: Path
) -> Sequence[tuple[str, bool, str]]:
    def try_one() -> str:
        isolation.check(bundle.make(folder), ())
        return isolation.describe()

    rows: list[tuple[str, bool, str]] = []
    for what, check in (("bubblewrap", isolation.version), ("sandbox", try_one)):
        try:
            rows.append((what, True, check()))
        except FailedPrecondition as error:
            # What follows would fail for the same reason.
            return (*rows, (what, False, error.message))
    return (*rows, ("pause", True, _how_to_pause()), _limits(chosen, isolation, folder), _watches())


def _limits(chosen: ProcessSettings, isolation: Isolation, folder: Path) -> tuple[str, bool, str]:
    try:
        return ("limits", True, Allowance.find(chosen, isolation, folder).describe())
    except FailedPrecondition as error:
        return ("limits", False, error.message)


def _watches() -> tuple[str, bool, str]:
    """Of file events. An agent needs one queue however much is watched; what runs in sandboxes takes what it likes."""
    found = []
    for setting, what in (("max_user_instances", "queues"), ("max_user_watches", "directories")):
        try:
            number = int((_INOTIFY / setting).read_text("ascii"))
        except (OSError, ValueError):
            return ("watches", False, "this kernel has no inotify: nothing can be watched")
        found.append(f"{number} {what} (sysctl fs.inotify.{setting})")
    return ("watches", True, f"all sandboxes together may have {' and '.join(found)}; raise these for many watchers")


def _how_to_pause() -> str:
    for group in possible_groups(f"sandgate-doctor-{secrets.token_hex(4)}"):
        try:
            group.make()
        except OSError:
            continue
        group.remove()
        return f"by control groups below {group.path.parent}"
    return "by signals: the gateway may not make control groups here"
