"""Types of values in configuration files, each with its error message and hint.

Text that is rendered into a daemon's configuration must match patterns without white space or
control characters, so that no value can inject a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


def wrong(what: str, hint: str) -> PydanticCustomError:
    """Return a custom error; ``what`` follows the value, as in "10.0.0.0/33 is not an address"."""
    return PydanticCustomError("worded", "{what}", {"what": what, "hint": hint})


def refuse_ipv6(value: Any) -> None:
    """Raise a custom error if the value is an IPv6 address: also with a prefix, with a port, or as a host list."""
    text = value if isinstance(value, str) else ""
    for form in (
        re.sub(r"/.*", "", text),
        re.sub(r"^\[(.*)\](:[0-9]+)?$", r"\1", text),
        re.sub(r"\[[0-9a-f,-]+\]", "1", text),
    ):
        try:
            IPv6Address(form.strip("[]"))
        except ValueError:
            continue
        raise wrong("is an IPv6 address: IPv6 is not supported yet", "write the IPv4 address, such as 10.0.0.1")


@dataclass(frozen=True)
class Text:
    """Text that must match a pattern: the message is "VALUE is not ``what``"."""

    pattern: str
    what: str
    hint: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Without the pattern there: pydantic would compile it, which takes 40 ms of each start for the longest.
        return core_schema.no_info_before_validator_function(self._check, core_schema.str_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": f"^({self.pattern})$"}

    def _check(self, value: Any) -> Any:
        if isinstance(value, str) and not re.fullmatch(self.pattern, value):
            refuse_ipv6(value)
            raise wrong(f"is not {self.what}", self.hint)
        return value


Name = Annotated[
    str, Text(r"[a-z][a-z0-9-]{0,30}", "a name", "use 1 to 31 lower case letters, digits and dashes, a letter first")
]
"""A name that sms uses: lower case letters, digits and dashes."""

BaseName = Annotated[
    str,
    Text(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", "the name of a base", "use letters, digits, dots and dashes: debian-12"),
]
"""The name of a base; which ones exist is checked later."""

SeenName = Annotated[
    str,
    Text(
        r"[A-Za-z0-9][A-Za-z0-9._/ +-]{0,63}",
        "the name of a service",
        "write it as the classification does, such as nfs or tcp/4444",
    ),
]
"""A service name in a classification: the catalogue's name, IANA's, or protocol and port."""

HostName = Annotated[
    str,
    Text(
        r"[A-Za-z0-9][A-Za-z0-9-]{0,62}(\.[A-Za-z0-9-]{1,63}){0,16}",
        "a host name or IPv4 address",
        "use letters, digits, dashes and dots, such as admin-1 or 10.0.0.11",
    ),
]

INTERFACE_LENGTH = 15
"""Characters of an interface's name (IFNAMSIZ without the terminator)."""

Interface = Annotated[
    str,
    Text(
        r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}",
        "a network interface name",
        "use 15 letters, digits, dashes, dots and underscores at most, no dash or dot first, such as br-prov",
    ),
]
"""A Linux interface name."""

Mac = Annotated[
    str,
    Text(
        r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}",
        "a MAC address",
        "write six pairs of hexadecimal digits with colons, such as 02:00:0a:4d:00:01",
    ),
]

NodeList = Annotated[
    str,
    Text(
        r"[A-Za-z0-9_.,\[\]-]{1,65536}",
        "a Slurm host list",
        "use names with ranges in brackets, without spaces, such as node[001-450],login1; 65536 characters at most",
    ),
]
"""A Slurm host list expression, such as ``node[001-450]``."""

Peer = Annotated[
    str,
    Text(
        r"[A-Za-z0-9.-]{1,253}(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5])))))?",
        "a host name or address, with or without a port",
        "write it as mail.example.org or 192.0.2.25:25",
    ),
]
"""A host name or address, with an optional port."""


def is_ipv4(text: str) -> bool:
    """Return whether it is an IPv4 address."""
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True


def check_url(value: str) -> str:
    """Raise a custom error if the host or the port of a URL is none."""
    try:
        parts = urlsplit(value)
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise wrong("has no valid host and port", "write it as http://mirror.example.org:8080/debian")
    return value


Url = Annotated[
    str,
    Text(
        r"https?://[^\s\"'\\]+",
        "an http or https URL",
        "begin with http:// or https://, without spaces, quotes and backslashes",
    ),
    AfterValidator(check_url),
]

SafeUrl = Annotated[
    str,
    Text(
        r"https://[^\s\"'\\]+",
        "an https URL",
        "begin with https://, without spaces, quotes and backslashes: shadow must not be sent unencrypted",
    ),
    AfterValidator(check_url),
]

Line = Annotated[
    str, Text(r"[^\x00-\x1f\x7f]{1,1000}", "one line of text", "use at most 1000 characters, no tabs, no line breaks")
]


def _address(value: Any) -> Any:
    # IPv4Address also accepts a number, but 10 in a configuration never means 0.0.0.10.
    if not isinstance(value, IPv4Address):
        try:
            return IPv4Address(value if isinstance(value, str) else "")
        except ValueError:
            refuse_ipv6(value)
            raise wrong("is not an IPv4 address", "write four numbers from 0 to 255, such as 10.0.0.1") from None
    return value


def _interface(value: Any) -> Any:
    if isinstance(value, IPv4Interface):
        return value
    address, slash, prefix = value.partition("/") if isinstance(value, str) else ("", "", "")
    try:
        found = IPv4Address(address)
    except ValueError:
        refuse_ipv6(value)
        raise wrong("is not an address with prefix", "write it such as 10.0.0.1/16") from None
    # Without a prefix Python assumes 32, with which the container could not reach any host.
    if not slash:
        raise wrong("is an address without its prefix", f"add the prefix of the network, such as {found}/24")
    if not re.fullmatch(r"0|[1-9][0-9]?", prefix) or int(prefix) > 32:
        example = f"{found + 1 if found == IPv4Address('10.0.0.0') else found}/16"
        raise wrong("is not an address with prefix", f"use a prefix of 32 or less, such as {example}")
    return IPv4Interface(value)


def _network(value: Any) -> Any:
    if isinstance(value, IPv4Network):
        return value
    interface = _interface(value)
    if interface.ip != interface.network.network_address:
        raise wrong("is an address in a network, not the network", f"write the network as {interface.network}")
    return interface.network


def _file(value: Path, info: ValidationInfo) -> Path:
    text = str(value)
    if text == "." or not text.isprintable():
        raise wrong("is not a path", "name a file or a folder, without control characters")
    try:
        value = value.expanduser()
    except RuntimeError:
        raise wrong("is in the home of an unknown user", "use an absolute path") from None
    folder = (info.context or {}).get("folder")
    return Path(folder) / value if folder else value


Address = Annotated[IPv4Address, BeforeValidator(_address)]
AddressWithPrefix = Annotated[IPv4Interface, BeforeValidator(_interface)]
NetworkAddress = Annotated[IPv4Network, BeforeValidator(_network)]

File = Annotated[Path, AfterValidator(_file)]
"""A path; a relative one is resolved against the folder of the configuration file."""
