"""A hostile services container: what another program there replies in the place of supervisord."""

from __future__ import annotations

import gzip


def make_reply(text: str, *, head: str = "", data: bytes = b"", length: int = 0) -> bytes:
    """A reply by HTTP with a text, or other data, and the length that it claims to have."""
    body = data or text.encode()
    lines = f"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\n{head}Content-Length: {length or len(body)}\r\n\r\n"
    return lines.encode() + body


def _returned(value: str) -> str:
    return f"<methodResponse><params><param><value>{value}</value></param></params></methodResponse>"


ENTITIES = "".join(f'<!ENTITY {name} "{f"&{of};" * 30}">' for of, name in ("ab", "bc", "cd", "de", "ef"))
COMPRESSED = gzip.compress(_returned("x" * (4 << 20)).encode())
REFUSAL = "<struct><member><name>faultCode</name><value><int>6</int></value></member></struct>"
REPLIES = {
    "a text without an end": (
        make_reply("<methodResponse><params><param><value>", length=1 << 40),
        b"x" * (1 << 15),
    ),
    "single bytes": (b"HTTP/1.1 200 OK\r\nA: ", b"x"),
    "nothing": (b"", b""),
    "a text that is compressed": (
        make_reply("", head="Content-Encoding: gzip\r\n", data=COMPRESSED),
        b"",
    ),
    "entities within entities": (
        make_reply(f"<!DOCTYPE a [<!ENTITY a 'b'>{ENTITIES}]>{_returned('&f;')}"),
        b"",
    ),
    "another type": (make_reply(_returned("<int>1</int>")), b""),
    "processes without a name": (
        make_reply(_returned("<array><data><value><struct></struct></value></data></array>")),
        b"",
    ),
    "a refusal": (
        make_reply(f"<methodResponse><fault><value>{REFUSAL}</value></fault></methodResponse>"),
        b"",
    ),
    "a text that is none": (make_reply("\x1b]0;title\x07"), b""),
    "another status": (b"HTTP/1.1 500 \x1b]0;title\x07\r\nContent-Length: 0\r\n\r\n", b""),
}
"""What another program replies to the agent in the place of supervisord: what is sent, and what without an end."""
PROGRAM = """
import os, signal, socket, sys, threading, time
path, first, then = sys.argv[1], bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])

def reply(link):
    try:
        asked = b""
        while b"</methodCall>" not in asked:
            asked += link.recv(65536) or b"</methodCall>"
        link.sendall(first)
        while then or not first:
            time.sleep(0.05 if len(then) < 2 else 0)
            link.sendall(then)
        link.shutdown(socket.SHUT_WR)
        link.recv(1)
    except OSError:
        pass
    link.close()

def end(*_):
    os.rename(kept, path)
    os._exit(0)

kept = path + ".kept"
if os.path.exists(path):
    os.rename(path, kept)
signal.signal(signal.SIGTERM, end)
listening = socket.socket(socket.AF_UNIX)
listening.bind(path)
listening.listen(64)
print("listens", flush=True)
while True:
    threading.Thread(target=reply, args=(listening.accept()[0],), daemon=True).start()
"""
"""A program: the path of its socket, and a reply of ``REPLIES`` in hexadecimal digits. SIGTERM restores the socket."""
