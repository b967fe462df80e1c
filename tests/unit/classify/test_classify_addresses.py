"""Addresses in common notations: one parser for the command line, the roles and the core."""

from __future__ import annotations

import pytest

from analysis.addresses import packed, read_address, read_ip, read_mac
from analysis.errors import CaptureError
from analysis.reading import make_counter

MAC = "02:00:0a:4d:00:01"
READ: dict[str, tuple[str, int]] = {
    "10.0.0.1": ("10.0.0.1", 4),
    "FD00:0::1": ("fd00::1", 16),
    "fe80::1%br-prov": ("fe80::1", 16),
    "::ffff:10.0.0.1": ("::ffff:10.0.0.1", 16),
    "1:2:3:4:5:6:7:8": ("1:2:3:4:5:6:7:8", 16),
    MAC: (MAC, 6),
    "2:0:A:4D:0:1": (MAC, 6),
    "02-00-0A-4D-00-01": (MAC, 6),
    "0200.0a4d.0001": (MAC, 6),
}
NEITHER = ["", "10.0.0.300", "10.0.0.1/16", "10.1", "node1", "02:00:0a:4d:00", "02:00-0a:4d:00:01", "02:00:0a:4d:00:1x"]
NEITHER += ["02000a4d0001", "02:00:0a:4d:00:01:02", "10.0.0.1%eth0", "\x1b[31m", "1٣.0.0.1", MAC + "\n"]


@pytest.mark.parametrize(("text", "read"), READ.items())
def test_what_is_an_address(text: str, read: tuple[str, int]) -> None:
    address, size = read
    assert read_address(text) == address
    assert (read_mac(text) == address, read_ip(text) == address) == (size == 6, size != 6)
    assert len(packed(text)) == size
    assert packed(text) == packed(address)
    make_counter((), text)  # the core accepts the result


@pytest.mark.parametrize("text", NEITHER)
def test_what_is_not_an_address(text: str) -> None:
    assert read_address(text) == ""
    assert packed(text) == b""
    if text:
        with pytest.raises(CaptureError, match="is neither an address nor a link address"):
            make_counter((), text)
