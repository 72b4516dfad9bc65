"""``/files`` and ``/directories``: what can be done with a path, by execd's own user."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sandgate_testing.execd_stand_in.http import PIECE, Exchange, Failure, Route, answer, answer_json, route
from sandgate_testing.execd_stand_in.multipart import Part, parts

__all__ = ["routes"]


def routes() -> list[Route]:
    return [
        route("GET", "/files/info", _info),
        route("GET", "/files/download", _download),
        route("POST", "/files/upload", _upload),
        route("POST", "/files/mv", _move),
        route("POST", "/files/permissions", _permit),
        route("DELETE", "/files", _remove),
        route("GET", "/directories/list", _list),
        route("POST", "/directories", _make),
        route("DELETE", "/directories", _remove_trees),
    ]


async def _info(exchange: Exchange) -> None:
    found = {path: await _done(_describe, path) for path in exchange.request.all("path")}
    await answer_json(exchange.writer, {_shown(path): about for path, about in found.items()})


async def _list(exchange: Exchange) -> None:
    path, depth = _wanted(exchange), exchange.request.first("depth") or "1"
    if not depth.isdecimal():
        raise Failure(400, "INVALID_REQUEST_BODY", f"invalid query parameter 'depth': {depth}")
    info = await _done(os.lstat, path)
    if stat.S_ISLNK(info.st_mode):
        raise Failure(400, "INVALID_REQUEST_BODY", f"path is a symbolic link, refusing to traverse: {_shown(path)}")
    if not stat.S_ISDIR(info.st_mode):
        raise Failure(400, "INVALID_REQUEST_BODY", f"path is not a directory: {_shown(path)}")
    # An entry that goes while it is listed spoils the whole of it, as it does there.
    found = await _done(_entries, path, int(depth), fault=f"error listing directory {_shown(path)}")
    await answer_json(exchange.writer, found)


async def _make(exchange: Exchange) -> None:
    for path, about in (await exchange.request.body.json(dict)).items():
        await _done(_make_directory, _whole(path), _permission(about))
    await answer(exchange.writer, 200)


async def _move(exchange: Exchange) -> None:
    for item in await exchange.request.body.json(list):
        if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in ("src", "dest")):
            raise Failure(400, "INVALID_REQUEST_BODY", "error parsing request: src and dest are paths")
        await _done(_rename, _whole(item["src"]), _whole(item["dest"]))
    await answer(exchange.writer, 200)


async def _permit(exchange: Exchange) -> None:
    for path, about in (await exchange.request.body.json(dict)).items():
        await _done(_set, _whole(path), _permission(about), fault=f"error changing permissions for {_shown(path)}")
    await answer(exchange.writer, 200)


async def _remove(exchange: Exchange) -> None:
    for path in exchange.request.all("path"):
        await _done(_remove_file, _whole(path), fault=f"error removing file {_shown(path)}")
    await answer(exchange.writer, 200)


async def _remove_trees(exchange: Exchange) -> None:
    for path in exchange.request.all("path"):
        await _done(_remove_tree, _whole(path), fault=f"error removing directory {_shown(path)}")
    await answer(exchange.writer, 200)


async def _download(exchange: Exchange) -> None:
    path, request = _wanted(exchange), exchange.request
    if request.all("offset") or request.all("limit"):
        raise Failure(501, "NOT_SUPPORTED", "this stand-in does not count lines")
    descriptor, size = await _done(_open_file, path)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        wanted = _range(request.fields.get("range"), size)
        name = os.path.basename(path).encode(errors="replace").decode("ascii", errors="replace")
        # As Go's server has it: no value of a header goes over its line.
        name = name.replace("\r", " ").replace("\n", " ")
        fields = {"Content-Disposition": f'attachment; filename="{name}"', "Accept-Ranges": "bytes"}
        if wanted is None:
            await answer(exchange.writer, 416, kind="text/plain", fields={"Content-Range": f"bytes */{size}"})
            return
        first, end = wanted
        status = 206 if request.fields.get("range") and size else 200
        if status == 206:
            fields["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        kind = "application/octet-stream"
        await answer(exchange.writer, status, kind=kind, length=end - first, fields=fields)
        file.seek(first)
        while first < end and (piece := await asyncio.to_thread(file.read, min(PIECE, end - first))):
            first += len(piece)
            exchange.writer.write(piece)
            await exchange.writer.drain()


def _range(text: str | None, size: int) -> tuple[int, int] | None:
    """Where to begin and where to end; None where nothing of the file is wanted. Only the first of several counts."""
    if text is None or not size:
        return 0, size
    found = re.fullmatch(r"bytes=\s*(\d*)\s*-\s*(\d*)\s*(,.*)?", text)
    if found is None or not (found[1] or found[2]):
        raise Failure(416, "UNKNOWN", "")
    if not found[1]:
        first, end = max(0, size - int(found[2])), size
    else:
        first, end = int(found[1]), min(int(found[2]) + 1, size) if found[2] else size
        if found[2] and int(found[2]) < first:
            raise Failure(416, "UNKNOWN", "")
    return (first, end) if first < size else None


async def _upload(exchange: Exchange) -> None:
    """The parts one after the other to where they belong, and nothing of them kept."""
    about: Mapping[str, Any] | None = None
    count = 0
    async for part in parts(exchange.request):
        if part.name == "metadata" and about is None:
            about = await part.json()
            if not isinstance(about.get("path"), str) or not about["path"]:
                raise Failure(400, "INVALID_FILE_METADATA", "metadata path is empty")
        elif part.name == "file" and about is not None:
            await _receive(part, _whole(about["path"]), _permission(about))
            about, count = None, count + 1
        elif part.name in {"metadata", "file"}:
            raise Failure(400, "INVALID_FILE", "metadata and file have to come in turn")
    if about is not None:
        raise Failure(400, "INVALID_FILE_CONTENT", "file is missing")
    if not count:
        raise Failure(400, "INVALID_FILE_METADATA", "metadata file is missing")
    await answer(exchange.writer, 200)


async def _receive(part: Part, path: str, permission: _Permission) -> None:
    folder, shown = os.path.dirname(path), _shown(path)
    await _done(_make_folders, folder, permission, fault=f"error creating target directory {_shown(folder)}")
    # A pipe without a reader is an error and not something to wait for.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    descriptor = await _done(os.open, path, flags, 0o777, fault=f"error opening destination file {shown}")
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        async for piece in part.pieces():
            await _done(_write, file.fileno(), piece, fault=f"error copying file {shown}")
    await _done(_set, path, permission, fault=f"error chmoding file {shown}")


def _write(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


class _Permission:
    """Whose something becomes, and its mode; nothing where it was not said."""

    def __init__(self, *, owner: str, group: str, mode: int) -> None:
        self.owner = owner
        self.group = group
        #: Its decimal digits are the octal ones.
        self.mode = mode


def _permission(about: Mapping[str, Any]) -> _Permission:
    try:
        owner, group = str(about.get("owner") or ""), str(about.get("group") or "")
        return _Permission(owner=owner, group=group, mode=int(about.get("mode") or 0))
    except (AttributeError, TypeError, ValueError) as error:
        raise Failure(400, "INVALID_REQUEST_BODY", f"error parsing request: {error}") from error


async def _done(work: Callable[..., Any], *arguments: object, fault: str = "") -> Any:
    """Do it in a thread. ``fault`` is in front of what the system says; without one, what is missing is no fault but a 404."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except OSError as error:
        words = _words(error)
        if isinstance(error, FileNotFoundError) and not fault:
            raise Failure(404, "FILE_NOT_FOUND", f"file not found. {words}") from error
        raise Failure(
            500, "RUNTIME_ERROR", f"{fault}. {words}" if fault else f"error accessing file: {words}"
        ) from error
    except (LookupError, ValueError) as error:
        # No such user, digits that are not octal, a path with a zero byte.
        raise Failure(500, "RUNTIME_ERROR", f"{fault or 'error accessing file'}. {error}") from error


