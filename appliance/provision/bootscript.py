"""``/boot/v1/bootscript``: what iPXE runs on a node, for every node that starts.

Scripts are rendered once after each change; what differs from one request to the next is the one-time token, which only
the node itself gets: the peer has the node's address, and the kernel knows one of its MAC addresses at that address.
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
from appliance.provision.access import who
from appliance.provision.model import Boot, Component, Inventory
from appliance.provision.peers import is_node
from appliance.provision.problem import HttpProblem, bad_request, not_found
from appliance.provision.world import Image, World

SCRIPT = "/boot/v1/bootscript"
RETRY_S = 30
DISCOVERY = "discovery"
"""The profile that machines boot whom nobody knows, where the site says ``unknown: discover``."""
CHAIN = "chain --replace --autofree"
"""The next script takes this one's place, and how it ends counts; only one that does not come is a failure."""
FRESH = {"Cache-Control": "no-store"}


@dataclass(frozen=True)
class Script:
    """A rendered script in two parts: the token goes between them, to the kernel's command line."""

    head: str
    tail: str = ""
    node: Component | None = None
    kernel: str = ""
    initrd: str = ""


@dataclass(frozen=True)
class Kept:
    """Scripts of one inventory, by node and MAC address: never more than it has, however anybody asks."""

    generation: int
    inventory: Inventory
    scripts: dict[tuple[str, str], Script] = field(default_factory=dict)


def routes(world: World) -> list[Route]:
    views = Scripts(world)
    return [Route(SCRIPT, views.answer, methods=["GET"]), Route("/boot.ipxe", views.first, methods=["GET"])]


class Scripts:
    """Scripts, rendered and kept until something changes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._kept: Kept | None = None
        self._lock = threading.Lock()

    def first(self, _request: Request) -> Response:
        """What DHCP names: the network card that asked is known to iPXE alone. It goes on until a script comes."""
        chain = f"{CHAIN} {self.world.config.plain_url}{SCRIPT}?mac=${{netX/mac}}&arch=${{buildarch}}"
        name = self.world.config.hostname
        return _text(
            f"#!ipxe\n:again\n{chain} || goto wait\n:wait\necho {name} gives no script yet\nsleep 10\ngoto again\n"
        )

    async def answer(self, request: Request) -> Response:
        script = self._find(request)
        if script is None:
            script = await run_in_threadpool(self._render, request)
        if request.query_params.get("json") == "1":
            return _as_json(script)
        token = ""
        if script.node is not None and self.world.tokens is not None and request.method == "GET":
            caller = who(request)
            if caller.address == script.node.address:
                try:
                    token = await run_in_threadpool(self._token, script.node, caller.address)
                except HttpProblem as problem:
                    # Without one the node would be up and never get its files.
                    mac = self.world.inventory().interfaces_of(script.node.id)[0].mac
                    script = again(self.world, mac, f"{self.world.config.hostname}: {problem.detail}")
        return _text(f"{script.head}{token}{script.tail}")

    def _find(self, request: Request) -> Script | None:
        kept = self._kept
        if kept is None or kept.generation != self.world.generation:
            return None
        # By what was found, not by what was written: a query can be written in many ways.
        node, mac, _ = find(kept.inventory, request)
        return kept.scripts.get((node.id, mac)) if node else None

    def _token(self, node: Component, address: str) -> str:
        assert self.world.tokens is not None
        if not is_node(self.world.inventory(), node, address, self.world.config.neighbours):
            return ""
        return f" sms.token={self.world.tokens.give(node.name or node.id)}"

    def _render(self, request: Request) -> Script:
        # Taken before the inventory: what is rendered of an older one is never kept as newer.
        generation = self.world.generation
        inventory = self.world.inventory()
        node, mac, asked = find(inventory, request)
        if node is None:
            if not mac:
                raise not_found(f"there is no node {asked[:70]}")
            self.world.strangers.note(mac, who(request).address)
            return unknown(self.world, mac)
        script = render(self.world, inventory, node, mac)
        with self._lock:
            if self._kept is None or generation > self._kept.generation:
                self._kept = Kept(generation, inventory)
            if generation == self._kept.generation:
                self._kept.scripts[node.id, mac] = script
        return script


def find(inventory: Inventory, request: Request) -> tuple[Component | None, str, str]:
    """The node that a request names, the MAC address if it names that, and the words; 400 where it names nobody."""
    query = request.query_params
    if twice := [name for name in ("mac", "name", "nid") if len(query.getlist(name)) > 1]:
        raise bad_request(f"{twice[0]}= is there more than once")
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
            raise bad_request(f"{given[:60]!r} is no NID")
        return inventory.by_nid.get(int(given[:12])), "", given
    raise bad_request("say whose script: mac=, name= or nid=")


def unknown(world: World, mac: str) -> Script:
    """The script for a machine that nobody knows, as the site says."""
    name = world.config.hostname
    if world.config.unknown == "refuse":
        return refusal(
            f"{name}: no node has the MAC address {mac}",
            "It boots from its next device.",
            f"sms node add NAME --mac {mac}",
        )
    image = world.images.current(DISCOVERY) if world.images else None
    if image is None:
        return again(world, mac, f"{name}: no node has the MAC address {mac}; waiting until one has")
    boot = _of_image(world, DISCOVERY, image, "", mac)
    return _boots(world, Component(DISCOVERY, name=None), mac, boot, "sms.discover=1")


def refusal(why: str, then: str, hint: str) -> Script:
    """A script that says why, on the machine's own screen, and lets it go on."""
    return Script(f"#!ipxe\necho {why}\necho {then} To have it as a node: {hint}\nsleep 10\nexit 1\n")


