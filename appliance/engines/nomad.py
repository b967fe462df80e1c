"""Jobs of Nomad for a deployment: services once, on the client that has their state; munge and slurmd on each node.

Every task of a service runs a program of the signed image with Apptainer (raw_exec), after its signature was verified.
One task of each group assembles /etc; ``sms-run`` then waits for what each service needs, at every start.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from appliance.catalog import Service
from appliance.catalog.model import Capability
from appliance.config.model import Site
from appliance.engines.config import Network, placed_files, unit_argv
from appliance.engines.hcl import Block, Raw, Value
from appliance.engines.model import Deployment, Ids, SecretFile, Unit, Workload
from appliance.errors import ConfigError
from appliance.plan.machine import Places
from appliance.plan.overlay.seed import secrets_of
from appliance.plan.render import Templates
from appliance.plan.services.confinement import (
    HIDDEN_FILES,
    HIDDEN_FOLDERS,
    Confinement,
    capabilities_for,
    number_of,
)
from appliance.plan.services.jobsync import stop_limits, task_json
from appliance.plan.services.runs import HOST, run_text
from appliance.share import share
from appliance.units import read_duration

PRIORITY = 95
"""Of document 000: before all that is not needed to run jobs."""
ABOVE, BY_NAME = 10_000, range(9_000, 9_900)
"""Ports of the checks: so far above the first port of a workload; without one, in this range by its name."""
LOOPBACK = "127.0.0.1"
"""Where they are served: the client checks itself, and no other machine can keep them busy."""
HOLDER = "SMS_HOLDER=${NOMAD_ALLOC_ID} on ${node.unique.name}"
"""In the environment of ``sms-run``: who has a lease."""
ALLOC, TASK, SECRETS = "${NOMAD_ALLOC_DIR}/data", "${NOMAD_TASK_DIR}", "${NOMAD_SECRETS_DIR}"
CONFINED = "/mnt/confined.sh"
"""Where ``definitions/scripts/confined`` is in the container of a task."""
CHECK = ("/bin/sh", "-eu", CONFINED)
"""First words of a task's program; then come the three arguments of that script."""
LAST_PORT = 65535
NODE_JOB, SLURMD_PORT = "slurm-cn", 6818
"""Job of document 000 on compute nodes, and its port (SlurmdPort of slurm.conf)."""
VERIFIED = f"""\
# STATE IMAGE FOLDER... -- ARGUMENT...: run a program of the image, if one of the keys has signed it.
state=$1 image=$2
shift 2
[ -z "$state" ] || cd "$state"
while [ "$1" != -- ]; do
  mkdir -p "$1"
  shift
done
shift
for key in "$NOMAD_TASK_DIR"/keys/*.pub; do
  if apptainer verify --all --key "$key" "$image" >/dev/null 2>&1; then
    exec {run_text('"$NOMAD_TASK_DIR/run-image.sh"')} "$@"
  fi
done
echo "$image is not signed with a key of the site: it is not started" >&2
exit 1
"""
"""Shell, for /bin/sh -eu. The folder of the state has to exist: an empty one would be a cluster without jobs."""


@dataclass(frozen=True)
class Options:
    """What of the site's settings the jobs depend on.

    Attributes:
        host: client that has the state.
        address: of that client, which nodes use.
        keys: public keys, one of which has signed the image.
        image: path of the SIF on that client.
        state: folder of the state there.
        dns: name servers; one that refuses at once is better than one that does not answer, as unmunge asks for names.
    """

    namespace: str
    datacenters: tuple[str, ...]
    host: str
    address: str
    pool: str
    compute_pool: str
    image: str
    state: str
    keys: tuple[str, ...]
    dns: tuple[str, ...]


def read_options(site: Site, keys: Sequence[str], image: str = "") -> Options:
    """Return the options of a site.

    Args:
        image: path of the current image on admin hosts, without a link; empty: that of the link.

    Raises:
        ConfigError: they are contradictory, or a path is one that Nomad or Apptainer would change.
    """
    given = site.engines.nomad
    if site.signing.pgp_fingerprint:
        raise ConfigError("tasks verify the image with PEM keys only", hint="remove `signing.pgp_fingerprint`")
    if given.address is None:
        raise ConfigError(
            "`engines.nomad.address` is missing: the address at which nodes reach that client",
            hint="it cannot be the container's, which keeps its address for what stays in it",
        )
    options = Options(
        given.namespace,
        given.datacenters,
        given.host or site.admin_hosts[0].name,
        str(given.address),
        given.pool,
        given.compute_pool,
        str(given.image or image or Places(site).current),
        str(given.state or f"{site.state}/nomad/{site.cluster}"),
        tuple(keys),
        tuple(str(server) for server in site.networks.dns) or ("127.0.0.1",),
    )
    for path in (options.image, options.state):
        _check_path(path)
    return options


