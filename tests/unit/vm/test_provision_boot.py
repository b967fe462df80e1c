"""Boot parameters, boot scripts, cloud-init; access to tokens and secrets."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from appliance.provision import access
from appliance.provision.images import Image, Images
from appliance.provision.tokens import ISSUES, Tokens
from tests.provd import ADMIN, SERVICES, Provd, make_config, running, write_neighbours

PARAMETERS = "/boot/v1/bootparameters"
MAC, ADDRESS = "02:00:0a:4d:00:97", "10.77.0.151"
SCRIPT = f"/boot/v1/bootscript?mac={MAC}"
NOBODY: dict[str, str] = {}
PLAIN, SECURE = "http://10.77.0.2", "https://10.77.0.2:8443"


class OneImage(Images):
    """An image of the profile ``compute``."""

    def __init__(self) -> None:
        super().__init__(Path("/none"))

    def current(self, profile: str) -> Image | None:
        known = profile in ("compute", "discovery")
        return Image(profile, "d1" * 32, {}, "console=ttyS0") if known else None

    def profile_for(self, groups: Iterable[str]) -> str:
        return "compute" if "compute" in groups else ""


@pytest.fixture
def provd(service: Provd) -> Provd:
    service.reset()
    service.good("PUT", "/sms/v1/nodes/n1", {"macs": [MAC], "address": ADDRESS, "nid": 7, "groups": ["gpu"]})
    return service


def script(provd: Provd, query: str = f"mac={MAC}", **options: Any) -> str:
    answer = provd.ask("GET", f"/boot/v1/bootscript?{query}", headers=NOBODY, **options)
    assert answer.status == 200, answer.data
    assert answer.headers["cache-control"] == "no-store" and answer.text.startswith("#!ipxe\n")
    return answer.text


def test_parameters_as_bss_documents_them(provd: Provd) -> None:
    assert provd.good("GET", PARAMETERS) == []
    default = {
        "hosts": ["Default"],
        "kernel": "https://sms-1/apis/ars/assets/artifacts/generic/vmlinuz_801",
        "initrd": "https://sms-1/apis/ars/assets/artifacts/generic/initramfs-cray_1058.img",
    }
    hosts = [f"x0c0s{number}b0n0" for number in range(8)]
    several = {
        "hosts": hosts,
        "kernel": "https://sms-1/vmlinuz_1406",
        "initrd": "https://sms-1/initramfs-cray_1261.img",
    }
    assert provd.ask("PUT", PARAMETERS, default).status == 200
    assert provd.ask("POST", PARAMETERS, several).status == 201
    # As in their example: a GET with a body.
    assert provd.good("GET", PARAMETERS, {"hosts": ["x0c0s4b0n0"]}) == [{**several, "hosts": ["x0c0s4b0n0"]}]
    assert provd.good("GET", f"{PARAMETERS}?name=x0c0s4b0n0") == [{**several, "hosts": ["x0c0s4b0n0"]}]
    assert provd.ask("PATCH", PARAMETERS, {"hosts": ["x0c0s0b0n0"], "params": "bootname=compute-00"}).status == 200
    shown = provd.good("GET", f"{PARAMETERS}?name=x0c0s0b0n0")[0]
    assert shown["params"] == "bootname=compute-00" and shown["kernel"] == several["kernel"]
    assert provd.ask("PATCH", PARAMETERS, {"hosts": ["x9c0s0b0n0"], "params": "a"}).status == 404
    assert len(provd.good("GET", PARAMETERS)) == 9
    assert provd.ask("DELETE", PARAMETERS, {"hosts": ["x0c0s0b0n0"]}).status == 200
    assert provd.ask("DELETE", PARAMETERS, {"hosts": ["x0c0s0b0n0"]}).status == 404
    # A kernel is removed wherever it is used.
    assert provd.ask("DELETE", PARAMETERS, {"kernel": several["kernel"]}).status == 200
    assert "kernel" not in provd.good("GET", f"{PARAMETERS}?name=x0c0s4b0n0")[0]
    assert provd.ask("GET", f"{PARAMETERS}?mac=02:00:00:00:00:09").status == 404
    assert provd.ask("GET", f"{PARAMETERS}?mac=z").status == 400
    assert provd.ask("POST", PARAMETERS, {"params": "a=b"}).status == 400


def test_a_script_as_bss_documents_it(provd: Provd) -> None:
    params = "bootname=x0c0s7b0n0 console=ttyS0,115200"
    provd.good("PUT", PARAMETERS, {"macs": [MAC.upper()], "kernel": "http://s/vmlinuz", "initrd": "http://s/i.img"})
    provd.good("PATCH", PARAMETERS, {"macs": [MAC], "params": params})
    lines = script(provd).splitlines()
    assert lines[1] == f"kernel --name vmlinuz http://s/vmlinuz {params} || goto retry"
    assert lines[2] == "initrd --name initrd.img http://s/i.img || goto retry"
    assert lines[3] == "boot || goto retry"
    chain = f"chain --replace --autofree http://10.77.0.2/boot/v1/bootscript?mac={MAC}&retry=1"
    assert lines[-1] == f"{chain} || goto retry"
    given = provd.ask("GET", f"{SCRIPT}&json=1", headers=NOBODY).json
    assert given == {"params": params, "kernel": {"path": "http://s/vmlinuz"}, "initrd": {"path": "http://s/i.img"}}
    for query in ("name=n1", "nid=7", f"mac={MAC.replace(':', '-')}&arch=x86_64&ts=1"):
        assert "http://s/vmlinuz" in script(provd, query)


def test_precedence_of_parameters(provd: Provd) -> None:
    steps: list[tuple[dict[str, Any], str]] = [
        ({"hosts": ["Default"]}, "default"),
        ({"hosts": ["Compute"]}, "role"),
        ({"groups": ["gpu"]}, "group"),
        ({"nids": [7]}, "nid"),
        ({"macs": [MAC]}, "mac"),
        ({"hosts": ["n1"]}, "host"),
    ]
    for whom, kernel in steps:
        provd.good("PUT", PARAMETERS, {**whom, "kernel": f"http://s/{kernel}", "params": f"is={kernel}"})
        assert f"http://s/{kernel} is={kernel} " in script(provd)
    for whom, _ in reversed(steps[1:]):
        provd.good("DELETE", PARAMETERS, whom)
    assert "http://s/default is=default " in script(provd)
    # Parameters of the kernel itself come first.
    provd.good("PUT", PARAMETERS, {"kernel": "http://s/default", "params": "of=kernel"})
    assert "http://s/default of=kernel is=default " in script(provd)


@pytest.mark.parametrize(
    "params", ["a\nboot", "a\rb", "a || shell", "a && shell", "x\x00y", "\x1b[2J", "a\n"], ids=lambda words: repr(words)
)
def test_no_parameter_injects_a_line(params: str, provd: Provd) -> None:
    assert provd.ask("PUT", PARAMETERS, {"hosts": ["n1"], "kernel": "http://s/k", "params": params}).status == 400
    assert provd.ask("PUT", PARAMETERS, {"hosts": ["n1"], "kernel": f"http://s/k {params}"}).status == 400


def test_a_profile_s_image(provd: Provd) -> None:
    provd.world.images = OneImage()
    assert "no image is for it" in script(provd)
    provd.good("PATCH", "/sms/v1/nodes/n1", {"groups": ["gpu", "compute"]})
    text = script(provd)
    folder = f"http://10.77.0.2/images/compute/{'d1' * 32}"
    kernel = text.splitlines()[1]
    assert kernel.startswith(
        f"kernel --name vmlinuz {folder}/vmlinuz initrd=initrd.img sms.image={folder}/root.squashfs "
    )
    for word in (f"sms.sha256={'d1' * 32}", "sms.server=https://10.77.0.2:8443", "console=ttyS0", "sms.node=n1"):
        assert f" {word} " in kernel
    assert "sms.token" not in text
    provd.good("PUT", PARAMETERS, {"groups": ["gpu"], "params": "debug"})
    assert " console=ttyS0 debug sms.node=n1 " in script(provd)
    provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "missing"})
    assert "n1 has no image of its profile missing" in script(provd)
    provd.good("PATCH", "/sms/v1/nodes/n1", {"enabled": False})
    assert "n1 is disabled" in script(provd)


def test_over_https_a_boot_stays_there(provd: Provd) -> None:
    """For an iPXE that verifies the server; the initramfs verifies the root itself."""
    provd.world.images = OneImage()
    write_neighbours(provd.folder / "arp", {ADDRESS: MAC})
    over = {"X-SMS-Scheme": "https", "X-SMS-Verify": "NONE"}
    folder = f"/images/compute/{'d1' * 32}"

    def fetched(headers: dict[str, str], query: str) -> tuple[set[str], str]:
        text = provd.ask("GET", query, headers=headers, address=ADDRESS).text
        commands = re.sub(r" sms\.\S+", "", text)  # what iPXE itself fetches
        return set(re.findall(r"https?://[^/\s]+", commands)), text

    for query in ("/boot.ipxe", SCRIPT):
        # Without an image of its own it waits, and asks again.
        assert fetched(over, query)[0] == {SECURE}
        assert fetched(NOBODY, query)[0] == {PLAIN}
    provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "compute"})
    for _ in range(2):  # the second one is cached
        secure, plain = fetched(over, SCRIPT), fetched(NOBODY, SCRIPT)
        assert (secure[0], plain[0]) == ({SECURE}, {PLAIN})
        assert all(f" sms.image={PLAIN}{folder}/root.squashfs " in text for _, text in (secure, plain))
        assert all("sms.token=" in text for _, text in (secure, plain))
    kernel = provd.good("GET", f"{SCRIPT}&json=1")["kernel"]["path"]
    assert kernel == f"{PLAIN}{folder}/vmlinuz"


def test_only_the_node_itself_gets_a_token(provd: Provd) -> None:
    provd.world.images = OneImage()
    provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "compute"})
    provd.good(
        "PUT", "/sms/v1/nodes/n2", {"macs": ["02:00:0a:4d:00:98"], "address": "10.77.0.152", "profile": "compute"}
    )
    arp = provd.folder / "arp"
    write_neighbours(arp, {ADDRESS: MAC, "10.77.0.152": "02:00:0a:4d:00:98"})
    found = re.search(r" sms\.token=([0-9a-f]{32}) ", script(provd, address=ADDRESS))
    assert found
    token = found[1]
    again = re.search(r" sms\.token=([0-9a-f]{32}) ", script(provd, address=ADDRESS))
    assert again and again[1] == token, "a second request keeps the token"
    # Others: an unknown address, the address of another node, a spoofed address.
    assert "sms.token" not in script(provd)
    assert "sms.token" not in script(provd, address="10.77.0.152")
    assert "sms.token" not in provd.ask("GET", SCRIPT).text
    assert "sms.token" not in script(provd, query="mac=02:00:0a:4d:00:98", address=ADDRESS)
    write_neighbours(arp, {ADDRESS: "02:00:0a:4d:00:66"})
    assert "sms.token" not in script(provd, address=ADDRESS)
    arp.unlink()
    assert "sms.token" not in script(provd, address=ADDRESS)
    assert not any(token.encode() in path.read_bytes() for path in provd.folder.glob("inventory.db*"))


def test_repeated_requests_write_nothing_and_keep_the_token(provd: Provd) -> None:
    provd.world.images = OneImage()
    provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "compute", "name": "n5"})
    write_neighbours(provd.folder / "arp", {ADDRESS: MAC})
    first = re.findall(r"sms\.token=(\w+)", script(provd, address=ADDRESS))
    other = sqlite3.connect(provd.folder / "inventory.db")
    before = other.execute("PRAGMA data_version").fetchone()
    for _ in range(50):
        assert re.findall(r"sms\.token=(\w+)", script(provd, address=ADDRESS)) == first
    assert other.execute("PRAGMA data_version").fetchone() == before
    other.close()
    tokens = provd.world.tokens
    assert isinstance(tokens, Tokens)
    given = first[0]
    for _ in range(ISSUES):
        assert tokens.use(given, ADDRESS) == "n5"
        text = script(provd, address=ADDRESS)
        given = (re.findall(r"sms\.token=(\w+)", text) or [""])[0]
    assert not given and "n5 requests tokens too often" in text and "|| goto retry" in text


QUERIES = [
    f"mac={MAC}&m%61c=02:00:0a:4d:00:98",
    f"mac=02:00:0a:4d:00:98&mac={MAC}",
    f"mac={MAC}&mac={MAC}",
    "name=n1&n%61me=n2",
    "nid=7&nid=8",
]


@pytest.mark.parametrize("query", QUERIES)
def test_no_query_returns_the_script_of_another_node(query: str, provd: Provd) -> None:
    provd.world.images = OneImage()
    provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "compute"})
    other = {"macs": ["02:00:0a:4d:00:98"], "address": "10.77.0.152", "nid": 8, "profile": "compute"}
    provd.good("PUT", "/sms/v1/nodes/n2", other)
    assert provd.ask("GET", f"/boot/v1/bootscript?{query}", headers=NOBODY).status == 400
    for query, name in ((f"mac={MAC}", "n1"), ("mac=02:00:0a:4d:00:98", "n2"), ("name=n1", "n1"), ("nid=7", "n1")):
        for written in (query, query.replace("m", "%6d", 1), query + "&x=1&x=2"):
            assert f" sms.node={name} " in script(provd, written)
            assert f" sms.node={name} " in script(provd, written)


def test_the_script_cache_is_limited_to_known_nodes(provd: Provd) -> None:
    from appliance.provision.bootscript import Scripts

    provd.world.images = OneImage()
    views = Scripts(provd.world)
    assert views._cache is None
    for number in range(200):
        for query in (f"mac={MAC}&ts={number}", f"mac=02:00:00:00:01:{number:02x}", f"name={'nN'[number % 2]}1"):
            app = SimpleNamespace(state=SimpleNamespace(trust=False))
            scope: dict[str, Any] = {"type": "http", "query_string": query.encode(), "headers": [], "client": None}
            views._render(Request({**scope, "app": app}))
    assert views._cache is not None and set(views._cache.scripts) == {("n1", MAC, PLAIN), ("n1", "", PLAIN)}


def test_headers_are_not_trusted_on_an_open_port(tmp_path: Path) -> None:
    """Without ``--trust-headers`` identity headers of a request are ignored."""
    config = make_config(tmp_path)
    write_neighbours(tmp_path / "arp", {ADDRESS: MAC})
    with running(config) as provd:
        provd.good("PUT", "/sms/v1/nodes/n1", {"macs": [MAC], "address": ADDRESS, "profile": "compute"})
    with running(config, trust=False) as provd:
        provd.world.images = OneImage()
        assert provd.ask("GET", "/sms/v1/nodes").status == 401
        assert "sms.token" not in provd.ask("GET", SCRIPT, address=ADDRESS).text
        assert provd.ask("GET", "/cloud-init/user-data", address=ADDRESS).status == 404


def test_unknown_machines(provd: Provd, tmp_path: Path) -> None:
    text = script(provd, "mac=020000000009", address="10.77.0.201")
    assert "no node has the MAC address 02:00:00:00:00:09" in text and text.endswith("exit 1\n")
    (stranger,) = provd.good("GET", "/sms/v1/unknown")["unknown"]
    assert (stranger["mac"], stranger["address"], stranger["count"]) == ("02:00:00:00:00:09", "10.77.0.201", 1)
    provd.good("PUT", "/sms/v1/nodes/n9", {"macs": ["02:00:00:00:00:09"]})
    assert provd.good("GET", "/sms/v1/unknown") == {"unknown": []}
    assert provd.ask("GET", "/boot/v1/bootscript?name=nobody", headers=NOBODY).status == 404
    assert provd.ask("GET", "/boot/v1/bootscript?nid=99", headers=NOBODY).status == 404
    for query in ("mac=hello", "nid=x", "", "mac="):
        assert provd.ask("GET", f"/boot/v1/bootscript?{query}", headers=NOBODY).status == 400
    with running(make_config(tmp_path, unknown="discover")) as other:
        assert "waiting until one has\nsleep 30\nchain --replace " in script(other, "mac=02:00:00:00:00:0b")
        other.world.images = OneImage()
        other.world.touch()
        assert "/images/discovery/" in script(other, "mac=02:00:00:00:00:0b")


def test_the_first_script_asks_for_the_card_that_booted(provd: Provd) -> None:
    answer = provd.ask("GET", "/boot.ipxe", headers=NOBODY)
    assert "http://10.77.0.2/boot/v1/bootscript?mac=${netX/mac}&arch=${buildarch} || goto wait\n" in answer.text


def test_a_busy_database_makes_nodes_retry(provd: Provd) -> None:
    """A node that boots without a token would never get its files."""
    provd.world.images = OneImage()
    # A node without a token.
    provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "compute", "name": "n3"})
    write_neighbours(provd.folder / "arp", {ADDRESS: MAC})
    other = sqlite3.connect(provd.folder / "inventory.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    text = script(provd, address=ADDRESS)
    assert "the database is busy" in text and "|| goto retry" in text and "kernel" not in text
    assert "kernel" in script(provd)
    other.execute("ROLLBACK")
    other.close()
    assert "sms.token=" in script(provd, address=ADDRESS)


def test_a_script_is_never_older_than_the_last_change(provd: Provd) -> None:
    """With readers in four threads, the first script after a change includes it."""
    stop = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(provd.ask("GET", SCRIPT, headers=NOBODY).status)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(40):
        provd.good("PUT", PARAMETERS, {"hosts": ["n1"], "kernel": "http://s/k", "params": f"step={number}"})
        assert f"step={number} " in script(provd)
    stop.set()
    for thread in threads:
        thread.join()
    assert set(seen) == {200}


def test_cloud_init_is_served_to_its_node_only(provd: Provd) -> None:
    for whom, data in (
        ({"hosts": ["Default"]}, {"user-data": {"a": "default", "b": "default", "c": "default"}}),
        ({"groups": ["gpu"]}, {"user-data": {"a": "group", "b": "group"}, "meta-data": {"rack": 3}}),
        ({"hosts": ["n1"]}, {"user-data": {"a": "node", "password": "geheimnis"}, "vendor-data": "#!/bin/sh\nexit\n"}),
    ):
        provd.good("PUT", PARAMETERS, {**whom, "cloud-init": data})
    write_neighbours(provd.folder / "arp", {ADDRESS: MAC})
    user = provd.ask("GET", "/cloud-init/user-data", headers=provd.as_node("n1"))
    assert user.text == "#cloud-config\na: node\nb: group\nc: default\npassword: geheimnis\n"
    assert provd.ask("GET", "/user-data", headers=provd.as_node("n1")).data == user.data
    assert provd.ask("GET", "/user-data?name=n1").data == user.data
    own = "cluster-name: test\ninstance-id: n1\nlocal-hostname: n1\n"
    assert provd.ask("GET", "/meta-data", headers=provd.as_node("n1")).text == own + "rack: 3\n"
    assert provd.ask("GET", "/vendor-data", headers=provd.as_node("n1")).text == "#!/bin/sh\nexit\n"
    # Any user of the node can send this request: only public data is served, also over TLS.
    for headers in (NOBODY, {"X-SMS-Scheme": "https", "X-SMS-Verify": "NONE"}):
        for top in ("/cloud-init", ""):
            answers = [
                provd.ask("GET", f"{top}/{each}-data?name=n1", headers=headers, address=ADDRESS)
                for each in ("meta", "user", "vendor")
            ]
            assert [each.text for each in answers] == [own, "#cloud-config\n", "#cloud-config\n"]
    provd.good("PATCH", PARAMETERS, {"groups": ["gpu"], "cloud-init": {"public": True}})
    public = provd.ask("GET", "/user-data", headers=NOBODY, address=ADDRESS)
    assert public.text == "#cloud-config\na: group\nb: group\n"
    assert provd.ask("GET", "/meta-data", headers=NOBODY, address=ADDRESS).text == own + "rack: 3\n"
    assert provd.ask("GET", "/user-data", headers=provd.as_node("n1")).data == user.data
    assert provd.ask("PATCH", PARAMETERS, {"groups": ["gpu"], "cloud-init": {"public": "yes"}}).status == 400
    provd.good("PATCH", PARAMETERS, {"groups": ["gpu"], "cloud-init": {"public": False}})
    assert provd.ask("GET", "/user-data", headers=NOBODY, address=ADDRESS).text == "#cloud-config\n"
    write_neighbours(provd.folder / "arp", {ADDRESS: "02:00:0a:4d:00:66"})
    stranger = {**ADMIN, "X-SMS-Subject": "CN=n2,OU=node"}
    for headers, address in ((NOBODY, ADDRESS), (NOBODY, "10.77.0.99"), (SERVICES, ""), (stranger, ADDRESS)):
        for what in ("user-data", "meta-data", "vendor-data"):
            answer = provd.ask("GET", f"/cloud-init/{what}?name=n1", headers=headers, address=address)
            assert answer.status == 404, (headers, address, what)


def test_the_container_reads_no_private_cloud_init_data(provd: Provd) -> None:
    """`OU=services` may read the inventory: no path returns what only a node and the admin may have."""
    cloud = {"user-data": {"p": "geheimnis"}, "meta-data": {"p": "geheimnis"}, "vendor-data": {"p": "geheimnis"}}
    public = {"public": True, "user-data": {"p": "for all"}}
    provd.good("PUT", PARAMETERS, {"hosts": ["n1"], "kernel": "http://s/k", "cloud-init": cloud})
    provd.good("PUT", PARAMETERS, {"groups": ["gpu"], "cloud-init": public})
    write_neighbours(provd.folder / "arp", {ADDRESS: MAC})
    for method, path in provd.world.contract.operations:
        if method == "GET" and not path.endswith("/wait"):
            for query in ("", "?name=n1"):
                answer = provd.ask(method, re.sub(r"\{\w+\}", "n1", path) + query, headers=SERVICES, address=ADDRESS)
                assert b"geheimnis" not in answer.data, path
    asked: list[dict[str, Any]] = [{"hosts": ["n1"]}, {"groups": ["gpu"]}]
    shown = [provd.good("GET", PARAMETERS, each, headers=SERVICES)[0] for each in asked]
    assert shown[0]["kernel"] == "http://s/k" and "cloud-init" not in shown[0]
    assert shown[1]["cloud-init"] == public
    assert provd.good("GET", PARAMETERS, {"hosts": ["n1"]})[0]["cloud-init"] == cloud


OPEN = {
    "/boot.ipxe",
    "/boot/v1/bootscript",
    "/boot/v1/service/status",
    "/hsm/v2/service/ready",
    "/hsm/v2/service/liveness",
    "/cloud-init/meta-data",
    "/cloud-init/user-data",
    "/cloud-init/vendor-data",
    "/meta-data",
    "/user-data",
    "/vendor-data",
    "/sms/v1/enrol",
}
"""Paths without authentication; none of them returns secrets."""


def test_no_secret_without_authentication(provd: Provd) -> None:
    """Request every path and method of the contract without a certificate, also from the node's address."""
    secret = "geheimnis"
    cloud = {"user-data": {"p": secret}, "meta-data": {"p": secret}, "vendor-data": {"p": secret}}
    provd.good("PUT", PARAMETERS, {"hosts": ["n1"], "kernel": "http://s/k", "cloud-init": cloud})
    provd.good("PUT", PARAMETERS, {"hosts": ["Default"], "cloud-init": cloud})
    provd.good("PATCH", "/sms/v1/nodes/n1", {"details": {"p": secret}})
    write_neighbours(provd.folder / "arp", {ADDRESS: MAC})
    count = 0
    for method, path in provd.world.contract.operations:
        # Do not wait in a long poll.
        filled = re.sub(r"\{\w+\}", "n1", path) + ("?seconds=0" if path.endswith("/wait") else "")
        for address in ("", ADDRESS, "10.77.0.99"):
            for query in ("", f"?mac={MAC}", "?name=n1"):
                if query and "?" in filled:
                    continue
                answer = provd.ask(method, filled + query, headers=NOBODY, address=address)
                assert secret.encode() not in answer.data and b"sms.token" not in answer.data
                assert answer.status == 401 or path in OPEN, f"{method} {path}: {answer.status}"
                count += 1
    assert count > 500


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (ADMIN, 200),
        (SERVICES, 200),
        ({**ADMIN, "X-SMS-Subject": "CN=n1,OU=node"}, 403),
        ({**ADMIN, "X-SMS-Verify": "FAILED:self-signed certificate"}, 401),
        ({**ADMIN, "X-SMS-Verify": "NONE"}, 401),
        ({**ADMIN, "X-SMS-Scheme": "http"}, 401),
        ({**ADMIN, "X-SMS-Subject": "CN=x,OU=root"}, 401),
        ({**ADMIN, "X-SMS-Subject": ""}, 401),
        (NOBODY, 401),
    ],
)
def test_who_may_read_nodes(headers: dict[str, str], status: int, provd: Provd) -> None:
    assert provd.ask("GET", "/sms/v1/nodes", headers=headers).status == status
    assert provd.ask("DELETE", "/sms/v1/nodes/n1", headers=headers).status in (
        (204,) if headers is ADMIN else (401, 403)
    )


