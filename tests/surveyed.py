"""File trees of five kinds of management nodes, with what their programs print, and the survey script that runs there.

The programs are small ones that print what the real ones print: only the kernel of a whole cluster has its networks.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.places import ROOT

SCRIPT = ROOT / "definitions" / "scripts" / "survey"
PASSWORD = "s3cret-Of-The-Database"
LO = (
    "1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue state UNKNOWN mode DEFAULT group default qlen 1000\\"
    "    link/loopback 00:00:00:00:00:00 brd 00:00:00:00:00:00 promiscuity 0"
)
ETHER = (
    "{n}: {name}: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu {mtu} qdisc mq {more}state UP mode DEFAULT group default "
    "qlen 1000\\    link/ether {mac} brd ff:ff:ff:ff:ff:ff promiscuity 0 minmtu 68 maxmtu 9000 {kind}addrgenmode eui64"
)
ADDRESS = "{n}: {name}    inet {address} brd + scope global {name}\\       valid_lft forever preferred_lft forever"


def ether(n: int, name: str, mac: str, *, mtu: int = 1500, more: str = "", kind: str = "") -> str:
    return ETHER.format(n=n, name=name, mac=mac, mtu=mtu, more=more, kind=kind)


def addresses(*given: tuple[int, str, str]) -> str:
    lines = [ADDRESS.format(n=n, name=name, address=address) for n, name, address in given]
    own = "1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever"
    return "\n".join([own, *lines]) + "\n"


TWO = "\n".join([LO, ether(2, "eth0", "3c:ec:ef:01:02:03"), ether(3, "eth1", "3c:ec:ef:01:02:04")]) + "\n"
BONDED = (
    "\n".join(
        [
            LO,
            ether(2, "eno1", "3c:ec:ef:0a:00:01"),
            ether(3, "ens1f0", "3c:ec:ef:0a:00:02", mtu=9000, more="master bond0 ", kind="bond_slave state ACTIVE "),
            ether(4, "ens1f1", "3c:ec:ef:0a:00:02", mtu=9000, more="master bond0 ", kind="bond_slave state ACTIVE "),
            ether(5, "bond0", "3c:ec:ef:0a:00:02", mtu=9000, kind="bond mode 802.3ad miimon 100 "),
            ether(
                6, "bond0.100@bond0", "3c:ec:ef:0a:00:02", mtu=9000, kind="vlan protocol 802.1Q id 100 <REORDER_HDR> "
            ),
        ]
    )
    + "\n"
)
SLURM_SOCKETS = """\
udp UNCONN 0 0 0.0.0.0:123 0.0.0.0:* users:(("chronyd",pid=803,fd=7))
udp UNCONN 0 0 0.0.0.0:514 0.0.0.0:* users:(("rsyslogd",pid=804,fd=5))
tcp LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=805,fd=3))
tcp LISTEN 0 100 0.0.0.0:25 0.0.0.0:* users:(("master",pid=806,fd=13))
tcp LISTEN 0 4096 0.0.0.0:6817 0.0.0.0:* users:(("slurmctld",pid=801,fd=6))
"""
DATABASE_SOCKETS = """\
tcp LISTEN 0 4096 0.0.0.0:6819 0.0.0.0:* users:(("slurmdbd",pid=807,fd=6))
tcp LISTEN 0 80 127.0.0.1:3306 0.0.0.0:* users:(("mariadbd",pid=808,fd=20))
"""
PROCESSES = {
    801: ("slurmctld", "slurmctld.service"),
    802: ("munged", "munge.service"),
    803: ("chronyd", "chronyd.service"),
    804: ("rsyslogd", "rsyslog.service"),
    805: ("sshd", "sshd.service"),
    806: ("master", "postfix.service"),
    809: ("crond", "crond.service"),
}
PASSWD = """\
root:x:0:0:root:/root:/bin/bash
slurm:x:{slurm}:{slurm}:Slurm:/:/sbin/nologin
munge:x:{munge}:{munge}:Munge:/:/sbin/nologin
alice:$6$notahash:5001:5001:Alice:/home/alice:/bin/bash
bob:x:5002:5002:Bob:/home/bob:/bin/bash
nobody:x:65534:65534:nobody:/:/sbin/nologin
"""
GROUP = "root:x:0:\nslurm:x:{slurm}:\nmunge:x:{munge}:\nalice:x:5001:\nbob:x:5002:\nphysics:x:6001:alice,bob\n"
SLURMDBD = f"""\
AuthType=auth/munge
DbdHost=localhost
SlurmUser=slurm
StorageType=accounting_storage/mysql
StoragePass={PASSWORD}
StorageUser=slurm
StorageLoc=slurm_acct_db
"""


@dataclass
class Tree:
    """A file system and what programs print: ``build`` writes both below a folder."""

    files: dict[str, str | bytes]
    programs: dict[str, str] = field(default_factory=dict)
    processes: dict[int, tuple[str, str]] = field(default_factory=lambda: dict(PROCESSES))

    def build(self, folder: Path) -> Path:
        root, programs = folder / "root", folder / "programs"
        files = {"/proc/sys/net/ipv4/ip_forward": "1\n", "/etc/munge/munge.key": b"k" * 128, **self.files}
        for number, (name, unit) in self.processes.items():
            files[f"/proc/{number}/comm"] = f"{name}\n"
            files[f"/proc/{number}/cgroup"] = f"0::/system.slice/{unit}\n"
        for path, text in files.items():
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text if isinstance(text, bytes) else text.encode())
        programs.mkdir(parents=True)
        printed = {"uname": "x86_64\n", "id": "0\n", "tabdump": "", "wwsh": "", "slurmctld": "", **self.programs}
        for name in ("ip", "nft", "iptables-save", "ss", "du", *printed):
            text = printed.get(name, "")
            (programs / name).write_text(text if text.startswith("#!") else f"#!/bin/sh\ncat <<'END'\n{text}END\n")
            (programs / name).chmod(0o755)
        return root


def ip(links: str, given: str, routes: str) -> str:
    """The program ip."""
    return (
        "#!/bin/sh\ncase $* in\n"
        f"*link*) cat <<'END'\n{links}END\n;;\n*addr*) cat <<'END'\n{given}END\n;;\n"
        f"*route*) cat <<'END'\n{routes}END\n;;\nesac\n"
    )


def run_script(root: Path, *, shell: str = "dash", seconds: int = 60, folder: str = "") -> bytes:
    """Run the script by the standard input of a shell, as `sms survey` does."""
    programs = root.parent / "programs"
    path = f"{programs}:{os.environ['PATH']}" if programs.is_dir() else os.environ["PATH"]
    done = subprocess.run(
        [shell, "-s", "--", str(root), str(seconds), folder],
        input=SCRIPT.read_bytes(),
        stdout=subprocess.PIPE,
        env={"PATH": path},
        check=True,
        timeout=120,
    )
    return done.stdout


def os_release(name: str, id: str, version: str) -> str:
    return f'NAME="{name}"\nPRETTY_NAME="{name} {version}"\nID="{id}"\nVERSION_ID="{version}"\n'


def debian() -> Tree:
    """Debian 12 by packages: chrony, rsyslog that receives, postfix with a relay, dnsmasq, an NFS export, nft."""
    conf = """\
