"""``/boot/v1/bootscript``: the iPXE script of each node that boots.

Scripts are rendered once after each change. Only the one-time token differs between requests. It is issued only to the
node itself: the peer must have the node's address, and the ARP table one of its MAC addresses at that address.

A script that was requested over HTTPS continues over HTTPS: an iPXE that a site built with its CA, and that begins so,
gets kernel and initramfs from this VM or not at all. The initramfs fetches the root over HTTP, and verifies it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from appliance.provision import bss, names
from appliance.provision.access import identify
from appliance.provision.images import Image
from appliance.provision.model import Boot, Component, Inventory
from appliance.provision.peers import is_node
from appliance.provision.problem import HttpProblem, bad_request, not_found
from appliance.provision.world import World

SCRIPT = "/boot/v1/bootscript"
RETRY_S = 30
DISCOVERY = "discovery"
"""The profile that unknown machines boot if the site sets ``unknown: discover``."""
CHAIN = "chain --replace --autofree"
"""Replaces the current script; the command fails only if the next script cannot be fetched."""
FRESH = {"Cache-Control": "no-store"}


@dataclass(frozen=True)
class Script:
    """A rendered script in two parts. The token is inserted between them, into the kernel's command line."""

    head: str
    tail: str = ""
    node: Component | None = None
    kernel: str = ""
    initrd: str = ""


@dataclass(frozen=True)
class ScriptCache:
    """Scripts of one inventory by node, MAC address and base URL: its size does not depend on the requests."""

    generation: int
    inventory: Inventory
    scripts: dict[tuple[str, str, str], Script] = field(default_factory=dict)


def routes(world: World) -> list[Route]:
    views = Scripts(world)
    return [Route(SCRIPT, views.answer, methods=["GET"]), Route("/boot.ipxe", views.first, methods=["GET"])]


class Scripts:
    """Renders scripts and caches them until something changes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._cache: ScriptCache | None = None
        self._lock = threading.Lock()

    def first(self, request: Request) -> Response:
        """Return the script that DHCP names: it adds the MAC address that iPXE booted from, and retries forever."""
        chain = f"{CHAIN} {self._base(request)}{SCRIPT}?mac=${{netX/mac}}&arch=${{buildarch}}"
        name = self.world.config.hostname
        return _text(
            f"#!ipxe\n:again\n{chain} || goto wait\n:wait\necho {name} has no script yet\nsleep 10\ngoto again\n"
        )

    def _base(self, request: Request) -> str:
        config = self.world.config
        # BSS's JSON form, which other programs read over HTTPS, is what a usual iPXE would boot.
        secure = identify(request).secure and request.query_params.get("json") != "1"
        return config.tls_url if secure else config.plain_url

    async def answer(self, request: Request) -> Response:
        script = self._find(request)
        if script is None:
            script = await run_in_threadpool(self._render, request)
        if request.query_params.get("json") == "1":
            return _as_json(script)
        token = ""
        if script.node is not None and request.method == "GET":
            caller = identify(request)
            if caller.address == script.node.address:
                try:
                    token = await run_in_threadpool(self._token, script.node, caller.address)
                except HttpProblem as problem:
                    # A node booted without a token would never get its files.
                    mac = self.world.inventory().interfaces_of(script.node.id)[0].mac
                    script = retry_script(self._base(request), mac, f"{self.world.config.hostname}: {problem.detail}")
        return _text(f"{script.head}{token}{script.tail}")

    def _find(self, request: Request) -> Script | None:
        cache = self._cache
        if cache is None or cache.generation != self.world.generation:
            return None
        # Keyed by the node found, not by the query string: many queries name the same node.
        node, mac, _ = find_requested(cache.inventory, request)
        return cache.scripts.get((node.id, mac, self._base(request))) if node else None

    def _token(self, node: Component, address: str) -> str:
        if not is_node(self.world.inventory(), node, address, self.world.config.neighbours):
            return ""
        return f" sms.token={self.world.tokens.issue(node.name or node.id)}"

    def _render(self, request: Request) -> Script:
        # Read before the inventory, so that a script of an older one is never cached as newer.
        generation = self.world.generation
        inventory = self.world.inventory()
        node, mac, requested = find_requested(inventory, request)
        if node is None:
            if not mac:
                raise not_found(f"there is no node {requested[:70]}")
            self.world.unknown_machines.note(mac, identify(request).address)
            return unknown_script(self.world, mac, self._base(request))
        base = self._base(request)
        script = render(self.world, inventory, node, mac, base)
        with self._lock:
            if self._cache is None or generation > self._cache.generation:
                self._cache = ScriptCache(generation, inventory)
            if generation == self._cache.generation:
                self._cache.scripts[node.id, mac, base] = script
        return script


def find_requested(inventory: Inventory, request: Request) -> tuple[Component | None, str, str]:
    """Return the requested node, its MAC address if given, and the query value; 400 without a valid query."""
    query = request.query_params
    if twice := [name for name in ("mac", "name", "nid") if len(query.getlist(name)) > 1]:
        raise bad_request(f"{twice[0]}= is given more than once")
    if given := query.get("mac"):
        mac = names.clean_mac(given)
        if not mac:
            raise bad_request(f"{given[:60]!r} is not a MAC address: write it as 02:00:0a:4d:00:97")
        interface = inventory.interfaces.get(mac)
        node = inventory.components.get(interface.component) if interface else None
        return (node if node and node.type == "Node" else None), mac, given
    if given := query.get("name"):
        return inventory.find_node(given), "", given
    if given := query.get("nid"):
        if not given.isascii() or not given.isdigit():
            raise bad_request(f"{given[:60]!r} is not a NID")
        return inventory.by_nid.get(int(given[:12])), "", given
    raise bad_request("a query parameter is required: mac=, name= or nid=")


def unknown_script(world: World, mac: str, base: str) -> Script:
    """Return the script for an unknown machine, according to the site's policy."""
    name = world.config.hostname
    if world.config.unknown == "refuse":
        return refusal_script(f"{name}: no node has the MAC address {mac}", f"sms node add NAME --mac {mac}")
    image = world.images.current(DISCOVERY)
    if image is None:
        return retry_script(base, mac, f"{name}: no node has the MAC address {mac}; waiting until one has")
    boot = _image_boot(world, DISCOVERY, image, "", mac, base)
    return _boot_script(world, Component(DISCOVERY, name=None), mac, boot, base, "sms.discover=1")


