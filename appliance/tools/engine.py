"""Command-line programs of engines (``kubectl``, ``nomad``): how they run, and what their errors mean."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import (
    CommandError,
    CommandTimeout,
    Host,
    NoProgram,
    Result,
    Stuck,
    TooMuchOutput,
    Unreachable,
)
from appliance.shared.secret import UNKNOWN, WITHHELD, secrets_of
from appliance.tools.held import Mark, run_held

MAX_REPLY = 128 << 20
"""Maximum size of an output: objects of 5,000 nodes in JSON."""
MAX_MEMORY = 2 << 30
"""Bytes of memory of such a program: it keeps the whole body of a reply, whose end the engine decides."""
BOUNDED = ("prlimit", f"--data={MAX_MEMORY}")
NO_MEMORY = re.compile(r"^fatal error: .*out of memory", re.MULTILINE)
"""What a program of Go prints that needs more."""
NOT_FOUND = 127
"""Status of nsenter and of a shell where there is no such program."""
SILENT = re.compile(
    r"connection refused|was refused|no route to host|network is unreachable|i/o timeout|connection reset"
    r"|Client\.Timeout|context deadline exceeded|TLS handshake|tls: |Unable to connect|server misbehaving"
    r"|No cluster leader|failed to find leader|\bEOF$|use of closed network connection|broken pipe"
    r"|etcdserver: |server is currently unable to handle|Service Unavailable|client connection lost",
    re.IGNORECASE | re.MULTILINE,
)
"""In messages of a program that got no answer of its engine."""
MISLED = re.compile(
    r"x509: |remote error: tls: .*certificate|first record does not look like|server gave HTTP response"
    r"|sent an HTTP request to an HTTPS server|no such host|no configuration has been provided"
    r"|(?:server |http://)localhost:8080\b|^Please enter Username|Error initializing client"
    r"|no Host in request URL|unsupported protocol scheme",
    re.IGNORECASE | re.MULTILINE,
)
"""In messages of a program whose address, account or certificate is wrong or missing: whether the engine answers is not
known. `kubectl` without a configuration takes localhost:8080."""
NOT_PERMITTED = re.compile(
    r"\(Forbidden\)|\bforbidden\b|\(Unauthorized\)|must be logged in|Permission denied|ACL token|\b403 \(|\b401 \(",
    re.IGNORECASE,
)
"""In messages of an engine that does not permit a request."""


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""Names of objects, and ids."""


@dataclass(frozen=True)
class Server:
    """The server that a program will use. ``where``: what names it; ``verified``: whether its certificate is."""

    url: str
    where: str
    verified: bool = True


class Forbidden(Refused):
    """The engine does not permit it to the account that was used."""


def run_program(
    host: Host,
    argv: tuple[str, ...],
    *,
    input: bytes | Mark | None = None,
    ok: Container[int] | None = (0,),
    timeout: float = 60,
    hint: str = "",
) -> Result:
    """Run a program of an engine.

    Args:
        input: with ``READS_SECRET`` no error shows what it prints; a mark: that of a held command in a container.
        hint: where its address and its credentials come from.

    Raises:
        Refused: there is no such program.
        ConfigError: its address or its certificates are wrong, or missing.
        Unreachable: the engine did not answer (``Stuck``: in time).
        Forbidden: it does not permit that.
        CommandError: another status than those of ``ok``.
    """
    program, secret = program_of(argv), not isinstance(input, Mark) and UNKNOWN in secrets_of(input)
    try:
        # An empty input: `nomad` reads one that is not a terminal.
        if isinstance(input, Mark):
            result = run_held(host, (*BOUNDED, *argv), input, ok=None, timeout=timeout, limit=MAX_REPLY)
        else:
            result = host.run(
                *BOUNDED, *argv, input=b"" if secret else input or b"", ok=None, timeout=timeout, limit=MAX_REPLY
            )
    except NoProgram:
        raise missing(host, program) from None
    except CommandTimeout as error:
        raise Stuck(f"{host.name}: `{program}` did not end within {timeout:g} s", hint=hint) from error
    except TooMuchOutput as error:
        secrets = (UNKNOWN,) if secret else error.result.secrets
        raise TooMuchOutput(replace(error.result, argv=argv, secrets=secrets), MAX_REPLY) from None
    result = replace(result, argv=argv)
    if result.status == NOT_FOUND and result.stderr.startswith(b"prlimit: "):
        raise missing(host, program)
    if ok is None or result.status in ok:
        return result
    raise explain(result, program, hint, secret=secret)


