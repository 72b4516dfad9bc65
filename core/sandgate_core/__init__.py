"""The core: owns sandbox records, their states and deadlines, API keys, and the relay to agents.

Started by the front as ``python -m sandgate_core``; inside, :func:`sandgate_core.server.run_core` is the whole of it.
"""

__all__: list[str] = []
