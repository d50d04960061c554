"""Packets over a stream between the machines of the chaos run and their driver: the length in four bytes, and the
content."""

import asyncio


def write_packet(writer: asyncio.StreamWriter, packet: bytes) -> None:
    writer.write(len(packet).to_bytes(4, "big") + packet)


async def read_packet(reader: asyncio.StreamReader) -> bytes:
    """Return the next packet. Raises EOFError at the end of the stream."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