ClusterName=alpha
SlurmctldHost=sms(10.50.0.1)
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
ReturnToService=1
Prolog=/etc/slurm/prolog.sh
NodeName=DEFAULT RealMemory=64000 Sockets=2 CoresPerSocket=8 ThreadsPerCore=1
NodeName=n[001-004] NodeAddr=10.50.1.[1-4]
NodeName=g1 NodeAddr=10.50.1.9 RealMemory=128000 Gres=gpu:4
PartitionName=batch Nodes=n[001-004] Default=YES MaxTime=2-00:00:00
PartitionName=gpu Nodes=g1 MaxTime=INFINITE
"""
    nft = """\
table ip nat {
	chain post {
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr 10.50.0.0/16 oifname "eth0" masquerade
	}
}
"""
    given = addresses((2, "eth0", "198.18.0.10/24"), (3, "eth1", "10.50.0.1/16"))
    routes = "default via 198.18.0.1 dev eth0\n10.50.0.0/16 dev eth1 proto kernel scope link src 10.50.0.1\n"
    sockets = (
        SLURM_SOCKETS
        + DATABASE_SOCKETS
        + 'udp UNCONN 0 0 0.0.0.0:67 0.0.0.0:* users:(("dnsmasq",pid=810,fd=4))\n'
        + "tcp LISTEN 0 64 0.0.0.0:2049 0.0.0.0:*\n"
        + 'tcp LISTEN 0 5 0.0.0.0:4444 0.0.0.0:* users:(("licensed",pid=811,fd=4))\n'
    )
    return Tree(
        files={
            "/etc/os-release": os_release("Debian GNU/Linux", "debian", "12"),
            "/etc/hostname": "sms\n",
            "/proc/sys/kernel/osrelease": "6.1.0-44-amd64\n",
            "/etc/resolv.conf": "search example.org\nnameserver 198.18.0.53\n",
            "/etc/slurm/slurm.conf": conf,
            "/etc/slurm/slurmdbd.conf": SLURMDBD,
            "/etc/slurm/gres.conf": "NodeName=g1 Name=gpu File=/dev/nvidia[0-3]\n",
            "/etc/slurm/cgroup.conf": "ConstrainCores=yes\n",
            "/etc/slurm/prolog.sh": "#!/bin/sh\nexit 0\n",
            "/var/lib/slurm/slurmctld/clustername": "alpha\n",
            "/var/lib/slurm/slurmctld/job_state": b"\0\0\0\x11PROTOCOL_VERSION\0\x27\0rest",
            "/var/lib/mysql/ibdata1": b"x",
            "/etc/passwd": PASSWD.format(slurm=64030, munge=108),
            "/etc/group": GROUP.format(slurm=64030, munge=114),
            "/etc/chrony/chrony.conf": "pool 2.debian.pool.ntp.org iburst\nallow 10.50.0.0/16\n",
            "/etc/chrony/sources.d/site.sources": "server ntp1.example.org\n",
            "/etc/rsyslog.conf": '$UDPServerRun 514\ninput(type="imtcp" port="514")\n*.* @@loghost.example.org:514\n'
            f'action(type="ommysql" db="log" uid="log" pwd="{PASSWORD}")\n',
            "/etc/postfix/main.cf": "relayhost = [mail.example.org]:25\nmydomain = example.org\n",
            "/etc/aliases": "root: operators@example.org\n",
            "/etc/exports": "/home 10.50.0.0/16(rw,no_root_squash)\n/opt/ohpc/pub 10.50.0.0/16(ro)\n",
            "/etc/dnsmasq.conf": "dhcp-range=10.50.200.1,10.50.200.99\ndhcp-host=3c:ec:ef:66:00:01,10.50.1.1,n001\n",
            "/etc/crontab": "17 * * * * root cd / && run-parts --report /etc/cron.hourly\n"
            "25 6 * * * root test -x /usr/sbin/anacron || { cd / && run-parts --report /etc/cron.daily; }\n",
            "/etc/default/tftpd-hpa": 'TFTP_DIRECTORY="/srv/tftp"\n',
            "/etc/cron.d/dump": f"5 3 * * * root /usr/local/sbin/dump-db --password={PASSWORD}\n",
        },
        programs={
            "ip": ip(TWO, given, routes),
            "nft": nft,
            "ss": sockets,
            "slurmctld": "slurm-wlm 22.05.8\n",
            "du": '#!/bin/sh\necho "2048\t$2"\n',
        },
        processes={
            **PROCESSES,
            807: ("slurmdbd", "slurmdbd.service"),
            808: ("mariadbd", "mariadb.service"),
            810: ("dnsmasq", "dnsmasq.service"),
            811: ("licensed", "licensed.service"),
        },
    )


def openhpc() -> Tree:
    """Rocky Linux 9 with the paths of OpenHPC 3: included files, a bond with a VLAN, iptables, Warewulf 3."""
    conf = """\
