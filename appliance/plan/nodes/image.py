"""Node images: inputs and key of an image, its build command, the initramfs as a cpio archive."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from appliance.catalog.node import NodeProfile
from appliance.config.model import SystemUser
from appliance.config.provisioning import Profile

FORMAT = 1
"""Increment it when the same inputs produce another image."""
CA = "etc/sms/tls/ca.pem"
"""Path in the root of the CA that nodes trust; the manifest has its digest."""
FILES = ("root.squashfs", "vmlinuz", "initrd.img")
SECRET_FILES = re.compile(
    r"(?:munge\.key|.*\.key|shadow-|gshadow-|ssh_host_.*_key|id_(?:rsa|ecdsa|ed25519)|credential\.secret|random-seed)"
)
SQUASHFS = ("-comp", "zstd", "-Xcompression-level", "9", "-no-progress", "-noappend", "-no-xattrs")
VIRTUAL = "no_timer_check"
"""Kernel arguments of virtual machines: on a busy host the kernel mistakes a late timer for a broken one and panics."""
LEFT_OUT = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
    "/usr/share/bash-completion/*",
    "/usr/lib/udev/hwdb.d/*",
    "/lib/udev/hwdb.d/*",
)
"""Paths that dpkg does not unpack: the root is in the node's memory, where manuals only take room."""
NO_USRMERGE = """\
mkdir -p "$1/etc/apt/preferences.d"
printf 'Package: usrmerge\\nPin: release *\\nPin-Priority: -1\\n' >"$1/etc/apt/preferences.d/sms"
"""
"""Shell: skip the package usrmerge, which depends on Perl; the hook below has merged /usr already."""


@dataclass(frozen=True)
class NodeInputs:
    """What an image is built from besides its profile.

    Attributes:
        sources: lines of sources.list; not part of the key, only the resulting ``versions`` are.
        files, initramfs: files of the root and of the initramfs, by path.
        tools: programs that modify the root but are not copied into it.
        users: ids of system users that the site gives, by name.
    """

    sources: Sequence[str]
    versions: Mapping[str, str]
    files: Mapping[str, tuple[bytes, int]]
    initramfs: Mapping[str, tuple[bytes, int]]
    tools: Mapping[str, bytes]
    users: Mapping[str, SystemUser] = field(default_factory=dict)


@dataclass(frozen=True)
class NodePlan:
    """An image to build. Plans with the same key need no build.

    ``root_key`` depends on the packages only: installing them takes most of the time.
    """

    name: str
    key: str
    root_key: str
    packages: tuple[str, ...]
    later: tuple[str, ...]
    arguments: str
    groups: tuple[str, ...]
    profile: NodeProfile = field(repr=False)
    inputs: NodeInputs = field(repr=False)

    @property
    def about(self) -> dict[str, object]:
        """Fields of the sealed manifest besides the files."""
        files = self.inputs.files
        return {
            "kind": "node",
            "profile": self.name,
            "key": self.key,
            "arguments": self.arguments,
            "groups": list(self.groups),
            "ca": hashlib.sha256(files[CA][0]).hexdigest() if CA in files else "",
        }


def packages_of(profile: NodeProfile, site: Profile) -> tuple[str, ...]:
    """Return the packages to install, sorted, including the kernel's."""
    return tuple(sorted({*profile.packages, *site.packages, profile.kernels[site.kernel]}))


def plan_node(name: str, profile: NodeProfile, site: Profile, inputs: NodeInputs) -> NodePlan:
    """Plan an image."""
    versions, files, initramfs = inputs.versions, inputs.files, inputs.initramfs
    packages = packages_of(profile, site)
    virtual = site.kernel == "cloud"
    more = VIRTUAL if virtual else ""
    later = profile.later if virtual else ()
    arguments = " ".join(filter(None, (profile.arguments, more, site.arguments)))
    installed: dict[str, object] = {
        "packages": packages,
        "versions": sorted(versions.items()),
        "left_out": LEFT_OUT,
        "hook": NO_USRMERGE,
    }
    if inputs.users:
        installed["users"] = account_lines(inputs.users)
    parts = {
        "format": FORMAT,
        "installed": installed,
        "drivers": profile.drivers,
        "modules": profile.modules,
        "mask": profile.mask,
        "later": later,
        "squashfs": SQUASHFS,
        "files": _digests({**files, **{f"initramfs/{path}": each for path, each in initramfs.items()}}),
        "tools": _digests({path: (data, 0) for path, data in inputs.tools.items()}),
    }
    # Arguments and groups are not in the root: changing them needs a new manifest, not a new root.
    text = json.dumps({**parts, "arguments": arguments, "groups": site.groups, "profile": name}, sort_keys=True)
    return NodePlan(
        name,
        key=hashlib.sha256(text.encode()).hexdigest(),
        root_key=hashlib.sha256(json.dumps([FORMAT, installed]).encode()).hexdigest(),
        packages=packages,
        later=later,
        arguments=arguments,
        groups=site.groups,
        profile=profile,
        inputs=inputs,
    )


