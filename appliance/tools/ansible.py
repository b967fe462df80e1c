"""Ansible: run one playbook against one host. The only user of ansible_runner."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.errors import SmsError

RUN = ("setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "ansible", "playbook")
"""ansible-playbook, terminated with this process; run as a module because it need not be in PATH."""
BOUNDED = ("prlimit", f"--data={512 << 20}")
"""Limits the memory of Ansible: it keeps all that another host prints."""
LONGEST_S = 7200
"""Seconds that a playbook may take: also a host that always answers a little comes to an end."""

KEPT_LINES, KEPT_LETTERS = 12, 2000
"""The last lines of the output that an error shows, and how much of each."""
MAX_NOTES = 16 << 20
"""Letters of notes and diffs that are kept: the host that prints them may be hostile."""


@dataclass(frozen=True)
class Target:
    """A host for Ansible and its Python interpreter.

    ``root`` is a root folder on this machine; otherwise ``address`` is used, where None is this machine.
    """

    name: str
    python: str
    address: str | None = None
    user: str = "root"
    port: int = 22
    key: Path | None = None
    known_hosts: Path | None = None
    root: Path | None = None


@dataclass(frozen=True)
class Failure:
    """A failed task and its error message."""

    role: str
    task: str
    message: str


@dataclass
class Play:
    """Result of a playbook: tasks that changed something, failed tasks, notes for the user, diffs."""

    changed: list[str] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    diffs: list[str] = field(default_factory=list)


OnTask = Callable[[str], None]


def run_playbook(
    playbook: Path,
    target: Target,
    variables: Mapping[str, Any],
    *,
    on_task: OnTask,
    dry_run: bool = False,
    longest_s: int = LONGEST_S,
) -> Play:
    """Run a playbook against one host and wait for it to end. It prints nothing to the terminal.

    Args:
        on_task: called with the name of each task as it starts.
        dry_run: change nothing; report what would change.

    Raises:
        SmsError: Ansible could not run, or did not end in time.
    """
    import ansible_runner

    play = Play()
    output: deque[str] = deque(maxlen=KEPT_LINES)

    def on_event(event: Mapping[str, Any]) -> bool:
        output.extend(line[:KEPT_LETTERS] for line in str(event.get("stdout") or "").splitlines())
        _note(play, event, on_task)
        return False

    with _private_folder() as folder:
        runner = ansible_runner.interface.init_runner(
            private_data_dir=str(folder),
            project_dir=str(playbook.parent),
            playbook=str(playbook),
            inventory={"all": {"hosts": {target.name: {**_connection(target, folder), **variables}}}},
            cmdline="--check --diff" if dry_run else "--diff",
            ident="run",
            envvars=_environment(folder),
            quiet=True,
            timeout=longest_s,
            event_handler=on_event,
            # Without a callback the runner installs its own signal handlers.
            cancel_callback=lambda: False,
        )
        config = runner.config
        # Ignore Ansible settings of the user's shell.
        config.env = {
            key: value
            for key, value in config.env.items()
            if not key.startswith("ANSIBLE_") or value != os.environ.get(key)
        }
        config.command = [*_program(target), *config.command[1:]]
        config.pexpect_timeout = 1
        runner.run()
    if runner.status == "timeout":
        raise SmsError(f"{target.name}: ansible-playbook did not end within {longest_s} s", hint="run it again")
    if runner.rc and not play.failed:
        tail = "\n    ".join(line for line in output if line.strip())
        raise SmsError(f"ansible-playbook ended with status {runner.rc}\n    {tail}")
    return play


def _program(target: Target) -> tuple[str, ...]:
    """Return the first words of the command. On this machine, package managers would have the limit, too."""
    return (*BOUNDED, *RUN) if target.address else RUN


def _connection(target: Target, folder: Path) -> dict[str, object]:
    """Return the inventory variables for the connection."""
    python = {"ansible_python_interpreter": target.python}
    if target.root is not None:
        return {**python, "ansible_connection": "sms_root", "sms_root": str(target.root)}
    if target.address is None:
        return {**python, "ansible_connection": "local"}
    options = ["StrictHostKeyChecking=yes", "BatchMode=yes", "ConnectTimeout=10"]
    if target.known_hosts:
        options += [f'UserKnownHostsFile="{target.known_hosts}"', "GlobalKnownHostsFile=/dev/null"]
    if target.key:
        options.append("IdentitiesOnly=yes")
    # One connection for all tasks; its socket is in the private folder and closed at the end.
    options += ["ControlMaster=auto", "ControlPersist=30", f"ControlPath={folder}/%C"]
    return {
        **python,
        "ansible_connection": "ssh",
        "ansible_host": target.address,
        "ansible_port": target.port,
        "ansible_user": target.user,
        "ansible_become": target.user != "root",
        "ansible_ssh_common_args": " ".join(f"-o {shlex.quote(option)}" for option in options),
        **({"ansible_ssh_private_key_file": str(target.key)} if target.key else {}),
    }


def _environment(folder: Path) -> dict[str, str]:
    return {
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
        "ANSIBLE_HOME": str(folder / "home"),
        "ANSIBLE_LOCAL_TEMP": str(folder / "tmp"),
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_SSH_ARGS": "",
        "ANSIBLE_NOCOLOR": "True",
        "ANSIBLE_FORKS": "1",
        "ANSIBLE_DEPRECATION_WARNINGS": "False",
    }


def _note(play: Play, event: Mapping[str, Any], on_task: OnTask) -> None:
    """Record one event of the play."""
    kind, data = event["event"], event.get("event_data") or {}
    task, result = str(data.get("task", "")), data.get("res") or {}
    if kind == "playbook_on_task_start":
        on_task(task)
    elif kind in ("runner_on_failed", "runner_on_unreachable") and not data.get("ignore_errors"):
        play.failed.append(Failure(str(data.get("role", "")), task, _failure_message(result)))
    elif kind == "runner_on_ok":
        if result.get("changed"):
            play.changed.append(task)
        if data.get("task_action") in ("debug", "ansible.builtin.debug"):
            _keep(play.notes, str(result.get("msg", "")))
    elif kind == "runner_on_file_diff" and (text := str(event.get("stdout") or "").replace("\r", "").strip()):
        _keep(play.diffs, text)


def _keep(texts: list[str], text: str) -> None:
    texts += [text] if sum(map(len, texts)) + len(text) <= MAX_NOTES else []


def _failure_message(result: Mapping[str, Any]) -> str:
    """Return why a task failed; for a loop, why its items did."""
    items = [item for item in result.get("results") or [] if item.get("failed")]
    items += (result.get("failed_modules") or {}).values()
    if items:
        return "\n".join(dict.fromkeys(_failure_message(item) for item in items))
    outputs = [str(result.get(name) or "") for name in ("msg", "stderr", "stdout")]
    lines = [line.strip() for text in outputs for line in text.splitlines()[-6:]]
    relevant = [
        line for line in lines if line and not line.startswith(("non-zero return code", "Shared connection to"))
    ]
    return "\n    ".join(dict.fromkeys(relevant)) or json.dumps(result)[:300]


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A temporary folder for Ansible; processes that use it are terminated before it is removed."""
    # Short, because a socket path has at most 100 characters.
    with tempfile.TemporaryDirectory(prefix="sms-ansible-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        # An empty file, so that no other ansible.cfg is used.
        (folder / "ansible.cfg").touch()
        try:
            yield folder
        finally:
            _end_processes(str(folder))


def _end_processes(folder: str) -> None:
    """Terminate processes that have the folder in their environment: workers run in their own sessions."""
    for signum, grace in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        deadline = time.monotonic() + grace
        found = _users_of(folder)
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        while found and time.monotonic() < deadline:
            time.sleep(0.05)
            found = _users_of(folder)
        if not found:
            return


def _users_of(folder: str) -> list[int]:
    """Return the processes that use the folder, by environment or command line: ssh's master overwrites the former."""
    token = f"{folder}/".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if token in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found
