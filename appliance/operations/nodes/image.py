"""``sms image build PROFILE``: build and seal images for diskless nodes, in the state folder's nodes/."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.catalog import read_bases
from appliance.catalog.node import read_node_profile
from appliance.config.provisioning import Profile
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.local import Local
from appliance.operations.context import Cluster, need_build_host, need_root, runtime_files
from appliance.operations.image.build import logging, remove_left, resolve, work_folder
from appliance.operations.image.sources import find_mirrors
from appliance.operations.vm.client import tls_folder
from appliance.plan.image.definition import apt_sources
from appliance.plan.nodes.image import (
    CA,
    SQUASHFS,
    NodeInputs,
    NodePlan,
    cpio,
    find_secrets,
    mmdebstrap_argv,
    needed_modules,
    packages_of,
    plan_node,
)
from appliance.plan.vm.vm import need_vm
from appliance.share import share
from appliance.shared.files import replace_file, sync_folder
from appliance.tools import files, mmdebstrap
from appliance.tools.sealed import check_seal, digest_file, read_key, read_seal, seal

PROGRAMS = ("sms-filesync", "sms-enroll", "smsenroll.py", "smsfiles.py", "smskept.py", "smslink.py", "smsrt.py")
"""Programs of the container that are also installed on nodes."""
CURRENT = "current"
KEEP_ROOTS = 4
"""Number of root archives to keep."""


@dataclass(frozen=True)
class NodeImage:
    """An image in the state folder; ``digest`` is that of its root.squashfs, and the name of its folder."""

    profile: str
    digest: str
    path: str
    bytes: int
    built: float
    packages: int
    current: bool
    fresh: bool = False


def nodes_folder(cluster: Cluster) -> Path:
    """Return the folder of node images: they are PROFILE/DIGEST below it."""
    return Path(cluster.site.state) / "nodes" / cluster.site.cluster


def find_profile(cluster: Cluster, name: str) -> Profile:
    """Return the site's profile of that name.

    Raises:
        ConfigError: the site has no VM.
        ConfigError: the site has no such profile either.
    """
    profiles = need_vm(cluster.site).profiles
    if name not in profiles:
        raise ConfigError(
            f"the site has no node profile {name}", hint=f"it has {', '.join(profiles)}: `sms image profiles`"
        )
    return profiles[name]


def plan_image(cluster: Cluster, name: str) -> NodePlan:
    """Resolve package versions and plan the image. Only apt's lists below the state folder are written.

    Raises:
        Refused: there is no such profile.
        SmsError: a package does not exist, or no mirror answers.
    """
    site = find_profile(cluster, name)
    folder = share("definitions", "nodes")
    profile = read_node_profile(folder, name)
    base = read_bases(share("definitions", "bases"))[profile.base]
    given = cluster.site.base.mirrors if cluster.base.name == base.name else {}
    sources = apt_sources(base, find_mirrors(Local(), base, given))
    versions = resolve(cluster, base.name, sources, packages_of(profile, site))
    inputs = NodeInputs(
        sources,
        versions,
        files=_files(cluster, folder),
        initramfs={
            "init": ((folder / "init").read_bytes(), 0o755),
            "etc/udhcpc": ((folder / "udhcpc").read_bytes(), 0o755),
            **_keys(cluster),
        },
        tools={"finish": (folder / "finish").read_bytes()},
        users=cluster.site.system_users,
    )
    return plan_node(name, profile, site, inputs)


def _files(cluster: Cluster, folder: Path) -> Mapping[str, tuple[bytes, int]]:
    """Return our files in the root, by path. The site's only file is the CA's certificate, which is public."""
    files = {
        str(path.relative_to(folder / "root")): (path.read_bytes(), 0o644)
        for path in sorted((folder / "root").rglob("*"))
        if path.is_file()
    }
    programs = runtime_files()
    files |= {f"opt/sms/bin/{name}": (programs[name], 0o755) for name in PROGRAMS if name in programs}
    authority = tls_folder(cluster) / "ca.pem"
    try:
        return {**files, CA: (authority.read_bytes(), 0o644)}
    except OSError as error:
        raise Refused(f"cannot read {authority}: {error.strerror}", hint="`sms key ca create` creates it") from error


def _keys(cluster: Cluster) -> Mapping[str, tuple[bytes, int]]:
    """Return the keys with which a node verifies the manifest, by path in the initramfs; the suffix is the type."""
    keys = [read_key(path) for path in cluster.site.signing.public_keys]
    return {f"etc/sms/keys/{number}.{kind}": (pem, 0o644) for number, (kind, pem) in enumerate(keys)}


def build_node(cluster: Cluster, name: str, *, force: bool = False) -> NodeImage:
    """Build and seal the image of a profile unless nothing changed, and make it the current one.

    Raises:
        Refused: there is no such profile, a program or a key is missing, or this machine is not the build host.
        SmsError: the build failed; the current image is unchanged.
    """
    need_root()
    need_build_host(cluster.site)
    host = Local()
    mmdebstrap.require_programs(host)
    plan = plan_image(cluster, name)
    folder = nodes_folder(cluster) / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with cluster.env.locks.hold(host, str(folder / ".lock"), f"another build of {name} is running"):
        remove_left(folder)
        found = None if force else _built_before(cluster, plan, folder)
        digest = found or _build(cluster, plan, folder)
        _make_current(folder, digest)
    image = read_image(cluster, name, digest)
    return NodeImage(**{**vars(image), "fresh": not found})


def _built_before(cluster: Cluster, plan: NodePlan, folder: Path) -> str | None:
    """Return the digest of an existing image of the same plan with a valid seal."""
    for manifest in folder.glob("*/manifest.json"):
        try:
            if json.loads(manifest.read_text()).get("key") == plan.key:
                check_seal(manifest.parent, cluster.site.signing.public_keys)
                return manifest.parent.name
        except (Refused, ValueError):
            continue
    return None


def _build(cluster: Cluster, plan: NodePlan, folder: Path) -> str:
    """Build in a temporary folder and rename it to the digest at the end: a named image is complete and sealed."""
    host = Local()
    with work_folder(folder) as work:
        root, out = work / "root", work / "image"
        out.mkdir()
        archive = _root_archive(cluster, plan, work, folder / "build.log")
        with cluster.env.progress.step("unpack the packages") as step:
            mmdebstrap.unpack_root(host, str(archive), str(root))
            packages = _packages(root)
            step.detail(f"{len(packages)} packages")
        version = _finish(plan, root)
        _check_no_secrets(root)
        with cluster.env.progress.step("create the initramfs") as step:
            shutil.copyfile(root / "boot" / f"vmlinuz-{version}", out / "vmlinuz")
            _make_initramfs(plan, root, version, work, out / "initrd.img")
            step.detail(f"{(out / 'initrd.img').stat().st_size >> 10} KiB")
        with cluster.env.progress.step("create root.squashfs") as step:
            mmdebstrap.make_squashfs(host, str(root), str(out / "root.squashfs"), SQUASHFS)
            step.detail(f"{(out / 'root.squashfs').stat().st_size >> 20} MiB")
        with cluster.env.progress.step("seal the image"):
            seal(out, cluster.site.signing.private_key, about={**plan.about, "kernel": version, "packages": packages})
            # Nodes would refuse it.
            read_seal(out, cluster.site.signing.public_keys)
            digest = digest_file(out / "root.squashfs")[0]
        target = folder / digest
        if target.exists():  # the same root again: its manifest may differ
            shutil.rmtree(target)
        _put_in_place(out, target)
    return digest


def _put_in_place(made: Path, target: Path) -> None:
    """Rename a complete file or folder: with its name it is on the disk."""
    Local().run("sync", "-f", str(made), timeout=files.SYNC_S)
    made.rename(target)
    sync_folder(str(target.parent))


def _root_archive(cluster: Cluster, plan: NodePlan, work: Path, log: Path) -> Path:
    """Return an archive of the root with its packages, without files of the site; reuses that of an earlier build.

    Clusters and profiles share these archives; only the newest are kept.
    """
    store = Path(cluster.places.images).parent / "cache" / "node-roots"
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    archive = store / f"{plan.root_key}.tar.zst"
    if archive.exists():
        archive.touch()
        return archive
    part = work / "root.tar.zst"
    with cluster.env.progress.step("install the packages") as step, logging(log, step) as on_line:
        argv = mmdebstrap_argv(plan, str(part), str(work))
        mmdebstrap.make_root(Local(), argv, plan.inputs.sources, log=log, on_line=on_line)
        step.detail(f"{len(plan.inputs.versions)} packages")
    _put_in_place(part, archive)
    for old in sorted(store.glob("*.tar.zst"), key=lambda each: -each.stat().st_mtime)[KEEP_ROOTS:]:
        old.unlink()
    return archive


def _packages(root: Path) -> dict[str, str]:
    """Return the version of each package in the root."""
    listed = Local().run("chroot", str(root), "dpkg-query", "-Wf", "${Package} ${Version}\\n").text
    return dict(line.split(" ", 1) for line in listed.splitlines())


def _finish(plan: NodePlan, root: Path) -> str:
    """Add our files to the root and run the finish script. Returns the kernel's version."""
    for path, (data, mode) in plan.inputs.files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)
    script = str(share("definitions", "nodes", "finish"))
    units = [f"mask {unit}\n" for unit in plan.profile.mask] + [f"later {unit}\n" for unit in plan.later]
    versions = Local().run("sh", script, str(root), input="".join(units).encode()).text.split()
    if len(versions) != 1:
        raise SmsError(f"the root has {len(versions)} kernels instead of one: {', '.join(versions) or 'none'}")
    return versions[0]


