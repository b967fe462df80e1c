"""Working and broken controllers: what is read from them, and their timeouts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import SmsError
from appliance.operations.site.ca import make_ca
from appliance.plan.nodes.nodes import clean_mac
from appliance.tools.redfish import Controller, Denied, NoRedfish, RedfishClient, Silent, Untrusted, connect
from appliance.tools.redfish_power import read_power, set_boot, switch
from appliance.tools.redfish_read import Bmc, read_bmc
from tests.bmcs import (
    PASSWORD,
    ROOT,
    USER,
    Answer,
    Machine,
    answer,
    drips,
    hangs,
    never_ends,
    says,
    serve,
    tree,
)
from tests.redfish import emulator
from tests.servers import free_port, server_context

ADDRESS, OTHER = "127.77.1.1", "127.77.1.2"
MAC = "02:00:0a:4d:00:97"

Start = Callable[[Answer], Controller]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority") / "tls"
    make_ca(folder)
    return folder


@pytest.fixture
def start(tls: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a controller with a behaviour and return how to reach it."""
    context = server_context(tls, tmp_path, [ADDRESS])
    port = free_port([ADDRESS])
    with ExitStack() as stack:

        def begin(behave: Answer) -> Controller:
            stack.enter_context(serve(ADDRESS, port, context, behave))
            return Controller(f"https://{ADDRESS}:{port}", USER, PASSWORD, tls / "ca.pem")

        yield begin


def read(controller: Controller, *, timeout_s: float = 20, answer_s: float = 10) -> Bmc:
    with connect(controller, timeout_s=timeout_s, answer_s=answer_s) as client:
        return read_bmc(client)


def test_read_a_controller(start: Start) -> None:
    machine = Machine(tree({"1": [MAC, "02:00:0a:4d:01:97"]}))
    bmc = read(start(machine))
    (system,) = bmc.systems
    assert (bmc.firmware, bmc.model, bmc.redfish, bmc.notes) == ("2.61", "B1", "1.6.0", ())
    assert system.macs == (MAC, "02:00:0a:4d:01:97")
    assert (system.power, system.manufacturer, system.model, system.serial) == ("On", "Maker", "Node", "S1")
    assert (system.bios, system.memory_gib, system.processors, system.processor_model) == ("1.1", 64, 2, "CPU")
    assert len(machine.asked) < 12, "a controller is slow: few requests"


def test_several_systems(start: Start) -> None:
    found = read(start(Machine(tree({"a": [MAC], "b": ["02:00:0a:4d:00:98"]}))))
    assert [system.path for system in found.systems] == [f"{ROOT}/Systems/a", f"{ROOT}/Systems/b"]


def without(*paths: str) -> dict[str, Any]:
    return {path: body for path, body in tree({"1": [MAC]}).items() if path not in paths}


def changed(path: str, **more: Any) -> dict[str, Any]:
    found = tree({"1": [MAC]})
    found[path] = {**found[path], **more}
    return found


SYSTEM, NICS = f"{ROOT}/Systems/1", f"{ROOT}/Systems/1/EthernetInterfaces"
SUMMARIES: dict[str, Any] = {"MemorySummary": None, "ProcessorSummary": []}

