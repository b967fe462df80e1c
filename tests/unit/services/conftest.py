"""Programs of the container, imported and run in a folder that is their root."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from appliance.operations.context import Cluster
from tests.places import ROOT
from tests.sites import open_debian
from tests.support.env import fake_env

RUNTIME = ROOT / "definitions" / "runtime"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of the container belong to root")

OWN_PASSWD = "root:x:0:0:root:/root:/bin/sh\nmunge:x:105:105::/:/bin/false\nnobody:x:65534:65534::/:/bin/false\n"
ALICE = "alice:x:2001:2001:Alice:/home/alice:/bin/bash"
OWN_GROUP = "root:x:0:\nmunge:x:105:\nnogroup:x:65534:\n"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a program or module of the container again, without writing into the checkout."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = RUNTIME / name
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_").removesuffix(".py"), str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with the accounts of an image."""
    monkeypatch.setenv("SMS_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(RUNTIME), *sys.path])
    for name in ("smsfiles", "smskept", "smslease", "smslink", "smsrt", "smsserve", "smsstart", "smssync", "smstask"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for folder in ("opt/sms/accounts", "etc/sms/tls", "run/sms", "var/lib/sms"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("etc", "opt/sms/accounts"):
        (tmp_path / folder / "passwd").write_text(OWN_PASSWD)
        (tmp_path / folder / "group").write_text(OWN_GROUP)
    (tmp_path / "etc" / "shadow").write_text("root:*:19000:0:99999:7:::\nmunge:!:19000::::::\nnobody:*:19000::::::\n")
    return tmp_path


@pytest.fixture
def smsfiles(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("smsfiles.py", monkeypatch)


@pytest.fixture
def smsrt(smsfiles: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("smsrt.py", monkeypatch)


def run_program(name: str, root: Path, *argv: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "SMS_ROOT": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, str(RUNTIME / name), *argv], env=environment, capture_output=True, timeout=20, **options
    )


def write_services(root: Path, **services: dict[str, Any]) -> None:
    usual = {"run": ["true"], "user": "root", "groups": [], "capabilities": [], "setup": "", "needs": [], "sync": []}
    full = {name: {**usual, **service} for name, service in services.items()}
    (root / "etc/sms/services.json").write_text(json.dumps({"services": full}))


def probe_of(*argv: str) -> dict[str, Any]:
    return {"kind": "exec", "exec": [list(argv)], "timeout_s": 2}


@pytest.fixture
def cluster() -> Cluster:
    """A site of Debian, in an environment of its own."""
    return replace(open_debian(), env=fake_env())
