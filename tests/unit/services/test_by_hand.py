"""What somebody has changed with `scontrol`, and the next reload or start would drop."""

from __future__ import annotations

import pytest

from appliance.plan.services.by_hand import find_by_hand
from appliance.plan.services.defined import read_defined
from tests.unit.services.test_effect import node, present

SHOWN = (
    "partition PartitionName=normal AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 LLN=NO ReqResv=NO MaxCPUsPerNode=UNLIMITED "
    "JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 Nodes=n[1-4] "
    "PriorityJobFactor=1 PriorityTier=1 RootOnly=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP"
)


@pytest.mark.parametrize(
    ("line", "shown", "dropped"),
    [
        ("MaxTime=1440", {}, ""),
        ("MaxTime=24:00:00 State=UP Priority=1", {}, ""),
        ("MaxTime=1-0", {"State=UP": "State=DOWN"}, "State is DOWN"),
        ("MaxTime=1-0 State=DOWN", {}, "State is UP"),
        ("MaxTime=INFINITE", {"MaxTime=1-00:00:00": "MaxTime=UNLIMITED"}, ""),
        ("MaxTime=INFINITE", {}, "MaxTime is 1-00:00:00"),
        ("MaxTime=1-0 QOS=big", {"QoS=N/A": "QoS=big"}, ""),
        ("MaxTime=1-0", {"QoS=N/A": "QoS=big"}, "QoS is big"),
        ("MaxTime=1-0 DefaultTime=60", {"DefaultTime=NONE": "DefaultTime=01:00:00"}, ""),
        ("MaxTime=1-0", {"DefaultTime=NONE": "DefaultTime=01:00:00"}, "DefaultTime is 01:00:00"),
        ("MaxTime=1-0", {"Default=NO": "Default=YES"}, "Default is YES"),
        ("MaxTime=1-0 Default=YES", {"Default=NO": "Default=YES"}, ""),
        ("MaxTime=1-0", {"AllocNodes=ALL": "AllocNodes=login[1-2]"}, "AllocNodes is login[1-2]"),
        ("MaxTime=1-0 Nodes=n[1-4] AllocNodes=login2,Login1", {"AllocNodes=ALL": "AllocNodes=login[1-2]"}, ""),
        ("MaxTime=1-0", {"DisableRootJobs=NO": "DisableRootJobs=YES"}, "DisableRootJobs is YES"),
        ("MaxTime=1-0 Nodes=n[1-4]\nDisableRootJobs=YES", {"DisableRootJobs=NO": "DisableRootJobs=YES"}, ""),
        ("MaxTime=1-0", {"ExclusiveUser=NO": "ExclusiveUser=YES"}, "ExclusiveUser is YES"),
        ("MaxTime=1-0", {"ReqResv=NO": "ReqResv=YES"}, "ReqResv is YES"),
        ("MaxTime=1-0 ReqResv=1", {"ReqResv=NO": "ReqResv=YES"}, ""),
        ("MaxTime=1-0", {"LLN=NO": "LLN=YES"}, "LLN is YES"),
        ("MaxTime=1-0", {"GraceTime=0": "GraceTime=30"}, "GraceTime is 30"),
        ("MaxTime=1-0 GraceTime=30", {"GraceTime=0": "GraceTime=30"}, ""),
        ("MaxTime=1-0", {"MaxCPUsPerNode=UNLIMITED": "MaxCPUsPerNode=8"}, "MaxCPUsPerNode is 8"),
        ("MaxTime=1-0 MaxCPUsPerNode=8", {"MaxCPUsPerNode=UNLIMITED": "MaxCPUsPerNode=8"}, ""),
        ("MaxTime=1-0", {"MaxMemPerNode=UNLIMITED": "MaxMemPerNode=4000"}, "MaxMemPerNode is 4000"),
        ("MaxTime=1-0", {"DefMemPerNode=UNLIMITED": "DefMemPerCPU=4000"}, "DefMemPerCPU is 4000"),
        ("MaxTime=1-0 DefMemPerCPU=4000", {"DefMemPerNode=UNLIMITED": "DefMemPerCPU=4000"}, ""),
        ("MaxTime=1-0 DefMemPerCPU=0", {"DefMemPerNode=UNLIMITED": "DefMemPerCPU=UNLIMITED"}, ""),
        ("MaxTime=1-0 DefMemPerCPU=4000", {}, "DefMemPerCPU is UNLIMITED"),
        ("MaxTime=1-0 MaxMemPerCPU=4 MaxMemPerNode=9", {"MaxMemPerNode=UNLIMITED": "MaxMemPerNode=9"}, ""),
        ("MaxTime=1-0 JobDefaults=DefCpuPerGPU=4", {"JobDefaults=(null)": "JobDefaults=DefCpuPerGPU=4"}, ""),
        ("MaxTime=1-0", {"JobDefaults=(null)": "JobDefaults=DefCpuPerGPU=4"}, "JobDefaults is DefCpuPerGPU=4"),
        ("MaxTime=1-0", {" State=UP": " State=UP TRESBillingWeights=CPU=1.0"}, "TRESBillingWeights is CPU=1.0"),
        ('MaxTime=1-0 TRESBillingWeights="CPU=1.0"', {" State=UP": " State=UP TRESBillingWeights=CPU=1.0"}, ""),
        ("MaxTime=1-0 TRESBillingWeights=CPU=1.0", {}, "TRESBillingWeights is "),
        ("MaxTime=1-0", {" State=UP": " State=UP Alternate=other"}, "Alternate is other"),
        ("MaxTime=1-0 CpuBind=core", {" State=UP": " State=UP CpuBind=cores"}, ""),
        ("MaxTime=1-0", {" State=UP": " State=UP CpuBind=cores"}, "CpuBind is cores"),
        ("MaxTime=1-0", {" State=UP": " State=UP MaxCPUsPerSocket=2"}, "MaxCPUsPerSocket is 2"),
        ("MaxTime=1-0", {" State=UP": " State=UP ExclusiveTopo=YES"}, "ExclusiveTopo is YES"),
        ("MaxTime=1-0 MinNodes=1 Nodes=n[1-4]", {}, ""),
        ("MaxTime=1-0 Shared=YES", {"OverSubscribe=NO": "OverSubscribe=YES:4"}, ""),
        ("MaxTime=1-0 OverSubscribe=FORCE:2", {"OverSubscribe=NO": "OverSubscribe=FORCE:2"}, ""),
        ("MaxTime=1-0", {"MinNodes=0": "MinNodes=2"}, "MinNodes is 2"),
        ("MaxTime=1440 AllowAccounts=B,a", {"AllowAccounts=ALL": "AllowAccounts=a,b"}, ""),
        ("MaxTime=1440 AllowAccounts=a", {"AllowAccounts=ALL": "AllowAccounts=a,b"}, "AllowAccounts is a,b"),
        ("MaxTime=1440", {"Nodes=n[1-4]": "Nodes=n[1-3]"}, "Nodes is n[1-3]"),
        ("MaxTime=1440 Nodes=ALL", {"Nodes=n[1-4]": "Nodes=n[1-3]"}, ""),
        ("MaxTime=1440", {"PriorityTier=1": "PriorityTier=9"}, "PriorityTier is 9"),
        ("MaxTime=1440 PriorityTier=9", {"PriorityTier=1": "PriorityTier=9"}, ""),
        ("MaxTime=1440 PriorityTier=3 Priority=9", {"Tier=1": "Tier=9", "JobFactor=1": "JobFactor=9"}, ""),
        ("MaxTime=1440 Hidden=TRUE RootOnly=1", {"Hidden=NO": "Hidden=YES", "RootOnly=NO": "RootOnly=YES"}, ""),
        ("MaxTime=1440 DefaultTime=9-0", {}, ""),
        ("MaxTime=1440", {"AllowAccounts=ALL": "DenyAccounts=eve"}, "DenyAccounts is eve"),
        ("MaxTime=1440 DenyAccounts=Eve", {"AllowAccounts=ALL": "DenyAccounts=eve"}, ""),
        ("MaxTime=1440 DenyAccounts=eve", {}, "DenyAccounts is "),
        ("MaxTime=1440", {"OverTimeLimit=NONE": "OverTimeLimit=UNLIMITED"}, "OverTimeLimit is UNLIMITED"),
        ("MaxTime=1440 OverTimeLimit=INFINITE", {"OverTimeLimit=NONE": "OverTimeLimit=UNLIMITED"}, ""),
        ("MaxTime=1440 OverTimeLimit=10", {"OverTimeLimit=NONE": "OverTimeLimit=10"}, ""),
        ("MaxTime=1440 PreemptMode=cancel", {"PreemptMode=OFF": "PreemptMode=CANCEL"}, ""),
        ("MaxTime=1440", {"PreemptMode=OFF": "PreemptMode=REQUEUE"}, "PreemptMode is REQUEUE"),
        ("MaxTime=1440 Nodes=n[1-4]\nPreemptMode=REQUEUE", {"PreemptMode=OFF": "PreemptMode=REQUEUE"}, ""),
        (
            "MaxTime=1440 Nodes=n[1-4]\nPreemptMode=SUSPEND,GANG",
            {"PreemptMode=OFF": "PreemptMode=GANG,SUSPEND"},
            "",
        ),
        ("MaxTime=1440 DenyAccounts=eve AllowAccounts=bob", {"AllowAccounts=ALL": "AllowAccounts=bob"}, ""),
    ],
)
def test_what_was_changed_by_hand_and_would_be_dropped(line: str, shown: dict[str, str], dropped: str) -> None:
    text = SHOWN
    for before, after in shown.items():
        assert before in text
        text = text.replace(before, after)
    nodes = "" if "Nodes=" in line else " Nodes=n2,n[3-4],n1"
    defined = read_defined({"/etc/slurm/slurm.conf": f"NodeName=n[1-4]\nPartitionName=normal {line}{nodes}\n".encode()})
    found = find_by_hand(present(text), defined, defined)
    assert [one.removeprefix("partition normal: ")[: len(dropped)] for one in found] == ([dropped] if dropped else [])


