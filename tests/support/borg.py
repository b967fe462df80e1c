"""A Borg repository in tests: a host has a borg that knows archives by their names and comments, without contents."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.config.model import BorgRepository
from appliance.host.base import OnLine, Result
from appliance.host.stream import LineReader, Stream
from appliance.tools.borg import COMPACTED, LOCK_WAIT_S
from tests.pairs import HostInFolder
from tests.support.fake import FakeStream

PASSPHRASE = Path("/passphrase-of-this-test")


class Archives:
    """A repository: archives, each with its comment, and the globs of what was removed."""

    def __init__(self) -> None:
        self.archives: dict[str, str] = {}
        self.globs: list[str] = []

    def borg(self, argv: tuple[str, ...]) -> tuple[str, str]:
        """Do what a command of borg does; return its output and its log."""
        verb, *words = argv[argv.index(str(LOCK_WAIT_S)) + 1 :]
        if verb == "list":
            glob = words[words.index("--glob-archives") + 1]
            there = [name for name in self.archives if fnmatch.fnmatchcase(name, glob)]
            usual = {"time": "1970-01-01T00:00:00", "id": "0"}
            return json.dumps({"archives": [{**usual, "name": n, "comment": self.archives[n]} for n in there]}), ""
        if verb == "create":
            name = words[words.index("--") - 1].partition("::")[2]
            self.archives[name] = words[words.index("--comment") + 1].format()  # borg replaces placeholders
            return json.dumps({"archive": {"stats": {"deduplicated_size": 0}}}), ""
        if verb == "delete" and words[0] == "--glob-archives":
            self.globs.append(words[1].removesuffix(".checkpoint*"))
        elif verb == "delete":
            for name in words[1:]:
                del self.archives[name]
        else:
            assert verb == "compact", f"no answer for {argv}"
            return "", COMPACTED
        return "", ""


class HostWithBorg(HostInFolder):
    """A host that uses this repository; without one, borg is not installed there."""

    def __init__(self, host: HostInFolder, repository: Archives | None) -> None:
        super().__init__(host.name, host.folder)
        self.repository = repository

    def run(self, *argv: str, **options: Any) -> Result:
        if argv[-2:] == ("find", "borg"):
            return Result(self.name, argv, 0, b"" if self.repository else b"borg\n", b"")
        if argv == ("borg", "--version"):
            return Result(self.name, argv, 0, b"borg 1.2.8\n", b"")
        if argv[0] == "stat" and argv[-1] == str(PASSPHRASE):
            return Result(self.name, argv, 0, b"600 0 9\n", b"")
        return self._borg(argv) if "borg" in argv else super().run(*argv, **options)

    def _borg(self, argv: tuple[str, ...]) -> Result:
        assert self.repository
        output, log = self.repository.borg(argv)
        return Result(self.name, argv, 0, output.encode(), log.encode())

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        if "borg" in argv:
            yield FakeStream(self.name, argv, lambda _: self._borg(argv), LineReader(on_line))
        else:
            with super().stream(*argv, on_line=on_line) as stream:
                yield stream


def borg_settings(url: str = "/r") -> BorgRepository:
    """Return the settings of a repository whose passphrase the hosts have."""
    return BorgRepository.model_construct(repository=url, passphrase=PASSPHRASE, ssh_key=None, known_hosts=None)
