"""`sms overlay create, snapshot, list, show, verify, restore`: commands run on a host, and the output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.snapshots import view
from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.fake import Answer, Fake
from appliance.host.local import Local
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.lease import hold_lease_still
from appliance.operations.overlay.overlay import keep_stopped
from appliance.operations.snapshots.list import (
    Listing,
    Verified,
    find_snapshot,
    list_snapshots,
    rehearse_verify,
    state_heads,
    state_paths,
    verify,
)
from appliance.operations.snapshots.restore import (
    KeptOverlay,
    Restored,
    _link_beside,
    other_image,
    rehearse_restore,
    resolve_target,
    restore,
    restored_generation,
)
from appliance.operations.snapshots.snapshot import SnapshotOptions, rehearse_snapshot, snapshot
from appliance.operations.start_note import StartNote
from appliance.plan.machine import inside_argv
from appliance.progress import Silent
from appliance.shared.lease import Lease
from appliance.tools import python
from appliance.tools.agent import installed_path
from appliance.units import format_age, format_size
from tests.places import DEBIAN_SITE

NOW = 1_800_000_000.0
IMAGE = "/nowhere/sms/images/k1.sif"
JOBS = "/var/spool/slurmctld/job_state"


def cluster(**changes: Any) -> Cluster:
    """Return the sample site, independent of this machine; ``changes`` go to its snapshots section."""
    found = open_cluster(DEBIAN_SITE, Path("/nowhere/sms"), Silent())
    site = found.site.model_copy(update={"snapshots": found.site.snapshots.model_copy(update=changes)})
    return replace(found, site=site)


INSIDE = inside_argv(cluster().site, cluster().services)


def manifest(number: int = 42, **changes: Any) -> dict[str, Any]:
    """Return a snapshot as the agent reports it."""
    return {
        "format": 1,
        "number": number,
        "uuid": f"{number:032x}",
        "cluster": "sample",
        "host": "host-a",
        "generation": 7,
        "image": {"key": "k1", "sha256": "ab" * 32},
        "slurm_cluster": "sample",
        "taken": NOW - 720,
        "running": True,
        "frozen_ms": 31.2,
        "method": "delta",
        "found_by": "trace",
        "size": 2 << 30,
        "used_bytes": 48 << 20,
        "new_bytes": 1_363_149,
        "digests": f"{number:064x}",
        "checks": {
            "e2fsck": "clean",
            "state_files": 14,
            "state_bytes": 100,
            "heads": ["/var/spool/slurmctld/job_state"],
        },
        "notes": [],
        "reason": "",
        "health": {"ok": True, "at": NOW - 719},
        **changes,
    }


Agent = dict[str, Callable[[dict[str, Any]], dict[str, Any]] | dict[str, Any]]


def host(
    agent: Agent | None = None,
    *,
    running: bool = False,
    overlay: bool = True,
    loops: tuple[str, ...] | None = None,
    lease: dict[str, Any] | None = None,
    more: dict[tuple[str, ...], Answer] | None = None,
) -> Fake:
    """Return an admin host; ``agent`` has the replies of its agent by command."""
    instances = [{"instance": "sms-sample", "pid": 7, "img": IMAGE}] if running else []
    users = loops if loops is not None else ("/dev/loop0",) if running else ()

    def ask(argv: tuple[str, ...], _: bytes | None) -> tuple[int, str]:
        command, request = argv[3], json.loads(argv[4])
        answer = (agent or {})[command]
        reply = answer(request) if callable(answer) else answer
        kind = "problem" if "message" in reply else "result"
        return reply.get("status", 0), json.dumps({"kind": kind, **reply})

    answers: dict[tuple[str, ...], Answer] = {
        ("sh", "-c"): (0, ""),
        ("sh", "-c", python.FIND): (0, "python3"),
        ("mkdir",): (0, ""),
        ("find",): (0, ""),
        ("test",): (0 if overlay else 1, ""),
        ("test", "-L"): (1, ""),
        ("test", str(cluster().places.overlay), "-ef"): (1, ""),
        ("losetup",): (0, "\n".join(users)),
        ("apptainer", "instance", "list"): (0, json.dumps({"instances": instances})),
        ("python3", "-I", installed_path()): ask,
        ("readlink",): (0, IMAGE),
        INSIDE: (0, ""),
        **(more or {}),
    }

    fake = Fake(answers, name="host-a")
    site = cluster()
    if lease is not None:
        record = {"cluster": "sample", "generation": 7, "holder": None, "since": 1.0, **lease}
        fake.files[str(site.places.lease)] = json.dumps(record).encode()
    note = asdict(StartNote(IMAGE, "k1", "ab" * 32, "s", 7, "host-a", 0.0))
    fake.files[f"{site.places.journal}/sample.json"] = json.dumps(note).encode()
    return fake


def requests(fake: Fake, command: str) -> list[dict[str, Any]]:
    """Return the requests to the agent."""
    asked = [argv for argv in fake.asked if argv[:1] == ("python3",) and argv[3] == command]
    return [json.loads(argv[4]) for argv in asked]


def locks(fake: Fake) -> list[str]:
    """Return the locks that were taken, in order."""
    return [argv[4] for argv in fake.asked if argv[0] == "sh" and "exec flock" in argv[2]]


def echo(request: dict[str, Any]) -> dict[str, Any]:
    """Reply to `take` with the requested reason and notes."""
    return {"snapshot": manifest(57, notes=request["notes"], reason=request["reason"])}


# Taking a snapshot


def test_request_to_take_a_snapshot() -> None:
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"})
    taken = snapshot(cluster(), fake, Silent(), SnapshotOptions(reason="upgrade", freeze_limit_s=2))
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
        "state": state_paths(cluster()),
        "heads": state_heads(cluster()),
        "reason": "upgrade",
        "notes": [],
    }
    assert "/var/spool/slurmctld" in request["state"] and "/etc/munge" in request["state"]
    assert request["heads"][JOBS] == "PROTOCOL_VERSION"
    assert locks(fake) == [], "the agent itself takes the lock"


def test_the_lock_is_held_while_a_stopped_overlay_is_taken() -> None:
    """On a shared folder the lease is locked as well, so that no other host starts it meanwhile."""
    fake = host({"take": echo}, lease={})
    snapshot(cluster(), fake, Silent(), SnapshotOptions())
    places = cluster().places
    assert locks(fake) == [str(places.lock), f"{places.lease}.lock"]
    assert requests(fake, "take")[0]["lock"] == ""


@pytest.mark.parametrize(("wanted", "site", "method"), [("", "full", "full"), ("delta", "full", "delta")])
def test_the_method_is_the_sites_unless_one_is_named(wanted: str, site: str, method: str) -> None:
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"})
    snapshot(cluster(method=site), fake, Silent(), SnapshotOptions(method=wanted))
    assert requests(fake, "take")[0]["method"] == method


def test_a_note_of_another_start_does_not_give_the_image() -> None:
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"})
    fake.files[f"{cluster().places.journal}/sample.json"] = json.dumps({"image": "/old.sif", "key": "k0"}).encode()
    snapshot(cluster(), fake, Silent(), SnapshotOptions())
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
    snapshot(cluster(), fake, Silent(), SnapshotOptions())
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
        lambda fake: snapshot(cluster(), fake, Silent(), SnapshotOptions()),
        lambda fake: rehearse_snapshot(cluster(), fake, SnapshotOptions()),
    ):
        fake = host(**state)
        with pytest.raises(Refused, match=words) as caught:
            act(fake)
        assert hint in caught.value.hint
        assert not any(argv[0] in ("python3", "mkdir") for argv in fake.asked), "nothing was begun"


def test_a_database_is_dumped_before() -> None:
    fake = host({"take": echo}, running=True, lease={"holder": "host-a"}, more={INSIDE: (0, "")})
    snapshot(cluster(), fake, Silent(), SnapshotOptions())
    order = [argv for argv in fake.asked if argv[0] in ("apptainer", "python3") and argv[1] != "instance"]
    assert order[0][: len(INSIDE) + 4] == (*INSIDE, "timeout", "--kill-after=10", "300", "sh")
    assert "mariadb-dump" in order[0][len(INSIDE) + 5] and order[1][3] == "take"
    assert "/var/lib/mysql-dump" in requests(fake, "take")[0]["state"]


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
    assert snapshot(cluster(**site), fake, Silent(), wanted).not_dumped == ()
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
    taken = snapshot(cluster(), fake, Silent(), SnapshotOptions())
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
        snapshot(cluster(), fake, Silent(), SnapshotOptions())
    assert caught.value.hint == problem["hint"]


def test_a_host_without_python_is_refused() -> None:
    with pytest.raises(Refused, match=r"host-a has no Python 3\.9 or newer"):
        list_snapshots(cluster(), Fake({("sh", "-c", python.FIND): (0, "")}, name="host-a"))


# Finding, verifying


LISTED: dict[str, Any] = {
    "snapshots": [manifest(40), manifest(41), manifest(42, health={"ok": False, "at": 1.0, "damage": ["x"]})],
    "broken": {"39": "its manifest has changed"},
    "stored_bytes": 64 << 20,
    "free_bytes": 10 << 30,
}
NONE: dict[str, Any] = {"snapshots": [], "broken": {}, "stored_bytes": 0, "free_bytes": 0}
FOUND: list[tuple[dict[str, Any], str, int | type[SmsError], str]] = [
    (LISTED, "latest", 41, ""),
    (LISTED, "42", 42, ""),
    (LISTED, "040", 40, ""),
    (LISTED, "39", SmsError, "snapshot 39 is damaged: its manifest has changed"),
    (LISTED, "7", Refused, "there is no snapshot 7 on host-a"),
    (LISTED, "newest", ConfigError, "invalid snapshot 'newest'"),
    (LISTED, "-1", ConfigError, "invalid snapshot '-1'"),
    (NONE, "latest", Refused, "there are no snapshots on host-a"),
    (NONE, "1", Refused, "there are no snapshots on host-a"),
    ({**NONE, "broken": {"1": "x"}}, "latest", Refused, "no snapshot on host-a is verified"),
]


@pytest.mark.parametrize(("listed", "wanted", "found", "words"), FOUND, ids=[f"{case[1]}: {case[3]}" for case in FOUND])
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
    results = verify(cluster(), fake, wanted, Silent(), everything=everything)
    assert {one.number: one.ok for one in results} == found
    assert [request["numbers"] for request in requests(fake, "verify")] == ([asked] if asked else [])
    fake = host({"list": LISTED})
    would = rehearse_verify(cluster(), fake, wanted, everything=everything)
    assert [one["number"] for one in would] == sorted(asked), "a dry run sends no verify request"


# Restoring


def restored(request: dict[str, Any]) -> dict[str, Any]:
    return {"number": int(request["snapshot"]), "bytes": 48 << 20, "seconds": 0.5}


def test_a_restore_keeps_what_it_replaces_as_a_snapshot() -> None:
    fake = host({"list": LISTED, "take": echo, "restore": restored}, lease={})
    done = restore(cluster(), fake, "40", Silent())
    assert done.kept == KeptOverlay(57) and done.snapshot == 40 and not done.other_image
    assert [argv[3] for argv in fake.asked if argv[0] == "python3"] == ["list", "take", "restore"]
    (taken,), (put,) = requests(fake, "take"), requests(fake, "restore")
    assert taken["reason"] == "before restore of 40" and taken["lock"] == ""
    places = cluster().places
    assert json.loads(fake.files[str(places.lease)])["generation"] == 8, "above the snapshot's"
    assert put == {"store": str(places.snapshots), "snapshot": "40", "target": str(places.overlay), "replace": True}
    assert json.loads(fake.files[f"{places.overlay}.generation"]) == {"cluster": "sample", "generation": 8}


@pytest.mark.parametrize(
    ("holder", "lease", "snapshot", "mark"),
    [(None, 7, 7, 8), ("host-a", 9, 7, 9), ("host-b", 7, 7, 6), (None, 0, 40, 41), ("host-b", 0, 7, 0)],
)
def test_a_restored_overlay_is_the_newest_unless_another_host_goes_on(
    holder: str | None, lease: int, snapshot: int, mark: int
) -> None:
    found = restored_generation(Lease("sample", lease, holder), "host-a", {"generation": snapshot})
    assert found == mark


def test_a_failover_that_is_interrupted_after_its_restore_changes_nothing_elsewhere() -> None:
    """It takes the lease later; until then the failed host may return, and has the newest overlay."""
    fake = host({"list": LISTED, "take": echo, "restore": restored}, lease={"generation": 7})
    restore(cluster(), fake, "40", Silent(), fenced=["host-b"])
    places = cluster().places
    assert json.loads(fake.files[str(places.lease)])["generation"] == 7
    assert json.loads(fake.files[f"{places.overlay}.generation"])["generation"] == 6


def test_a_restore_holds_the_locks_of_host_and_lease() -> None:
    """No host can start it between the snapshot of the old overlay and its replacement."""
    held: list[str] = []
    seen: list[list[str]] = []

    def kept(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(list(held))
        return echo(request)

    def put(request: dict[str, Any]) -> dict[str, Any]:
        seen.append(list(held))
        return restored(request)

    fake = host({"list": LISTED, "take": kept, "restore": put}, lease={})

    @contextmanager
    def hold(*argv: str, timeout: float = 30) -> Iterator[str]:
        held.append(argv[4])
        yield "held"
        held.remove(argv[4])

    fake.hold = hold  # type: ignore[method-assign]
    restore(cluster(), fake, "40", Silent())
    places = cluster().places
    assert seen == [[str(places.lock), f"{places.lease}.lock"]] * 2 and not held


def test_an_identical_overlay_is_not_replaced() -> None:
    same = {"snapshot": manifest(57, digests=manifest(40)["digests"])}
    fake = host({"list": LISTED, "take": same}, lease={})
    assert restore(cluster(), fake, "40", Silent()).kept == KeptOverlay(57, same=True)


def test_an_overlay_too_damaged_for_a_snapshot_gets_a_second_name() -> None:
    """The overlay's name exists at every moment: otherwise a start would create an empty one."""
    overlay = str(cluster().places.overlay)
    bad = {"message": "its file system is damaged", "hint": "", "status": 1}
    more = {("test", "-e", f"{overlay}.before-40"): (1, ""), ("ln",): (0, ""), ("sync",): (0, "")}
    fake = host({"list": LISTED, "take": bad, "restore": restored}, lease={}, more=more)
    kept = restore(cluster(), fake, "40", Silent()).kept
    assert kept and kept.path == f"{overlay}.before-40" and "its file system is damaged" in kept.why
    assert ("ln", "-T", "--", overlay, f"{overlay}.before-40") in fake.asked


