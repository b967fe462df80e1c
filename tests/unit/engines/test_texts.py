"""HCL and YAML: whatever a text contains, a reader gets that text, and nothing else."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance.engines.hcl import Block, Expression, Raw, quote, write
from appliance.engines.yaml_text import dump

HOSTILE = (
    *(
        'a"b',
        "a\\",
        "${env.HOME}",
        "$${x}",
        "$$${x}",
        "%{ if true }",
        "%%{x}",
        "{{ env `X` }}",
        "\n",
        "a\nb\n",
        "a\n\nb\n",
    ),
    *(
        "END\nx\n",
        "x\nEND\n",
        "  END  \nEND_\n",
        "a: b",
        "- a",
        "#",
        "on",
        "1e3",
        "0o17",
        "0x1f",
        "1_000",
        "12:30:45",
        "~",
    ),
    *(
        "---\na\n",
        "...\na\n",
        "|\n a\n",
        "a \nb\n",
        "\ta\nb\n",
        " a\nb\n",
        "\u2028",
        "\x85",
        "\x00",
        "\x1b[0m\nx\n",
        "é",
        "",
    ),
)
TEXTS = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.lists(st.sampled_from(("${", "%{", "$", "%", "{", "}", '"', "\\", "\n", "END", "a", " ", "{{")), max_size=8).map(
        "".join
    ),
)
VALUES: Any = st.recursive(
    st.one_of(TEXTS, st.integers(-(2**31), 2**31), st.booleans()),
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(TEXTS, below, max_size=3)),
    max_leaves=6,
)


@given(VALUES)
@settings(max_examples=300)
def test_yaml_gives_what_was_written(value: Any) -> None:
    assert list(yaml.safe_load_all(dump([value, "next"]))) == [value, "next"]


@given(TEXTS)
@settings(max_examples=300)
def test_a_quoted_text_is_one_line_without_references(text: str) -> None:
    found = quote(text)
    assert found.isascii()
    assert found.isprintable()
    assert "${" not in found
    assert "%{" not in found
    plain = found[1:-1].replace("\\\\", "")
    assert plain.count('"') == plain.count('\\"')


def job(data: str) -> Block:
    """A job with that text wherever texts can be."""
    template = Block("template", (), {"destination": "local/x", "data": data})
    config = Block("config", (), {"command": data or "x", "args": [data, "b", "c", "d", "e"]})
    task = Block("task", ("t",), {"driver": "raw_exec"}, (config, template, Block("env", (), {"X": data})))
    return Block("job", ("j",), {"type": "service"}, (Block("group", ("g",), {"count": 1}, (task,)),))


def test_references_are_kept_where_they_are_meant() -> None:
    assert quote(Raw('${NOMAD_ALLOC_DIR}/"x"')) == '"${NOMAD_ALLOC_DIR}/\\"x\\""'
    assert write([Block("a", (), {"b": Expression("module.x")})]) == "a {\n  b = module.x\n}\n"


@example("a\nb\n")
@given(TEXTS)
def test_a_file_of_blocks_ends_each_of_them(text: str) -> None:
    """As many lines begin a block as end one, whatever the text: a heredoc ends where it should."""
    lines = write([Block("a", (text,), {"x": text}), Block("b")]).splitlines()
    assert lines[0].startswith("a ")
    assert lines[-1] == "b {}"
    assert lines[-3 if lines[-2] == "" else -2] == "}"
