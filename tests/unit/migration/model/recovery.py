"""Whether users find a way out of every state: what verbs, one after the other and undisturbed, lead to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from appliance.shared.lease import peek
from tests.unit.migration.model import world as w
from tests.unit.migration.model.engine import State
from tests.unit.migration.model.programs import setting
from tests.unit.migration.model.scenario import Scenario, contents, has_two_uuids
from tests.unit.migration.model.world import host_of

WORDS = ("start", "stop", "move", "failover", "create")
VERBS = tuple(f"{word} {name}" for word in WORDS for name in "ab")
DEPTH = 3
"""How many verbs a way out may have."""


def find_dead_ends(scenario: Scenario, quiet: Iterable[State]) -> list[str]:
    """Return what is wrong with quiet states: guards leave two hosts, or users find no way to one that serves.

    It must serve the newest state, unless there are two lines of them. After each verb, the guards act.
    """
    calm = Scenario("", {}, {}, dict.fromkeys(VERBS, 1), {}, shared=scenario.shared, fenced=scenario.fenced)
    calm.excused = scenario.excused
    found = []
    with setting(shared=scenario.shared, fenced=scenario.fenced):
        for state in quiet:
            after = let_guards_act(calm, renew(calm, state))
            if has_two_uuids(after):
                continue  # every start refuses; `sms overlay identity`, which no verb here is, decides
            if wrong := _guards_leave_two(state, after):
                found.append(f"{wrong}: {state[:7]}")
            elif not _has_way_out(calm, after):
                found.append(f"no way out: {state[:7]}")
    return found


def _guards_leave_two(before: State, after: State) -> str:
    """Return why it is wrong what guards have done: the holder of the newest lease must be the one that is left."""
    held = {}
    for name in "ab":
        instance, data = host_of(before, name)[w.INSTANCE], host_of(before, name)[w.LEASE]
        if not (instance and instance[w.ATTACHED] and host_of(before, name)[w.GUARD]):
            return ""
        generation, holder = peek(data)
        held[name] = (generation, name < "b") if holder == name else (0, False)
    winner = max(held, key=lambda name: held[name])
    left = [name for name in "ab" if host_of(after, name)[w.INSTANCE]]
    return "" if left == [winner] else f"guards leave {left or 'none'} of two, not {winner}"


def renew(calm: Scenario, state: State) -> State:
    """Return a state in which every verb may run once more, and no fault may happen."""
    fields = list(state)
    fields[w.BUDGET] = (1,) * len(VERBS)
    return tuple(fields)


def _has_way_out(calm: Scenario, state: State) -> bool:
    reached = [state]
    for depth in range(DEPTH + 1):
        if any(_is_served(calm, one) for one in reached):
            return True
        if depth < DEPTH:
            reached = list(dict.fromkeys(after for one in reached for after in _after_verbs(calm, one)))
    return False


def _after_verbs(calm: Scenario, state: State) -> Iterator[State]:
    for _, begun in calm.begin_verbs(state):
        after = let_guards_act(calm, finish(calm, begun))
        if not calm.check(after):
            yield renew(calm, after)


def finish(calm: Scenario, state: State) -> State:
    """Return the state after all processes have ended."""
    while True:
        for role in (w.TARGET, w.SOURCE, w.MOVER, w.VERB_A, w.VERB_B, w.GUARD_A, w.GUARD_B):
            node = state[role]
            if node is not None:
                steps = calm.idle_steps(state, role) if w.is_idle(node) else calm.steps(state, role, node)
                if (found := next(steps, None)) is not None:
                    state = found[1]
                    break
        else:
            assert all(state[role] is None for role in range(w.VERB_A, w.GUARD_B + 1)), "processes wait for each other"
            return state


def let_guards_act(calm: Scenario, state: State) -> State:
    """Return the state after the guards have nothing left to do."""
    for _ in range(6):
        before = state
        for choice in range(4):
            turns = list(calm.begin_guards(state))
            if choice < len(turns):
                state = finish(calm, turns[choice][1])
        if state == before:
            break
    return state


def _is_served(calm: Scenario, state: State) -> bool:
    """Whether exactly one host serves, the newest state unless there are two lines of them."""
    serving = []
    for name in "ab":
        instance = host_of(state, name)[w.INSTANCE]
        if instance and instance[w.ATTACHED]:
            found = contents(host_of(state, calm.world.folder(name)), instance)
            serving.append(instance[w.WRITES] and (state[w.NOTES] & w.SPLIT or found == state[w.CURRENT]))
    return len(serving) == 1 and bool(serving[0])
