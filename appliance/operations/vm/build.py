"""``sms vm build``: build a sealed disk image from packages and a playbook, unless nothing changed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

from appliance.catalog import Base, read_bases
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.local import Local
from appliance.operations.context import Cluster, need_build_host, need_root
from appliance.operations.image.build import check_versions, logging, make_current, resolve, work_folder
from appliance.operations.vm.image import DISK
from appliance.plan.image.definition import apt_sources, missing_mirrors, repository_urls
from appliance.plan.vm.vm import VmPlaces, need_vm
from appliance.progress import Progress
from appliance.share import PACKAGE, share
from appliance.shared.files import sync_folder
from appliance.tools import apt, files
from appliance.tools.ansible import Target, run_playbook
from appliance.tools.mmdebstrap import make_root
from appliance.tools.programs import find_missing
from appliance.tools.sealed import check_seal, read_seal, seal

BASE = "debian-12"
ESP_MB, ROOT_MB = 64, 2048
PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "mkfs.fat": "dosfstools",
    "mcopy": "mtools",
    "sfdisk": "fdisk",
    "qemu-img": "qemu-utils",
}
"""Programs that a build needs on this machine, and the Debian packages that contain them."""
ROLES = ("vm_packages", "vm_system", "vm_code", "vm_services", "vm_boot")
CODE = (
    "appliance/__init__.py",
    "appliance/errors.py",
    "appliance/text.py",
    "appliance/shared",
    "appliance/provision",
    "definitions/provision",
)
"""Parts of this program that run in the VM."""

# Child processes and their mounts end with the build.
ISOLATED = ("setpriv", "--pdeathsig", "KILL", "unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc")

MAKE_ROOT = (
    *("mmdebstrap", "--mode=root", "--variant=required"),
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale")),
)
# no_timer_check: on a busy host the kernel mistakes a late timer for a broken one and panics.
KERNEL_LINE = "root=LABEL=sms-root rw console=ttyS0 net.ifnames=0 quiet panic=10 no_timer_check"


@dataclass(frozen=True)
class VmPlan:
    """All inputs of a VM image. Plans with the same key need no build; those with the same root key share packages."""

    key: str
    root_key: str
    sources: tuple[str, ...]
    packages: tuple[str, ...]
    suite: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class BuiltVm:
    """The image of a build. ``digest``: of its manifest, which lists every file; ``fresh``: it was built just now."""

    key: str
    folder: str
    digest: str
    signer: str
    bytes: int
    packages: int
    fresh: bool


def build_vm(cluster: Cluster, *, force: bool = False) -> BuiltVm:
    """Build and seal the VM's image, and make it the current one.

    Args:
        force: build even if the same image exists.

    Raises:
        Refused: a program or a key is missing, or this machine is not the build host.
        SmsError: the build failed; the current image is unchanged.
    """
    need_root()
    need_vm(cluster.site)
    need_build_host(cluster.site)
    _check_machine(cluster)
    plan = plan_vm(cluster)
    images = Path(VmPlaces(cluster.site).images)
    images.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = images / plan.key
    with cluster.env.locks.hold(Local(), str(images / ".build.lock"), "another build of the VM is running"):
        fresh = force or not _is_sealed(cluster, folder)
        if fresh:
            _build(cluster, plan, folder)
        with cluster.env.progress.step("verify the seal") as step:
            found = check_seal(folder, cluster.site.signing.public_keys)
            step.detail(f"{found.signer.name} manifest sha256:{found.digest[:16]}")
        make_current(images / "current", plan.key)
    size = found.files[DISK][1]
    return BuiltVm(plan.key, str(folder), found.digest, found.signer.name, size, len(found.about["packages"]), fresh)


def _check_machine(cluster: Cluster) -> None:
    missing = find_missing(Local(), *PROGRAMS)
    if missing:
        packages = " ".join(sorted({PROGRAMS[program] for program in missing}))
        raise Refused(f"a build of the VM needs {', '.join(missing)}", hint=f"apt-get install {packages}")
    signing = cluster.site.signing
    for key in (signing.private_key, *signing.public_keys):
        if not key.is_file():
            raise Refused(f"there is no signing key {key}", hint="`sms key create` creates a pair")


def plan_vm(cluster: Cluster) -> VmPlan:
    """Resolve package versions and compute the image's key. Only apt's lists below the state folder are written.

    Raises:
        ConfigError: this machine has no Debian 12 mirror.
    """
    base = read_bases(share("definitions", "bases"))[BASE]
    mirrors = apt.find_mirrors(Local(), {name: each.suites for name, each in base.repositories.items()})
    if cluster.base.name == BASE:
        mirrors |= repository_urls(base, cluster.site.base.mirrors)
    if missing := missing_mirrors(base, mirrors):
        raise ConfigError(
            f"no mirror is known for {', '.join(missing)} of Debian 12, which the VM is built from",
            hint="build on a machine with Debian 12: its mirrors are used",
        )
    packages = needed_packages()
    sources = apt_sources(base, mirrors)
    versions = resolve(cluster, "vm", sources, packages)
    inputs = _inputs(base, packages, versions)
    root = {name: inputs[name] for name in ("base", "packages", "versions")} | {"command": MAKE_ROOT}
    key, root_key = (hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest() for one in (inputs, root))
    return VmPlan(key, root_key, tuple(sources), packages, base.repositories["debian"].suites[0], versions)


def needed_packages() -> tuple[str, ...]:
    """Return the Debian packages that the playbook's role installs."""
    path = share("playbooks", "roles", "vm_packages", "vars", "Debian.yml")
    packages: list[str] = yaml.safe_load(path.read_text())["vm_packages_wanted"]
    return tuple(packages)


