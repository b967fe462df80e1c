"""A dump of another machine: what programs write for Slurm's database is read, and nothing else of it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.host.local import Local
from appliance.operations.engines.owners import Command
from appliance.operations.engines.transfer import transfer
from appliance.plan.adopt import dump
from appliance.plan.adopt.dump import BEGIN, END, DumpError, DumpFilter
from tests.dumps import GOOD, HOSTILE, TABLE, make_dump

STATEMENT = re.compile(
    rb"SET (?:NAMES utf8mb4|TIME_ZONE=''|SQL_MODE=''|UNIQUE_CHECKS=0|FOREIGN_KEY_CHECKS=0)"
    rb"|CREATE TABLE `[\w.$-]+` \([\w`'\s(),.$-]+\) ENGINE=InnoDB[\w =']*"
    rb"|INSERT INTO `[\w.$-]+` (?:\(`[\w`, $]+\) )?VALUES ?\n?\([\w'\s(),.+-]+\)"
)
"""All that a client may get, without what is in texts."""
WORD = re.compile(rb"[A-Za-z_]\w*")


def run(text: bytes, size: int = 1 << 20) -> bytes:
    """What is written of a dump that arrives in blocks of this size."""
    through = DumpFilter("sms-old")
    return b"".join([*(through.feed(text[at : at + size]) for at in range(0, len(text), size)), through.end()])


def split(text: bytes) -> Iterator[bytes]:
    """The statements that a client finds, by its own rules, each without what is in its texts.

    A byte after the other, as client/mysql.cc does: quotes of three kinds, backslashes, comments, `;`, and at the
    beginning of a statement the commands of the client.
    """
    found, quote, at = bytearray(), 0, 0
    while at < len(text):
        byte = text[at]
        if quote:
            if byte == 0x5C and quote != 0x60:
                at += 1
            elif byte == quote:
                quote = 0
                found.append(byte)
        elif byte in b"'\"`":
            quote = byte
            found.append(byte)
        elif byte == 0x3B:
            yield bytes(found).strip()
            found.clear()
        else:
            assert byte != 0x5C, "a command of the client"
            found.append(byte)
        if quote == 0x60 and text[at] != 0x60:
            found.append(text[at])
        at += 1
    assert not quote and not found.strip()


def check(written: bytes) -> None:
    for statement in split(written):
        assert STATEMENT.fullmatch(statement), statement
        if statement.startswith(b"INSERT"):
            values = re.sub(rb"\b0x[0-9A-F]+|[0-9]e", b"0", statement.partition(b"VALUES")[2])
            assert set(WORD.findall(values)) <= {b"NULL", b"_binary"}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("size", [1 << 20, 61, 1])
def test_what_programs_write_is_read(name: str, size: int) -> None:
    text, tables, rows = GOOD[name]
    written = run(text, size)
    check(written)
    assert written.startswith(BEGIN) and written.endswith(END)
    body = written[len(BEGIN) : -len(END)]
    assert re.findall(rb"^CREATE TABLE `(\S+)` \(", body, re.M) == tables
    assert body.count(b"INSERT INTO") == rows
    assert b"sandbox" not in written


def test_rows_are_written_as_they_are() -> None:
    row = rb"(1,'a\'\"\\;-- /* \n\r\0\Z',NULL,-2.5e-20,0xFF00,_binary '" + bytes(range(128, 256)) + rb"','it''s')"
    text = make_dump(TABLE, b"INSERT INTO `acct_table` VALUES " + row + b",\n" + row + b";\n")
    for size in (1 << 20, 7, 1):
        assert b"INSERT INTO `acct_table` VALUES " + row + b",\n" + row + b";\n" in run(text, size)


def test_the_line_that_older_clients_stop_at_is_left_out() -> None:
    for line in (b"/*M!999999\\- enable the sandbox mode */ \n", b"/*!999999\\- enable the sandbox mode */\n"):
        assert run(line + make_dump(TABLE)) == run(make_dump(TABLE))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("utf8mb3_general_ci", "utf8_general_ci"),
        ("utf8mb4_0900_ai_ci", "utf8mb4_unicode_520_ci"),
        ("utf8mb4_0900_as_cs", "utf8mb4_bin"),
        ("utf8mb3_uca1400_ai_ci", "utf8_unicode_520_ci"),
        ("utf8mb4_uca1400_swedish_ai_ci", "utf8mb4_unicode_520_ci"),
        ("latin1_swedish_ci", "latin1_swedish_ci"),
    ],
)
def test_collations_that_only_one_server_has(there: str, here: str) -> None:
    text = TABLE.replace(b"CHARSET=latin1", b"CHARSET=utf8mb3 COLLATE=" + there.encode())
    assert f"DEFAULT CHARSET=utf8 COLLATE={here};".encode() in run(make_dump(text))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("size", [1 << 20, 3])
def test_anything_else_ends_the_load_with_its_line(name: str, size: int) -> None:
    """After a table and a row, in line 8."""
    begin = make_dump(TABLE, b"INSERT INTO `acct_table` VALUES (1,'a');\n", end=False)
    line = begin.count(b"\n") + 1
    text = begin + HOSTILE[name] + b"\n-- Dump completed\n"
    with pytest.raises(DumpError) as error:
        run(text, size)
    found = re.match(r"line ([0-9]+) of the dump of sms-old ", error.value.message)
    assert found and line <= int(found[1]) <= line + HOSTILE[name].count(b"\n") + 1, error.value.message
    assert "\x1b" not in error.value.message


@pytest.mark.parametrize("text", [b"", b"-- MariaDB dump\n", make_dump(TABLE)[:-20], make_dump(TABLE)[:200]])
def test_a_dump_without_its_end_is_not_loaded(text: bytes) -> None:
    with pytest.raises(DumpError, match="of the dump of sms-old"):
        run(text)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text without an end, a statement without one, rows without one; each is read at most twice."""
    monkeypatch.setattr(dump, "MOST_BYTES", 1 << 20)
    begin = make_dump(TABLE, end=False)
    for head, block in (
        (b"INSERT INTO `acct_table` VALUES (1,'", b"x" * 4096),
        (b"INSERT INTO `acct_table` VALUES (1,'a')", b",(1,'b')" * 512),
        (b"INSERT INTO `acct_table` VALUES (1,0x", b"A" * 4096),
        (b"LOCK TABLES ", b"x " * 2048),
        (b"-- ", b"x" * 4096),
        (b"CREATE TABLE `x` (`a` int COMMENT '", b"x" * 4096),
    ):
        through, fed = DumpFilter("sms-old"), 0
        with pytest.raises(DumpError):
            through.feed(begin + head)
            while fed < 4 << 20:
                through.feed(block)
                fed += len(block)
        assert fed <= 2 << 20, head


