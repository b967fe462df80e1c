"""`sms export` in a folder: what is there stays, a second run changes nothing, an interrupted one is resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from appliance.cli import main
from appliance.errors import ConfigError, Refused
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.engines import export as module
from appliance.operations.engines.export import RECORD, export
from appliance.progress import Silent
from appliance.shared.files import replace_file
from tests.sites import GOOD


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "sms.yaml"
    path.write_text(GOOD + f"state: {tmp_path}/state\nengines:\n  kubernetes: {{address: 10.77.0.9}}\n")
    return path


@pytest.fixture
def cluster(site: Path) -> Cluster:
    return open_cluster(site, None, Silent())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_export_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    first = export(cluster, "kubernetes", tmp_path / "out")
    before = content(tmp_path / "out")
    assert len(first.written) == first.files == len(before) - 1
    again = export(cluster, "kubernetes", tmp_path / "out")
    assert again.same
    assert content(tmp_path / "out") == before


def test_the_current_folder(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    done = export(cluster, "kubernetes", Path())
    assert done.path == "." and len(content(tmp_path / "out")) == done.files + 1


def test_check_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    assert not export(cluster, "kubernetes", tmp_path / "out", check=True).same
    assert not (tmp_path / "out").exists()


def test_a_changed_site_changes_its_files_alone(cluster: Cluster, site: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(cluster, "kubernetes", out)
    (out / "mine.yaml").write_text("kept\n")
    site.write_text(site.read_text().replace("default: true", "default: false"))
    done = export(open_cluster(site, None, Silent()), "kubernetes", out)
    assert done.written == ["base/slurmctld.yaml"]
    assert (out / "mine.yaml").read_text() == "kept\n"


def test_jobs_name_one_image_and_not_the_link_to_the_current_one(site: Path, tmp_path: Path) -> None:
    """Another build changes what an export writes, but nothing that was exported before."""
    (tmp_path / "sign.pem").write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    site.write_text(site.read_text().replace("kubernetes:", "nomad:") + "signing: {public_keys: [sign.pem]}\n")
    cluster = open_cluster(site, None, Silent())
    images, link = Path(cluster.places.images), Path(cluster.places.current)
    images.mkdir(parents=True)
    for key in ("1" * 64, "2" * 64):
        (images / f"{key}.sif").write_bytes(b"x")
        (images / f"{key}.json").write_text(json.dumps({"services": [], "base": {"name": "debian-12"}}))
        link.unlink(missing_ok=True)
        link.symlink_to(f"{key}.sif")
        export(cluster, "nomad", tmp_path / key)
        text = (tmp_path / key / "slurm-ctl.nomad.hcl").read_text()
        assert str(images / f"{key}.sif") in text and str(link) not in text


def test_what_is_not_needed_any_more_is_removed(cluster: Cluster, site: Path, tmp_path: Path) -> None:
    site.write_text(site.read_text().replace("[slurmctld, munge]", "[slurmctld, munge, postfix]"))
    out = tmp_path / "out"
    export(open_cluster(site, None, Silent()), "kubernetes", out)
    assert export(cluster, "kubernetes", out).removed == ["base/postfix.yaml"]
    assert not (out / "base/postfix.yaml").exists()


@pytest.mark.parametrize("foreign", ["edited", "other", "link", "folder", "record", "target"])
def test_files_of_others_are_not_overwritten(foreign: str, cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if foreign in ("edited", "record", "target"):
        export(cluster, "kubernetes", out)
    out.mkdir(exist_ok=True)
    if foreign == "edited":
        (out / "base/slurmctld.yaml").write_text("mine\n")
    elif foreign == "other":
        (out / "base").mkdir()
        (out / "base/slurmctld.yaml").write_text("mine\n")
    elif foreign == "link":
        (tmp_path / "elsewhere").mkdir()
        (out / "base").symlink_to(tmp_path / "elsewhere")
    elif foreign == "folder":
        (out / "base/slurmctld.yaml").mkdir(parents=True)
    elif foreign == "record":
        (out / RECORD).write_text("[]")
    elif foreign == "target":
        (out / RECORD).write_text(json.dumps({"target": "nomad", "files": {}}))
    before = content(tmp_path)
    with pytest.raises(Refused) as caught:
        export(cluster, "kubernetes", out)
    assert caught.value.hint
    assert content(tmp_path) == before


def test_an_interrupted_export_is_resumed(
    cluster: Cluster, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any write: the next run finds no file of others, and ends as one that was not interrupted."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    export(cluster, "kubernetes", out)
    site.write_text(site.read_text().replace("10.77.0.9", "10.77.0.8"))
    changed = open_cluster(site, None, Silent())
    export(changed, "kubernetes", whole)
    changes = export(changed, "kubernetes", out, check=True).written
    shutil.copytree(out, tmp_path / "before")
    for kept in range(len(changes) + 2):
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "before", out)
        left = kept

        def write(path: str, data: bytes, mode: int) -> bool:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return replace_file(path, data, mode)

        with monkeypatch.context() as patch:
            patch.setattr(module, "replace_file", write)
            with pytest.raises(KeyboardInterrupt):
                export(changed, "kubernetes", out)
        if kept % 2:  # another export is interrupted, too
            left = 2
            with monkeypatch.context() as patch:
                patch.setattr(module, "replace_file", write)
                with suppress(KeyboardInterrupt):
                    export(cluster, "kubernetes", out)
        export(changed, "kubernetes", out)
        assert content(out) == content(whole)


def test_statuses(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--site", str(site), "-q", "export", "kubernetes", "-o", str(tmp_path / "out")]
    assert main([*words, "--check"]) == 1
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["target"] == "kubernetes"
    assert {each["service"]: each["place"] for each in shown["placements"]} == {
        "munge": "engine",
        "slurmctld": "engine",
    }
    assert main([*words, "--check"]) == 0
    (tmp_path / "out" / "base" / "slurmctld.yaml").write_text("mine\n")
    assert main([*words, "--check"]) == 1
    assert main(words) == 3
    assert main(["--site", str(site), "export", "nomad", "-o", str(tmp_path / "other")]) in (2, 3)


@pytest.mark.parametrize("name", ["../victim", "/victim", "base/../../victim", "base//victim", ""])
def test_a_record_does_not_name_files_elsewhere(name: str, cluster: Cluster, tmp_path: Path) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    export(cluster, "kubernetes", out)
    victim.write_text("kept\n")
    record = json.loads((out / RECORD).read_text())
    record["files"][name.replace("/victim", str(victim)) if name == "/victim" else name] = digest(victim)
    (out / RECORD).write_text(json.dumps(record))
    with pytest.raises(Refused):
        export(cluster, "kubernetes", out)
    assert victim.read_text() == "kept\n"


def test_a_record_that_is_a_folder(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "out" / RECORD).mkdir(parents=True)
    with pytest.raises(Refused):
        export(cluster, "kubernetes", tmp_path / "out")


def test_a_file_for_its_owner_only_is_not_exported(site: Path, tmp_path: Path) -> None:
    (tmp_path / "jwt.key").write_text("secret\n")
    (tmp_path / "jwt.key").chmod(0o600)
    site.write_text(site.read_text().replace("slurm:\n", "slurm:\n  files: {topology.conf: jwt.key}\n"))
    with pytest.raises(ConfigError):
        export(open_cluster(site, None, Silent()), "kubernetes", tmp_path / "out")
    (tmp_path / "jwt.key").chmod(0o644)
    assert export(open_cluster(site, None, Silent()), "kubernetes", tmp_path / "out").written


@pytest.mark.parametrize(
    ("line", "refused"),
    [("JobCompPass=geheim", True), ("jobcomppass = x", True), ("AccountingStoragePass=/run/munge/x", False)],
)
def test_a_password_in_slurm_conf_is_not_exported(line: str, refused: bool, site: Path, tmp_path: Path) -> None:
    site.write_text(site.read_text().replace("slurm:\n", f"slurm:\n  extra: ['{line}']\n"))
    with pytest.raises(ConfigError) if refused else nullcontext():
        export(open_cluster(site, None, Silent()), "kubernetes", tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slurm:\n", "slurm:\n  extra: [SlurmctldPort=7000]\n"),
        ("slurm:\n", "slurm:\n  extra: [slurmdport=6900]\n"),
        ("address: 10.77.0.9", "address: 10.77.0.1"),
        ("address: 10.77.0.9", "address: 0.0.0.0"),
        ("address: 10.77.0.9", "address: 127.0.0.1"),
        ("address: 10.77.0.9", "namespace: kube-system, address: 10.77.0.9"),
        ("address: 10.77.0.9", "namespace: default, address: 10.77.0.9"),
    ],
)
def test_settings_that_an_export_cannot_follow(old: str, new: str, site: Path, tmp_path: Path) -> None:
    assert old in site.read_text()
    site.write_text(site.read_text().replace(old, new))
    with pytest.raises(ConfigError):
        export(open_cluster(site, None, Silent()), "kubernetes", tmp_path / "out")


def test_a_private_key_is_not_exported_as_a_public_one(site: Path, tmp_path: Path) -> None:
    text = site.read_text().replace("kubernetes:", "nomad:") + "signing: {public_keys: [sign.pem]}\n"
    site.write_text(text)
    for name in ("PRIVATE", "PUBLIC"):
        (tmp_path / "sign.pem").write_text(f"-----BEGIN {name} KEY-----\nMCowBQYDK2VwAyEA\n-----END {name} KEY-----\n")
        with pytest.raises(Refused) if name == "PRIVATE" else nullcontext():
            export(open_cluster(site, None, Silent()), "nomad", tmp_path / "out")


@pytest.mark.parametrize("name", ["base/slurmctld.yaml", RECORD])
def test_a_pipe_in_the_folder_is_refused(name: str, cluster: Cluster, tmp_path: Path) -> None:
    """It is not read: nobody writes."""
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(Refused):
        export(cluster, "kubernetes", tmp_path / "out")
    assert path.is_fifo()


def test_a_site_without_a_service_for_engines(site: Path, tmp_path: Path) -> None:
    site.write_text(site.read_text().replace("[slurmctld, munge]", "[chrony]"))
    with pytest.raises(ConfigError, match="nothing to export"):
        export(open_cluster(site, None, Silent()), "kubernetes", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["nomad", "kubernetes", "terraform", "quadlet", "compose"])
def test_help_of_a_target_has_examples(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", target, "--help"])
    shown = capsys.readouterr().out
    assert f"sms export {target} -o" in shown.partition("examples:")[2]


def test_mistakes_of_engines_have_a_line(site: Path) -> None:
    site.write_text(site.read_text().replace("{address: 10.77.0.9}", "{address: 10.77.0.1, network: host}"))
    with pytest.raises(ConfigError) as caught:
        open_cluster(site, None, Silent())
    found = {problem.line: problem.message for problem in caught.value.problems}
    line = 1 + site.read_text().splitlines().index("  kubernetes: {address: 10.77.0.1, network: host}")
    assert set(found) == {line}
    assert len(caught.value.problems) == 2


def test_a_link_beside_a_file_is_not_followed(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "out/base").mkdir(parents=True)
    (tmp_path / "victim").write_text("kept\n")
    (tmp_path / "out/base/slurmctld.yaml.new").symlink_to(tmp_path / "victim")
    with pytest.raises(Refused):
        export(cluster, "kubernetes", tmp_path / "out")
    assert (tmp_path / "victim").read_text() == "kept\n"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
