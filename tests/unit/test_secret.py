"""Secrets in what programs print: every encoding, and what of it a program truncates."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from appliance.errors import SmsError
from appliance.host.base import CommandError, Result, TooMuchOutput, without_secrets
from appliance.host.local import Local
from appliance.shared.secret import REDACTED, SecretInput, redact, redact_text, secret_archive, secrets_of

KEY = hashlib.sha512(b"a key of Munge").digest() * 2
WORDS = b"pass <word> \"quoted\" & 'so' \xc3\xa4/+="
PEM = b"-----BEGIN PRIVATE KEY-----\n" + base64.encodebytes(KEY) + b"-----END PRIVATE KEY-----\n"

ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "base64": base64.b64encode,
    "URL-safe base64": base64.urlsafe_b64encode,
    "base64 without padding": lambda data: base64.b64encode(data).rstrip(b"="),
    "base64 in lines": base64.encodebytes,
    "base64 in lines, quoted": lambda data: json.dumps(base64.encodebytes(data).decode()).encode(),
    "base64 in a URL": lambda data: quote(base64.b64encode(data), safe="").encode(),
    "URL": lambda data: quote(data, safe="").encode(),
    "query": lambda data: quote_plus(data).encode(),
    "JSON": lambda data: json.dumps(data.decode("latin-1")).encode(),
    "JSON in UTF-8": lambda data: json.dumps(data.decode(errors="replace"), ensure_ascii=False).encode(),
    "JSON in JSON": lambda data: json.dumps(json.dumps({"a": base64.b64encode(data).decode()})).encode(),
    "shell": lambda data: shlex.quote(data.decode(errors="replace")).encode(),
    "hex": lambda data: data.hex().encode(),
    "HEX with colons": lambda data: data.hex(":").upper().encode(),
    "repr": lambda data: repr(data).encode(),
    "bytes of Go": lambda data: str(list(data)).replace(",", "").encode(),
    "a request in base64": lambda data: base64.b64encode(b'{"data": "' + base64.b64encode(data) + b'"}'),
    "an env file in base64": lambda data: base64.b64encode(b"A=b\nKEY=" + data + b"\nC=d\n"),
}
LEFT = 24
"""Letters that may be left of an encoding: parts shorter than a run at its ends, and quotes."""


@pytest.mark.parametrize("secret", [KEY, WORDS, PEM], ids=["key", "words", "PEM"])
@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
def test_no_encoding_of_a_secret_is_printed(encode: Callable[[bytes], bytes], secret: bytes) -> None:
    shown = encode(secret)
    redacted = redact(b"error: webhook: " + shown + b" is not it", [secret])
    assert redacted.startswith(b"error: webhook: ") and redacted.endswith(b" is not it") and REDACTED in redacted
    left = redacted[16:-10].replace(REDACTED, b"")
    assert len(left) < LEFT + len(shown) // 50, left


@pytest.mark.parametrize("encode", [bytes, base64.b64encode, bytes.hex], ids=["plain", "base64", "hex"])
@pytest.mark.parametrize("cut", [slice(0, 40), slice(30, 70), slice(-40, None), slice(7, 15)])
def test_a_part_of_a_secret_is_not_printed(encode: Callable[[bytes], bytes | str], cut: slice) -> None:
    shown = encode(KEY)
    part = (shown.encode() if isinstance(shown, str) else shown)[cut]
    redacted = redact(b"quoted: " + part + b"... (truncated)", [KEY])
    assert redacted == b"quoted: " + REDACTED + b"... (truncated)"


@pytest.mark.parametrize(
    ("text", "secrets", "shown"),
    [
        (b"no route to host", [KEY], b"no route to host"),
        (b"the password hunter2 is wrong", [b"hunter2"], b"the password [redacted] is wrong"),
        (b"Basic " + base64.b64encode(b"root:hunter2"), [b"hunter2"], None),
        (b"the password is abc", [b"abc"], b"[output withheld: it may have a secret]"),
        (b"anything", [bytes(range(256)) * 200], b"[output withheld: it may have a secret]"),
        (b"anything", [], b"anything"),
        (b"", [KEY], b""),
    ],
)
def test_what_is_shown(text: bytes, secrets: list[bytes], shown: bytes | None) -> None:
    redacted = redact(text, secrets)
    assert redacted == shown if shown is not None else REDACTED in redacted


def test_a_secret_in_either_output_is_in_no_error() -> None:
    """Standard output may be the result: it is whole for the caller, and redacted in a message."""
    given = SecretInput(b"key: " + base64.b64encode(KEY), KEY)
    for script in ("cat; exit 3", "cat >&2; exit 3"):
        with pytest.raises(CommandError) as caught:
            Local().run("sh", "-c", script, input=given)
        assert "key: [redacted]" in caught.value.message, caught.value.message
        assert base64.b64encode(KEY)[:12].decode() not in f"{caught.value!r}{caught.value.result.stderr!r}"
    result = Local().run("cat", input=given)
    assert result.stdout == given and base64.b64encode(KEY) not in result.shown
    with pytest.raises(TooMuchOutput) as much:
        Local().run("sh", "-c", "cat >&2", input=given, limit=100)
    assert base64.b64encode(KEY)[:12].decode() not in much.value.message


def test_what_was_read_is_in_no_error(tmp_path: Path) -> None:
    """A file that can be read in part only, and output that is not what it should be."""
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "cat").write_text('#!/bin/sh\nhead -c 20 "$2"; exit 1\n')
    (tmp_path / "cat").chmod(0o755)
    host = Local(prefix=("env", f"PATH={tmp_path}:/usr/bin:/bin"))
    with pytest.raises(CommandError) as caught:
        host.read(str(tmp_path / "key"))
    assert KEY[:8].decode("latin-1") not in caught.value.message
    with pytest.raises(SmsError) as odd:
        Result("a", ("b",), 0, b'{"key": "%b"' % base64.b64encode(KEY), b"", (KEY,)).parse(dict)
    assert base64.b64encode(KEY)[:12].decode() not in odd.value.message


def test_the_error_of_another_program_is_redacted() -> None:
    error = without_secrets(SmsError("BMC: root:hunter22 is wrong", hint="not hunter22"), ["hunter22", ""])
    assert (error.message, error.hint) == ("BMC: root:[redacted] is wrong", "not [redacted]")
    assert str(error) == error.message
    assert redact_text("a\udcffb", [KEY]) == "a�b"


def test_the_secrets_of_an_archive_are_those_of_its_private_files() -> None:
    files = {
        "etc/munge/munge.key": (KEY, 0o600),
        "etc/shadow": (b"root:*:1::::::\nslurm:!:1::::::\nalice:$6$salt$hash:1::::::\n", 0o600),
        "etc/sssd/sssd.conf": (b"[domain/x]\nldap_uri = ldaps://x\nldap_default_authtok = secret words \n", 0o600),
        "etc/sms/tls/cert.pem": (b"-----BEGIN CERTIFICATE-----\nx\n", 0o600),
        "etc/sms/tls/key.pem": (PEM, 0o600),
        "etc/passwd": (b"root:x:0:0::/root:/bin/sh\n", 0o644),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, (data, mode) in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    found = secret_archive(buffer.getvalue())
    assert found == buffer.getvalue() and secrets_of(found) == (KEY, b"$6$salt$hash", b"secret words", PEM)
    assert secrets_of(secret_archive(b"not an archive")) == (b"not an archive",)
    assert secrets_of(buffer.getvalue()) == secrets_of(None) == ()
    assert Result("a", (), 1, b"x", b"y").shown == b"x"
