"""Services that a site has to choose, for tests of engines: users in Debian's slapd, logins, tokens, accounting."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.engines.hosts import Runner
from appliance.lab.engines.pki import Authority
from appliance.operations.context import Cluster, open_cluster
from appliance.progress import Silent
from tests.images import ON_ENGINES
from tests.real.runners import LabRunner

SITE = Path("/etc/sms")
"""Where admin hosts have the site file and its files."""
USER, UID = "alice2", 5002
"""In the directory only; nodes know the name and id."""
PASSWORD = "of-alice2"
READER, READER_PASSWORD = "cn=reader,dc=lab", "of-the-reader"
SLAPD = """\
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/cosine.schema
include /etc/ldap/schema/nis.schema
include /etc/ldap/schema/inetorgperson.schema
modulepath /usr/lib/ldap
moduleload back_mdb
pidfile {folder}/slapd.pid
TLSCACertificateFile {authority}
TLSCertificateFile {certificate}
TLSCertificateKeyFile {key}
database mdb
suffix dc=lab
directory {folder}/db
access to attrs=userPassword by anonymous auth by * none
access to * by dn.exact="{reader}" read by * none
"""
LDIF = """\
dn: dc=lab
objectClass: dcObject
objectClass: organization
o: lab

dn: {reader}
objectClass: organizationalRole
objectClass: simpleSecurityObject
userPassword: {reader_password}

dn: uid={user},dc=lab
objectClass: inetOrgPerson
objectClass: posixAccount
cn: {user}
sn: {user}
uidNumber: {uid}
gidNumber: {uid}
homeDirectory: /home/{user}
loginShell: /bin/sh
userPassword: {password}
description: {key}

dn: cn={user},dc=lab
objectClass: posixGroup
gidNumber: {uid}
"""
SSSD = """\
[sssd]
services = nss, pam, ssh
domains = lab
[domain/lab]
id_provider = ldap
ldap_uri = ldaps://{address}
ldap_search_base = dc=lab
ldap_tls_cacert = /etc/slurm/ldap-ca.pem
ldap_default_bind_dn = {reader}
ldap_default_authtok = {reader_password}
ldap_user_ssh_public_key = description
"""


class Entries:
    """A site file ``engines.yaml`` of a lab with these services and secret files; its directory runs."""

    def __init__(self, lab: Lab, engines: Mapping[str, Any], directory: Runner, address: str, **changes: Any) -> None:
        self.lab = lab
        self.keys = lab.etc / "keys"
        for name in ("ssh_host_key", USER, "alice"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.keys / name)]
            subprocess.run(make, check=True)
        self._start_directory(directory, address)
        self._write("sssd.conf", SSSD.format(address=address, reader=READER, reader_password=READER_PASSWORD))
        self._write("jwt.key", "0123456789abcdef0123456789abcdef")
        document = yaml.safe_load((lab.etc / "sms.yaml").read_text())
        document |= {"services": list(ON_ENGINES), **changes}
        document["engines"] = dict(engines)
        document["secrets"] |= {
            "sssd_conf": "keys/sssd.conf",
            "ssh_host_key": "keys/ssh_host_key",
            "jwt_key": "keys/jwt.key",
        }
        document["slurm"]["files"] = {"ldap-ca.pem": "ldap/pki/ca.pem"}
        (lab.etc / "engines.yaml").write_text(yaml.safe_dump(document))

    def open(self) -> Cluster:
        """The site."""
        return open_cluster(self.lab.etc / "engines.yaml", None, Silent())

    @property
    def secrets(self) -> dict[str, Path]:
        """Each secret file by its name in the site file."""
        return {
            "munge_key": self.keys / "munge.key",
            "jwt_key": self.keys / "jwt.key",
            "ssh_host_key": self.keys / "ssh_host_key",
            "sssd_conf": self.keys / "sssd.conf",
        }

    def _write(self, name: str, text: str) -> None:
        path = self.keys / name
        path.touch(mode=0o600)
        path.write_text(text)

    def _start_directory(self, host: Runner, address: str) -> None:
        folder = self.lab.etc / "ldap"
        seen = SITE / "ldap" if isinstance(host, LabRunner) else folder
        authority = Authority(folder / "pki")
        authority.certificate.chmod(0o644)
        pair = authority.issue("slapd", "slapd", addresses=(address,))
        (folder / "db").mkdir()
        public = (self.keys / "alice2.pub").read_text().strip()
        conf, ldif = folder / "slapd.conf", folder / "lab.ldif"
        conf.write_text(
            SLAPD.format(
                folder=seen,
                authority=seen / "pki" / authority.certificate.name,
                certificate=seen / "pki" / pair.certificate.name,
                key=seen / "pki" / pair.key.name,
                reader=READER,
            )
        )
        ldif.write_text(
            LDIF.format(
                reader=READER, reader_password=READER_PASSWORD, user=USER, uid=UID, password=PASSWORD, key=public
            )
        )
        host.run("/usr/sbin/slapadd", "-f", str(seen / conf.name), "-l", str(seen / ldif.name))
        host.start("slapd", "/usr/sbin/slapd", "-f", str(seen / conf.name), "-h", f"ldaps://{address}", "-d", "0")

    def add_user(self, *nodes: Netns) -> None:
        """Make the user of the directory known on compute nodes, which have no sssd."""
        for node in nodes:
            node.run("useradd", "-m", "-u", str(UID), USER)

    def ssh(self, address: str, port: int, *command: str, user: str = USER, password: str = "") -> str:
        """Log in from an admin host, which knows the host key of the site file; what a command prints, or its error."""
        public = " ".join((self.keys / "ssh_host_key.pub").read_text().split()[:2])
        known = self.keys / "known_login"
        known.write_text(f"[{address}]:{port} {public}\n")
        options = [f"UserKnownHostsFile={SITE / 'keys' / known.name}", "StrictHostKeyChecking=yes", "ConnectTimeout=10"]
        words = ["ssh", "-F", "none", "-p", str(port)]
        if password:
            ask = self.keys / "ask"
            ask.touch(mode=0o700)
            ask.write_text(f"#!/bin/sh\necho {password}\n")
            options.append("PubkeyAuthentication=no")
            words = ["env", f"SSH_ASKPASS={SITE / 'keys' / ask.name}", "SSH_ASKPASS_REQUIRE=force", *words]
        else:
            options += [f"IdentityFile={SITE / 'keys' / user}", "IdentitiesOnly=yes", "BatchMode=yes"]
        words += [word for option in options for word in ("-o", option)]
        done = self.lab.host("host-b").run(*words, f"{user}@{address}", "--", *command, ok=None, timeout=60)
        return f"status {done.status}: {done.stderr.decode()}" if done.status else done.text

    def request(self, url: str, token: str = "") -> str:
        """The status of a request to slurmrestd, and what it answers."""
        headers = ["-H", f"X-SLURM-USER-NAME: {USER}", "-H", f"X-SLURM-USER-TOKEN: {token}"] if token else []
        curl = ("curl", "-s", "-w", "%{http_code} %{content_type}", "--max-time", "20", *headers, url)
        return self.lab.host("host-b").run(*curl, ok=None, timeout=40).text
