"""A hostile node: a program that holds as many connections to the VM's web server as it can, and never finishes one.

    python -m tests.hostile.node ATTACK ADDRESS PORT [--connections 5000] [--addresses 1] [--seconds 30]

Twice a second it prints how many are open, how many it has opened in all, and how those ended that the server closed:
by the status of its answer, or an error. They are opened again. Loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import resource
import ssl
import sys
import time
from collections import Counter

POST = "POST /sms/v1/enrol HTTP/1.1\r\nHost: vm\r\nContent-Type: application/json\r\nContent-Length: 30000\r\n\r\n{"
ATTACKS = {
    "idle": (False, "", 0),
    "handshake": (True, "", 0),
    "slow-header": (False, "GET /boot.ipxe HTTP/1.1\r\nHost: vm\r\nX-Long: ", 1),
    "slow-body": (True, POST, 1),
    "slow-plain-body": (False, POST.replace("/sms/v1/enrol", "/boot/v1/bootscript?mac=02:00:00:00:00:01"), 1),
    "no-reader": (False, "GET {path} HTTP/1.1\r\nHost: vm\r\n\r\n", 0),
}
"""Of each attack: TLS or not, what each connection sends at first, and after how many seconds each further byte."""


class Attack:
    """Connections from ``sources`` to one port; ``stop`` ends it."""

    def __init__(self, name: str, target: tuple[str, int], sources: list[str], path: str) -> None:
        self.secure, text, self.each_s = ATTACKS[name]
        self.first = text.replace("{path}", path).encode()
        self.shakes = name != "handshake"
        self.target, self.sources = target, sources
        self.opened, self.open = 0, 0
        self.ends: Counter[str] = Counter()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE

    async def keep(self, number: int, stop: float) -> None:
        """Hold one connection until the end; open it again when it is closed."""
        source = self.sources[number % len(self.sources)]
        while (left := stop - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._hold(source), left)
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                self.ends[type(error).__name__] += 1
            await asyncio.sleep(0.2)

    async def _hold(self, source: str) -> None:
        secure = self.context if self.secure and self.shakes else None
        # Reads nothing ahead, so that the server has to keep what is not read.
        reader, writer = await asyncio.open_connection(*self.target, ssl=secure, local_addr=(source, 0), limit=1024)
        self.opened += 1
        self.open += 1
        try:
            writer.write(self.first)
            ended = asyncio.ensure_future(reader.readline())
            while not ended.done() or b"200" in ended.result():
                await asyncio.sleep(self.each_s or 1)
                if self.each_s:
                    writer.write(b"x")
                    await writer.drain()
            self.ends[ended.result()[9:12].decode(errors="replace") or "closed"] += 1
        finally:
            self.open -= 1
            writer.close()
            with contextlib.suppress(Exception):
                writer.transport.abort()


async def run(attack: Attack, connections: int, seconds: float) -> None:
    """Attack for so long."""
    stop = time.monotonic() + seconds
    tasks = [asyncio.ensure_future(attack.keep(number, stop)) for number in range(connections)]
    while time.monotonic() < stop:
        await asyncio.sleep(0.5)
        print(json.dumps({"open": attack.open, "opened": attack.opened, "ends": attack.ends}), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--addresses", type=int, default=1, help="number of source addresses, from 127.66.0.1 on")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--path", default="/boot.ipxe", help="what no-reader requests")
    given = parser.parse_args()
    if not ipaddress.ip_address(given.address).is_loopback:
        parser.error("only loopback addresses are attacked")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    first = ipaddress.IPv4Address("127.66.0.1")
    sources = [str(first + number) for number in range(given.addresses)]
    asyncio.run(
        run(Attack(given.attack, (given.address, given.port), sources, given.path), given.connections, given.seconds)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
