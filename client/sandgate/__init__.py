"""The command line of sandgate, and the front that runs the gateway's processes.

``cli`` is the way in; ``serve`` runs a gateway; ``keys`` and ``sandboxes`` ask a running one; ``doctor`` and ``demo``
help a first-time user. Nothing is imported here, so that a command loads only what it needs.
"""

__all__: list[str] = []
