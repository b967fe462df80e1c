"""`sms init`: write a commented site file to start from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from appliance.cli.common import Verbs, verb

EXAMPLES = """\
  sms init --list                                   list the profiles
  sms init --profile openhpc --parents -o /etc/sms/sms.yaml   for a cluster of OpenHPC's recipe
  sms init --profile lab -o -                       print the file"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    text = "write a commented site file to start from"
    long = (
        "Write a commented site file to start from, and a certificate authority for the provisioning VM and its\n"
        "clients in the folder tls/ beside it. An existing authority is kept."
    )
    parser = verb(verbs, "init", text, long, EXAMPLES)
    parser.add_argument("--profile", metavar="NAME", help="lab, openhpc or cray-ex (see --list)")
    parser.add_argument(
        "-o",
        "--output",
        default="sms.yaml",
        metavar="FILE",
        help="the file to write (default: ./sms.yaml; -: print it)",
    )
    parser.add_argument("--parents", action="store_true", help="create the folder of the file if it is missing")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--list", action="store_true", help="list the profiles")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the site file and print the next steps."""
    from appliance.cli.screen import out
    from appliance.errors import ConfigError
    from appliance.operations.site.ca import ca_folder
    from appliance.operations.site.init import list_profiles, make_missing_ca, read_profile, write_site

    if arguments.list:
        for name, summary in list_profiles().items():
            out.print(f"{name:<10}{summary}", markup=False)
        return 0
    if not arguments.profile:
        raise ConfigError("no --profile", hint=f"--profile {', '.join(list_profiles())}; --list describes them")
    text = read_profile(arguments.profile)
    if arguments.output == "-":
        sys.stdout.write(text)
        return 0
    path = Path(arguments.output)
    write_site(text, path, force=arguments.force, parents=arguments.parents)
    made = make_missing_ca(path)
    option = "" if path in (Path("sms.yaml"), Path("/etc/sms/sms.yaml")) else f" --site {path}"
    edit = "  edit it: change what is marked (CHANGE), and remove the marks\n" if "(CHANGE)" in text else ""
    folder = ca_folder(path)
    if made:
        out.print(
            f"created a certificate authority for the provisioning VM in {folder}; keep {folder / 'ca.key'} secret",
            markup=False,
        )
    else:
        out.print(f"kept the certificate authority in {folder}", markup=False)
    out.print(
        f"wrote {path}; next:\n{edit}"
        f"  sms{option} config check    list every problem of it, with its line\n"
        f"  sms{option} key create      create the keys that sign the image\n"
        f"  sms{option} build           build, sign and verify the image",
        markup=False,
    )
    return 0
