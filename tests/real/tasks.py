"""A node of an engine: munged and slurmd of its own root file system, slurmctld in the signed image.

``Engine`` starts `sms-run --jobsync` as Nomad's raw_exec does: a command of the host, started again when it ends. It
has no other part in their order.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.catalog import read_catalog
from appliance.errors import SmsError
from appliance.lab.root import make_root
from appliance.operations.site.find import open_site
from appliance.plan.render import Templates
from appliance.plan.services.jobsync import task_json
from appliance.progress import Silent
from appliance.share import share
from tests.places import DEBIAN_SITE
from tests.waiting import wait_until

RUNTIME = share("definitions", "runtime")
RECORDS = Path("/run/sms/jobsync")
CONF = """\
ClusterName=orders
SlurmctldHost={host}(127.0.0.1)
SlurmUser=slurm
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=batch Nodes={host} Default=YES
"""
SHORT = "/etc/sms/short.json"
"""File of services in which munge waits for its users for ``SHORT_S`` seconds only."""
SHORT_S = 2
# What it sees of munge when it begins, in the place of its own command.
BEGIN = """\
if munge -n </dev/null 2>/dev/null | unmunge >/dev/null 2>&1; then seen=answers; else seen=silent; fi
echo "{name} $seen $(date +%s.%N)" >>/var/log/slurm/starts
exec {command}
"""


@dataclass
class Engine:
    """Tasks of one node, and what the test did to them: ``killed`` has the times at which munge was."""

    folder: Path
    image: str
    namespace: str
    tasks: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    superseded: list[subprocess.Popen[bytes]] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """The root file system of the node."""
        return self.folder / "root"

    def inside(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the node."""
        words = [*self.network, "chroot", str(self.root), *argv]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, **options)

    @property
    def network(self) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    @property
    def container(self) -> list[str]:
        """Words before a command that runs in the image."""
        binds = {
            self.folder / "slurm": "/etc/slurm:ro",
            self.folder / "state": "/var/spool/slurmctld",
            self.folder / "log": "/var/log/slurm",
            self.folder / "services.json": "/etc/sms/services.json:ro",
            self.root / "run/munge": "/run/munge",
            RECORDS.parent: "/run/sms",
            RUNTIME: "/opt/sms/bin:ro",
        }
        words = [word for source, target in binds.items() for word in ("--bind", f"{source}:{target}")]
        return ["apptainer", "exec", "--no-home", "--no-mount", "cwd,tmp", "--writable-tmpfs", *words, self.image]

    def start(self, name: str, *options: str) -> None:
        """Start a task, as its engine does when it has ended."""
        argv = ["/opt/sms/bin/sms-run", "--jobsync", *options, name]
        argv = [*self.container, *argv] if name == "slurmctld" else ["chroot", str(self.root), *argv]
        self.began[name] = time.time()
        with (self.folder / f"{name}.out").open("ab") as out:
            self.tasks[name] = subprocess.Popen([*self.network, *argv], stdout=out, stderr=out, cwd="/")

    def revive(self) -> None:
        """Start what has ended, as an engine does."""
        for name, task in self.tasks.items():
            if task.poll() is not None:
                self.start(name)

    def record(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def await_ready(self, *names: str) -> None:
        """Wait until services answer; tasks that end meanwhile are started again."""

        def ready() -> bool:
            self.revive()
            return all(self.is_ready(name) for name in names)

        try:
            wait_until(ready, "the services are ready", 120)
        except SmsError as error:
            raise AssertionError(self.output()) from error

    def is_ready(self, name: str) -> bool:
        """Whether the task that was started last is ready."""
        found = self.record(name)
        return found.get("state") == "ready" and found["times"]["deploy"] > self.began[name]

    def output(self) -> str:
        return "".join(f"\n{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.out")))

    def kill_task(self, name: str) -> None:
        """SIGKILL of sms-run alone; Apptainer around it ends with it."""
        self._note(name)
        while self.tasks[name].poll() is None:
            for pid in self.processes("sms-run"):
                with suppress(OSError):
                    if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._note(name)

    def kill_service(self, name: str) -> None:
        """SIGKILL of the daemon."""
        process = self.record(name).get("process")
        if process:
            self._note(name)
            with suppress(ProcessLookupError):
                os.killpg(process["pid"], signal.SIGKILL)
            self._note(name)

    def restart(self, name: str) -> None:
        """Stop a task; the engine starts it when it has ended."""
        self._note(name)
        self.tasks[name].terminate()

    def supersede(self, name: str) -> None:
        """Start a second task before the first is stopped, as for an allocation that was lost and is not."""
        old = self.tasks[name]
        self.start(name)
        time.sleep(1)
        self._note(name)
        old.terminate()
        self.superseded.append(old)

    def reboot(self) -> None:
        """Kill everything at once, and empty /run; nothing is started."""
        self._note("munge")
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for task in (*self.tasks.values(), *self.superseded):
            task.wait()
        wait_until(lambda: not self.processes(), "the end of all")
        shutil.rmtree(RECORDS, ignore_errors=True)
        for path in (self.root / "run").iterdir():
            if path.name not in ("sms", "munge"):
                shutil.rmtree(path, ignore_errors=True)
        for path in (self.root / "run/munge").iterdir():  # it is mounted in the image
            path.unlink()
        self.tasks, self.superseded = {}, []

    def _note(self, name: str) -> None:
        if name == "munge":
            self.killed.append(time.time())

    def processes(self, name: str = "") -> list[int]:
        """Processes in the node's network, all or those of a program."""
        own = Path(f"/run/netns/{self.namespace}").stat().st_ino
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (path / "ns/net").stat().st_ino == own and name in ("", (path / "comm").read_text().strip()):
                    found.append(int(path.name))
        return found

    def daemons(self, name: str) -> list[int]:
        """Processes of a program that none of them has forked: such a one has its name until it gets another."""
        found = self.processes(name)
        return [pid for pid in found if _parent_of(pid) not in found]

    def starts(self) -> list[tuple[str, str, float]]:
        """Service, what it saw of munge, and time of each start."""
        path = self.folder / "log/starts"
        rows = [line.split() for line in path.read_text().splitlines()]
        return [(name, seen, float(at)) for name, seen, at in rows]

    def starts_without_munge(self) -> list[tuple[str, str, float]]:
        """Starts of users of munge while it did not answer, but those within 2 s after the test had ended it."""
        silent = [row for row in self.starts() if row[1] != "answers"]
        return [row for row in silent if not any(0 <= row[2] - at < 2 for at in self.killed)]


