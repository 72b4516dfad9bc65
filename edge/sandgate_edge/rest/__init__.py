"""The REST planes of the edge: sandboxes for an API key, and the files of a sandbox."""

__all__ = ["files", "sandboxes"]
