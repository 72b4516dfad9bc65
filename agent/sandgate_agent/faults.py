"""Errors of the operating system in the terms of the caller: the one table for all file operations."""

from __future__ import annotations

import errno
import os

from sandgate_errors import (
    AlreadyExists,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NoSpace,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SandgateError,
)

__all__ = ["NO_SPACE", "file_error", "missing", "virtual_file_error"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

_KINDS: dict[int, tuple[type[SandgateError], str]] = {
    errno.ENOENT: (NotFound, "path '{path}' does not exist"),
    # A file where a directory was needed: what the path names cannot exist.
    errno.ENOTDIR: (NotFound, "path '{path}' does not exist"),
    errno.EEXIST: (AlreadyExists, "path '{path}' already exists"),
    errno.EISDIR: (InvalidArgument, "path '{path}' is a directory"),
    errno.EINVAL: (InvalidArgument, "the system does not accept this for path '{path}'"),
    errno.ENAMETOOLONG: (InvalidArgument, "path '{path}' is too long"),
    errno.ELOOP: (FailedPrecondition, "path '{path}' is a loop of links"),
    errno.EBUSY: (FailedPrecondition, "path '{path}' is in use by the system"),
    errno.ETXTBSY: (FailedPrecondition, "path '{path}' is a program that runs"),
    errno.EACCES: (PermissionDenied, "permission denied for path '{path}'"),
    errno.EPERM: (PermissionDenied, "operation not permitted on path '{path}'"),
    errno.EROFS: (PermissionDenied, "path '{path}' is on a read-only file system"),
    errno.EMFILE: (ResourceExhausted, "too many open files"),
    errno.ENFILE: (ResourceExhausted, "too many open files"),
    errno.ENOSPC: (NoSpace, "not enough disk space available for path '{path}'"),
    errno.EDQUOT: (NoSpace, "not enough disk space available for path '{path}'"),
}


def file_error(error: OSError, path: str, *, overrides: dict[int, SandgateError] | None = None) -> SandgateError:
    """The error to raise for ``error`` at ``path``; ``overrides`` are one operation's own meanings."""
    number = error.errno or 0
    if overrides is not None and number in overrides:
        return overrides[number]
    kind, text = _KINDS.get(number, (Internal, "path '{path}': {reason}"))
    return kind(text.format(path=path, reason=os.strerror(number) if number else "failed"))


def virtual_file_error(error: OSError, path: str) -> SandgateError:
    """The same for content that the kernel makes or takes itself: there every number is its refusal, no broken disk."""
    number = error.errno or 0
    if number in _KINDS:
        return file_error(error, path)
    return InvalidArgument(f"the system does not accept this for path '{path}': {os.strerror(number)}")


def missing(path: str) -> NotFound:
    return NotFound(f"path '{path}' does not exist")
