"""What of a host another program may have changed: Apptainer's files, packet filter, bridges."""

from __future__ import annotations

import pytest

from appliance.plan.hosts.doctor import Finding
from appliance.plan.hosts.facts import Bridge, Facts, read_masters, read_veths
from appliance.plan.hosts.integrity import examine_integrity

STARTER = "/usr/lib/x86_64-linux-gnu/apptainer/bin/starter"
SUID = "/usr/libexec/apptainer/bin/starter-suid"
PROGRAM = {"apptainer_program": "/usr/bin/apptainer"}
OURS = ("br-prov", "br-pub")


def facts(values: dict[str, str], os_release: str = "ID=debian\n", **more: object) -> Facts:
    return Facts("host-a", os_release, frozenset(), values, **more)  # type: ignore[arg-type]


def apptainer(compared: str, *, modes: str = "", differs: str = "", os_release: str = "ID=debian\n") -> Finding:
    values = PROGRAM | {"apptainer_compared": compared, "apptainer_modes": modes, "apptainer_differs": differs}
    (found,) = examine_integrity(facts({name: value for name, value in values.items() if value}, os_release), ())
    assert found.what == "Apptainer's files"
    return found


@pytest.mark.parametrize(
    ("compared", "modes", "state", "words", "fix"),
    [
        ("dpkg", "", "ok", "as in its package", ""),
        ("rpm", "", "ok", "as in its package", ""),
        ("recorded", "", "ok", "as `sms host prepare` installed it", ""),
        (
            "unrecorded",
            "",
            "warning",
            "cannot be compared",
            "rm /usr/lib/apptainer-private/installed && sms",
        ),
        ("", "", "warning", "cannot be compared: /usr/bin/apptainer belongs to no package", ""),
        ("", f"4777:0:{STARTER}\t", "missing", f"{STARTER} has mode 4777", f"chmod u-s,g-s,go-w {STARTER}"),
        ("dpkg", f"4755:0:{STARTER}\t", "missing", f"{STARTER} has mode 4755", "chmod u-s"),
        ("dpkg", f"775:0:{STARTER}\t", "missing", f"{STARTER} has mode 0775", "chmod u-s"),
        ("dpkg", f"755:1000:{STARTER}\t", "missing", "belongs to user 1000", "apt-get install --reinstall apptainer"),
        # The one program that may change its user, if nobody else may change it.
        ("dpkg", f"4755:0:{SUID}\t", "ok", "", ""),
        ("rpm", f"4777:0:{SUID}\t", "missing", f"{SUID} has mode 4777", "chmod u-s"),
        ("rpm", f"6755:0:{SUID}\t", "missing", f"{SUID} has mode 6755", "chmod u-s"),
        ("rpm", f"4755:1000:{SUID}\t", "missing", "belongs to user 1000", "dnf reinstall apptainer"),
    ],
)
def test_modes_of_apptainers_files(compared: str, modes: str, state: str, words: str, fix: str) -> None:
    family = "ID=rocky\nID_LIKE=rhel\n" if compared == "rpm" else "ID=debian\n"
    found = apptainer(compared, modes=modes, os_release=family)
    assert found.state == state and words in found.detail
    assert fix in found.mend if fix else not found.mend


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # dpkg --verify
        (f"??5??????   {STARTER}", f"{STARTER} differs from its package (??5??????)"),
        (f"missing     {STARTER}", f"{STARTER} is missing"),
        ("??5?????? c /etc/apptainer/apptainer.conf", ""),
        ("missing   c /etc/apptainer/remote.yaml", ""),
        ("missing     /usr/share/doc/apptainer/changelog.gz", ""),
        # rpm -V, also of older versions with eight flags
        (f".M.......    {SUID}", f"{SUID} differs from its package (.M.......)"),
        ("S.5....T.    /usr/bin/apptainer", "/usr/bin/apptainer differs from its package (S.5....T.)"),
        ("S.5....T   /usr/bin/apptainer", "/usr/bin/apptainer differs from its package (S.5....T)"),
        ("....L....    /usr/bin/singularity", "/usr/bin/singularity differs"),
        ("........P    /usr/libexec/apptainer/bin/starter", "differs from its package (........P)"),
        (".......T.    /usr/bin/apptainer", ""),
        ("S.5....T.  c /etc/apptainer/apptainer.conf", ""),
        (".M...U...  c /etc/apptainer/apptainer.conf", "/etc/apptainer/apptainer.conf differs"),
        ("S.5....T.  d /usr/share/man/man1/apptainer.1.gz", ""),
        (".M.......  g /var/lib/apptainer/mnt/session", "/var/lib/apptainer/mnt/session differs"),
        ("Unsatisfied dependencies for apptainer-1.4.5-1.el9.x86_64: fuse3-libs", ""),
        ("", ""),
    ],
)
def test_output_of_package_managers(line: str, words: str) -> None:
    found = apptainer("rpm", differs=f"{line}\t\t", os_release="ID=sles\nID_LIKE=suse\n")
    assert found.state == ("missing" if words else "ok")
    assert words in found.detail
    assert found.mend == ("zypper install --force apptainer" if words else "")


