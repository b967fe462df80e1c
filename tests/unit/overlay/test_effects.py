"""Operations on a fake host: the commands that are run, and how their output is interpreted."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.errors import Refused, SmsError
from appliance.host.base import CommandError
from appliance.operations.context import open_cluster
from appliance.operations.image.list import prune_images
from appliance.operations.lease import query_lease
from appliance.operations.preflight import check_networks, check_programs, refuse_renamed, refuse_taken
from appliance.progress import Silent
from appliance.shared.lease import Lease
from appliance.tools import apptainer, bridge, ext3
from appliance.tools.apptainer import Instance
from tests.places import DEBIAN_SITE
from tests.sites import open_debian
from tests.support.env import Serial
from tests.support.fake import Answer, Fake
from tests.support.instances import LIST, OPTIONS, list_layers, lists


@pytest.mark.parametrize(
    "status, said, words",
    [
        (0, "", None),
        (1, "", None),  # errors were corrected
        (4, "UNEXPECTED INCONSISTENCY", "is damaged"),
        (8, "Bad magic number in super-block while trying to open x.img", "is damaged"),
        (8, "Operation not permitted while trying to open x.img", "cannot check"),
        (32, "cancelled", "cannot check"),
    ],
)
def test_exit_statuses_of_e2fsck(status: int, said: str, words: str | None) -> None:
    host = Fake({("e2fsck",): (status, said), ("dumpe2fs",): (0, OPTIONS), ("debugfs",): (0, list_layers())})
    if words is None:
        ext3.check(host, "x.img")
    else:
        with pytest.raises(SmsError, match=words):
            ext3.check(host, "x.img")
    assert host.asked[0] == ("e2fsck", "-p", "x.img")


def test_an_overlay_that_cannot_be_written_is_an_error() -> None:
    """Apptainer only warns of a read-only overlay and continues."""
    inside = ("apptainer", "exec", "instance://sms-x")
    apptainer.prove_writable(Fake({inside: (0, "")}), inside)
    with pytest.raises(SmsError, match="the overlay cannot be written"):
        apptainer.prove_writable(Fake({inside: (1, "Read-only file system")}), inside)


PROBED = "ARPING 10.0.0.1 from 0.0.0.0 br-prov\n"
"""Of arping (iputils), before its replies."""
REPLY = "Unicast reply from 10.0.0.1 [{}]  0.651ms\n"


@pytest.mark.parametrize(
    ("probes", "taken"),
    [
        ({"br-prov": (0, PROBED + "Sent 2 probes (2 broadcast(s))\nReceived 0 response(s)")}, {}),
        ({"br-prov": (1, PROBED + REPLY.format("02:00:00:00:00:01"))}, {"10.0.0.1": "02:00:00:00:00:01"}),
        (
            {"br-prov": (1, PROBED + REPLY.format("02:00:00:00:00:01").replace("Unicast reply", "Broadcast request"))},
            {"10.0.0.1": "02:00:00:00:00:01"},  # it has just announced it
        ),
        (
            {
                "br-prov": (1, PROBED),
                "br-pub": (1, REPLY.format("AA:BB:CC:DD:EE:FF") + REPLY.format("02:00:00:00:00:02")),
            },
            {"10.0.0.1": "unknown", "192.0.2.1": "aa:bb:cc:dd:ee:ff"},
        ),
    ],
)
def test_addresses_in_use(probes: dict[str, tuple[int, str]], taken: dict[str, str]) -> None:
    addresses = dict(zip(("br-prov", "br-pub"), ("10.0.0.1", "192.0.2.1"), strict=True))
    wait = ("arping", "-D", "-c", "2", "-w", "1", "-I")
    host = Fake({(*wait, name, addresses[name]): answer for name, answer in probes.items()})
    assert bridge.taken(host, {addresses[name]: name for name in probes}, Serial) == taken


def test_an_address_that_could_not_be_probed_is_not_free() -> None:
    host = Fake({("arping",): (2, "arping: Interface br-prov is down")})
    with pytest.raises(SmsError, match="is down"):
        bridge.taken(host, {"10.0.0.1": "br-prov"}, Serial)


def test_the_containers_own_mac_means_that_it_runs_elsewhere() -> None:
    cluster = open_debian()
    network = cluster.site.networks.provisioning

    def host(mac: str) -> Fake:
        probe = ("arping", "-D", "-c", "2", "-w", "1", "-I", network.bridge)
        return Fake({("arping",): (0, ""), probe: (1, REPLY.format(mac))})

    with pytest.raises(Refused, match="already runs on another host"):
        refuse_taken(cluster, host(network.mac.upper()))
    with pytest.raises(Refused, match="is already used by"):
        refuse_taken(cluster, host("52:54:00:00:00:09"))


def test_all_missing_programs_are_reported_at_once() -> None:
    with pytest.raises(Refused) as caught:
        check_programs(Fake({("sh",): (0, "apptainer\nflock\n")}))
    assert "apptainer is not installed; flock is not installed" in caught.value.message


@pytest.mark.parametrize(
    "flags, kind, words",
    [
        (["UP"], "bridge", "no port that is up"),
        ([], "bridge", "bridge .* does not exist or is down"),
        (["UP"], "veth", "bridge .* does not exist or is down"),
    ],
)
def test_bridges_without_an_uplink(flags: list[str], kind: str, words: str) -> None:
    cluster = open_debian()
    shown = json.dumps([{"ifname": "br", "flags": flags, "linkinfo": {"info_kind": kind}}])
    ip = ("ip", "-json")
    host = Fake({(*ip, "-details"): (0, shown), (*ip, "link"): (0, "[]"), (*ip, "-4"): (0, "[]")})
    with pytest.raises(Refused, match=words):
        check_networks(cluster, host)


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        ("lab: 4", True),
        ("lab: 4 host-a", True),  # a stop that kept the lease
        ("lab: 4 host-a runs", False),  # beside this one
        ("lab: 4 host-b", False),
        ("lab: 0", False),
        ("lab_gateway: 4", False),
        ("labb: 4", False),
        ("lab: ", False),
    ],
)
def test_a_cluster_of_another_name_does_not_begin_without_jobs(other: str, refused: bool) -> None:
    """`cluster: labb` in the site file, after a stop of lab."""
    cluster = open_debian()
    cluster = replace(cluster, site=cluster.site.model_copy(update={"cluster": "labb"}))
    (name, facts), folder = other.split(": "), cluster.places.lease.parent
    generation, *last = facts.split(" ")
    host = Fake({("find", str(folder)): (0, f"{folder}/{name}.lease\n")}, name="host-a")
    lease = Lease(name, int(generation or 0), last[0] if last else None, 1.0, "host-a", "host-a")
    host.answers[LIST] = lists([Instance("sms-lab", 7, "/i.sif")] if "runs" in last else [])
    host.files[f"{folder}/{name}.lease"] = lease.text() if generation else b"{"
    with pytest.raises(Refused, match="cluster labb never ran") if refused else nullcontext():
        refuse_renamed(cluster, host)


def test_an_unreadable_lease_is_reported_with_its_path() -> None:
    cluster = open_debian()
    host = Fake({})
    host.files[str(cluster.places.lease)] = b"{"
    with pytest.raises(SmsError, match=str(cluster.places.lease)):
        query_lease(host, cluster)


@pytest.mark.parametrize(
    "said, meaning",
    [
        ("FATAL: Failed to verify container: integrity: signature not found for object group 1", "it is not signed"),
        ("data object integrity compromised: 3", "it was changed after it was signed"),
        ("dsse: verify envelope failed: accepted signatures do not match threshold", "it was signed with another key"),
        ("something new", "something new"),
    ],
)
def test_reasons_why_an_image_is_not_trusted(said: str, meaning: str) -> None:
    with pytest.raises(Refused, match=meaning):
        apptainer.verify_pem(Fake({("apptainer", "verify"): (255, said)}), "x.sif", ["k.pub"])


def test_the_matching_key_is_returned() -> None:
    answers: dict[tuple[str, ...], Answer] = {
        ("apptainer", "verify", "--all", "--key", "a"): (255, "x"),
        ("apptainer", "verify", "--all", "--key", "b"): (0, ""),
    }
    assert apptainer.verify_pem(Fake(answers), "x.sif", ["a", "b"]) == "b"


def test_pruning_keeps_the_current_image_of_every_cluster(tmp_path: Path) -> None:
    cluster = open_debian(tmp_path)
    images = tmp_path / "images"
    images.mkdir()
    for number, key in enumerate("abcd"):
        (images / f"{key}.sif").write_bytes(b"x")
        (images / f"{key}.json").write_text(json.dumps({"services": [], "base": {"name": "debian-12"}}))
        os.utime(images / f"{key}.sif", (number, number))
    (images / "other.sif").symlink_to("a.sif")
    (images / f"{cluster.site.cluster}.sif").symlink_to("b.sif")
    assert [one.key for one in prune_images(cluster, 1, dry_run=True)] == ["c"]
    assert (images / "c.sif").exists()
    prune_images(cluster, 1, dry_run=False)
    assert sorted(path.name for path in images.glob("?.sif")) == ["a.sif", "b.sif", "d.sif"]
    assert not (images / "c.json").exists()


def test_pruning_keeps_what_is_deployed_to_an_engine(tmp_path: Path) -> None:
    """A job names the file, a pod the beginning of the key; what was deployed before is for a rollback."""
    cluster = open_debian(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "engines/other").mkdir(parents=True)
    keys = [letter * 64 for letter in "abc"]
    for key in keys:
        (tmp_path / f"images/{key}.sif").write_bytes(b"x")
        (tmp_path / f"images/{key}.json").write_text(json.dumps({"services": [], "base": {"name": "debian-12"}}))
    (tmp_path / "engines/other/1.json").write_text(f'{{"items": [{{"text": "image /images/{keys[0]}.sif"}}]}}')
    (tmp_path / "engines/other/2.json").write_text(f'{{"image": "localhost/sms/lab:{keys[1][:12]}"}}')
    assert [one.key for one in prune_images(cluster, 0, dry_run=False)] == [keys[2]]


class Notes(Silent):
    """Collects the lines that stay."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)


