"""The programs of the site's engines, on the machine where sms runs."""

from __future__ import annotations

from appliance.config.model import Site
from appliance.host.base import Host
from appliance.plan.endpoint import check_endpoint
from appliance.tools.kubectl import Kubectl
from appliance.tools.nomad import Nomad


def find_kubectl(site: Site, host: Host) -> Kubectl:
    """Return ``kubectl`` on a host for the site's cluster and namespace.

    Raises:
        ConfigError: keys and tokens would be sent unencrypted, or to anybody.
    """
    given = site.engines.kubernetes
    found = Kubectl(
        host, given.namespace or site.cluster, str(given.kubeconfig) if given.kubeconfig else "", given.context or ""
    )
    server = found.server()
    check_endpoint(server.url, server.where, verified=server.verified)
    return found


def find_nomad(site: Site, host: Host) -> Nomad:
    """Return ``nomad`` on a host for the site's servers and namespace.

    Raises:
        ConfigError: keys and tokens would be sent unencrypted, or to anybody.
    """
    given = site.engines.nomad
    found = Nomad(host, given.namespace, given.api or "", str(given.token_file) if given.token_file else "")
    server = found.server()
    check_endpoint(server.url, server.where, verified=server.verified)
    return found
