"""A conversation with the provisioning VM, over TLS in both directions. Python 3.9 and later."""

import errno
import http.client
import json
import os
import random
import socket
import ssl

from urllib.parse import urlsplit

CONNECT_S = 10
ANSWER_S = 30
ALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A server that is gone without a word is noticed within half a minute, however long its answer may take."""


class Away(OSError):
    """The server cannot be reached."""


class Said(ValueError):
    """The server answered with an error; ``status`` is the HTTP status."""

    def __init__(self, status, words):
        super().__init__(words)
        self.status = status


def trust(ca, cert=None, key=None):
    """Trust one CA alone; show a certificate where there is one."""
    context = ssl.create_default_context(cafile=ca)
    if cert and os.path.exists(cert):
        context.load_cert_chain(cert, key)
    return context


class Link:
    """One connection to the server at ``base``, kept while it is used, reopened when it is lost."""

    def __init__(self, base, context=None, low_port=False):
        """``low_port``: ask from a port below 1024, which shows that root asks."""
        self.base = base.rstrip("/")
        self.low_port = low_port and os.geteuid() == 0
        where = urlsplit(self.base)
        self.host, self.prefix = where.netloc, where.path
        self.context = context if where.scheme == "https" else None
        self.secure = where.scheme == "https"
        self.open = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.open:
            self.open.close()
            self.open = None

    def get(self, path, largest, timeout_s=ANSWER_S):
        """The bytes at a path.

        Raises Away; Said: the server says no; ValueError: more than ``largest``, or not all came.
        """
        return self._ask("GET", path, None, largest, timeout_s)

    def post(self, path, value, largest=1 << 20, timeout_s=ANSWER_S):
        """The bytes of the answer to a JSON document."""
        return self._ask("POST", path, json.dumps(value).encode(), largest, timeout_s)

    def _ask(self, method, path, body, largest, timeout_s):
        kept = self.open is not None
        try:
            return self._exchange(method, path, body, largest, timeout_s)
        except ssl.SSLError:
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            # A server closes idle connections: try again once. A new connection that fails means it cannot be reached.
            if not kept or isinstance(error, socket.timeout):
                raise Away("%s: %s" % (self.base, str(error) or error.__class__.__name__))
        try:
            return self._exchange(method, path, body, largest, timeout_s)
        except ssl.SSLError:
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Away("%s: %s" % (self.base, str(error) or error.__class__.__name__))

    def _connect(self):
        for port in random.sample(range(600, 1024), 20) if self.low_port else [None]:
            source = None if port is None else ("", port)
            if self.secure:
                self.open = http.client.HTTPSConnection(
                    self.host, timeout=CONNECT_S, context=self.context, source_address=source
                )
            else:
                self.open = http.client.HTTPConnection(self.host, timeout=CONNECT_S, source_address=source)
            try:
                self.open.connect()
                self.open.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in ALIVE:
                    self.open.sock.setsockopt(socket.IPPROTO_TCP, option, value)
                return
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) or port is None:
                    raise
        raise OSError(errno.EADDRINUSE, "no port below 1024 is free")

    def _exchange(self, method, path, body, largest, timeout_s):
        if self.open is None:
            self._connect()
        if self.open.sock is not None:
            self.open.sock.settimeout(timeout_s)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        self.open.request(method, self.prefix + path, body, headers)
        answer = self.open.getresponse()
        try:
            data = answer.read(largest + 1)
        except http.client.IncompleteRead as error:
            raise ValueError("%s%s: interrupted: %s" % (self.base, path, error))
        if len(data) > largest:
            self.close()
            raise ValueError("%s%s is larger than %d bytes" % (self.base, path, largest))
        wanted = answer.getheader("Content-Length")
        if wanted and wanted.isdigit() and len(data) < int(wanted):
            self.close()
            raise ValueError("%s%s: interrupted after %d of %s bytes" % (self.base, path, len(data), wanted))
        if not 200 <= answer.status < 300:
            self.close()
            raise Said(answer.status, "%s%s: %s" % (self.base, path, _words(answer, data)))
        return data


def _words(answer, data):
    """What a server that says no gives as its reason."""
    try:
        detail = json.loads(data.decode())["detail"]
    except (ValueError, KeyError, TypeError):
        detail = answer.reason
    words = "".join(letter if letter.isprintable() else " " for letter in str(detail))
    return "status %d: %s" % (answer.status, words[:300])
