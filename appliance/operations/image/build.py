"""``sms build``: build and sign the site's image, unless it is up to date."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.catalog import Base
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import OnLine
from appliance.host.local import Local
from appliance.operations.context import Cluster, need_build_host, need_root, runtime_files
from appliance.operations.image.deliver import check_signature
from appliance.operations.image.sources import Sources, credentials_folder, find_sources
from appliance.operations.preflight import prepare_confinement
from appliance.plan.image.definition import (
    BuildInputs,
    BuildPlan,
    apt_sources,
    packages_for,
    plan_build,
)
from appliance.plan.image.repositories import MOUNTS, hide, own_sources
from appliance.plan.image.sbom import read_packages, sbom
from appliance.plan.services.runs import Once, once_run
from appliance.progress import Step
from appliance.share import share
from appliance.shared.files import replace_file, sync_folder
from appliance.tools import apptainer, apt
from appliance.tools.apt import Resolver


@dataclass(frozen=True)
class Built:
    """The image that a build created or found; ``fresh``: it was built now."""

    key: str
    image: str
    manifest: str
    sbom: str
    signer: str
    bytes: int
    packages: int
    fresh: bool


def plan(cluster: Cluster, *, lock: Path, locked: bool) -> BuildPlan:
    """Resolve package versions and plan the image. Changes only apt's package lists in the state folder.

    Raises:
        Refused: ``locked``, and the versions differ from the lock file.
    """
    sources = _find_sources(cluster, lock, locked)
    return _plan(cluster, sources, lock=lock, locked=locked)


def _find_sources(cluster: Cluster, lock: Path, locked: bool) -> Sources:
    if cluster.base.manager == "apt" and locked:
        read_lock(lock, cluster.base)  # report an invalid lock file before the slow queries
    return find_sources(cluster, Local())


def _plan(cluster: Cluster, sources: Sources, *, lock: Path, locked: bool) -> BuildPlan:
    base, more = cluster.base, cluster.site.base.packages
    if exposed := [name for name in sources.credentials if sources.urls[name].startswith("http:")]:
        cluster.env.progress.report(f"note: the credentials of {', '.join(exposed)} are sent unencrypted: use https")
    versions: dict[str, str] | None = None
    if base.manager == "apt":
        packages = packages_for(base, cluster.services, more)
        with credentials_folder(sources) as folder:
            own = {f"{name}.asc": data for name, data in sources.keys.items()}
            lines = [*apt_sources(base, sources.mirrors), *own_sources(sources.own, apt.KEYS)]
            extra = apt.Extra(own, str(folder / "mounted" / "sms.conf") if folder else "")
            versions = resolve(cluster, base.name, lines, packages, extra)
        if locked:
            check_against_lock(lock, base, versions)
    elif locked:
        raise Refused(
            f"package versions of {base.name} are known only after a build",
            hint="build without --locked; the image's manifest and bill of materials list every version",
        )
    inputs = BuildInputs(
        sources.mirrors,
        versions,
        runtime_files(),
        sources.keys,
        cluster.site.system_users,
        more,
        sources.own,
        sorted(sources.credentials),
    )
    return plan_build(base, cluster.services, inputs, definitions=share("definitions"))


def resolve(
    cluster: Cluster,
    name: str,
    sources: Sequence[str],
    packages: Sequence[str],
    extra: apt.Extra = apt.NOTHING,
) -> dict[str, str]:
    """Return the version of each package and of those that it needs. ``name``: of apt's lists in the state folder."""
    with cluster.env.progress.step("resolve package versions") as step:
        folder = str(cluster.places.images.parent / "cache" / f"apt-{name}")
        versions = Resolver(Local(), folder, sources, extra).resolve(packages)
        step.detail(f"{len(versions)} packages")
    return versions


def read_lock(lock: Path, base: Base) -> Mapping[str, str]:
    """Return the versions of a lock file, by package.

    Raises:
        Refused: there is none, or it is for another base.
        ConfigError: it is not a lock file.
    """
    try:
        locked = json.loads(lock.read_text())
    except FileNotFoundError:
        raise Refused(f"there is no lock file {lock}", hint="`sms build` without --locked writes it") from None
    except ValueError as error:
        raise ConfigError(
            f"{lock} is not a lock file: {error}", hint="`sms build` without --locked rewrites it"
        ) from error
    if not isinstance(locked, dict) or not isinstance(locked.get("packages"), dict):
        raise ConfigError(f"{lock} is not a lock file", hint="`sms build` without --locked rewrites it")
    if locked.get("base") != base.name:
        raise Refused(f"{lock} is for {locked.get('base')}, not {base.name}", hint="build without --locked")
    packages: Mapping[str, str] = locked["packages"]
    return packages