def test_an_overlay_that_cannot_be_kept_at_all_is_not_replaced() -> None:
    overlay = str(cluster().places.overlay)
    bad = {"message": "its file system is damaged", "hint": "", "status": 1}
    more = {("test", "-e", f"{overlay}.before-40"): (1, ""), ("ln",): (1, "ln: no hard links here")}
    fake = host({"list": LISTED, "take": bad}, lease={}, more=more)
    with pytest.raises(SmsError, match=r"neither as a snapshot \(host-a: its file system is damaged\) nor as"):
        restore(cluster(), fake, "40", Silent())


def test_a_second_name_of_the_overlay_is_one_that_is_free(tmp_path: Path) -> None:
    """It is used again by a restore that is repeated. The overlay's own name remains."""
    overlay, name = tmp_path / "lab.img", str(tmp_path / "lab.img.before-40")
    overlay.write_bytes(b"x")
    for _ in range(2):
        assert _link_beside(Local(), str(overlay), name) == name
        assert overlay.samefile(name) and overlay.stat().st_nlink == 2
    overlay.unlink()
    overlay.write_bytes(b"y")
    for _ in range(2):
        assert _link_beside(Local(), str(overlay), name) == f"{name}.2"
        assert overlay.samefile(f"{name}.2") and overlay.stat().st_nlink == 2
    assert Path(name).read_bytes() == b"x"


