"""Node images of the VM: below ``images/PROFILE/``, a folder a digest, and which of them is current.

An upload lies below ``images/.upload/`` until every digest of its manifest is right; only then it is renamed into its
place and becomes current. What nodes may boot is whole at each moment, whatever happens in between.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.provision.problem import HttpProblem, bad_request, conflict, not_found
from appliance.shared.files import free_bytes

FILES = ("vmlinuz", "initrd.img", "root.squashfs")
SEAL = ("manifest.json", "manifest.sig")
MOST = {"manifest.json": 4 << 20, "manifest.sig": 65536}
LARGEST_B = 64 << 30
RESERVE_B = 64 << 20
"""Bytes of the disk that no upload takes: the inventory lies on it as well."""
PROFILE = re.compile(r"[a-z][a-z0-9-]{0,30}")
DIGEST = re.compile(r"[0-9a-f]{64}")
KEEP = 3


@dataclass(frozen=True)
class Image:
    """An image that nodes boot; ``digest`` is that of its root.squashfs, and its folder's name."""

    profile: str
    digest: str
    files: Mapping[str, tuple[str, int]]
    arguments: str = ""
    groups: tuple[str, ...] = ()
    made: str = ""
    kernel: str = ""

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(size for _, size in self.files.values())


def read_manifest(profile: str, digest: str, data: bytes) -> Image:
    """What a manifest says; 400 where it is none of this image."""
    try:
        about = json.loads(data)
        files = {name: (about["files"][name]["sha256"], about["files"][name]["bytes"]) for name in about["files"]}
        groups = tuple(about.get("groups", ()))
        arguments, made, kernel = (str(about.get(name) or "") for name in ("arguments", "made", "kernel"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise bad_request("manifest.json is not the manifest of a sealed folder") from None
    wrong = sorted(files) != sorted(FILES) or any(
        not isinstance(sha, str) or not DIGEST.fullmatch(sha) or type(size) is not int or not 0 < size <= LARGEST_B
        for sha, size in files.values()
    )
    if wrong or about.get("kind") != "node" or not all(isinstance(each, str) for each in groups):
        raise bad_request(f"manifest.json is not that of a node image: it has {', '.join(FILES)}, with their digests")
    if about.get("profile") != profile or files["root.squashfs"][0] != digest:
        raise bad_request(f"manifest.json is not that of {profile} {digest[:12]}")
    if not f"{arguments}{made}{kernel}".isprintable():
        raise bad_request("manifest.json has control characters")
    return Image(profile, digest, files, arguments, groups, made, kernel)


@dataclass
class Known:
    """What was read since the last change. A change begins a new one: who still fills an old one fills nothing."""

    images: dict[str, Image | None] = field(default_factory=dict)
    by_group: dict[str, str] | None = None


class Images:
    """The images below a folder. Each change is a renaming; readers need no lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uploads = folder / ".upload"
        self._changing = threading.Lock()
        self._writing: set[tuple[str, str, str]] = set()
        self._known = Known()

    def current(self, profile: str) -> Image | None:
        """What nodes of a profile boot, or None where there is nothing."""
        return self._find_current(self._known, profile)

    def _find_current(self, known: Known, profile: str) -> Image | None:
        if profile in known.images:
            return known.images[profile]
        digest = self.pointer(profile, "current") if PROFILE.fullmatch(profile) else None
        found = known.images[profile] = self._read(profile, digest) if digest else None
        return found

    def profile_for(self, groups: Iterator[str] | list[str] | tuple[str, ...]) -> str:
        """The profile of a node that names none: that of the first of its groups that has one, else that of all others.

        Empty where no image is for it.
        """
        known = self._known
        by_group = known.by_group
        if by_group is None:
            found: dict[str, str] = {}
            for profile in self.profiles():
                image = self._find_current(known, profile)
                for group in (image.groups or ("",)) if image else ():
                    found.setdefault(group, profile)
            by_group = known.by_group = found
        for group in (*groups, ""):
            if group in by_group:
                return by_group[group]
        return ""

    def profiles(self) -> list[str]:
        """Profiles that have a folder."""
        with suppress(FileNotFoundError):
            return sorted(each.name for each in self.folder.iterdir() if PROFILE.fullmatch(each.name))
        return []

    def pointer(self, profile: str, name: str) -> str | None:
        """The digest that ``current`` or ``previous`` names, if its image is there."""
        try:
            digest = (self.folder / profile / name).read_text()[:100].strip()
        except FileNotFoundError:
            return None
        return digest if DIGEST.fullmatch(digest) and (self.folder / profile / digest).is_dir() else None

    def all(self) -> list[tuple[Image, bool, bool]]:
        """Every image, whether it is current, and whether it is the one before; newest first within a profile."""
        found = []
        for profile in self.profiles():
            current, previous = self.pointer(profile, "current"), self.pointer(profile, "previous")
            images = [self._read(profile, digest) for digest in self._digests(profile)]
            found += [(one, one.digest == current, one.digest == previous) for one in images if one]
        return found

    def _digests(self, profile: str) -> list[str]:
        """Digests of a profile's images, the newest arrival first."""
        folders = [each for each in (self.folder / profile).iterdir() if DIGEST.fullmatch(each.name)]
        return [each.name for each in sorted(folders, key=lambda each: -each.stat().st_mtime)]

    def _read(self, profile: str, digest: str) -> Image | None:
        try:
            return read_manifest(profile, digest, (self.folder / profile / digest / "manifest.json").read_bytes())
        except (OSError, HttpProblem):
            return None

    def has(self, profile: str, digest: str) -> bool:
        """Whether the image is there, whole."""
        return (self.folder / profile / digest).is_dir()

    # An upload

    def arrived(self, profile: str, digest: str) -> dict[str, int]:
        """Bytes of each file of an upload that are here already."""
        folder = self._upload(profile, digest)
        found = {}
        for name in (*SEAL, *FILES):
            with suppress(FileNotFoundError):
                found[name] = (folder / name).stat().st_size
        return found

    @contextmanager
    def receiving(self, profile: str, digest: str, name: str, offset: int, size: int | None) -> Iterator[Receiver]:
        """Take bytes of a file from ``offset`` on, which must be as many as are here; at 0 the file begins anew.

        Raises:
            HttpProblem: 404, 409, 411, 413 or 507, each before anything is written.
        """
        folder = self._upload(profile, digest)
        most = self._expect(folder, profile, digest, name, offset, size)
        if free(self.folder) - (size or 0) < RESERVE_B:
            raise full(self.folder, size or 0)
        key = (profile, digest, name)
        with self._changing:
            if key in self._writing:
                raise conflict(f"another upload of {name} is under way")
            self._writing.add(key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("r+b" if offset else "wb") as stream:
                stream.seek(offset)
                stream.truncate()
                yield Receiver(stream, most - offset, self.folder)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            shutil.rmtree(folder, ignore_errors=True)  # the others need the room; the upload begins anew
            raise full(self.folder, size or 0) from error
        finally:
            with self._changing:
                self._writing.discard(key)

    def _expect(self, folder: Path, profile: str, digest: str, name: str, offset: int, size: int | None) -> int:
        """Bytes that the whole file has at most."""
        if name not in (*SEAL, *FILES):
            raise not_found(f"an image has no file {name[:60]}")
        if self.has(profile, digest):
            raise conflict(f"{profile} {digest[:12]} is here already")
        if size is None:
            raise HttpProblem(411, "say how many bytes come: Content-Length")
        most = MOST.get(name, 0)
        if not most:
            manifest = folder / "manifest.json"
            if not manifest.exists():
                raise conflict("the manifest comes first", hint="put manifest.json and manifest.sig before the others")
            most = read_manifest(profile, digest, manifest.read_bytes()).files[name][1]
        here = (folder / name).stat().st_size if offset and (folder / name).exists() else 0
        if offset != here:
            raise conflict(f"{here} bytes of {name} are here, not {offset}", hint="ask which are, and go on from there")
        if offset + size > most:
            raise HttpProblem(413, f"{name} has {most} bytes by the manifest, not {offset + size}")
        return most

    def finish(self, profile: str, digest: str, *, keep: int = KEEP, used: frozenset[str] = frozenset()) -> list[str]:
        """Hold an upload against its manifest, put it into its place and make it current; give digests then removed.

        An image that is here already is made current.

        Args:
            used: digests that boot parameters name: they stay.

        Raises:
            HttpProblem: 404 without an upload, 409 where it is not whole, 422 where a digest is wrong.
        """
        if self.has(profile, digest):
            self._check_again(profile, digest)
        else:
            folder = self._upload(profile, digest)
            if not (folder / "manifest.json").exists():
                raise not_found(f"no upload of {profile} {digest[:12]} is under way")
            self._check(folder, read_manifest(profile, digest, (folder / "manifest.json").read_bytes()))
            target = self.folder / profile / digest
            target.parent.mkdir(exist_ok=True)
            folder.rename(target)
            os.utime(target)
            _sync(target.parent)
        with self._changing:
            self._make_current(profile, digest)
        return self._prune(profile, keep, used)

    def _check_again(self, profile: str, digest: str) -> None:
        """Make what has changed on the disk an upload that is not whole: no node boots it, and it can come again."""
        folder, upload = self.folder / profile / digest, self._upload(profile, digest)
        try:
            self._check(folder, read_manifest(profile, digest, (folder / "manifest.json").read_bytes()))
        except (HttpProblem, FileNotFoundError) as error:
            shutil.rmtree(upload, ignore_errors=True)
            self.uploads.mkdir(exist_ok=True)
            folder.rename(upload)
            self._forget()
            why = error.detail if isinstance(error, HttpProblem) else "manifest.json is gone"
            raise HttpProblem(422, f"{why}, on the VM's own disk", hint=f"sms image push {profile}") from None

    def _check(self, folder: Path, image: Image) -> None:
        if missing := [name for name in (*SEAL, *FILES) if not (folder / name).exists()]:
            raise conflict(f"{', '.join(missing)} did not come yet")
        for name, (wanted, size) in image.files.items():
            here = (folder / name).stat().st_size
            if here < size:
                raise conflict(f"{here} of {size} bytes of {name} are here", hint="send the rest, then finish")
            with (folder / name).open("rb") as stream:
                found = _digest(stream)
                os.fsync(stream.fileno())
            if found != wanted:
                (folder / name).unlink()
                raise HttpProblem(422, f"{name} is not what was signed: its digest is {found[:12]}, not {wanted[:12]}")
        for name in (*SEAL, *FILES):
            (folder / name).chmod(0o644)
        folder.chmod(0o755)
        if unknown := {each.name for each in folder.iterdir()} - {*SEAL, *FILES}:
            raise conflict(f"the upload has files of no image: {', '.join(sorted(unknown))}")

    # Which one

    def rollback(self, profile: str) -> tuple[str, str]:
        """Make the one before current; give the digests of the current one and of the one before it, as they are now.

        Raises:
            HttpProblem: 404 or 409, there is none before.
        """
        with self._changing:
            current, previous = self.pointer(profile, "current"), self.pointer(profile, "previous")
            if current is None:
                raise not_found(f"there is no image of {profile}", hint=f"sms image push {profile}")
            if previous is None or previous == current:
                raise conflict(f"no image of {profile} was current before this one", hint="sms image list --nodes")
            self._make_current(profile, previous)
        return previous, current

    def _make_current(self, profile: str, digest: str) -> None:
        now = self.pointer(profile, "current")
        if now != digest:
            # The one before first: a crash between the two leaves both names at the same image, and all nodes boot.
            if now:
                self._point(profile, "previous", now)
            self._point(profile, "current", digest)
        self._forget()

    def _point(self, profile: str, name: str, digest: str) -> None:
        beside = self.folder / profile / f".{name}.new"
        with beside.open("w") as stream:
            stream.write(digest + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        beside.rename(self.folder / profile / name)
        _sync(beside.parent)

    def remove(self, profile: str, digest: str, *, used: frozenset[str] = frozenset()) -> None:
        """Remove an image, or an upload that will not go on.

        Raises:
            HttpProblem: 404, or 409 where nodes may boot it.
        """
        if not self.has(profile, digest):
            if not self._upload(profile, digest).exists():
                raise not_found(f"there is no image {profile} {digest[:12]}")
            shutil.rmtree(self._upload(profile, digest))
            return
        for name in ("current", "previous"):
            if self.pointer(profile, name) == digest:
                raise conflict(f"{digest[:12]} is the {name} image of {profile}", hint="push another one first")
        if digest in used:
            raise conflict(f"boot parameters name {digest[:12]}", hint="change them first")
        self._drop(profile, digest)

    def _prune(self, profile: str, keep: int, used: frozenset[str]) -> list[str]:
        stay = {self.pointer(profile, "current"), self.pointer(profile, "previous"), *used}
        digests = self._digests(profile)
        old = [digest for digest in digests[max(keep, 1) :] if digest not in stay]
        for digest in old:
            self._drop(profile, digest)
        return old

    def _drop(self, profile: str, digest: str) -> None:
        self.uploads.mkdir(exist_ok=True)
        gone = self.uploads / f".gone-{profile}-{digest}"
        shutil.rmtree(gone, ignore_errors=True)
        (self.folder / profile / digest).rename(gone)  # at once, for whoever lists them
        shutil.rmtree(gone)
        self._forget()

    def _forget(self) -> None:
        self._known = Known()

    def _upload(self, profile: str, digest: str) -> Path:
        if not PROFILE.fullmatch(profile) or not DIGEST.fullmatch(digest):
            raise not_found("an image is named by its profile and the 64 hexadecimal digits of its digest")
        return self.uploads / f"{profile}-{digest}"


class Receiver:
    """A file that is being received."""

    def __init__(self, stream: Any, room: int, folder: Path) -> None:
        self._stream, self._room, self._folder = stream, room, folder
        self._looked = 0

    def write(self, data: bytes) -> None:
        """Add bytes; 413 for more than the manifest names, 507 where the disk is full."""
        self._room -= len(data)
        if self._room < 0:
            raise HttpProblem(413, "more bytes came than the manifest names")
        self._looked += len(data)
        if self._looked >= RESERVE_B // 4:
            self._looked = 0
            if free(self._folder) < RESERVE_B // 2:
                raise OSError(errno.ENOSPC, "the disk is nearly full")
        self._stream.write(data)


def free(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which need not be there yet."""
    while not folder.exists():
        folder = folder.parent
    return free_bytes(folder)


def full(folder: Path, size: int) -> HttpProblem:
    return HttpProblem(
        507,
        f"the VM's disk has {free(folder) >> 20} MiB left, of which {RESERVE_B >> 20} are kept free; "
        f"{max(size >> 20, 1)} more do not fit",
        hint="sms image push --keep 1 removes old images; a larger disk: provisioning.disk_mb",
    )


def _digest(stream: Any) -> str:
    found = hashlib.sha256()
    while block := stream.read(1 << 20):
        found.update(block)
    return found.hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
