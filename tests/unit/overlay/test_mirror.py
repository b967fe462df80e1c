"""The mirror: active members, problems, and the commands of btrfs and mdadm."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from appliance.errors import Refused, SmsError
from appliance.operations.overlay.mirrored import TOOLS
from appliance.plan.overlay.mirror import (
    GIB,
    Device,
    Member,
    Mirror,
    Seen,
    check_separate,
    member_bytes,
    member_problem,
    read_mirror,
    scrub_is_due,
    select_members,
    target_folders,
    warnings,
)
from appliance.progress import Silent
from appliance.shared.records import to_json
from appliance.tools.btrfs import Btrfs, read_scrub
from appliance.tools.mdadm import SYNC, Md, device_of
from appliance.tools.programs import FIND
from tests.support.fake import Fake

TWO = Mirror("c", "btrfs", 5 * GIB, (Member(1, "/a", 1, "u1"), Member(2, "/b", 2, "u2")), "whole")
WHOLE = {1: Seen(True, "whole", "u1", 7), 2: Seen(True, "whole", "u2", 7)}


def test_a_note_is_read_as_it_was_written() -> None:
    full = replace(TWO, pending=Member(3, "/c", 2), due="x", mounted_on="host-a", scrubbed=1.5, mended=3)
    for mirror in (TWO, full):
        assert read_mirror(to_json(mirror), "c") == mirror
    assert read_mirror(None, "c") is None
    assert full.files == ["/a/c.member-1.img", "/b/c.member-2.img", "/c/c.member-3.img"]
    assert full.next_number == 4


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"members": []}', to_json(TWO)[:-9], b'{"members": [1], "pending": 0}']
)
def test_unreadable_notes(data: bytes) -> None:
    with pytest.raises(SmsError, match="cannot be read"):
        read_mirror(data, "c")


def test_a_note_of_another_cluster() -> None:
    with pytest.raises(SmsError, match="is of cluster c"):
        read_mirror(to_json(TWO), "d")


HALF = replace(TWO, uuid="")
ELSEWHERE = replace(TWO, members=(Member(1, "/c"), Member(2, "/d")))


@pytest.mark.parametrize(
    ("own", "wanted", "source", "folders"),
    [
        (None, (), None, ()),
        (None, (), TWO, ("/a", "/b")),
        (None, ("/x", "/y"), TWO, ("/x", "/y")),
        (None, ("/x", "/y"), None, ("/x", "/y")),
        (ELSEWHERE, ("/x", "/y"), TWO, ("/c", "/d")),
        (ELSEWHERE, (), None, ("/c", "/d")),
        (HALF, ("/x", "/y"), None, ("/x", "/y")),
        (HALF, (), ELSEWHERE, ("/c", "/d")),
    ],
)
def test_the_mirror_that_the_target_of_a_migration_gets(
    own: Mirror | None, wanted: tuple[str, ...], source: Mirror | None, folders: tuple[str, ...]
) -> None:
    assert target_folders(own, wanted, source) == folders


def test_a_healthy_mirror() -> None:
    assert select_members(TWO, WHOLE) == TWO
    assert warnings(TWO, {}) == []


@pytest.mark.parametrize(
    "seen, why",
    [
        (Seen(False), "its file is missing"),
        (Seen(True), "its file has other contents"),
        (Seen(True, "other", "u2", 9), "its file has other contents"),
        (Seen(True, "whole", "u9", 9), "its file has other contents"),
    ],
)
def test_a_member_that_is_lost(seen: Seen, why: str) -> None:
    judged = select_members(TWO, {**WHOLE, 2: seen})
    assert [member.lost for member in judged.members] == ["", why]
    (warning,) = warnings(judged, {})
    assert "/b/c.member-2.img" in warning and "one disk only" in warning and "sms overlay mirror rebuild" in warning


def test_a_lost_member_stays_lost() -> None:
    """It is back, intact, and newer by its counter, but the other was written meanwhile."""
    degraded = select_members(TWO, {**WHOLE, 2: Seen(False)})
    assert select_members(degraded, {1: WHOLE[1], 2: Seen(True, "whole", "u2", 99)}) == degraded
    with pytest.raises(Refused, match="no member of the mirror is intact"):
        select_members(degraded, {1: Seen(False), 2: WHOLE[2]})


@pytest.mark.parametrize("marks, due", [((7, 7), False), ((7, 6), False), ((9, 7), True), ((7, 9), True)])
def test_a_member_that_is_behind(marks: tuple[int, int], due: bool) -> None:
    seen = {number: replace(WHOLE[number], mark=mark) for number, mark in zip((1, 2), marks, strict=True)}
    judged = select_members(TWO, seen)
    assert bool(judged.due) is due and not any(member.lost for member in judged.members)
    assert any("scrub" in warning for warning in warnings(judged, {})) is due


@pytest.mark.parametrize(
    "folders, systems, same, words",
    [
        (["/a"], ["x"], False, "two members"),
        (["/a", "/a"], ["x", "x"], True, "one folder"),
        (["/a", "/b"], ["x", "x"], False, "on one file system"),
        (["/a", "/b"], ["x", "x"], True, ""),
        (["/a", "/b"], ["x", "y"], False, ""),
    ],
)
def test_folders_on_separate_file_systems(folders: list[str], systems: list[str], same: bool, words: str) -> None:
    if words:
        with pytest.raises(Refused, match=words):
            check_separate(folders, systems, same_fs=same)
    else:
        check_separate(folders, systems, same_fs=same)


def test_problems_of_a_member_in_use() -> None:
    errors = {"write_io_errs": 0, "corruption_errs": 12}
    assert member_problem(Device(1, "/dev/loop1", {"corruption_errs": 0}), current=True) == ""
    assert "12 corruption" in member_problem(Device(1, "/dev/loop1", errors), current=True)
    assert "removed while in use" in member_problem(Device(1, "/dev/loop1", errors), current=False)
    assert "missing" in member_problem(Device(1, "", missing=True), current=False)
    assert "missing" in member_problem(None, current=False)


def test_warnings_name_the_remedy() -> None:
    found = warnings(replace(TWO, pending=Member(3, "/c")), {1: "sick"}, size=GIB, free=GIB // 20)
    assert len(found) == 3 and "/a/c.member-1.img: sick" in found[0]
    assert "interrupted" in found[1] and "grow" in found[2]


def test_a_member_has_room_for_rewritten_blocks() -> None:
    assert member_bytes(2 * GIB) == 5 * GIB


SCRUB = """\
scrub done for 0a26
Status:           finished
Duration:         0:00:01
\tcsum_errors: 75978
\tsuper_errors: {super}
\tuncorrectable_errors: {lost}
\tunverified_errors: 0
\tcorrected_errors: {mended}
\tlast_physical: 1908604928
"""


def test_output_of_a_scrub() -> None:
    assert read_scrub(SCRUB.format(super=1, lost=0, mended=5)).mended == 6
    assert read_scrub(SCRUB.format(super=0, lost=2, mended=5)).lost == 2
    for said in ("", SCRUB.format(super=0, lost=0, mended=0).replace("finished", "aborted")):
        with pytest.raises(SmsError, match="did not complete"):
            read_scrub(said)


def test_a_scrub_is_repeated_until_nothing_is_found() -> None:
    left = [5, 2, 0]

    def answer(argv: tuple[str, ...], _: bytes | None) -> tuple[int, str]:
        return 0, SCRUB.format(super=0, lost=0, mended=left.pop(0))

    host = Fake({("btrfs",): (0, ""), ("btrfs", "scrub", "start"): answer, ("fstrim",): (0, "")})
    assert Btrfs().scrub(host, "u", "/m", Silent()).mended == 7 and left == []
    host = Fake({("btrfs",): (0, ""), ("btrfs", "scrub", "start"): (0, SCRUB.format(super=0, lost=0, mended=1))})
    with pytest.raises(SmsError, match="each scrub of the mirror finds new errors"):
        Btrfs().scrub(host, "u", "/m", Silent())


def test_devices_of_btrfs() -> None:
    stats = [
        {"device": "/dev/loop0", "devid": "1", "corruption_errs": "3"},
        {"device": "<missing disk>", "devid": "2", "corruption_errs": "0"},
        {"device": "/dev/loop9", "devid": "0", "corruption_errs": "0"},
    ]
    host = Fake({("btrfs",): (0, json.dumps({"device-stats": stats}))})
    one, two = Btrfs().devices(host, "u", "/m")
    assert one == Device(1, "/dev/loop0", {"corruption_errs": 3}) and two.missing


@pytest.mark.parametrize(
    ("kind", "missing", "listed", "loads", "words"),
    [
        ("btrfs", "mkfs.btrfs", True, True, "btrfs-progs"),
        ("btrfs", "", False, False, "kernel"),
        ("btrfs", "", True, False, ""),
        ("btrfs", "", False, True, ""),
        ("md", "mdadm", True, True, "mdadm is not"),
        ("md", "mkfs.xfs\nmkfs.ext4", True, True, "mkfs.xfs or mkfs.ext4"),
        ("md", "mkfs.xfs", True, False, ""),
        ("md", "", False, False, "raid1"),
        ("md", "", False, True, ""),
    ],
)
def test_what_a_host_lacks(kind: str, missing: str, listed: bool, loads: bool, words: str) -> None:
    def find(argv: tuple[str, ...], _: bytes | None) -> tuple[int, str]:
        return 0, "\n".join(name for name in missing.split() if name in argv)

    answers = {("grep",): (0 if listed else 1, ""), ("env", "modprobe"): (0 if loads else 1, "")}
    found = TOOLS[kind].lacks(Fake({("sh", "-c", FIND): find, **answers}))
    assert words in found if words else not found


UUID = "3f1a2b4c:00000000:11111111:22222222"
MD = f"MD_LEVEL=raid1\nMD_UUID={UUID}\nMD_DEV_UUID=aa:bb:cc:dd"
DETAIL = """\
/dev/md127:
           Version : 1.2
        Raid Level : raid1
             State : clean, degraded

    Number   Major   Minor   RaidDevice State
       0       7        0        0      active sync   /dev/loop0
       -       0        0        1      removed

       1       7        1        -      faulty   /dev/loop1