def _words(error: OSError) -> str:
    """As Go writes them."""
    words = os.strerror(error.errno) if error.errno else str(error)
    where = f"{_shown(os.fsdecode(error.filename))}: " if error.filename else ""
    return f"{where}{words[:1].lower()}{words[1:]}"


def _wanted(exchange: Exchange) -> str:
    if not (path := exchange.request.first("path")):
        raise Failure(400, "MISSING_QUERY", "missing query parameter 'path'")
    return _whole(path)


def _whole(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _shown(path: str) -> str:
    """JSON holds text; what is none in a path is replaced in it."""
    return os.fsencode(path).decode(errors="replace")


def _describe(path: str) -> dict[str, object]:
    """FileInfo, of a link itself and not of what it leads to."""
    whole = _whole(path)
    info = os.lstat(whole)
    return {
        "path": _shown(whole),
        "type": _kind(info.st_mode),
        "size": info.st_size,
        "modified_at": _time(info.st_mtime_ns),
        "created_at": _time(info.st_ctime_ns),
        "owner": _name_of(pwd.getpwuid, info.st_uid),
        "group": _name_of(grp.getgrgid, info.st_gid),
        "mode": int(f"{info.st_mode & 0o777:o}"),
    }


def _kind(mode: int) -> str:
    known = {stat.S_IFLNK: "symlink", stat.S_IFDIR: "directory", stat.S_IFREG: "file"}
    return known.get(stat.S_IFMT(mode), "other")


def _time(nanoseconds: int) -> str:
    """RFC 3339, to the nanosecond, without zeros at its end."""
    seconds, rest = divmod(nanoseconds, 10**9)
    fraction = f".{rest:09}".rstrip("0") if rest else ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}{fraction}Z"


