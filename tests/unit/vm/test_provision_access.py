"""Certificates of nodes: which one is accepted, from where, and what is reported of the others."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from appliance.operations.site.ca import issue_issuer, make_ca
from appliance.provision import migrations
from appliance.provision.enrol import read_request
from appliance.provision.problem import HttpProblem
from appliance.provision.sync_tables import CERTIFICATES
from tests.provd import ADMIN, Provd, make_config, running, write_neighbours

MAC, ADDRESS = "02:00:0a:4d:00:97", "10.77.0.151"
OTHER = "10.77.0.152"
MANIFEST = "/sms/v1/sync/manifest.json"
NODE = {"macs": [MAC], "address": ADDRESS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an issuer."""
    make_ca(tmp_path / "ca")
    (tmp_path / "tls").mkdir()
    pair = issue_issuer(tmp_path / "ca")
    (tmp_path / "tls/issuer.pem").write_bytes(pair.certificate)
    (tmp_path / "tls/issuer.key").write_bytes(pair.key)
    return tmp_path


@pytest.fixture
def provd(folder: Path) -> Iterator[Provd]:
    """Not shared by tests: attempts to enrol are limited."""
    with running(make_config(folder)) as found:
        found.good("PUT", "/sms/v1/nodes/n1", NODE)
        found.good("PUT", "/sms/v1/nodes/n2", {"macs": ["02:00:0a:4d:00:98"], "address": OTHER})
        write_neighbours(folder / "arp", {ADDRESS: MAC})
        yield found


class Machine:
    """A machine with a key, as sms-enroll has it, behind nginx."""

    def __init__(self, provd: Provd, address: str = ADDRESS) -> None:
        self.provd, self.address = provd, address
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.headers: dict[str, str] = {}

    def enrol(self, token: str = "") -> int:
        """Request a certificate, for a token or for the one that it has; return the status."""
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(self.key, hashes.SHA256())
        body = {"csr": request.public_bytes(serialization.Encoding.PEM).decode(), **({"token": token} if token else {})}
        headers = {**({} if token else self.headers), "X-SMS-Scheme": "https"}
        answer = self.provd.ask("POST", "/sms/v1/enrol", body, headers=headers, address=self.address)
        if answer.status == 200:
            made = x509.load_pem_x509_certificate(answer.json["certificate"].encode())
            self.headers = {
                **ADMIN,
                "X-SMS-Subject": made.subject.rfc4514_string({x509.NameOID.SERIAL_NUMBER: "serialNumber"}),
                "X-SMS-Fingerprint": made.fingerprint(hashes.SHA1()).hex().upper(),
            }
        return answer.status

    def boot(self, name: str = "n1") -> Machine:
        """Enrol with a new token of this node."""
        assert self.enrol(self.provd.world.tokens.make(name)) == 200
        return self

    def pull(self, address: str = "", headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Request the files of its certificate; return the status, and the reason of a refusal."""
        answer = self.provd.ask("GET", MANIFEST, headers=headers or self.headers, address=address or self.address)
        return answer.status, answer.detail if answer.status != 200 else ""


@pytest.fixture
def machine(provd: Provd) -> Machine:
    return Machine(provd).boot()


def shown(provd: Provd, node: str = "n1") -> Any:
    return provd.good("GET", f"/sms/v1/certificates?node={node}")


def signing_request(key: Any, digest: Any = None) -> str:
    """A request for a name that it shall not get."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "admin")])
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, digest or hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


GOOD_REQUEST = signing_request(ec.generate_private_key(ec.SECP256R1()))
REQUESTS = {
    "no PEM": "x",
    "a certificate's marks": GOOD_REQUEST.replace("CERTIFICATE REQUEST", "CERTIFICATE"),
    "cut": GOOD_REQUEST[:200] + "\n-----END CERTIFICATE REQUEST-----\n",
    "another signature": GOOD_REQUEST.replace(GOOD_REQUEST[-60:-50], "A" * 10),
    "a short key": signing_request(ec.generate_private_key(ec.SECP192R1())),
    "a short RSA key": signing_request(rsa.generate_private_key(65537, 1024)),
    "a surrogate": "\udc80",
}


@pytest.mark.parametrize("name", REQUESTS)
def test_other_signing_requests_are_refused(name: str) -> None:
    with pytest.raises(HttpProblem) as raised:
        read_request(REQUESTS[name])
    assert raised.value.status == 400


def test_of_a_signing_request_only_the_key_is_used() -> None:
    assert isinstance(read_request(GOOD_REQUEST), ec.EllipticCurvePublicKey)


def test_a_certificate_works_from_its_nodes_address_only(provd: Provd, machine: Machine) -> None:
    assert machine.pull() == (200, "")
    for address in (OTHER, "10.77.0.99", "192.0.2.1"):
        status, why = machine.pull(address)
        assert status == 403 and f"the address of n1 is {ADDRESS}" in why
    provd.good("PATCH", "/sms/v1/nodes/n1", {"address": None})
    assert machine.pull()[0] == 403
    provd.good("PATCH", "/sms/v1/nodes/n1", {"address": "10.77.0.153"})
    assert machine.pull()[0] == 403 and machine.pull("10.77.0.153")[0] == 200


def test_a_disabled_node_gets_nothing(provd: Provd, machine: Machine) -> None:
    token = provd.world.tokens.make("n1")
    provd.good("PATCH", "/sms/v1/nodes/n1", {"enabled": False})
    assert machine.pull() == (403, "this certificate is not accepted: n1 is disabled")
    assert provd.ask("GET", "/user-data", headers=machine.headers, address="10.77.0.9").status == 404
    assert machine.enrol() == 403 and machine.enrol(token) == 403
    provd.good("PATCH", "/sms/v1/nodes/n1", {"enabled": True})
    assert machine.pull()[0] == 200


def test_a_name_given_to_another_machine(provd: Provd, machine: Machine) -> None:
    """Removed and added again; other MAC addresses; swapped. The old certificate is refused at once, for good."""
    provd.good("DELETE", "/sms/v1/nodes/n1")
    assert machine.pull()[0] == 403
    provd.good("PUT", "/sms/v1/nodes/n1", {"macs": ["02:00:0a:4d:00:aa"], "address": ADDRESS})
    status, why = machine.pull()
    assert status == 403 and "another machine had the name n1" in why
    assert machine.enrol() == 403, "a renewal"
    second = Machine(provd).boot()
    assert second.pull()[0] == 200 and machine.pull()[0] == 403
    provd.good("PATCH", "/sms/v1/nodes/n1", {"macs": ["02:00:0a:4d:00:bb"]})
    assert second.pull()[0] == 403, "its board was replaced by another one"
    third = Machine(provd).boot()
    provd.good("PATCH", "/sms/v1/nodes/n1", {"macs": ["02:00:0a:4d:00:bb", "02:00:0a:4d:00:cc"]})
    provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "x", "groups": ["gpu"]})
    assert third.pull()[0] == 200, "the same machine with another card"
    swapped = [{"name": "n1", "macs": ["02:00:0a:4d:00:98"]}, {"name": "n2", "macs": ["02:00:0a:4d:00:bb"]}]
    provd.good("POST", "/sms/v1/import", {"nodes": swapped})
    assert third.pull()[0] == 403


