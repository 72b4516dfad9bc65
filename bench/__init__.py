"""Measures a gateway next to the same work done plainly, in the same run; see README.md."""

__all__ = ["calls", "memory", "report", "streams", "transfers"]
