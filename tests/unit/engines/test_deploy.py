"""What is deployed, its record, its lease and its secrets."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from appliance.config.engines import SecretRef
from appliance.engines.deploy import Bundle, Item
from appliance.engines.render import make_bundle, render
from appliance.errors import ConfigError, Refused, Unverified
from appliance.host.base import Result
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.deployed import APPLYING, DEPLOYED, read_deployed, record_path, refuse_deployed
from appliance.operations.engines import deploy as deploy_module
from appliance.operations.engines.deployed import begin, find_deployed, read_bundle
from appliance.operations.engines.kubernetes import OnKubernetes
from appliance.operations.engines.nomad import OnNomad
from appliance.operations.engines.secret_files import compare_secrets, new_secrets
from appliance.operations.engines.writer import refuse_moved, refuse_other_writer
from appliance.operations.lease import Leases
from appliance.operations.migration import failover
from appliance.plan.machine import instance_name
from appliance.shared.lease import Lease
from appliance.shared.records import from_json, to_json
from appliance.shared.state_lease import StateLease
from appliance.tools.apptainer import Instance
from appliance.tools.kubectl import Kubectl
from appliance.tools.nomad import Nomad
from tests.pairs import Pair
from tests.support.env import FakeClock, FakeHosts, fake_env, with_env
from tests.support.kubernetes import WithKubectl
from tests.support.nomad import WithNomad, on_nomad
from tests.unit.engines.cases import CASES, make_input
from tests.unit.engines.deployments import BUNDLE, RECORD


@pytest.mark.parametrize("name", ["kubernetes", "kubernetes-balanced", "nomad", "nomad-small"])
def test_what_is_deployed_is_what_is_exported(tmp_path: Path, name: str) -> None:
    target, site, changes = CASES[name]
    given = make_input(tmp_path, site, changes)
    bundle, files = make_bundle(target, given), render(target, given).files
    assert from_json(Bundle, to_json(bundle)) == bundle
    assert bundle.digest == make_bundle(target, given).digest
    if target == "nomad":
        assert {f"{one.name}.nomad.hcl": one.text for one in bundle.items} == {
            path: text for path, text in files.items() if path.endswith(".nomad.hcl")
        }
    else:
        assert {one.name for one in bundle.items} == {"namespace"} | {
            Path(path).stem for path in files if path.startswith("base/") and "kustomization" not in path
        }
    waves = [[one.name for one in wave] for wave in bundle.waves()]
    at = {one: number for number, wave in enumerate(waves) for one in wave}
    assert all(at[need] < at[one.name] for one in bundle.items for need in one.after)
    assert bundle.controller in at


def test_only_nomad_and_kubernetes(tmp_path: Path) -> None:
    target, site, changes = CASES["compose"]
    with pytest.raises(ConfigError):
        make_bundle(target, make_input(tmp_path, site, changes))


def test_workloads_that_need_each_other_are_one_group() -> None:
    circle = (Item("a", "service", "", after=("b",)), Item("b", "service", "", after=("a",)))
    assert [[one.name for one in wave] for wave in replace(BUNDLE, items=circle).waves()] == [["a", "b"]]


def test_the_record_is_there_before_and_names_what_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    host = Local(cluster.site.admin_hosts[0].name)
    assert read_deployed(cluster, host) is None
    begin(cluster, host, BUNDLE, RECORD)
    assert find_deployed(cluster, host) == RECORD
    assert read_bundle(cluster, host, BUNDLE.digest) == BUNDLE
    other = replace(BUNDLE, image="/j.sif")
    begin(cluster, host, other, replace(RECORD, digest=other.digest, previous=BUNDLE.digest))
    assert read_bundle(cluster, host, BUNDLE.digest) == BUNDLE
    third = replace(BUNDLE, image="/k.sif")
    begin(cluster, host, third, replace(RECORD, digest=third.digest, previous=other.digest))
    assert read_bundle(cluster, host, BUNDLE.digest) is None
    kept = tmp_path / "state" / "engines" / cluster.site.cluster / f"{other.digest}.json"
    kept.write_text(kept.read_text().replace("/j.sif", "/x.sif"))
    assert read_bundle(cluster, host, other.digest) is None, "another content"
    assert kept.stat().st_mode & 0o077 == 0


def test_an_unreadable_record_is_an_error_not_none(cluster: Cluster) -> None:
    host = Local(cluster.site.admin_hosts[0].name)
    for text in (b"", b"{}", b'{"engine": 1}', json.dumps({"engine": "nomad"}).encode()):
        host.write(record_path(cluster), text)
        with pytest.raises(Refused, match="is unreadable"):
            read_deployed(cluster, host)


def test_another_engine_with_the_services_refuses(cluster: Cluster) -> None:
    host = Local(cluster.site.admin_hosts[0].name)
    refuse_other_writer(cluster, host, BUNDLE, RECORD)
    with pytest.raises(Refused, match="kubernetes has the services"):
        refuse_other_writer(cluster, host, BUNDLE, replace(RECORD, engine="kubernetes"))
    refuse_other_writer(cluster, host, BUNDLE, replace(RECORD, engine="kubernetes", phase="stopped"))


@pytest.mark.parametrize(
    ("holder", "runs", "message"),
    [
        (None, False, ""),
        ("engine:nomad", False, ""),
        (None, True, "the services container runs on host-a"),
        ("host-a", False, "host-a has the lease"),
        ("engine:kubernetes", False, "kubernetes has the services and their state"),
        ("host-b", False, "host-b cannot be queried and has the lease"),
    ],
)
def test_who_has_the_lease_refuses(tmp_path: Path, holder: str | None, runs: bool, message: str) -> None:
    """Also where nothing runs: a host that was stopped for a reboot starts the services again."""
    pair = Pair(tmp_path, shared=False)
    host, site = pair.hosts["host-a"], pair.cluster.site
    host.write(str(pair.cluster.places.lease), Lease(site.cluster, 7, holder, 1.0, "host-a").text())
    if runs:
        host.instances.append(Instance(instance_name(site), 7, "/i.sif"))
    pair.hosts["host-b"].cut = True
    with pytest.raises(Refused, match=message) if message else nullcontext() as caught:
        refuse_other_writer(pair.cluster, host, BUNDLE, None)
    assert caught is None or holder == "host-b" or "sms migrate --to nomad" in caught.value.hint


@pytest.mark.parametrize("moved", ["container", ""])
def test_a_state_that_was_moved_away_is_not_deployed_again(cluster: Cluster, tmp_path: Path, moved: str) -> None:
    """It is older than where it was moved to, and tasks would only end with status 3."""
    nomad = cluster.site.engines.nomad.model_copy(update={"address": "10.0.0.9", "state": tmp_path / "nomad"})
    engines = cluster.site.engines.model_copy(update={"nomad": nomad})
    here = replace(cluster, site=cluster.site.model_copy(update={"engines": engines}))
    here = with_env(here, hosts=FakeHosts({one.name: Local(one.name) for one in here.site.admin_hosts}))
    bundle = replace(BUNDLE, items=(Item("slurm-ctl", "service", "", lease="/var/spool/slurmctld"),))
    refuse_moved(here, bundle)
    path = tmp_path / "nomad/var/spool/slurmctld/.sms-lease"
    path.parent.mkdir(parents=True)
    path.write_bytes(StateLease(4, moved=moved).text())
    if not moved:
        refuse_moved(here, bundle)
        return
    with pytest.raises(Refused, match="slurm-ctl on nomad was moved to the container"):
        refuse_moved(here, bundle)


VARIABLE, SECRET = "var/nomad/jobs/a", ("secret", "munge-key")


Programs = WithNomad | WithKubectl


def engine_with(engine: str, there: bytes | None, *, own: bool) -> tuple[Programs, OnNomad | OnKubernetes]:
    """Return a host with an engine that runs what has the key of Munge ``there``; ``own``: sms has put it there."""
    text = base64.b64encode(there).decode() if there is not None else ""
    if engine == "nomad":
        servers = WithNomad("host-a")
        servers.api["namespace/default"] = {}
        servers.has_job("a", allocation="x")
        if there is not None:
            servers.api[VARIABLE] = {"Items": {"munge_key": text} | ({"created_by": "sms"} if own else {})}
        return servers, OnNomad(Nomad(servers, "default"), "host-a", "compute", fake_env())
    host = WithKubectl("host-a")
    host.objects["namespace", "lab"] = {}
    if there is not None:
        labels = {"app.kubernetes.io/part-of": "sms"} if own else {}
        host.objects[SECRET] = {"data": {"munge.key": text}, "metadata": {"name": SECRET[1], "labels": labels}}
    refs = {"munge_key": SecretRef(name=SECRET[1], key="munge.key")}
    return host, OnKubernetes(Kubectl(host, "lab"), refs, fake_env())


def written(host: Programs) -> tuple[bytes | None, bool]:
    """Return the key that the engine has, and whether sms has put it there."""
    if isinstance(host, WithNomad):
        items = host.api.get(VARIABLE, {"Items": {}})["Items"]
        text, by = items.get("munge_key"), items.get("created_by")
    else:
        found = host.objects.get(SECRET, {"data": {}, "metadata": {"labels": {}}})
        text, by = found["data"].get("munge.key"), found["metadata"]["labels"].get("app.kubernetes.io/part-of")
    return base64.b64decode(text) if text is not None else None, by == "sms"


def restarts(host: Programs) -> int:
    """Return how often what may have another key was ended."""
    if isinstance(host, WithNomad):
        return host.commands.count(("alloc", "stop", "x"))
    return host.deleted.count("a-0")


@pytest.mark.parametrize("engine", ["nomad", "kubernetes"])
@pytest.mark.parametrize(
    ("there", "own", "given", "outcome"),
    [
        (None, False, None, "refused"),
        (None, False, b"new", "written"),
        (b"old", True, b"new", "written"),
        (b"new", True, b"new", "same"),
        (b"old", True, None, "same"),
        (b"old", False, b"new", "different"),
        (b"new", False, b"new", "same"),
    ],
)
def test_secrets_of_an_engine(
    cluster: Cluster, tmp_path: Path, engine: str, there: bytes | None, own: bool, given: bytes | None, outcome: str
) -> None:
    """Those that sms has created follow the site file, also after a new key; others are only compared."""
    if given is not None:
        (tmp_path / "key").write_bytes(given)
    secrets = cluster.site.secrets.model_copy(update={"munge_key": tmp_path / "key" if given is not None else None})
    cluster = replace(cluster, site=cluster.site.model_copy(update={"secrets": secrets}))
    bundle = replace(BUNDLE, items=(Item("a", "service", "", secrets=("munge_key",)),))
    host, found = engine_with(engine, there, own=own)
    if outcome == "refused":
        with pytest.raises(Refused, match="has no `secrets"):
            compare_secrets(cluster, bundle, found)
        return
    assert len(compare_secrets(cluster, bundle, found)) == (outcome == "different")
    new = new_secrets(cluster, bundle, found)
    assert [value for _, value in new] == ([given] if outcome == "written" else [])
    assert "b'old'" not in repr([one for one, _ in new])
    found.prepare(bundle, new)
    assert written(host) == ((b"new", True) if outcome == "written" else (there, own))
    assert restarts(host) == (outcome == "written" and there is not None)


@pytest.mark.parametrize("engine", ["nomad", "kubernetes"])
def test_a_new_secret_reaches_what_runs_also_after_a_kill(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """The first run ends between the write and the restart; the next one restarts what may have the earlier secret."""
    (tmp_path / "key").write_bytes(b"new")
    secrets = cluster.site.secrets.model_copy(update={"munge_key": tmp_path / "key"})
    cluster = replace(cluster, site=cluster.site.model_copy(update={"secrets": secrets}))
    bundle = replace(BUNDLE, items=(Item("a", "service", "", secrets=("munge_key",)),))
    host, found = engine_with(engine, b"old", own=True)
    host.interrupted = "stop" if engine == "nomad" else "pod"
    with pytest.raises(KeyboardInterrupt):
        found.prepare(bundle, new_secrets(cluster, bundle, found))
    before, host.interrupted = restarts(host), ""
    assert compare_secrets(cluster, bundle, found) == []
    found.prepare(bundle, new_secrets(cluster, bundle, found))
    assert restarts(host) == before + 1
    found.prepare(bundle, new_secrets(cluster, bundle, found))
    assert restarts(host) == before + 1, "once"
    assert written(host) == (b"new", True)


A, B, C = (replace(BUNDLE, image=f"/{name}.sif") for name in "abc")


@pytest.mark.parametrize(
    ("digest", "previous", "phase", "then", "expected"),
    [
        (A, "", DEPLOYED, B, A),
        (B, A, DEPLOYED, C, B),
        (B, A, APPLYING, C, A),
        (B, A, "stopped", C, B),
        (B, A, APPLYING, A, ""),
        (B, A, APPLYING, B, A),
        (A, "", APPLYING, B, ""),
    ],
    ids=["first", "second", "after one that failed", "stopped", "rollback", "again", "only one that failed"],
)
def test_a_rollback_goes_back_to_what_was_ready(
    cluster: Cluster, digest: Bundle, previous: Bundle | str, phase: str, then: Bundle, expected: Bundle | str
) -> None:  # fmt: skip
    def name(one: Bundle | str) -> str:
        return one.digest if isinstance(one, Bundle) else one

    before = replace(RECORD, digest=name(digest), previous=name(previous), phase=phase)
    record = deploy_module._next_record(cluster, Local("host-a"), then, before)
    assert record.previous == name(expected)
    other = deploy_module._next_record(cluster, Local("host-a"), replace(then, engine="kubernetes"), before)
    assert other.previous == "", "that of another engine cannot be applied"


def test_an_image_that_is_not_signed_leaves_the_lease(cluster: Cluster, tmp_path: Path) -> None:
    class Unsigned(Local):
        def run(self, *argv: str, **options: Any) -> Result:
            if argv[0] == "apptainer":
                return Result(self.name, argv, 255, b"", b"it is not signed").expect(options.get("ok", (0,)))
            return super().run(*argv, **options)

    host, cluster = Unsigned(cluster.site.admin_hosts[0].name), on_nomad(cluster, tmp_path)
    host.write(str(cluster.places.current), b"not an image")
    leases = Leases(host, cluster)
    leases.query()
    run = deploy_module.Run(None, leases, 1)
    with pytest.raises(Refused, match="not signed"):
        deploy_module.apply_bundle(cluster, host, MagicMock(), BUNDLE, [], run)
    assert find_deployed(cluster, host) is None
    assert host.read(str(cluster.places.lease)) is None, "the lease was not taken"


def test_the_container_does_not_start_what_an_engine_has(cluster: Cluster) -> None:
    host = Local(cluster.site.admin_hosts[0].name)
    refuse_deployed(cluster, host)
    here = cluster.services[0].name
    for services, phase, refused in (
        ((here, "other"), APPLYING, True),
        (("other",), APPLYING, False),
        ((here,), "stopping", True),
        ((here,), "stopped", False),
    ):
        begin(cluster, host, BUNDLE, replace(RECORD, services=services, phase=phase))
        with pytest.raises(Refused, match=f"nomad has {here}") if refused else nullcontext():
            refuse_deployed(cluster, host)


def test_a_failover_from_an_engine_records_that_it_has_the_services_no_more(cluster: Cluster) -> None:
    """Else no admin host could start them again."""
    host = Local(cluster.site.admin_hosts[0].name)
    begin(cluster, host, BUNDLE, replace(RECORD, services=(cluster.services[0].name,)))
    plan = failover.Plan(host.name, ("host-b",), 1, False, None, ())
    failover._forget_engine(cluster, host, plan)
    with pytest.raises(Refused, match="nomad has"):
        refuse_deployed(cluster, host)
    failover._forget_engine(cluster, host, replace(plan, old=("engine:nomad",)))
    refuse_deployed(cluster, host)


def test_what_does_not_end_keeps_nothing_from_being_stopped(cluster: Cluster) -> None:
    """As on a client that is off: when it is on again, it starts none of them."""
    host, cluster = WithNomad(cluster.site.admin_hosts[0].name), with_env(cluster, clock=FakeClock())
    for name in ("a", "b"):
        host.has_job(name, allocation=f"of-{name}")
    begin(cluster, host, BUNDLE, RECORD)
    with pytest.raises(Unverified, match="of-b on n1 did not end"):
        deploy_module.stop_locked(cluster, host, RECORD)
    assert host.stopped == ["b", "a"]
    found = find_deployed(cluster, host)
    assert found and found.phase == "stopping"
