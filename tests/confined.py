"""What `definitions/scripts/inspect-confinement` prints of an instance that is confined."""

from __future__ import annotations

from appliance.plan.services.confinement import NAMESPACES, Confinement, number_of
from appliance.tools.scripts import script_argv

INSPECT = script_argv("inspect-confinement")
"""First words of the command."""


def status_of(capabilities: int, *, privileges: int = 1, seccomp: int = 2) -> str:
    """Fields of /proc/PID/status."""
    bits = "".join(f"Cap{name}:\t{capabilities:016x}\n" for name in ("Inh", "Prm", "Eff", "Bnd"))
    return f"Name:\tcat\n{bits}NoNewPrivs:\t{privileges}\nSeccomp:\t{seccomp}\n"


def confined_output(confinement: Confinement, *, joined: bool = True) -> str:
    """The whole output."""
    status = status_of(number_of(confinement.capabilities))
    hidden = [path for path in confinement.present if path.startswith("/proc/")]
    mounts = ["1 0 0:21 / /proc rw,nosuid - proc proc rw", "2 0 0:6 /null /dev/null ro - devtmpfs devtmpfs rw"]
    mounts += [f"{number} 1 0:21 / {path} ro,nosuid - proc proc rw" for number, path in enumerate(hidden, 3)]
    lines = [*mounts, *(f"own {name} {number}\nhost {name} 1" for number, name in enumerate(NAMESPACES, 10))]
    lines += ["executable read-only", "descriptor 1 tmpfs file"]
    return status + "".join(f"{line}\n" for line in lines) + (f"joined\n{status}unshare refused\n" if joined else "")
