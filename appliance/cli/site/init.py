"""`sms init`: a commented site file to start from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from appliance.cli.common import verb

EXAMPLES = """\
  sms init --list                                   the profiles
  sms init --profile openhpc -o /etc/sms/sms.yaml   for a cluster that OpenHPC's recipe installed
  sms init --profile lab -o -                       print one"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb to the parser."""
    text = "write a commented site file to start from"
    long = (
        "Write a commented site file to start from, and beside it, in the folder tls/, a certificate authority for\n"
        "the provisioning VM and its clients. An authority that is there already stays."
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
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--list", action="store_true", help="show the profiles")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the site file and say what comes next."""
    from appliance.cli.screen import out
    from appliance.errors import ConfigError
    from appliance.operations.site.ca import ca_folder
    from appliance.operations.site.init import list_profiles, make_missing_ca, read_profile, write_site

    if arguments.list:
        for name, summary in list_profiles().items():
            out.print(f"{name:<10}{summary}", markup=False)
        return 0
    if not arguments.profile:
        raise ConfigError("which profile?", hint=f"--profile {', '.join(list_profiles())}; --list tells of each")
    text = read_profile(arguments.profile)
    if arguments.output == "-":
        sys.stdout.write(text)
        return 0
    path = Path(arguments.output)
    write_site(text, path, force=arguments.force)
    made = make_missing_ca(path)
    option = "" if path in (Path("sms.yaml"), Path("/etc/sms/sms.yaml")) else f" --site {path}"
    edit = "  edit it: what a site must change is marked (CHANGE)\n" if "(CHANGE)" in text else ""
    folder = ca_folder(path)
    if made:
        out.print(
            f"made a certificate authority for the provisioning VM in {folder}; {folder / 'ca.key'} stays secret",
            markup=False,
        )
    else:
        out.print(f"the certificate authority in {folder} stays as it is", markup=False)
    out.print(
        f"wrote {path}; next:\n{edit}"
        f"  sms{option} config check    every mistake in it, with its line\n"
        f"  sms{option} key create      the keys that sign the image\n"
        f"  sms{option} build           build, sign and verify the image",
        markup=False,
    )
    return 0
