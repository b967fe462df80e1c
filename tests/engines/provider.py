"""A provider of Terraform (plugin protocol 5) with ``nomad_job`` and ``kubernetes_manifest``, for tests.

The official providers are Go programs that no package index has. This one has their schemas, and does what their
sources do in the cases that tests have: of hashicorp/nomad 2.6 what a refresh reads (the source of the last submission,
so that a job changed without one looks unchanged), and of hashicorp/kubernetes 3.2 which fields are compared (those of
the manifest, except labels and annotations). Jobs and objects are those of the real engines.

    python -m tests.engines.provider nomad|kubernetes

Terraform starts it. As those, it reads NOMAD_ADDR and KUBE_CONFIG_PATH.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import re
import ssl
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import msgpack
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tfplugin_proto import tfplugin5_5_pb2 as pb
from tfplugin_proto import tfplugin5_5_pb2_grpc as service

UNKNOWN = msgpack.ExtType(0, b"\0")
"""A value that is known after apply."""
Values = dict[str, Any]


class Failed(Exception):
    """What is reported to the user: summary, and detail."""


# Values of Terraform


def type_of(value: Any) -> Any:
    """The type of a value, as JSON."""
    match value:
        case bool():
            return "bool"
        case str():
            return "string"
        case int() | float():
            return "number"
        case Mapping():
            return ["object", {key: type_of(each) for key, each in value.items()}]
    return ["tuple", [type_of(each) for each in value]]


def without_nulls(value: Any) -> Any:
    """The value without fields that have none."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def encode(values: Values | None, dynamic: tuple[str, ...]) -> Any:
    """Values of a resource; those of a dynamic type with their types."""
    if values is None:
        return pb.DynamicValue(msgpack=msgpack.packb(None))
    packed = dict(values)
    for name in dynamic:
        if packed[name] is not None and packed[name] != UNKNOWN:
            plain = without_nulls(packed[name])
            packed[name] = [json.dumps(type_of(plain)).encode(), plain]
    return pb.DynamicValue(msgpack=msgpack.packb(packed))


def decode(value: Any, dynamic: tuple[str, ...]) -> Values | None:
    """The opposite."""
    found: Values | None = msgpack.unpackb(value.msgpack, strict_map_key=False)
    if found is not None:
        for name in dynamic:
            if isinstance(found[name], list):
                found[name] = found[name][1]
    return found


def attribute(name: str, kind: Any, **flags: Any) -> Any:
    return pb.Schema.Attribute(name=name, type=json.dumps(kind).encode(), **flags)


def nested(name: str, attributes: list[Any], blocks: tuple[Any, ...] = (), *, single: bool = False) -> Any:
    block = pb.Schema.Block(attributes=attributes, block_types=blocks)
    modes = pb.Schema.NestedBlock
    if single:
        return pb.Schema.NestedBlock(type_name=name, block=block, nesting=modes.SINGLE)
    return pb.Schema.NestedBlock(type_name=name, block=block, nesting=modes.LIST, max_items=1)


class Api:
    """JSON over HTTP."""

    def __init__(self, url: str, context: ssl.SSLContext | None = None, token: str = "") -> None:
        self.url, self.context, self.token = url.rstrip("/"), context, token

    def call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Any:
        """What is returned; None where there is no such thing."""
        headers = {"Content-Type": content}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self.context) as reply:
                return json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise Failed(f"{method} {path}: {error.code}", error.read().decode(errors="replace")) from error


def wait_for(done: Callable[[], Any], what: str, timeouts: Any, name: str, default: str) -> Any:
    """What ``done`` returns once that is true, within a timeout of the block ``timeouts``."""
    given = timeouts[0] if isinstance(timeouts, list) and timeouts else timeouts or {}
    text = given.get(name) or default
    factors = {"h": 3600, "m": 60, "s": 1}
    end = time.monotonic() + sum(float(n) * factors[unit] for n, unit in re.findall(r"([0-9.]+)([hms])", text))
    while not (found := done()):
        if time.monotonic() > end:
            raise Failed("Operation timed out", f"waiting for {what}")
        time.sleep(0.5)
    return found


# nomad_job

