"""Reads an SQL dump of another machine, and writes what it contains as SQL of our own. Pure.

What mariadb-dump and mysqldump write for one schema is understood: tables and their rows, of which only literal values.
Nothing else of a dump reaches a client or a server: session variables, locks and comments are checked and left out.
The SQL that is written has one statement of a fixed form after the other, in UTF-8 and with backslashes as escapes,
whatever the dump says: no client and no server finds another end of a string in it than this reader did.
"""

from __future__ import annotations

import re
from typing import NoReturn

from appliance.errors import SmsError
from appliance.plan.adopt.dump_statement import (
    NAME,
    TABLE_NAME,
    TEXT,
    WRITTEN,
    Broken,
    Create,
    Incomplete,
    judge,
    read_tokens,
)
from appliance.text import printable

BEGIN = (
    b"SET NAMES utf8mb4;\nSET TIME_ZONE='+00:00';\nSET SQL_MODE='NO_AUTO_VALUE_ON_ZERO';\n"
    b"SET UNIQUE_CHECKS=0;\nSET FOREIGN_KEY_CHECKS=0;\n"
)
"""As the dump has set it when it read: what is in the dump itself is not used."""
COMPLETE = b"sms_complete"
"""An empty table, created after all others: without it the dump did not arrive as a whole (database-load)."""
END = b"CREATE TABLE `%b` (`a` int) ENGINE=InnoDB;\n" % COMPLETE
MOST_BYTES = 64 << 20
"""Of a statement. Programs that dump begin another one at 1 MiB; a row has what it has, such as a job's script."""
LINE_BYTES = 1 << 16
"""Of a comment."""
MOST_TABLES = 20_000
SANDBOX = re.compile(rb"/\*M?!999999\\- enable the sandbox mode \*/")
"""The first line of clients since 2024: older ones stop at it."""
VALUE = rb"(?:0x[0-9A-F]++|-?[0-9]++(?:\.[0-9]++)?(?:e[+-]?[0-9]{1,3})?|NULL|(?:_binary )?" + TEXT + rb")"
ROW = re.compile(rb"\n?\(" + VALUE + rb"(?:," + VALUE + rb")*+\)(?=[,;])")
ROW_BEGUN = re.compile(rb"\n?(?:\((?:" + VALUE + rb",)*+)?")
CUT_VALUE = re.compile(rb"(?:(?:_binary )?'" + WRITTEN + rb"(?:\\|'\)?)?|0x[0-9A-F]*\)?)\Z")
"""A long value of which the next block may have the end."""
SHORT = 128
"""Bytes of any other value."""
INSERT = re.compile(
    rb"INSERT INTO `(" + TABLE_NAME + rb")` (\(`" + NAME + rb"`(?:, ?`" + NAME + rb"`)*+\) )?VALUES ?(?=[\n(])"
)
LAST_LINE = b"-- Dump completed"


class DumpError(SmsError):
    """A dump has what no program writes for one schema, or it does not end."""


