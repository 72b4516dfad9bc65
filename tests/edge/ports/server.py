"""A server in a sandbox that says what it was asked, and answers as its paths say. Run with the port to listen on, or 0.

Written on sockets: it must see and send bytes that no library would.
"""

import asyncio
import gzip
import hashlib
import json
import pathlib
import sys


async def read_body(headers, reader):
    """The pieces of a body, unframed."""
    fields = {name.lower(): value for name, value in headers}
    if "chunked" in fields.get("transfer-encoding", ""):
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
        return
    left = int(fields.get("content-length", "0"))
    while left:
        piece = await reader.read(min(left, 1 << 18))
        if not piece:
            return
        left -= len(piece)
        yield piece


def answer(body, *more, status="200 OK"):
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more]
    return "\r\n".join([*head, "", ""]).encode() + body


async def serve(reader, writer):
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")[:-2]
        headers = [tuple(line.split(": ", 1)) for line in lines]
        await respond(first, headers, reader, writer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    except (asyncio.IncompleteReadError, ConnectionError):
        print("left", flush=True)
        writer.close()


async def respond(first, headers, reader, writer):
    path = first.split()[1].partition("?")[0]
    if path == "/early":
        writer.write(answer(b"too much", status="413 Enough"))
        return
    if path == "/upgrade":
        protocol = dict(headers)["Upgrade"]
        writer.write(
            f"HTTP/1.1 101 Changing\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\nX-Own: 1\r\n\r\nhello ".encode()
        )
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write(b" bye")
        return
    if path == "/expect":
        writer.write(b"HTTP/1.1 100 Go on\r\n\r\n")
        await writer.drain()
    if path == "/duplex":
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        async for piece in read_body(headers, reader):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return
    digest, size = hashlib.sha256(), 0
    async for piece in read_body(headers, reader):
        digest.update(piece)
        size += len(piece)
    if path == "/pour":
        await pour(writer)
    elif path == "/events":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for number in range(3):
            writer.write(b"data: %d\n\n" % number)
            await writer.drain()
            await reader.read(1) if number == 0 and b"wait" in first.encode() else await asyncio.sleep(0.05)
    elif path == "/until-close":
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nall there is")
    elif path == "/cut":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npart")
    elif path == "/trailers":
        writer.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n3\r\nabc\r\n0\r\nX-Sum: 6\r\n\r\n"
        )
    elif path == "/hints":
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n" + answer(b"hinted"))
    elif path == "/plain":
        cookies = ["Set-Cookie: a=1; Path=/", "set-cookie: b=2", "X-hEADER:  odd \xe4", "Keep-Alive: timeout=5"]
        more = ["Connection: keep-alive, X-Of-Hop", "X-Of-Hop: 1", "Location: /next", *cookies]
        body = b"plain"
        lines = ["HTTP/1.1 299 Nearly Fine", *more, f"Content-Length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode("latin-1") + body)
    elif path == "/gzip":
        writer.write(answer(gzip.compress(b"text " * 100), "Content-Encoding: gzip", 'ETag: "x"'))
    elif path == "/no-content":
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    elif path == "/not-modified":
        writer.write(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n")
    elif path == "/nothing":
        pass
    elif path == "/garbage":
        writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
    elif path == "/huge-head":
        writer.write(b"HTTP/1.1 200 OK\r\nX-Huge: " + b"x" * (1 << 20) + b"\r\n\r\n")
    elif path == "/both-framings":
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"
        )
    elif path == "/two-lengths":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde")
    else:
        told = {"first": first, "headers": headers, "size": size, "sha256": digest.hexdigest()}
        body = b"" if first.startswith("HEAD") else json.dumps(told).encode()
        writer.write(answer(body) if body else b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")


async def pour(writer):
    """Without end, and saying how much."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    sent = 0
    while True:
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()
        sent += 65536
        pathlib.Path(sys.argv[2]).write_text(str(sent))


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


asyncio.run(main())
