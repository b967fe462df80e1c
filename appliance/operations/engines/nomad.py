"""The services on Nomad: a job each, on the client that has their state; munge and slurmd on compute nodes."""

from __future__ import annotations

import base64
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.engines.deploy import Bundle, Item
from appliance.engines.nomad import NODE_JOB, SLURMD_PORT, inside_script, volume_name
from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Result
from appliance.operations.context import Cluster
from appliance.operations.engines.clients import find_nomad
from appliance.operations.engines.engine import (
    Difference,
    Instance,
    Part,
    SecretState,
    WorkloadState,
    decode_secret,
    with_answers,
)
from appliance.operations.env import Env
from appliance.operations.image.deliver import deliver, missing_image, trust
from appliance.plan.services.probes import read_probe
from appliance.tools import files
from appliance.tools.engine import at, last_line, list_at, number_at, text_at
from appliance.tools.nomad import Allocation, Check, Client, Job, Nomad
from appliance.tools.ports import probe_argv

OWN = "created_by"
"""Item of a variable that sms has written."""
CHANGING = "sms, changing"
"""Its value while allocations may have an earlier secret: a run that is killed leaves it to the next one."""
ENDED = ("complete", "failed", "lost")
AT_ONCE = 16
"""Compute nodes that are queried at once."""
NODE_PROBE = (
    'cd "$NOMAD_TASK_DIR/.." && exec /usr/bin/python3 local/sms/sms-probe --services local/sms/services.json "$1"'
)
"""Shell: probe service $1 of a compute node, where its task runs."""
PROBE_S = 30


