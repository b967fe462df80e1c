"""Mistakes of an administrator, by groups of verbs: the exit status, the class of the error, and the command line.

The class is ``usage`` where the parser rejects the words, ``Problem`` where it is one of a line of the site file, else
that of the exception. Each has a hint. HERE is this machine, an admin host of sms.yaml and vm.yaml; host-b does not
answer; away.yaml has only hosts that do not answer. vm.yaml has a provisioning VM, which does not answer;
engines.yaml has addresses of other engines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """One mistake, and what `sms` reports of it."""

    status: int
    kind: str
    words: str


def read_table(text: str) -> list[Mistake]:
    """Return the mistakes of a table: status, class, command line."""
    rows = [line.split(None, 2) for line in text.strip().splitlines()]
    return [Mistake(int(status), kind, words) for status, kind, words in rows]


TABLES = {
    "site": """
2 ConfigError    init
2 ConfigError    init --profile openhpcc
2 ConfigError    init --profile lab -o none/sms.yaml
2 ConfigError    init --profile lab -o text/sms.yaml --parents
2 ConfigError    init --profile lab -o .
3 Refused        init --profile lab -o sms.yaml
2 usage          init lab
2 usage          config
2 usage          config chek
2 ConfigError    config check nope.yaml
2 ConfigError    config check .
2 Problem        config check empty
2 Problem        config check text
2 ConfigError    --site nope.yaml config show
2 usage          config show sms.yaml
3 Refused        key create
3 Refused        key ca create
2 usage          key ca revoke
2 ConfigError    key ca revoke node1
2 ConfigError    key ca revoke ""
3 VmOff          key ca revoke --site vm.yaml node1
2 ConfigError    --state text key show
""",
    "engines": """
2 usage          export
2 usage          export k8s -o new
2 usage          export podman -o new
2 usage          export kubernetes
2 usage          export nomad new
2 usage          export nomad -o new -n
2 usage          export nomad -o ""
2 ConfigError    --site nope.yaml export nomad -o new
2 ConfigError    export kubernetes -o new --check
2 ConfigError    export nomad -o new
2 ConfigError    export terraform -o new
2 ConfigError    export compose -o new
3 Refused        --site engines.yaml export quadlet -o text
3 Refused        --site engines.yaml export nomad -o text/below
2 usage          deploy --engine k8s
2 usage          deploy --engine kubernetes stopp
2 usage          deploy --engine nomad --timeout soon
2 usage          deploy drain
2 usage          deploy drain ""
2 usage          deploy status node1
2 ConfigError    deploy
2 ConfigError    deploy --engine kubernetes
2 ConfigError    deploy --engine kubernetes --dry-run
2 ConfigError    --site nope.yaml deploy --engine nomad
3 Refused        deploy status
3 Refused        deploy drain node1
3 Refused        deploy drain node1 --undo
3 Refused        deploy rollback
3 Refused        deploy rollback --dry-run
3 Refused        deploy stop
3 Refused        deploy stop --dry-run
3 Refused        deploy --dry-run drain node1
3 Refused        deploy drain node1 --undo --dry-run
""",
    "hosts": """
2 usage          host
2 usage          host prepar HERE
2 usage          host prepare
2 usage          host prepare HERE host-b
2 ConfigError    host prepare nowhere
1 Unreachable    host prepare host-b
1 Unreachable    host prepare host-b --dry-run
2 usage          host list host-b
2 ConfigError    --site nope.yaml host list
2 usage          doctor host-b
2 usage          doctor --host
2 usage          doctor --host ""
2 ConfigError    doctor --host nowhere
""",
    "image": """
3 Refused        build --locked
3 Refused        build --locked --lock nope.lock
2 ConfigError    build --from nope.yaml
2 ConfigError    build --from sms.yaml
2 ConfigError    build --from empty
2 usage          build --lock
2 usage          build compute
3 Refused        verify
3 Refused        verify nope.sif
3 Refused        verify .
2 usage          image lst
3 Refused        image sbom
3 Refused        image manifest ab
2 usage          image prune --keep 0
2 usage          image prune --keep many
2 usage          image push compute --keep=-3
2 ConfigError    image push compute
3 Refused        image push --site vm.yaml compute
2 ConfigError    image push --site vm.yaml comput
2 usage          image build
2 ConfigError    image build compute
2 ConfigError    image build --site vm.yaml comput
2 ConfigError    image rollback --site vm.yaml comput
2 ConfigError    image profiles
""",
    "services": """