def check_against_lock(lock: Path, base: Base, versions: Mapping[str, str]) -> None:
    """Check versions against the lock file.

    Raises:
        Refused, ConfigError: as ``read_lock``; or the versions differ.
    """
    before = read_lock(lock, base)
    changes = [
        f"{name}: {before.get(name, 'absent')} -> {versions.get(name, 'absent')}"
        for name in sorted(before.keys() | versions.keys())
        if before.get(name) != versions.get(name)
    ]
    if changes:
        shown = "\n    ".join([*changes[:20], *([f"and {len(changes) - 20} more"] if len(changes) > 20 else [])])
        raise Refused(
            f"{len(changes)} package versions differ from {lock}:\n    {shown}",
            hint="build without --locked to use the new versions and update the lock file",
        )


def build(
    cluster: Cluster,
    *,
    lock: Path,
    locked: bool = False,
    force: bool = False,
    current: bool = True,
) -> Built:
    """Build, sign and verify the site's image, and make it the current one.

    Args:
        lock: the lock file to write, or to check against with ``locked``.
        force: build even if the same image exists.
        current: make it the current image.

    Raises:
        Refused: the versions differ from the lock file, a key is missing, or this machine is not the build host.
        SmsError: the build failed; the current image is unchanged.
    """
    need_root()
    _check_keys(cluster)
    sources = _find_sources(cluster, lock, locked)
    made = _plan(cluster, sources, lock=lock, locked=locked)
    images = Path(cluster.places.images)
    images.mkdir(parents=True, exist_ok=True, mode=0o700)
    image = images / f"{made.key}.sif"
    host = Local()
    with cluster.env.locks.hold(host, str(images / ".build.lock"), "another build is running"):
        fresh = force or not _is_complete(image)
        if fresh:
            _build_image(cluster, made, sources, image)
        signer = _verify(cluster, image)
        if current:
            make_current(Path(cluster.places.current), image.name)
    if cluster.base.manager == "apt" and not locked:
        _write_lock(lock, cluster.base, made)
    rows = read_packages(image.with_suffix(".packages").read_text())
    return Built(
        made.key,
        str(image),
        str(image.with_suffix(".json")),
        str(image.with_suffix(".cdx.json")),
        signer,
        image.stat().st_size,
        len(rows),
        fresh,
    )


def _check_keys(cluster: Cluster) -> None:
    need_build_host(cluster.site)
    signing = cluster.site.signing
    if signing.pgp_fingerprint:
        return
    for key in (signing.private_key, *signing.public_keys):
        if not key.is_file():
            raise Refused(f"there is no signing key {key}", hint="`sms key create` creates a pair")
    if signing.private_key.stat().st_mode & 0o077:
        raise Refused(f"others can read {signing.private_key}", hint=f"chmod 600 {signing.private_key}")


def _is_complete(image: Path) -> bool:
    """Return whether all files of a successful build exist."""
    return all(image.with_suffix(suffix).is_file() for suffix in (".sif", ".json", ".cdx.json", ".packages"))


def _build_image(cluster: Cluster, made: BuildPlan, sources: Sources, image: Path) -> None:
    """Build to a temporary file and rename it at the end, so that the image is always complete and signed."""
    host = Local()
    with work_folder(image.parent) as work:
        for name, data in made.context().items():
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_bytes(data)
        part = work / "image.sif"
        log = image.parent / "build.log"
        with (
            cluster.env.progress.step("build the image") as step,
            logging(log, step) as on_line,
            credentials_folder(sources) as folder,
        ):
            access = _access(sources, made, folder)
            access.arguments["files"] = str(work)
            try:
                apptainer.build_image(str(work / "services.def"), str(part), access, on_line=on_line)
            except SmsError as error:
                raise SmsError(error.message, hint=f"the full output is in {log}") from error
            step.detail(f"{part.stat().st_size >> 20} MiB")
        listed = once_run(
            cluster.site, prepare_confinement(cluster, host), str(part), Once("query", ("cat", "/opt/sms/packages.tsv"))
        )
        packages = apptainer.run_container(host, *listed, timeout=60).stdout.decode()
        installed = {package.name: package.version for package in read_packages(packages)}
        check_versions(json.loads(made.manifest)["versions"], installed)
        text = sbom(
            read_packages(packages),
            key=made.key,
            image=f"sms-{cluster.site.cluster}",
            purl=cluster.base.purl,
            distribution=cluster.base.name,
        )
        for suffix, content in ((".packages", packages), (".cdx.json", text), (".json", made.manifest)):
            replace_file(str(image.with_suffix(suffix)), content.encode(), 0o644)
        apptainer.add_sbom(host, str(part), str(image.with_suffix(".cdx.json")))
        _sign(cluster, str(part))
        part.chmod(0o600)
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.rename(image)
        sync_folder(str(image.parent))


