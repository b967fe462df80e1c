"""The site's certificate authority, verified with openssl."""

from __future__ import annotations

import datetime
import json
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from appliance.cli import main
from appliance.config.filled import fill_provisioning
from appliance.config.read import read_site_text
from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.site import ca
from appliance.operations.site.ca import (
    CLIENT_DAYS,
    ISSUER_DAYS,
    ISSUER_SOON_DAYS,
    SOON_DAYS,
    first_end,
    issue_client,
    issue_issuer,
    issue_server,
    make_ca,
    rehearse_revoke,
    renew_clients,
    renew_due_clients,
    revoke,
    show_ca,
    vm_pairs,
)
from appliance.operations.site.init import read_profile
from appliance.operations.site.issued import find_unreadable, read_issued, revoked_map
from appliance.provision.enrol import DAYS, issue_node

NAMES = {"ca.pem", "ca.key", "admin.pem", "admin.key", "services.pem", "services.key", "issued.log"}


def verified(root: Path, certificate: bytes, purpose: str, tmp_path: Path, *options: str) -> bool:
    """Return whether `openssl verify` accepts a certificate."""
    path = tmp_path / "asked.pem"
    path.write_bytes(certificate)
    argv = ["openssl", "verify", "-CAfile", str(root), "-purpose", purpose, *options, str(path)]
    return subprocess.run(argv, capture_output=True, timeout=30, check=False).returncode == 0