def test_a_classification_overrides_the_services_of_the_site_file(tmp_path: Path) -> None:
    """The input of `sms build --from FILE`."""
    file = tmp_path / "classification.yaml"
    seen = [("munge", "time-critical"), ("slurmctld", "time-critical"), ("cron", "deferrable")]
    services = [{"name": name, "verdict": verdict} for name, verdict in seen]
    file.write_text(json.dumps({"services": services}))
    said = Notes()
    cluster = open_cluster(DEBIAN_SITE, None, said, classification=file)
    assert [service.name for service in cluster.services] == ["munge", "slurmctld"]
    refused = [each for each in open_debian().services if each not in cluster.services]
    assert f"the site file also enables {', '.join(each.name for each in refused)}: `sms start`" in said.lines[-1]


TAKEN = "FATAL: mount /proc/self/fd/6: error: while mounting image /proc/self/fd/6: device or resource busy"


@pytest.mark.parametrize(
    ("answers", "tries", "works"),
    [
        ([(0, "")], 1, True),
        ([(255, TAKEN), (0, "")], 2, True),
        ([(255, TAKEN), (255, TAKEN), (0, "")], 3, True),
        ([(255, TAKEN), (255, TAKEN), (255, TAKEN)], 3, False),
        ([(255, "FATAL: image is not signed")], 1, False),
        ([(255, TAKEN), (1, "device or resource busy, says a service")], 2, False),
    ],
)
def test_a_container_is_retried_when_its_loop_device_was_taken(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, str]], tries: int, works: bool
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    left = iter(answers)
    host = Fake({("apptainer",): lambda *_: next(left)})
    if works:
        assert apptainer.run_container(host, "apptainer", "exec", timeout=5).status == 0
    else:
        with pytest.raises(CommandError):
            apptainer.run_container(host, "apptainer", "exec", timeout=5)
    assert len(host.asked) == tries