ClusterName=ohpc
ControlMachine=sms-ohpc
ControlAddr=10.51.0.1
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmctldPort=6817
EpilogSlurmctld=/opt/site/epilog-ctld
Include nodes.conf
Include /etc/slurm/partitions.conf
JobCompType=jobcomp/filetxt
"""
    given = addresses((2, "eno1", "198.18.1.10/24"), (6, "bond0.100", "10.51.0.1/16"), (6, "bond0.100", "10.51.0.2/16"))
    routes = "default via 198.18.1.1 dev eno1 proto static\n10.61.0.0/16 via 10.51.0.254 dev bond0.100\n"
    nat = """\
*nat
-A PREROUTING -i eno1 -p tcp -m tcp --dport 8022 -j DNAT --to-destination 10.51.1.1:22
-A POSTROUTING -s 10.51.0.0/16 -o eno1 -j MASQUERADE
COMMIT
*filter
-A INPUT -i eno1 -p tcp -m tcp --dport 22 -j ACCEPT
COMMIT
"""
    return Tree(
        files={
            "/etc/os-release": os_release("Rocky Linux", "rocky", "9.4"),
            "/etc/hostname": "sms-ohpc\n",
            "/proc/sys/kernel/osrelease": "5.14.0-427.el9.x86_64\n",
            "/etc/slurm/slurm.conf": conf,
            "/etc/slurm/nodes.conf": "NodeName=c[1-450] \\\n  CPUs=48 RealMemory=192000\n",
            "/etc/slurm/partitions.conf": "PartitionName=normal Nodes=ALL Default=YES MaxTime=24:00:00 "
            "OverSubscribe=EXCLUSIVE\n",
            "/etc/slurm/cgroup.conf": "ConstrainRAMSpace=yes\n",
            "/opt/site/epilog-ctld": "#!/bin/sh\nexit 0\n",
            "/etc/dhcp/dhcpd.conf": f"key omapi {{ secret {PASSWORD}; }}\n"
            "host c1 { hardware ethernet 3C:EC:EF:33:00:01; fixed-address 10.51.1.1; }\n",
            "/var/spool/slurmctld/clustername": "ohpc\n",
            "/etc/passwd": PASSWD.format(slurm=202, munge=993),
            "/etc/group": GROUP.format(slurm=202, munge=990),
            "/etc/chrony.conf": "server ntp1.example.org iburst\n",
            "/etc/rsyslog.conf": 'action(type="omfwd" target="198.18.1.99" port="514" protocol="udp")\n',
            "/etc/postfix/main.cf": "relayhost =\n",
            "/etc/warewulf/provision.conf": "network device = bond0.100\n",
            "/var/spool/cron/root": "*/5 * * * * /usr/bin/wwsh file sync\n",
        },
        programs={
            "ip": ip(BONDED, given, routes),
            "iptables-save": nat,
            "ss": SLURM_SOCKETS,
            "slurmctld": "slurm 23.11.10\n",
            "wwsh": "NAME GROUPS IPADDR HWADDR\n====\nc1 UNDEF 10.51.1.1 3c:ec:ef:33:00:01\n"
            "c2 UNDEF 10.51.1.2 3c:ec:ef:33:00:02\n",
            "du": '#!/bin/sh\necho "5242880\t$2"\n',
        },
    )


def leap() -> Tree:
    """openSUSE Leap 15: chrony.d, sendmail, a directory service, one network only, no NAT."""
    conf = """\