def test_there_are_nine_names_for_overlays_that_are_kept(tmp_path: Path) -> None:
    overlay, name = tmp_path / "lab.img", str(tmp_path / "lab.img.before-40")
    for kept in (name, *(f"{name}.{number}" for number in range(2, 10))):
        overlay.write_bytes(b"")
        assert _link_beside(Local(), str(overlay), name) == kept
        overlay.unlink()
    overlay.write_bytes(b"")
    assert _link_beside(Local(), str(overlay), name) == "" and overlay.stat().st_nlink == 1


def test_a_second_name_that_cannot_be_made_is_not_reported(tmp_path: Path) -> None:
    overlay = tmp_path / "lab.img"
    overlay.write_bytes(b"")
    assert _link_beside(Local(), str(overlay), str(tmp_path / "missing" / "name")) == ""


def test_where_nothing_can_be_kept_nothing_is_restored() -> None:
    busy = {"message": "another run is at work", "hint": "wait", "status": 3}
    fake = host({"list": LISTED, "take": busy}, lease={})
    with pytest.raises(Refused, match="another run is at work"):
        restore(cluster(), fake, "40", Silent())


def test_a_link_stays_one() -> None:
    """The overlay's name is a link into the mirror: the restore writes there and does not replace the link."""
    more = {("test", "-L"): (0, ""), ("readlink", "-e"): (0, "/mirror/sample.img")}
    fake = host({"list": LISTED, "take": echo, "restore": restored}, lease={}, more=more)
    assert restore(cluster(), fake, "40", Silent()).target == "/mirror/sample.img"
    assert requests(fake, "restore")[0]["target"] == "/mirror/sample.img"


