"""Starts the agent: read the settings, fork the root spawner, and only then load grpc (docs/architecture.md).

The same file is ``__main__`` of the folder that backends put into a sandbox, hence no relative import. The order is the
point: once grpc is loaded this process must never fork.
"""

import os
import sys

__all__ = ["main"]


def main() -> int:
    """The exit status."""
    import gc

    # What is loaded now stays for good, and nothing of it is garbage: a twentieth of the start would go into looking.
    gc.disable()

    from sandgate_agent.settings import BadSettings, Settings, read_line
    from sandgate_agent.spawner import fork_root_spawner

    try:
        settings = Settings.parse(read_line(0))
        if sys.getfilesystemencoding().lower() != "utf-8":
            raise BadSettings("the agent needs Python's UTF-8 mode (-X utf8) in this locale")
        # For everything that is made here and by programs: 0644 and 0755 (D22, D23).
        os.umask(0o022)
        root_spawner, control = fork_root_spawner(
            settings.identity, withheld=settings.folder, groups=settings.groups, processes=settings.processes
        )
    except (BadSettings, OSError) as error:
        return _refuse(str(error))

    # gRPC reads it when it is loaded: a call then passes through one thread of its own and not three.
    os.environ.setdefault(
        "GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"
    )

    import asyncio
    import logging

    from sandgate_agent.server import serve

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    runner = asyncio.Runner()
    try:
        status = runner.run(serve(settings, control=control, root_spawner=root_spawner, ready=_ready))
    except BadSettings as error:
        return _refuse(str(error))
    # Not by returning: that waits for every thread, and one may hang in a file system that never answers.
    os._exit(status)


def _ready() -> None:
    """Say so, and let go of the starter's pipes: it may wait for their end."""
    os.write(1, b'{"ready": true}\n')
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _refuse(reason: str) -> int:
    import json

    os.write(1, json.dumps({"ready": False, "error": reason}).encode() + b"\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
