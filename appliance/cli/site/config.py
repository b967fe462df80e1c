"""`sms config`: validate the site file, show its values, print its JSON Schema."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from appliance.cli.common import Verbs, print_result, verb

EXAMPLES = """\
  sms config check                    list every problem of the site file, with its line
  sms config check other.yaml         check another file
  sms config check --resolve          and that this machine resolves the names of nodes and servers
  sms config show                     show every setting with its value, including defaults
  sms config schema >sms.schema.json  print the JSON Schema, for completion in an editor"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    description = "Validate the site file, show its values, print its JSON Schema."
    parser = verb(verbs, "config", "validate and show the site file, print its schema", description, EXAMPLES)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="report all problems at once, with line and hint")
    check.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the site file (default: as for --site)")
    check.add_argument(
        "--resolve", action="store_true", help="also resolve the names of nodes and servers, on this machine"
    )
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.set_defaults(run=run_check)
    show = actions.add_parser("show", help="show every setting with its value, including defaults")
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    show.set_defaults(run=run_show)
    schema = actions.add_parser("schema", help="print the JSON Schema, for editors")
    schema.set_defaults(run=run_schema)


def run_check(arguments: argparse.Namespace) -> int:
    """Report every problem; status 2 if there is any."""
    from appliance.cli.screen import err, print_json
    from appliance.errors import ConfigError
    from appliance.operations.site.config import check_config, check_names
    from appliance.operations.site.locate import find_site

    path = find_site(arguments.file or arguments.site)
    try:
        loaded = check_config(path, arguments.state)
        if arguments.resolve:
            check_names(loaded)
    except ConfigError as error:
        if not arguments.json or not error.problems:
            raise
        print_json({"file": str(path), "problems": error.problems, "notices": []})
        return error.status
    for notice in loaded.notices if not arguments.json else ():
        err.print(f"{path}: {notice}", markup=False)
    site = loaded.site
    text = (
        f"{path}: valid: cluster {site.cluster}, {len(site.admin_hosts)} admin hosts, "
        f"{len(site.service_names)} services on {site.base.os}"
    )
    print_result(arguments, {"file": str(path), "problems": [], "notices": loaded.notices}, [text])
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print every setting."""
    import yaml

    from appliance.cli.screen import print_json
    from appliance.operations.site.config import show_config
    from appliance.operations.site.find import open_site
    from appliance.operations.site.locate import find_site

    values = show_config(open_site(find_site(arguments.site), arguments.state).site)
    if arguments.json:
        print_json(values)
    else:
        sys.stdout.write(yaml.safe_dump(values, sort_keys=False))
    return 0


def run_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema."""
    from appliance.config.schema import schema_text

    sys.stdout.write(schema_text())
    return 0
