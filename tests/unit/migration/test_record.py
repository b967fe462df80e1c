"""The host that serves after a migration is recorded last: a run that is killed before that is repeated as a whole."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from appliance.host.base import Result
from appliance.operations.hosts.installed import SITE_FILE
from appliance.operations.image.deliver import Image
from appliance.operations.migration.inspection import record_serving
from appliance.operations.start_note import read_note
from appliance.shared.files import ALWAYS
from appliance.shared.lease import Lease
from appliance.shared.requests import Request
from appliance.tools.programs import PATH_OF
from appliance.tools.scripts import script_argv
from tests.support.env import FakeHosts, with_env
from tests.support.fake import Fake
from tests.unit.migration.test_steps import open_sample

IMAGE = Image("/i/x.sif", "k1", "ab" * 32, "us")
STARTS = script_argv("start-daemon")[:3]


class Killed(BaseException):
    """The end of the run."""


class Mortal(Fake):
    """A host on which a run is killed when it has done ``left`` things."""

    def __init__(self, left: int) -> None:
        answers = {
            STARTS: (0, ""),
            ("test",): (1, ""),
            ("sh", "-c", PATH_OF, "find", "sms"): (0, "/usr/bin/sms"),
            ("sh", "-c"): (0, "1 none\n"),
        }
        super().__init__(answers, name="b")
        self.files[SITE_FILE] = b"cluster: sample"
        self.left = left

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def run(self, *argv: str, **options: Any) -> Result:
        self.count()
        return super().run(*argv, **options)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        self.count()
        return super().write(path, data, mode=mode)

    def perform(self, request: Request, may_commit: AbstractContextManager[bool] = ALWAYS) -> Any:
        self.count()
        return super().perform(request, may_commit)


def test_a_run_that_is_killed_anywhere_before_its_end_leaves_no_record() -> None:
    for left in range(100):
        host, other = Mortal(left), Fake({("sh", "-c"): (0, "0 none\n")}, name="a")
        cluster = with_env(open_sample(), hosts=FakeHosts({"a": other, "b": host}, "b"))
        try:
            record_serving(cluster, host, IMAGE, Lease("sample", 5, "b", file="b"))
        except Killed:
            assert read_note(cluster, host) is None, "the next run would do nothing"
            continue
        break
    note = read_note(cluster, host)
    assert left > 3 and note and (note.image, note.generation, note.host) == (IMAGE.path, 5, "b")
    assert len([argv for argv in host.asked if argv[:3] == STARTS]) == 1, "it has a guard"
    assert str(cluster.places.lease) in other.files, "the other host knows it"
