"""Forward a TCP port of this host's loopback to another host of the lab: forward.py ADDRESS PORT."""

import asyncio
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction to its end."""
    try:
        while block := await reader.read(1 << 16):
            writer.write(block)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect, and copy both directions."""
    try:
        far, there = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    except OSError:
        writer.close()
        return
    try:
        await asyncio.gather(copy(reader, there), copy(far, writer))
    finally:
        there.close()
        writer.close()


async def main() -> None:
    """Serve for ever."""
    server = await asyncio.start_server(forward, "127.0.0.1", int(sys.argv[2]))
    await server.serve_forever()


asyncio.run(main())