def _digests(files: Mapping[str, tuple[bytes, int]]) -> list[tuple[str, str, int]]:
    return [(path, hashlib.sha256(data).hexdigest(), mode) for path, (data, mode) in sorted(files.items())]


def account_lines(users: Mapping[str, SystemUser]) -> str:
    """Return shell that creates system users in the root $1, before packages do: they take those that exist.

    The asterisk stands for no password.
    """
    return "".join(
        f'echo {name}:x:{ids.gid}: >>"$1/etc/group"\n'
        f"echo '{name}:*:{ids.uid}:{ids.gid}::/nonexistent:/usr/sbin/nologin'" + ' >>"$1/etc/passwd"\n'
        for name, ids in sorted(users.items())
    )


def mmdebstrap_argv(plan: NodePlan, archive: str, work: str) -> tuple[str, ...]:
    """Return the command that creates an archive of the root with its packages; it reads sources.list from stdin.

    It is killed when its parent ends; its mounts are in a private namespace and end with it.
    """
    return (
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"),
        # INITRD: the kernel's package would create an initramfs, which takes as long as everything else.
        *("env", "INITRD=No", f"TMPDIR={work}", "mmdebstrap", "--mode=root", "--variant=minbase", "--format=tar"),
        *("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", f"--setup-hook={NO_USRMERGE}"),
        *((f"--essential-hook={account_lines(plan.inputs.users)}",) if plan.inputs.users else ()),
        '--customize-hook=rm "$1/etc/apt/preferences.d/sms"',
        f"--include={','.join(plan.packages)}",
        '--aptopt=Apt::Install-Recommends "false"',
        '--aptopt=Acquire::Check-Valid-Until "false"',
        *(f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT),
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        "--dpkgopt=force-unsafe-io",
        *("", archive, "-"),
    )


def needed_modules(dependencies: str, drivers: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the paths of an initramfs's modules with their dependencies, from the text of ``modules.dep``.

    Args:
        drivers: folders and files below ``kernel/``.
        names: additional modules by name; built-in ones are not listed in ``modules.dep`` and are ignored.
    """
    lines = (line.partition(":") for line in dependencies.splitlines())
    needs = {path: rest.split() for path, _, rest in lines}
    chosen = {path for path in needs if _is_below(path, drivers)}
    by_name = {PurePosixPath(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    chosen |= {by_name[name] for name in names if name in by_name}
    # modules.dep includes indirect dependencies.
    return sorted(chosen | {need for path in chosen for need in needs[path]})


def _is_below(path: str, drivers: Iterable[str]) -> bool:
    return any(
        path in (f"kernel/{each}", f"kernel/{each}.xz") or path.startswith(f"kernel/{each}/") for each in drivers
    )


def cpio(entries: Mapping[str, tuple[bytes, int]], links: Mapping[str, str] | None = None) -> bytes:
    """Return a cpio archive in the kernel's format (newc): files owned by root, after the folders that contain them.

    Args:
        entries: bytes and mode by path.
        links: targets of symbolic links by path.
    """
    parts: list[bytes] = []
    folders = {str(folder) for path in (*entries, *(links or {})) for folder in PurePosixPath(path).parents}
    everything: dict[str, tuple[bytes, int]] = dict.fromkeys(folders - {"."}, (b"", stat.S_IFDIR | 0o755))
    everything |= {path: (data, stat.S_IFREG | mode) for path, (data, mode) in entries.items()}
    everything |= {path: (where.encode(), stat.S_IFLNK | 0o777) for path, where in (links or {}).items()}
    for number, (path, (data, mode)) in enumerate(sorted(everything.items()), 1):
        parts.append(_cpio_entry(number, path, data, mode))
    parts.append(_cpio_entry(0, "TRAILER!!!", b"", 0))
    return b"".join(parts)


def _cpio_entry(number: int, path: str, data: bytes, mode: int) -> bytes:
    name = path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    fields = (number, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name), 0)
    head = b"070701" + b"".join(b"%08x" % value for value in fields) + name
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def find_secrets(names: Iterable[str], shadow: str) -> list[str]:
    """Return the secrets of a root: files with names of secrets, and passwords in ``/etc/shadow``."""
    found = [name for name in names if SECRET_FILES.fullmatch(PurePosixPath(name).name)]
    for line in shadow.splitlines():
        name, _, rest = line.partition(":")
        if not re.fullmatch(r"[!*]*", rest.partition(":")[0]):
            found.append(f"/etc/shadow: a password of {name}")
    return found
