"""`slurm.user` and `munge.user`: a cluster's own ids, in an image that replaces one with the usual ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.host.base import CommandError
from appliance.operations.lab import demo
from tests.real.conftest import Playground, give_image
from tests.real.labs import build_image, fresh_lab

pytestmark = [pytest.mark.real, pytest.mark.full]

SLURM, MUNGE = {"uid": 971, "gid": 972}, {"uid": 973, "gid": 974}


def set_ids(document: dict[str, Any]) -> None:
    document["slurm"]["user"] = SLURM
    document["munge"] = {"user": MUNGE}


def test_an_upgrade_to_the_ids_of_the_nodes() -> None:
    """Adds: packages take accounts that exist, daemons take over what they own in the overlay, jobs run."""
    with fresh_lab("t-ids", 1) as lab:
        play = Playground(lab)
        node = play.host("node1")
        give_image(play, build_image(lab))
        play.sms("-q", "start")
        play.variant("ids.yaml", set_ids)
        other = build_image(lab, "ids")
        give_image(play, other)
        demo.wait_idle(node, 1)
        upgrade = ("-q", "--site", "/etc/sms/ids.yaml", "upgrade", "--no-rehearsal")
        to_it = (*upgrade, "--image", f"/var/lib/sms/images/{other.key}.sif")
        refused = json.loads(play.sms(*to_it, "--json", ok=(3,)).stdout)["error"]
        assert "slurm.user" in refused["message"] and "node1" in refused["message"], "it has the usual ids yet"
        node.run("groupmod", "--gid", str(SLURM["gid"]), "slurm")
        node.run("usermod", "--uid", str(SLURM["uid"]), "--gid", str(SLURM["gid"]), "slurm")
        node.run("supervisorctl", "-c", "/lab/supervisord.conf", "restart", "slurmd")
        demo.wait_idle(node, 1)
        with pytest.raises(CommandError, match="Invalid job credential"):
            demo.as_alice(node, "srun", "true")
        found = json.loads(play.sms("status", "--json", ok=(4,)).stdout)
        assert found["nodes"]["refusing"] == ["node1"]
        play.sms(*to_it)
        node.run("supervisorctl", "-c", "/lab/supervisord.conf", "restart", "slurmd")
        paths = ("/var/spool/slurmctld/job_state", "/etc/munge/munge.key")
        assert play.sms("exec", "--", "stat", "-c", "%u:%g", *paths).text.split() == ["971:972", "973:974"]
        folders = ("/var/spool/slurmctld", "/var/lib/munge")
        assert play.sms("exec", "--", "find", *folders, "-nouser", "-o", "-nogroup").text == "", "what the old ids own"
        demo.wait_idle(node, 1)
        job = demo.as_alice(node, "sbatch", "--parsable", "--wait", "-o", "/dev/null", "--wrap", "true")
        shown = node.run("scontrol", "show", "job", job).text
        assert "JobState=COMPLETED" in shown and "ExitCode=0:0" in shown, shown
        found = json.loads(play.sms("status", "--json", ok=(0, 4)).stdout)
        assert found["healthy"] and not found["nodes"]["refusing"], found["warnings"]
