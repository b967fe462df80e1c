"""Explores every interleaving of runs of real code, one effect at a time, and prints the shortest way to a violation.

A process is real code of `appliance` whose effects (a read of a lease file, a rename, the start of an instance) are
replaced by calls of ``effect``. It is deterministic: the results of its effects decide which effect is next. A process
is therefore a node of a tree, whose branches are results; the next effect of a node is found once, by running the code
from its beginning with the results on the way to the node, and remembered. States of the model hold nodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

State = tuple[Any, ...]
Programs = dict[str, Callable[..., Hashable]]


class Wait(BaseException):
    """Ends a run of real code at an effect that has no result yet."""


class Failure(NamedTuple):
    """The result of an effect that raises."""

    kind: type[Exception]
    text: str = ""

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.text})"


class Node:
    """A process: what it runs, and the results of its effects so far. Its next effect, or how it has ended.

    ``name`` is empty when it has ended, with ``args`` as its value.
    """

    __slots__ = ("args", "children", "key", "log", "name")

    def __init__(self, key: tuple[Any, ...], log: tuple[Any, ...]) -> None:
        self.key = key
        self.log = log
        self.children: dict[Hashable, Node] = {}
        self.name, self.args = run(key, log)

    def after(self, result: Hashable) -> Node:
        """Return the process after its next effect had this result."""
        found = self.children.get(result)
        if found is None:
            found = self.children[result] = Node(self.key, (*self.log, result))
        return found

    def __repr__(self) -> str:
        return f"{self.key[0]}@{len(self.log)}"


class Replay:
    """One run of real code."""

    def __init__(self, log: tuple[Any, ...]) -> None:
        self.log = log
        self.at = 0
        self.next: tuple[str, Any] | None = None
        self.slept = 0
        """How often it has slept: its clocks have moved on."""


programs: Programs = {}
roots: dict[tuple[Any, ...], Node] = {}
current = Replay(())


def effect(name: str, *args: Hashable) -> Any:
    """Return the result of an effect of the process that runs.

    Raises:
        Exception: the effect has failed.
        Wait: it has no result yet.
    """
    if current.next is not None:
        raise Wait  # an undo step, while the stack of the run is left
    if current.at == len(current.log):
        current.next = name, args
        raise Wait
    result = current.log[current.at]
    current.at += 1
    if isinstance(result, Failure):
        raise result.kind(result.text)
    return result


def run(key: tuple[Any, ...], log: tuple[Any, ...]) -> tuple[str, Any]:
    """Run a program with the results so far; return its next effect, or an empty name and its value."""
    global current
    current = Replay(log)
    try:
        value = programs[key[0]](*key[1:])
    except Wait:
        pass
    except Exception as error:
        raise RuntimeError(f"{key} after {log}") from error
    else:
        assert current.next is None, f"{key} goes on after an effect without a result: {current.next}"
        return "", value
    assert current.next is not None
    return current.next


def root(*key: Hashable) -> Node:
    """Return a process at its beginning."""
    if key not in roots:
        roots[key] = Node(key, ())
    return roots[key]


def forget() -> None:
    """Forget all processes: the real code changes."""
    roots.clear()


@dataclass
class Found:
    """What an exploration found. ``steps`` is the shortest way to the violation."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    complete: bool = True
    violation: str = ""
    steps: list[str] = field(default_factory=list)
    quiet: dict[State, None] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [self.violation, *(f"{number:3}. {step}" for number, step in enumerate(self.steps, 1))]
        return "\n".join(lines)


Successors = Callable[[State], Iterator[tuple[Any, State]]]


def explore(
    initial: State,
    successors: Successors,
    check: Callable[[State], str],
    *,
    limit: int,
    settled: Callable[[State], State | None] = lambda state: None,
) -> Found:
    """Visit states breadth first until one violates ``check``, all have been visited, or ``limit`` have.

    Only hashes of states are kept, of 64 bits: that two of a million are the same has a probability of 1e-7.

    Args:
        check: returns the violation; empty without one.
        settled: returns what is kept of a state in ``Found.quiet``, None for most.
    """
    found = Found()
    seen = {hash(initial)}
    parents, chosen = array("l", [-1]), array("h", [0])
    frontier = [(0, initial)]
    while frontier:
        following: list[tuple[int, State]] = []
        for number, state in frontier:
            for choice, (_, after) in enumerate(successors(state)):
                found.transitions += 1
                key = hash(after)
                if key in seen:
                    continue
                seen.add(key)
                parents.append(number)
                chosen.append(choice)
                if violation := check(after):
                    found.violation = violation
                    found.steps = _trace(initial, successors, parents, chosen)
                    found.states = len(parents)
                    return found
                if (kept := settled(after)) is not None:
                    found.quiet[kept] = None
                following.append((len(parents) - 1, after))
            if len(parents) >= limit:
                found.states, found.complete = len(parents), False
                return found
        found.depth += bool(following)
        frontier = following
    found.states = len(parents)
    return found


def _trace(initial: State, successors: Successors, parents: array[int], chosen: array[int]) -> list[str]:
    """Return the steps to the last state."""
    choices, number = [], len(parents) - 1
    while number > 0:
        choices.append(chosen[number])
        number = parents[number]
    steps, state = [], initial
    for choice in reversed(choices):
        step, state = list(successors(state))[choice]
        steps.append(str(step))
    return steps
