"""Invalid files of every kind: text in, the exact list of problems out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from appliance.config.document import MAX_CHARACTERS, MAX_PROBLEMS, read_document
from appliance.config.model import Site
from appliance.config.read import read_model, read_site, read_site_text
from appliance.errors import ConfigError

GOOD = """\
cluster: lab
admin_hosts:
  - {name: host-a, address: 10.78.0.11}
networks:
  provisioning: {bridge: br-prov, address: 10.77.0.1/24, mac: 52:54:00:12:34:56}
  public: {bridge: br-pub, address: 10.78.0.2/24, mac: 02:00:0a:4e:00:02, gateway: 10.78.0.254}
"""


def _problems(text: str, model: type[BaseModel] = Site) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_model(text, "f", model)
    assert caught.value.status == 2
    return [str(problem) for problem in caught.value.problems]


ADDED: dict[str, tuple[str, list[str]]] = {
    "unknown key, near": (
        "syslog_foward: loghost",
        ["f:7: syslog_foward: unknown key\n  hint: did you mean syslog_forward?"],
    ),
    "unknown key, far": (
        "filesync: {zzz: 1}",
        ["f:7: filesync.zzz: unknown key\n  hint: known: interval_s, server"],
    ),
    "no text": ("hostname: 123", ['f:7: hostname: 123 is not text\n  hint: put it in quotes: "123"']),
    "no number": (
        "overlay: {size_mb: 2G}",
        ["f:7: overlay.size_mb: 2G is not a whole number\n  hint: write digits only, without a unit"],
    ),
    "half a number": (
        "overlay: {size_mb: 99.5}",
        ["f:7: overlay.size_mb: 99.5 is not a whole number\n  hint: write digits only, without a unit"],
    ),
    "too small": ("overlay: {size_mb: 1}", ["f:7: overlay.size_mb: 1 is too small\n  hint: use 64 or more"]),
    "too large": (
        "filesync: {interval_s: 86401}",
        ["f:7: filesync.interval_s: 86401 is too large\n  hint: use 86400 or less"],
    ),
    "no mapping": ("mail: postfix", ["f:7: mail: postfix is not a mapping\n  hint: write `key: value` lines below it"]),
    "no list": (
        "ntp: ntp1",
        ["f:7: ntp: ntp1 is not a list\n  hint: write it as [a, b], or as one line `- item` for each"],
    ),
    "neither list nor mapping": (
        "services: all",
        [
            "f:7: services: all is neither a list nor a mapping\n"
            "  hint: write it as [a, b], or as one line `- item` for each or write `key: value` lines below it"
        ],
    ),
    "a list of services, one wrong": (
        "services:\n  - munge\n  - Slurm",
        [
            "f:9: services[1]: Slurm is not a name\n"
            "  hint: use 1 to 31 lower case letters, digits and dashes, a letter first"
        ],
    ),
    "services from": (
        "services: {form: c.yaml}",
        [
            "f:7: services.from: is missing\n  hint: add from: File written by `sms classify --format yaml` (or "
            "json); its time-critical services are used.",
            "f:7: services.form: unknown key\n  hint: did you mean from?",
        ],
    ),
    "no boolean": (
        "slurm: {partitions: [{name: a, default: perhaps}]}",
        ["f:7: slurm.partitions[0].default: perhaps is not true or false\n  hint: write true or false"],
    ),
    "no Slurm time": (
        "slurm: {partitions: [{name: a, max_time: 1:2:3:4}]}",
        [
            "f:7: slurm.partitions[0].max_time: 1:2:3:4 is not a time in Slurm's format\n"
            "  hint: write it as 30 (minutes), 12:00:00, 7-00:00:00 or INFINITE"
        ],
    ),
    "empty list": (
        "signing: {public_keys: []}",
        ["f:7: signing.public_keys: has too few items\n  hint: use at least 1"],
    ),
    "wrong key": (
        "base: {mirrors: {Debian: http://mirror.test/debian}}",
        [
            "f:7: base.mirrors.Debian: the key Debian is not a name\n"
            "  hint: use 1 to 31 lower case letters, digits and dashes, a letter first"
        ],
    ),
    "a line of its own": (
        'slurm: {extra: ["a\\nb"]}',
        [
            "f:7: slurm.extra[0]: a\\nb is not one line of text\n"
            "  hint: use at most 1000 characters, no tabs, no line breaks"
        ],
    ),
    "no path": (
        "state: ''",
        ['f:7: state: "" is not a path\n  hint: name a file or a folder, without control characters'],
    ),
    "unknown home": (
        "state: ~no-such-user-here/x",
        ["f:7: state: ~no-such-user-here/x is in the home of an unknown user\n  hint: use an absolute path"],
    ),
    "terminal codes": (
        'hostname: "\\e[31mred"',
        [
            "f:7: hostname: \\x1b[31mred is not a host name or IPv4 address\n"
            "  hint: use letters, digits, dashes and dots, such as admin-1 or 10.0.0.11"
        ],
    ),
}


@pytest.mark.parametrize(("added", "problems"), ADDED.values(), ids=ADDED)
def test_wrong_setting(added: str, problems: list[str]) -> None:
    assert _problems(GOOD + added + "\n") == problems


ADDRESSES = {
    "10.0.0.0/33": "is not an address with prefix\n  hint: use a prefix of 32 or less, such as 10.0.0.1/16",
    "10.0.0.1": "is an address without its prefix\n  hint: add the prefix of the network, such as 10.0.0.1/24",
    "10.0.0.256/8": "is not an address with prefix\n  hint: write it such as 10.0.0.1/16",
    "10.0.0.1/": "is not an address with prefix\n  hint: use a prefix of 32 or less, such as 10.0.0.1/16",
    "10.0.0.1/-1": "is not an address with prefix\n  hint: use a prefix of 32 or less, such as 10.0.0.1/16",
    "10.0.0.1/255.0.0.0": "is not an address with prefix\n  hint: use a prefix of 32 or less, such as 10.0.0.1/16",
    "fd00::1/64": "is an IPv6 address: IPv6 is not supported yet\n  hint: write the IPv4 address, such as 10.0.0.1",
    "167772161": "is not an address with prefix\n  hint: write it such as 10.0.0.1/16",
}


@pytest.mark.parametrize(("address", "words"), ADDRESSES.items())
def test_wrong_address(address: str, words: str) -> None:
    problems = _problems(GOOD.replace("10.77.0.1/24", f'"{address}"' if address.endswith("/") else address))
    assert problems == [f"f:5: networks.provisioning.address: {address} {words}"]


ROUTES = {
    "10.100.0.7/17": "is an address in a network, not the network\n  hint: write the network as 10.100.0.0/17",
    "10.100.0.0": "is an address without its prefix\n  hint: add the prefix of the network, such as 10.100.0.0/24",
    "fd00::/64": ADDRESSES["fd00::1/64"],
}


@pytest.mark.parametrize(("network", "words"), ROUTES.items())
def test_wrong_route(network: str, words: str) -> None:
    routes = f'routes: [{{network: "{network}", gateway: "fd00::1"}}]'
    assert _problems(GOOD.replace("address: 10.77.0.1/24", f"address: 10.77.0.1/24, {routes}")) == [
        f"f:5: networks.provisioning.routes[0].network: {network} {words}",
        f"f:5: networks.provisioning.routes[0].gateway: fd00::1 {ADDRESSES['fd00::1/64']}",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("networks:", "syslog_forward: '[fd00::1]:514'\nnetworks:"),
        ("networks:", "mail: {relay: '[fd00::1]'}\nnetworks:"),
        ("networks:", "ntp: ['fd00::1']\nnetworks:"),
        ("networks:", "slurm: {nodes: [{name: 'n[1-4]', address: 'fd00::[1-4]'}]}\nnetworks:"),
    ],
)
def test_ipv6_with_ports_and_in_host_lists(old: str, new: str) -> None:
    (problem,) = _problems(GOOD.replace(old, new, 1))
    assert "IPv6 is not supported yet" in problem


DOCUMENTS: dict[str, tuple[str, list[str]]] = {
    "empty": ("", ["f: the file is empty\n  hint: write `key: value` lines"]),
    "comments only": ("# nothing\n", ["f: the file is empty\n  hint: write `key: value` lines"]),
    "a list": ("- a\n", ["f:1: the file is not a mapping of keys to values\n  hint: write `key: value` lines"]),
    "a word": ("a\n", ["f:1: the file is not a mapping of keys to values\n  hint: write `key: value` lines"]),
    "same key": (
        "a: 1\nb: {c: 1,\n  c: 2}\na: 3\n",
        [
            "f:3: b.c: duplicate key\n  hint: it is already on line 2; keep one of the two",
            "f:4: a: duplicate key\n  hint: it is already on line 1; keep one of the two",
        ],
    ),
    "tab": (
        "a:\n\tb: 1\n",
        [
            "f:2: while scanning for the next token, found character '\\t' that cannot start any token\n"
            "  hint: indent with spaces, not tabs"
        ],
    ),
    "indent": (
        "a:\n  b: 1\n c: 2\n",
        [
            "f:3: while parsing a block mapping, expected <block end>, but found '<block mapping start>'\n"
            "  hint: lines of the same level must start in the same column"
        ],
    ),
    "colon": (
        "a: b: c\n",
        [
            "f:1: mapping values are not allowed here\n"
            "  hint: quote a value that contains a colon and a space; check the indentation"
        ],
    ),
    "open quote": (
        'a: "b\n',
        ["f:2: while scanning a quoted scalar, found unexpected end of stream\n  hint: a quote is not closed"],
    ),
    "two documents": (
        "a: 1\n---\nb: 1\n",
        [
            "f:2: expected a single document in the stream, but found another document\n"
            "  hint: keep one document: remove the line ---"
        ],
    ),
    "zero byte": ("a: \0\n", ["f:1: character not allowed in YAML\n  hint: remove it; is this a text file?"]),
    "python tag": (
        "a: !!python/object/apply:os.system [id]\n",
        [
            "f:1: a: unsupported tag tag:yaml.org,2002:python/object/apply:os.system\n"
            "  hint: remove the word that begins with !"
        ],
    ),
    "binary tag": (
        "a: !!binary aGk=\n",
        ["f:1: a: unsupported tag tag:yaml.org,2002:binary\n  hint: remove the word that begins with !"],
    ),
    "merge": (
        "a: &a {b: 1}\nc: {<<: *a}\n",
        ["f:2: c: merge keys (<<) are not supported\n  hint: write the keys out"],
    ),
    "a list as key": ("? [a]\n: b\n", ["f:1: a key must be a scalar\n  hint: write it as `key: value`"]),
    "inside itself": (
        "a: &a [*a]\n",
        ["f:1: the document is too large with its aliases expanded\n  hint: make it shorter"],
    ),
    "unknown alias": (
        "a: *b\n",
        ["f:1: found undefined alias 'b'\n  hint: a word that begins with * must be in quotes"],
    ),
    "deep": ("[" * 100_000, ["f:1: nested more than 24 levels deep\n  hint: no setting needs so many levels"]),
    "deep mapping": (
        "{a: " * 50_000,
        ["f:1: nested more than 24 levels deep\n  hint: no setting needs so many levels"],
    ),
    "impossible character": ('a: "\\UFFFFFFFF"\n', ["f: invalid YAML\n  hint: check the indentation and the quotes"]),
    "half a character": (
        'a: "\\ud800"\n"\\udfff": 1\n',
        [
            "f:1: a: invalid character (a lone surrogate)\n  hint: write the character itself",
            "f:2: a key must be a scalar\n  hint: write it as `key: value`",
        ],
    ),
    "huge": ("a" * (MAX_CHARACTERS + 1), ["f: the file is larger than 1 MiB"]),
}


@pytest.mark.parametrize(("text", "problems"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_wrong_document(text: str, problems: list[str]) -> None:
    assert _problems(text) == problems


def test_billion_laughs() -> None:
    levels = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    began = time.monotonic()
    (problem,) = _problems("\n".join(levels))
    assert "aliases expanded" in problem
    assert time.monotonic() - began < 5


def test_huge_scalar_is_shown_short() -> None:
    (problem,) = _problems(GOOD.replace("cluster: lab", f"cluster: {'x' * 900_000}"))
    assert len(problem) < 300


def test_huge_number_is_text() -> None:
    (problem,) = _problems(GOOD + f"overlay: {{size_mb: {'9' * 5000}}}\n")
    assert problem.splitlines()[0].endswith("999... is too large")


def test_many_problems_are_cut() -> None:
    problems = _problems(GOOD + "ntp: [" + "' ', " * 5000 + "]\n")
    assert len(problems) == MAX_PROBLEMS + 1
    assert problems[-1] == "f: 4900 more problems\n  hint: fix those above first"


def test_all_at_once_in_the_order_of_the_file() -> None:
    text = """\