2 usage          staus
2 ConfigError    --site nope.yaml status
2 ConfigError    start --host nowhere
2 usage          start --host
2 usage          start --host ""
2 usage          start --wait soon
2 usage          start --wait 0
3 Refused        start
3 Refused        start --image nope.sif
3 Refused        start --site away.yaml
1 Unreachable    start --host host-b
2 ConfigError    stop --host nowhere
2 usage          stop --host ""
3 Refused        stop --site away.yaml
1 Unreachable    stop --host host-b
3 Refused        apply
1 Unreachable    apply --host host-b
2 usage          restart
2 ConfigError    restart mung
3 Refused        restart munge
1 Unreachable    status --host host-b
3 Refused        status --site away.yaml
2 usage          status --jsn
2 ConfigError    logs mung
3 Refused        logs munge
2 usage          logs -n x
2 ConfigError    logs -f --json
2 ConfigError    exec
3 Refused        exec squeue
1 Unreachable    exec --host host-b squeue
3 Refused        shell
2 usage          shell bash
2 usage          guard --host host-b
3 Refused        guard --site away.yaml
""",
    "overlay": """
2 usage          overlay creat
2 usage          overlay create 4G
2 ConfigError    overlay create --host nowhere
1 Unreachable    overlay create --host host-b
3 Refused        overlay create --site away.yaml
2 usage          overlay grow
2 ConfigError    overlay grow 12
2 ConfigError    overlay grow 999T
3 Refused        overlay grow 1G
2 usage          overlay mirror create --on
2 usage          overlay mirror create --on disk1 --on disk2
3 Refused        overlay mirror create --on /nowhere/1 --on /nowhere/2
2 ConfigError    overlay mirror create --on /nowhere/1 --on /nowhere/2 --size tiny
3 Refused        overlay mirror scrub
3 Refused        overlay mirror rebuild
2 usage          overlay mirror rebuild --member 0
2 usage          overlay mirror rebuild --on disk3
3 Refused        overlay mirror adopt /nowhere
2 usage          overlay mirror adopt disk1
""",
    "snapshots": """
3 Refused        overlay snapshot
2 usage          overlay snapshot --method reflnk
2 usage          overlay snapshot --freeze-limit 1h
2 usage          overlay snapshot --scheduled --reason x
1 Unreachable    overlay snapshot --host host-b
2 ConfigError    overlay snapshot --vm
2 ConfigError    overlay list --vm
2 usage          overlay show
2 ConfigError    overlay show newest
3 Refused        overlay show 7
3 Refused        overlay diff 1 2
2 ConfigError    overlay diff a b
3 Refused        overlay verify 7
2 usage          overlay verify --all 7
3 Refused        overlay restore latest
2 ConfigError    overlay restore newest
2 usage          overlay restore 1 --as ""
2 ConfigError    overlay restore 1 --to /root/x
2 ConfigError    overlay restore 1 --path /etc --as x
2 ConfigError    overlay prune --uuid 1234
2 ConfigError    overlay prune --at borg --uuid 12
3 Refused        overlay prune --at borg
2 usage          overlay prune --at nowhere
2 usage          overlay prune x
2 usage          overlay prune 0
3 Refused        overlay prune 7
3 Refused        overlay push
2 ConfigError    overlay push --to nowhere
2 ConfigError    overlay push --all-missing 7
2 usage          overlay pull
2 ConfigError    overlay pull --from nowhere
3 Refused        overlay pull --from HERE
1 Unreachable    overlay pull --from host-b
2 usage          overlay schedule instal
2 ConfigError    overlay schedule install --every 7 --dry-run
2 usage          overlay schedule install --every often
3 Refused        overlay key export none/key
2 ConfigError    overlay identity 12
2 ConfigError    overlay identity --without-remote
""",
    "migration": """
