"""What the source of a migration calls its image decides about no other file of the target."""

from __future__ import annotations

import pytest

from appliance.errors import Refused
from appliance.operations.migration import migrate
from appliance.operations.migration.state import Inspected
from appliance.plan.migration.plan import Plan
from appliance.plan.services.confinement import Confinement
from appliance.shared.lease import Lease
from tests.support.fake import Fake
from tests.unit.migration.test_steps import open_sample

SHA256 = "ab" * 32


def prepare(path: str) -> Fake:
    """Prepare a migration of the instance with this image; the target, which has that image."""
    confinement = Confinement((), "", "", ())
    plan = Plan("a", "b", path, SHA256, 4, False, 0, 0, 0.0, {}, 0, [])
    target = Fake({("mkdir",): (0, ""), ("python3",): (0, SHA256), ("find",): (0, "others can write")}, name="b")
    inspected = Inspected(Fake({}, name="a"), target, 77, Lease("sample", 4, "a"), plan, confinement, confinement)
    with pytest.raises(Refused) as refused:
        migrate.prepare(open_sample(), inspected)
    target.files["refusal"] = refused.value.message.encode()
    return target


@pytest.mark.parametrize("path", ["/etc/cron.d/x", "/etc/.sif", "/i/a b.sif", "/"])
def test_a_path_that_is_none_of_an_image_is_refused(path: str) -> None:
    target = prepare(path)
    assert b"is not the path of an image" in target.files["refusal"] and {one[0] for one in target.asked} == {"mkdir"}


def test_an_image_gets_into_the_store() -> None:
    """Also one that was started from elsewhere."""
    target, place = prepare("/etc/x.sif"), f"{open_sample().places.images}/x.sif"
    assert [one[-1] for one in target.asked if one[0] == "python3"] == [place]
    assert place.encode() in target.files["refusal"]