def _parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def make_services(folder: Path) -> None:
    """Write the file of services: those of the catalogue, which also write down what they see when they begin."""
    catalog = read_catalog(share("definitions", "services"))
    services = [catalog["munge"], catalog["slurmctld"].model_copy(update={"after": ()}), catalog["slurmd"]]
    document: Any = task_json(services, Templates(share("overlays"), site=open_site(DEBIAN_SITE).site))
    for name in ("slurmctld", "slurmd"):
        service = document["services"][name]
        service["run"] = ["sh", "-c", BEGIN.format(name=name, command=" ".join(service["run"]))]
    (folder / "services.json").write_text(json.dumps(document))
    document["services"]["munge"]["jobsync"]["release_s"] = SHORT_S
    (folder / "short.json").write_text(json.dumps(document))


@contextmanager
def engine_in(folder: Path, image: str) -> Iterator[Engine]:
    """A node without tasks; all that runs on it ends with it."""
    engine = Engine(folder, image, f"orders-{os.getpid()}")
    mounts = _make_node(engine)
    subprocess.run(["ip", "netns", "add", engine.namespace], check=True)
    # Slurm listens only where there is an address other than that of the loopback (AI_ADDRCONFIG).
    for words in ("link set lo up", "link add net type bridge", "addr add 192.0.2.1/24 dev net", "link set net up"):
        subprocess.run(["ip", "-n", engine.namespace, *words.split()], check=True)
    try:
        yield engine
    finally:
        engine.reboot()
        subprocess.run(["ip", "netns", "delete", engine.namespace], check=True)
        for target in reversed(mounts):
            subprocess.run(["umount", "--lazy", target], check=True)


def _make_node(engine: Engine) -> list[str]:
    """Make the root file system of the node and its files; the mounts."""
    folder, root = engine.folder, engine.root
    folder.chmod(0o755)
    for name in ("root", "upper", "work", "state", "log", "slurm"):
        (folder / name).mkdir()
    (folder / "log").chmod(0o777)
    (folder / "log/starts").touch()
    (folder / "log/starts").chmod(0o666)
    (folder / "slurm/slurm.conf").write_text(CONF.format(host=socket.gethostname().partition(".")[0]))
    make_services(folder)
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    mounts = [str(root)]
    layers = f"lowerdir={make_root(Silent())},upperdir={folder}/upper,workdir={folder}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", str(root)], check=True)
    binds = {
        **{f"/{name}": name for name in ("proc", "sys", "dev")},
        str(RECORDS.parent): "run/sms",
        str(RUNTIME): "opt/sms/bin",
        str(folder / "slurm"): "etc/slurm",
        str(folder / "log"): "var/log/slurm",
    }
    for source, name in binds.items():
        target = root / name
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--rbind" if source == "/sys" else "--bind", source, str(target)], check=True)
        mounts.append(str(target))
    (root / "etc/sms").mkdir(exist_ok=True)
    for name in ("services.json", "short.json"):
        shutil.copy(folder / name, root / "etc/sms" / name)
    (root / "etc/munge/munge.key").write_bytes(b"k" * 128)
    (root / "run/munge").mkdir(exist_ok=True)
    hosts = f"127.0.0.1 localhost {socket.gethostname()}\n"
    (root / "etc/hosts").write_text(hosts)
    return mounts