def again(world: World, mac: str, why: str) -> Script:
    """A script that says why, and asks again later."""
    return Script(f"#!ipxe\n:retry\necho {why}\nsleep {RETRY_S}\n{_chain(world, 'mac=' + mac)} || goto retry\n")


def render(world: World, inventory: Inventory, node: Component, mac: str) -> Script:
    """The script of a node."""
    who = node.name or node.id
    if not node.enabled:
        return refusal(f"{who} is disabled", "It boots from its next device.", f"sms node edit {who} --enable")
    entries = [inventory.boot[key] for key in bss.keys_of(inventory, node) if key in inventory.boot]
    kernel = next((each for each in entries if each.kernel), None)
    params = next((each.params for each in entries if each.params), "")
    if kernel is not None:
        own = [inventory.boot.get((what, getattr(kernel, what))) for what in ("kernel", "initrd")]
        params = " ".join([*(each.params for each in own if each and each.params), params]).strip()
        chosen = Boot("host", node.id, kernel.kernel, kernel.initrd, params)
        return _boots(world, node, mac, chosen, "")
    profile = node.profile
    if world.images and not profile:
        profile = world.images.profile_for(inventory.groups_of(node.id))
    image = world.images.current(profile) if world.images and profile else None
    if image is None:
        what = f"no image of its profile {profile}" if profile else "no kernel, and no image is for it"
        return again(world, mac, f"{who} has {what}") if mac else Script(f"#!ipxe\necho {who} has {what}\nexit 1\n")
    return _boots(world, node, mac, _of_image(world, profile, image, params, mac), f"sms.node={who}")


def _of_image(world: World, profile: str, image: Image, params: str, mac: str) -> Boot:
    """Kernel, initrd and parameters of an image of ours."""
    folder = f"{world.config.plain_url}/images/{quote(profile)}/{image.digest}"
    words = [
        "initrd=initrd.img",
        f"sms.image={folder}/root.squashfs",
        f"sms.sha256={image.digest}",
        f"sms.server={world.config.tls_url}",
        # Of several network cards the system takes the one that its firmware took.
        *([f"BOOTIF=01-{mac.replace(':', '-')}"] if mac else []),
        *filter(None, (image.arguments, params)),
    ]
    return Boot("host", "", f"{folder}/vmlinuz", f"{folder}/initrd.img", " ".join(words))


def _boots(world: World, node: Component, mac: str, boot: Boot, words: str) -> Script:
    words = " ".join(filter(None, (boot.params, words)))
    asked = f"mac={mac}" if mac else f"name={quote(node.name or node.id)}"
    initrd = f"initrd --name initrd.img {boot.initrd} || goto retry\n" if boot.initrd else ""
    tail = (
        f" || goto retry\n{initrd}boot || goto retry\n"
        f":retry\necho No boot: asking {world.config.hostname} again in {RETRY_S} s\nsleep {RETRY_S}\n"
        f"imgfree ||\n{_chain(world, asked)} || goto retry\n"
    )
    ours = "sms.image=" in words
    head = f"#!ipxe\nkernel --name vmlinuz {boot.kernel} {words}".rstrip()
    return Script(head, tail, node if ours and node.address else None, boot.kernel, boot.initrd)


def _chain(world: World, asked: str) -> str:
    return f"{CHAIN} {world.config.plain_url}{SCRIPT}?{asked}&retry=1"


def _as_json(script: Script) -> Response:
    """BSS's other form. No token is in it."""
    if not script.kernel:
        raise not_found(script.head.splitlines()[1].removeprefix("echo "))
    params = script.head.partition(script.kernel)[2].strip()
    return JSONResponse({"params": params, "kernel": {"path": script.kernel}, "initrd": {"path": script.initrd}})


def _text(text: str) -> Response:
    return PlainTextResponse(text, headers=FRESH)