def test_ca_and_the_certificates_that_it_signs(tmp_path: Path, need: Callable[[str], str]) -> None:
    need("openssl")
    folder = tmp_path / "tls"
    assert make_ca(folder)[0] == folder / "ca.pem"
    assert {path.name for path in folder.iterdir()} == NAMES
    assert {path.name for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) == 0o600} == {
        name for name in NAMES if name.endswith((".key", ".log"))
    }
    root = folder / "ca.pem"
    server = issue_server(folder, hostname="sms-provision", addresses=["10.77.0.2"])
    assert verified(root, server.certificate, "sslserver", tmp_path, "-verify_ip", "10.77.0.2")
    assert verified(root, server.certificate, "sslserver", tmp_path, "-verify_hostname", "sms-provision")
    assert not verified(root, server.certificate, "sslserver", tmp_path, "-verify_ip", "10.77.0.3")
    assert not verified(root, server.certificate, "sslclient", tmp_path)
    client = issue_client(folder, "admin", "admin")
    assert verified(root, client.certificate, "sslclient", tmp_path)
    assert not verified(root, client.certificate, "sslserver", tmp_path)
    assert issue_issuer(folder).certificate.startswith(b"-----BEGIN CERTIFICATE-----")
    assert DAYS < ISSUER_SOON_DAYS < ISSUER_DAYS <= 90
    for pair, days in ((server, 90), (client, 90)):
        assert x509.load_pem_x509_certificate(pair.certificate).not_valid_after_utc < (
            datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days + 1)
        )
    assert x509.load_pem_x509_certificate(issue_issuer(folder).certificate).not_valid_after_utc < (
        datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=ISSUER_DAYS + 1)
    )
    assert b"PRIVATE" not in repr(client).encode()
    said = subprocess.run(
        ["openssl", "x509", "-noout", "-subject", "-nameopt", "RFC2253", "-in", str(folder / "services.pem")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.strip() == "subject=CN=services,OU=services"


def test_nodes_stay_trusted_when_the_vm_gets_another_issuer(tmp_path: Path, need: Callable[[str], str]) -> None:
    """Each start of the VM creates an intermediate CA; a node sends it along with its own certificate."""
    need("openssl")
    folder, vm = tmp_path / "ca", tmp_path / "vm"
    make_ca(folder)
    vm.mkdir()
    chains = []
    for _ in range(2):
        pair = issue_issuer(folder)
        (vm / "issuer.pem").write_bytes(pair.certificate)
        (vm / "issuer.key").write_bytes(pair.key)
        chains.append(issue_node(vm, "n1", ec.generate_private_key(ec.SECP256R1()).public_key(), "5f0c"))
    for chain in chains:
        own, _, issuer = chain.partition("-----END CERTIFICATE-----\n")
        (tmp_path / "between.pem").write_text(issuer)
        behind = ("-untrusted", str(tmp_path / "between.pem"))
        whole = (own + "-----END CERTIFICATE-----\n").encode()
        assert verified(folder / "ca.pem", whole, "sslclient", tmp_path, *behind)
    assert chains[0].partition("-----END")[2] != chains[1].partition("-----END")[2]


def test_ca_is_never_replaced(tmp_path: Path) -> None:
    make_ca(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Refused):
        make_ca(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    renew_clients(tmp_path)
    changed = {path.name for path, data in before.items() if path.read_bytes() != data}
    assert changed == NAMES - {"ca.pem", "ca.key"}
    assert (tmp_path / "issued.log").read_bytes().startswith(before[tmp_path / "issued.log"])
    assert {path.name for path in tmp_path.iterdir()} == NAMES | {".renew.lock"}


def serial(path: Path) -> str:
    """Return the serial number of a certificate as openssl prints it."""
    argv = ["openssl", "x509", "-noout", "-serial", "-in", str(path)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip().removeprefix("serial=")


def test_another_authority(tmp_path: Path, need: Callable[[str], str]) -> None:
    """As docs/security.md describes it: the folder is moved away, and the VM gets certificates of the new one."""
    need("openssl")
    folder, old = tmp_path / "tls", tmp_path / "tls.old"
    make_ca(folder)
    before = vm_pairs(folder, hostname="sms-vm", addresses=["10.0.0.2"])
    folder.rename(old)
    make_ca(folder)
    after = vm_pairs(folder, hostname="sms-vm", addresses=["10.0.0.2"])
    for root, other, pairs in ((folder, old, after), (old, folder, before)):
        assert verified(root / "ca.pem", pairs[0].certificate, "sslserver", tmp_path)
        assert not verified(other / "ca.pem", pairs[0].certificate, "sslserver", tmp_path)


def test_every_certificate_is_logged(tmp_path: Path, need: Callable[[str], str]) -> None:
    need("openssl")
    make_ca(tmp_path)
    server = issue_server(tmp_path, hostname="sms-provision", addresses=["10.77.0.2"])
    issue_issuer(tmp_path)
    (tmp_path / "asked.pem").write_bytes(server.certificate)
    log = read_issued(tmp_path)
    assert [(each.subject, each.purpose) for each in log] == [
        ("CN=sms site CA", "authority"),
        ("CN=admin,OU=admin", "client"),
        ("CN=services,OU=services", "client"),
        ("CN=sms-provision", "server"),
        ("CN=sms node issuer", "issuer"),
    ]
    assert [log[at].serial for at in (0, 1, 3)] == [
        serial(tmp_path / name) for name in ("ca.pem", "admin.pem", "asked.pem")
    ]
    assert all("@" in each.by and each.at > 0 for each in log)
    assert not find_unreadable(tmp_path)
    with (tmp_path / "issued.log").open("ab") as file:
        file.write(b'{"at": 12')  # a power cut
    issue_issuer(tmp_path)
    assert len(read_issued(tmp_path)) == 6
    assert "line 6 cannot be read" in find_unreadable(tmp_path)


def test_a_certificate_that_cannot_be_logged_is_not_issued(tmp_path: Path) -> None:
    make_ca(tmp_path)
    (tmp_path / "issued.log").unlink()
    (tmp_path / "issued.log").mkdir()
    with pytest.raises(SmsError, match="cannot write"):
        issue_client(tmp_path, "admin", "admin")


def test_revoking_a_client_replaces_its_certificate(tmp_path: Path, need: Callable[[str], str]) -> None:
    """All that it ever had are revoked, also those of an authority that kept no log; the new one is not."""
    need("openssl")
    make_ca(tmp_path)
    (tmp_path / "issued.log").unlink()
    first = serial(tmp_path / "admin.pem")
    renew_clients(tmp_path)
    second = serial(tmp_path / "admin.pem")
    issue_client(tmp_path, "admin", "admin")
    expected = {each.serial for each in rehearse_revoke(tmp_path, ["admin"])}
    assert second in expected and revoked_map(tmp_path) == b"" and second == serial(tmp_path / "admin.pem")
    done = revoke(tmp_path, ["admin"])
    assert expected <= {each.serial for each in done}
    third = serial(tmp_path / "admin.pem")
    assert {first, second} < {each.serial for each in done} and len(done) == 3, "one was issued by hand"
    assert third not in revoked_map(tmp_path).decode() and second in revoked_map(tmp_path).decode()
    assert all(each.subject == "CN=admin,OU=admin" and each.ends > each.at for each in done)
    lost = "5AFE" * 10  # 519381b replaced it: it is not in the log
    lower = ":".join(lost.lower()[at : at + 2] for at in range(0, len(lost), 2))
    assert [each.serial for each in revoke(tmp_path, [lower])] == [lost], "by its number, as openssl prints it"
    assert revoke(tmp_path, [lost]) == rehearse_revoke(tmp_path, [lost]) == []
    assert revoked_map(tmp_path).decode().splitlines() == sorted(
        f"{each} 1;" for each in (lost, *(one.serial for one in done))
    )
    assert serial(tmp_path / "services.pem") not in revoked_map(tmp_path).decode()


def test_a_certificate_of_an_earlier_release_is_revoked_after_it_was_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, need: Callable[[str], str]
) -> None:
    """519381b kept no log: it is logged when it is replaced, by hand or because it is due."""
    need("openssl")
    for way in (renew_clients, renew_due_clients):
        folder = tmp_path / way.__name__
        make_ca(folder)
        (folder / "issued.log").unlink()
        first = serial(folder / "admin.pem")
        with monkeypatch.context() as patched:
            patched.setattr(ca, "SOON_DAYS", CLIENT_DAYS + 1)
            assert way(folder)
        (entry,) = [each for each in read_issued(folder) if each.serial == first]
        assert (entry.purpose, entry.by) == ("client", "an earlier release")
        assert first in {each.serial for each in revoke(folder, ["admin"])}
        assert f"{first} 1;" in revoked_map(folder).decode().splitlines()
        assert serial(folder / "admin.pem") not in revoked_map(folder).decode()


def test_an_interrupted_revocation_leaves_no_certificate_unrevoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, need: Callable[[str], str]
) -> None:
    """Interrupted before the new certificate is issued, or another process renews meanwhile."""
    need("openssl")
    make_ca(tmp_path)
    first = serial(tmp_path / "admin.pem")
    with monkeypatch.context() as patched:
        patched.setattr(ca, "renew_clients", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            revoke(tmp_path, ["admin"])
    assert first in revoked_map(tmp_path).decode()
    real, meanwhile = ca.renew_clients, []

    def renew(folder: Path, clients: Any) -> Any:
        real(folder, ["admin"])
        meanwhile.append(serial(folder / "admin.pem"))
        return real(folder, clients)

    monkeypatch.setattr(ca, "renew_clients", renew)
    done = {each.serial for each in revoke(tmp_path, ["admin"])}
    assert done == set(meanwhile)
    assert serial(tmp_path / "admin.pem") not in revoked_map(tmp_path).decode()


def test_what_cannot_be_revoked(tmp_path: Path) -> None:
    make_ca(tmp_path)
    issue_issuer(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for words, why in (
        (["admin", "nobody"], "neither admin nor services nor a serial"),
        (["admin", read_issued(tmp_path)[-1].serial], "nodes do not check a list"),
    ):
        with pytest.raises(ConfigError, match=why):
            revoke(tmp_path, words)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "ca.key").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"ca\.key"):
        revoke(tmp_path, ["admin"])
    assert not (tmp_path / "revoked.json").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "ca.key")
    (tmp_path / "revoked.json").write_text("garbage")
    uses: tuple[Callable[[], object], ...] = (lambda: revoked_map(tmp_path), lambda: revoke(tmp_path, ["12" * 10]))
    for use in uses:
        with pytest.raises(ConfigError, match="cannot read"):
            use()


def test_clients_are_renewed_when_they_are_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ca(tmp_path)
    assert renew_due_clients(tmp_path) == ()
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=CLIENT_DAYS - SOON_DAYS + 1)
    monkeypatch.setattr(ca, "_now", lambda: later)
    assert {path.name for path in renew_due_clients(tmp_path)} == NAMES - {"ca.pem", "ca.key", "issued.log"}
    assert renew_due_clients(tmp_path) == ()