def _check_path(path: str) -> None:
    if any(letter in path for letter in ",:$%"):
        raise ConfigError(f"{path} has a character with a meaning to Nomad or Apptainer", hint="use another path")


def network_of(deployment: Deployment, options: Options) -> Network:
    """Return how the tasks are reached: they have the network of their client."""
    hosts = {one.name: options.host for one in deployment.workloads}
    return Network(options.address, hosts, {}, shared=True)


def job_name(one: Workload) -> str:
    """Return the name of a workload's job; document 000 calls the controller's slurm-ctl."""
    return "slurm-ctl" if one.main.service.role == "controller" else one.name


def service_jobs(deployment: Deployment, options: Options) -> dict[str, Block]:
    """Return the jobs of the services, by name."""
    jobs = {}
    for path in (path for one in deployment.workloads for path in (*one.state, *one.scratch)):
        _check_path(path)
    ports = probe_ports(deployment.workloads)
    for one in deployment.workloads:
        group = _group(deployment, one, options, ports[one.name])
        jobs[job_name(one)] = _job(job_name(one), "service", options.pool, options, group)
    return jobs


def probe_ports(workloads: Sequence[Workload]) -> dict[str, int]:
    """Return the port of the checks by workload. It does not depend on which other services there are."""
    taken = {port.number for one in workloads for port in one.ports}
    found: dict[str, int] = {}
    for one in workloads:
        first = one.ports[0].number if one.ports else 0
        port = first + ABOVE if 0 < first <= LAST_PORT - ABOVE else BY_NAME[crc32(one.name.encode()) % len(BY_NAME)]
        while port in taken:
            port += 1
        taken.add(port)
        found[one.name] = port
    return found


def _job(name: str, kind: str, pool: str, options: Options, group: Block) -> Block:
    fields: dict[str, Value] = {
        "type": kind,
        "namespace": options.namespace,
        "datacenters": list(options.datacenters),
        "node_pool": pool,
        "priority": PRIORITY,
    }
    return Block("job", (name,), fields, (group,))


USUAL: Mapping[str, Value] = {"healthy_deadline": "5m", "progress_deadline": "10m", "auto_revert": True}
LONG: Mapping[str, Value] = {"healthy_deadline": "168h", "progress_deadline": "169h", "auto_revert": False}
"""A deployment that has failed ends no task; but a job that is gone back to would start on data that the new one had
begun to convert.
"""


def _group(deployment: Deployment, one: Workload, options: Options, probe_port: int) -> Block:
    blocks = [
        _constraint("${attr.unique.hostname}", options.host),
        _constraint("${attr.kernel.name}", "linux"),
        # A client that lost the servers stops the tasks, and no second writer is started elsewhere.
        Block("disconnect", (), {"replace": False, "stop_on_client_after": "30s"}),
        Block(
            "update",
            (),
            {
                "max_parallel": 1,
                "health_check": "checks",
                "min_healthy_time": "10s",
                **(LONG if one.starts_long else USUAL),
            },
        ),
        Block("restart", (), {"attempts": 3, "interval": "5m", "delay": "5s", "mode": "delay"}),
        Block("reschedule", (), {"attempts": 0, "unlimited": False}),
        _network(one, probe_port),
    ]
    if one.state:
        # Only a client that declares this volume is chosen; raw_exec gets the path itself.
        source = volume_name(deployment.cluster)
        blocks.append(Block("volume", ("state",), {"type": "host", "source": source}))
    blocks.append(_place(one, options))
    blocks += [_unit(one, unit, options) for unit in one.units]
    blocks.append(_probe(one, options))
    return Block("group", (one.name,), {"count": 1}, tuple(blocks))


def _constraint(attribute: str, value: str) -> Block:
    return Block("constraint", (), {"attribute": Raw(attribute), "operator": "=", "value": value})


def _network(one: Workload, probe_port: int) -> Block:
    numbers = sorted({port.number for port in one.ports})  # a port is reserved for all protocols
    ports = [Block("port", (port_label(number),), {"static": number}) for number in numbers]
    return Block("network", (), {"mode": "host"}, (*ports, Block("port", ("probe",), {"static": probe_port})))


def volume_name(cluster: str) -> str:
    """Return the name of the host volume with the state, in the configuration of the client."""
    return f"sms-{cluster}"


def port_label(number: int) -> str:
    """Return the label of a port."""
    return f"port_{number}"