@dataclass(frozen=True)
class OnNomad:
    """The site's Nomad cluster. ``client``: host name of the client with the state; ``pool``: that of compute nodes."""

    nomad: Nomad
    client: str
    pool: str
    env: Env
    name = "nomad"

    def check(self, cluster: Cluster, bundle: Bundle, *, send: bool = True) -> None:
        """Check the client that runs the services, and send it the image if it is an admin host."""
        clients = self.nomad.clients()
        client = self._find_client(clients)
        if client is None or client.status != "ready":
            state = f"is {client.status}" if client else "is not a client"
            raise Refused(
                f"{self.client}, which is to run the services, {state}",
                hint="`nomad node status` lists them; `engines.nomad.host` of the site file names it",
            )
        found = self.nomad.get(f"node/{client.id}")
        if at(found, "Drivers", "raw_exec", "Healthy") is not True:
            raise Refused(
                f"the client {self.client} does not run tasks by raw_exec",
                hint='in its configuration: plugin "raw_exec" { config { enabled = true } }',
            )
        volume = volume_name(bundle.cluster)
        if any(one.state for one in bundle.items) and at(found, "HostVolumes", volume) is None:
            raise Refused(
                f"the client {self.client} does not have the volume {volume}",
                hint="`sms export nomad` prints what its configuration needs",
            )
        if bundle.find(NODE_JOB) and (own := self._find_slurmds(clients)):
            cluster.env.progress.report(
                f"warning: {', '.join(own)} already runs a slurmd that is not of Nomad: two stop each other; "
                "stop and disable slurmd and munge there before (running jobs live on)"
            )
        if send:
            self.send_image(cluster, bundle)
        else:
            self._need_image(cluster, bundle)

    def _find_slurmds(self, clients: Sequence[Client]) -> list[str]:
        """Return the compute nodes where something has slurmd's port, and it is not the job of Nomad."""
        ours = {one.node for one in self.nomad.allocations(NODE_JOB) if one.state == "running"}
        nodes = [one for one in clients if one.pool == self.pool and one.status == "ready" and one.name not in ours]

        def listens(client: Client) -> bool:
            argv = probe_argv(client.address, SLURMD_PORT)
            return _is_address(client.address) and self.nomad.host.works(*argv)

        with self.env.pool(AT_ONCE) as pool:
            return sorted(one.name for one, found in zip(nodes, pool.map(listens, nodes), strict=True) if found)

    def _need_image(self, cluster: Cluster, bundle: Bundle) -> None:
        """Check that there is an image to send, if the client is an admin host and does not have it."""
        if self.client in {one.name for one in cluster.site.admin_hosts}:
            current = Path(cluster.places.current)
            if not cluster.host(self.client).works("test", "-f", bundle.image) and not current.is_file():
                raise missing_image(current)

    def send_image(self, cluster: Cluster, bundle: Bundle) -> None:
        """Send the current image to the client if that is an admin host, and verify it there."""
        if self.client not in {one.name for one in cluster.site.admin_hosts}:
            cluster.env.progress.report(f"note: {self.client} is not an admin host: {bundle.image} has to be there")
            return
        host = cluster.host(self.client)
        if host.works("test", "-f", bundle.image):
            path, digest = host.run("readlink", "-f", bundle.image).text, ""
        else:
            path, digest = deliver(cluster, host, None)
        with cluster.env.progress.step(f"verify the image on {self.client}") as step:
            step.detail(trust(cluster, host, path, digest).signer)
        folder, _, name = path.rpartition("/")
        if bundle.image == str(cluster.places.current) and bundle.image != path:
            if folder == str(cluster.places.images):
                files.link(host, bundle.image, name)
        elif not host.works("test", "-f", bundle.image):
            raise Refused(
                f"{self.client} does not have the image {bundle.image}", hint="copy it there, or `sms build` it again"
            )

    def _find_client(self, clients: Sequence[Client]) -> Client | None:
        found = next((one for one in clients if one.name == self.client), None)
        if found:
            return found
        for one in clients:  # its name is not that of its host
            if text_at(self.nomad.get(f"node/{one.id}"), "Attributes", "unique.hostname") == self.client:
                return one
        return None

    def differences(self, bundle: Bundle) -> list[Difference]:
        """Return the differences by `nomad job plan`."""
        plans = [(one, self.nomad.plan(one.text)) for one in bundle.items]
        return [
            Difference(one.name, plan.change, "" if plan.change == "unchanged" else plan.text) for one, plan in plans
        ]

    def secrets(self, bundle: Bundle) -> list[SecretState]:
        """Return the items of the variable of each job; one that sms has written has an item that tells so."""
        found = []
        there = self.nomad.get(f"namespace/{bundle.namespace}") is not None
        for one in bundle.items:
            path = _variable_of(one.name)
            present = self.nomad.variable(path) if one.secrets and there else {}
            changing = present.get(OWN) == CHANGING
            own = OWN in present or not set(present) & set(one.secrets)
            for name in one.secrets:
                value = (b"" if changing else decode_secret(present[name])) if name in present else None
                found.append(SecretState(name, f"{name} of the variable {path}", (one.name,), value, own))
        return found

    def prepare(self, bundle: Bundle, secrets: Sequence[tuple[SecretState, bytes]]) -> list[str]:
        """Create the namespace, and write the variables; tasks read them when they start."""
        made = []
        if self.nomad.get(f"namespace/{bundle.namespace}") is None:
            self.nomad.run("namespace", "apply", bundle.namespace)
            made.append(f"namespace {bundle.namespace}")
        for job in dict.fromkeys(job for one, _ in secrets for job in one.items):
            path = _variable_of(job)
            new = {one.name: base64.b64encode(value).decode() for one, value in secrets if job in one.items}
            own = all(one.own for one, _ in secrets if job in one.items)
            changed = any(one.value is not None for one, _ in secrets if job in one.items)
            whole = {**self.nomad.variable(path), **new}
            whole.pop(OWN, "")
            mark = {OWN: CHANGING if changed else "sms"} if own else {}
            self.nomad.put_variable(path, whole, mark)
            made.append(f"variable {path}")
            if changed:
                for each in self.nomad.allocations(job):
                    if each.runs:
                        self.nomad.stop_allocation(each.id)
                if own:
                    self.nomad.put_variable(path, whole, {OWN: "sms"})
        return made

    def apply(self, item: Item) -> None:
        """Run a job."""
        self.nomad.start(item.text)

    def nudge(self, state: WorkloadState) -> None:
        """Do nothing: Nomad replaces allocations that are not healthy."""

    def states(self, bundle: Bundle) -> list[WorkloadState]:
        """Return the state of each job."""
        nodes = [
            one for one in self.nomad.clients() if one.pool == self.pool and one.status == "ready" and one.eligible
        ]
        return [self._state(bundle, one, len(nodes)) for one in bundle.items]

    def _state(self, bundle: Bundle, item: Item, nodes: int) -> WorkloadState:
        job = self.nomad.job(item.name)
        volume = volume_name(bundle.cluster) if item.state else ""
        wanted = nodes if item.kind == "node" else 1
        if job is None:
            return WorkloadState(item.name, item.kind, False, wanted, (), volume)
        if item.kind == "service":
            wanted = 0 if job.stopped else sum(job.counts.values())
        own = []
        for one in self.nomad.allocations(item.name):
            if one.state in ENDED and (one.desired != "run" or one.version != job.version):
                continue
            checks = self.nomad.checks(one.id) if one.runs and item.kind == "service" else []
            own.append(_instance(item, one, checks, job.version))
        problem = "somebody has stopped the job" if job.stopped else self._deployment_problem(job)
        return WorkloadState(item.name, item.kind, True, wanted, tuple(own), volume, problem)

    def _deployment_problem(self, job: Job) -> str:
        """Return what a deployment of the job's version lacks: until it is successful, Nomad may revert the job."""
        if job.kind != "service":
            return ""
        found = self.nomad.get(f"job/{job.name}/deployment")
        status = text_at(found, "Status")
        if status in ("", "successful", "cancelled") or number_at(found, "JobVersion") != job.version:
            return ""
        why = text_at(found, "StatusDescription")
        return "its health is awaited" if status == "running" else f"its deployment is {status}: {why}"

    def probe(self, bundle: Bundle, states: Sequence[WorkloadState]) -> list[WorkloadState]:
        """Run the probe of each service as its task runs: a check that succeeds keeps no answer."""
        services = [one for one in bundle.items if one.kind == "service"]
        of_nodes = {one.name for one in bundle.items if one.kind == "node"}
        todo = [
            (state.name, one.name, part.name)
            for state in states
            if state.name in of_nodes
            for one in state.instances
            for part in one.parts
            if part.ready
        ]
        listed = {name: self.nomad.allocations(name) for name in {job for job, _, _ in todo}}
        ids = {(job, one.id[:8]): one.id for job, found in listed.items() for one in found}
        names = {job: text_at(self._tasks(job).get(job), "Config", "args", -1) for job in listed}

        def ask_node(one: tuple[str, str, str]) -> tuple[bool, str]:
            job, name, task = one
            command = ("/bin/sh", "-euc", NODE_PROBE, "probe", names[job])
            try:
                result = self.nomad.exec(ids[job, name], task, *command, ok=None, timeout=PROBE_S)
            except (SmsError, KeyError) as error:
                return False, error.message if isinstance(error, SmsError) else "it has ended"
            answer = next(filter(None, map(read_probe, result.stdout.decode(errors="replace").splitlines())), None)
            return (answer.ok, answer.detail) if answer else (False, "no answer")

        def ask(item: Item) -> dict[tuple[str, str], tuple[bool, str]]:
            try:
                allocation, result = self._inside(item, ["/opt/sms/bin/sms-probe", *item.units], 60)
            except SmsError as error:
                return {("", unit): (False, error.message) for unit in item.units}
            lines = result.stdout.decode(errors="replace").splitlines()
            found = {each.name: (each.ok, each.detail) for each in map(read_probe, lines) if each}
            return {(allocation[:8], unit): found.get(unit, (False, "no answer")) for unit in item.units}

        with self.env.pool(3) as pool:
            answers = {key: answer for each in pool.map(ask, services) for key, answer in each.items()}
        with self.env.pool(AT_ONCE) as pool:
            keys = [(name, task) for _, name, task in todo]
            answers |= dict(zip(keys, pool.map(ask_node, todo), strict=True))
        return [with_answers(state, answers) for state in states]

    def log(self, bundle: Bundle, state: WorkloadState, lines: int) -> str:
        """Return the last lines of the task that is not ready."""
        ids = {one.id[:8]: one.id for one in self.nomad.allocations(state.name)}
        for one in state.instances:
            for part in one.parts:
                if not part.ready and one.name in ids:
                    text = self.nomad.logs(ids[one.name], part.name, lines)
                    return text or self.nomad.logs(ids[one.name], part.name, lines, errors=False)
        return ""

    def stop(self, item: Item) -> None:
        """Stop a job of services; its state and its versions stay. Those of compute nodes run on."""
        if item.kind == "service" and self.nomad.job(item.name) is not None:
            self.nomad.stop(item.name)

    def control(self, bundle: Bundle, *argv: str, timeout: float = 60) -> Result:
        """Run a command as the controller's task runs: the verified image, its files and its folders."""
        item = bundle.find(bundle.controller)
        if item is None:
            raise SmsError("the engine has no controller", hint="`sms deploy status` shows what it has")
        return self._inside(item, argv, timeout)[1]

    def _inside(self, item: Item, argv: Sequence[str], timeout: float) -> tuple[str, Result]:
        """Run a command as the main task of a job; return the allocation's id, and the result of whatever status.

        Raises:
            SmsError: it does not run.
        """
        running = [one for one in self.nomad.allocations(item.name) if one.runs]
        tasks = self._tasks(item.name) if running else {}
        for unit in reversed(item.units):
            args = [word for word in list_at(tasks.get(unit), "Config", "args") if isinstance(word, str)]
            if script := inside_script(args, argv):
                command = ("/bin/sh", "-euc", script)
                return running[0].id, self.nomad.exec(running[0].id, unit, *command, ok=None, timeout=timeout)
        raise SmsError(f"{item.name} does not run", hint="`sms deploy status` shows why")

    def _tasks(self, name: str) -> dict[str, object]:
        """Return the tasks of a job by name, as the API has them."""
        return {text_at(one, "Name"): one for one in list_at(self.nomad.spec(name), "TaskGroups", 0, "Tasks")}

    def has_node(self, node: str) -> bool:
        """Return whether a client has that name."""
        return any(one.name == node for one in self.nomad.clients())

    def drain_node(self, bundle: Bundle, node: str, timeout_s: float) -> list[str]:
        """Drain a client: its jobs stop, those of compute nodes last."""
        for one in self.nomad.clients():
            if one.name == node:
                self.nomad.drain(one.id, timeout_s)
        done = [f"{node} is being drained; nothing new starts there"]
        for item in bundle.items:
            here = [one for one in self.nomad.allocations(item.name) if one.node == node and one.state == "running"]
            if here:
                end = "it starts again after the drain" if item.kind == "node" else "no other client has its state"
                done.append(f"{item.name} stops there; {end}")
        return done

    def drained(self) -> list[str]:
        """Return the clients of compute nodes, and that of the services, which are drained or not eligible."""
        clients = self.nomad.clients()
        return [
            one.name
            for one in clients
            if (one.draining or not one.eligible)
            and one.status == "ready"
            and (one.pool == self.pool or one.name == self.client)
        ]

    def undo_drain(self, node: str) -> None:
        """Let the client run its jobs again."""
        for one in self.nomad.clients():
            if one.name == node and (one.draining or not one.eligible):
                self.nomad.undo_drain(one.id)
                self.nomad.set_eligible(one.id, True)


