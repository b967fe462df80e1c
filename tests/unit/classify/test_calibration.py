"""The confidence means something: verdicts on clusters with known truth, of families that its fit never saw."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from analysis.confidence import BINS, MAX_CONFIDENCE, SCALES, Grounds, confidence
from analysis.report import calibration as picture
from bench import calibration
from bench.calibration import HIGH_RIGHT, RIGHT, Outcome, Stated, high_right, share_right, state, verdicts
from tests.captures import packets as p
from tests.captures.clusters.families import CHANGES, COMMON, FAMILIES, draw
from tests.captures.clusters.stage import ACTIVITIES, CRITICAL, DEFERRABLE, box
from tests.captures.clusters.tape import Stream, Tape

HELD_OUT = ("pbs-lustre", "xcat", "dual-stack", "sampled")
STRANGERS = ("strange", "strange-pbs", "sampled-web")
"""Families with programs that the catalogue does not know, and with people on login nodes."""
SAMPLE = 3
"""Captures of each family."""
HARMFUL = 0.005
"""Share of verdicts that would stop what nodes need."""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    folder = tmp_path_factory.mktemp("clusters")
    return [state(draw(family, seed), folder) for family in calibration.unseen() for seed in range(SAMPLE)]


def test_verdicts_stated_with_ninety_per_cent_are_right(sample: list[Outcome]) -> None:
    assert high_right(verdicts(sample)) >= HIGH_RIGHT


def test_hardly_anything_that_nodes_need_is_said_to_wait(sample: list[Outcome]) -> None:
    harmful = [each for each in verdicts(sample) if each.truth == CRITICAL and not each.right]
    assert len(harmful) <= 2 * HARMFUL * len(verdicts(sample))


def test_nothing_that_nodes_need_is_overlooked(sample: list[Outcome]) -> None:
    assert [outcome.missed for outcome in sample if outcome.missed] == []


@pytest.mark.full
@pytest.mark.timeout(3600)  # three minutes of processor time
def test_all_families(tmp_path: Path) -> None:
    found = verdicts(calibration.outcomes(FAMILIES, range(calibration.CAPTURES), str(tmp_path)))
    seen = [each for each in found if not FAMILIES[each.family].unseen]
    rest = [each for each in found if FAMILIES[each.family].unseen]
    assert high_right(rest) >= HIGH_RIGHT
    for families in (HELD_OUT, (*HELD_OUT, *STRANGERS)):
        assert share_right([each for each in rest if each.family in families]) >= RIGHT
    assert sum(each.truth == CRITICAL and not each.right for each in rest) <= HARMFUL * len(rest)
    assert calibration.brier(rest) < calibration.brier(calibration.with_scales(rest, calibration.BY_HAND))
    for relation, fitted in calibration.fit(seen).items():
        assert (fitted.none, fitted.all) == pytest.approx((SCALES[relation].none, SCALES[relation].all), abs=0.05), (
            relation
        )
    assert [tuple(each) for each in calibration.bins(rest)] == [pytest.approx(tuple(each), rel=0.1) for each in BINS]


# The fit and the figures.


def made(evidence: float, *, right: bool, relation: str = "unknown") -> Stated:
    grounds = Grounds(relation, evidence)  # type: ignore[arg-type]
    truth = DEFERRABLE if right else CRITICAL
    return Stated("slurm", 1, "tcp/4000", DEFERRABLE, truth, confidence(grounds), grounds, "")


def test_the_fit_finds_what_is_there() -> None:
    """Half of the verdicts without evidence are right, nine of ten with all of it."""
    none = [made(0.0, right=number < 500) for number in range(1000)]
    every = [made(1.0, right=number < 900) for number in range(1000)]
    found = calibration.fit([*none, *every])
    assert (found["unknown"].none, found["unknown"].all) == pytest.approx((0.5, 0.9), abs=0.02)
    assert found["agrees"] == calibration.BY_HAND["agrees"]


def test_the_fit_never_falls_with_the_evidence() -> None:
    early, late = ([made(evidence, right=evidence < 0.5) for _ in range(9000)] for evidence in (0.1, 0.9))
    found = calibration.fit([*early, *late])["unknown"]
    assert found.none == found.all == 0.5


def test_bins() -> None:
    stated = calibration.with_scales([made(1.0, right=True), made(1.0, right=False)], calibration.BY_HAND)
    assert [tuple(each) for each in calibration.bins(stated)] == [(0.95, 1.0, 2, MAX_CONFIDENCE, 0.5)]
    assert calibration.brier(stated) == pytest.approx((0.01**2 + 0.99**2) / 2)


def test_the_scales_do_not_fall_and_the_bins_are_in_order() -> None:
    assert all(0 <= one.none <= one.all <= 1 for one in SCALES.values())
    assert all(one.high <= other.low for one, other in pairwise(BINS))
    assert all(one.low <= one.stated <= one.high for one in BINS)


def test_the_picture_has_every_bin_in_its_field() -> None:
    points = picture.points()
    assert [one.bin for one in points] == list(BINS)
    assert all(0 <= one.x <= picture.SIZE and 0 <= one.y <= picture.SIZE for one in points)


# The generator.


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert draw("scanned", 3).capture() == draw("scanned", 3).capture()
    assert draw("scanned", 3).capture() != draw("scanned", 4).capture()


def test_families_are_complete() -> None:
    used = {each for family in FAMILIES.values() for each in family.shares} | set(COMMON)
    used |= {"torque", "openpbs", "lustre", "other_lustre"}
    assert used == set(ACTIVITIES)
    assert {family.change for family in FAMILIES.values()} == {"", *CHANGES}
    assert set(calibration.unseen()) == {*HELD_OUT, *STRANGERS}


def test_frames_are_those_of_the_other_builders() -> None:
    tape, node, sms = Tape(), box(1, "10.1.1.1"), box(2, "10.1.0.1")
    tape.udp(1.0, node, 40000, sms, 53, b"x" * 40)
    packet = p.ipv4(p.udp(b"x" * 40, 40000, 53), p.UDP, "10.1.1.1", "10.1.0.1", ident=1)
    assert tape.frames == [(10**9, p.ethernet(packet, src=node.mac.hex(":"), dst=sms.mac.hex(":")))]
    node.v6, sms.v6 = p.ip_bytes("fd00::1"), p.ip_bytes("fd00::2")
    tape.udp(1.0, node, 40000, sms, 53, b"x" * 40, six=True)
    packet = p.ipv6(p.udp(b"x" * 40, 40000, 53), p.UDP, "fd00::1", "fd00::2")
    assert tape.frames[1][1] == p.ethernet(packet, p.IPV6, src=node.mac.hex(":"), dst=sms.mac.hex(":"))


def test_a_connection_acknowledges_what_it_got() -> None:
    tape, node, sms = Tape(), box(1, "10.1.1.1"), box(2, "10.1.0.1")
    stream = Stream(tape, node, sms, 80)
    stream.open(1.0)
    stream.send(1.1, b"request")
    stream.send(1.2, bytes(3000), back=True)
    stream.close(1.3)
    last = tape.frames[-1][1]
    assert int.from_bytes(last[42:46]) == (80 * 65539 & 0x7FFFFFFF) + 1 + 3000 + 1


def test_what_nodes_need_wins() -> None:
    drawn = draw("slurm", 1)
    both = type(drawn)("", 1, 1, 1.0, {"ssh": 20, "stage_out": 20, "bacula": 20}, [])
    assert both.truth("ssh", ("tcp/22",)) == CRITICAL
    assert both.truth("bacula-sd", ("tcp/9103",)) == DEFERRABLE
    assert both.truth("tcp/77", ("tcp/77",)) is None
    assert list(both.needs()) == ["stage_out"]


# What the clusters showed.


def service_of(folder: Path, family: str, seed: int, name: str) -> list[Stated]:
    return [each for each in state(draw(family, seed), folder).stated if each.name == name]


def test_images_of_xcat_are_provisioning(tmp_path: Path) -> None:
    seed = next(
        seed
        for seed in range(99)
        if not {"portal", "repository"} & {*draw("xcat", seed).activities}
        and draw("xcat", seed).activities["xcat_boot"]
    )
    assert service_of(tmp_path, "xcat", seed, "http") == []
    assert [each.verdict for each in service_of(tmp_path, "xcat", seed, "provisioning")] == [DEFERRABLE]
