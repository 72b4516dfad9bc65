"""The Connect protocol itself: frames, codecs, codes, deadlines. Knows nothing of HTTP servers, gRPC or event loops."""

from __future__ import annotations

from sandgate_edge.connect.code import Code
from sandgate_edge.connect.compression import gunzip
from sandgate_edge.connect.envelope import COMPRESSED, END_STREAM, EnvelopeReader, pack

__all__ = ["COMPRESSED", "END_STREAM", "Code", "EnvelopeReader", "gunzip", "pack"]