def _place(one: Workload, options: Options) -> Block:
    """Return the task that assembles /etc before the others start; in it, secrets are empty files."""
    sources = dict.fromkeys((secret.name for secret in one.secrets), "/dev/null")
    templates = [_template(f"local/config/{file.key}", file.text) for file in one.files]
    templates.append(_template("local/config/files.json", placed_files(one, "/sms/config", sources)))
    binds = [
        (f"{TASK}/config", "/sms/config"),
        (f"{ALLOC}/etc", "/sms/etc"),
        (f"{ALLOC}/run", "/run"),
        *((source, target) for source, target in _binds(one, options) if target == "/var/log"),
    ]
    argv = ["/opt/sms/bin/sms-place", "/sms/config/files.json", "/sms/etc"]
    logs = [path.lstrip("/") for path in one.state if path == "/var/log"]
    command = _exec(options, options.state if logs else "", logs, binds, capabilities_for([]), argv)
    return Block(
        "task",
        ("place",),
        {"driver": "raw_exec", "user": "root"},
        (
            Block("lifecycle", (), {"hook": "prestart", "sidecar": False}),
            command,
            *templates,
            *_verified(options),
            _small(),
        ),
    )


def _unit(one: Workload, unit: Unit, options: Options) -> Block:
    fields: dict[str, Value] = {
        "driver": "raw_exec",
        "user": "root",
        "kill_signal": "SIGTERM",
        "kill_timeout": f"{one.stop_s}s",
    }
    if unit.name == one.name:
        fields["leader"] = True  # it stops before its helpers
    # Others may read the folder of the allocation by the API, but not this one, which is the task's alone.
    own = [secret for secret in one.secrets if secret.name in secrets_of(unit.service)]
    binds = [*_binds(one, options), *((f"{SECRETS}/{secret.key}", secret.path) for secret in own)]
    command = _exec(
        options,
        *_state(one, options),
        binds,
        capabilities_for([unit.service]),
        unit_argv(unit, "--jobsync"),
    )
    secrets = [_secret(one, secret) for secret in own]
    services = [*_registration(one, unit), _checks(one, unit)]
    blocks = [command, *secrets, *_verified(options), *services, _small(unit.service.engines.memory_mb)]
    return Block("task", (unit.name,), fields, tuple(blocks))


def _secret(one: Workload, secret: SecretFile) -> Block:
    """Return the file of a secret, which is bound over the empty one."""
    item = f".{secret.name}.Value | base64Decode"
    text = f'{{{{ with nomadVar "nomad/jobs/{job_name(one)}" }}}}{{{{ {item} }}}}{{{{ end }}}}'
    made = _template(f"secrets/{secret.key}", text, literal=False, perms=secret.mode)
    owner = next((unit.ids for unit in one.units if unit.service.user == secret.owner), Ids(0, 0))
    return Block("template", (), {**made.fields, "uid": owner.uid, "gid": owner.gid})


def _registration(one: Workload, unit: Unit) -> Iterator[Block]:
    """Yield the registration of a unit's first port."""
    for port in [port for port in one.ports if port.service == unit.name][:1]:
        fields: dict[str, Value] = {"name": unit.name, "provider": "nomad", "port": port_label(port.number)}
        yield Block("service", (), fields)


def _checks(one: Workload, unit: Unit) -> Block:
    """Return the registration of a unit's checks: readiness, and liveness, which restarts it.

    It is one of its own, as checks are made at its address.
    """
    wait = f"{int(unit.service.probe.timeout_s) + 2 if unit.service.probe else 7}s"
    checks = [
        Block("check", (), {**_http(f"/ready/{unit.name}", wait), "name": f"{unit.name} is ready"}),
        Block(
            "check",
            (),
            {**_http(f"/live/{unit.name}", wait), "name": f"{unit.name} is alive"},
            (Block("check_restart", (), {"limit": 6, "grace": "120s"}),),
        ),
    ]
    name = f"{one.name}-{unit.name}" if unit.helper else unit.name
    fields: dict[str, Value] = {"name": f"{name}-check", "provider": "nomad", "port": "probe", "address": LOOPBACK}
    return Block("service", (), fields, tuple(checks))


def _http(path: str, timeout: str) -> dict[str, Value]:
    return {"type": "http", "port": "probe", "path": path, "interval": "10s", "timeout": timeout}


def _probe(one: Workload, options: Options) -> Block:
    """Return the task that answers the checks."""
    argv = ["/opt/sms/bin/sms-probe", "--serve", f"{LOOPBACK}:${{NOMAD_PORT_probe}}"]
    command = _exec(options, *_state(one, options), _binds(one, options), capabilities_for([]), argv)
    fields: dict[str, Value] = {"driver": "raw_exec", "user": "root"}
    return Block("task", ("probe",), fields, (command, *_verified(options), _small()))