def find_on_nomad(cluster: Cluster, host: Host) -> OnNomad:
    """Return the site's cluster, with ``nomad`` of a host."""
    site, given = cluster.site, cluster.site.engines.nomad
    return OnNomad(find_nomad(site, host), given.host or site.admin_hosts[0].name, given.compute_pool, cluster.env)


def _instance(item: Item, one: Allocation, checks: Sequence[Check], version: int) -> Instance:
    answers = {check.name: check for check in checks}
    parts = []
    for task in one.tasks:
        check = answers.get(f"{task.name} is ready")
        done = task.state == "dead" and not task.failed and task.name not in item.units
        if done:
            continue  # it has assembled /etc
        ready = task.state == "running" and (check.status == "success" if check else task.name not in item.units)
        if item.kind == "node":
            ready = task.state == "running"
        detail = _detail(check.output) if check else ""
        why = "" if ready else detail or f"{task.state}: {task.message}"
        parts.append(Part(task.name, ready, task.restarts, why, detail))
    ready = one.runs and bool(parts) and all(part.ready for part in parts)
    why = one.message or f"{one.state}, to {one.desired}"
    parts.sort(key=lambda part: [*item.units, part.name].index(part.name))  # Nomad has them in no order
    return Instance(one.id[:8], one.node, ready, one.version == version, tuple(parts), why=why)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _variable_of(job: str) -> str:
    return f"nomad/jobs/{job}"


def _detail(output: str) -> str:
    """Return the answer of a probe, which the check of a task has as JSON."""
    start = output.find("{")
    try:
        return text_at(json.loads(output[start:]), "detail") if start >= 0 else last_line(output)
    except (ValueError, RecursionError):
        return last_line(output)