def test_what_slurm_keeps_is_not_dropped() -> None:
    text = b"ReconfigFlags=KeepPartState\nNodeName=n[1-4]\nPartitionName=normal Nodes=ALL MaxTime=1440\n"
    defined = read_defined({"/etc/slurm/slurm.conf": text})
    assert find_by_hand(present(SHOWN.replace("State=UP", "State=DOWN")), defined, defined) == []


FEATURES = "described NodeName=n1 AvailableFeatures={} Weight={}"


@pytest.mark.parametrize(
    ("features", "weight", "plugin", "dropped"),
    [
        ("ib,gpu", "3", "", ""),
        ("gpu,ib", "3", "", ""),
        ("ib,gpu,new", "3", "", "AvailableFeatures"),
        ("(null)", "3", "", "AvailableFeatures"),
        ("ib,gpu,new", "3", "NodeFeaturesPlugins=knl_generic\n", ""),
        ("ib,gpu", "4", "", "Weight"),
    ],
)
def test_nodes_that_were_changed_by_hand(features: str, weight: str, plugin: str, dropped: str) -> None:
    text = f"{plugin}NodeName=n1 Features=ib,gpu Weight=3\nPartitionName=normal Nodes=ALL\n"
    defined = read_defined({"/etc/slurm/slurm.conf": text.encode()})
    lines = find_by_hand(present(FEATURES.format(features, weight)), defined, defined)
    assert [dropped in line for line in lines] == ([True] if dropped else [])


