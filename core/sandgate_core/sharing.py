"""What a core has to do with the other cores of its database, made together and handed to those who need a part."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sandgate_core.lease import Lease
from sandgate_core.membership import Membership
from sandgate_core.peers import Peers
from sandgate_core.roster import Peer, Roster
from sandgate_core.store import Store

__all__ = ["Sharing", "shared"]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Of a core on a database that others may use too."""

    lease: Lease
    roster: Roster
    peers: Peers
    membership: Membership
    #: Those that lived when this core joined.
    others: list[Peer]


@asynccontextmanager
async def shared(store: Store, *, seconds: float, token: str) -> AsyncIterator[Sharing | None]:
    """The core is one of its database's while the block runs; None where it can only be alone.

    ``seconds``: how long the others wait for a sign of life. ``token``: what cores prove themselves with.
    """
    if store.lost is None:
        yield None
        return
    lease, roster = Lease(seconds), Roster(store)
    peers = Peers(roster, token=token)
    membership = Membership(roster, lease, host=socket.gethostname(), lost=store.lost)
    try:
        others = await membership.join()
        yield Sharing(lease=lease, roster=roster, peers=peers, membership=membership, others=others)
    finally:
        await membership.leave()
        await peers.close()
