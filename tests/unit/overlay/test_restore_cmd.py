"""`sms overlay restore`: what is requested of the agent, kept and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.local import Local
from appliance.operations.snapshots.restore import (
    KeptOverlay,
    _link_beside,
    other_image,
    rehearse_restore,
    resolve_target,
    restore,
    restored_generation,
)
from appliance.shared.lease import Lease
from tests.support.fake import Answer
from tests.unit.overlay.admin_host import IMAGE, LISTED, cluster, echo, host, locks, manifest, requests


def restored(request: dict[str, Any]) -> dict[str, Any]:
    return {"number": int(request["snapshot"]), "bytes": 48 << 20, "seconds": 0.5}


def test_a_restore_keeps_what_it_replaces_as_a_snapshot() -> None:
    fake = host({"list": LISTED, "take": echo, "restore": restored}, lease={})
    done = restore(cluster(), fake, "40")
    assert done.kept == KeptOverlay(57) and done.snapshot == 40 and not done.other_image
    assert [argv[3] for argv in fake.asked if argv[0] == "python3"] == ["list", "take", "restore"]
    (taken,), (put,) = requests(fake, "take"), requests(fake, "restore")
    assert taken["reason"] == "before restore of 40" and taken["lock"] == ""
    places = cluster().places
    assert json.loads(fake.files[str(places.lease)])["generation"] == 7, "above what answers: another host may serve"
    assert put == {"store": str(places.snapshots), "snapshot": "40", "target": str(places.overlay), "replace": True}
    assert json.loads(fake.files[f"{places.overlay}.generation"]) == {"cluster": "sample", "generation": 7}


def test_a_restore_that_is_judged_too_costly_changes_nothing() -> None:
    judged: list[float] = []

    def judge(taken: float) -> list[str]:
        judged.append(taken)
        raise Refused("it would lose a job")

    fake = host({"list": LISTED}, lease={})
    before = dict(fake.files)
    for work in (restore, rehearse_restore):
        with pytest.raises(Refused, match="lose a job"):
            work(cluster(), fake, "40", judge=judge)
    assert judged == [next(one["taken"] for one in LISTED["snapshots"] if one["number"] == 40)] * 2
    assert fake.files == before and {argv[3] for argv in fake.asked if argv[0] == "python3"} == {"list"}


@pytest.mark.parametrize(
    ("holder", "lease", "mark"), [(None, 7, 7), ("host-a", 9, 9), ("host-b", 7, 6), ("host-b", 0, 0)]
)
def test_a_restored_overlay_is_the_newest_unless_another_host_goes_on(
    holder: str | None, lease: int, mark: int
) -> None:
    assert restored_generation(Lease("sample", lease, holder), "host-a") == mark


def test_a_failover_that_is_interrupted_after_its_restore_changes_nothing_elsewhere() -> None:
    """It takes the lease later; until then the failed host may return, and has the newest overlay."""
    fake = host({"list": LISTED, "take": echo, "restore": restored}, lease={"generation": 7})
    restore(cluster(), fake, "40", fenced=["host-b"])
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
    restore(cluster(), fake, "40")
    places = cluster().places
    assert seen == [[str(places.lock), f"{places.lease}.lock"]] * 2 and not held


def test_an_identical_overlay_is_not_replaced() -> None:
    same = {"snapshot": manifest(57, digests=manifest(40)["digests"])}
    fake = host({"list": LISTED, "take": same}, lease={})
    assert restore(cluster(), fake, "40").kept == KeptOverlay(57, same=True)


def test_an_overlay_too_damaged_for_a_snapshot_gets_a_second_name() -> None:
    """The overlay's name exists at every moment: otherwise a start would create an empty one."""
    overlay = str(cluster().places.overlay)
    bad = {"message": "its file system is damaged", "hint": "", "status": 1}
    more: dict[tuple[str, ...], Answer] = {
        ("test", "-e", f"{overlay}.before-40"): (1, ""),
        ("ln",): (0, ""),
        ("sync",): (0, ""),
    }
    fake = host({"list": LISTED, "take": bad, "restore": restored}, lease={}, more=more)
    kept = restore(cluster(), fake, "40").kept
    assert kept and kept.path == f"{overlay}.before-40" and "its file system is damaged" in kept.why
    assert ("ln", "-T", "--", overlay, f"{overlay}.before-40") in fake.asked


def test_an_overlay_that_cannot_be_kept_at_all_is_not_replaced() -> None:
    overlay = str(cluster().places.overlay)
    bad = {"message": "its file system is damaged", "hint": "", "status": 1}
    more: dict[tuple[str, ...], Answer] = {
        ("test", "-e", f"{overlay}.before-40"): (1, ""),
        ("ln",): (1, "ln: no hard links here"),
    }
    fake = host({"list": LISTED, "take": bad}, lease={}, more=more)
    with pytest.raises(SmsError, match=r"neither as a snapshot \(host-a: its file system is damaged\) nor as"):
        restore(cluster(), fake, "40")


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
        restore(cluster(), fake, "40")


def test_a_link_stays_one() -> None:
    """The overlay's name is a link into the mirror: the restore writes there and does not replace the link."""
    more: dict[tuple[str, ...], Answer] = {("test", "-L"): (0, ""), ("readlink", "-e"): (0, "/mirror/sample.img")}
    fake = host({"list": LISTED, "take": echo, "restore": restored}, lease={}, more=more)
    assert restore(cluster(), fake, "40").target == "/mirror/sample.img"
    assert requests(fake, "restore")[0]["target"] == "/mirror/sample.img"


def test_a_link_to_nothing_is_refused() -> None:
    fake = host({"list": LISTED}, lease={}, more={("test", "-L"): (0, ""), ("readlink", "-e"): (1, "")})
    with pytest.raises(Refused, match="is a link to a missing file"):
        restore(cluster(), fake, "40")


def test_without_an_overlay_there_is_nothing_to_keep() -> None:
    fake = host({"list": LISTED, "restore": restored}, lease={}, overlay=False)
    assert restore(cluster(), fake, "latest").kept is None
    assert requests(fake, "restore")[0]["snapshot"] == "41"


NOT_RESTORED: list[tuple[dict[str, Any], str, str]] = [
    ({"running": True}, "the services container runs on host-a", "sms stop --host host-a"),
    ({"lease": {"holder": "host-b"}}, "host-b holds the lease", "sms stop --host host-b"),
    ({"loops": ("/dev/loop3",)}, "is in use on host-a", "losetup -l"),
]


@pytest.mark.parametrize(("state", "words", "hint"), NOT_RESTORED, ids=[case[1] for case in NOT_RESTORED])
def test_restores_that_are_refused(state: dict[str, Any], words: str, hint: str) -> None:
    for act in (
        lambda fake: restore(cluster(), fake, "40"),
        lambda fake: rehearse_restore(cluster(), fake, "40"),
    ):
        fake = host({"list": LISTED}, **state)
        with pytest.raises(Refused, match=words) as caught:
            act(fake)
        assert hint in caught.value.hint


def test_a_second_overlay_takes_no_lock_and_replaces_nothing() -> None:
    fake = host({"list": LISTED, "restore": restored}, running=True, overlay=False, lease={"holder": "host-a"})
    done = restore(cluster(), fake, "40", name="tuesday")
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