TOLERATED: dict[str, tuple[dict[str, Any], str]] = {
    "no managers": (without(f"{ROOT}/Managers"), "managers"),
    "no manager": (without(f"{ROOT}/Managers/bmc"), "managers"),
    "no interfaces": (without(NICS), "no MAC address"),
    "no processors": (changed(SYSTEM, ProcessorSummary=None, Processors={"@odata.id": f"{SYSTEM}/None"}), "processors"),
    "summaries of other kinds": (changed(SYSTEM, **SUMMARIES), ""),
    "numbers of other kinds": (
        changed(SYSTEM, MemorySummary={"TotalSystemMemoryGiB": 1e300}, ProcessorSummary={"Count": "2"}),
        "",
    ),
    "texts of other kinds": (changed(SYSTEM, Manufacturer=["x"], Model={"a": 1}, SerialNumber="\x1b[31m\n"), ""),
    "actions of other kinds": (changed(SYSTEM, Actions=["reset"], Boot="pxe", Links=[]), ""),
    "members of other kinds": (
        changed(NICS, Members=[1, None, "x", {"@odata.id": 5}, {"@odata.id": "//evil/x"}]),
        "no MAC",
    ),
    "members that are none": (changed(NICS, Members={"a": 1}), "no MAC address"),
    "an interface of garbage": ({**without(), f"{NICS}/0": ["no", "object"]}, "not a Redfish"),
    "zeros for a MAC": (changed(f"{NICS}/0", MACAddress="00:00:00:00:00:00"), "no MAC address"),
    "pages round and round": (changed(NICS, **{"Members@odata.nextLink": NICS}), ""),
    "a page elsewhere": (changed(NICS, **{"Members@odata.nextLink": "https://evil/redfish"}), ""),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_missing_or_broken_resources_are_noted(name: str, start: Start) -> None:
    machine, note = TOLERATED[name]
    found = read(start(Machine(machine)))
    assert len(found.systems) == 1 and found.systems[0].power == "On"
    assert note in "; ".join(found.notes) if note else found.notes == ()
    assert found.systems[0].macs == (() if "no MAC" in note or "not a Redfish" in note else (MAC,))
    assert all(text.isprintable() for text in (found.systems[0].serial, *found.notes))


def test_requests_for_members_are_limited(start: Start) -> None:
    many = [{"@odata.id": f"{NICS}/{number}"} for number in range(9000)]
    machine = Machine(changed(NICS, Members=many))
    found = read(start(machine))
    assert found.systems[0].macs == (MAC,) and len(machine.asked) < 60
    assert "9000 members, only the first 32 are read" in "; ".join(found.notes)


def test_adapters_are_queried_if_there_are_no_interfaces(start: Start) -> None:
    chassis = f"{ROOT}/Chassis/1"
    more = {
        chassis: {"NetworkAdapters": {"@odata.id": f"{chassis}/NetworkAdapters"}},
        f"{chassis}/NetworkAdapters": {"Members": [{"@odata.id": f"{chassis}/NetworkAdapters/1"}]},
        f"{chassis}/NetworkAdapters/1": {"NetworkPorts": {"@odata.id": f"{chassis}/NetworkAdapters/1/NetworkPorts"}},
        f"{chassis}/NetworkAdapters/1/NetworkPorts": {"Members": [{"@odata.id": f"{chassis}/p"}]},
        f"{chassis}/p": {"Id": "1", "LinkStatus": "Up", "AssociatedNetworkAddresses": [MAC.replace(":", "-")]},
    }
    machine = {**changed(SYSTEM, EthernetInterfaces=None, Links={"Chassis": [{"@odata.id": chassis}]}), **more}
    assert read(start(Machine(machine))).systems[0].macs == (MAC,)


WELL = json.dumps({"RedfishVersion": "1"}).encode()

BROKEN: dict[str, tuple[Answer, type[SmsError], str]] = {
    "hangs": (hangs, Silent, "not answer in time"),
    "drips": (drips, Silent, "not answer in time"),
    "ends at once": (says(b""), Silent, "closed the connection"),
    "garbage": (says(b"\x00\x01\xff" * 50 + b"\r\n"), NoRedfish, "is not a Redfish service"),
    "half a body": (says(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + WELL), NoRedfish, "incomplete response"),
    "a body without an end": (never_ends, NoRedfish, "more than 1 MiB"),
    "no JSON": (lambda *_: answer(200, b"<html>"), NoRedfish, "not a Redfish"),
    "JSON of another kind": (lambda *_: answer(200, [1, 2]), NoRedfish, "not a Redfish"),
    "deep JSON": (lambda *_: answer(200, b"[" * 200_000), NoRedfish, "not a Redfish"),
    "another service": (lambda *_: answer(200, {"hello": 1}), NoRedfish, "not a Redfish"),
    "a redirection": (lambda *_: answer(302, b"", f"Location: https://{OTHER}/\r\n"), NoRedfish, "redirected"),
    "no": (lambda *_: answer(401, {}), Denied, "401"),
    "fails": (lambda *_: answer(500, {"error": {"message": "oh\x1b[1m no"}}), SmsError, r"oh\x1b[1m no"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_controllers(name: str, start: Start) -> None:
    behave, kind, words = BROKEN[name]
    with pytest.raises(kind, match=re.escape(words)) as caught:
        read(start(behave), answer_s=1.0)
    assert PASSWORD not in caught.value.message + caught.value.hint


@pytest.mark.slow
def test_a_silent_tls_handshake_times_out(tls: Path) -> None:
    port = free_port([ADDRESS])
    with serve(ADDRESS, port, None, hangs), pytest.raises(Silent):
        read(Controller(f"https://{ADDRESS}:{port}", USER, PASSWORD, tls / "ca.pem"), answer_s=1)


def test_no_password_is_sent_to_an_untrusted_controller(tls: Path, tmp_path: Path) -> None:
    context, port, seen = server_context(tls, tmp_path, [OTHER]), free_port([ADDRESS]), Machine(tree({"1": [MAC]}))
    with serve(ADDRESS, port, context, seen):
        with pytest.raises(Untrusted) as caught:
            read(Controller(f"https://{ADDRESS}:{port}", USER, PASSWORD, tls / "ca.pem"))
        assert "that its certificate has" in caught.value.hint
        make_ca(tmp_path / "other")
        with pytest.raises(Untrusted) as caught:
            read(Controller(f"https://{ADDRESS}:{port}", USER, PASSWORD, tmp_path / "other" / "ca.pem"))
        assert ".ca to the CA" in caught.value.hint
        assert seen.asked == []
        assert read(Controller(f"https://{ADDRESS}:{port}", USER, PASSWORD, None, insecure=True)).systems


def test_endless_links_are_limited(start: Start) -> None:
    """Each answer links to another resource."""

    def round_and_round(client: RedfishClient) -> None:
        for number in range(1000):
            client.request("GET", f"{ROOT}/{number}")

    controller = start(lambda *_: answer(200, {}))
    with connect(controller) as client, pytest.raises(NoRedfish, match="too many links"):
        round_and_round(client)


@pytest.mark.slow
def test_a_hanging_resource_only_costs_its_timeout(start: Start) -> None:
    machine = Machine(tree({"1": [MAC]}), hanging=(f"{ROOT}/Managers",))
    found = read(start(machine), answer_s=1)
    assert found.systems[0].macs == (MAC,) and found.firmware == ""
    assert any("managers" in note and "in time" in note for note in found.notes)


def test_a_controller_without_basic_authentication(start: Start) -> None:
    machine = Machine(tree({"1": [MAC]}), basic=False)
    assert read(start(machine)).systems[0].macs == (MAC,)
    assert machine.sessions == [], "sessions are closed: a controller has few"


def test_a_wrong_password_is_tried_once(start: Start) -> None:
    machine = Machine(tree({"1": [MAC]}))
    controller = start(machine)
    with pytest.raises(Denied):
        read(Controller(controller.url, USER, "wrong", controller.ca))
    assert [path for _, path in machine.asked] == [f"{ROOT}/", f"{ROOT}/Systems"], "controllers lock accounts"


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([f"{ROOT}/a", f"{ROOT}/b", MAC]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["@odata.id", "Members", "Id"]), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = (
    *("Systems", "Managers", "Members", "EthernetInterfaces", "MACAddress", "Boot", "Actions", "Links", "Chassis"),
    *("NetworkAdapters", "Ports", "UUID", "Name", "MemorySummary", "ProcessorSummary", "Processors", "PowerState"),
    *("Members@odata.nextLink", "ManagerType", "LinkStatus", "RedfishVersion", "AssociatedNetworkAddresses"),
)


class Anything(RedfishClient):
    """Returns prepared answers, without a network."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.controller, self.tree = Controller("https://bmc", USER, PASSWORD), tree

    def request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = self.tree[path.rpartition("/")[2] or ROOT]
        return found


@given(
    st.fixed_dictionaries({key: st.dictionaries(st.sampled_from(NAMES), ANY) for key in (ROOT, "Systems", "a", "b")})
)
def test_arbitrary_answers(tree: dict[str, Any]) -> None:
    link = {"@odata.id": f"{ROOT}/a"}
    tree[ROOT] |= {"RedfishVersion": "1", "Systems": {"@odata.id": f"{ROOT}/Systems"}}
    tree["Systems"]["Members"] = [link]
    bmc = read_bmc(Anything(tree))
    assert json.dumps(asdict(bmc), allow_nan=False)
    assert all(mac == clean_mac(mac) for system in bmc.systems for mac in system.macs)


SWITCHES: list[tuple[str, str, tuple[str, ...], bool, str]] = [
    ("on", "Off", ("On", "ForceOff"), True, "On"),
    ("on", "On", ("On",), False, "On"),
    ("on", "Off", ("ForceOn", "ForceOff"), True, "On"),
    ("off", "On", ("On", "ForceOff"), True, "Off"),
    ("off", "Off", ("On", "ForceOff"), False, "Off"),
    ("soft-off", "On", ("GracefulShutdown",), True, "Off"),
    ("reset", "On", ("ForceRestart",), True, "On"),
    ("reset", "On", ("PowerCycle",), True, "On"),
    ("reset", "On", ("On", "ForceOff"), True, "On"),
    ("reset", "Off", ("On", "ForceRestart"), True, "On"),
]


@pytest.mark.parametrize(("action", "power", "resets", "did", "end"), SWITCHES)
def test_switching(action: str, power: str, resets: tuple[str, ...], did: bool, end: str, start: Start) -> None:
    machine = Machine(tree({"1": [MAC]}, power=power, resets=resets))
    controller = start(machine)
    assert switch(controller, action, timeout_s=10) is did
    assert machine.power() == end == read_power(controller)
    posts = [path for method, path in machine.asked if method == "POST"]
    assert len(posts) == (0 if not did else 2 if resets == ("On", "ForceOff") and action == "reset" else 1)


def test_an_unsupported_action(start: Start) -> None:
    with pytest.raises(SmsError, match="does not support soft-off"):
        switch(start(Machine(tree({"1": [MAC]}, resets=("On",)))), "soft-off", timeout_s=5)


def test_reset_types_behind_a_link(start: Start) -> None:
    found = tree({"1": [MAC]}, power="Off")
    action = found[SYSTEM]["Actions"]["#ComputerSystem.Reset"]
    del action["ResetType@Redfish.AllowableValues"]
    action["@Redfish.ActionInfo"] = f"{SYSTEM}/ResetActionInfo"
    found[f"{SYSTEM}/ResetActionInfo"] = {"Parameters": [{"Name": "ResetType", "AllowableValues": ["ForceOn"]}]}
    assert switch(start(Machine(found)), "on", timeout_s=5)


@pytest.mark.parametrize("etag", [False, True])
def test_the_next_boot(etag: bool, start: Start) -> None:
    machine = Machine(tree({"1": [MAC]}), etag=etag)
    controller = start(machine)
    set_boot(controller, "pxe", mode="UEFI")
    boot = machine.tree[SYSTEM]["Boot"]
    assert (boot["BootSourceOverrideTarget"], boot["BootSourceOverrideEnabled"]) == ("Pxe", "Once")
    assert boot["BootSourceOverrideMode"] == "UEFI"
    with pytest.raises(SmsError, match="cannot boot from UefiHttp"):
        set_boot(controller, "http")


def test_a_reset_target_on_another_host(start: Start) -> None:
    found = tree({"1": [MAC]})
    found[SYSTEM]["Actions"]["#ComputerSystem.Reset"]["target"] = f"https://{OTHER}/reset"
    with pytest.raises(NoRedfish, match="a link leads to"):
        switch(start(Machine(found)), "off", timeout_s=5)


@pytest.mark.slow
def test_what_we_set_is_what_another_client_reads(tmp_path: Path) -> None:
    """sushy, OpenStack's client, reads the same values from the emulator, including those that we have set."""
    sushy = pytest.importorskip("sushy")
    with emulator(tmp_path, systems=2, macs=(MAC, "02:00:0a:4d:00:98")) as bmc:
        ours = read(bmc.controller())
        root = sushy.Sushy(
            f"{bmc.url}/redfish/v1/",
            verify=str(bmc.ca),
            auth=sushy.auth.BasicAuth(username=bmc.controller().user, password=bmc.controller().password),
        )
        theirs = {one.path: one for one in root.get_system_collection().get_members()}
        assert {system.path for system in ours.systems} == set(theirs)
        for system in ours.systems:
            one = theirs[system.path]
            assert set(system.macs) == {mac.lower() for mac in one.ethernet_interfaces.summary}
            assert (system.uuid, system.power) == (one.uuid, one.power_state.value)
        first = bmc.controller(path=ours.systems[0].path)
        set_boot(first, "pxe")
        assert switch(first, "off", timeout_s=30)
        again = root.get_system(ours.systems[0].path)
        assert again.power_state == sushy.PowerState.OFF
        assert again.boot["target"] == sushy.BootSource.PXE
        assert root.get_system(ours.systems[1].path).power_state == sushy.PowerState.ON
        assert "Processors" not in again.json


@pytest.mark.slow
def test_a_connection_has_a_total_timeout(start: Start) -> None:
    """The total timeout of a controller applies whatever the timeout of an answer is."""
    with pytest.raises(Silent):
        read(start(drips), timeout_s=1, answer_s=3600)