def test_a_renamed_node_keeps_its_entry_but_not_its_certificate(provd: Provd, machine: Machine) -> None:
    provd.good("PATCH", "/sms/v1/nodes/n1", {"name": "n9"})
    assert machine.pull()[0] == 403
    again = Machine(provd).boot("n9")
    provd.good("PATCH", "/sms/v1/nodes/n9", {"xname": "x0c0s0b0n0"})
    assert again.pull()[0] == 200, "its ID changed, not its name"


def test_only_the_newest_certificate_is_accepted(provd: Provd, machine: Machine) -> None:
    """A copy of the key is worthless once its node has booted again, and its use is reported."""
    again = Machine(provd).boot()
    assert again.pull()[0] == 200
    status, why = machine.pull()
    assert status == 403 and "n1 has a newer certificate" in why
    assert machine.enrol() == 403
    for _ in range(2):
        machine.pull()
    log = shown(provd)
    assert [each["accepted"] for each in log["certificates"][:2]] == [True, False]
    assert log["certificates"][0]["address"] == ADDRESS and log["certificates"][0]["mac"] == MAC
    reported = next(each for each in log["refused"] if "newer" in each["reason"])
    assert (reported["node"], reported["address"], reported["count"]) == ("n1", ADDRESS, 4)
    assert shown(provd, "n2")["certificates"] == []


def test_another_certificate_with_the_same_name_and_serial_is_refused(provd: Provd, machine: Machine) -> None:
    """A holder of the issuer's key can sign anything; what this service has not issued is not accepted."""
    forged = {**machine.headers, "X-SMS-Fingerprint": "ab" * 20}
    assert machine.pull(headers=forged)[0] == 403
    assert machine.pull(headers={**machine.headers, "X-SMS-Fingerprint": ""})[0] == 403
    assert machine.pull(headers={**machine.headers, "X-SMS-Subject": "CN=n1,OU=node"})[0] == 403
    assert machine.pull()[0] == 200