@pytest.mark.parametrize(
    ("line", "dropped"),
    [
        ("n1 NodeAddr=10.0.0.1", False),
        ("n1 NodeAddr=10.0.0.9", True),
        ("n1", True),
        ("n1 State=CLOUD", False),  # Slurm keeps it
        ("n2", False),
    ],
)
def test_an_address_that_was_changed_by_hand(line: str, dropped: bool) -> None:
    defined = read_defined({"/etc/slurm/slurm.conf": f"NodeName={line}\n".encode()})
    found = find_by_hand(present(node("n1", "idle")), defined, defined)
    assert ["NodeAddr is 10.0.0.1" in one for one in found] == [True] * dropped


def test_a_partition_that_no_file_has() -> None:
    old = read_defined({"/etc/slurm/slurm.conf": b"NodeName=n1\nPartitionName=old Nodes=ALL\n"})
    made = present(SHOWN.replace("=normal", "=course"), SHOWN.replace("=normal", "=old"))
    none = read_defined({"/etc/slurm/slurm.conf": b"NodeName=n1\n"})
    assert [line.split()[:2] for line in find_by_hand(made, old, none)] == [["partition", "course"]]


def test_what_was_changed_by_hand_and_is_in_the_new_configuration_is_kept() -> None:
    old, new = (
        read_defined(
            {"/etc/slurm/slurm.conf": f"NodeName=n[1-4]\nPartitionName=normal Nodes=ALL MaxTime=1440 {text}\n".encode()}
        )
        for text in ("", "State=DOWN")
    )
    assert find_by_hand(present(SHOWN.replace("State=UP", "State=DOWN")), old, new) == []
    assert find_by_hand(present(SHOWN.replace("State=UP", "State=DRAIN")), old, new)
