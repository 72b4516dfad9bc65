"""The settings line of an edge: one JSON object that the front writes to standard input (docs/architecture.md)."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Settings"]


class Settings(BaseModel):
    """What an edge needs to know; an unknown field is an error, so that a misspelt one is never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    core: str
    """The gRPC target of the core."""
    internal_token: str = Field(repr=False)
    """Proves to the core that this is its own edge."""
    listen_fd: int = Field(ge=0)
    """A listening socket that this process inherited."""
    domain: str | None = None
    """Sandboxes are reached as ``<port>-<id>.<domain>``. None: no wildcard name was set up; see ``routing``."""
    max_rpc_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """The largest single message of an RPC, after decompression."""
    max_rpc_request_bytes: int | None = Field(default=None, ge=1024)
    """The largest single message from a client; None: ``max_rpc_bytes`` too."""
    max_upload_bytes: int = Field(default=0, ge=0)
    """The largest body of an upload, after decompression; 0: no limit, for this one and the next three."""
    max_upload_files: int = Field(default=0, ge=0)
    """Files in one upload."""
    max_list_depth: int = Field(default=0, ge=0)
    """The greatest depth that a listing may ask for."""
    max_list_entries: int = Field(default=0, ge=0)
    """Entries in one listing; a longer one is refused whole."""
    metrics: bool = False
    """Whether the core shows metrics, and is to be told ours."""
    worker: int = Field(default=0, ge=0)
    """Which of the gateway's edges this is."""
    traces: Literal["none", "otlp"] = "none"
    """Where spans of requests go; see ``sandgate_tracing``."""
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Peers that are proxies of the operator's: what they say about the client is passed on to ports of sandboxes."""
    plugins: dict[str, dict[str, object]] = Field(default_factory=dict)
    """The table of each policy plugin, in the order in which their hooks are asked."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def request_limit(self) -> int:
        """Bytes of one message from a client."""
        return min(self.max_rpc_bytes, self.max_rpc_request_bytes or self.max_rpc_bytes)
