"""``sms key``: the key pair that signs images, and the site's certificate authority."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb

if TYPE_CHECKING:
    from appliance.operations.context import Cluster
    from appliance.operations.vm.certificates import Installed

STARTED_LATER = "the container's own is installed by the next `sms start`; until then it has its previous one"
REVOKED_ALREADY = "they were revoked already"

EXAMPLES = """\
  sms key create    create the pair that the site file names, the private key with mode 0600
  sms key show      fingerprints of the keys that images are verified with
  sms key ca show   certificates of the authority and its clients, with their expiry dates
  sms key ca renew  replace the client certificates; the authority is kept
  sms key ca revoke admin    all certificates of the admin, which gets another one
  sms key ca revoke node007  those of a node; or a SERIAL of `sms key ca log`
  sms key ca revoke -n node007   show which ones that would be"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "key",
        "create or show the signing keys and the site's certificates",
        "Create or show the keys that sign images, and the certificates with which the provisioning VM\n"
        "and its clients authenticate each other.",
        EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="create the pair that the site file names")
    create.set_defaults(run=run_create)
    show = actions.add_parser("show", help="show fingerprints of the keys that images are verified with")
    add_json(show)
    show.set_defaults(run=run_show)
    ca = actions.add_parser("ca", help="the site's certificate authority, in tls/ beside the site file")
    of_ca = ca.add_subparsers(dest="ca_action", required=True, metavar="ACTION")
    make = of_ca.add_parser("create", help="create the authority, if `sms init` has not")
    make.set_defaults(run=run_ca_create)
    shown = of_ca.add_parser("show", help="show its certificates and their expiry dates")
    add_json(shown)
    shown.set_defaults(run=run_ca_show)
    renew = of_ca.add_parser("renew", help="replace and install certificates of its clients; the authority is kept")
    add_json(renew)
    renew.set_defaults(run=run_ca_renew)
    log = of_ca.add_parser("log", help="show every certificate that was issued, and which were revoked")
    add_json(log)
    log.set_defaults(run=run_ca_log)
    revoke = of_ca.add_parser("revoke", help="refuse certificates from now on, before they expire")
    revoke.add_argument("names", nargs="+", metavar="NAME", help="admin, services, a node, or a serial number")
    revoke.add_argument("-n", "--dry-run", action="store_true", help="only show which ones would be revoked")
    add_json(revoke)
    revoke.set_defaults(run=run_ca_revoke)


def run_create(arguments: argparse.Namespace) -> int:
    """Create the pair."""
    from appliance.cli.screen import out
    from appliance.operations.site.find import open_site
    from appliance.operations.site.keys import create_site_pair
    from appliance.operations.site.locate import find_site

    site = open_site(find_site(arguments.site), arguments.state).site
    found, signing = create_site_pair(site), site.signing
    out.print(f"{signing.private_key} (keep it secret)", markup=False)
    out.print(f"{signing.public_keys[0]} sha256:{found}", markup=False)
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Show fingerprints."""
    from appliance.operations.site.find import open_site
    from appliance.operations.site.keys import fingerprint
    from appliance.operations.site.locate import find_site

    signing = open_site(find_site(arguments.site), arguments.state).site.signing
    found = {str(path): fingerprint(path) for path in signing.public_keys}
    print_result(arguments, found, (f"{path} sha256:{digest}" for path, digest in found.items()))
    return 0


def run_ca_create(arguments: argparse.Namespace) -> int:
    """Create the authority."""
    from appliance.cli.screen import out
    from appliance.operations.site.ca import ca_folder, make_ca
    from appliance.operations.site.locate import find_site

    for path in make_ca(ca_folder(find_site(arguments.site))):
        out.print(f"{path}{' (keep it secret)' if path.suffix == '.key' else ''}", markup=False)
    return 0


def run_ca_show(arguments: argparse.Namespace) -> int:
    """Show the certificates, and which are due for renewal."""
    from appliance.operations.site.ca import CLIENTS, SOON_DAYS, ca_folder, show_ca
    from appliance.operations.site.locate import find_site

    found = show_ca(ca_folder(find_site(arguments.site)))
    lines = []
    for each in found:
        state = f"{each.days_left} days left" if each.days_left >= 0 else "expired"
        due = "; `sms key ca renew`" if each.days_left < SOON_DAYS and each.file.stem in CLIENTS else ""
        lines.append(f"{each.file}  {each.subject}  until {each.ends:%Y-%m-%d} ({state}{due})")
    print_result(arguments, found, lines)
    return 0


def run_ca_renew(arguments: argparse.Namespace) -> int:
    """Replace the clients' certificates."""
    from appliance.operations.site.ca import renew_clients
    from appliance.operations.vm.certificates import Installed, install_certificates
    from appliance.operations.vm.client import tls_folder

    cluster = open_site(arguments)
    renewed = renew_clients(tls_folder(cluster))
    done = install_certificates(cluster) if cluster.site.provisioning else Installed()
    lines = [*map(str, renewed), *([] if done.container else [STARTED_LATER])]
    lines.append("previous certificates stay valid until they expire: `sms key ca log`, `sms key ca revoke`")
    print_result(arguments, {"renewed": renewed, "installed": done}, lines)
    return _show_installed(done)


