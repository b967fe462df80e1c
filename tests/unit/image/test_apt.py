"""Mirrors of apt, parsed from its output."""

from __future__ import annotations

import pytest

from appliance.catalog import read_bases
from appliance.operations.image.sources import _host_mirrors
from appliance.share import share
from appliance.tools.apt import find_mirrors
from tests.support.fake import Fake

SUITES = {"debian": ["bookworm", "bookworm-updates"], "security": ["bookworm-security"]}
CLEAN = "http://near.example.org/debian/ Debian|bookworm"
SECRET = "http://user:secret@far.example.org/debian/ Debian|bookworm"
SECURITY = "http://near.example.org/security/ Debian|bookworm-security"


def apt_host(*lines: str) -> Fake:
    return Fake({("sh", "-c"): (0, ""), ("apt-get",): (0, "".join(f"{line}\n" for line in lines))})


@pytest.mark.parametrize(
    ("lines", "mirrors"),
    [
        ([], {}),
        (
            [CLEAN, SECURITY],
            {"debian": "http://near.example.org/debian", "security": "http://near.example.org/security"},
        ),
        ([CLEAN.replace("bookworm", "trixie")], {"debian": "http://near.example.org/debian"}),
        ([CLEAN.replace("bookworm", "trixie").replace("Debian", "Other")], {}),
        ([SECRET, CLEAN], {"debian": "http://near.example.org/debian"}),
        ([SECRET], {}),
        (["http://far.example.org/debian?token=secret Debian|bookworm"], {}),
    ],
)
def test_mirrors_of_the_host(lines: list[str], mirrors: dict[str, str]) -> None:
    assert find_mirrors(apt_host(*lines), SUITES) == mirrors


def test_a_host_without_apt_has_none() -> None:
    assert find_mirrors(Fake({("sh", "-c"): (0, "apt-get")}), SUITES) == {}


def test_no_password_gets_into_a_build() -> None:
    base = read_bases(share("definitions", "bases"))["debian-12"]
    assert "secret" not in str(_host_mirrors(apt_host(SECRET, SECURITY), base))
