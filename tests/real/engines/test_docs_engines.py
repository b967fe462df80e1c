"""The commands of the documents about other engines, in a lab that has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.blocks import Reader
from tests.real.engines.conftest import need_engines
from tests.real.labs import build_image, fresh_lab
from tests.real.pages import ENGINES

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Somebody in the lab of the documents' name, with both engines."""
    need_engines("nomad", "kubectl", "kubelet", "kube-proxy", "kube-apiserver")
    with fresh_lab("lab", 2, engines=("nomad", "kubernetes")) as lab:
        build_image(lab)
        yield Reader("lab")


@pytest.mark.parametrize("name", ENGINES)
def test_the_page_is_true(reader: Reader, name: str) -> None:
    reader.check(ENGINES[name], name)
