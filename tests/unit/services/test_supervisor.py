"""Start and stop of services: the file as parsed by supervisord, and the order."""

from __future__ import annotations

import configparser
import re
from typing import Any

import pytest

from appliance.catalog import read_catalog, select
from appliance.errors import ConfigError
from appliance.operations.site.find import open_site
from appliance.plan.machine import stop_timeout
from appliance.plan.render import Templates
from appliance.plan.services.supervisor import services_json, supervisor_conf
from appliance.share import share
from tests.places import DEBIAN_SITE

SITE = open_site(DEBIAN_SITE).site
CATALOG = read_catalog(share("definitions", "services"))
SERVICES = select(CATALOG, SITE.service_names)


@pytest.fixture
def conf() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;", "\t;"))
    parser.read_string(supervisor_conf(SERVICES, 2048))
    return parser


def test_one_program_per_service(conf: configparser.RawConfigParser) -> None:
    programs = [section for section in conf.sections() if section.startswith("program:")]
    assert programs == [f"program:{service.name}" for service in SERVICES]
    for service in SERVICES:
        program = conf[f"program:{service.name}"]
        assert program["command"] == f"/opt/sms/bin/sms-run {service.name}"
        assert program["stopsignal"] == service.stop_signal
        assert int(program["stopwaitsecs"]) == service.stop_wait_s
        assert program["autorestart"] == "true"


@pytest.mark.parametrize("size_mb", [64, 512, 2048, 65536])
def test_a_flood_of_logs_and_mail_leaves_room_for_state(size_mb: int) -> None:
    """All that clients can make long takes less than what Postfix leaves free."""
    site = SITE.model_copy(update={"overlay": SITE.overlay.model_copy(update={"size_mb": size_mb})})
    templates = Templates(share("overlays"), site=site, services=[service.name for service in SERVICES])
    rsyslog, rotation = templates.file("rsyslog/rsyslog.conf.j2"), templates.file("rsyslog/logrotate.j2")
    mail = templates.file("postfix/main.cf.j2")
    size = size_mb << 20

    def find(pattern: str, text: str) -> int:
        return int(re.findall(pattern, text)[0])

    messages = find(r"outchannel messages,/var/log/messages,(\d+),", rsyslog)
    rotated = find(r"-gt (\d+)", rotation)
    assert find(r"maxsize (\d+)", rotation) < messages, "rotated before it is full"
    spool = find(r'maxDiskSpace="(\d+)m"', rsyslog) << 20
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;", "\t;"))
    parser.read_string(supervisor_conf(SERVICES, size_mb))
    logs = [parser[name] for name in parser.sections() if name.startswith("program:")]
    services = sum(int(log["stdout_logfile_maxbytes"]) * (1 + int(log["stdout_logfile_backups"])) for log in logs)
    # The file, its copy, one that is being compressed.
    assert 3 * messages + rotated + spool + services < find(r"queue_minfree = (\d+)", mail) * 0.9
    assert find(r"message_size_limit = (\d+)", mail) * 1.5 < size / 4, "postconf(5)"


def test_dependencies_start_first_and_stop_last(conf: configparser.RawConfigParser) -> None:
    priority = {service.name: int(conf[f"program:{service.name}"]["priority"]) for service in SERVICES}
    for service in SERVICES:
        for need in service.needs:
            assert priority[need] < priority[service.name]


def test_supervisor_runs_in_foreground_with_root_only_socket(conf: configparser.RawConfigParser) -> None:
    assert conf["supervisord"]["nodaemon"] == "true"
    assert conf["unix_http_server"]["chmod"] == "0700"
    assert "inet_http_server" not in conf


def test_stop_wait_fits_the_timeout_of_the_host() -> None:
    """The supervisor stops services one after the other: their times add up."""
    assert stop_timeout(SERVICES) > sum(service.stop_wait_s for service in SERVICES)


def test_needs_are_limited_to_selected_services() -> None:
    few = select(CATALOG, ["slurmctld"])
    made: Any = services_json(few, Templates(share("overlays"), site=SITE))["services"]
    assert made["slurmctld"]["needs"] == ["munge"], "no slurmdbd, no postfix"
    made = services_json(SERVICES, Templates(share("overlays"), site=SITE))["services"]
    assert made["slurmctld"]["needs"] == ["munge", "slurmdbd", "postfix"]


@pytest.mark.parametrize("name", sorted(name for name, each in CATALOG.items() if each.container))
def test_every_probe_renders(name: str) -> None:
    made: Any = services_json([CATALOG[name]], Templates(share("overlays"), site=SITE))["services"]
    probe = made[name]["probe"]
    assert probe[probe["kind"]]
    assert probe["timeout_s"] > 0
    assert all(isinstance(word, str) and "{{" not in word for word in made[name]["run"])


def test_nat_probe_pings_the_gateway_or_the_configured_address() -> None:
    def asked(probe: str | None) -> str:
        public = SITE.networks.public.model_copy(update={"probe": probe})
        site = SITE.model_copy(update={"networks": SITE.networks.model_copy(update={"public": public})})
        made: Any = services_json([CATALOG["nat"]], Templates(share("overlays"), site=site))["services"]
        word: str = made["nat"]["probe"]["routed"]
        return word

    assert asked(None) == "172.30.2.1"
    assert asked("192.0.2.200") == "192.0.2.200"


@pytest.mark.parametrize("text", ["{{ nothing }}", "{{ site.nothing }}", "{{ 1 +", "{{ site.__class__.__mro__ }}"])
def test_templates_are_strict_and_sandboxed(text: str) -> None:
    with pytest.raises(ConfigError, match="template"):
        Templates(share("overlays"), site=SITE).text(text)