def test_a_renewal_whose_response_is_lost_can_be_repeated(provd: Provd, machine: Machine) -> None:
    old = dict(machine.headers)
    assert machine.enrol() == 200
    lost, machine.headers = machine.headers, old
    assert machine.pull()[0] == 200, "the new one has not arrived"
    assert machine.enrol() == 200
    assert machine.pull()[0] == 200
    assert machine.pull(headers=old)[0] == 403 and machine.pull(headers=lost)[0] == 403
    assert [each["renewed"] for each in shown(provd)["certificates"][:3]] == [True, True, False]


def test_what_is_accepted_survives_a_restart(folder: Path) -> None:
    with running(make_config(folder)) as provd:
        provd.good("PUT", "/sms/v1/nodes/n1", NODE)
        first, second = Machine(provd).boot(), Machine(provd).boot()
        old = dict(second.headers)
        assert second.enrol() == 200
    with running(make_config(folder)) as provd:
        for each in (first, second):
            each.provd = provd
        assert first.pull()[0] == 403
        assert second.pull(headers=old)[0] == 200 and second.pull()[0] == 200
    with running(make_config(folder)) as provd:
        second.provd = provd
        assert second.pull()[0] == 200 and second.pull(headers=old)[0] == 403


def test_certificates_older_than_uuids_work_until_the_next_enrolment(provd: Provd) -> None:
    """Those that 519381b issued have no UUID, and its inventory neither."""
    database = sqlite3.connect(provd.folder / "inventory.db")
    with database:
        database.execute("UPDATE components SET uuid = '' WHERE id = 'n1'")
    database.close()
    provd.world.touch()
    machine = Machine(provd)
    machine.headers = old = {**ADMIN, "X-SMS-Subject": "CN=n1,OU=node", "X-SMS-Fingerprint": "12" * 20}
    assert machine.pull()[0] == 200 and machine.pull(OTHER)[0] == 403
    provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "x"})
    assert machine.pull()[0] == 200
    assert machine.enrol() == 200
    assert machine.pull()[0] == 200
    assert machine.pull(headers=old)[0] == 403
    assert Machine(provd, OTHER).pull(headers={**old, "X-SMS-Subject": "CN=n2,OU=node"})[0] == 403, "n2 has a UUID"


def test_an_inventory_of_the_release_before_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    everything = list(migrations.MIGRATIONS)
    monkeypatch.setattr(migrations, "MIGRATIONS", everything[:2])
    with sa.create_engine(config.database, future=True).begin() as connection:
        assert migrations.migrate(connection) == 2
        connection.exec_driver_sql(
            "INSERT INTO components VALUES ('n1', 'Node', 'n1', NULL, NULL, '10.77.0.151', 'Compute', '', 'Unknown',"
            " 'OK', 1, '', 'Ethernet', 'X86', 'River', '', '', '{}', 0)"
        )
    monkeypatch.setattr(migrations, "MIGRATIONS", everything)
    with running(config) as provd:
        node = provd.world.inventory().find_node("n1")
        assert node is not None and node.uuid == ""
        with provd.world.store.read() as connection:
            assert connection.execute(sa.select(CERTIFICATES)).all() == []


@pytest.mark.parametrize("role", ["admin", "services", "node"])
def test_a_revoked_certificate_is_refused(role: str, provd: Provd, machine: Machine) -> None:
    """The admin host installs the list while the service runs."""
    paths = {"admin": "/sms/v1/nodes", "services": MANIFEST, "node": MANIFEST}
    headers = {
        **(machine.headers if role == "node" else {**ADMIN, "X-SMS-Subject": f"CN={role},OU={role}"}),
        "X-SMS-Serial": "0A12",
    }

    def status() -> int:
        return provd.ask("GET", paths[role], headers=headers, address=ADDRESS).status

    revoked = provd.folder / "tls" / "revoked.map"
    for text, expected in (("", 200), ("0A 1;\n", 200), ("0A11 1;\n0A12 1;\n", 403), ("", 200), ("0a12 1;\n", 403)):
        (provd.folder / "new").write_text(text)
        (provd.folder / "new").rename(revoked)
        assert status() == expected, text
    revoked.unlink()
    assert status() == 200, "an admin host of an earlier release installs none"
    revoked.mkdir()
    assert status() == 503