2 usage          migrate
2 usage          migrate ""
2 usage          migrate host-b HERE
2 ConfigError    migrate nowhere
2 usage          migrate host-b --to nomad
2 usage          migrate --to terraform
2 ConfigError    migrate --to kubernetes
3 Refused        migrate host-b
3 Refused        migrate HERE
3 Refused        migrate --site away.yaml host-b
2 usage          failover
2 ConfigError    failover nowhere
3 Refused        failover HERE
3 Refused        failover HERE --dry-run
3 Refused        failover HERE --i-have-fenced --dry-run
1 Unreachable    failover host-b
2 usage          failover HERE --snapshot newest
2 usage          failover HERE --snapshot 7 --shared
2 usage          failover HERE --wait never
2 ConfigError    journal --host nowhere
2 usage          journal --host ""
2 usage          journal -n x
1 Unreachable    journal --host host-b
1 SmsError       journal --site away.yaml
""",
    "upgrade": """
3 Refused        rehearse
3 Refused        rehearse nope.sif
3 Refused        rehearse text
2 usage          rehearse a.sif b.sif
2 usage          rehearse --snapshot newest
2 usage          rehearse --nodes x
2 usage          rehearse --wait soon
2 usage          rehearse --host ""
2 ConfigError    rehearse --user nobody-here
2 ConfigError    rehearse --host nowhere
1 Unreachable    rehearse --host host-b
2 ConfigError    rehearse --down new.sif
2 usage          upgrade new.sif
3 Refused        upgrade
3 Refused        upgrade --undo
2 ConfigError    upgrade --with-snapshot
2 ConfigError    upgrade --undo --image text
2 ConfigError    upgrade --host nowhere
1 Unreachable    upgrade --host host-b
3 Refused        overlay drill
2 ConfigError    overlay drill --from nowhere
2 usage          overlay drill --scheduled --down
""",
    "vm": """
2 usage          vm strt
2 ConfigError    vm build
2 ConfigError    vm start
3 Refused        vm start --site vm.yaml
2 ConfigError    vm start --site vm.yaml --host nowhere
2 usage          vm start --host ""
1 Unreachable    vm start --site vm.yaml --host host-b
2 usage          vm start --wait soon
3 Refused        vm stop --site vm.yaml
2 usage          vm stop --host ""
2 ConfigError    vm status
3 Refused        vm console --site vm.yaml
2 ConfigError    vm exec --site vm.yaml
3 Refused        vm exec --site vm.yaml uptime
3 Refused        vm snapshot --site vm.yaml
2 usage          vm snapshot --prune 0
2 usage          vm snapshot --list --prune 1
2 usage          vm restore
3 Refused        vm restore --site vm.yaml nope
2 usage          vm migrate
2 ConfigError    vm migrate --site vm.yaml nowhere
1 Unreachable    vm migrate --site vm.yaml host-b
3 Refused        vm migrate --site vm.yaml HERE
""",
    "nodes": """