def test_a_link_to_nothing_is_refused() -> None:
    fake = host({"list": LISTED}, lease={}, more={("test", "-L"): (0, ""), ("readlink", "-e"): (1, "")})
    with pytest.raises(Refused, match="is a link to a missing file"):
        restore(cluster(), fake, "40", Silent())


def test_without_an_overlay_there_is_nothing_to_keep() -> None:
    fake = host({"list": LISTED, "restore": restored}, lease={}, overlay=False)
    assert restore(cluster(), fake, "latest", Silent()).kept is None
    assert requests(fake, "restore")[0]["snapshot"] == "41"


NOT_RESTORED: list[tuple[dict[str, Any], str, str]] = [
    ({"running": True}, "the services container runs on host-a", "sms stop --host host-a"),
    ({"lease": {"holder": "host-b"}}, "host-b holds the lease", "sms stop --host host-b"),
    ({"loops": ("/dev/loop3",)}, "is in use on host-a", "losetup -l"),
]


@pytest.mark.parametrize(("state", "words", "hint"), NOT_RESTORED, ids=[case[1] for case in NOT_RESTORED])
def test_restores_that_are_refused(state: dict[str, Any], words: str, hint: str) -> None:
    for act in (
        lambda fake: restore(cluster(), fake, "40", Silent()),
        lambda fake: rehearse_restore(cluster(), fake, "40"),
    ):
        fake = host({"list": LISTED}, **state)
        with pytest.raises(Refused, match=words) as caught:
            act(fake)
        assert hint in caught.value.hint


