"""The playbook that configures the VM: builds run it for Debian; for Enterprise Linux it is rendered here."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
import yaml

from appliance.operations.vm.build import ROLES, code_files, needed_packages
from appliance.share import share

PLAYBOOK = share("playbooks", "provisioning-vm.yml")
FAMILIES = ("Debian", "RedHat")


def variables(family: str) -> dict[str, Any]:
    """Return the roles' variables for a distribution."""
    found: dict[str, Any] = yaml.safe_load(
        share("playbooks", "roles", "vm_packages", "vars", f"{family}.yml").read_text()
    )
    return found


def test_the_build_has_every_role() -> None:
    """Every role is part of the image's key."""
    (play,) = yaml.safe_load(PLAYBOOK.read_text())
    assert tuple(play["roles"]) == ROLES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_distribution_has_the_same_variables(family: str) -> None:
    """Every variable that roles use is defined for each distribution."""
    words = {"vm_web_user", "vm_python", "vm_dnsmasq", "vm_ipxe", "vm_packages_wanted"}
    assert words <= set(variables(family))
    packages = variables(family)["vm_packages_wanted"]
    assert len(packages) == len(set(packages)) > 15


def test_enterprise_linux_gets_openhpc_and_warewulf() -> None:
    """From repositories whose packages are verified with a key."""
    found = variables("RedHat")
    assert {"ohpc-base", "warewulf-ohpc", "nginx", "dnsmasq"} <= set(found["vm_packages_wanted"])
    assert all(one["gpgkey"] for one in found["vm_repositories"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", sorted(path.name for path in share("definitions", "vm").glob("*.j2")))
def test_templates_are_rendered_for_every_distribution(name: str, family: str) -> None:
    """No undefined variable, no unrendered expression."""
    loader = jinja2.FileSystemLoader(str(share("definitions", "vm")))
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=False)
    text = environment.get_template(name).render(**variables(family))
    assert "{{" not in text
    if name.endswith(".service.j2"):
        assert "[Service]" in text and "ExecStart=" in text
    if name == "nginx.conf.j2":
        assert f"user {'nginx' if family == 'RedHat' else 'www-data'};" in text


def test_damaged_disks_become_read_only() -> None:
    system = yaml.safe_load(share("playbooks", "roles", "vm_system", "tasks", "main.yml").read_text())
    (fstab,) = [task for task in system if task["name"] == "Configure file systems"]
    options = [line.split()[3].split(",") for line in fstab["ansible.builtin.copy"]["content"].splitlines()]
    assert len(options) == 2 and all("errors=remount-ro" in each for each in options)


def test_every_unit_is_installed() -> None:
    """Every unit file is copied by a role."""
    tasks = share("playbooks", "roles", "vm_services", "tasks", "main.yml").read_text()
    units = [path.name.removesuffix(".j2") for path in share("definitions", "vm").glob("sms-*.j2")]
    assert [unit for unit in units if unit not in tasks] == []


def test_the_code_in_the_vm_is_complete_and_minimal() -> None:
    """The service, its errors, its contract; no cache, no code of the admin host."""
    names = [name for name, _ in code_files()]
    assert "appliance/errors.py" in names and "appliance/provision/__main__.py" in names
    assert "definitions/provision/openapi.yaml" in names
    assert not [
        name for name in names if "__pycache__" in name or name.startswith(("appliance/operations", "appliance/cli"))
    ]
    assert "linux-image-cloud-amd64" in needed_packages()


def test_the_web_server_overwrites_all_trusted_headers() -> None:
    """Identity headers of a client never reach the service, in any location."""
    text = share("definitions", "vm", "nginx.conf.j2").read_text()
    outside_of_locations = text.split("server {")[0]
    for header in ("X-SMS-Scheme", "X-SMS-Verify", "X-SMS-Subject", "X-Real-IP"):
        assert f"proxy_set_header {header} $" in outside_of_locations
    assert text.count("proxy_set_header") == outside_of_locations.count("proxy_set_header"), (
        "one in a location would override all of them"
    )