def test_without_apptainer_there_is_nothing_to_compare() -> None:
    assert examine_integrity(facts({"apptainer": "sh: apptainer: not found"}), ()) == []


@pytest.mark.parametrize(
    ("rules", "tables", "state", "words"),
    [
        ("", "", "ok", "none"),
        ("", "ip filter\tip nat\tinet firewalld\t", "ok", "none; tables of others: ip filter, ip nat, inet firewalld"),
        (
            'inet firewalld filter_INPUT_ZONES: iifname "br-prov" goto filter_IN_public\t',
            "inet firewalld\t",
            "ok",
            "none",
        ),
        ('bridge firewalld x: iifname "br-prov" drop\t', "bridge firewalld\t", "warning", "bridge firewalld x"),
        (
            "bridge evil fw: udp dport 53 drop\t",
            "bridge evil\t",
            "warning",
            "bridge evil fw: udp dport 53 drop; if they",
        ),
        (
            'ip filter FORWARD: iifname "br-prov" oifname "br-prov" counter packets 3 bytes 9 accept\t',
            "ip filter\t",
            "ok",
            "none",
        ),
        (
            'ip filter FORWARD: iifname "br-prov" oifname "eth9" counter packets 3 bytes 9 accept\t',
            "ip filter\t",
            "warning",
            "eth9",
        ),
        ("netdev x in: drop\t" * 7, "netdev x\t", "warning", "and 2 more"),
    ],
)
def test_rules_for_the_sites_interfaces(rules: str, tables: str, state: str, words: str) -> None:
    (found,) = examine_integrity(facts({"nft_tables": tables, "nft_rules": rules}), OURS)
    assert (found.what, found.state) == ("rules for the site's interfaces", state)
    assert words in found.detail


def test_tables_that_nft_does_not_show_are_named() -> None:
    (found,) = examine_integrity(facts({"nft_tables": "", "nft_rules": "", "legacy_tables": "filter nat"}), OURS)
    assert (found.state, found.detail) == ("ok", "none; not examined: tables of iptables-legacy (filter, nat)")


def test_a_host_without_nft_or_bridges_has_no_such_finding() -> None:
    assert examine_integrity(facts({}), OURS) == []
    assert examine_integrity(facts({"nft_tables": "ip x", "nft_rules": "ip x y: z"}), ()) == []


def link(name: str, *, peer: str = "", master: str = "", elsewhere: bool = False) -> dict[str, object]:
    made: dict[str, object] = {"ifname": name, "flags": ["UP"]}
    made |= {"master": master} if master else {}
    made |= {"linkinfo": {"info_kind": "veth"}, "link": peer} if peer else {}
    return made | ({"link_netnsid": 0} if elsewhere else {})


@pytest.mark.parametrize(
    ("links", "state", "detail"),
    [
        # The container's own interface has its other end in another namespace.
        ([link("veth1", peer="eth0", master="br-prov", elsewhere=True), link("eth0", master="docker0")], "ok", ""),
        ([link("v0", peer="v1", master="br-prov"), link("v1", peer="v0", master="br-pub")], "ok", ""),
        ([link("v0", peer="v1", master="br-prov"), link("v1", peer="v0", master="docker0")], "warning", "(v0, v1)"),
    ],
)
def test_other_bridges(links: list[dict[str, object]], state: str, detail: str) -> None:
    bridges = {name: Bridge() for name in (*OURS, "docker0")}
    of = facts({}, bridges=bridges, masters=dict(read_masters(links)), veths=dict(read_veths(links)))
    (found,) = examine_integrity(of, OURS)
    assert (found.what, found.state) == ("other bridges", state)
    assert detail in found.detail and "docker0" in found.detail