def test_a_second_overlay_takes_no_lock_and_replaces_nothing() -> None:
    fake = host({"list": LISTED, "restore": restored}, running=True, overlay=False, lease={"holder": "host-a"})
    done = restore(cluster(), fake, "40", Silent(), name="tuesday")
    target = f"{cluster().places.overlay.parent}/tuesday.img"
    assert (done.target, done.kept) == (target, None)
    assert requests(fake, "restore")[0] | {"store": ""} == {
        "store": "",
        "snapshot": "40",
        "target": target,
        "replace": False,
    }
    assert locks(fake) == []


FOLDER = str(cluster().places.overlay.parent)
NAMES = {"tuesday": f"{FOLDER}/tuesday.img", "tuesday.img": f"{FOLDER}/tuesday.img", "/srv/x": "/srv/x"}


@pytest.mark.parametrize("name", NAMES)
def test_targets_of_names(name: str) -> None:
    assert resolve_target(cluster(), host(overlay=False), name) == NAMES[name]
    with pytest.raises(Refused, match="already exists"):
        resolve_target(cluster(), host(overlay=True), name)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a b", "sample", f"{FOLDER}/sample.img"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(ConfigError):
        resolve_target(cluster(), host(overlay=False), name)


@pytest.mark.parametrize(
    ("key", "there", "other"), [("k1", IMAGE, False), ("k0", IMAGE, True), ("", IMAGE, False), ("k0", "", False)]
)
def test_another_image_is_reported(key: str, there: str, other: bool) -> None:
    fake = host(more={("readlink",): (0 if there else 1, there)})
    assert other_image(cluster(), fake, manifest(image={"key": key, "sha256": ""})) is other


def test_a_lease_of_another_host_cannot_be_locked() -> None:
    fake = host(lease={"holder": "host-b"})
    with pytest.raises(Refused, match="host-b holds the lease"), hold_lease_still(fake, cluster()):
        pass
    with pytest.raises(Refused, match="host-b holds the lease"), keep_stopped(cluster(), fake):
        pass


# Output


def test_the_line_of_a_snapshot() -> None:
    assert view.taken_line("lab", manifest()) == (
        "snapshot 42 of lab: 48 MiB used, 1.3 MiB new, writers waited 31 ms (delta; changes by block trace), "
        "checked: e2fsck, 14 state files"
    )
    stopped = manifest(running=False, found_by="stopped", checks={"e2fsck": "repaired: its journal", "state_files": 1})
    assert view.taken_line("lab", stopped) == (
        "snapshot 42 of lab: 48 MiB used, 1.3 MiB new, not in use (delta), "
        "checked: e2fsck (repaired: its journal), 1 state file"
    )