def refusal_script(why: str, hint: str) -> Script:
    """Return a script that prints the reason on the console and continues with the next boot device."""
    then = "It boots from its next device. To add it as a node:"
    return Script(f"#!ipxe\necho {why}\necho {then} {hint}\nsleep 10\nexit 1\n")


def retry_script(base: str, mac: str, why: str) -> Script:
    """Return a script that prints the reason and retries later."""
    return Script(f"#!ipxe\n:retry\necho {why}\nsleep {RETRY_S}\n{_chain(base, 'mac=' + mac)} || goto retry\n")


def render(world: World, inventory: Inventory, node: Component, mac: str, base: str) -> Script:
    """Return the script of a node.

    Args:
        base: URL of this VM, plain or secure, for what iPXE fetches.
    """
    who = node.name or node.id
    if not node.enabled:
        return refusal_script(f"{who} is disabled", f"sms node edit {who} --enable")
    entries = [inventory.boot[key] for key in bss.keys_of(inventory, node) if key in inventory.boot]
    kernel = next((each for each in entries if each.kernel), None)
    params = next((each.params for each in entries if each.params), "")
    if kernel is not None:
        own = [inventory.boot.get((what, getattr(kernel, what))) for what in ("kernel", "initrd")]
        params = " ".join([*(each.params for each in own if each and each.params), params]).strip()
        chosen = Boot("host", node.id, kernel.kernel, kernel.initrd, params)
        return _boot_script(world, node, mac, chosen, base, "")
    profile = node.profile or world.images.profile_for(inventory.groups_of(node.id))
    image = world.images.current(profile) if profile else None
    if image is None:
        what = f"no image of its profile {profile}" if profile else "no kernel, and no image is for it"
        return (
            retry_script(base, mac, f"{who} has {what}") if mac else Script(f"#!ipxe\necho {who} has {what}\nexit 1\n")
        )
    boot = _image_boot(world, profile, image, params, mac, base)
    return _boot_script(world, node, mac, boot, base, f"sms.node={who}")


def _image_boot(world: World, profile: str, image: Image, params: str, mac: str, base: str) -> Boot:
    """Return kernel, initrd and parameters of an image of this service."""
    folder = f"/images/{quote(profile)}/{image.digest}"
    arguments = [
        "initrd=initrd.img",
        f"sms.image={world.config.plain_url}{folder}/root.squashfs",
        f"sms.sha256={image.digest}",
        f"sms.server={world.config.tls_url}",
        # With several network cards the system uses the one that the firmware booted from.
        *([f"BOOTIF=01-{mac.replace(':', '-')}"] if mac else []),
        *filter(None, (image.arguments, params)),
    ]
    return Boot("host", "", f"{base}{folder}/vmlinuz", f"{base}{folder}/initrd.img", " ".join(arguments))


def _boot_script(world: World, node: Component, mac: str, boot: Boot, base: str, arguments: str) -> Script:
    arguments = " ".join(filter(None, (boot.params, arguments)))
    query = f"mac={mac}" if mac else f"name={quote(node.name or node.id)}"
    initrd = f"initrd --name initrd.img {boot.initrd} || goto retry\n" if boot.initrd else ""
    tail = (
        f" || goto retry\n{initrd}boot || goto retry\n"
        f":retry\necho Boot failed: retrying {world.config.hostname} in {RETRY_S} s\nsleep {RETRY_S}\n"
        f"imgfree ||\n{_chain(base, query)} || goto retry\n"
    )
    ours = "sms.image=" in arguments
    head = f"#!ipxe\nkernel --name vmlinuz {boot.kernel} {arguments}".rstrip()
    return Script(head, tail, node if ours and node.address else None, boot.kernel, boot.initrd)


def _chain(base: str, query: str) -> str:
    return f"{CHAIN} {base}{SCRIPT}?{query}&retry=1"


def _as_json(script: Script) -> Response:
    """Return BSS's JSON form of a script, without a token."""
    if not script.kernel:
        raise not_found(script.head.splitlines()[1].removeprefix("echo "))
    params = script.head.partition(script.kernel)[2].strip()
    return JSONResponse({"params": params, "kernel": {"path": script.kernel}, "initrd": {"path": script.initrd}})


def _text(text: str) -> Response:
    return PlainTextResponse(text, headers=FRESH)
