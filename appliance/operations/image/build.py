"""``sms build``: from the site to a signed image, or nothing when nothing changed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from appliance.catalog import Base
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster, need_root, runtime_files
from appliance.operations.hosts.preflight import only_one
from appliance.operations.image.deliver import check_signature
from appliance.plan.image.definition import (
    BuildPlan,
    apt_sources,
    has_credentials,
    missing_mirrors,
    packages_for,
    plan_build,
    repository_urls,
)
from appliance.plan.image.sbom import read_packages, sbom
from appliance.progress import Progress
from appliance.share import share
from appliance.tools import apptainer, apt, rpm
from appliance.tools.apt import Resolver


@dataclass(frozen=True)
class Built:
    """What a build left, or found."""

    key: str
    image: str
    manifest: str
    sbom: str
    signer: str
    bytes: int
    packages: int
    fresh: bool


def plan(cluster: Cluster, progress: Progress, *, lock: Path, locked: bool) -> BuildPlan:
    """Resolve versions and plan the image. Changes nothing but apt's own lists below the state folder.

    Raises:
        Refused: ``locked``, and the versions are not those of the lock file.
    """
    base = cluster.base
    host = Local()
    mirrors = find_mirrors(host, base, cluster.site.base.mirrors)
    versions: dict[str, str] | None = None
    if base.manager == "apt":
        if locked:
            read_lock(lock, base)  # what is wrong with it is said before the seconds that follow
        with progress.step("resolve package versions") as step:
            folder = str(cluster.places.images.parent / "cache" / f"apt-{base.name}")
            versions = Resolver(host, folder, apt_sources(base, mirrors)).resolve(packages_for(base, cluster.services))
            step.detail(f"{len(versions)} packages")
        if locked:
            hold_against_lock(lock, base, versions)
    elif locked:
        raise Refused(
            f"the versions that {base.name} would get are known only after a build",
            hint="build without --locked; the image's manifest and bill of materials name every version",
        )
    return plan_build(
        base,
        cluster.services,
        mirrors=mirrors,
        versions=versions,
        definitions=share("definitions"),
        runtime=runtime_files(),
        keys=_repository_keys(base),
    )


def find_mirrors(host: Host, base: Base, given: Mapping[str, str]) -> dict[str, str]:
    """Address of each repository of the base: as ``given`` by the site, else as this host has it.

    Raises:
        ConfigError: one has none.
    """
    mirrors = {**_host_mirrors(host, base), **repository_urls(base, given)}
    missing = missing_mirrors(base, mirrors)
    if missing:
        raise ConfigError(
            f"no mirror is known for {', '.join(missing)}, which {base.name} is built from",
            hint=f"name it in the site file: base: {{mirrors: {{{missing[0]}: https://...}}}}; "
            "this host's own mirrors are taken, but none whose address holds a password or a token",
        )
    return mirrors


def _host_mirrors(host: Host, base: Base) -> dict[str, str]:
    """The base's repositories as this host's own package manager has them."""
    if base.manager == "apt":
        return apt.find_mirrors(host, {name: each.suites for name, each in base.repositories.items()})
    found = rpm.find_mirrors(host, base.manager, {name: each.ids for name, each in base.repositories.items()})
    # A token of this host's registration must not come into the image.
    return {name: url for name, url in found.items() if not has_credentials(url)}


def _repository_keys(base: Base) -> dict[str, bytes]:
    """The keys of this host that packages are held against. A mirror's own word for its key is worth nothing.

    Raises:
        Refused: this host has no key for a repository.
    """
    keys: dict[str, bytes] = {}
    for name, repository in base.repositories.items():
        if not repository.keys:
            continue
        files = sorted(Path("/").glob(repository.keys.lstrip("/")))
        if not files:
            raise Refused(
                f"there is no key for repository {name}: {repository.keys}",
                hint="take it from the distribution's release package, compare its fingerprint, and put it there",
            )
        keys[name] = b"\n".join(file.read_bytes() for file in files)
    return keys


def read_lock(lock: Path, base: Base) -> Mapping[str, str]:
    """The versions of a lock file, by package.

    Raises:
        Refused: there is none, or it is for another base.
        ConfigError: it is something else.
    """
    try:
        locked = json.loads(lock.read_text())
    except FileNotFoundError:
        raise Refused(f"there is no lock file {lock}", hint="`sms build` without --locked writes it") from None
    except ValueError as error:
        raise ConfigError(
            f"{lock} is no lock file: {error}", hint="`sms build` without --locked writes it anew"
        ) from error
    if not isinstance(locked, dict) or not isinstance(locked.get("packages"), dict):
        raise ConfigError(f"{lock} is no lock file", hint="`sms build` without --locked writes it anew")
    if locked.get("base") != base.name:
        raise Refused(f"{lock} is for {locked.get('base')}, not {base.name}", hint="build without --locked")
    packages: Mapping[str, str] = locked["packages"]
    return packages


def hold_against_lock(lock: Path, base: Base, versions: Mapping[str, str]) -> None:
    """Compare versions with those of the lock file.

    Raises:
        Refused, ConfigError: as ``read_lock``; or they differ.
    """
    before = read_lock(lock, base)
    changes = [
        f"{name}: {before.get(name, 'not there')} -> {versions.get(name, 'gone')}"
        for name in sorted(before.keys() | versions.keys())
        if before.get(name) != versions.get(name)
    ]
    if changes:
        shown = "\n    ".join([*changes[:20], *([f"and {len(changes) - 20} more"] if len(changes) > 20 else [])])
        raise Refused(
            f"{len(changes)} package versions are not those of {lock}:\n    {shown}",
            hint="build without --locked to take the new versions and write them down",
        )


def build(
    cluster: Cluster,
    progress: Progress,
    *,
    lock: Path,
    locked: bool = False,
    force: bool = False,
    current: bool = True,
) -> Built:
    """Build, sign and verify the site's image, and make it the current one.

    Args:
        lock: where the resolved versions are written, or held against with ``locked``.
        force: build although the same image is there.
        current: make it the current one.

    Raises:
        Refused: the lock does not hold, or a key is missing.
        SmsError: the build failed; the current image is the one it was.
    """
    need_root()
    _check_keys(cluster)
    made = plan(cluster, progress, lock=lock, locked=locked)
    images = Path(cluster.places.images)
    images.mkdir(parents=True, exist_ok=True, mode=0o700)
    image = images / f"{made.key}.sif"
    host = Local()
    with only_one(host, str(images / ".build.lock"), "another build is running"):
        fresh = force or not _is_whole(image)
        if fresh:
            _build_image(cluster, made, image, progress)
        signer = _verify(cluster, image, progress)
        if current:
            make_current(cluster, image)
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
    signing = cluster.site.signing
    if signing.pgp_fingerprint:
        return
    for key in (signing.private_key, *signing.public_keys):
        if not key.is_file():
            raise Refused(f"there is no signing key {key}", hint="`sms key create` makes a pair")
    if signing.private_key.stat().st_mode & 0o077:
        raise Refused(f"others can read {signing.private_key}", hint=f"chmod 600 {signing.private_key}")


def _is_whole(image: Path) -> bool:
    """Whether a build that ended well left all its files."""
    return all(image.with_suffix(suffix).is_file() for suffix in (".sif", ".json", ".cdx.json", ".packages"))


def _build_image(cluster: Cluster, made: BuildPlan, image: Path, progress: Progress) -> None:
    """Build beside the image and rename at the end: what carries the name is whole and signed."""
    host = Local()
    for left in image.parent.glob("build-*"):  # of a build that was killed; this one holds the lock
        shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as undo:
        work = Path(tempfile.mkdtemp(prefix="build-", dir=image.parent))
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        for name, data in made.context().items():
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_bytes(data)
        part = work / "image.sif"
        log = image.parent / "build.log"
        with progress.step("build the image") as step, log.open("w") as lines:

            def on_line(line: str) -> None:
                lines.write(line + "\n")
                step.detail(line)

            try:
                apptainer.build_image(
                    str(work / "services.def"), str(part), arguments={"files": str(work)}, on_line=on_line
                )
            except SmsError as error:
                raise SmsError(error.message, hint=f"all of it is in {log}") from error
            step.detail(f"{part.stat().st_size >> 20} MiB")
        packages = apptainer.read_inside(host, str(part), "/opt/sms/packages.tsv").decode()
        _check_versions(made, packages)
        text = sbom(
            read_packages(packages),
            key=made.key,
            image=f"sms-{cluster.site.cluster}",
            purl=cluster.base.purl,
            distribution=cluster.base.name,
        )
        for suffix, content in ((".packages", packages), (".cdx.json", text), (".json", made.manifest)):
            image.with_suffix(suffix).write_text(content)
        apptainer.add_sbom(host, str(part), str(image.with_suffix(".cdx.json")))
        _sign(cluster, str(part))
        part.chmod(0o600)
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.rename(image)


def _check_versions(made: BuildPlan, packages: str) -> None:
    """The image holds just what was resolved."""
    wanted: dict[str, str] = json.loads(made.manifest)["versions"]
    held = {package.name: package.version for package in read_packages(packages)}
    wrong = [
        f"{name} {held.get(name, 'missing')} instead of {want}"
        for name, want in wanted.items()
        if held.get(name) != want
    ]
    if wrong:
        raise SmsError(
            f"the image does not hold what was resolved: {', '.join(wrong[:5])}",
            hint="did the mirror change during the build? Run it again",
        )


def _sign(cluster: Cluster, image: str) -> None:
    """Sign with PGP where the site says so, else with PEM: Apptainer verifies no image that carries both."""
    signing = cluster.site.signing
    if signing.pgp_fingerprint:
        keyring = str(signing.pgp_keyring) if signing.pgp_keyring else None
        apptainer.sign_pgp(Local(), image, keyring, signing.pgp_fingerprint)
    else:
        apptainer.sign_pem(Local(), image, str(signing.private_key))


def _verify(cluster: Cluster, image: Path, progress: Progress) -> str:
    """The key that signed the image; an image signed with an older key of the site's is signed again."""
    with progress.step("verify the signature") as step:
        try:
            signer = check_signature(cluster, Local(), str(image))
        except Refused:
            raise Refused(
                f"{image} does not carry this site's signature", hint="`sms build --force` builds and signs it anew"
            ) from None
        step.detail(signer)
    return signer


def make_current(cluster: Cluster, image: Path) -> None:
    """Point the site's name at the image, by one rename."""
    current = Path(cluster.places.current)
    if current.is_symlink() and current.readlink() == Path(image.name):
        return
    beside = current.with_name(current.name + ".new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(image.name)
    beside.rename(current)


def _write_lock(lock: Path, base: Base, made: BuildPlan) -> None:
    versions = json.loads(made.manifest)["versions"]
    text = json.dumps({"base": base.name, "packages": versions}, indent=1, sort_keys=True) + "\n"
    if not lock.exists() or lock.read_text() != text:
        beside = lock.with_name(lock.name + ".new")
        beside.write_text(text)
        beside.rename(lock)
