"""Slurm host lists: their expansion, and that hostile ones are rejected early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.config.hostlist import MAX_HOSTS, HostListError, expand

GOOD = {
    "a": ["a"],
    "a,b": ["a", "b"],
    "a[1-3,5]b": ["a1b", "a2b", "a3b", "a5b"],
    "n[008-011]": ["n008", "n009", "n010", "n011"],
    "n[8-11]": ["n8", "n9", "n10", "n11"],
    "n[01,2,099]": ["n01", "n2", "n099"],
    "r[1-2]n[1-2]": ["r1n1", "r1n2", "r2n1", "r2n2"],
    "10.0.1.[1-2],login-1": ["10.0.1.1", "10.0.1.2", "login-1"],
    "[1-2]": ["1", "2"],
    "a,a": ["a", "a"],
    "n[000-000]": ["n000"],
}

BAD = {
    "": "has an empty item between two commas",
    "a,": "has an empty item between two commas",
    ",a": "has an empty item between two commas",
    "a[1": "has unbalanced brackets",
    "a1]": "has unbalanced brackets",
    "a[[1]]": "has unbalanced brackets",
    "a[]": "[] is not a list of numbers and ranges",
    "a[1,]": "[1,] is not a list of numbers and ranges",
    "a[1-]": "[1-] is not a list of numbers and ranges",
    "a[x-y]": "[x-y] is not a list of numbers and ranges",
    "a[1-2-3]": "[1-2-3] is not a list of numbers and ranges",
    "a[5-3]": "the range 5-3 is descending",
    "a[0-65533]": "expands to more than 65533 names",
    "a[0-999999999]": "expands to more than 65533 names",
    "a[1-9999999999]": "[1-9999999999] is not a list of numbers and ranges",
    "a[1-300]b[1-300]": "expands to more than 65533 names",
    "[0-9]" * 40: "expands to more than 65533 names",
    "a[1-65533],b": "expands to more than 65533 names",
}


@pytest.mark.parametrize(("text", "hosts"), GOOD.items())
def test_expands_to(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(("text", "message"), BAD.items())
def test_refused(text: str, message: str) -> None:
    with pytest.raises(HostListError) as caught:
        expand(text)
    assert str(caught.value) == message


def test_as_many_as_slurm_accepts() -> None:
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


_literals = st.text("abz-.", min_size=1, max_size=4)
_ranges = st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(1, 4))


@settings(deadline=None)
@given(st.lists(st.tuples(_literals, st.lists(_ranges, min_size=1, max_size=3)), min_size=1, max_size=3))
def test_every_number_of_every_range(items: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    texts, names = [], []
    for literal, ranges in items:
        written = [f"{low:0{width}d}-{low + more}" for low, more, width in ranges]
        texts.append(f"{literal}[{','.join(written)}]")
        names += [f"{literal}{low + step:0{width}d}" for low, more, width in ranges for step in range(more + 1)]
    assert expand(",".join(texts)) == names


@settings(deadline=None)
@given(st.text("an[]-,019", max_size=30))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except HostListError:
        return
    assert 1 <= len(hosts) <= MAX_HOSTS
    assert not any(set(host) & set("[],") for host in hosts)


@pytest.mark.parametrize("text", ["n" * 300, "n[1-2]" + "[1]" * 300, "n[1-65533]" * 3, "a" * 200 + "[1-9]" + "b" * 60])
def test_long_names_cost_no_memory(text: str) -> None:
    with pytest.raises(HostListError):
        expand(text)
