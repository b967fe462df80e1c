"""The VM's HTTP service, on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.provd import Provd, make_config, running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provd]:
    with running(make_config(tmp_path_factory.mktemp("provd"))) as found:
        yield found


@pytest.fixture
def provd(service: Provd) -> Provd:
    service.reset()
    return service
