"""What each page of the documents needs, so that its commands run in a lab."""

from __future__ import annotations

from tests.places import ROOT
from tests.real.blocks import MACHINE, Page

ADMINS = {r"\badmin-1\b": "host-a", r"\badmin-2\b": "host-b"}
STARTED = (("host-a", "sms -q start"),)
STOPPED = (("host-a", "sms -q stop || test $? = 3"),)
JOB = ("node1", "runuser -u alice -- srun hostname")
CAPTURED = (
    ("host-a", "setsid timeout 20 tcpdump -i br-prov -w sms.pcap >/dev/null 2>&1 </dev/null & sleep 2"),
    *(JOB, ("node2", "curl -s http://10.78.0.254/; logger one; logger two"), JOB, ("node3", "logger three"), JOB),
    ("host-a", "while pgrep -x tcpdump; do sleep 0.5; done; cp sms.pcap /var/tmp"),
)
STORE = "cp -a /var/lib/sms/images/. /var/lib/sms-lab/lab/host-a/images"
"""Host-a need not build again what has been built on the machine of the tests."""
DISKS = "for disk in /disk1 /disk2; do mkdir -p $disk; mount -t tmpfs -o size=24g tmpfs $disk; done"
CARD = "ip link add bond0.nmn0 up type veth peer nmn-peer; ip address add 10.252.1.4/17 dev bond0.nmn0"
FIELD = "python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])'"
NEWEST = """python3 -c 'import json, sys; print(json.load(sys.stdin)["snapshots"][-1]["number"])'"""
APPENDED = (
    ("host-b", "borg config /srv/sms.borg append_only 1"),
    ("host-a", "sms -q start; sms -q overlay snapshot; sms overlay push --to borg"),
    ("host-b", "borg config /srv/sms.borg append_only 0"),
)
TAKEN = (("host-a", "sms -q overlay snapshot; sms -q overlay snapshot"),)
FENCE = """python3 - <<'END'
import yaml
site = yaml.safe_load(open("/etc/sms/sms.yaml"))
for host in site["admin_hosts"]:
    host["fence"] = {"command": ["/bin/true"]}  # the step before has powered it off
open("/etc/sms/sms.yaml", "w").write(yaml.safe_dump(site))
END"""
ELSEWHERE = """python3 - <<'END'
import yaml
site = yaml.safe_load(open("/etc/sms/sms.yaml"))
site["snapshots"] = {
    "borg": {
        "repository": "ssh://root@10.78.0.12/srv/sms.borg",
        "passphrase": "keys/borg.pass",
        "ssh_key": "keys/id_ed25519",
        "known_hosts": "known_hosts",
    },
    "standby": ["host-b"],
}
open("/etc/sms/sms.yaml", "w").write(yaml.safe_dump(site))
END
(umask 077; echo "a passphrase" >/etc/sms/keys/borg.pass)"""


def failing(host: str, other: str) -> tuple[tuple[str, str], ...]:
    """A snapshot is on the other host, then this one fails."""
    return (
        (host, f"sms -q overlay snapshot; sms -q overlay push --to {other}"),
        (MACHINE, f"sms lab power {host} off"),
    )


def returns(host: str, other: str) -> tuple[tuple[str, str], ...]:
    """A host is back, and the services container migrates to it."""
    return (
        (MACHINE, f"sms lab power {host} on"),
        (other, f"sms -q migrate --force {host}"),
    )