# written by hand
clustername=leap
slurmctldhost=mgmt
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm
MaxNodeCount=200
NodeName=nid[0001-0008] Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=2 RealMemory=256000
NodeSet=big Nodes=nid[0001-0004]
PartitionName=all Nodes=ALL Default=yes
PartitionName=big Nodes=big
"""
    given = addresses((2, "eth0", "10.52.0.1/24"))
    return Tree(
        files={
            "/usr/lib/os-release": os_release("openSUSE Leap", "opensuse-leap", "15.6"),
            "/etc/ganesha/ganesha.conf": "EXPORT {\n  Export_Id = 1;\n  Path = /srv/soft;\n  Pseudo = /soft;\n}\n",
            "/etc/hostname": "mgmt\n",
            "/proc/sys/kernel/osrelease": "6.4.0-default\n",
            "/proc/sys/net/ipv4/ip_forward": "0\n",
            "/etc/slurm/slurm.conf": conf,
            "/etc/passwd": PASSWD.format(slurm=450, munge=451),
            "/etc/group": GROUP.format(slurm=450, munge=451),
            "/etc/chrony.d/pool.conf": "pool de.pool.ntp.org iburst\n",
            "/etc/rsyslog.d/remote.conf": "*.* @loghost:514\n",
            "/etc/mail/sendmail.mc": "define(`SMART_HOST', `relay.example.org')\n",
            "/etc/sssd/sssd.conf": f"ldap_default_authtok = {PASSWORD}\n",
        },
        programs={"ip": ip("\n".join(TWO.split("\n")[:2]) + "\n", given, ""), "ss": SLURM_SOCKETS},
    )


def warewulf() -> Tree:
    """AlmaLinux 9 with the node table of Warewulf 4."""
    tree = openhpc()
    del tree.files["/etc/warewulf/provision.conf"]
    tree.programs.pop("wwsh")
    tree.files["/etc/os-release"] = os_release("AlmaLinux", "almalinux", "9.4")
    tree.files["/etc/warewulf/warewulf.conf"] = "ipaddr: 10.51.0.1\n"
    tree.files["/etc/warewulf/nodes.conf"] = f"""\