GROUP = {
    "name": "string",
    "count": "number",
    "meta": ["map", "string"],
    "task": ["list", ["object", {"name": "string", "driver": "string", "meta": ["map", "string"]}]],
}
READ = (
    "name", "namespace", "type", "region", "datacenters", "modify_index", "status", "status_description", "version",
    "submit_time", "create_index", "stop", "priority", "parent_id", "stable", "all_at_once", "task_groups",
)  # fmt: skip
"""Attributes that Nomad sets, and a refresh reads."""
COMPUTED: Values = {
    **dict.fromkeys(READ, "string"),
    **dict.fromkeys(("version", "create_index", "priority"), "number"),
    **dict.fromkeys(("stop", "stable", "all_at_once"), "bool"),
    "datacenters": ["set", "string"],
    "task_groups": ["list", ["object", GROUP]],
    "deployment_id": "string",
    "deployment_status": "string",
    "allocation_ids": ["list", "string"],
}
SETTINGS = {
    "policy_override": None, "preserve_counts": False, "preserve_resources": False, "deregister_on_destroy": True,
    "deregister_on_id_change": True, "detach": True, "json": None, "rerun_if_dead": False,
    "read_allocation_ids": False, "purge_on_destroy": None,
}  # fmt: skip
"""Settings with their defaults; all are boolean."""


class NomadJob:
    """The resource ``nomad_job``."""

    name = "nomad_job"
    dynamic = ()
    # Providers of the older SDK may return other values than they have planned.
    legacy = True

    def __init__(self) -> None:
        self.api = Api(os.environ.get("NOMAD_ADDR", "http://127.0.0.1:4646"))

    def schema(self) -> Any:
        """That of the official one, without attributes that no test reads."""
        attributes = [
            attribute("id", "string", optional=True, computed=True),
            attribute("jobspec", "string", required=True),
            *(attribute(name, "bool", optional=True) for name in SETTINGS),
            *(attribute(name, kind, computed=True) for name, kind in COMPUTED.items()),
        ]
        hcl2 = nested(
            "hcl2",
            [attribute("allow_fs", "bool", optional=True), attribute("vars", ["map", "string"], optional=True)],
        )
        limits = [attribute(name, "string", optional=True) for name in ("create", "update")]
        block = pb.Schema.Block(attributes=attributes, block_types=[hcl2, nested("timeouts", limits, single=True)])
        return pb.Schema(version=0, block=block)

    def parse(self, text: str) -> Values:
        """A job of its HCL."""
        found: Values = self.api.call("POST", "/v1/jobs/parse", {"JobHCL": text, "Canonicalize": False})
        found["Namespace"] = found.get("Namespace") or "default"
        return found

    def path(self, job: str, rest: str = "", **query: Any) -> str:
        return f"/v1/job/{urllib.parse.quote(job, safe='')}{rest}?{urllib.parse.urlencode(query)}"

    def plan(self, prior: Values | None, proposed: Values) -> tuple[Values, list[str]]:
        """The planned values, and attributes whose change needs another resource."""
        planned = {**proposed, **{name: value for name, value in SETTINGS.items() if proposed[name] is None}}
        if proposed["jobspec"] == UNKNOWN or prior is None:
            return {**planned, "id": UNKNOWN, **dict.fromkeys(COMPUTED, UNKNOWN)}, []
        job = self.parse(planned["jobspec"])
        if self.parse(prior["jobspec"]) == job:
            # Only what was submitted is compared, not what Nomad has.
            return {**planned, **{name: prior[name] for name in ("id", "jobspec", *COMPUTED)}}, []
        replaced = [name for name, key in (("namespace", "Namespace"), ("name", "ID")) if prior[name] != job[key]]
        planned |= {name: UNKNOWN for name in COMPUTED if name not in ("deployment_id", "deployment_status")}
        return planned, replaced

    def apply(self, prior: Values | None, planned: Values) -> Values:
        """Register the job, and wait for its deployment unless ``detach``."""
        job = self.parse(planned["jobspec"])
        body: Values = {"Job": job, "Submission": {"Source": planned["jobspec"], "Format": "hcl2"}}
        if prior:
            body |= {"EnforceIndex": True, "JobModifyIndex": int(prior["modify_index"])}
        query = urllib.parse.urlencode({"namespace": job["Namespace"]})
        evaluation = self.api.call("POST", f"/v1/jobs?{query}", body)["EvalID"]
        done: Values = {**planned, "id": job["ID"], "namespace": job["Namespace"]}
        done |= {"deployment_id": "", "deployment_status": "", "allocation_ids": None}
        if not planned["detach"] and evaluation:
            self._wait(evaluation, done, "update" if prior else "create", query)
        read = self.read(done)
        assert read
        return read

    def _wait(self, evaluation: str, done: Values, name: str, query: str) -> None:
        def evaluated() -> Any:
            nonlocal evaluation
            found = self.api.call("GET", f"/v1/evaluation/{evaluation}?{query}")
            if found["Status"] in ("failed", "cancelled"):
                raise Failed("evaluation failed", found.get("StatusDescription", ""))
            if found["Status"] == "complete" and (following := found.get("NextEval")):
                evaluation = following
                return None
            return found if found["Status"] == "complete" else None

        found = wait_for(evaluated, f"the evaluation {evaluation}", done["timeouts"], name, "5m")
        deployment = found.get("DeploymentID")
        if not deployment:
            return

        def deployed() -> bool:
            status = self.api.call("GET", f"/v1/deployment/{deployment}?{query}")
            if status["Status"] in ("failed", "cancelled"):
                raise Failed(f"deployment {status['Status']}", status["StatusDescription"])
            return bool(status["Status"] == "successful")

        wait_for(deployed, f"the deployment {deployment}", done["timeouts"], name, "5m")
        done |= {"deployment_id": deployment, "deployment_status": "successful"}

    def read(self, current: Values) -> Values | None:
        """The job as a refresh reads it. Its source is that of the version's submission, where Nomad has one."""
        space = current["namespace"] or "default"
        job = self.api.call("GET", self.path(current["id"], namespace=space))
        if job is None:
            return None
        groups = [
            {
                "name": group["Name"],
                "count": group["Count"],
                "meta": group["Meta"] or {},
                "task": [{"name": t["Name"], "driver": t["Driver"], "meta": t["Meta"] or {}} for t in group["Tasks"]],
            }
            for group in job["TaskGroups"]
        ]
        read: Values = {
            "name": job["ID"],
            "modify_index": str(job["JobModifyIndex"]),
            "submit_time": str(job["SubmitTime"]),
            "task_groups": groups,
        }
        read |= {
            name: job["".join(part.title() for part in name.split("_"))]
            for name in READ
            if name not in (*read, "parent_id")
        }
        read["parent_id"] = job["ParentID"]
        submitted = self.api.call("GET", self.path(job["ID"], "/submission", namespace=space, version=job["Version"]))
        if submitted and submitted["Source"]:
            read["jobspec"] = submitted["Source"]
        return {**current, **read}

    def delete(self, prior: Values) -> None:
        """Stop the job; its allocations are not waited for."""
        if prior["deregister_on_destroy"]:
            purge = "true" if prior["purge_on_destroy"] else "false"
            self.api.call("DELETE", self.path(prior["id"], namespace=prior["namespace"] or "default", purge=purge))


