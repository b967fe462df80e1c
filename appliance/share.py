"""Locate definitions/, overlays/ and playbooks/, in a checkout or an installed wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
"""The folder of this package."""


def share(*parts: str) -> Path:
    """Return the path of shipped data, such as ``share("definitions", "services")``."""
    installed = PACKAGE / "_share"
    return (installed if installed.is_dir() else PACKAGE.parent).joinpath(*parts)