def _access(sources: Sources, made: BuildPlan, folder: Path | None) -> apptainer.BuildAccess:
    """Return what a build can read besides its own folder. ``folder``: the files with credentials, if there are any."""
    if folder is None:
        return apptainer.BuildAccess({})
    secret = tuple(sources.credentials.values())
    mounted, first = str(folder / "mounted"), folder / "wgetrc"
    return apptainer.BuildAccess(
        {"credentials": mounted} if "{{ credentials }}" in made.definition else {},
        binds=(f"{mounted}:{MOUNTS[sources.base.manager]}:ro",),
        environment={"WGETRC": str(first)} if first.exists() else {},
        hide=lambda line: hide(line, secret),
    )


def remove_left(parent: Path) -> None:
    """Remove the temporary folders of killed builds; their mounts ended with them."""
    for left in parent.glob("build-*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """Yield a temporary folder, and remove those of killed builds: the caller holds the lock of ``parent``."""
    remove_left(parent)
    with tempfile.TemporaryDirectory(prefix="build-", dir=parent, ignore_cleanup_errors=True) as work:
        yield Path(work)


@contextmanager
def logging(log: Path, step: Step) -> Iterator[OnLine]:
    """Yield a function that writes a line of a build's output to a file, and shows it."""
    with log.open("w") as lines:

        def on_line(line: str) -> None:
            lines.write(line + "\n")
            step.detail(line.removeprefix("I: "))

        yield on_line


def check_versions(resolved: Mapping[str, str], installed: Mapping[str, str]) -> None:
    """Check that an image contains the resolved package versions.

    Raises:
        SmsError: it does not.
    """
    wrong = [
        f"{name} {installed.get(name, 'missing')} instead of {version}"
        for name, version in resolved.items()
        if installed.get(name) != version
    ]
    if wrong:
        raise SmsError(
            f"the image does not contain the resolved packages: {', '.join(wrong[:5])}",
            hint="the mirror may have changed during the build; run it again",
        )


def _sign(cluster: Cluster, image: str) -> None:
    """Sign with PGP if configured, else with PEM: Apptainer does not verify images with both."""
    signing = cluster.site.signing
    if signing.pgp_fingerprint:
        keyring = str(signing.pgp_keyring) if signing.pgp_keyring else None
        apptainer.sign_pgp(Local(), image, keyring, signing.pgp_fingerprint)
    else:
        apptainer.sign_pem(Local(), image, str(signing.private_key))


def _verify(cluster: Cluster, image: Path) -> str:
    """Verify the image's signature; return the signer."""
    with cluster.env.progress.step("verify the signature") as step:
        try:
            signer = check_signature(cluster, Local(), str(image))
        except Refused:
            raise Refused(
                f"{image} is not signed with a key of this site", hint="`sms build --force` rebuilds and signs it"
            ) from None
        step.detail(signer)
    return signer


def make_current(link: Path, name: str) -> None:
    """Point the link to the current image to another one beside it, atomically."""
    if link.is_symlink() and link.readlink() == Path(name):
        return
    beside = link.with_name(link.name + ".new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(name)
    beside.rename(link)
    sync_folder(str(link.parent))


def _write_lock(lock: Path, base: Base, made: BuildPlan) -> None:
    versions = json.loads(made.manifest)["versions"]
    text = json.dumps({"base": base.name, "packages": versions}, indent=1, sort_keys=True) + "\n"
    if not lock.exists() or lock.read_text() != text:
        replace_file(str(lock), text.encode(), 0o644)