def _binds(one: Workload, options: Options) -> list[tuple[str, str]]:
    binds = [(f"{ALLOC}/etc", "/etc"), (f"{ALLOC}/run", "/run")]
    if "/var/log" not in one.state:
        binds.append((f"{ALLOC}/log", "/var/log"))
    binds += [(posixpath.join(options.state, path.lstrip("/")), path) for path in one.state]
    return [*binds, *((f"{ALLOC}{path}", path) for path in one.scratch)]


def _state(one: Workload, options: Options) -> tuple[str, list[str]]:
    """Return the folder of the state, and those below it that a task needs."""
    return options.state if one.state else "", [path.lstrip("/") for path in one.state]


def _exec(
    options: Options,
    state: str,
    folders: Sequence[str],
    binds: Sequence[tuple[str, str]],
    capabilities: Sequence[Capability],
    argv: Sequence[str],
) -> Block:
    """Return the ``config`` of a task that runs a program of the verified image with these binds."""
    made = [f"{TASK}/empty", *(source for source, _ in binds if source.startswith(ALLOC))]
    # Those that the client lacks are left out by run-image.
    present = ("/proc/sys", *HIDDEN_FOLDERS, *HIDDEN_FILES)
    confinement = Confinement(tuple(capabilities), f"{TASK}/seccomp.json", f"{TASK}/empty", present)
    confined = ["--no-home", "--contain", "--cleanenv", "--env", HOLDER, "--pid", "--no-init", "--ipc"]
    confined += ["--dns", ",".join(options.dns), *confinement.options()]
    binds = [*binds, (f"{TASK}/confined.sh", f"{CONFINED}:ro")]
    words = [*confined, *(word for source, target in binds for word in ("--bind", f"{source}:{target}"))]
    # The network is the client's: nodes reach the services at its address.
    check = [*CHECK, str(number_of(capabilities)), "ipc mnt pid", HOST]
    args = [
        "-eu",
        "local/verified.sh",
        state,
        options.image,
        *folders,
        *made,
        "--",
        *words,
        options.image,
        *check,
        *argv,
    ]
    return Block("config", (), {"command": "/bin/sh", "args": [_with_references(word) for word in args]})


def inside_script(args: Sequence[str], argv: Sequence[str]) -> str:
    """Return a script for ``sh -eu`` that runs a command as a task runs: in its image, with its files and folders.

    Nomad gives the script the environment of the task, whose references are then the shell's.

    Args:
        args: those of the task, as ``_exec`` made them; empty is returned for others.
    """
    if "--" not in args or len(args) < 4:
        return ""
    image, options = args[3], args.index("--")
    if image not in args[options:]:
        return ""
    end = args.index(image, options) + 1
    if tuple(args[end : end + len(CHECK)]) == CHECK:  # jobs of an earlier version have none
        end += len(CHECK) + 3
    quoted = " ".join(_shell_word(word) for word in ("/bin/sh", *args[:end], *argv))
    return f'cd "$NOMAD_TASK_DIR/.." && exec {quoted}'


def _shell_word(word: str) -> str:
    """Return a word of a shell command, in which references of Nomad are those of variables."""
    if not word:  # a workload without state has an empty argument
        return "''"
    parts = re.split(r"(\$\{NOMAD_[A-Z_]+\})", word)
    return "".join(
        f'"{part}"' if number % 2 else shlex.quote(part) if part else "" for number, part in enumerate(parts)
    )


def _with_references(word: str) -> str:
    """Return a word whose references Nomad resolves; of all others none has any (``read_options``)."""
    return Raw(word) if "${NOMAD_" in word else word


def _verified(options: Options) -> Iterator[Block]:
    """Yield the files that a task needs to verify the image, and to be confined."""
    yield _template("local/verified.sh", VERIFIED)
    for name in ("run-image", "confined"):
        yield _template(f"local/{name}.sh", share("definitions", "scripts", name).read_text())
    profile = json.loads(share("definitions", "seccomp.json").read_text())
    yield _template("local/seccomp.json", json.dumps(profile, separators=(",", ":")) + "\n")
    for number, key in enumerate(options.keys):
        yield _template(f"local/keys/{number}.pub", key)


def _template(destination: str, text: str, *, literal: bool = True, perms: str = "0444") -> Block:
    """Return a file of a task. Braces of a literal text are not a template's."""
    data = text.replace("{{", '{{ "{{" }}') if literal else text
    fields: dict[str, Value] = {"destination": destination, "perms": perms, "change_mode": "noop", "data": data}
    return Block("template", (), fields)