"""


def md_host(**more: str) -> Fake:
    answers = {
        ("mdadm", "--examine"): (0, "     Array State : AA\n          Events : 17\n"),
        ("env", "mdadm", "--examine", "--export"): (0, MD),
        ("test",): (0, ""),
        ("sh", "-c", SYNC): (0, more.get("differ", "0")),
        ("sh",): (0, ""),
        ("mdadm",): (0, ""),
        ("mdadm", "--detail"): (0, more.get("detail", DETAIL)),
        ("mkfs.xfs",): (0, ""),
        ("mount",): (0, ""),
        ("umount",): (0, ""),
        ("readlink",): (0, "/dev/md127"),
        ("findmnt",): (0, "xfs"),
        ("xfs_growfs",): (0, ""),
    }
    return Fake(answers)


def test_md_is_created_and_stopped() -> None:
    host = md_host()
    made = Md().make(host, ["/dev/loop0", "/dev/loop1"], "sms-c")
    assert made.uuid == UUID and made.devices == ((0, "aa:bb:cc:dd"), (1, "aa:bb:cc:dd"))
    argvs = [argv for argv in host.asked if argv[0] not in ("sh", "test", "env") and argv[1] != "--examine"]
    assert argvs[0] == (
        *("mdadm", "--create", "/dev/md/sms-c", "--run", "--level", "1", "--raid-devices", "2", "--metadata", "1.2"),
        *("--bitmap", "internal", "--assume-clean", "--homehost", "any", "/dev/loop0", "/dev/loop1"),
    )
    assert argvs[1:] == [
        ("mkfs.xfs", "-q", "-f", "-m", "reflink=1", "/dev/md/sms-c"),
        ("mdadm", "--stop", "/dev/md/sms-c"),
    ]


def test_md_is_opened_degraded_only_on_request() -> None:
    host, device = md_host(), device_of(UUID)
    assert device == "/dev/md/sms-3f1a2b4c00000000"
    Md().mount(host, UUID, ["/dev/loop0", "/dev/loop1"], "/m", degraded=False)
    Md().mount(host, UUID, ["/dev/loop0"], "/m", degraded=True)
    Md().unmount(host, UUID, "/m")
    assert host.asked == [
        ("mdadm", "--assemble", device, "--uuid", UUID, "/dev/loop0", "/dev/loop1"),
        ("mount", "-o", "noatime,discard", device, "/m"),
        ("mdadm", "--assemble", device, "--uuid", UUID, "--run", "/dev/loop0"),
        ("mount", "-o", "noatime,discard", device, "/m"),
        ("umount", "/m"),
        ("mdadm", "--stop", device),
    ]


def test_devices_of_md() -> None:
    devices = Md().devices(md_host(), UUID, "/m")
    assert devices[0] == Device(0, "/dev/loop0")
    assert {(one.devid, one.missing) for one in devices[1:]} == {(1, True), (-1, True)}
    assert Md().inspect(md_host(), "/a/x.img") == Seen(True, UUID, "aa:bb:cc:dd", 17)


def test_md_does_not_know_which_half_is_right() -> None:
    assert Md().scrub(md_host(), UUID, "/m", Silent()).lost == 0
    found = Md().scrub(md_host(differ="128"), UUID, "/m", Silent())
    assert (found.mended, found.lost) == (0, 128)


def test_a_half_of_md_is_replaced() -> None:
    host, device = md_host(), device_of(UUID)
    Md().replace(host, UUID, "/m", 0, "/dev/loop7")
    assert host.asked[1:] == [
        ("mdadm", device, "--fail", "/dev/loop0", "--remove", "/dev/loop0"),
        ("mdadm", device, "--add", "/dev/loop7"),
    ]
    with pytest.raises(SmsError, match="has not synchronized"):
        Md().settle(md_host(), UUID, "/m")
    Md().settle(md_host(detail=DETAIL.partition("       -  ")[0]), UUID, "/m")


def test_md_grows() -> None:
    host, device = md_host(), device_of(UUID)
    Md().enlarge(host, UUID, "/m")
    assert host.asked[0] == ("mdadm", "--grow", device, "--bitmap", "none")
    assert host.asked[1] == ("mdadm", "--grow", device, "--size", "max", "--assume-clean")
    assert host.asked[-1] == ("xfs_growfs", "/m")


@pytest.mark.parametrize(
    ("scrubbed", "lost", "due"),
    [(0.0, "", True), (990_000.0, "", False), (300_000.0, "", True), (2_000_000.0, "", True), (0.0, "gone", False)],
    ids=["never", "not long ago", "a week ago", "the clock has jumped back", "no copy to repair from"],
)
def test_a_scheduled_scrub(scrubbed: float, lost: str, due: bool) -> None:
    members = (TWO.members[0], replace(TWO.members[1], lost=lost))
    assert scrub_is_due(replace(TWO, members=members, scrubbed=scrubbed), now=1_000_000) == due