2 usage          node lst
2 ConfigError    node list
3 Refused        node list --site vm.yaml
2 usage          node add
2 ConfigError    node add --site vm.yaml node1
2 Problem        node add --site vm.yaml node1 --mac 02:00
2 Problem        node add --site vm.yaml node1 --mac 02:00:00:00:00:01 --profile nope
3 VmOff          node add --site vm.yaml node1 --mac 02:00:00:00:00:01
2 ConfigError    node edit --site vm.yaml node1
2 usage          node add node1 --group -x
2 usage          node remove
2 ConfigError    node power --site vm.yaml sideways node1
2 usage          node power on
3 Refused        node power --site vm.yaml on node1
2 usage          node boot node1 --target tape
2 usage          node boot node1 --mode Legcy
2 ConfigError    node discover 127.0.9.1
2 ConfigError    node discover --site vm.yaml 10.0.0.0/8
2 ConfigError    node discover --site vm.yaml 127.0.9.[5-1]
2 ConfigError    node discover --site vm.yaml 127.0.9.1 --name-pattern node
2 ConfigError    node discover --site vm.yaml 127.0.9.1 --first 1.2.3
2 usage          node discover 127.0.9.1 --port 99999
3 Refused        node discover --site vm.yaml 127.0.9.1
2 usage          node import
2 ConfigError    node import --site vm.yaml nope
2 ConfigError    node import --site vm.yaml text
2 ConfigError    node import --site vm.yaml --from-smd smd
2 ConfigError    node import --site vm.yaml --from-smd https://127.0.0.1:1 --token-file nope
1 SmsError       node import --site vm.yaml --from-smd https://127.0.0.1:1
2 ConfigError    node export
2 usage          files lst
2 ConfigError    files list
3 VmOff          files list --site vm.yaml
2 ConfigError    files show --site vm.yaml motd
2 ConfigError    files add motd text
2 ConfigError    files add /proc/x text
2 ConfigError    files add /etc/x nope
2 ConfigError    files add /etc/x .
2 ConfigError    files add /etc/x text --mode rw
2 ConfigError    files add /etc/x text --node n1 --all-nodes
3 Refused        files add --site vm.yaml /etc/slurm/slurm.conf text
2 ConfigError    files remove --site vm.yaml motd
2 usage          files remove /etc/x --nothing
2 usage          files report --path motd
2 usage          files rollback motd
2 usage          files rollback /etc/motd --version 0
3 Refused        files rollback --site vm.yaml /etc/munge/munge.key --force
3 VmOff          files push --site vm.yaml
2 usage          user sync
2 ConfigError    user sync --site vm.yaml --from nope
2 ConfigError    user sync --site vm.yaml --from text
2 usage          user sync --sssd --from text
2 ConfigError    user sync --site vm.yaml --sssd --shadow text
2 usage          user sync --sssd --most-removed 101
2 ConfigError    user sync --sssd --uid-min 3000 --uid-max 2000
2 ConfigError    user sync --sssd --uid-min 5
""",
    "adopt": """
2 usage          survey -x@y
2 usage          survey a b
2 usage          survey ""
2 ConfigError    survey host-b:0
2 ConfigError    survey root@host-b:99999
2 ConfigError    survey "host b"
2 ConfigError    survey --munge-key
2 ConfigError    survey --write text
2 ConfigError    survey --write none/site
3 Refused        survey --write .
2 ConfigError    survey --slurm-folder etc/slurm
2 ConfigError    survey --classification nope
2 ConfigError    survey --classification text
2 ConfigError    survey -o none/survey.json
1 Unreachable    survey 127.0.0.2:1
2 ConfigError    adopt
2 ConfigError    adopt sms-old
2 ConfigError    adopt --to host-a
2 ConfigError    adopt sms-old --undo
2 ConfigError    adopt --undo --to host-a
2 usage          adopt --undo --finish
2 usage          adopt --undo --dry-run
2 ConfigError    adopt "host b" --to host-a
2 ConfigError    adopt 127.0.0.2:1 --to nobody
3 Refused        adopt --undo
3 Refused        adopt --finish
""",
    "classify": """
2 ConfigError    classify
2 ConfigError    classify nope.pcap
1 SmsError       classify text
1 SmsError       classify empty
2 ConfigError    classify .
2 ConfigError    classify text --sms 300.1.1.1
2 ConfigError    classify text --node x
2 ConfigError    classify text --nodes 10.0.0.0/33
2 ConfigError    classify text --override nfs
2 ConfigError    classify text --compare nope
2 ConfigError    classify text --compare text
2 ConfigError    classify text --override nfs=sometimes
2 usage          classify text --format xml
2 ConfigError    classify text -o none/x.yaml
2 ConfigError    classify text --services nope
2 ConfigError    classify --live lo text
2 ConfigError    classify --duration 5s
2 usage          classify --live lo --duration soon
1 SmsError       classify --live nowhere0
""",
    "lab": """
