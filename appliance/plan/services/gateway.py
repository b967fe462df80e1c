"""What runs on in the services container while an engine has the other services."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from appliance.catalog import Service


def find_staying(services: Sequence[Service], moved: Collection[str]) -> tuple[Service, ...]:
    """Return the services that the container runs on, in their order; none if it would only serve itself.

    They are those that are not moved and need none that is. A helper without ports and without state, such as munge,
    runs at both places if they need it.

    Args:
        moved: those that the engine has.
    """
    known = {one.name: one for one in services}
    # Files are the engine's to distribute, and a fresh overlay has no certificate to pull them with.
    found = {name for name, one in known.items() if name not in moved and one.role != "files"}
    while True:
        helpers = {name for name in _needed(found, known) - found if _is_helper(known[name])}
        lost = {name for name in found if not _needed({name}, known) <= found | helpers}
        if not lost:
            break
        found -= lost
    if all(known[name].engines.place == "none" for name in found):
        return ()
    return tuple(one for one in services if one.name in found | helpers)


def find_stopping(services: Sequence[Service], moved: Collection[str]) -> Mapping[str, str]:
    """Return the services that do not run while an engine has ``moved``, and why."""
    stays = {one.name for one in find_staying(services, moved)}
    left = (one for one in services if one.engines.place != "none" and one.name not in stays | set(moved))
    why = "the engine cannot run it, and without the moved services it cannot run in the services container"
    return {one.name: one.engines.why or why for one in left}


def _needed(names: set[str], known: Mapping[str, Service]) -> set[str]:
    """Return what these services need, and what that needs; they may be among it."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        one = known[todo.pop()]
        needs = {*one.needs, *one.engines.reads} & known.keys() - found
        found |= needs
        todo += needs
    return found


def _is_helper(service: Service) -> bool:
    """Return whether it may run twice: it is reached by a socket file, and its state may be lost."""
    own = service.engines
    kept = [path for path in service.state if not path.startswith("/etc/") and path not in own.scratch]
    return own.place == "one" and not service.ports and not kept and not own.lease