FIRST_DAY = Page(
    "admin",
    hooks={
        # The images of the tests are signed with the lab's key, which another one replaces for a moment only.
        "test -e /etc/sms/keys/sign.pem": (("admin", "rm /etc/sms/keys/sign.pem /etc/sms/keys/sign.pub"),),
        "sms host prepare host-a": (
            ("admin", "test -s /etc/sms/keys/sign.pem"),
            (MACHINE, "cp /var/lib/sms-lab/.signing/sign.* /var/lib/sms-lab/lab/etc-sms/keys"),
        ),
    },
    names={"^sms build\\b": "sms lab exec admin -- sms build"},
    places={"sms lab ": MACHINE},
)
"""The page has a lab of its own."""
ROUTED = {
    "lab up --nodes 3": "lab up --nodes 3 --shape routed",
    r'"10\.77\.0\.\[101-102\]"': '"10.100.0.[101-102]"',
    "provisioning: {": "provisioning: {routes: [{network: 10.100.0.0/17, gateway: 10.77.0.254}], ",
}
"""What it says is different where nodes are behind a router."""
CLUSTER = {
    "build.md": Page("admin"),
    "site-file.md": Page("admin", names={"/etc/sms/sms.yaml": "/root/new/sms.yaml"}),
    "install.md": Page("admin", (("admin", "mkdir -p /usr/share/zsh/site-functions /etc/fish/completions"),)),
    "running.md": Page(
        "host-a", hooks={"sms status --watch": STARTED}, endless=("sms status --watch", "sms logs -f", "sms shell")
    ),
    "classify.md": Page("host-a", (*STARTED, JOB, *CAPTURED), endless=("tcpdump", "sms classify --live")),
    "survey.md": Page("host-a"),
    "snapshots.md": Page(
        "host-a",
        # What the page before has built from a classification lacks services of the site file.
        ((MACHINE, STORE), *STARTED, *TAKEN),
        names={r"\b41\b": "1", r"\b42\b": "2", "of-2": "of-42"},
    ),
    "services.md": Page("host-a", ((MACHINE, STORE),), names={"^pytest": f"cd {ROOT} && pytest"}),
    "hosts.md": Page(
        "admin",
        hooks={"ip link add": (("host-b", CARD),)},
        names={**ADMINS, "/opt/sms-venv/.*/_share/playbooks": f"{ROOT}/playbooks"},
        places={"ip link add": "host-b", "printf": "host-b", "script=": "host-b"},
    ),
    "migrate.md": Page("admin", STARTED),
    "upgrade.md": Page("host-a", (*STARTED, ("host-a", "cp /etc/sms/good.sif new.sif"), *TAKEN)),
    "overlay.md": Page("host-a", (*STOPPED, ("host-a", DISKS))),
    "snapshots-elsewhere.md": Page(
        "host-a",
        (
            *STOPPED,
            ("host-a", f"sms -q overlay mirror remove; {ELSEWHERE}"),
            *STARTED,
            ("host-a", f"{FIELD} cluster_uuid </var/lib/sms/overlays/lab.lease >uuid"),
            ("host-a", f"sms -q overlay snapshot --json | {FIELD} number >number"),
        ),
        hooks={
            "sms overlay pull --from admin-2": STOPPED,
            "sms overlay prune --at borg -n": APPENDED,
            # As the page says, when the repository is as it was before.
            "sms overlay drill": (("host-a", "rm -rf /var/lib/sms/borg/lab; sms overlay push --all-missing"),),
            "sms overlay identity new": STOPPED,
        },
        names={
            **ADMINS,
            r"\b42\b": "$(cat number)",
            ">/etc/sms/keys/borg.pass": ">/root/borg.pass",  # the repository has been made with that of the lab
            "backup.example.org": "10.78.0.12",
            "/media/usb": "/root",
            "5d6e71c0": "$(cat uuid)",
            '"2026-11-23 14:35:00 UTC"': "now",
        },
        places={"cd /srv/sms.borg": "host-b"},
        statuses={"sms overlay prune --at borg --vm": 2},
    ),
    "failover.md": Page(
        "admin",
        (("admin", FENCE), *STARTED, *failing("host-a", "host-b")),
        hooks={
            "sms failover host-b --i-have-fenced": (*returns("host-a", "host-b"), *failing("host-a", "host-b")),
            "sms guard": ((MACHINE, "sms lab power host-a on"),),  # where no guard runs: host-b serves
        },
        places={"sms guard": "host-a"},
        endless=("sms guard",),
    ),
}
"""Pages that are read in a lab of four nodes, in this order; each leaves to the next what it has done."""
VM_UP = (("admin", "sms -q start --force --host host-a; sms -q vm start --host host-a --wait 20m"),)
METAL = {
    **ADMINS,
    r"10\.0\.9\.0/24": "10.77.0.128/25",
    r"10\.0\.9\.7\b": "10.77.0.191",
    r"node\[(001-450|449-450)\]": "metal[1-2]",
    # One that is added by hand has no machine.
    r"node007 --mac 02\S+ --address \S+ --bmc \S+": "metal3 --mac 02:00:0a:4d:00:99 --address 10.77.0.153"
    " --bmc https://10.77.0.193",
    r"node007 --(mac \+\S+98|profile=)": r"metal3 --\1",
    r"\+02:00:0a:4d:00:98": "+02:00:0a:4d:00:9a",
    "node007": "metal1",
    "@rack7": "@compute",
    # Without KVM, beside other tests.
    "--wait 5m": "--wait 20m",
    # The answer to what it asks on a terminal.
    "--replace": "--replace --yes",
    "--token-file token": "--token-file token --ca /etc/sms/tls/ca.pem --name-pattern metal%d",
}
"""The nodes of the documents' examples are machines of the lab."""
XNAME = "x1000c0s0b0"
"""The name that the certificate of the lab's controllers has here."""
GATEWAY = """python - <<'END'
from appliance.lab import Layout
from appliance.operations.site.ca import ca_folder, issue_server
etc = Layout("lab", 0).etc
pair = issue_server(ca_folder(etc / "sms.yaml"), hostname="api-gw", addresses=["127.0.0.3"])
(etc / "gateway.pem").write_bytes(pair.certificate)
(etc / "keys/gateway.key").write_bytes(pair.key)
END"""
"""The certificate of an API gateway, made where the lab's files are."""
IDS = """python3 -c 'print({"nodes": [
    {"name": f"metal{one}", "nid": one, "xname": f"x1000c0s{one - 1}b0n0"} for one in range(1, 4)]})' >ids.yaml
sms node import ids.yaml"""
"""In a State Manager's inventory nodes have an xname and a NID."""
STATE_MANAGER = """echo 127.0.0.3 api-gw >>/etc/hosts
(umask 077; head -c 16 /dev/urandom | base64 >token)
cat >gateway.conf <<END
error_log stderr; pid /run/gateway.pid; events {}
http { access_log off; server {
  listen 127.0.0.3:443 ssl;
  ssl_certificate /etc/sms/gateway.pem; ssl_certificate_key /etc/sms/keys/gateway.key;
  location /apis/smd/ {
    if (\\$http_authorization != "Bearer $(cat token)") { return 401; }
    proxy_pass https://10.77.0.2:8443/;
    proxy_ssl_certificate /etc/sms/tls/admin.pem; proxy_ssl_certificate_key /etc/sms/tls/admin.key;
  }
} }
END
nginx -c /root/gateway.conf >/dev/null 2>&1"""
"""The VM's State Manager behind that gateway, which asks for a token as those of CSM and OpenCHAMI do."""
OTHER_IMAGE = (
    "sed -i 's/arguments: mitigations=off/& sms.patience=301/' /etc/sms/sms.yaml"
    "; sms -q image build compute; sms -q image push compute"
)
SECOND_KEY = """python3 - <<'END'
import yaml
site = yaml.safe_load(open("/etc/sms/sms.yaml"))
site["signing"] = {"private_key": "keys/sign-2.pem", "public_keys": ["keys/sign-2.pub", "keys/sign.pub"]}
open("/etc/sms/sms.yaml", "w").write(yaml.safe_dump(site))
END"""
"""As the page says above its commands."""
OWN_FOLDERS = """cd /var/lib/sms/vm/images
for one in $(find . -mindepth 1 -maxdepth 1 -type d); do cp -a $one own && rm -r $one && mv own $one; done"""
"""A machine of the tests shows the images of others, whose folders cannot be renamed there."""
MACHINES = {
    "lab.md": Page(
        MACHINE,
        ((MACHINE, "rm -f lab.pcap"),),  # of an earlier run on the same machine
        hooks={"sms lab capture --duration 60s": (("node1", "runuser -u alice -- sbatch --wrap 'sleep 5'"),)},
        names={r"\bPID\b": "$(pgrep -f -o 'sms-lab/lab/host-a/init.sh')"},
        endless=("sms lab capture --duration 10m", "sms lab capture --at"),
    ),
    # The lab of before had other nodes, and went away with its jobs.
    "node-images.md": Page("admin", VM_UP, hooks={"sms image rollback": (("admin", OTHER_IMAGE),)}),
    "nodes.md": Page(
        "host-a",
        # They are in the inventory since the page about the lab.
        (("host-a", f"sms node remove metal[1-2] --yes; echo 10.77.0.191 {XNAME} >>/etc/hosts"),),
        hooks={
            "sms node list @compute": (
                ("host-a", "for node in metal1 metal2; do sms node edit $node --group compute; done; sms files push"),
            ),
            "sms node import --from-smd": ((MACHINE, GATEWAY), ("host-a", f"{IDS}\n{STATE_MANAGER}")),
        },
        names=METAL,
    ),
    "files.md": Page(
        "host-a",
        # One has booted from a disk that it does not have, and would be waited for as long as it counts as online.
        (("host-a", "sms node boot metal1 --wait 20m"),),
        names={**METAL, "sms files push  ": "sms files push --wait 10m  "},
    ),
    "provision-api.md": Page("host-a"),
    # The site has another signing key and another authority from here on.
    "security.md": Page(
        "admin",
        (("admin", SECOND_KEY),),
        hooks={"sms vm build --force": (("admin", OWN_FOLDERS),)},
        names={"(vm start --host) admin-1": r"\1 host-a --wait 20m", **ADMINS},
    ),
    "vm.md": Page(
        "admin",
        hooks={
            "sms vm snapshot before-upgrade": (("host-b", "sms -q vm start --wait 20m"),),
            "sms overlay snapshot --vm": (("host-b", ELSEWHERE),),
            "sms vm restore latest --from borg": (("host-b", "sms overlay push --vm; sms -q vm stop"),),
            "sms vm restore $(cat number)": (
                ("host-b", "sms -q vm migrate host-a"),
                ("host-a", "sms -q overlay snapshot --vm; sms overlay push --vm --to host-b"),
                ("host-b", f"sms -q overlay list --vm --json | {NEWEST} >number"),
                (MACHINE, "sms lab power host-a off"),
            ),
        },
        names={r"\b42\b": "$(cat number)"},
        # Without --host: on the host that has the VM.
        places={"sms vm snapshot before-upgrade": "host-b", "sms overlay snapshot --vm": "host-b"},
    ),
}
"""Pages about the lab itself, and with the VM and the diskless machines that it has at the end of the first."""
PODMAN = """python3 - <<'END'
import yaml
site = yaml.safe_load(open("/etc/sms/sms.yaml"))
site["engines"]["podman"] = {"address": "10.77.0.11"}
open("/etc/sms/sms.yaml", "w").write(yaml.safe_dump(site))
END"""
PARTITION = """python3 - <<'END'
import yaml
site = yaml.safe_load(open("/etc/sms/sms.yaml"))
site["slurm"]["partitions"].append({"name": "second"})
open("/etc/sms/sms.yaml", "w").write(yaml.safe_dump(site))
END
sms -q deploy"""
TAKEN_OVER = "supervisorctl -c /lab/supervisord.conf stop slurmd munged"
EMPTY_STATE = "mv /var/lib/sms/nomad/lab /root/nomad-state && mkdir -m 0755 /var/lib/sms/nomad/lab"
STOPPED_HERE = (("host-a", "sms -q stop"),)
ENGINES = {
    "engines.md": Page(
        "host-a",
        ((MACHINE, STORE), ("host-a", PODMAN)),
        hooks={
            "sms deploy rollback": (("host-a", PARTITION),),
            "sms migrate --to nomad --dry-run": (
                ("host-a", "sms -q start"),
                *(("node1", TAKEN_OVER), ("node2", TAKEN_OVER)),
            ),
            # A move back has locked it: a reader who begins without the state has an empty folder.
            "sms deploy --engine nomad --dry-run": (*STOPPED_HERE, ("host-a", EMPTY_STATE)),
        },
    ),
}
"""Pages that are read in a lab with engines."""

DECIDED = """sed -i /etc/sms/sms.yaml \\
    -e 's/(CHANGE) //; s/- name: "admin"/- name: host-a/; s/address: "admin"/address: 10.78.0.11/'"""
"""What the page has to be edited, in the site file that the survey has written."""
LEGACY = {
    "adopt.md": Page(
        "admin",
        (("admin", "rm /etc/sms/sms.yaml"),),
        hooks={"sms config check": (("admin", "sms config check || test $? = 2"), ("admin", DECIDED))},
    )
}
"""Pages for a lab whose nodes use a legacy node."""