WW_INTERNAL: 45
nodeprofiles:
  default:
    container name: rocky-9
    ipmi:
      username: admin
      password: {PASSWORD}
nodes:
  c1:
    profiles:
    - default
    ipmi:
      ipaddr: 10.53.1.1
    network devices:
      default:
        hwaddr: 3C:EC:EF:44:00:01
        ipaddr: 10.51.1.1
  c2:
    profiles:
    - default
    - gpu
    network devices:
      default:
        hwaddr: 3c:ec:ef:44:00:02
        ipaddr: 10.51.1.2
"""
    tree.processes[820] = ("wwctl", "warewulfd.service")
    return tree


def xcat() -> Tree:
    """RHEL 9 with the tables of xCAT, and Slurm in /opt/slurm."""
    tree = debian()
    moved = {path: text for path, text in tree.files.items() if path.startswith("/etc/slurm/")}
    for path in moved:
        del tree.files[path]
    tree.files |= {path.replace("/etc/slurm", "/opt/slurm/etc"): text for path, text in moved.items()}
    conf = tree.files["/opt/slurm/etc/slurm.conf"]
    assert isinstance(conf, str)
    tree.files["/opt/slurm/etc/slurm.conf"] = conf.replace("/etc/slurm/prolog.sh", "/opt/slurm/etc/prolog.sh")
    tree.files["/etc/os-release"] = os_release("Red Hat Enterprise Linux", "rhel", "9.4")
    tree.files["/opt/xcat/version"] = "2.16.5\n"
    tree.programs["tabdump"] = f"""#!/bin/sh
case $1 in
nodelist)
    echo '#node,groups,status,statustime,appstatus,appstatustime,primarysn,hidden,comments,disable'
    echo '"n001","compute,all","booted",,,,,,,'
    echo '"n002","compute,all",,,,,,,,' ;;
hosts)
    echo '#node,ip,hostnames,otherinterfaces,comments,disable'
    echo '"n001","10.50.1.1",,,,'
    echo '"n002","10.50.1.2",,,,' ;;
mac) echo '#node,interface,mac,comments,disable'; echo '"n001","eth0","3c:ec:ef:55:00:01|3c:ec:ef:55:00:11!n001-b",,' ;;
ipmi) echo '#node,bmc,bmcport,taggedvlan,bmcid,username,password,comments,disable'
    echo '"n001","10.54.1.1",,,,"root","{PASSWORD}",,' ;;
esac
"""
    return tree


KINDS = {"debian": debian, "openhpc": openhpc, "leap": leap, "warewulf": warewulf, "xcat": xcat}
