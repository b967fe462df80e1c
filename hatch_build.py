"""Builds what is compiled when the package is built: the native core (analysis/core/*.c), with the compiler's hardening
on, and the signatures of the shipped services.

Also a program: ``python hatch_build.py`` builds the core into the checkout, which is what ``make core`` does.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
SOURCES = ROOT / "analysis" / "core"
OUTPUT = ROOT / "analysis" / "_core.abi3.so"

FLAGS = [
    *("-std=c11", "-D_GNU_SOURCE", "-O3", "-flto", "-fPIC", "-shared", "-fvisibility=hidden", "-s"),
    *("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wformat=2"),
    # What Debian and Fedora build their own packages with.
    *("-D_FORTIFY_SOURCE=2", "-fstack-protector-strong", "-fstack-clash-protection"),
    *("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"),
]


def compile_core(output: Path = OUTPUT, *extra: str) -> None:
    """Compile the core into ``output``; the file appears whole or not at all.

    Raises:
        SystemExit: there is no compiler, or it failed; with what it said.
    """
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    include = sysconfig.get_paths()["include"]
    new = output.with_name(output.name + ".new")
    sources = [str(path) for path in sorted(SOURCES.glob("*.c")) if path.name != "fuzz.c"]
    argv = [compiler[0], *FLAGS, *extra, f"-I{include}", *sources, "-o", str(new)]
    try:
        subprocess.run(argv, check=True)
    except FileNotFoundError:
        raise SystemExit(f"{compiler[0]} is not installed; on Debian: apt install gcc libc6-dev python3-dev") from None
    except subprocess.CalledProcessError:
        raise SystemExit("the native core could not be compiled; are Python's headers installed?") from None
    new.rename(output)


def compile_signatures() -> None:
    """Write the compiled form of the catalogue into the checkout (appliance/operations/classify/compiled.py)."""
    subprocess.run([sys.executable, "-m", "appliance.operations.classify.compiled"], cwd=ROOT, check=True)


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program, where hatchling is not needed
    pass
else:

    class CoreHook(BuildHookInterface):  # type: ignore[type-arg]
        """Puts what is compiled into the wheel, and next to its sources for an editable install."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Compile, and say that the wheel is this platform's (and any Python's from 3.11 on: the stable ABI)."""
            if self.target_name != "wheel":
                return
            compile_core()
            compile_signatures()
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"
            build_data["pure_python"] = False
            build_data["artifacts"] += ["analysis/_core.abi3.so", "appliance/_signatures.json"]


if __name__ == "__main__":
    compile_core(OUTPUT, *sys.argv[1:])