def _name_of(entry: Callable[[int], Any], number: int) -> str:
    """The number where it has no name."""
    with contextlib.suppress(KeyError):
        return str(entry(number)[0])
    return str(number)


def _entries(path: str, depth: int) -> list[dict[str, object]]:
    """What is below, each directory in front of what is in it, none through a link."""
    found: list[dict[str, object]] = []
    if depth > 0:
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
                found.append(_describe(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    found += _entries(entry.path, depth - 1)
    return found


def _make_directory(path: str, permission: _Permission) -> None:
    """One that is there stays as it is."""
    if _make_folders(path, permission) and permission.mode:
        os.chmod(path, _octal(permission.mode))


def _make_folders(path: str, permission: _Permission) -> bool:
    """With its parents; those that are new get the owner. Whether it was not there."""
    missing = [folder for folder in (path, *map(str, Path(path).parents)) if not os.path.exists(folder)]
    os.makedirs(path, exist_ok=True)
    for folder in missing:
        _give(folder, permission)
    return bool(missing)


def _set(path: str, permission: _Permission) -> None:
    if permission.mode:
        os.chmod(path, _octal(permission.mode))
    _give(path, permission)


def _give(path: str, permission: _Permission) -> None:
    if permission.owner or permission.group:
        uid = pwd.getpwnam(permission.owner).pw_uid if permission.owner else -1
        gid = grp.getgrnam(permission.group).gr_gid if permission.group else -1
        os.chown(path, uid, gid)


def _octal(digits: int) -> int:
    return int(str(digits), 8)


def _rename(source: str, target: str) -> None:
    os.stat(source)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.exists(target):
        raise ValueError(f"destination path already exists: {_shown(target)}")
    os.rename(source, target)


def _remove_file(path: str) -> None:
    """What is not there, or leads to nothing, is left alone."""
    if os.path.isdir(path):
        raise ValueError(f"path is a directory: {_shown(path)}")
    if os.path.exists(path):
        os.remove(path)


def _remove_tree(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def _open_file(path: str) -> tuple[int, int]:
    """Its descriptor and size; raises OSError for what is no file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    info = os.fstat(descriptor)
    if stat.S_ISREG(info.st_mode):
        return descriptor, info.st_size
    os.close(descriptor)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(f"read {_shown(path)}: is a directory")
    raise OSError(f"read {_shown(path)}: not a regular file")
