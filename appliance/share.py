"""Finds definitions/, overlays/ and playbooks/, in a checkout and in an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
"""The folder of this package."""


def share(*parts: str) -> Path:
    """The path of shipped data, such as ``share("definitions", "services")``."""
    installed = PACKAGE / "_share"
    return (installed if installed.is_dir() else PACKAGE.parent).joinpath(*parts)