def _small(memory_mb: int = 64) -> Block:
    return Block("resources", (), {"cpu": 50, "memory": memory_mb})


@dataclass(frozen=True)
class Nodes:
    """What runs on compute nodes: services that only an engine starts, and the programs that start them, by name."""

    services: Sequence[Service]
    programs: Mapping[str, str]
    templates: Templates


def node_jobs(deployment: Deployment, options: Options, nodes: Nodes) -> dict[str, Block]:
    """Return the jobs that run munge and slurmd on every compute node, by name; none without a controller.

    They are programs of the node image, as in document 000: a container would be in the way of a job's processes. They
    start by ``sms-run``, so that slurmd waits for munge at each start. What slurmd does not need, such as sssd, is the
    node's own.
    """
    controller = deployment.find("controller")
    if controller is None:
        return {}
    # Not with -Z: a node that slurm.conf names cannot be a dynamic one (fatal: Duplicated NodeName).
    server = ("--conf-server", f"{options.address}:{controller.ports[0].number}")
    helpers = [unit.service for unit in controller.units if unit.helper]
    own = [
        one.model_copy(update={"run": (*one.run, *server)})
        for one in nodes.services
        if {*one.needs} <= {helper.name for helper in helpers}
    ]
    needed = {name for one in own for name in one.needs}
    services = [*(helper for helper in helpers if helper.name in needed), *own]
    text = json.dumps(task_json(services, nodes.templates), indent=1) + "\n"
    limits = stop_limits(services)
    jobs = {}
    for one in services:
        # distinct_hosts of document 000 has no effect in a system job: it runs once on each client.
        name = NODE_JOB if one in own else one.name
        blocks = [
            Block("restart", (), {"attempts": 3, "interval": "5m", "delay": "5s", "mode": "delay"}),
            Block("update", (), {"max_parallel": 1}),
        ]
        if one in own:
            port = Block("port", (port_label(SLURMD_PORT),), {"static": SLURMD_PORT})
            blocks.append(Block("network", (), {"mode": "host"}, (port,)))
        fields: dict[str, Value] = {
            "driver": "raw_exec",
            "user": "root",
            "kill_signal": "SIGTERM",
            "kill_timeout": f"{limits[one.name] + 10}s",
        }
        args: list[Value] = ["local/sms/sms-run", "--services", "local/sms/services.json", "--jobsync", one.name]
        files = [_template(f"local/sms/{file}", program) for file, program in sorted(nodes.programs.items())]
        config = Block("config", (), {"command": "/usr/bin/python3", "args": args})
        task = (config, *files, _template("local/sms/services.json", text), _small())
        blocks.append(Block("task", (name,), fields, task))
        jobs[name] = _job(name, "system", options.compute_pool, options, Block("group", (name,), {}, tuple(blocks)))
    return jobs


def longest_stop(jobs: Iterable[Block]) -> int:
    """Return the longest time that a task of the jobs may take to stop, in seconds."""
    own = [read_duration(str(one.fields["kill_timeout"])) for one in jobs if "kill_timeout" in one.fields]
    return max([*map(int, own), *(longest_stop(one.blocks) for one in jobs)], default=0)


def notes(deployment: Deployment, options: Options, nodes: Iterable[Block] = ()) -> tuple[str, ...]:
    """Return what is to be done once besides: settings of clients, and the variables with secrets.

    Args:
        nodes: jobs of compute nodes.
    """
    longest = max((one.stop_s for one in deployment.workloads), default=30)
    client = f"in the configuration of the client {options.host}"
    found = [f'{client}: max_kill_timeout = "{longest}s"; it is 30 s by default']
    if limit := longest_stop(nodes):
        found.append(f'in the configuration of clients on compute nodes: max_kill_timeout = "{limit}s"')
    if any(one.state for one in deployment.workloads):
        # Root in a task can write files with the setuid bit: no user of the client may reach them.
        found.append(f"on {options.host}: install -d -m 0700 {options.state}")
        # Each job that writes there needs it.
        found.append(f'{client}: host_volume "{volume_name(deployment.cluster)}" {{ path = "{options.state}" }}')
    for one in deployment.workloads:
        names = [secret.name for secret in one.secrets]
        if names:
            found.append(
                f"secrets, each in base64, once: (umask 077; base64 -w0 KEY >FILE); nomad var put -namespace "
                f"{options.namespace} nomad/jobs/{job_name(one)} {' '.join(f'{name}=@FILE' for name in names)}; rm FILE"
            )
    return tuple(found)