def _inputs(base: Base, packages: tuple[str, ...], versions: Mapping[str, str]) -> dict[str, object]:
    """Return what the image's key depends on. Mirrors do not count: a version of a package is the same on each."""
    files = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(_sources())}
    settings = [MAKE_ROOT, KERNEL_LINE, ESP_MB, ROOT_MB]
    return {"base": base.name, "packages": packages, "versions": dict(versions), "files": files, "settings": settings}


def _sources() -> Iterator[tuple[str, Path]]:
    """Yield our files that affect the image, with their names."""
    yield from code_files()
    folders = [share("playbooks", "roles", role) for role in ROLES] + [share("definitions", "vm")]
    playbooks = [share("playbooks", "provisioning-vm.yml"), share("playbooks", "connection_plugins", "sms_root.py")]
    for path in [*playbooks, *(path for folder in folders for path in folder.rglob("*") if path.is_file())]:
        if "__pycache__" not in path.parts:
            yield str(path.relative_to(share())), path


def code_files() -> Iterator[tuple[str, Path]]:
    """Yield the files that run in the VM, with their paths there."""
    package = PACKAGE
    for name in CODE:
        top = package.parent / name if name.startswith("appliance/") else share(*name.split("/"))
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                yield name if path == top else f"{name}/{path.relative_to(top)}", path


def _pack_code(target: Path) -> None:
    with tarfile.open(target, "w") as archive:
        for name, path in sorted(code_files()):
            data = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o644, 1577836800
            archive.addfile(entry, io.BytesIO(data))


def is_built(cluster: Cluster, plan: VmPlan) -> bool:
    """Return whether the image of a plan exists."""
    return _is_sealed(cluster, Path(VmPlaces(cluster.site).images) / plan.key)


def _is_sealed(cluster: Cluster, folder: Path) -> bool:
    """Return whether the folder has an image of a complete build, signed with one of the current keys."""
    if not folder.is_dir():
        return False
    try:
        read_seal(folder, cluster.site.signing.public_keys)
    except Refused:
        return False
    return True


def _build(cluster: Cluster, plan: VmPlan, folder: Path) -> None:
    """Build in a temporary folder and rename it at the end: the final name always has a complete, sealed image."""
    with ExitStack() as undo:
        work = undo.enter_context(work_folder(folder.parent))
        image = work / "image"
        image.mkdir(mode=0o700)
        _make_root(plan, work, cluster.env.progress)
        installed = _find_installed(plan, work / "root")
        _configure(work, cluster.env.progress)
        with cluster.env.progress.step("create the disk") as step:
            root, scripts = str(work / "root"), share("definitions", "vm")
            Local().run("sh", str(scripts / "clean-root"), root)
            values = (root, str(work), str(ESP_MB), str(ROOT_MB), KERNEL_LINE)
            Local().run(*ISOLATED, "sh", str(scripts / "make-disk"), *values, timeout=1800)
            (image / DISK).chmod(0o600)
            step.detail(f"{(image / DISK).stat().st_size >> 20} MiB")
        about = {"kind": "provisioning-vm", "key": plan.key, "base": BASE, "packages": installed}
        seal(image, cluster.site.signing.private_key, about=about)
        old = folder.with_name(f"build-old-{plan.key[:16]}")
        if folder.exists():
            folder.rename(old)
            undo.callback(shutil.rmtree, old, ignore_errors=True)
        with (image / DISK).open("rb") as stream:
            os.fsync(stream.fileno())
        image.rename(folder)
        sync_folder(str(folder.parent))


def _make_root(plan: VmPlan, work: Path, progress: Progress) -> None:
    log = work.parent / "build.log"
    argv = (*ISOLATED, *MAKE_ROOT, f"--include={','.join(plan.packages)}", plan.suite, str(work / "root"), "-")
    kept = work.parent / f"root-{plan.root_key[:32]}.tar"
    tree = ("-C", str(work / "root"), "--xattrs", "--numeric-owner")
    for old in work.parent.glob("root-*.tar*"):
        if old != kept:
            old.unlink()
    with progress.step("install packages") as step:
        if kept.exists():
            (work / "root").mkdir()
            Local().run("tar", *tree, "-xpf", str(kept), timeout=600)
            step.detail(f"{len(plan.versions)} packages, from the archive of an earlier build")
            return
        with logging(log, step) as on_line:
            make_root(Local(), argv, plan.sources, log=log, on_line=on_line)
        # A later build with the same packages unpacks it instead of installing them again.
        new = f"{kept}.new"
        files.make_file(Local(), new)
        Local().run("tar", *tree, "-cf", new, ".", timeout=600)
        Path(new).rename(kept)
        step.detail(f"{len(plan.versions)} packages")


def _find_installed(plan: VmPlan, root: Path) -> dict[str, str]:
    """Return the version of each installed package. Raises SmsError if one is not the resolved version."""
    shown = Local().run("dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f", "${Package}\\t${Version}\\n").text
    installed = dict(line.split("\t") for line in shown.splitlines())
    check_versions(plan.versions, installed)
    return installed


def _configure(work: Path, progress: Progress) -> None:
    """Run the playbook in the root folder."""
    code = work / "code.tar"
    _pack_code(code)
    variables = {"sms_definitions": str(share("definitions", "vm")), "sms_code": str(code), "sms_vm_install": False}
    target = Target("provisioning-vm", "/usr/bin/python3", root=work / "root")
    with progress.step("run the playbook") as step:
        play = run_playbook(share("playbooks", "provisioning-vm.yml"), target, variables, on_task=step.detail)
        step.detail(f"{len(play.changed)} steps")
    if play.failed:
        words = "\n  ".join(f"{failed.task}: {failed.message}" for failed in play.failed)
        raise SmsError(f"the VM's root could not be configured\n  {words}", hint="run it again with --force")
