"""The procedures that the edge offers, written out: what the SDKs call by name must not change with a descriptor."""

from __future__ import annotations

from sandgate_edge.rpc import METHODS

# Name to (client streams, server streams).
PROCESS = {
    "List": (False, False),
    "Start": (False, True),
    "Connect": (False, True),
    "Update": (False, False),
    "StreamInput": (True, False),
    "SendInput": (False, False),
    "SendSignal": (False, False),
    "CloseStdin": (False, False),
}
FILESYSTEM = {
    "Stat": (False, False),
    "MakeDir": (False, False),
    "Move": (False, False),
    "ListDir": (False, False),
    "Remove": (False, False),
    "WatchDir": (False, True),
    "CreateWatcher": (False, False),
    "GetWatcherEvents": (False, False),
    "RemoveWatcher": (False, False),
}


def test_procedures_are_those_of_the_sdks():
    """W4, W5."""
    expected = {
        **{f"/process.Process/{name}": kind for name, kind in PROCESS.items()},
        **{f"/filesystem.Filesystem/{name}": kind for name, kind in FILESYSTEM.items()},
    }
    assert {method.path: (method.client_streams, method.server_streams) for method in METHODS} == expected
