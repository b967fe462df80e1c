"""The commands of the documents on a cluster with compute nodes, page by page in one lab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from appliance.operations.lab import demo
from tests.real.blocks import Reader
from tests.real.conftest import Playground, give_image
from tests.real.images import make_variant
from tests.real.labs import build_image, fresh_lab
from tests.real.pages import CLUSTER

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Somebody in the lab of the documents' name, where alice has run a job."""
    with fresh_lab("lab", 4) as lab:
        play, built = Playground(lab), build_image(lab)
        give_image(play, built)
        make_variant(built, lab, "good")
        play.sms("-q", "start")
        demo.wait_idle(lab.host("node1"), 4)
        demo.mail_arrives(lab.host("outside"), demo.run_job(lab.host("node1")).split()[1])
        play.sms("-q", "stop")
        yield Reader("lab")


@pytest.mark.parametrize("name", CLUSTER)
def test_the_page_is_true(reader: Reader, name: str) -> None:
    reader.check(CLUSTER[name], name)
