"""Requests to the ports of a sandbox, ``<port>-<id>.<domain>``: from the client to whatever listens there, and back.

A request is read by aiohttp, which refuses what is ambiguous, written anew to the server in the sandbox (``exchange.py``)
over a tunnel of the agent (``tunnel.py``), and its answer goes to the client's connection as it came. What the server says
is its own business: no header of the gateway's is added to it, and its preflights, paths and errors are its own.
"""

from sandgate_edge.ports.forward import forward, to_port
from sandgate_edge.ports.pages import refusal, wants_page

__all__ = ["forward", "refusal", "to_port", "wants_page"]