def test_the_list_fits_its_width() -> None:
    rows = [
        manifest(1, taken=NOW - 400 * 86400, health={}),
        manifest(999_999, host="host-with-a-long-name.example.org", reason="before restore of [bold]999998[/] " * 5),
        manifest(7, used_bytes=123 << 30, new_bytes=0, method="reflink", frozen_ms=4999.6, taken=NOW + 3600),
        manifest(8, health={"ok": False, "at": 1.0, "damage": ["x"]}, running=False),
    ]
    listing = Listing("host-a", tuple(rows), {5: "its manifest has changed"}, 5 << 30, 70 << 30)
    from rich.text import Text

    lines = [Text.from_markup(line).plain for line in view.list_lines(listing, NOW)]
    assert max(map(len, lines)) <= view.WIDTH
    assert lines[0].split() == list(view.TITLES)
    assert "400 d" in lines[1] and "unchecked" in lines[1] and view.format_time(NOW - 400 * 86400)[:10] in lines[1]
    assert "host-with…" in lines[2] and "before" in lines[2] and lines[2].endswith("…")
    assert "123 GiB" in lines[3] and "0 s" in lines[3] and "5000 ms" in lines[3]
    assert "damaged" in lines[4] and " - " in lines[4]
    assert lines[5].split() == ["5", "damaged:", "its", "manifest", "has", "changed"]
    assert lines[6] == "5 snapshots on host-a, 5.0 GiB in all, room for 70 GiB more"


def test_all_of_a_manifest_is_shown() -> None:
    one = manifest(notes=["mariadb was not dumped: x"], health={"ok": False, "at": NOW, "damage": ["chunk 3 is gone"]})
    text = "\n".join(view.show_lines(one, NOW))
    for words in (
        "snapshot       42 of sample",
        "12 min ago, on host-a",
        "delta (changes by block trace), while in use; writers waited 31 ms",
        "generation 7",
        "key k1",
        "2.0 GiB, 48 MiB used, 1.3 MiB of it new",
        "valid headers: /var/spool/slurmctld/job_state",
        "damaged, checked ",
        "note           mariadb was not dumped: x",
        "damage         chunk 3 is gone",
    ):
        assert words in text, words
    assert "not known" in "\n".join(view.show_lines(manifest(image={"key": "", "sha256": ""}), NOW))


def test_control_characters_are_escaped() -> None:
    """A snapshot may come from another host, or from a store that others can write to."""
    nasty = "a\x1b]0;x\x07\r\u202eb"
    one = manifest(reason=nasty, host=nasty, method="delta", notes=[nasty], slurm_cluster=nasty)
    one["health"] = {"ok": False, "damage": [nasty]}
    listing = Listing("host-a", (one,), {9: nasty}, 0, 0)
    lines = [*view.list_lines(listing, NOW), *view.show_lines(one, NOW)]
    lines += view.verified_lines([Verified(9, (nasty,))], "lab")
    assert all(line.isprintable() for line in lines)
    assert r"\x1b]0;x\x07\r\u202eb" in "\n".join(lines)


def test_output_of_a_verification() -> None:
    lines = list(view.verified_lines([Verified(1, ()), Verified(2, ("chunk 3 [x]", "chunk 4"))], "lab"))
    assert lines == [
        "snapshot 1 of lab: [green]intact[/]",
        r"snapshot 2 of lab: [red]damaged[/]: chunk 3 \[x]",
        "snapshot 2 of lab: [red]damaged[/]: chunk 4",
    ]


RESTORED: list[tuple[KeptOverlay | None, bool, list[str]]] = [
    (None, False, ["snapshot 42 of lab is restored to /o/lab.img on host-a: 48 MiB in 0.5 s"]),
    (KeptOverlay(57), False, ["", "the previous overlay is snapshot 57; to undo: sms overlay restore 57"]),
    (KeptOverlay(path="/o/k"), False, ["", "the previous overlay is kept; to undo: mv /o/k /o/lab.img"]),
    (
        KeptOverlay(57),
        True,
        ["", "it was taken under another image: the next start seeds it for the current one", "the previous overlay"],
    ),
    (KeptOverlay(57, same=True), False, ["the overlay on host-a is identical to snapshot 42 of lab"]),
]


@pytest.mark.parametrize(("kept", "other", "lines"), RESTORED)
def test_output_of_a_restore(kept: KeptOverlay | None, other: bool, lines: list[str]) -> None:
    printed = list(view.restored_lines("lab", Restored("host-a", 42, "/o/lab.img", 48 << 20, 0.5, kept, other)))
    assert len(printed) == len(lines)
    assert all(words in line for words, line in zip(lines, printed, strict=True))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1_363_149, "1.3 MiB"),
        (48 << 20, "48 MiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172800, "2 d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
