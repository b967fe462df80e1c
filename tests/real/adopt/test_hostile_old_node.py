"""A hostile old node against `sms survey` and `sms adopt`: root there answers what it likes.

What a survey reads needs no Slurm: an admin host of a small lab stands for the old node. Adoptions have a legacy node.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import yaml

from appliance.host.base import Result
from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.operations.lab.demo import wait_idle
from tests.cases import sample
from tests.hostile import far
from tests.hostile import old_node as hostile
from tests.hostile.host_state import HostState, differences, read_state
from tests.hostile.verbs import run_safely
from tests.hostile.vm import FORBIDDEN
from tests.real.labs import build_image, fresh_lab
from tests.surveyed import debian, run_script

pytestmark = pytest.mark.real

FULL = pytest.mark.full
CONTENT = "never to be read by an old node"
MEMORY_MB = 700
"""A survey may have 64 MiB, as bytes, text and lines."""
IMPATIENT = """
import sys
from appliance.cli import main
from appliance.operations.adopt import survey
survey.KILLED_S = survey.LATE_S = 2
sys.exit(main(sys.argv[1:]))
"""
"""`sms` that waits seconds for a survey, where it waits minutes."""
SITE = "/var/tmp/site"
STATUSES = (0, 1, 2, 3)
"""Those that are documented."""


@dataclass
class Stage:
    """``old``, which is hostile, and the hosts that it must not change; verbs run on the first of them."""

    lab: Lab
    old: Netns
    names: tuple[str, ...]
    before: dict[str, HostState] = field(default_factory=dict)

    @property
    def here(self) -> Netns:
        return self.lab.host(self.names[0])

    def begin(self) -> None:
        for name in (*self.names, self.old.name):
            self.lab.host(name).write(hostile.CANARY, f"{CONTENT}\n".encode(), mode=0o600)
        self.before = {name: read_state(self.lab.host(name)) for name in self.names}

    def verb(self, *words: str, ok: tuple[int, ...] = STATUSES, timeout: float = 200) -> Result:
        return run_safely(self.here, "sms", *words, ok=ok, secret=CONTENT, memory_mb=MEMORY_MB, timeout=timeout)

    def assert_unchanged(self) -> None:
        for name in self.names:
            assert differences(self.before[name], read_state(self.lab.host(name))) == []


@pytest.fixture(scope="module")
def small() -> Iterator[Stage]:
    """host-b is an old node, surveyed from host-a."""
    with fresh_lab("t-hold", 0) as lab:
        made = Stage(lab, lab.host("host-b"), ("host-a",))
        made.here.run("sh", "-c", "mkdir -pm 700 ~/.ssh && cp /etc/sms/known_hosts /etc/sms/keys/id_ed25519 ~/.ssh")
        made.begin()
        far.take_over(made.old, "timeout", "tcpdump")
        yield made


@pytest.fixture
def stage(small: Stage) -> Iterator[Stage]:
    yield small
    far.be_honest(small.old)
    small.here.run("rm", "-rf", SITE, "/var/tmp/survey.json")
    small.assert_unchanged()


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What an honest node of Debian prints when it is surveyed."""
    return run_script(debian().build(tmp_path_factory.mktemp("debian")))


@pytest.mark.parametrize("name", sample(hostile.surveys(b""), "escape sequences in values", "files of other folders"))
def test_a_survey_is_data(stage: Stage, honest: bytes, name: str) -> None:
    """The table, JSON, and a site that is written: in its folder only, with no secret, nothing to run."""
    far.attack(stage.old, "timeout", "-s", hostile.surveys(honest)[name])
    done = stage.verb("survey", "host-b", "--write", SITE, "-o", "/var/tmp/survey.json", "--json", ok=(0, 1, 3))
    assert far.taken(stage.old)
    if done.status:
        assert not stage.here.works("test", "-e", f"{SITE}/sms.yaml")
        return
    json.loads(done.stdout)
    json.loads(stage.here.read("/var/tmp/survey.json") or b"")
    written = stage.here.run("find", SITE, "-type", "f", "-printf", "%P %m\n").text.splitlines()
    assert {line.rpartition(" ")[2] for line in written} == {"600"}
    text = (stage.here.read(f"{SITE}/sms.yaml") or b"").decode()
    assert isinstance(yaml.safe_load(text), dict) and not [one for one in FORBIDDEN if one in text]
    stage.verb("survey", "host-b", ok=(0,))


@FULL
def test_a_survey_that_never_ends_is_ended(stage: Stage) -> None:
    """By the time of this side: the limit over there is a program of the old node."""
    far.attack(stage.old, "timeout", "-s", [("silent", 0)])
    found = stage.here.run(sys.executable, "-c", IMPATIENT, "survey", "host-b", ok=None, timeout=60)
    assert found.status == 1 and far.taken(stage.old) == ["silent"], found.stderr


