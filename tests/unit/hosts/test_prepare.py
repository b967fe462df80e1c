"""The playbook that prepares an admin host, and the mapping of Ansible's events; runs nothing on any host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from appliance.errors import SmsError
from appliance.operations.hosts.host import failure
from appliance.plan.hosts.authorized import authorized_line, mark_of, peer_addresses, read_public
from appliance.share import share
from appliance.tools.ansible import Failure, Play, Target, _connection, _note, _program, run_playbook
from tests.places import GOLDEN

PLAYBOOK = share("playbooks", "prepare-host.yml")
PLAYBOOKS = sorted(share("playbooks").glob("*.yml"))
TASKS = sorted(share("playbooks", "roles").glob("*/tasks/*.yml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.name for path in PLAYBOOKS])
def test_ansible_accepts_the_syntax(tmp_path: Path, name: str) -> None:
    argv = [sys.executable, "-m", "ansible", "playbook", "--syntax-check", "-i", "host,", str(share("playbooks", name))]
    environment = {**os.environ, "ANSIBLE_HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def flat(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for task in tasks:
        found += flat(task["block"] + task.get("rescue", [])) if "block" in task else [task]
    return found


@pytest.mark.parametrize("path", TASKS, ids=lambda path: f"{path.parents[1].name}/{path.name}")
def test_tasks_have_names_and_use_only_modules_of_ansible_core(path: Path) -> None:
    for task in flat(yaml.safe_load(path.read_text())):
        assert task["name"]
        modules = [key for key in task if "." in key]
        assert len(modules) == 1 and modules[0].startswith("ansible.builtin."), task
        assert modules[0] not in ("ansible.builtin.shell", "ansible.builtin.raw")


def test_every_task_file_is_used_and_every_family_has_packages() -> None:
    families = {path.stem for path in share("playbooks", "roles", "packages", "vars").iterdir()}
    assert families == {"Debian", "RedHat", "Suse"}
    for family in families:
        read = yaml.safe_load(share("playbooks", "roles", "packages", "vars", f"{family}.yml").read_text())
        assert len(read["packages_wanted"]) == len(set(read["packages_wanted"])) > 10


def link(name: str, *addresses: str, kind: str = "", master: str = "") -> dict[str, Any]:
    shown: dict[str, Any] = {"ifname": name, "addr_info": [{"local": one, "scope": "global"} for one in addresses]}
    return shown | ({"linkinfo": {"info_kind": kind}} if kind else {}) | ({"master": master} if master else {})


HOST = [link("lo"), link("eth0", "192.0.2.5"), link("eth1"), link("eth2", "10.0.0.2"), link("eth3", "198.51.100.9")]
HOST += [link("br0", kind="bridge"), link("eth4", master="br0"), link("bond0", kind="bond")]


def refusals(**variables: Any) -> str:
    """What the playbook refuses on ``HOST``."""
    environment = jinja2.Environment(trim_blocks=True)
    environment.filters["from_json"] = json.loads
    environment.filters["flatten"] = lambda lists: [item for one in lists for item in one]
    template = share("playbooks", "roles", "bridges", "templates", "refused.j2").read_text()
    found = environment.from_string(template).render(
        **{"sms_bridges": [], "sms_parents": [], **variables},
        bridges_links={"stdout": json.dumps(HOST)},
        bridges_routes={"results": [{"stdout": json.dumps([{"dst": "default", "dev": "eth3"}])}, {"stdout": ""}]},
        bridges_ssh={"stdout": "192.0.2.77 40000 192.0.2.5 22"},
    )
    return str(found.strip())


@pytest.mark.parametrize(
    ("bridge", "port", "words"),
    [
        ("br0", "", ""),
        ("br0", "eth0", ""),
        ("br1", "eth1", ""),
        ("br1", "", "there is no bridge br1, and networks.public.port in the site file is not set"),
        ("br1", "eth9", "there is no interface eth9 for bridge br1 (networks.public.port)"),
        ("br1", "eth4", "eth4 is a port of br0 already and cannot be added to br1"),
        ("br1", "eth0", "this SSH connection uses eth0: making it a port of br1 would disconnect the host"),
        ("br1", "eth3", "eth3 has the default route: making it a port of br1 would disconnect the host"),
        ("br1", "eth2", "eth2 has 10.0.0.2: as a port of br1 it would not answer there any more"),
        ("bond0", "eth1", "bond0 exists, but is not a bridge"),
    ],
)
def test_changes_that_would_disconnect_the_host_are_refused(bridge: str, port: str, words: str) -> None:
    one = {"name": bridge, "port": port, "parent": "", "vlan": 0, "key": "networks.public"}
    assert refusals(sms_bridges=[one]) == words


@pytest.mark.parametrize(
    ("parent", "words"),
    [
        ("eth0", ""),  # it has the addresses of the host and of this connection
        ("eth9", "there is no interface eth9 for VLAN 20 of bridge br1 (networks.public.port)"),
    ],
)
def test_the_interface_below_a_vlan_may_carry_addresses(parent: str, words: str) -> None:
    one = {"name": "br1", "port": f"{parent}.20", "parent": parent, "vlan": 20, "key": "networks.public"}
    assert refusals(sms_bridges=[one]) == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eth0", ""),
        ("eth3", ""),
        ("eth9", "there is no interface eth9 for a macvlan interface (networks.public.port)"),
        ("eth4", "eth4 is a port of br0 and cannot carry a macvlan interface (networks.public.port)"),
    ],
)
def test_the_interface_below_a_macvlan_one_may_carry_addresses(name: str, words: str) -> None:
    assert refusals(sms_parents=[{"name": name, "key": "networks.public"}]) == words


def test_connection_to_a_host() -> None:
    here = _connection(Target("a", "/usr/bin/python3"), Path("/private"))
    assert here == {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
    far = _connection(
        Target("a", "/usr/bin/python3", "192.0.2.1", "ops", 2222, Path("/k"), Path("/my hosts")), Path("/private")
    )
    assert far["ansible_become"] is True
    assert (far["ansible_port"], far["ansible_user"], far["ansible_ssh_private_key_file"]) == (2222, "ops", "/k")
    options = str(far["ansible_ssh_common_args"])
    assert "-o StrictHostKeyChecking=yes" in options
    assert """-o 'UserKnownHostsFile="/my hosts"'""" in options


def test_memory_is_bounded_where_another_host_fills_it() -> None:
    assert _program(Target("a", "/usr/bin/python3", "192.0.2.1"))[0] == "prlimit"
    assert _program(Target("a", "/usr/bin/python3"))[0] == "setpriv"


@pytest.mark.slow
def test_a_playbook_that_does_not_end_is_ended(tmp_path: Path) -> None:
    playbook = tmp_path / "p.yml"
    playbook.write_text("- hosts: all\n  gather_facts: false\n  tasks: [{command: sleep 300}]\n")
    with pytest.raises(SmsError, match="did not end within 8 s"):
        run_playbook(playbook, Target("a", sys.executable), {}, on_task=lambda task: None, longest_s=8)


def event(kind: str, task: str = "a task", **data: Any) -> dict[str, Any]:
    return {"event": kind, "event_data": {"task": task, "role": "bridges", **data}}


def test_events_become_a_play() -> None:
    play, began = Play(), list[str]()
    for one in [
        event("playbook_on_start"),
        event("playbook_on_task_start", "first"),
        event("runner_on_ok", "first", res={"changed": False}),
        event("runner_on_ok", "second", res={"changed": True}),
        event("runner_on_ok", "say", task_action="ansible.builtin.debug", res={"msg": "note: well"}),
        event("runner_on_failed", "ignored", ignore_errors=True, res={"msg": "no"}),
        event("runner_on_failed", "third", res={"msg": "non-zero return code", "stderr": "no mirror\n"}),
        event("runner_on_unreachable", "fourth", res={"msg": "timed out"}),
    ]:
        _note(play, one, began.append)
    assert began == ["first"]
    assert play.changed == ["second"]
    assert play.notes == ["note: well"]
    assert play.failed == [Failure("bridges", "third", "no mirror"), Failure("bridges", "fourth", "timed out")]


def test_a_failure_has_the_task_its_message_and_a_hint() -> None:
    assert failure(Play(changed=["one"]), "host-a") is None
    error = failure(Play(failed=[Failure("bridges", "Refuse it", "eth0 is needed")]), "host-a")
    assert error and error.status == 1
    assert "Refuse it: eth0 is needed" in error.message
    assert "another interface" in error.hint
    unknown = failure(Play(failed=[Failure("", "Gathering Facts", "no")]), "host-a")
    assert unknown and "sms doctor --host host-a" in unknown.hint


MANAGERS = {
    path.stem: path
    for path in TASKS
    if path.parents[1].name == "bridges" and path.stem not in ("main", "make", "remove")
}
BELOW = "Link File: /usr/lib/systemd/network/99-default.link\nNetwork File: /etc/systemd/network/10-lan.network\n"


def written(tasks: list[dict[str, Any]], variables: dict[str, Any]) -> dict[str, str]:
    """The files that tasks write and the commands that they run, by Ansible's own templates."""
    loader = DataLoader()

    def expand(value: Any, more: dict[str, Any]) -> Any:
        return Templar(loader=loader, variables={**variables, **more}).template(trusted(value))

    files: dict[str, str] = {}
    commands = []
    for task in tasks:
        conditions = task["when"] if isinstance(task.get("when"), list) else [task.get("when", True)]
        if not all(expand(f"{{{{ {one} }}}}", {}) for one in conditions):
            continue
        for item in task.get("loop", [None]):
            more = {"item": expand(item, task.get("vars", {})), **task.get("vars", {})}
            more = {name: expand(value, more) for name, value in more.items()}
            if copy := task.get("ansible.builtin.copy"):
                found = expand(copy, more)
                files[found["dest"].lstrip("/")] = found["content"]
            elif command := task.get("ansible.builtin.command"):
                found = expand(command, more)
                argv = found if isinstance(found, str) else " ".join(found.get("argv", []))
                commands.append(f"{argv}\n")
    return {**files, "commands": "".join(commands)}


