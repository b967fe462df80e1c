"""Files of ``slurm.files``: which Slurm knows, and how nodes get them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
CONTROLLER = frozenset(("burst_buffer.conf", "job_submit.lua", "power.conf", "resources.yaml"))
"""Files that only the controller reads."""
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
    for index, name in called_programs(site):
        if name not in site.slurm.files and f"{FOLDER}/{name}" not in masters:
            hint = (
                f"add it: slurm: {{files: {{{name}: FILE}}}}; if nodes have one of their own, keep it in another folder"
            )
            yield Finding(("slurm", "extra", index), f"there is no {name} in slurm.files", hint)


def called_programs(site: Site) -> Iterator[tuple[int, str]]:
    """Yield line (in ``slurm.extra``) and name of each prolog or epilog that is in /etc/slurm."""
    for index, line in enumerate(site.slurm.extra):
        for key, value in line_settings(line):
            folder, _, name = value.strip('"').rpartition("/")
            if ("prolog" in key or "epilog" in key) and folder == FOLDER and "*" not in name:
                yield index, name


def files_for_nodes(names: Iterable[str]) -> list[str]:
    """Return the files that nodes need and do not fetch from the controller: programs."""
    return [name for name in names if name not in CONFIGLESS | CONTROLLER]
