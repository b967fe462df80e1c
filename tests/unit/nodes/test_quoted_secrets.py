"""The provisioning VM quotes the secrets that it was sent, and that it was to send: no error shows them."""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from appliance.errors import SmsError
from appliance.operations.nodes.files import put_master, read_content, roll_back
from appliance.operations.services.pushes import Pushes
from appliance.plan.nodes.files import Master
from appliance.tools.provision import Api
from tests.servers import accepting, server_context
from tests.sites import open_debian

KEY = b"correct-horse-battery-staple"
SHADOW = b"root:$6$saltsalt$hashhashhash:19000::::::\n"
REPLIES: dict[str, Callable[[str], bytes]] = {
    "a refusal": lambda text: _problem(422, text),
    "an error": lambda text: _problem(500, text),
    "no HTTP": lambda text: f"{text}\r\n\r\n".encode(),
}


def _problem(status: int, text: str) -> bytes:
    body = json.dumps({"detail": text}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)


@pytest.fixture(params=REPLIES)
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    """Of a VM that accepts contents, and quotes them in the reply to every other request."""
    context = server_context(tmp_path, tmp_path)
    (tmp_path / "admin.pem").write_bytes((tmp_path / "server.pem").read_bytes())
    sent = [KEY]

    def talk(plain: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(plain, server_side=True) as link, link.makefile("rb") as lines:
            first = lines.readline()
            body = lines.read(int(http.client.parse_headers(lines)["Content-Length"] or 0))
            if first.startswith(b"PUT /sms/v1/blobs"):
                sent.append(body)
                link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                return
            texts = [form for each in sent for form in (each.decode(), each.hex(), base64.b64encode(each).decode())]
            link.sendall(REPLIES[request.param](f"invalid: {' '.join(texts)}".replace("\n", " ")))

    with socket.create_server(("127.0.0.1", 0)) as listening, accepting(listening, talk):
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        yield Api(url, tmp_path / "ca.pem", tmp_path / "server.pem", tmp_path / "server.key")


def shown(call: Callable[[], object]) -> str:
    """The error of a call without any of the secrets."""
    with pytest.raises(SmsError) as caught:
        call()
    text = f"{caught.value} {caught.value.hint} {caught.value!r}"
    for secret in (KEY, b"$6$saltsalt$hashhashhash"):
        for form in (secret.decode(), secret.hex(), base64.b64encode(secret).decode()):
            assert not any(form[at : at + 8] in text for at in range(len(form) - 7)), text
    return text


def test_what_was_sent_is_not_shown(api: Api, tmp_path: Path) -> None:
    """Of shadow the hashes; later requests may quote it, too."""
    shown(lambda: put_master(api, Master("/etc/munge/munge.key", KEY, mode="0400")))
    shown(lambda: put_master(api, Master("/etc/shadow", SHADOW, mode="0640")))
    shown(lambda: roll_back(api, Pushes(open_debian(tmp_path), api, "files rollback"), "/etc/motd", None))


def test_what_was_requested_is_not_shown(api: Api) -> None:
    shown(lambda: read_content(api, "0" * 64))