2 usage          lab
2 usage          lab upp
2 usage          lab up --nodes x
2 ConfigError    lab up --name t-none --nodes 1000
2 ConfigError    lab up --name t-none --nodes=-1
2 ConfigError    lab up --name t-none --metal 9
2 ConfigError    lab up --name A/B
2 ConfigError    lab demo --name t-none --nodes 0
2 usage          lab up --engine docker
2 ConfigError    lab up --name t-none --engine nomad --shape routed
2 ConfigError    lab demo --name t-none --engine nomad --nodes 1
2 ConfigError    lab demo --name t-none --legacy --nodes 1
2 ConfigError    lab demo --name t-none --legacy --metal 1
3 Refused        lab status --name t-none
2 ConfigError    lab status --name A/B
3 Refused        lab exec --name t-none node1 true
2 usage          lab exec
3 Refused        lab capture --name t-none
3 Refused        lab power --name t-none host-a off
2 usage          lab power --name t-none host-a of
2 usage          lab power --name t-none
2 usage          lab capture --duration soon
2 ConfigError    lab capture -o - --json
2 ConfigError    lab down --name ../x
2 usage          lab down node1
2 usage          completion csh
2 usage          help nonsense
2 usage          help config chek
2 usage          version now
""",
}
"""By subject, as in `appliance/cli`."""

EDITS = [
    ("cluster: lab", "clustr: lab"),
    ("cluster: lab", "cluster: Lab 1"),
    ("cluster: lab", ""),
    ("hostname: sms-services", "hostname: sms_services!"),
    ("address: 10.77.0.1/24", "address: 10.77.0.1/33"),
    ("address: 10.77.0.1/24", "address: fd00::1/64"),
    ("address: 10.77.0.1/24", "address: 10.77.0.1"),
    ("bridge: br-prov", "bridge: a-name-that-is-too-long"),
    ("bridge: br-prov", "bridge: br-pub"),
    ('mac: "02:00:0a:4d:00:01"', 'mac: "03:00:0a:4d:00:01"'),
    ("gateway: 10.78.0.254", "gateway: 10.79.0.254"),
    ("services: [slurmctld,", "services: [slurmctl,"),
    ("os: debian-12", "os: ubuntu-22.04"),
    ("name: node[1-4]", "name: node[4-1]"),
    ("address: 10.77.0.[101-104]", "address: 10.77.0.[101-103]"),
    ("nodes: ALL", "nodes: nope"),
    ("cpus: 1", "cpus: many"),
    ('max_time: "1:00:00"', "max_time: soon"),
    ("size_mb: 512", "size_mb: 1"),
    ("relay: 10.78.0.254:25", "relay: 10.78.0.254:99999"),
    ("ntp: [10.78.0.254]", "ntp: [10.78.0.254, '']"),
]
"""What is replaced in the site file, by what: each is a problem of one line, which `sms config check` names."""

RUNNING = """
3 host-a  start --host host-b
3 host-a  start --image nope.sif
3 host-a  start --image /etc/sms/sms.yaml
3 host-b  start
3 admin   start --host host-b --dry-run
2 host-a  restart mung
2 host-a  logs mung
3 host-b  exec squeue
3 host-b  restart munge
3 host-b  apply
3 host-b  logs munge
3 host-b  overlay snapshot
3 host-b  overlay grow 1G
3 host-a  overlay grow 1M
2 host-a  overlay grow 999T
2 host-a  overlay create --size 1G
3 host-a  overlay restore latest
3 host-a  overlay restore latest --path /etc/nothing-there --dry-run
3 host-a  overlay restore 99
3 host-a  overlay restore 99 --as other
3 host-a  overlay show 99
3 host-a  overlay diff 1 99
3 host-a  overlay verify 99
3 host-a  overlay prune 1
3 host-a  overlay prune 99
3 host-a  overlay push
3 host-a  overlay pull --from host-a
3 host-a  overlay mirror create --on /tmp/a --on /tmp/b
3 host-a  overlay mirror scrub
3 host-a  overlay identity 00000000-0000-0000-0000-000000000000
3 host-a  migrate host-a
2 host-a  migrate nowhere
3 host-a  failover host-b
3 host-a  failover host-a
3 host-b  failover host-a
3 host-b  failover host-a --dry-run
3 host-a  upgrade --image nope.sif
3 host-a  upgrade --undo
3 host-a  upgrade --undo --with-snapshot
3 host-a  rehearse nope.sif
3 host-a  rehearse --snapshot 99
3 host-a  key create
3 host-a  guard
2 host-a  vm start
2 host-a  node list
"""
"""In the lab, while the services container runs on host-a with one snapshot: exit status, host, command line."""
