"""The programs of the site's engines, on the machine where sms runs."""

from __future__ import annotations

from appliance.config.model import Site
from appliance.errors import ConfigError
from appliance.host.base import Host
from appliance.tools.kubectl import Kubectl
from appliance.tools.nomad import Nomad


def find_kubectl(site: Site, host: Host) -> Kubectl:
    """Return ``kubectl`` on a host for the site's cluster and namespace."""
    given = site.engines.kubernetes
    return Kubectl(
        host, given.namespace or site.cluster, str(given.kubeconfig) if given.kubeconfig else "", given.context or ""
    )


def find_nomad(site: Site, host: Host) -> Nomad:
    """Return ``nomad`` on a host for the site's servers and namespace.

    Raises:
        ConfigError: a token would be sent unencrypted.
    """
    given = site.engines.nomad
    if given.token_file and (given.api or "").startswith("http://"):
        raise ConfigError(
            "`engines.nomad.token_file`: the token would be sent unencrypted", hint="set `api` to an https URL"
        )
    return Nomad(host, given.namespace, given.api or "", str(given.token_file) if given.token_file else "")