TRICKS = (
    *(b"'", b"`", b'"', b"\\", b";", b"\n", b",", b"(", b")", b" ", b"--", b"-- ", b"#", b"/*", b"*/", b"@@", b"''"),
    *(b"/*!40101 ", b"/*M!100100 ", b"\0", b"\r", b"\x1a", b"\xbf", b"\\'", b"\xe0\xa0", b"\\!", b"\\. x\n", b"a"),
    *(
        b"DELIMITER",
        b"SELECT",
        b"1",
        b"-1.5e3",
        b"NULL",
        b"_binary ",
        b"0xFF",
        b"VALUES ",
        b"system id",
        b"\nsource x\n",
    ),
    *(b"SET NAMES gbk", b"SET NAMES utf8mb4", b"CREATE TABLE `t` (`a` int) ENGINE=InnoDB"),
    *(b"INSERT INTO `acct_table` VALUES (1,'", b"INSERT INTO `acct_table` VALUES (1,'a');\n"),
    b"DROP TABLE IF EXISTS `acct_table`;\n",
)
PIECES = st.sampled_from(TRICKS)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=14).map(b"".join), st.integers(1, 40))
def test_whatever_is_written_is_only_tables_and_rows(middle: bytes, size: int) -> None:
    """By the rules of a client, whatever the dump has; the same for blocks of any size."""
    text = make_dump(TABLE, middle)
    through, written = DumpFilter("sms-old"), b""
    try:
        for at in range(0, len(text), size):
            written += through.feed(text[at : at + size])
        written += through.end()
    except DumpError:
        # What was written before is the beginning of such statements.
        complete = re.sub(rb"(?:'(?:[^'\\]|\\.|'')*'|[^';])*\Z", b"", written, flags=re.DOTALL)
        check(complete)
        with pytest.raises(DumpError):
            run(text)
        return
    check(written)
    assert written == run(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(), st.binary(max_size=40), st.floats(allow_nan=False, allow_infinity=False))))
def test_any_values_that_a_program_writes_pass(rows: list[tuple[int, bytes, float]]) -> None:
    escapes = {0: b"\\0", 10: b"\\n", 13: b"\\r", 26: b"\\Z", 34: b'\\"', 39: b"\\'", 92: b"\\\\"}
    values = [
        b"(%d,'%b',%b)"
        % (number, b"".join(escapes.get(one, bytes([one])) for one in text), repr(value).replace("e", "e").encode())
        for number, text, value in rows
    ]
    insert = b"INSERT INTO `acct_table` VALUES\n" + b",\n".join(values) + b";\n" if values else b""
    written = run(make_dump(TABLE, insert), 50)
    check(written)
    for one in values:
        assert one in written


def test_it_is_between_both_commands(tmp_path: Path) -> None:
    """The one that writes gets what the filter wrote; it is ended where that refuses a line, and gets nothing of it."""
    text = make_dump(TABLE, b"INSERT INTO `acct_table` VALUES (1,'a');\n")
    (tmp_path / "dump").write_bytes(text)
    reader = Command(Local("sms-old"), ("cat", str(tmp_path / "dump")))
    writer = Command(Local("host-a"), ("sh", "-c", 'cat >"$0" && touch "$0.end"', str(tmp_path / "copy")))
    moved: list[int] = []
    transfer(reader, writer, moved.append, DumpFilter("sms-old"))
    assert (tmp_path / "copy").read_bytes() == run(text) and moved[-1] == len(text)
    (tmp_path / "copy.end").unlink()
    (tmp_path / "dump").write_bytes(text.replace(b"\nINSERT", b"\n\\! touch /tmp/x\nINSERT"))
    with pytest.raises(DumpError, match=r"^line 8 of the dump of sms-old .*touch /tmp/x"):
        transfer(reader, writer, moved.append, DumpFilter("sms-old"))
    assert not (tmp_path / "copy.end").exists() and b"touch" not in (tmp_path / "copy").read_bytes()