def run_ca_log(arguments: argparse.Namespace) -> int:
    """Show what was issued: here, and by the VM to nodes."""
    from appliance.cli.screen import err
    from appliance.errors import SmsError
    from appliance.operations.vm.revoke import read_log
    from appliance.text import one_line
    from appliance.units import format_time

    cluster = open_site(arguments)
    try:
        found = read_log(cluster)
    except SmsError as error:
        err.print(f"note: without certificates of nodes: {error.message}", markup=False)
        found = read_log(cluster, nodes=False)
    lines = []
    for each in found:
        state = f"  REVOKED {format_time(each.revoked)}" if each.revoked else ""
        lines.append(
            one_line(
                f"{format_time(each.at)}  {each.serial}  {each.subject}  {each.purpose} by {each.by}"
                f"  until {format_time(each.ends)[:10]}{state}"
            )
        )
    print_result(arguments, found, lines)
    _warn_unreadable(cluster)
    return 0


def _warn_unreadable(cluster: Cluster) -> None:
    from appliance.cli.screen import err
    from appliance.operations.site.issued import find_unreadable
    from appliance.operations.vm.client import tls_folder

    if warning := find_unreadable(tls_folder(cluster)):
        err.print(f"warning: {warning}", markup=False)


def run_ca_revoke(arguments: argparse.Namespace) -> int:
    """Revoke certificates, and install the list in the VM."""
    from appliance.operations.site.ca import CLIENTS
    from appliance.operations.vm.revoke import rehearse_revoke, revoke

    cluster = open_site(arguments)
    _warn_unreadable(cluster)
    if arguments.dry_run:
        found = rehearse_revoke(cluster, arguments.names)
        lines = [f"would revoke {each.serial}  {each.subject}" for each in found] or [REVOKED_ALREADY]
        print_result(arguments, {"would_revoke": found}, lines)
        return 0
    done = revoke(cluster, arguments.names)
    lines = [f"revoked {each.serial}  {each.subject}" for each in done.revoked] or [REVOKED_ALREADY]
    if set(CLIENTS) & set(arguments.names) and not done.installed.container:
        lines.append(STARTED_LATER)
    if done.installed.refuses:
        lines.append(f"the VM on {done.installed.vm} refuses them")
    elif not done.installed.vm:
        lines.append("the VM does not run on a host that answers: its next start installs the list")
    print_result(arguments, done, lines)
    return _show_installed(done.installed)


def _show_installed(done: Installed) -> int:
    """Report what could not be installed; return the exit status."""
    from appliance.cli.screen import err

    for each in done.problems:
        err.print(f"warning: {each}", markup=False)
    for each in done.later:
        err.print(f"note: {each}: a scheduled run or the same command installs it later", markup=False)
    return 4 if done.problems or done.later else 0
