"""Client of the supervisor in the container (http://supervisord.org/api.html), in whose place root there can reply."""

import http.client
import socket
import time
import xmlrpc.client
from typing import Any

from appliance.agent.in_root import by_descriptor, open_in_root
from appliance.agent.protocol import Problem
from appliance.text import one_line

SOCKET = "/run/sms/supervisor.sock"
MAX_REPLY = 1 << 20
"""Bytes of a reply with its head: 1 kB for each service is usual."""
CALL_S = 30.0
"""Seconds that a call may take, however much arrives meanwhile."""
HINT = "was the program replaced? `sms stop`, then `sms start`, starts the image's"


class Transport(xmlrpc.client.Transport):
    """Connections to the supervisor of a container with that root; all calls together end within ``limit_s`` seconds.

    Calls raise:
        Problem: it replies too late, too much, or something else than a supervisor does.
        OSError: there is no supervisor.
        xmlrpc.client.Fault: it refuses.
    """

    accept_gzip_encoding = False

    def __init__(self, root: str, limit_s: float) -> None:
        xmlrpc.client.Transport.__init__(self)
        self.root = root
        self.end = time.monotonic() + limit_s

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        return _Connection(self.root, min(self.end, time.monotonic() + CALL_S))

    def request(self, *arguments: Any, **options: Any) -> Any:
        try:
            return xmlrpc.client.Transport.request(self, *arguments, **options)
        except socket.timeout:
            raise Problem("the container's supervisor does not reply in time", HINT) from None
        except (OSError, Problem, xmlrpc.client.Fault):
            raise
        except Exception as error:  # of the parsers, whatever the input is
            raise invalid(str(error)) from None

    def parse_response(self, response: Any) -> Any:
        text = response.read().decode()
        if "<!" in text:  # entities could make it larger
            raise ValueError("it has a document type")
        parser, target = self.getparser()
        parser.feed(text)
        parser.close()
        return target.close()


def invalid(why: str) -> Problem:
    """Return the error for what no supervisor replies."""
    return Problem("the container's supervisor sent an invalid reply: %s" % one_line(why, 200), HINT)


class _Connection(http.client.HTTPConnection):
    def __init__(self, root: str, end: float) -> None:
        http.client.HTTPConnection.__init__(self, "localhost")
        self.root = root
        self.end = end

    def connect(self) -> None:
        self.sock = _Socket(self.end)
        with open_in_root(self.root, SOCKET) as descriptor:
            self.sock.connect(by_descriptor(descriptor))


class _Socket(socket.socket):
    """All that is read of it has arrived before ``end``, and is of ``MAX_REPLY`` bytes at most."""

    def __init__(self, end: float) -> None:
        socket.socket.__init__(self, socket.AF_UNIX)
        self.end = end
        self.left = MAX_REPLY
        self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise socket.timeout
        self.settimeout(left)

    def recv_into(self, *arguments: Any, **options: Any) -> int:
        self._wait_no_longer()
        size = socket.socket.recv_into(self, *arguments, **options)
        self.left -= size
        if self.left < 0:
            raise invalid("it has more than %d bytes" % MAX_REPLY)
        return size