def trusted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: trusted(one) for name, one in value.items()}
    if isinstance(value, list):
        return [trusted(one) for one in value]
    return trust_as_template(value) if isinstance(value, str) else value


@pytest.mark.parametrize("kind", ["vlan", "card"])
@pytest.mark.parametrize("manager", sorted(MANAGERS))
def test_what_each_network_manager_is_given(
    manager: str, kind: str, golden: Callable[[Path, dict[str, str]], None]
) -> None:
    """A bridge whose port is a network card, or a VLAN on a card that carries the host's addresses."""
    port = (
        {"port": "eth0.20", "parent": "eth0", "vlan": 20}
        if kind == "vlan"
        else {"port": "eth1", "parent": "", "vlan": 0}
    )
    variables = {
        "bridge": {"name": "br-nmn", "key": "networks.provisioning", **port},
        "bridges_ifup": {"stat": {"exists": True}},
        "bridges_status": {"stdout": BELOW},
        "bridges_vlan": {"changed": kind == "vlan"},
        "ansible_facts": {"os_family": "Debian"},
        "ansible_check_mode": False,
    }
    golden(GOLDEN / "hosts" / kind / manager, written(yaml.safe_load(MANAGERS[manager].read_text()), variables))


NETWORKD = "/etc/systemd/network/05-sms"
TAKEN_BACK: dict[str, tuple[dict[str, Any], list[str], list[str], dict[str, bool]]] = {
    "of networkd": ({}, [f"{NETWORKD}-br1.netdev"], [], {"made_vlan": False, "made_ifcfg": False}),
    "a VLAN of networkd": ({"vlan": 20}, [f"{NETWORKD}-eth1.20.netdev"], [], {"made_vlan": True, "made_ifcfg": False}),
    "of wicked": ({}, [], ["/etc/sysconfig/network/ifcfg-br1"], {"made_vlan": False, "made_ifcfg": False}),
    "a port of wicked": ({}, [], ["/etc/sysconfig/network/ifcfg-eth1"], {"made_vlan": False, "made_ifcfg": True}),
    "a VLAN of NetworkManager": (
        {"vlan": 20},
        ["/x/sms-br1.nmconnection"],
        [],
        {"made_vlan": False, "made_ifcfg": False},
    ),
    "marked": ({"marked": "br1"}, [], [], {"made_vlan": False, "made_ifcfg": False}),
    "a VLAN that is marked, too": (
        {"marked": "br1 eth1.20", "vlan": 20},
        ["/etc/network/interfaces.d/sms-br1"],
        [],
        {"made_vlan": True, "made_ifcfg": False},
    ),
    "of somebody else": ({"marked": "br0", "vlan": 20}, [], [], {}),
}