class DumpFilter:
    """Reads a dump in blocks. Memory is bounded by ``MOST_BYTES``, and by a row where that is all there is."""

    def __init__(self, source: str) -> None:
        """``source``: where the dump is from, for messages."""
        self.source = source
        self._pieces: list[bytes] = [b""]
        self._held = 0
        self._wanted = 0
        self._line = 1
        self._tables: set[bytes] = set()
        self._begun = self._complete = False
        self._rows = -1  # bytes of the INSERT that is being read; -1 outside one

    def feed(self, block: bytes) -> bytes:
        """Add a block; return the SQL of what is complete.

        Raises:
            DumpError: a statement is of another form; the message has the number of its line.
        """
        self._pieces.append(block)
        self._held += len(block)
        return self._read(final=False) if self._held >= self._wanted else b""

    def end(self) -> bytes:
        """Return the last of the SQL.

        Raises:
            DumpError: as ``feed``; or the end of the dump is missing.
        """
        written = self._read(final=True)
        if not self._complete:
            self._refuse(b"", 0, "ends before its last line")
        return written + END

    def _read(self, *, final: bool) -> bytes:
        data, at, written = b"".join(self._pieces), 0, list[bytes]()
        if not self._begun:
            self._begun = True
            written.append(BEGIN)
        try:
            while True:
                done = self._read_rows(data, at, written) if self._rows >= 0 else self._read_one(data, at, written)
                self._line += data.count(b"\n", at, done)
                at = done
        except Incomplete as error:
            if final and data[at:].strip(b" \n"):
                self._refuse(data, error.at, "has no end")
            if self._rows >= 0:  # the rows that are complete are written
                self._line += data.count(b"\n", at, error.begin)
                at = error.begin
        except Broken as error:
            self._refuse(data, error.at, error.why, since=at)
        rest = data[at:]
        if max(self._rows, 0) + len(rest) > MOST_BYTES:
            self._refuse(rest, 0, f"has more than {MOST_BYTES >> 20} MiB")
        # So that a long row is not read again with each block.
        self._pieces, self._held, self._wanted = [rest], len(rest), min(2 * len(rest), MOST_BYTES + 1)
        return b"".join(written)

    def _refuse(self, data: bytes, at: int, why: str, *, since: int = 0) -> NoReturn:
        shown = printable(data[at : at + 40].decode(errors="replace"), 60)
        line = self._line + data.count(b"\n", since, at)
        raise DumpError(
            f"line {line} of the dump of {self.source} {why}{f': {shown}' if shown.strip() else ''}",
            hint="nothing of it was used: only tables of InnoDB and their rows are, as mariadb-dump and mysqldump "
            "write them; who has changed the database there?",
        )

    def _read_one(self, data: bytes, at: int, written: list[bytes]) -> int:
        """Read a comment, a statement, or the beginning of an INSERT; return where it ends.

        Raises:
            Incomplete: it does not end there.
            Broken: it is of another form.
        """
        while data[at : at + 1] in (b" ", b"\n"):
            at += 1
        if at == len(data):
            raise Incomplete(at)
        if self._complete:
            raise Broken(at, "is after the last one")
        if data.startswith(b"--", at):
            return self._read_comment(data, at)
        if found := SANDBOX.match(data, at):
            return found.end()
        if data.startswith(b"INSERT ", at):
            return self._read_insert(data, at, written)
        tokens, end = read_tokens(data, at)
        create = judge(tokens)
        if create:
            self._add_table(create, at)
            written.append(create.sql)
        return end

    def _read_comment(self, data: bytes, at: int) -> int:
        end = data.find(b"\n", at, at + LINE_BYTES)
        if end < 0 and len(data) - at < LINE_BYTES:
            raise Incomplete(at)
        if end < 0 or data[at + 2 : at + 3] not in (b" ", b"\n") or b"\0" in data[at:end]:
            raise Broken(at, "is not a comment")
        self._complete = data.startswith(LAST_LINE, at)
        return end + 1

    def _add_table(self, create: Create, at: int) -> None:
        if create.table in self._tables or create.table == COMPLETE:
            raise Broken(at, "creates a table again")
        if len(self._tables) >= MOST_TABLES:
            raise Broken(at, f"is of more than {MOST_TABLES} tables")
        self._tables.add(create.table)

    def _read_insert(self, data: bytes, at: int, written: list[bytes]) -> int:
        found = INSERT.match(data, at)
        if not found:
            if len(data) - at < LINE_BYTES and b"\n" not in data[at:]:
                raise Incomplete(at)
            raise Broken(at, "is not an INSERT of values")
        if found[1] not in self._tables:
            raise Broken(at, "is for a table that the dump has not created")
        written.append(found[0])
        self._rows = len(found[0])
        return found.end()

    def _read_rows(self, data: bytes, at: int, written: list[bytes]) -> int:
        """Read rows; return where the statement ends.

        Raises:
            Incomplete: it does not end there; ``begin`` is that of the first row which is not complete.
            Broken: a row is of another form.
        """
        begin, match = at, ROW.match
        while found := match(data, at):
            at = found.end() + 1
            if data[at - 1] == 0x3B:  # ;
                written += (data[begin:at], b"\n")
                self._rows = -1
                return at
        value = ROW_BEGUN.match(data, at)
        assert value
        if len(data) - value.end() >= SHORT and not CUT_VALUE.match(data, value.end()):
            raise Broken(value.end(), "has another value than a literal")
        written.append(data[begin:at])
        self._rows += at - begin
        raise Incomplete(value.end(), at)
