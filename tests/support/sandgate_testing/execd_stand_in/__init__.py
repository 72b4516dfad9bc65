"""A stand-in for OpenSandbox's execd, written for sandgate's tests. It is NOT the genuine program.

It follows the parts of execd 1.1's published interface that the backend uses:

- ``/ping``, and the access token, which only the relay does not ask for;
- ``/command`` (foreground and background, as root or another uid; bare JSON objects with empty lines between, and a stream
  that stays open for a second after its last), ``/command/status/{id}``, ``/command/{id}/logs``;
- ``/pty``: sessions on pipes or a terminal, their WebSocket, what was missed out of a ring of 1 MiB, ``takeover``;
- ``/files/{info,upload,download,mv,permissions}``, ``DELETE /files``, ``/directories/list``, ``/directories``; errors with
  the genuine program's codes and the system's words as Go writes them, without capitals;
- ``/metrics``, of the machine and not of the sandbox alone, over a fifth of a second instead of one;
- ``/proxy/{port}/...`` for HTTP and WebSocket.

Where the genuine program is harsher, and code that passes here can still fail there, unless ``EXECD_HARSH`` is 1:

- it starts the command of a session whose process has ended *again* for whoever attaches; here they are told the exit again;
- its ``exit`` frame does not wait for the output, whose rest is then not sent, and it hangs up right behind it; here all that
  was written before the end comes first, and there is time for a goodbye;
- it drops a socket that has not taken a frame within ten seconds; here reading from the process waits for it.

It reads an upload whole and pairs its parts afterwards; here ``metadata`` has to come right before its ``file``.

Left out: timeouts and arguments of ``/command``, its stderr as such, its end when the client goes, its interruption and log
cursors; ``/session``, ``/execution``, ``/code``, isolated sub-sessions, hooks; ``/files/search`` and ``/files/replace``, lines
of a file; ``/metrics/watch``; keep-alive of connections. Downloads of what is no file are refused, where the genuine one
answers something broken. ``created_at`` is the time of the last change of the inode.

It needs Python 3.11 in the sandbox's image and nothing else; the genuine one needs none. For tests of itself,
``EXECD_PORT`` is where it listens (0: it says on its standard output where) and ``EXECD_PING_SECONDS`` how often it pings, of
which it leaves two without an answer and, when harsh, waits a third for a frame to be taken.
"""

from __future__ import annotations

import os
import zipapp
from pathlib import Path

__all__ = ["HARSH", "pack"]

HARSH = os.environ.get("EXECD_HARSH") == "1"


def pack(target: Path) -> None:
    """Make it one file that starts by itself, which is how a sandbox gets it."""
    package = Path(__file__).parent
    inside = (Path(package.parent.name), Path(package.parent.name, package.name))
    zipapp.create_archive(
        package.parents[1],
        target,
        interpreter="/usr/bin/env python3",
        main=".".join((*inside[1].parts, "server:main")),
        filter=lambda path: path == inside[0] / "__init__.py" or (path.suffix == ".py" and path.parent == inside[1]),
    )
