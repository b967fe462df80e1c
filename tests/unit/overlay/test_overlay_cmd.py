"""`sms overlay snapshot, list, show, verify`: what is requested of the agent, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.lease import hold_lease_still
from appliance.operations.overlay.overlay import keep_stopped
from appliance.operations.snapshots.list import (
    check_request,
    find_snapshot,
    list_snapshots,
    rehearse_verify,
    verify,
)
from appliance.operations.snapshots.snapshot import SnapshotOptions, rehearse_snapshot, snapshot
from appliance.tools import python
from tests.support.fake import Fake
from tests.unit.overlay.admin_host import INSIDE, JOBS, LISTED, NONE, cluster, echo, host, locks, requests

# Taking a snapshot


def test_request_to_take_a_snapshot() -> None:
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"})
    taken = snapshot(cluster(), fake, SnapshotOptions(reason="upgrade", freeze_limit_s=2))
    assert (taken.snapshot["number"], taken.not_dumped) == (57, ())
    (request,) = requests(fake, "take")
    places = cluster().places
    assert request == {
        "store": str(places.snapshots),
        "overlay": str(places.overlay),
        "lock": str(places.lock),
        "lease": str(places.lease),
        "method": "auto",
        "freeze_limit_s": 2,
        "facts": {
            "cluster": "sample",
            "cluster_uuid": "",
            "host": "host-a",
            "generation": 7,
            "image": {"key": "k1", "sha256": "ab" * 32},
            "slurm_cluster": "sample",
        },
        **check_request(cluster()),
        "reason": "upgrade",
        "notes": [],
    }
    assert "/var/spool/slurmctld" in request["state"] and "/etc/munge" in request["state"]
    assert request["heads"][JOBS] == "PROTOCOL_VERSION"
    assert locks(fake) == [], "the agent itself takes the lock"


def test_the_lock_is_held_while_a_stopped_overlay_is_taken() -> None:
    """On a shared folder the lease is locked as well, so that no other host starts it meanwhile."""
    fake = host({"take": echo}, lease={})
    snapshot(cluster(), fake, SnapshotOptions())
    places = cluster().places
    assert locks(fake) == [str(places.lock), f"{places.lease}.lock"]
    assert requests(fake, "take")[0]["lock"] == ""


@pytest.mark.parametrize(("wanted", "site", "method"), [("", "full", "full"), ("delta", "full", "delta")])
def test_the_method_is_the_sites_unless_one_is_named(wanted: str, site: str, method: str) -> None:
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"})
    snapshot(cluster(method=site), fake, SnapshotOptions(method=wanted))
    assert requests(fake, "take")[0]["method"] == method


def test_a_note_of_another_start_does_not_give_the_image() -> None:
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"})
    fake.files[f"{cluster().places.journal}/sample.json"] = json.dumps({"image": "/old.sif", "key": "k0"}).encode()
    snapshot(cluster(), fake, SnapshotOptions())
    assert requests(fake, "take")[0]["facts"]["image"] == {"key": "", "sha256": ""}


@pytest.mark.parametrize(
    ("lease", "running", "generation"),
    [
        ({"holder": "host-a"}, True, 7),
        ({"holder": "host-a", "generation": 9}, True, 9),
        ({"holder": "host-a", "generation": 5}, True, 7),  # the note of the start is newer: the lease is a stale copy
        (None, True, 7),  # the lease was lost while it runs
        ({"file": "host-a", "generation": 9}, False, 7),  # another host has run since, with its own overlay
        ({"file": "host-b", "generation": 9}, False, 9),  # with this overlay
        (None, False, 7),
        ({"generation": 41, "since": 0.0}, False, 7),  # raised above a snapshot that was fetched, and never taken
    ],
)
def test_the_generation_is_that_of_the_last_writer(
    lease: dict[str, Any] | None, running: bool, generation: int
) -> None:
    fake = host({"take": echo}, running=running, lease=lease)
    snapshot(cluster(), fake, SnapshotOptions())
    assert requests(fake, "take")[0]["facts"]["generation"] == generation


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"lease": {"holder": "host-b"}}, "the services container runs on host-b", "sms overlay snapshot --host host-b"),
    ({"overlay": False}, "there is no overlay", "sms overlay create"),
    ({"running": True, "loops": ()}, "no loop device has .*img open", "losetup -l"),
    ({"running": True, "loops": ("/dev/loop0", "/dev/loop1")}, "/dev/loop0, /dev/loop1 all have", "losetup -l"),
    ({"loops": ("/dev/loop3",)}, r"in use on host-a \(/dev/loop3\)", "losetup -l"),
]


@pytest.mark.parametrize(("state", "words", "hint"), REFUSED, ids=[case[1] for case in REFUSED])
def test_snapshots_that_are_refused(state: dict[str, Any], words: str, hint: str) -> None:
    for act in (
        lambda fake: snapshot(cluster(), fake, SnapshotOptions()),
        lambda fake: rehearse_snapshot(cluster(), fake, SnapshotOptions()),
    ):
        fake = host(**state)
        with pytest.raises(Refused, match=words) as caught:
            act(fake)
        assert hint in caught.value.hint
        assert not any(argv[0] in ("python3", "mkdir") for argv in fake.asked), "nothing was begun"


def test_a_database_is_dumped_before() -> None:
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"}, more={INSIDE: (0, "")})
    snapshot(cluster(), fake, SnapshotOptions())
    order = [argv for argv in fake.asked if argv[0] in ("unshare", "python3")]
    assert order[0][: len(INSIDE) + 1] == (*INSIDE, "grep")
    assert order[1][: len(INSIDE) + 4] == (*INSIDE, "timeout", "--kill-after=10", "300", "sh")
    assert "mariadb-dump" in order[1][len(INSIDE) + 5] and order[2][3] == "take"
    assert "/var/lib/mysql-dump" in requests(fake, "take")[0]["state"]


def test_a_database_that_does_not_run_yet_is_not_dumped() -> None:
    """The site file has it, the running container does not: grep ends with 1."""
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"}, more={(*INSIDE, "grep"): (1, "")})
    assert snapshot(cluster(), fake, SnapshotOptions()).not_dumped == ()
    assert not any("timeout" in argv[: len(INSIDE) + 1] for argv in fake.asked if argv[: len(INSIDE)] == INSIDE)


@pytest.mark.parametrize(
    ("site", "wanted", "running"),
    [
        ({"dump": False}, SnapshotOptions(), True),
        ({}, SnapshotOptions(dump=False), True),
        ({}, SnapshotOptions(), False),
    ],
    ids=["the site says no", "--no-dump", "stopped"],
)
def test_cases_without_a_dump(site: dict[str, Any], wanted: SnapshotOptions, running: bool) -> None:
    lease = {"holder": "host-a"} if running else {}
    fake = host({"take": echo}, running=running, lease=lease)
    assert snapshot(cluster(**site), fake, wanted).not_dumped == ()
    assert not any(argv[: len(INSIDE)] == INSIDE for argv in fake.asked)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((2, "x\nmariadb-dump: Got error: 2002: Can't connect"), "mariadb-dump: Got error: 2002: Can't connect"),
        ((124, ""), "it took longer than 300 s"),
        ((9, ""), "it ended with status 9"),
    ],
)
def test_a_dump_that_fails_is_noted_and_the_snapshot_taken(answer: tuple[int, str], why: str) -> None:
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"}, more={INSIDE: answer})
    taken = snapshot(cluster(), fake, SnapshotOptions())
    assert taken.not_dumped == (f"mariadb was not dumped: {why}",)
    assert taken.snapshot["notes"] == list(taken.not_dumped)


def test_a_dry_run_lists_steps_without_the_agent() -> None:
    fake = host(running=True, lease={"holder": "host-a"})
    steps = rehearse_snapshot(cluster(), fake, SnapshotOptions(method="full"))
    places = cluster().places
    assert steps == [
        "dump mariadb, inside the container",
        f"take {places.overlay} into {places.snapshots}: method full, writers wait 5 s at most",
        "check it with e2fsck, and that state files can be read, then commit it",
    ]


@pytest.mark.parametrize("status, kind", [(1, SmsError), (3, Refused)])
def test_errors_of_the_agent_are_passed_on(status: int, kind: type[SmsError]) -> None:
    problem = {"message": "the file system of /s is full", "hint": "`sms overlay prune` makes room", "status": status}
    fake = host({"take": problem}, running=True, lease={"holder": "host-a"})
    with pytest.raises(kind, match="host-a: the file system of /s is full") as caught:
        snapshot(cluster(), fake, SnapshotOptions())
    assert caught.value.hint == problem["hint"]


def test_a_host_without_python_is_refused() -> None:
    with pytest.raises(Refused, match=r"host-a has no Python 3\.9 or newer"):
        list_snapshots(cluster(), Fake({("sh", "-c", python.FIND): (0, "")}, name="host-a"))


# Finding, verifying

FOUND: list[tuple[dict[str, Any], str, int | type[SmsError], str]] = [
    (LISTED, "latest", 41, ""),
    (LISTED, "42", 42, ""),
    (LISTED, "040", 40, ""),
    (LISTED, "39", SmsError, "snapshot 39 is damaged: its manifest has changed"),
    (LISTED, "7", Refused, "there is no snapshot 7 on host-a"),
    (LISTED, "newest", ConfigError, "invalid snapshot 'newest'"),
    (LISTED, "-1", ConfigError, "invalid snapshot '-1'"),
    (LISTED, "²", ConfigError, "invalid snapshot"),
    (LISTED, "9" * 5000, ConfigError, "invalid snapshot"),
    (NONE, "latest", Refused, "there are no snapshots on host-a"),
    (NONE, "1", Refused, "there are no snapshots on host-a"),
    ({**NONE, "broken": {"1": "x"}}, "latest", Refused, "no snapshot on host-a is verified"),
]


@pytest.mark.parametrize(
    ("listed", "wanted", "found", "words"), FOUND, ids=[f"{case[1][:9]}: {case[3]}" for case in FOUND]
)
def test_selectors_of_snapshots(listed: dict[str, Any], wanted: str, found: int | type[SmsError], words: str) -> None:
    listing = list_snapshots(cluster(), host({"list": listed}))
    if isinstance(found, int):
        assert find_snapshot(listing, wanted)["number"] == found
        return
    with pytest.raises(found, match=words) as caught:
        find_snapshot(listing, wanted)
    assert type(caught.value) is found and caught.value.hint


def test_the_hint_lists_existing_snapshots() -> None:
    with pytest.raises(Refused) as caught:
        find_snapshot(list_snapshots(cluster(), host({"list": LISTED})), "7")
    assert caught.value.hint == "the newest are: 40, 41, 42"


def check(request: dict[str, Any]) -> dict[str, Any]:
    bad = {42: ["chunk 3 (ab) has changed"]}
    return {"snapshots": [{"number": n, "ok": n not in bad, "damage": bad.get(n, [])} for n in request["numbers"]]}


VERIFIED: list[tuple[tuple[str, ...], bool, list[int], dict[int, bool]]] = [
    (("latest",), False, [41], {41: True}),
    (("42", "40", "42"), False, [42, 40], {40: True, 42: False}),
    (("39",), False, [], {39: False}),
    (("latest",), True, [40, 41, 42], {39: False, 40: True, 41: True, 42: False}),
]


@pytest.mark.parametrize(("wanted", "everything", "asked", "found"), VERIFIED)
def test_selection_for_verify(
    wanted: tuple[str, ...], everything: bool, asked: list[int], found: dict[int, bool]
) -> None:
    fake = host({"list": LISTED, "verify": check})
    results = verify(cluster(), fake, wanted, everything=everything)
    assert {one.number: one.ok for one in results} == found
    assert [request["numbers"] for request in requests(fake, "verify")] == ([asked] if asked else [])
    fake = host({"list": LISTED})
    would = rehearse_verify(cluster(), fake, wanted, everything=everything)
    assert [one["number"] for one in would] == sorted(asked), "a dry run sends no verify request"


def test_a_lease_of_another_host_cannot_be_locked() -> None:
    fake = host(lease={"holder": "host-b"})
    with pytest.raises(Refused, match="host-b holds the lease"), hold_lease_still(fake, cluster()):
        pass
    with pytest.raises(Refused, match="host-b holds the lease"), keep_stopped(cluster(), fake):
        pass
