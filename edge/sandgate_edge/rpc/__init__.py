"""The Connect services that the SDKs call, one module each, and the mechanism of each kind of call."""

from __future__ import annotations

__all__: list[str] = []
