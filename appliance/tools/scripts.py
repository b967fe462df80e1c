"""Scripts that run on a host: files of definitions/scripts/."""

from __future__ import annotations

from functools import cache

from appliance.share import share


@cache
def read_script(name: str) -> str:
    """Return the text of a script."""
    return share("definitions", "scripts", name).read_text()


def script_argv(name: str, *values: str) -> tuple[str, ...]:
    """Return the command that runs a shell script with ``values`` as its arguments."""
    return ("sh", "-c", read_script(name), name, *values)


def python_argv(name: str, *values: str) -> tuple[str, ...]:
    """Return the command that runs a Python script with ``values`` as its arguments."""
    return ("python3", "-I", "-c", read_script(name), *values)