clustre: lab
admin_hosts:
  - nam: host-a
    address: "no such host"
networks:
  provisioning:
    bridge: a-bridge-with-a-long-name
    address: 10.0.0.0/33
    mac: 02:00:00
  public: {}
retention: {last: 0, yearly: 3}
"""
    problems = _problems(text)
    assert [problem.splitlines()[0] for problem in problems] == [
        "f:1: cluster: is missing",
        "f:1: clustre: unknown key",
        "f:3: admin_hosts[0].name: is missing",
        "f:3: admin_hosts[0].nam: unknown key",
        "f:4: admin_hosts[0].address: no such host is not a host name or IPv4 address",
        "f:7: networks.provisioning.bridge: a-bridge-with-a-long-name is not a network interface name",
        "f:8: networks.provisioning.address: 10.0.0.0/33 is not an address with prefix",
        "f:9: networks.provisioning.mac: 02:00:00 is not a MAC address",
        "f:10: networks.public.bridge: is missing",
        "f:10: networks.public.address: is missing",
        "f:10: networks.public.mac: is missing",
        "f:10: networks.public.gateway: is missing",
        "f:11: retention.last: 0 is too small",
        "f:11: retention.yearly: unknown key",
    ]
    assert "  hint: add gateway: Default gateway." in problems[11]


def test_good_file() -> None:
    site, document = read_site_text("\ufeff" + GOOD + "mail:\nslurm:\n  # nodes: []\n", "f")
    # PyYAML itself reads this address as a number.
    assert site.networks.provisioning.mac == "52:54:00:12:34:56"
    assert str(site.networks.public.gateway) == "10.78.0.254"
    assert site.mail.relay is None
    assert document.line(("networks", "public", "gateway")) == 6
    assert document.line(("networks", "public", "probe")) == 6
    assert document.line(("overlay", "size_mb")) == 1


PLAIN = {
    "no": "no",
    "yes": "yes",
    "on": "on",
    "0600": "0600",
    "0x10": "0x10",
    "1_000": "1_000",
    "1:30": "1:30",
    "2024-01-01": "2024-01-01",
    "'5'": "5",
    "5": 5,
    "-5": -5,
    "1.5": 1.5,
    ".inf": ".inf",
    "true": True,
    "~": None,
    "": None,
    "=": "=",
    "'null'": "null",
}


@pytest.mark.parametrize(("text", "value"), PLAIN.items())
def test_plain_words_mean_what_they_look_like(text: str, value: object) -> None:
    found = read_document(f"a: {text}\n", "f").data["a"]
    assert found == value
    assert type(found) is type(value)


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sms.yaml"
    file.write_text(GOOD + "secrets: {munge_key: keys/munge.key, shadow: /etc/shadow}\n")
    site, _ = read_site(file)
    assert site.secrets.munge_key == tmp_path / "keys/munge.key"
    assert site.secrets.shadow == Path("/etc/shadow")
    assert site.state == Path("/var/lib/sms")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cluster: lab\n\xff\xfe\n", "2: invalid UTF-8"),
        (b"\x7fELF\x02\x01\x01\x00\x00", "1: character not allowed in YAML"),
        (b"\x1f\x8b\x08\x00\x00", "1: invalid UTF-8"),
    ],
)
def test_binary_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "sms.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_site(file)
    assert str(caught.value).startswith(f"{file}:{message}")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: no such file or directory"):
        read_site(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: is a directory"):
        read_site(tmp_path)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["green", "red"]
    size: float = Field(1, gt=0, lt=9)

    @model_validator(mode="after")
    def _rule(self) -> _Part:
        if self.kind == "red" and self.size > 5:
            raise ValueError("red parts are small")
        return self


class _Thing(BaseModel):
    """Not the site file: the reader serves the catalogue too."""

    model_config = ConfigDict(extra="forbid")
    parts: dict[str, _Part | str] = {}
    code: Annotated[str, StringConstraints(pattern="^[a-z]+$")] = Field("a", description="What it is.")
    short: Annotated[str, StringConstraints(min_length=2, max_length=3)] = "ab"
    either: int | Literal["auto"] = "auto"


OTHER_MODEL: dict[str, tuple[str, list[str]]] = {
    "choice": (
        "parts: {a: {kind: gren}}",
        ["f:1: parts.a.kind: gren is not a valid choice\n  hint: did you mean green?"],
    ),
    "rule": ("parts:\n  a: {kind: red, size: 7}", ["f:2: parts.a: red parts are small"]),
    "bounds": ("parts: {a: {kind: red, size: 0}}", ["f:1: parts.a.size: 0 is too small\n  hint: use more than 0"]),
    "union": ("parts: {a: 5}", ['f:1: parts.a: 5 is neither a mapping nor text\n  hint: put it in quotes: "5"']),
    "unknown in union": (
        "parts: {a: {kind: red, sice: 1}}",
        ["f:1: parts.a.sice: unknown key\n  hint: did you mean size?"],
    ),
    "pattern": ("code: A1", ["f:1: code: A1 has the wrong format\n  hint: it must match ^[a-z]+$"]),
    "short": ("short: a", ["f:1: short: a is too short\n  hint: use at least 2 characters"]),
    "long": ("short: abcd", ["f:1: short: abcd is too long\n  hint: use at most 3 characters"]),
    "scalar union": ("either: maybe", ["f:1: either: maybe is not a valid choice\n  hint: known: auto"]),
}


@pytest.mark.parametrize(("text", "problems"), OTHER_MODEL.values(), ids=OTHER_MODEL)
def test_any_model(text: str, problems: list[str]) -> None:
    assert _problems(text, _Thing) == problems


_SIGNS = "- |  |\n|: |[|]|{|}|&a |*a|!!int |!x |? |> |'|\"|\\u|%YAML |---|...|#|<<|1|~|\t|from|also|name|address"
_words = st.sampled_from([*Site.model_fields, *_SIGNS.split("|"), "| "])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(_words, max_size=40).map("".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read_site_text(text, "f")
    except ConfigError as error:
        assert error.problems
        str(error).encode()


_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(list(Site.model_fields)), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*Site.model_fields, "extra", "x"]), _values, max_size=8))
def test_any_document_is_read_or_refused(values: dict[str, object]) -> None:
    try:
        read_site_text(yaml.safe_dump(values), "f")
    except ConfigError as error:
        assert error.problems
