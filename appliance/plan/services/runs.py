"""Every command of Apptainer that runs something of the image: no other place makes one. There are three kinds.

- Start: the instance, with the overlay as its root. How it is confined is checked in advance by a one-shot run, and
  after the start by its first process (``confinement.find_instance_gaps``).
- Join: a program in the running instance. Its programs are those of the overlay, which root in the container can
  replace: it has the instance's namespaces, capabilities and filter of system calls, and no more.
- Once: a program of the verified image, or one that is passed to the image's shell or Python, in namespaces of its
  own, without a network, with the capabilities that its purpose needs (``PURPOSES``). An overlay or a folder of the
  host is data below ``ROOT``. ``definitions/scripts/confined`` checks this in the process that becomes the program.

Also the programs of Apptainer and the host's devices are out of reach: ``definitions/scripts/run-image``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from appliance.catalog import Service
from appliance.catalog.model import Capability
from appliance.config.model import Site
from appliance.plan.services.confinement import (
    NAMESPACES,
    Confinement,
    capabilities_for,
    number_of,
    privilege_options,
)
from appliance.share import share

ROOT = "/mnt"
"""Where the data of a one-shot run is for its program."""
HOST, OVERLAY = "@HOST@", "@OVERLAY@"
"""Words that ``run-image`` replaces: the namespaces of the host, and a folder with the files of an overlay."""
NOT_CONFINED = 70
"""Status of a one-shot run that finds itself not confined; nothing else has run then."""

Purpose = Literal["trial", "seed", "read", "write", "database", "query", "slurmd"]
PURPOSES: dict[Purpose, tuple[Capability, ...] | None] = {
    "query": (),
    "slurmd": ("SETGID",),
    "read": ("DAC_OVERRIDE",),
    "write": ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID"),
    "seed": ("CHOWN", "DAC_OVERRIDE", "FOWNER"),
    "database": ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"),
    "trial": None,
}
"""What a one-shot run is for, and the capabilities that it has; None: those of the instance, which it stands for.

``query`` reads files of the image or asks its programs for their versions; ``read`` and ``write`` are about the state
of services, with its owners and modes; ``seed`` writes the site's files; ``database`` runs MariaDB to load a dump;
``slurmd`` starts that with files of the site: it gives up its groups first.
"""
PRIVATE = ("unshare", "--mount", "--propagation", "slave")
LONGEST = 2000
"""Characters of a word that is displayed; longer ones are texts of programs."""
ISOLATED = ("--pid", "--no-init", "--ipc", "--uts", "--net", "--network", "none")


@dataclass(frozen=True)
class Once:
    """A one-shot run.

    Attributes:
        overlay: path of an overlay that is not in use; what a container would see is below ``ROOT``.
        writable: whether the run may change it.
        bind: path of a folder of the host that is ``ROOT``, instead of an overlay.
        scratch: folders of the image that are empty and can be written.
    """

    purpose: Purpose
    argv: tuple[str, ...]
    overlay: str = ""
    writable: bool = False
    bind: str = ""
    scratch: tuple[str, ...] = ()


def container_options(site: Site, confinement: Confinement) -> list[str]:
    """Return the options of every run of the image but a join: only the kernel and the time zone are the host's."""
    options = ["--no-home", "--contain", "--cleanenv", *confinement.options()]
    # Pid files and sockets of the last run must not outlive it.
    options += ["--scratch", "/run"]
    # The container may not be able to reach the host's resolver; an address that refuses at once
    # is better than one that never answers.
    dns = ",".join(str(server) for server in site.networks.dns) or "127.0.0.1"
    return [*options, "--dns", dns]


def start_run(site: Site, confinement: Confinement, image: str, name: str, options: Sequence[str]) -> tuple[str, ...]:
    """Return the command that starts an instance; ``options``: network, host name and overlay."""
    # An instance has a PID namespace of its own in any case, and one for its host name.
    words = ("instance", "start", "--ipc", *container_options(site, confinement), *options, image, name)
    return _apptainer("start", words)


def join_run(instance: str, services: Sequence[Service] | None, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs ``argv`` in an instance.

    Args:
        services: of the instance, whose capabilities it has; None for an instance of an earlier version, which is not
            confined, and whose probes need all capabilities.
    """
    privileges = privilege_options(capabilities_for(services)) if services is not None else ()
    return _apptainer("join", ("exec", "--cleanenv", "--pwd", "/", *privileges, f"instance://{instance}", *argv))


def once_run(site: Site, confinement: Confinement, image: str, once: Once) -> tuple[str, ...]:
    """Return the command of a one-shot run."""
    declared = PURPOSES[once.purpose]
    capabilities = confinement.capabilities if declared is None else declared
    options = [*ISOLATED, *container_options(site, replace(confinement, capabilities=capabilities))]
    options += [word for folder in once.scratch for word in ("--scratch", folder)]
    if once.overlay:
        options += ["--bind", f"{OVERLAY}:{ROOT}" + ("" if once.writable else ":ro")]
    elif once.bind:
        options += ["--bind", f"{once.bind}:{ROOT}"]
    words = ("exec", "--pwd", "/", *options, image, *confined_argv(capabilities, NAMESPACES), *once.argv)
    data = (once.overlay, "rw" if once.writable else "ro", image) if once.overlay else ("", "", "")
    return _apptainer("once", words, data)


def confined_argv(capabilities: Sequence[Capability], namespaces: Sequence[str], host: str = HOST) -> tuple[str, ...]:
    """Return the first words of a program of the image that checks how it is confined, and then runs the rest."""
    text = share("definitions", "scripts", "confined").read_text()
    return ("sh", "-euc", text, "confined", str(number_of(capabilities)), " ".join(namespaces), host)


def _apptainer(
    kind: Literal["start", "join", "once"], words: Sequence[str], data: tuple[str, str, str] = ("", "", "")
) -> tuple[str, ...]:
    """Return a command of Apptainer in a mount namespace where its programs cannot be changed.

    Args:
        data: overlay whose files are data, its mode, and the image.
    """
    text = share("definitions", "scripts", "run-image").read_text()
    return (*PRIVATE, "sh", "-euc", text, "run-image", kind, *data, "apptainer", *words)


def run_text(path: str) -> str:
    """Return the first words of a run as a task of an engine, in a shell's text; ``run-image`` is a file there.

    The task's own options and ``confined`` follow (``engines/nomad.py``).

    Args:
        path: of that file on its host, quoted for the shell.
    """
    return f"{shlex.join(PRIVATE)} /bin/sh -eu {path} once '' '' '' apptainer exec"


def shown(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a command as it is displayed: without the texts of the scripts around it."""
    words = list(argv)
    if "run-image" in words:
        words = words[words.index("run-image") + 5 :]
    if "confined" in words:
        place = words.index("confined")
        words[place - 3 : place + 4] = []
    return tuple("PROGRAM" if "\n" in word or len(word) > LONGEST else word for word in words)
