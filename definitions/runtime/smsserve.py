"""Readiness and liveness over HTTP, for engines that have no other checks: `sms-probe --serve`. Python 3.6 and later.

GET /ready/NAME asks the service in its own protocol, GET /live/NAME whether it runs: 200 or 503, with a JSON object.
All else is refused. A client can cost a probe of each service a second and no more: answers are kept for a
second, requests are short, and of too many connections the one that has been silent longest is closed.
"""

import asyncio
import ipaddress
import json
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import smsrt
import smssync

CONNECTIONS = 32
REQUEST_BYTES = 4096  # request line and headers
REQUEST_S = 5  # for a whole request, and again for its answer to be taken
FRESH_S = 1  # an answer is given to others for this time
PATH = re.compile(rb"/(ready|live)/([a-z][a-z0-9-]{0,30})\Z")
REQUEST = re.compile(rb"([A-Z]{1,16}) (\S{1,1024}) HTTP/1\.[01]\r?\Z")
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class Server:
    """Answers for services."""

    def __init__(self, services):
        self.services = services
        self.open = 0
        self.silent = []  # connections whose request is not complete, oldest first
        self.answers = {}  # service: (when, answer)
        self.locks = {name: asyncio.Lock() for name in services}
        self.pool = ThreadPoolExecutor(max(1, len(services)))  # each probe has a timeout of its own

    async def connected(self, reader, writer):
        """Serve one connection: one request, one answer."""
        if self.open >= CONNECTIONS:
            if not self.silent:  # all of them wait for probes
                return writer.transport.abort()
            self.silent.pop(0).transport.abort()
        self.open += 1
        self.silent.append(writer)
        try:
            status, body = await self.respond(reader, writer)
            await self.send(reader, writer, status, body)
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # it has gone, or does not read
        finally:
            self.open -= 1
            self.heard(writer)
            writer.transport.abort()

    def heard(self, writer):
        """Its request is complete, or it has gone."""
        if writer in self.silent:
            self.silent.remove(writer)

    async def respond(self, reader, writer):
        """Read a request; its status and answer."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
        except asyncio.LimitOverrunError:
            return 431, {"detail": "more than %d bytes" % REQUEST_BYTES}
        except asyncio.TimeoutError:
            return 408, {"detail": "no request within %d s" % REQUEST_S}
        self.heard(writer)
        request = REQUEST.match(head.split(b"\n", 1)[0])
        if not request:
            return 400, {"detail": "not a request of HTTP/1"}
        method, target = request.groups()
        if method != b"GET":
            return 405, {"detail": "only GET"}
        found = PATH.match(target)
        name = found.group(2).decode() if found else ""
        if name not in self.services:
            return 404, {"detail": "known are /ready/NAME and /live/NAME of: %s" % ", ".join(self.services)}
        answer = smssync.check_live(name, self.services[name]) if found.group(1) == b"live" else await self.ask(name)
        return (200 if answer["ok"] else 503), answer

    async def ask(self, name):
        """Probe a service, one request at a time; others are given the answer as well."""
        async with self.locks[name]:
            at, answer = self.answers.get(name, (0, None))
            if answer is None or time.monotonic() - at > FRESH_S:
                loop = asyncio.get_event_loop()
                answer = await loop.run_in_executor(self.pool, smsrt.probe, name, self.services[name])
                self.answers[name] = time.monotonic(), answer
            return answer

    async def send(self, reader, writer, status, body):
        data = json.dumps(body).encode() + b"\n"
        head = "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n%s\r\n"
        allow = "Allow: GET\r\n" if status == 405 else ""
        writer.write((head % (status, REASONS[status], len(data), allow)).encode() + data)
        await asyncio.wait_for(writer.drain(), REQUEST_S)
        writer.write_eof()
        await asyncio.wait_for(drop(reader), REQUEST_S)


async def drop(reader):
    """Read what is left until the other side closes: an answer that is followed by a reset may be lost."""
    for _ in range(64):
        if not await reader.read(REQUEST_BYTES):
            return


def parse_address(text):
    """Address and port of ADDRESS:PORT or [ADDRESS]:PORT. Raises ValueError."""
    address, _, port = text.rpartition(":")
    address = str(ipaddress.ip_address(address[1:-1] if address.startswith("[") else address))
    if not re.match(r"[0-9]{1,5}\Z", port) or int(port) > 65535:
        raise ValueError("%r is not a port" % port)
    return address, int(port)


async def stay(address, port, services):
    """Serve until a signal."""
    server = Server(services)
    listener = await asyncio.start_server(server.connected, address, port, limit=REQUEST_BYTES)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process of a container ignores them otherwise
        asyncio.get_event_loop().add_signal_handler(number, stop.set)
    print("sms-probe: serves on port %d of %s" % (listener.sockets[0].getsockname()[1], address), flush=True)
    await stop.wait()
    listener.close()


def serve(where, services):
    """Serve on ADDRESS:PORT (0: a free port, which is printed); returns the exit status."""
    try:
        address, port = parse_address(where)
    except ValueError as error:
        print("sms-probe: --serve %s: %s" % (where, error), file=sys.stderr)
        return 2
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(stay(address, port, services))
    except OSError as error:
        print("sms-probe: cannot listen on %s: %s" % (where, error.strerror), file=sys.stderr)
        return 1
    return 0