def taken_back(name: str, links: list[dict[str, Any]], **variables: Any) -> Any:
    template = share("playbooks", "roles", "unprepare", "templates", name).read_text()
    given = {"unprepare_links": {"stdout": json.dumps(links)}, **variables}
    return Templar(DataLoader(), variables=given).template(trust_as_template(template))


@pytest.mark.parametrize("case", TAKEN_BACK)
def test_which_bridges_are_taken_back(case: str) -> None:
    """Those whose configuration `prepare` wrote, or which it marked; of VLANs and ports, the same."""
    facts, files, ifcfg, made = TAKEN_BACK[case]
    port = "eth1.20" if facts.get("vlan") else "eth1"
    bridge = {"name": "br1", "port": port, "parent": "eth1" if facts.get("vlan") else "", "vlan": facts.get("vlan", 0)}
    links = [
        {**link(name), **({"ifalias": "sms-host-prepare"} if name in facts.get("marked", "").split() else {})}
        for name in ("br0", "br1", "eth1", "eth1.20")
    ]
    given = {"unprepare_files": {"results": [{"stdout_lines": files}]}}
    given |= {"unprepare_ifcfg": {"results": [{"stdout_lines": ifcfg}]}}
    found = taken_back("ours.j2", links, sms_bridges=[bridge], **given)
    found = json.loads(found) if isinstance(found, str) else found
    assert found == ([{**bridge, **made}] if made else [])


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([], ""),
        ([link("veth9", master="br1")], "br1 has other ports: veth9"),
        ([{**link("br1.7"), "link": "br1"}], "br1.7 needs br1"),
        ([{**link("mv0"), "link": "eth1.20"}], "mv0 needs br1"),
    ],
)
def test_what_is_in_use_is_not_taken_back(others: list[dict[str, Any]], words: str) -> None:
    bridge = {"name": "br1", "port": "eth1.20", "parent": "eth1", "vlan": 20}
    links = [link("br1", kind="bridge"), link("eth1.20", master="br1"), *others]
    assert str(taken_back("refused.j2", links, unprepare_bridges=[bridge]) or "").strip() == words


