"""The native client: sandboxes for internal services, by gRPC to the core alone.

``sandbox`` and ``async_sandbox`` hold the two faces; ``commands``, ``files`` and their async twins what hangs on them.
Below, without I/O and written once: ``*_calls`` (arguments to requests and back), ``following`` (a command over any number
of connections), ``transcript`` (its output). ``steps`` is the border between the two, which the drivers ``blocking`` and
``waiting`` cross. The names for users stand in ``sandgate`` itself.
"""

__all__: list[str] = []
