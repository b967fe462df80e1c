"""Schedules are installed, replaced and removed, on a fake host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.config.model import Site
from appliance.errors import ConfigError, Refused
from appliance.operations.context import Cluster
from appliance.operations.snapshots.schedule import Scheduled, install_schedule, remove_schedule, show_schedule
from tests.places import DEBIAN_SITE
from tests.sites import make_site, open_debian
from tests.support.fake import Fake

CRON = "/etc/cron.d/sms-sample"
TIMER = "/etc/systemd/system/sms-sample.snapshot.timer"
SERVICE = "/etc/systemd/system/sms-sample.snapshot.service"
NAME = "admin-1"


class Files(Fake):
    """A host with files in a table; changes are listed in ``changed``."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            {
                ("sh", "-c"): lambda argv, _: (0, "/usr/bin/sms" if argv[-1] == "sms" else ""),
                ("test", "-d", "/run/systemd/system"): lambda *_: (0 if self.kind == "systemd" else 1, ""),
                ("test", "-d", "/etc/cron.d"): lambda *_: (0 if self.kind == "cron" else 1, ""),
                ("systemctl",): (0, ""),
                ("systemctl", "is-enabled"): lambda *_: (0 if TIMER in self.files else 1, ""),
                ("systemctl", "is-active"): lambda *_: (0 if TIMER in self.files else 1, ""),
            },
            name=NAME,
        )
        self.kind = kind
        self.changed: list[str] = []
        self.files["/etc/sms/sms.yaml"] = b"cluster: sample\n"

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        changed = super().write(path, data, mode=mode)
        self.changed += [path] if changed else []
        return changed

    def remove(self, path: str) -> None:
        self.changed.append(f"-{path}")
        del self.files[path]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return open_debian(tmp_path / "state")


def changing(host: Files) -> list[tuple[str, ...]]:
    return [argv for argv in host.asked if argv[0] == "systemctl" and not argv[1].startswith("is-")]


@pytest.mark.parametrize(("kind", "paths"), [("cron", [CRON]), ("systemd", [SERVICE, TIMER])], ids=["cron", "systemd"])
def test_installed_once_and_removed(cluster: Cluster, kind: str, paths: list[str]) -> None:
    host = Files(kind)

    def install(**more: Any) -> bool:
        host.changed.clear()
        host.asked.clear()
        return install_schedule(cluster, host, site_file=DEBIAN_SITE, **more).changed

    assert install(dry_run=True) and not host.changed and not changing(host)
    assert install() and sorted(host.changed) == paths
    assert bool(changing(host)) is (kind == "systemd")
    assert not install() and not host.changed and not changing(host), "a second run changes nothing"
    shown = show_schedule(cluster, host)
    assert (shown.kind, shown.every, shown.runs) == (kind, 15, True)
    assert "/usr/bin/sms -q --site /etc/sms/sms.yaml --state " in shown.files[paths[0]], (
        "a host reads its own site file"
    )
    assert install(every=5) and show_schedule(cluster, host).every == 5
    host.changed.clear()
    assert remove_schedule(cluster, host, dry_run=True).changed and not host.changed
    assert remove_schedule(cluster, host).changed
    assert sorted(host.changed) == [f"-{path}" for path in paths]
    assert not remove_schedule(cluster, host).changed
    assert show_schedule(cluster, host).kind == ""


@pytest.mark.parametrize("kind", ["cron", "systemd"])
def test_drills_are_scheduled_where_there_is_something_to_restore_from(cluster: Cluster, kind: str) -> None:
    host, elsewhere = Files(kind), {"standby": (NAME, "admin-2")}
    site = cluster.site.model_copy(update={"snapshots": cluster.site.snapshots.model_copy(update=elsewhere)})

    def install(site: Site) -> Scheduled:
        changed = replace(cluster, site=site)
        return install_schedule(changed, host, site_file=DEBIAN_SITE)

    assert not install(cluster.site).drills
    done = install(site)
    text = "".join(done.files.values())
    assert done.drills and done.changed and not install(site).changed
    assert "overlay drill --scheduled" in text and "overlay drill --down" in text
    enabled = [argv[-1] for argv in host.asked if argv[:2] == ("systemctl", "is-enabled")]
    assert ("sms-sample.drill.timer" in enabled) is (kind == "systemd")
    assert not install(cluster.site).drills, "the site has no target any more"
    assert "overlay drill" not in "".join(path + text.decode() for path, text in host.files.items())
    install(site)
    remove_schedule(replace(cluster, site=site), host)
    assert not [path for path in host.files if "cron.d" in path or "systemd" in path]


@pytest.mark.parametrize("kind", ["cron", "systemd"])
def test_the_vms_state_is_scheduled_with_the_overlay(cluster: Cluster, kind: str, tmp_path: Path) -> None:
    """By a job of its own, at other minutes; removed where the site has no VM any more, or with the other one."""
    host = Files(kind)
    targets = cluster.site.snapshots.model_copy(update={"standby": (NAME, "admin-2")})
    changes = {"provisioning": make_site(tmp_path).provisioning, "snapshots": targets}
    with_vm = replace(cluster, site=cluster.site.model_copy(update=changes))
    without = replace(cluster, site=cluster.site.model_copy(update={"provisioning": None}))

    def install(cluster: Cluster, **more: Any) -> Scheduled:
        host.changed.clear()
        return install_schedule(cluster, host, site_file=DEBIAN_SITE, **more)

    would = install(with_vm, dry_run=True)
    assert would.vm and would.vm.changed and not host.changed
    done = install(with_vm)
    assert (
        done.changed and done.vm and done.vm.runs and (done.vm.kind, done.vm.every, done.vm.drills) == (kind, 15, True)
    )
    paths = {path for path in host.files if ".vm." in path or path.endswith("_vm")}
    assert len(paths) == (1 if kind == "cron" else 4) and set(done.vm.files) == paths
    assert "overlay snapshot --vm --scheduled" in "".join(done.vm.files.values())
    assert "--vm" not in "".join(done.files.values()), "the overlay's job is another one"
    assert not install(with_vm).changed and not host.changed
    gone = install(without)
    assert gone.changed and gone.kind == kind and gone.vm is None and not paths & set(host.files)
    install(with_vm)
    assert paths <= set(remove_schedule(with_vm, host, dry_run=True).files)
    remove_schedule(without, host)
    assert not [path for path in host.files if "cron.d" in path or "systemd" in path]


def test_files_of_the_other_kind_are_removed(cluster: Cluster) -> None:
    host = Files("cron")
    install_schedule(cluster, host, site_file=DEBIAN_SITE)
    host.kind = "systemd"
    install_schedule(cluster, host, site_file=DEBIAN_SITE)
    assert {CRON, TIMER, SERVICE} & set(host.files) == {TIMER, SERVICE}
    host.kind = "cron"
    install_schedule(cluster, host, site_file=DEBIAN_SITE)
    assert {CRON, TIMER, SERVICE} & set(host.files) == {CRON}


def test_invalid_schedules_are_refused(cluster: Cluster) -> None:
    host = Files("cron")

    def install(**more: Any) -> None:
        install_schedule(cluster, host, site_file=DEBIAN_SITE, **more)

    for every in (0, 7, 90):
        with pytest.raises(ConfigError, match=f"evenly every {every} minutes"):
            install(every=every)
    host.files["/etc/sms/sms.yaml"] = b"cluster: other\n"
    with pytest.raises(Refused, match=r"/etc/sms/sms.yaml on admin-1 is not the site file of sample"):
        install()
    host.kind = ""
    with pytest.raises(Refused, match="neither systemd nor cron"):
        install()
    assert host.changed == []