def test_a_bridge_with_an_address_is_not_taken_back() -> None:
    bridge = {"name": "br1", "port": "eth1", "parent": "", "vlan": 0}
    found = taken_back("refused.j2", [link("br1", "10.0.0.1", kind="bridge")], unprepare_bridges=[bridge])
    assert "br1 has 10.0.0.1" in found


def test_facts_of_another_host_are_data() -> None:
    """None is a template, none is a path or a name unless it was compared before."""
    used = {fact for path in TASKS for fact in re.findall(r"ansible_facts(?:\.|\[')(\w+)", path.read_text())}
    assert used == {"os_family", "distribution", "service_mgr", "kernel", "getent_passwd"}
    first = next(path for path in TASKS if "include_vars" in path.read_text()).read_text()
    assert first.index("ansible_facts.os_family in [") < first.index("include_vars")
    hostile = {"os_family": "{{ lookup('pipe', 'echo run') }}"}
    templar = Templar(DataLoader(), variables={"ansible_facts": hostile})
    assert templar.template(trust_as_template("{{ ansible_facts.os_family }}")) == hostile["os_family"]


BLOB = "AAAAC3NzaC1lZDI1NTE5AAAAIHBYvQv0Fg0mJ3PL6vHqM0m5m4p4l5sVn3nXy0mZ0m0m"


@pytest.mark.parametrize(
    ("printed", "key"),
    [
        (f"ssh-ed25519 {BLOB} root@host-b", f"ssh-ed25519 {BLOB}"),
        (f"ssh-ed25519 {BLOB}", f"ssh-ed25519 {BLOB}"),
        (f"ecdsa-sha2-nistp256 {BLOB}= root", f"ecdsa-sha2-nistp256 {BLOB}="),
        (f"sk-ssh-ed25519@openssh.com {BLOB} x", f"sk-ssh-ed25519@openssh.com {BLOB}"),
        # Another machine prints it: it may not add options, nor a second line.
        (f'command="x" ssh-ed25519 {BLOB}', None),
        (f"ssh-ed25519 {BLOB} a\nssh-ed25519 {BLOB}", None),
        (f"ssh-ed25519 {BLOB},{BLOB}", None),
        ("ssh-ed25519", None),
        ("", None),
    ],
)
def test_the_key_that_another_host_prints(printed: str, key: str | None) -> None:
    assert read_public(printed) == key


def test_the_addresses_that_another_host_prints() -> None:
    printed = [
        "10.0.0.2",
        "fd00::2",
        "10.0.0.2",
        "127.0.1.1",
        "0.0.0.0",
        "::1",
        "*",
        "10.0.0.0/8",
        "host-b",
        "fe80::1%eth0",
    ]
    assert peer_addresses(printed) == ["10.0.0.2", "fd00::2"]
    line = authorized_line(f"ssh-ed25519 {BLOB}", peer_addresses(printed), mark_of("hpc", "host-b"))
    assert line == f'restrict,pty,from="10.0.0.2,fd00::2" ssh-ed25519 {BLOB} sms:hpc:host-b'
