"""What `sms export` writes for each target, as texts by path."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from appliance.catalog import Base, Service
from appliance.config.model import Site
from appliance.engines import hcl, kubernetes, kustomize, nomad, podman, terraform
from appliance.engines.config import Network, Sources, check_settings, make_deployment, with_files
from appliance.engines.deploy import Bundle, Item
from appliance.engines.model import Deployment, Placement, Workload, secrets_of
from appliance.engines.nomad_json import job_json
from appliance.errors import ConfigError
from appliance.plan.overlay.seed import template_values
from appliance.plan.render import Templates
from appliance.plan.services.controllers import KUBERNETES, NOMAD, find_controllers, other_controllers

NOMAD_HEADER = "# Written by `sms export nomad`. Changes belong into the site file.\n"


@dataclass(frozen=True)
class Input:
    """All that an export is rendered from.

    Attributes:
        image: name of the image where none is set; ``sif``: path of its SIF on admin hosts, empty: not built here.
        keys: public keys of the site, of which one signs images.
        nodes: services of compute nodes, which only engines start.
        programs: those of definitions/runtime that start them, by name.
    """

    site: Site
    services: Sequence[Service]
    base: Base
    sources: Sources
    image: str
    keys: tuple[str, ...] = ()
    nodes: Sequence[Service] = ()
    programs: Mapping[str, str] = field(default_factory=dict)
    sif: str = ""


@dataclass(frozen=True)
class Export:
    """An export: texts by path, where each service runs, and what is to be done besides."""

    files: Mapping[str, str]
    placements: tuple[Placement, ...]
    notes: tuple[str, ...] = ()


def _kubernetes(given: Input) -> Export:
    deployment, options, image = _for_kubernetes(given)
    files = kustomize.kubernetes_files(given.site, deployment, options, image)
    return Export(files, deployment.placements, _kubernetes_notes(given, deployment, options))


def _for_kubernetes(given: Input) -> tuple[Deployment, kubernetes.Options, str]:
    options = kubernetes.read_options(given.site)
    bare = kubernetes.refused(make_deployment(given.site, given.services, given.base), options)
    deployment = _filled(given, bare, kubernetes.network_of(bare, options), KUBERNETES)
    return deployment, options, given.site.engines.kubernetes.image or given.image


def _filled(given: Input, bare: Deployment, network: Network, place: str = "") -> Deployment:
    check_settings(given.site)
    if place in find_controllers(given.site, given.services):
        network = replace(network, others=tuple(other_controllers(given.site, given.services, place)))
    return with_files(bare, given.site, given.services, given.sources, network)


def _kubernetes_notes(given: Input, deployment: Deployment, options: kubernetes.Options) -> tuple[str, ...]:
    secrets = secrets_of(deployment)
    return tuple(f"secret, once: {kustomize.secret_command(given.site, options, each)}" for each in secrets)


def _nomad(given: Input) -> Export:
    deployment, options = _for_nomad(given)
    nodes = _node_jobs(given, deployment, options)
    jobs = {**nomad.service_jobs(deployment, options), **nodes}
    files = {f"{name}.nomad.hcl": NOMAD_HEADER + hcl.write([job]) for name, job in jobs.items()}
    files |= {f"json/{name}.json": job_json(job) for name, job in jobs.items()}
    return Export(files, deployment.placements, nomad.notes(deployment, options, list(nodes.values())))


def _for_nomad(given: Input) -> tuple[Deployment, nomad.Options]:
    options = nomad.read_options(given.site, given.keys, given.sif)
    bare = make_deployment(given.site, given.services, given.base)
    return _filled(given, bare, nomad.network_of(bare, options), NOMAD), options


def _node_jobs(given: Input, deployment: Deployment, options: nomad.Options) -> dict[str, hcl.Block]:
    templates = Templates(given.sources.overlays, **template_values(given.site, given.services))
    return nomad.node_jobs(deployment, options, nomad.Nodes(given.nodes, given.programs, templates))


def make_bundle(engine: str, given: Input) -> Bundle:
    """Return what an engine is given: the objects or jobs of the export for it, with the same content.

    Raises:
        ConfigError: the site cannot be rendered, or there is no such engine.
    """
    if engine not in BUNDLES:
        raise ConfigError(f"services cannot be deployed to {engine}", hint=f"one of {', '.join(BUNDLES)}")
    return BUNDLES[engine](given)


def _bundle_for_kubernetes(given: Input) -> Bundle:
    deployment, options, image = _for_kubernetes(given)
    objects = kustomize.whole_objects(given.site, deployment, options, image)
    items = [Item("namespace", "namespace", kustomize.text_of(objects["namespace"]))]
    items += [
        _item(one, one.name, kustomize.text_of(objects[one.name]), ("namespace", *one.after))
        for one in deployment.workloads
    ]
    namespace = given.site.engines.kubernetes.namespace or given.site.cluster
    controller = deployment.find("controller")
    name = controller.name if controller else ""
    return Bundle("kubernetes", given.site.cluster, namespace, image, name, tuple(items))


def _bundle_for_nomad(given: Input) -> Bundle:
    deployment, options = _for_nomad(given)
    names = {one.name: nomad.job_name(one) for one in deployment.workloads}
    jobs = nomad.service_jobs(deployment, options)
    items = []
    for one in deployment.workloads:
        text = NOMAD_HEADER + hcl.write([jobs[names[one.name]]])
        items.append(_item(one, names[one.name], text, tuple(names[other] for other in one.after)))
    started = [names[one.name] for one in deployment.workloads if one.main.service.role == "controller"]
    controller = started[0] if started else ""
    for name, job in _node_jobs(given, deployment, options).items():  # munge first, then slurmd
        items.append(Item(name, "node", NOMAD_HEADER + hcl.write([job]), (name,), tuple(started)))
        started.append(name)
    return Bundle("nomad", given.site.cluster, options.namespace, options.image, controller, tuple(items))


def _item(one: Workload, name: str, text: str, after: tuple[str, ...]) -> Item:
    units = tuple(unit.name for unit in one.units)
    main = one.main.service
    reload = main.reload if main.role == "controller" else ()
    lease = str(main.engines.lease or "")
    secrets = tuple(secret.name for secret in one.secrets)
    return Item(name, "service", text, units, after, one.stop_s, secrets, bool(one.state), reload, lease)


BUNDLES: Mapping[str, Callable[[Input], Bundle]] = {"kubernetes": _bundle_for_kubernetes, "nomad": _bundle_for_nomad}
"""What is deployed, by engine."""


def _terraform(given: Input) -> Export:
    """Render modules for each engine whose address the site file has."""
    engines = given.site.engines
    used = {"kubernetes": engines.kubernetes.used, "nomad": engines.nomad.address is not None}
    chosen = [name for name, each in used.items() if each]
    if not chosen:
        raise ConfigError(
            "neither `engines.kubernetes.address` nor `engines.nomad.address` is set",
            hint="set that of each engine that Terraform is to use",
        )
    files: dict[str, str] = {}
    notes: list[str] = []
    placements: list[Placement] = []
    for name in chosen:
        made = _terraform_kubernetes(given) if name == "kubernetes" else _terraform_nomad(given)
        files |= {f"{name}/{path}": text for path, text in made.files.items()}
        notes += [f"{name}: {note}" for note in made.notes]
        placements += [replace(each, engine=name) for each in made.placements]
    return Export(files, tuple(placements), tuple(notes))


def _terraform_kubernetes(given: Input) -> Export:
    """Render modules of the objects; not of the namespace, with which Kubernetes would delete the state and the key."""
    deployment, options, image = _for_kubernetes(given)
    objects = kustomize.whole_objects(given.site, deployment, options, image)
    files = {f"files/{name}.yaml": kustomize.text_of(documents) for name, documents in objects.items()}
    after = terraform.order(deployment, {one.name: one.name for one in deployment.workloads})
    modules = {one.name: f"files/{one.name}.yaml" for one in deployment.workloads}
    files |= terraform.terraform_files("kubernetes", modules, after)
    notes = (
        "the namespace, once: kubectl apply -f kubernetes/files/namespace.yaml; it stays, with state and key",
        *_kubernetes_notes(given, deployment, options),
        "the provider reads KUBE_CONFIG_PATH, not KUBECONFIG",
    )
    return Export(files, deployment.placements, notes)


def _terraform_nomad(given: Input) -> Export:
    deployment, options = _for_nomad(given)
    own, nodes = nomad.service_jobs(deployment, options), _node_jobs(given, deployment, options)
    files = {f"files/{name}.nomad.hcl": hcl.write([job]) for name, job in {**own, **nodes}.items()}
    after = terraform.order(deployment, {one.name: nomad.job_name(one) for one in deployment.workloads})
    started: list[str] = [nomad.job_name(one) for one in deployment.workloads if one.main.service.role == "controller"]
    for name in nodes:  # munge first, then slurmd, once there is a controller
        after[name] = list(started)
        started.append(name)
    modules = {name: f"files/{name}.nomad.hcl" for name in (*own, *nodes)}
    files |= terraform.terraform_files("nomad", modules, after)
    return Export(files, deployment.placements, nomad.notes(deployment, options, list(nodes.values())))


def _quadlet(given: Input) -> Export:
    deployment, options = _for_podman(given)
    folder = podman.config_folder(deployment)
    files = podman.quadlet_files(deployment, options)
    made = podman.containers(deployment)
    units = " ".join(f"{one.name}.service" for one in made if not one.once)
    first = " ".join(f"{one.name}.service" for one in made if one.once)
    notes = (
        *_podman_notes(given, deployment),
        f"on {options.host}, in this folder: cp *.container *.volume /etc/containers/systemd/; mkdir -p {folder}; "
        f"cp -r config {folder}/; systemctl daemon-reload",
        f"then: systemctl start {units}",
        f"after another export, these steps again, and: systemctl restart {first}",
    )
    return Export(files, deployment.placements, notes)


def _compose(given: Input) -> Export:
    deployment, options = _for_podman(given)
    return Export(podman.compose_files(deployment, options), deployment.placements, _podman_notes(given, deployment))


def _for_podman(given: Input) -> tuple[Deployment, podman.Options]:
    options = podman.read_options(given.site, given.image)
    bare = make_deployment(given.site, given.services, given.base)
    return _filled(given, bare, podman.network_of(bare, options)), options


def _podman_notes(given: Input, deployment: Deployment) -> tuple[str, ...]:
    notes: list[str] = []
    if not given.site.engines.podman.image:
        # A name is in the archive only: one loaded from the folder is called by its path.
        notes.append("the image, of `sms image oci -o image`: tar -C image -c . | podman load")
    for each in secrets_of(deployment):
        file = shlex.quote(str(getattr(given.site.secrets, each.name) or each.key))
        notes.append(f"secret, once: podman secret create {podman.secret_name(deployment, each)} {file}")
    return tuple(notes)


TARGETS: Mapping[str, Callable[[Input], Export]] = {
    "kubernetes": _kubernetes,
    "nomad": _nomad,
    "terraform": _terraform,
    "quadlet": _quadlet,
    "compose": _compose,
}
"""Renderer by target."""


def render(target: str, given: Input) -> Export:
    """Return the export of a site for a target. The same input gives the same bytes.

    Raises:
        ConfigError: the site cannot be rendered.
    """
    return TARGETS[target](given)
