"""How a service shows on the wire: the part ``traffic`` of its file, which ``sms classify`` names it by."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

LONGEST = 32
"""Bytes that a pattern may have."""


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
        raise ValueError(f"{value} would be every service; where the first bytes tell, write it under traffic.first")
    return value


OnePort = Annotated[Port, AfterValidator(_one_port)]
"""A port, or all of a protocol that has none: icmp/any."""

Bytes = Annotated[str, StringConstraints(pattern=r"^([0-9a-fA-F]{2}){1,32}$")]


class Section(BaseModel):
    """A part of a service's description: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class First(Section):
    """What the first bytes that a client sends tell. Either text, or a lowest and a highest value of each byte."""

    port: Port = Field(description="Where: tcp/80; tcp/any is every port that no service names.")
    starts: str = Field("", max_length=LONGEST, description="The text they begin with.")
    at: int = Field(0, ge=0, le=64, description="Where `low` and `high` begin, counted from 0.")
    low: Bytes | Literal[""] = Field("", description="The lowest value of each byte, in hexadecimal.")
    high: Bytes | Literal[""] = Field(
        "", description="The highest value of each byte; the same as `low` when left out."
    )

    @model_validator(mode="after")
    def _one_way(self) -> First:
        if bool(self.starts) == bool(self.low):
            raise ValueError("give either starts or low")
        if self.starts and (self.at or self.high):
            raise ValueError("at and high go with low")
        if self.starts and not self.starts.isascii():
            raise ValueError("starts must be ASCII")
        low, high = self.bounds
        if len(low) != len(high) or any(least > most for least, most in zip(low, high, strict=True)):
            raise ValueError("low and high must be equally long, and no byte of low above that of high")
        return self

    @property
    def bounds(self) -> tuple[bytes, bytes]:
        """The lowest and the highest value of each byte."""
        if self.starts:
            return self.starts.encode("ascii"), self.starts.encode("ascii")
        return bytes.fromhex(self.low), bytes.fromhex(self.high or self.low)


class Traffic(Section):
    """How a service is told by its traffic; its ``ports`` stand beside this."""

    ports: tuple[OnePort, ...] = Field((), description="Ports besides `ports`: of its daemons on nodes, or older ones.")
    first: tuple[First, ...] = Field((), description="What the first bytes tell; stands before ports.")
    routed: bool = Field(False, description="This is the traffic through the management node to addresses outside.")
    boot: bool = Field(False, description="Nodes need it while they boot only.")
    poll: bool = Field(False, description="Nodes poll it and fetch only what has changed.")
    silent: bool = Field(False, description="It has no traffic of its own, so not seeing it means nothing.")
    every_s: float = Field(0, ge=0, description="Seconds between two contacts of one node, as a rule.")
