"""What the tests of the whole share: a gateway to talk to, raw HTTP, SDKs in environments of their own.

Not part of any distribution; pytest puts ``tests/support`` on the import path, and so does ``make bench``.
"""

__all__ = ["agent_process", "gateway", "leftovers", "raw_http", "requirements", "sdk"]