def _check_no_secrets(root: Path) -> None:
    """Raise SmsError if the root contains a secret: everybody can read the image."""
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    if found := find_secrets(names, (root / "etc/shadow").read_text()):
        raise SmsError(
            f"the root contains secrets: {', '.join(found[:5])}",
            hint="a package of the profile created them; `sms files push` distributes the site's files",
        )


def _make_initramfs(plan: NodePlan, root: Path, version: str, work: Path, target: Path) -> None:
    """Create the initramfs: busybox, the modules for network and root, and our init program."""
    modules = f"lib/modules/{version}"
    paths = needed_modules((root / modules / "modules.dep").read_text(), plan.profile.drivers, plan.profile.modules)
    beside = root / "run" / "initramfs"
    for path in (*paths, "modules.order", "modules.builtin", "modules.builtin.modinfo"):
        (beside / modules / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / modules / path, beside / modules / path)
    # Run the root's depmod: this host may have none.
    Local().run("chroot", str(root), "depmod", "-b", "/run/initramfs", version)
    entries = {f"{modules}/{path}": ((beside / modules / path).read_bytes(), 0o644) for path in paths}
    for name in ("modules.dep", "modules.alias", "modules.symbols", "modules.builtin", "modules.softdep"):
        if (beside / modules / name).exists():
            entries[f"{modules}/{name}"] = ((beside / modules / name).read_bytes(), 0o644)
    shutil.rmtree(beside)
    busybox = _find_busybox(root)
    entries |= {
        "bin/busybox": (busybox.read_bytes(), 0o755),
        **_openssl(root),
        **plan.inputs.initramfs,
        # Of the images that the site has signed, it boots that of the same build only.
        "etc/sms/build": (f"{plan.key}\n".encode(), 0o644),
        **{f"{folder}/.here": (b"", 0o644) for folder in ("dev", "proc", "sys", "run")},
    }
    applets = Local().run(str(busybox), "--list").text.split()
    archive = work / "initramfs.cpio"
    archive.write_bytes(cpio(entries, {f"bin/{name}": "busybox" for name in applets if name != "busybox"}))
    mmdebstrap.compress(Local(), str(archive), str(target))


