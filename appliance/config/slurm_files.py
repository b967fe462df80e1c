"""Files of ``slurm.files``: which Slurm knows, and how nodes get them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from appliance.config.document import Place
from appliance.config.finding import Finding
from appliance.config.model import Site, line_settings
from appliance.text import nearest

FOLDER = "/etc/slurm"
CONFIGLESS = frozenset(
    (
        *("acct_gather.conf", "cgroup.conf", "cli_filter.lua", "ext_sensors.conf", "gres.conf", "helpers.conf"),
        *("job_container.conf", "knl_cray.conf", "knl_generic.conf", "mpi.conf", "namespace.yaml", "oci.conf"),
        *("plugstack.conf", "topology.conf", "topology.yaml"),
    )
)
"""Files that nodes fetch from the controller with slurm.conf (slurmd --conf-server)."""
CONTROLLER = frozenset(
    (
        *("burst_buffer.conf", "burst_buffer.lua", "burst_buffer_lua.conf", "job_submit.lua", "jobcomp.lua"),
        *("power.conf", "resources.yaml"),
    )
)
"""Files that only the controller reads."""
_TOPOLOGY = ("topology.conf", "topology.yaml")
_NAMESPACE: dict[str, tuple[str, ...]] = {"tmpfs": ("job_container.conf",), "linux": ("namespace.yaml",)}
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "JobSubmitPlugins": {"lua": ("job_submit.lua",)},
    "JobCompType": {"lua": ("jobcomp.lua",)},
    "BurstBufferType": {"lua": ("burst_buffer.lua",)},
    "NodeFeaturesPlugins": {"helpers": ("helpers.conf",)},
    "ExtSensorsType": {"rrd": ("ext_sensors.conf",)},
    "TopologyPlugin": dict.fromkeys(("tree", "block", "hypercube"), _TOPOLOGY),
    "JobContainerType": _NAMESPACE,
    "NamespaceType": _NAMESPACE,
}
"""Files of which a plugin needs one, by setting: without it slurmctld or slurmd does not start, or jobs of it fail.

A controller that runs goes on with what it has read, and fails at its next start.
"""
PROGRAM_ENDS = ("program", "mailprog", "onprog", "offprog")
"""How settings end, in lower case, that name a program, besides prologs and epilogs."""
RENDERED = {"slurm.conf": "`slurm.extra` has additional lines of it", "slurmdbd.conf": "sms writes it"}


def check_slurm_files(site: Site, *, scheduled: bool) -> Iterator[Finding]:
    """Yield a finding for each file that nothing reads.

    Args:
        scheduled: whether a service of the site schedules jobs.
    """
    if site.slurm.files and not scheduled:
        yield Finding(("slurm", "files"), "no service of the site reads them", "add slurmctld to `services`")
    known = CONFIGLESS | CONTROLLER
    for name in site.slurm.files:
        if name in RENDERED:
            yield Finding(("slurm", "files", name), f"{name} is not a file of the site", f"remove it: {RENDERED[name]}")
        elif name not in known and name.endswith((".conf", ".lua", ".yaml", ".key", ".sms-old")):
            yield Finding(("slurm", "files", name), f"{name} is not a file that Slurm reads", nearest(name, known))
    masters = {file.path for file in site.provisioning.files} if site.provisioning else set()
    there = {f"{FOLDER}/{name}" for name in site.slurm.files} | masters
    for index, path in called_programs(site):
        if path not in there and PurePosixPath(path).parent == PurePosixPath(FOLDER) and not is_pattern(path):
            name = path.rpartition("/")[2]
            hint = (
                f"add it: slurm: {{files: {{{name}: FILE}}}}; if nodes have one of their own, keep it in another folder"
            )
            yield Finding(("slurm", "extra", index), f"there is no {name} in slurm.files", hint)
    for place, _, mode in site_programs(site):
        if not int(mode, 8) & 0o111:
            yield Finding((*place, "mode"), f"mode {mode} of a program that Slurm runs", 'set `mode: "0755"`')
    for index, key, value, names in _needed_files(site):
        if not any(f"{FOLDER}/{name}" in there for name in names):
            text = f"{key}={value} needs {' or '.join(names)}, and there is none in slurm.files"
            hint = f"add it: slurm: {{files: {{{names[0]}: FILE}}}}; or remove the setting"
            yield Finding(("slurm", "extra", index), text, hint)


def _needed_files(site: Site) -> Iterator[tuple[int, str, str, tuple[str, ...]]]:
    """Yield line (in ``slurm.extra``), setting, plugin, and the files of which it needs one."""
    keys = {key.lower(): key for key in NEEDED}
    last = {
        key: (index, value)  # Slurm takes the last one
        for index, line in enumerate(site.slurm.extra)
        for key, value in line_settings(line)[:1]
        if key in keys
    }
    for key, (index, value) in last.items():
        for word in re.split("[,;]", value.strip('"').lower()):
            if names := NEEDED[keys[key]].get(word.rpartition("/")[2]):
                yield index, keys[key], word, names


def is_pattern(path: str) -> bool:
    """Return whether slurmd takes it for a pattern of programs: of Prolog and Epilog it runs all that match."""
    return bool({*"*?["} & {*path})


def is_called(path: str, program: str) -> bool:
    """Return whether a file is a program that a setting names, or one of those that match its pattern."""
    return PurePosixPath(path).match(program) if is_pattern(program) else path == program


def called_programs(site: Site) -> Iterator[tuple[int, str]]:
    """Yield line (in ``slurm.extra``) and path, or pattern of paths, of each program that Slurm runs."""
    for index, line in enumerate(site.slurm.extra):
        for key, value in line_settings(line)[:1]:
            path = (value.strip('"').split() or [""])[0]
            if ("prolog" in key or "epilog" in key or key.endswith(PROGRAM_ENDS)) and path.startswith("/"):
                yield index, path


def site_programs(site: Site) -> Iterator[tuple[Place, Path | None, str]]:
    """Yield place, source (None of a template), and mode of each file of the site that Slurm runs as a program."""
    files: list[tuple[str, Place, Path | None, str]] = [
        (f"{FOLDER}/{name}", ("slurm", "files", name), source, "0755") for name, source in site.slurm.files.items()
    ]
    for index, file in enumerate(site.provisioning.files if site.provisioning else ()):
        files.append((file.path, ("provisioning", "files", index), None if file.template else file.source, file.mode))
    called = {path for _, path in called_programs(site)}
    for path, place, source, mode in files:
        if any(is_called(path, one) for one in called):
            yield place, source, mode


def find_unrunnable(data: bytes) -> tuple[str, str] | None:
    """Return what is wrong with a program, and what to do about it; None if a node can run it."""
    if data.startswith(b"\x7fELF"):
        return None
    if data.startswith(b"\xef\xbb\xbf"):
        return "it begins with a byte order mark", "write it as UTF-8 without one"
    if not re.match(rb"#![ \t]*/\S", data):
        return "it does not begin with #! and the path of an interpreter", "add a first line such as #!/bin/sh"
    if b"\r\n" in data:
        return "its lines end with CR and LF, as on Windows", "`sed -i 's/\\r$//' FILE` makes them lines of Unix"
    return None


def files_for_nodes(names: Iterable[str]) -> list[str]:
    """Return the files that nodes need and do not fetch from the controller: programs."""
    return [name for name in names if name not in CONFIGLESS | CONTROLLER]
