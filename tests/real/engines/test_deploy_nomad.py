"""`sms deploy` on Nomad, in a lab: the controller on an admin host, munge and slurmd on its compute nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from appliance.lab import Lab
from appliance.lab.engines.hosts import LabRunner
from appliance.lab.engines.nomad import NomadClient
from appliance.operations.context import open_cluster
from appliance.operations.engines.export import export
from appliance.operations.image.build import Built
from appliance.operations.lab.lab import lab_up
from appliance.progress import Silent
from tests.real.engines.conftest import need_engines
from tests.real.engines.deploying import Deployer, Jobs, change_with_a_job, give_image, stop_and_start
from tests.real.labs import build_image, remove_lab
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME = "t-deploy-nomad"
NODES = ("node1", "node2")
JOBS = ("slurm-ctl", "munge", "slurm-cn")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab with Nomad, whose nodes run neither munge nor slurmd."""
    need_engines("nomad")
    remove_lab(NAME)
    lab_up(NAME, len(NODES), Silent(), engines=("nomad",))
    try:
        lab = Lab.open(NAME)
        for name in NODES:
            lab.host(name).run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", "munged", "slurmd")
        yield lab
    finally:
        remove_lab(NAME)


@pytest.fixture(scope="module")
def built(lab: Lab) -> Built:
    """Its image, on host-a, which has the state as well."""
    built = build_image(lab)
    give_image(lab, built)
    return built


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> NomadClient:
    """Its servers and clients."""
    runners = [LabRunner(lab, name) for name in ("server1", "host-a", *NODES)]
    return NomadClient(runners[:1], runners[1:])


@pytest.fixture(scope="module")
def deployer(lab: Lab, built: Built, cluster: NomadClient) -> Deployer:
    """`sms deploy`, which was killed once and has ended then: all three jobs of document 000 run."""
    made = Deployer(lab, "nomad", {}, ["munge", "slurmctld"])
    plan = made.deploy("--dry-run")
    assert {each["name"]: each["change"] for each in plan["differences"]} == dict.fromkeys(JOBS, "create")
    assert not made.record and not [name for name in JOBS if cluster.nomad("job", "status", name, ok=None).status == 0]
    done = made.deploy_after_a_kill()
    assert made.record["phase"] == "deployed" and done["generation"] == 1
    return made


@pytest.fixture(scope="module")
def user(lab: Lab, deployer: Deployer) -> Jobs:
    """Jobs of a user; all nodes are idle."""
    made = Jobs(lab, NODES)
    made.wait_until_idle()
    return made


@pytest.fixture(scope="module")
def jobs(deployer: Deployer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The exported jobs of document 000 by name."""
    folder = tmp_path_factory.mktemp("export") / "jobs"
    export(open_cluster(deployer.lab.etc / "engines.yaml", None, Silent()), "nomad", folder)
    return {name: (folder / f"{name}.nomad.hcl").read_bytes() for name in JOBS}


def plan(cluster: NomadClient, job: bytes) -> int:
    """The status of `nomad job plan`."""
    return cluster.nomad("job", "plan", "-", ok=None, input=job).status


def test_a_job_completes(user: Jobs) -> None:
    assert sorted(user.run("srun", "-N2", "hostname").split()) == sorted(NODES)


def test_a_second_deployment_changes_nothing(
    deployer: Deployer, cluster: NomadClient, user: Jobs, jobs: dict[str, bytes]
) -> None:
    before = {name: [each["ID"] for each in cluster.running(name)] for name in JOBS}
    assert deployer.deploy()["changes"] == dict.fromkeys(JOBS, "unchanged")
    assert {name: [each["ID"] for each in cluster.running(name)] for name in JOBS} == before
    # What was deployed is what an export has.
    assert {name: plan(cluster, text) for name, text in jobs.items()} == dict.fromkeys(JOBS, 0)


def test_status(deployer: Deployer, user: Jobs) -> None:
    found = deployer.status()
    assert found["healthy"] and not found["drift"] and not found["pending"]
    (controller,) = (each for each in found["workloads"] if each["name"] == "slurm-ctl")
    parts = {part["name"]: part for part in controller["instances"][0]["parts"]}
    assert parts["slurmctld"]["ready"] and "UP" in parts["slurmctld"]["detail"], parts
    assert "signed by" in deployer.sms("deploy", "status").text
    assert deployer.sms("status").text.startswith("lab on nomad: healthy")
    assert deployer.holder == "engine:nomad"
    refused = deployer.sms("start", ok=(3,)).stderr.decode()
    assert "nomad has the services" in refused and "sms migrate --to container" in refused


@pytest.mark.parametrize(
    "beside",
    [
        ("job", "stop", "-detach", "slurm-ctl"),
        pytest.param(("job", "scale", "-detach", "slurm-ctl", "0"), marks=pytest.mark.full),
    ],
)
def test_a_change_beside_sms_is_reported_and_undone(
    deployer: Deployer, cluster: NomadClient, user: Jobs, beside: tuple[str, ...]
) -> None:
    """X4: what the Terraform provider does not see."""
    cluster.nomad(*beside)
    wait_until(lambda: not cluster.running("slurm-ctl"), "it is stopped", 120)
    found = deployer.status(ok=(4,))
    assert [each["name"] for each in found["drift"]] == ["slurm-ctl"]
    assert deployer.sms("status", ok=(4,)).status == 4
    assert deployer.deploy()["changes"]["slurm-ctl"] == "change"
    assert deployer.status()["healthy"]
    user.wait_until_idle()


def test_another_configuration_and_back(deployer: Deployer, user: Jobs) -> None:
    change_with_a_job(deployer, user)


@pytest.mark.full
def test_a_node_is_drained_in_slurm_first(deployer: Deployer, cluster: NomadClient, user: Jobs) -> None:
    job = user.submit(12, "-w", "node2")
    user.wait_for(job, "RUNNING", 60)
    failed = deployer.sms("deploy", "drain", "node2", "--timeout", "1s", ok=(1,)).stderr.decode()
    assert f": {job};" in failed and "nomad was not touched" in failed
    assert user.node_states()["node2"] == "draining"
    assert any(each["NodeName"] == "node2" for each in cluster.running("slurm-cn"))
    deployer.sms("deploy", "drain", "node2")
    assert user.state(job) == "COMPLETED"
    wait_until(
        lambda: (
            not any(each["NodeName"] == "node2" for name in ("munge", "slurm-cn") for each in cluster.running(name))
        ),
        "its jobs have stopped",
        90,
    )
    assert user.run("srun", "-N1", "hostname") == "node1"
    deployer.sms("deploy", "drain", "node2", "--undo")
    user.wait_until_idle()
    assert deployer.status()["healthy"]


@pytest.mark.full
def test_a_stop_keeps_the_state(deployer: Deployer, user: Jobs) -> None:
    stop_and_start(deployer, user)