@pytest.mark.parametrize("name", sample(hostile.captures()))
def test_a_capture_is_data(stage: Stage, name: str) -> None:
    far.attack(stage.old, "tcpdump", "", hostile.captures()[name])
    done = stage.verb("survey", "host-b", "--live", "2s", "--write", SITE, ok=(0, 1, 3))
    assert far.taken(stage.old), done.stderr


# Adoptions

OLD, TARGET, NODES = "sms-old", "host-a", 2
OVERLAY = "/var/lib/sms/overlays/lab.img"
STATE = "/var/spool/slurmctld"
REHEARSE = ("-q", "adopt", OLD, "--to", TARGET, "--dry-run")
ADOPT = (*REHEARSE[:-1], "--capture", "0")


@pytest.fixture(scope="module")
def legacy() -> Iterator[Stage]:
    """A lab whose nodes use sms-old, which is hostile at times."""
    with fresh_lab("t-hadopt", NODES, legacy=True) as lab:
        build_image(lab)
        wait_idle(lab.host("node1"), NODES)
        made = Stage(lab, lab.host(OLD), ("admin", TARGET))
        far.take_over(made.old, "python3", "date", "sinfo", "squeue", "sh")
        made.verb(*REHEARSE, ok=(0,))  # what a first rehearsal leaves on the target is the image
        made.begin()
        yield made


@pytest.fixture
def adopting(legacy: Stage) -> Iterator[Stage]:
    yield legacy
    far.be_honest(legacy.old)
    assert legacy.old.works("scontrol", "ping")
    assert not legacy.lab.host(TARGET).works("test", "-e", OVERLAY)
    legacy.assert_unchanged()


LIES = [
    *(("date", "", name) for name in ("escape sequences", "numbers that are none", "nothing")),
    *(("sinfo", "", name) for name in ("escape sequences", "without end", "bytes", "options and paths")),
    *(("sh", "adopt-facts", name) for name in ("escape sequences", "without end", "errors without end", "bytes")),
    *(("squeue", "", name) for name in ("escape sequences", "without end", "numbers that are none", "killed")),
]


@pytest.mark.parametrize(("program", "word", "name"), LIES, ids=lambda value: value or "any")
@FULL
def test_what_programs_of_the_old_node_print_is_data(adopting: Stage, program: str, word: str, name: str) -> None:
    far.attack(adopting.old, program, word, hostile.LIES[name])
    adopting.verb(*REHEARSE)
    assert far.taken(adopting.old) or name == "nothing"


@pytest.mark.parametrize("name", hostile.archives(STATE))
@FULL
def test_a_state_that_is_none_ends_the_rehearsal(adopting: Stage, name: str) -> None:
    """It is unpacked in an image's confinement, below the folder of the state in an overlay that is removed."""
    far.attack(adopting.old, "python3", "read", hostile.archives(STATE)[name])
    adopting.verb(*REHEARSE, ok=(3,))
    assert far.taken(adopting.old)


@pytest.mark.parametrize("name", hostile.messages())
@FULL
def test_an_agent_of_the_old_node_that_lies_adopts_nothing(adopting: Stage, name: str) -> None:
    """After the rehearsal: the target goes back, and the old node serves as before."""
    far.attack(adopting.old, "python3", "adopt_leave", hostile.messages()[name])
    adopting.verb(*ADOPT, ok=(1, 3, 5))
    assert far.taken(adopting.old) or name == "nothing"
    adopting.lab.host(TARGET).run("rm", "-f", OVERLAY)


@FULL
def test_an_undo_that_the_old_node_disturbs_leaves_the_container(legacy: Stage) -> None:
    """It takes part in the adoption, and lies when it is to get the services back; then it is honest."""
    target = legacy.lab.host(TARGET)
    legacy.verb(*ADOPT, ok=(0,), timeout=400)
    for word, name in (
        ("adopt_return", "escape sequences"),
        ("adopt_return", "messages without end"),
        ("write", "read"),
    ):
        steps: list[far.Step] = [("read", 1), ("killed", 0)] if name == "read" else hostile.messages()[name]
        far.attack(legacy.old, "python3", word, steps)
        legacy.verb("-q", "adopt", "--undo", ok=(1, 3, 5), timeout=300)
        assert far.taken(legacy.old), (word, name)
        listed = json.loads(target.run("apptainer", "instance", "list", "--json").stdout)
        assert [one["instance"] for one in listed["instances"]] == ["sms-lab"]
        assert legacy.lab.host("node1").works("scontrol", "ping")
    far.be_honest(legacy.old)
    legacy.verb("-q", "adopt", "--undo", ok=(0,), timeout=300)
    assert legacy.old.works("scontrol", "ping")
    found = [
        line for name in legacy.names for line in differences(legacy.before[name], read_state(legacy.lab.host(name)))
    ]
    assert [line for line in found if "PWNED" in line or "/etc/cron" in line or "authorized_keys" in line] == [], found
    print("\n".join(found))