def _openssl(root: Path) -> dict[str, tuple[bytes, int]]:
    """Return the root's openssl with its libraries, by path in the initramfs."""
    if not (root / "usr/bin/openssl").is_file():
        raise SmsError("the root has no openssl", hint="name openssl among the profile's packages")
    listed = Local().run("chroot", str(root), "ldd", "/usr/bin/openssl").text
    libraries = re.findall(r"(?:^|=>)\s*/(\S+) \(0x", listed, re.MULTILINE)
    return {
        "bin/openssl": ((root / "usr/bin/openssl").read_bytes(), 0o755),
        **{path: ((root / path).read_bytes(), 0o755) for path in libraries},
    }


def _find_busybox(root: Path) -> Path:
    for path in (root / "bin/busybox", root / "usr/bin/busybox"):
        if path.is_file():
            return path
    raise SmsError("the root has no busybox", hint="name busybox-static among the profile's packages")


def _make_current(folder: Path, digest: str) -> None:
    """Make an image the current one, atomically."""
    replace_file(str(folder / CURRENT), f"{digest}\n".encode(), 0o644)


def read_image(cluster: Cluster, name: str, digest: str) -> NodeImage:
    """Return the description of an image in this host's store."""
    folder = nodes_folder(cluster) / name
    path = folder / digest
    about = json.loads((path / "manifest.json").read_text())
    size = sum(each["bytes"] for each in about["files"].values())
    built = (path / "manifest.sig").stat().st_mtime
    return NodeImage(name, digest, str(path), size, built, len(about["packages"]), digest == current_digest(folder))


def current_digest(folder: Path) -> str | None:
    """Return the digest of a profile's current image, or None."""
    try:
        return (folder / CURRENT).read_text().strip() or None
    except FileNotFoundError:
        return None


def list_nodes(cluster: Cluster) -> list[NodeImage]:
    """Return the node images in this host's store, by profile, the newest first."""
    found = [
        read_image(cluster, signature.parents[1].name, signature.parent.name)
        for signature in nodes_folder(cluster).glob("*/*/manifest.sig")
        if len(signature.parent.name) == 64
    ]
    return sorted(found, key=lambda image: (image.profile, -image.built))


def prune_nodes(cluster: Cluster, keep: int, *, dry_run: bool) -> list[NodeImage]:
    """Remove all but the newest ``keep`` images of each profile, never the current one. Returns the removed ones."""
    old = []
    images = list_nodes(cluster)
    for name in {image.profile for image in images}:
        old += [image for image in [one for one in images if one.profile == name][keep:] if not image.current]
    for image in [] if dry_run else old:
        (Path(image.path) / "manifest.sig").unlink()  # first, so that a partly removed image is not listed
        shutil.rmtree(image.path)
    return old


@dataclass(frozen=True)
class ProfileLine:
    """A node profile, with the groups that boot it; ``current``: digest of its current image on this machine."""

    profile: str
    groups: list[str]
    kernel: str
    packages: list[str]
    arguments: str | None
    current: str | None


def list_profiles(cluster: Cluster) -> list[ProfileLine]:
    """Return the site's node profiles."""
    return [
        ProfileLine(
            name,
            list(profile.groups),
            profile.kernel,
            list(profile.packages),
            profile.arguments,
            current_digest(nodes_folder(cluster) / name),
        )
        for name, profile in need_vm(cluster.site).profiles.items()
    ]