def test_the_key_is_needed_for_renewals_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The VM's certificates are kept; without the key they are used until they expire, and never renewed."""
    make_ca(tmp_path)
    names: Any = {"hostname": "sms-provision", "addresses": ["10.77.0.2", "10.78.0.3"]}
    first = vm_pairs(tmp_path, **names)
    assert vm_pairs(tmp_path, **names) == first
    assert {stat.S_IMODE((tmp_path / f"{name}.key").stat().st_mode) for name in ("vm-server", "vm-issuer")} == {0o600}
    (tmp_path / "ca.key").rename(tmp_path / "elsewhere")
    assert vm_pairs(tmp_path, **names) == first
    others: tuple[Any, ...] = ({**names, "renew": True}, {"hostname": "other", "addresses": ["10.77.0.2"]})
    for other in others:
        with pytest.raises(ConfigError, match=r"ca\.key"):
            vm_pairs(tmp_path, **other)
    real = ca._now
    monkeypatch.setattr(ca, "_now", lambda: real() + datetime.timedelta(days=ISSUER_DAYS - ISSUER_SOON_DAYS + 1))
    assert vm_pairs(tmp_path, **names) == first, "soon, but the key is not here"
    (tmp_path / "elsewhere").rename(tmp_path / "ca.key")
    second = vm_pairs(tmp_path, **names)
    assert second[0] != first[0] and second[1] != first[1]
    # A crash between the two files of a pair, and files of another authority.
    (tmp_path / "vm-server.key").write_bytes(first[0].key)
    assert vm_pairs(tmp_path, **names)[0] not in (first[0], second[0])
    monkeypatch.undo()
    for name in ("ca.pem", "ca.key", "admin.pem", "admin.key", "services.pem", "services.key"):
        (tmp_path / name).unlink()
    make_ca(tmp_path)
    third = vm_pairs(tmp_path, **names)
    assert vm_pairs(tmp_path, **names) == third
    assert first_end(third) < (real() + datetime.timedelta(days=91)).timestamp()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "ca.key").unlink(), "cannot read .*ca.key"),
        (lambda folder: (folder / "ca.key").chmod(0o644), "can be read by others"),
        (lambda folder: (folder / "ca.pem").write_text("x"), "does not contain a certificate authority"),
        (lambda folder: (folder / "ca.key").write_bytes((folder / "admin.key").read_bytes()), "is not the key of"),
    ],
)
def test_invalid_ca(tmp_path: Path, harm: Callable[[Path], None], words: str) -> None:
    make_ca(tmp_path)
    harm(tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        issue_client(tmp_path, "x", "admin")
    assert caught.value.hint


def test_init_creates_a_ca_and_key_ca_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "sms.yaml"
    assert main(["init", "--profile", "lab", "-o", str(site)]) == 0
    assert str(tmp_path / "tls") in capsys.readouterr().out
    assert main(["--site", str(site), "key", "ca", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [Path(each["file"]).name for each in shown] == ["ca.pem", "admin.pem", "services.pem"]
    assert all(each["days_left"] >= 89 for each in shown)
    assert [path.name for path, _ in zip((each.file for each in show_ca(tmp_path / "tls")), shown, strict=True)]
    root = (tmp_path / "tls/ca.pem").read_bytes()
    assert main(["init", "--profile", "lab", "-o", str(site), "--force"]) == 0
    assert "kept the certificate authority" in capsys.readouterr().out
    assert (tmp_path / "tls/ca.pem").read_bytes() == root
    assert main(["--site", str(site), "key", "ca", "create"]) == 3
    assert main(["--site", str(site), "key", "ca", "renew"]) == 0


def test_a_site_with_a_vm_takes_its_files_from_there(tmp_path: Path) -> None:
    text = read_profile("lab")
    plain, _ = read_site_text(text, "sms.yaml", folder=tmp_path)
    assert fill_provisioning(plain, tmp_path) == plain
    text += '\nprovisioning: {address: 10.77.0.2/24, mac: "02:00:0a:4d:00:02"}\n'
    site, _ = read_site_text(text, "sms.yaml", folder=tmp_path)
    filled = fill_provisioning(site, tmp_path)
    assert filled.filesync.server == "https://10.77.0.2:8443/sms/v1/sync"
    assert filled.secrets.tls_cert == tmp_path / "tls/services.pem"
    own, _ = read_site_text(
        text + "filesync: {server: https://x.test}\nsecrets: {tls_ca: ca.pem}\n", "s", folder=tmp_path
    )
    filled = fill_provisioning(own, tmp_path)
    assert filled.filesync.server == "https://x.test"
    assert filled.secrets.tls_ca == tmp_path / "ca.pem"
    assert filled.secrets.tls_key == tmp_path / "tls/services.key"


def test_a_key_that_is_gone_is_not_replaced(tmp_path: Path) -> None:
    """A new authority would end the access of every node; without any, the hint is to create one."""
    with pytest.raises(ConfigError) as caught:
        issue_client(tmp_path, "x", "admin")
    assert "sms key ca create" in caught.value.hint
    make_ca(tmp_path)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError) as caught:
        issue_client(tmp_path, "x", "admin")
    assert "bring the key back" in caught.value.hint


def test_a_key_that_others_can_read_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is beside the site file, which does not name it."""
    site = tmp_path / "site.yaml"
    assert main(["init", "-o", str(site), "--profile", "lab"]) == 0
    assert main(["--site", str(site), "config", "check"]) == 0
    (tmp_path / "tls/ca.key").chmod(0o644)
    capsys.readouterr()
    assert main(["--site", str(site), "config", "check"]) == 2
    assert "tls/ca.key" in capsys.readouterr().err