# kubernetes_manifest

SERVER_SIDE = ("uid", "creationTimestamp", "resourceVersion", "generation", "selfLink", "managedFields")
FREE = (("metadata", "annotations"), ("metadata", "labels"))
"""Fields that others may change (the default of ``computed_fields``)."""


class KubernetesManifest:
    """The resource ``kubernetes_manifest``."""

    name = "kubernetes_manifest"
    dynamic = ("manifest", "object")
    legacy = False

    def __init__(self) -> None:
        self._api: Api | None = None
        self._kinds: dict[str, dict[str, tuple[str, bool]]] = {}

    @property
    def api(self) -> Api:
        """Of the API server; the certificate of KUBE_CONFIG_PATH is needed only now."""
        if self._api is None:
            document = yaml.safe_load(Path(os.environ["KUBE_CONFIG_PATH"]).read_text())
            cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
            authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
            context = ssl.create_default_context(cadata=authority)
            with tempfile.NamedTemporaryFile() as pair:
                pair.write(base64.b64decode(user["client-certificate-data"]) + b"\n")
                pair.write(base64.b64decode(user["client-key-data"]))
                pair.flush()
                context.load_cert_chain(pair.name)
            self._api = Api(cluster["server"], context)
        return self._api

    def schema(self) -> Any:
        """That of the official one."""
        text, fields = "string", ["map", "string"]
        attributes = [
            attribute("manifest", "dynamic", required=True),
            attribute("object", "dynamic", optional=True, computed=True),
            attribute("wait_for", ["object", {"fields": fields}], optional=True),
            attribute("computed_fields", ["list", text], optional=True),
        ]
        condition = nested("condition", [attribute(name, text, optional=True) for name in ("status", "type")])
        condition.max_items = 0
        own = [attribute("rollout", "bool", optional=True), attribute("fields", fields, optional=True)]
        manager = [attribute("name", text, optional=True), attribute("force_conflicts", "bool", optional=True)]
        limits = [attribute(name, text, optional=True) for name in ("create", "update", "delete")]
        blocks = [nested("timeouts", limits), nested("field_manager", manager), nested("wait", own, (condition,))]
        return pb.Schema(version=1, block=pb.Schema.Block(attributes=attributes, block_types=blocks))

    def path(self, one: Values) -> str:
        """The object's path in the API; its kind has to be there."""
        version = one["apiVersion"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if version not in self._kinds:
            listed = (self.api.call("GET", root) or {"resources": []})["resources"]
            self._kinds[version] = {
                each["kind"]: (each["name"], each["namespaced"]) for each in listed if "/" not in each["name"]
            }
        if one["kind"] not in self._kinds[version]:
            raise Failed("API did not recognize GroupVersionKind from manifest", f"{version} {one['kind']}")
        plural, namespaced = self._kinds[version][one["kind"]]
        space = f"/namespaces/{one['metadata'].get('namespace', 'default')}" if namespaced else ""
        return f"{root}{space}/{plural}/{one['metadata']['name']}"

    def plan(self, prior: Values | None, proposed: Values) -> tuple[Values, list[str]]:
        """A change is planned where the object differs from the manifest."""
        wanted = proposed["manifest"]
        self.path(wanted)
        if prior is None:
            return {**proposed, "object": UNKNOWN}, []
        before, now = prior["manifest"], prior["object"]
        changed = [path for path, _ in differences(wanted, now) if path[:2] not in FREE]
        changed += [path for path, _ in differences(wanted, before)] + [path for path, _ in differences(before, wanted)]
        if not changed:
            return {**proposed, "object": now}, []
        identity = (("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"))
        replaced = ["manifest"] if any(path in identity for path in changed) else []
        return {**proposed, "object": UNKNOWN}, replaced

    def apply(self, prior: Values | None, planned: Values) -> Values:
        """Apply on the server, with the field manager Terraform; wait if ``wait`` says so."""
        wanted = planned["manifest"]
        path = self.path(wanted)
        if prior is None and self.api.call("GET", path):
            raise Failed("Cannot create resource that already exists", path)
        manager = (planned["field_manager"] or [{}])[0]
        query = {
            "fieldManager": manager.get("name") or "Terraform",
            "force": str(bool(manager.get("force_conflicts"))).lower(),
        }
        live = self.api.call("PATCH", f"{path}?{urllib.parse.urlencode(query)}", wanted, "application/apply-patch+yaml")
        if live is None:
            raise Failed("not found", f"the namespace of {path}")
        for wait in planned["wait"] or ():
            if wait["rollout"]:
                done = lambda: rolled_out(self.api.call("GET", path))  # noqa: E731
                wait_for(
                    done, f"{path}: rollout to complete", planned["timeouts"], "update" if prior else "create", "10m"
                )
        for where, value in differences(wanted, live):
            if where[:2] not in FREE:
                # Terraform's core compares an official provider's plan with its result, and fails.
                text = f".object.{'.'.join(map(str, where))}: was {value!r}"
                raise Failed("Provider produced inconsistent result after apply", text)
        return {**planned, "object": own_fields(live)}

    def read(self, current: Values) -> Values | None:
        """The object as the server has it."""
        live = self.api.call("GET", self.path(current["manifest"]))
        return None if live is None else {**current, "object": own_fields(live)}

    def delete(self, prior: Values) -> None:
        """Delete the object, and wait until it is gone."""
        path = self.path(prior["manifest"])
        self.api.call("DELETE", path)
        wait_for(lambda: self.api.call("GET", path) is None, f"{path} is gone", prior["timeouts"], "delete", "10m")


def own_fields(live: Values) -> Values:
    """An object without what the server alone sets."""
    metadata = {key: value for key, value in live["metadata"].items() if key not in SERVER_SIDE}
    return {**{key: value for key, value in live.items() if key != "status"}, "metadata": metadata}


def differences(
    wanted: Any, found: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """What differs of the fields that are wanted: where, and the value there."""
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            yield path, wanted
            return
        for key, value in wanted.items():
            yield from differences(value, found.get(key), (*path, key))
    elif isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            yield path, wanted
            return
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from differences(one, other, (*path, number))
    elif wanted is not None and wanted != found:
        yield path, wanted


def rolled_out(live: Values) -> bool:
    """As `kubectl rollout status` decides of a StatefulSet."""
    status, wanted = live.get("status", {}), live["spec"].get("replicas", 1)
    return bool(
        status.get("observedGeneration", 0) >= live["metadata"]["generation"]
        and status.get("readyReplicas", 0) >= wanted
        and status.get("updatedReplicas", 0) >= wanted
    )


# The plugin


class Provider(service.ProviderServicer):
    """The service that Terraform calls."""

    def __init__(self, resource: NomadJob | KubernetesManifest) -> None:
        self.resource = resource

    def GetMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetMetadata.Response(resources=[pb.GetMetadata.ResourceMetadata(type_name=self.resource.name)])

    def GetSchema(self, request: Any, context: Any) -> Any:  # noqa: N802
        schemas = {self.resource.name: self.resource.schema()}
        empty = pb.Schema(block=pb.Schema.Block())
        return pb.GetProviderSchema.Response(provider=empty, provider_meta=empty, resource_schemas=schemas)

    def PrepareProviderConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.PrepareProviderConfig.Response(prepared_config=request.config)

    def ValidateResourceTypeConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ValidateResourceTypeConfig.Response()

    def Configure(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.Configure.Response()

    def UpgradeResourceState(self, request: Any, context: Any) -> Any:  # noqa: N802
        values = json.loads(request.raw_state.json)
        for name in self.resource.dynamic:
            values[name] = values[name] and values[name]["value"]
        return pb.UpgradeResourceState.Response(upgraded_state=encode(values, self.resource.dynamic))

    def ReadResource(self, request: Any, context: Any) -> Any:  # noqa: N802
        with reported(pb.ReadResource.Response()) as reply:
            current = decode(request.current_state, self.resource.dynamic)
            assert current
            reply.new_state.CopyFrom(encode(self.resource.read(current), self.resource.dynamic))
        return reply

    def PlanResourceChange(self, request: Any, context: Any) -> Any:  # noqa: N802
        reply = pb.PlanResourceChange.Response(legacy_type_system=self.resource.legacy)
        with reported(reply):
            dynamic = self.resource.dynamic
            prior, proposed = decode(request.prior_state, dynamic), decode(request.proposed_new_state, dynamic)
            if proposed is None:
                reply.planned_state.CopyFrom(request.proposed_new_state)
            else:
                planned, replaced = self.resource.plan(prior, proposed)
                reply.planned_state.CopyFrom(encode(planned, dynamic))
                for name in replaced:
                    reply.requires_replace.add(steps=[pb.AttributePath.Step(attribute_name=name)])
        return reply

    def ApplyResourceChange(self, request: Any, context: Any) -> Any:  # noqa: N802
        reply = pb.ApplyResourceChange.Response(legacy_type_system=self.resource.legacy, new_state=request.prior_state)
        with reported(reply):
            dynamic = self.resource.dynamic
            prior, planned = decode(request.prior_state, dynamic), decode(request.planned_state, dynamic)
            if planned is None:
                assert prior
                self.resource.delete(prior)
                reply.new_state.CopyFrom(encode(None, dynamic))
            else:
                reply.new_state.CopyFrom(encode(self.resource.apply(prior, planned), dynamic))
        return reply

    def Stop(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.Stop.Response()


class reported:  # noqa: N801
    """A context whose exception becomes a diagnostic of the reply."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    def __enter__(self) -> Any:
        return self.reply

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Failed):
            self.reply.diagnostics.add(severity=1, summary=error.args[0], detail=error.args[1])
        elif error is not None:
            self.reply.diagnostics.add(severity=1, summary=repr(error), detail=traceback.format_exc())
        return error is not None


def certificate() -> tuple[bytes, bytes, bytes]:
    """Key and certificate in PEM for this process alone, and the certificate in DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return pem, made.public_bytes(serialization.Encoding.PEM), made.public_bytes(serialization.Encoding.DER)


def main() -> int:
    """Serve until Terraform asks for the end."""
    resource = NomadJob() if sys.argv[1] == "nomad" else KubernetesManifest()
    ended = threading.Event()

    def end(request: bytes, context: Any) -> bytes:
        ended.set()
        return b""

    server = grpc.server(ThreadPoolExecutor(10))
    service.add_ProviderServicer_to_server(Provider(resource), server)  # type: ignore[no-untyped-call]
    shutdown = {"Shutdown": grpc.unary_unary_rpc_method_handler(end)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("plugin.GRPCController", shutdown)])
    key, certificate_pem, der = certificate()
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/socket"
        server.add_secure_port(f"unix:{socket}", grpc.ssl_server_credentials([(key, certificate_pem)]))
        server.start()
        print(f"1|5|unix|{socket}|grpc|{base64.b64encode(der).decode().rstrip('=')}", flush=True)
        with suppress(KeyboardInterrupt):
            ended.wait()
        server.stop(1).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