SUBJECTS = {
    "CN=n1,OU=node": ("n1", "node", ""),
    "OU=node,CN=n1": ("n1", "node", ""),
    "CN=n1, OU=node, O=x": ("n1", "node", ""),
    "serialNumber=5-a,CN=n1,OU=node": ("n1", "node", "5-a"),
    "CN=n1\\,OU\\=admin,OU=node": ("n1,OU=admin", "node", ""),
    "CN=n1,OU=node,OU=admin": ("", "", ""),
    "CN=n1,CN=n2,OU=node": ("", "", ""),
    "serialNumber=5,CN=n1,OU=node,serialNumber=6": ("", "", ""),
    "CN=n1": ("", "", ""),
    "CN=n1+OU=admin,OU=node": ("", "", ""),
    "nonsense": ("", "", ""),
    "/CN=n1/OU=admin": ("", "", ""),
    "CN=n1,OU=node,": ("", "", ""),
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_subjects(subject: str) -> None:
    assert access.read_subject(subject) == SUBJECTS[subject]


def test_the_contract_and_the_routes_are_the_same(provd: Provd) -> None:
    from starlette.routing import Route

    from appliance.provision.app import MODULES, module_routes

    served = {
        (method, re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path))
        for name in MODULES
        for route in module_routes(name, provd.world)
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert served == set(provd.world.contract.operations)
