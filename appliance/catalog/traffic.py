"""How ``sms classify`` recognises the traffic of a service: the section ``traffic`` of its file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

LONGEST = 32
"""Maximum length of a pattern, in bytes."""


def _known_port(value: str) -> str:
    number = value.partition("/")[2]
    if number != "any" and not 0 < int(number) < 65536:
        raise ValueError(f"{value} is not a port")
    return value


Port = Annotated[
    str,
    StringConstraints(pattern=r"^(tcp|udp|sctp|icmp|icmpv6)/([0-9]{1,5}|any)$"),
    AfterValidator(_known_port),
]


def _one_port(value: str) -> str:
    if value in ("tcp/any", "udp/any", "sctp/any"):
        raise ValueError(f"{value} would match every service; use traffic.first to match first bytes")
    return value


OnePort = Annotated[Port, AfterValidator(_one_port)]
"""A port, or all traffic of a protocol without ports: icmp/any."""

Bytes = Annotated[str, StringConstraints(pattern=r"^([0-9a-fA-F]{2}){1,32}$")]


class Section(BaseModel):
    """A section of a definition: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class First(Section):
    """Pattern of the first bytes that a client sends: text, or a minimum and a maximum of each byte."""

    port: Port = Field(description="Port, such as tcp/80; tcp/any is every port that no service claims.")
    starts: str = Field("", max_length=LONGEST, description="Text that they start with.")
    within: str = Field(
        "", max_length=LONGEST, description="Text anywhere in their first line, such as part of a path."
    )
    at: int = Field(0, ge=0, le=64, description="Offset of `low` and `high`, from 0.")
    low: Bytes | Literal[""] = Field("", description="Minimum of each byte, in hexadecimal.")
    high: Bytes | Literal[""] = Field("", description="Maximum of each byte, in hexadecimal (default: `low`).")

    beside: OnePort | None = Field(
        None, description="Another port that is the service's where these first bytes were seen: elsewhere it is not."
    )

    @model_validator(mode="after")
    def _one_way(self) -> First:
        text = self.starts or self.within
        if bool(self.starts) + bool(self.within) + bool(self.low) != 1:
            raise ValueError("give one of starts, within and low")
        if text and (self.at or self.high):
            raise ValueError("at and high go with low")
        if not text.isascii():
            raise ValueError(f"{'starts' if self.starts else 'within'} must be ASCII")
        if self.within and self.port.endswith("/any"):
            raise ValueError("within needs a port: not every service sends lines")
        low, high = self.bounds
        if len(low) != len(high) or any(least > most for least, most in zip(low, high, strict=True)):
            raise ValueError("low and high must have the same length, and no byte of low may exceed that of high")
        return self

    @property
    def bounds(self) -> tuple[bytes, bytes]:
        """Minimum and maximum of each byte."""
        if text := (self.starts or self.within).encode("ascii"):
            return text, text
        return bytes.fromhex(self.low), bytes.fromhex(self.high or self.low)


class Traffic(Section):
    """How the traffic of a service is recognised, in addition to its ``ports``."""

    ports: tuple[OnePort, ...] = Field((), description="Additional ports: of its daemons on nodes, or older ones.")
    first: tuple[First, ...] = Field((), description="Patterns of first bytes; they take precedence over ports.")
    routed: bool = Field(False, description="It is the traffic through the management node to addresses outside.")
    boot: bool = Field(False, description="Nodes need it only while they boot.")
    poll: bool = Field(False, description="Only changes pass, which can wait, also where nodes open it.")
    sms_opens: bool = Field(False, description="The management node opens connections of it to nodes, too.")
    silent: bool = Field(False, description="It has no traffic of its own, so its absence means nothing.")
    every_s: float = Field(0, ge=0, description="Usual interval between contacts of a node, in seconds.")