def program_of(argv: tuple[str, ...]) -> str:
    """Return the name of the program among words such as those of ``env``."""
    return next(word for word in argv if word in ("kubectl", "nomad"))


def missing(host: Host, program: str) -> Refused:
    """Return the error that a program is missing."""
    return Refused(
        f"{host.name} lacks the program {program}", hint=f"install {program} there, in a folder of root's PATH"
    )


def explain(result: Result, program: str, hint: str, *, secret: bool = False) -> SmsError:
    """Return the error of a program that failed. ``secret``: it does not show what it printed."""
    text = (result.stderr + b"\n" + result.shown).decode(errors="replace")
    last = last_line(text, secret=secret)
    if result.status == NOT_FOUND:
        return Refused(
            f"{result.host} lacks the program {program}", hint=f"install {program} there, in a folder of root's PATH"
        )
    if NO_MEMORY.search(text):
        size = f"{MAX_MEMORY >> 30} GiB"
        return SmsError(f"{result.host}: `{program}` needs more than {size} for what the engine replies", hint=hint)
    if NOT_PERMITTED.search(text):
        return Forbidden(f"{result.host}: `{program}` is not permitted to do that: {last}", hint=hint)
    if MISLED.search(text):
        return ConfigError(f"{result.host}: `{program}` cannot use its configuration: {last}", hint=hint)
    if SILENT.search(text):
        return Unreachable(f"{result.host}: `{program}` gets no answer: {last}", hint=hint)
    return CommandError(replace(result, secrets=(UNKNOWN,)) if secret else result)


def last_line(text: str, *, secret: bool = False) -> str:
    """Return the last line that is not empty, at most 300 characters. ``secret``: it is not to be shown."""
    if secret:
        return WITHHELD.decode()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(lines[-1])[:300] if lines else "no message"


def printable(text: str) -> str:
    """Return text of an engine without control characters."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def read_json(text: bytes, what: str, *, secret: bool = False) -> Any:
    """Return what an engine has printed as JSON. ``secret``: no message shows it.

    Raises:
        SmsError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        shown = last_line(text.decode(errors="replace"), secret=secret)
        raise SmsError(f"{what}: the reply is not JSON: {shown}") from None


def at(value: Any, *path: str | int) -> Any:
    """Return what lies at a path in a value of JSON; None where nothing does, whatever the value is."""
    for key in path:
        if isinstance(value, list) and isinstance(key, int):
            value = value[key] if -len(value) <= key < len(value) else None
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def text_at(value: Any, *path: str | int) -> str:
    """Return the text at a path; empty where there is none."""
    found = at(value, *path)
    return printable(found) if isinstance(found, str) else ""


def word_at(value: Any, *path: str | int) -> str:
    """Return the name at a path that may be a word of a command; empty where there is none, or it is not a name.

    A name that begins with a dash would be an option, such as of another server, which then gets the token.
    """
    found = text_at(value, *path)
    return found if NAME.fullmatch(found) else ""


def number_at(value: Any, *path: str | int) -> int:
    """Return the whole number at a path; 0 where there is none."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def list_at(value: Any, *path: str | int) -> list[Any]:
    """Return the list at a path; an empty one where there is none."""
    found = at(value, *path)
    return found if isinstance(found, list) else []
