"""The product with a fault in its text, run in a process of its own: no name of the running one is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.places import ROOT


@dataclass(frozen=True)
class Edit:
    """A change of a file of appliance/: each place that has ``old`` gets ``new``."""

    path: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Replace the link to the file by a changed copy; an ``old`` that is not there is an error of the test."""
        path = package / self.path
        text = path.read_text()
        assert self.old in text, f"{self.path} has changed: {self.old!r}"
        path.unlink()
        path.write_text(text.replace(self.old, self.new))


@contextmanager
def mutant(edits: Sequence[Edit]) -> Iterator[Path]:
    """Yield a folder with the package in which the edits are made, and links to all that it needs."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for path in ROOT.iterdir():
            if path.name not in ("appliance", ".git"):
                (folder / path.name).symlink_to(path)
        subprocess.run(["cp", "-rs", ROOT / "appliance", folder], check=True)
        for edit in edits:
            edit.apply(folder / "appliance")
        yield folder


def run_mutant(edits: Sequence[Edit], module: str, *words: str) -> str:
    """Run a module of the tests on the package with these edits; return what it prints."""
    with mutant(edits) as folder:
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        argv = [sys.executable, "-m", module, *words]
        return subprocess.run(argv, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
