"""Paths that tests of several subjects use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""
GOLDEN = ROOT / "tests" / "golden"
DEBIAN_SITE = GOLDEN / "sites" / "debian-12.yaml"
"""A site with many settings.."""
