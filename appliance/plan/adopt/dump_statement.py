"""Judges a statement of an SQL dump: creates a table, or is one of those that are left out. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

WRITTEN = rb"[^'\\\x00\n\r]*+(?:(?:\\[0nrZ'\"\\]|'')[^'\\\x00\n\r]*+)*+"
TEXT = rb"'" + WRITTEN + rb"'"
"""A text as clients of the database write it: they escape line ends, quotes and backslashes."""
TABLE_NAME = rb"[0-9A-Za-z_$.-]{1,64}"
"""Those of Slurm have the cluster's name. Nothing in it ends a name, whatever quotes are around it."""
NAME = rb"[0-9A-Za-z_$]{1,64}"
TRANSACTIONS = rb"[0-9a-f]{8}-[0-9a-z_:,\n-]*"
"""Names of transactions, as MySQL writes them: on several lines."""
MOST_BYTES = 1 << 18
"""Of a statement without rows."""
TOKEN = re.compile(
    rb"(?P<space>[ \n]++)|(?P<comment>/\*M?![0-9]{5,6} |\*/)|(?P<name>`" + TABLE_NAME + rb"`)"
    rb"|(?P<transactions>'" + TRANSACTIONS + rb"')|(?P<text>" + TEXT + rb")"
    rb"|(?P<word>@{0,2}[A-Za-z_][A-Za-z0-9_]*+)|(?P<number>-?[0-9]++(?:\.[0-9]++)?(?:e[+-]?[0-9]{1,3})?)"
    rb"|(?P<mark>[(),.=;])"
)
CUT = b"`'/*-@"
"""What a token begins with whose end may be in the next block."""
SHORT = 67
"""Bytes of all tokens but a text: a table's name with its quotes, and what follows it."""
CUT_TEXT = re.compile(rb"'(?:" + WRITTEN + rb"\\?|" + TRANSACTIONS + rb")\Z")

_KEPT = {
    *("character_set_client", "character_set_results", "collation_connection", "sql_mode", "foreign_key_checks"),
    *("unique_checks", "time_zone", "sql_notes", "note_verbosity"),
}
_SET = {"unique_checks": "0", "foreign_key_checks": "0", "sql_notes": "0", "note_verbosity": "0"}
LEFT_OUT = {
    *(f"set @old_{name} = @@{name}" for name in _KEPT),
    *(f"set @old_{name} = @@{name} , {name} = {value}" for name, value in _SET.items()),
    "set @old_sql_mode = @@sql_mode , sql_mode = 'no_auto_value_on_zero'",
    *(f"set {name} = @old_{name}" for name in _KEPT),
    *(f"set names {one}" for one in ("utf8", "utf8mb3", "utf8mb4")),
    *(f"set character_set_client = {one}" for one in ("utf8", "utf8mb3", "utf8mb4", "@saved_cs_client")),
    "set @saved_cs_client = @@character_set_client",
    *("set time_zone = '+00:00'", "set autocommit = 0", "commit", "unlock tables"),
    *("set @old_autocommit = @@autocommit , @@autocommit = 0", "set autocommit = @old_autocommit"),
    *("set @mysqldump_temp_log_bin = @@session . sql_log_bin", "set @@session . sql_log_bin = 0"),
    "set @@session . sql_log_bin = @mysqldump_temp_log_bin",
}
"""Statements without effect on what is written. Of character sets only UTF-8: in others a byte of a character may be a
quote or a backslash."""
OTHERS = re.compile(
    r"drop table if exists `[^`]+`|lock tables `[^`]+` write|alter table `[^`]+` (?:disable|enable) keys"
    r"|set @@global \. gtid_purged = (?:'\+' )?'(?:" + TRANSACTIONS.decode() + r")?'"
)

TYPES = {
    *("tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "float", "double", "bit", "date", "datetime"),
    *("timestamp", "time", "year", "char", "varchar", "binary", "varbinary", "tinytext", "text", "mediumtext"),
    *("longtext", "tinyblob", "blob", "mediumblob", "longblob", "enum", "set"),
}
KEPT_OPTIONS = {"AUTO_INCREMENT": r"[0-9]{1,20}", "ROW_FORMAT": "DYNAMIC|COMPACT|REDUNDANT|COMPRESSED|FIXED|DEFAULT"}
DROPPED_OPTIONS = {
    *("PAGE_CHECKSUM", "STATS_PERSISTENT", "STATS_AUTO_RECALC", "STATS_SAMPLE_PAGES", "MIN_ROWS", "MAX_ROWS"),
    *("AVG_ROW_LENGTH", "CHECKSUM", "DELAY_KEY_WRITE", "PACK_KEYS", "KEY_BLOCK_SIZE", "TRANSACTIONAL"),
}
"""How a server stores a table, or guesses: each does it in its own way."""
NEW_COLLATION = re.compile(r"(?:^|_)(?:0900|uca1400)_")
"""MySQL from 8.0, MariaDB from 10.10: each is unknown to the other, and to older versions."""


class Incomplete(Exception):
    """The end of a statement is not there yet. ``begin``: of what has to be kept for it."""

    def __init__(self, at: int, begin: int = 0) -> None:
        super().__init__()
        self.at = at
        self.begin = begin


class Broken(Exception):
    """A statement is of another form at this place."""

    def __init__(self, at: int, why: str = "is of no form that is used") -> None:
        super().__init__(why)
        self.at = at
        self.why = why


@dataclass(frozen=True)
class Token:
    """A word, name, text, number or mark, and where it is. ``text`` is without the quotes of a name."""

    kind: str
    text: str
    at: int


@dataclass(frozen=True)
class Create:
    """A table, and the SQL that creates it."""

    table: bytes
    sql: bytes


def read_tokens(data: bytes, begin: int) -> tuple[list[Token], int]:
    """Return the tokens of a statement, without its end, and where it ends.

    What is in a comment of the form that servers execute is part of the statement.

    Raises:
        Incomplete: it does not end in ``data``.
        Broken: it has something else.
    """
    tokens, at, inside = list[Token](), begin, False
    while at < len(data) and at - begin < MOST_BYTES:
        found = TOKEN.match(data, at)
        if not found:
            if data[at] in CUT and (len(data) - at < SHORT or CUT_TEXT.match(data, at)):
                raise Incomplete(at)
            raise Broken(at)
        kind, raw = found.lastgroup or "", found[0]
        if raw == b";" and not inside:
            if not tokens:
                raise Broken(at)
            return tokens, found.end()
        if kind == "comment":
            if (raw == b"*/") != inside:
                raise Broken(at)
            inside = not inside
        elif kind != "space":
            text = raw.decode(errors="surrogateescape")
            tokens.append(Token(kind, text[1:-1] if kind == "name" else text, at))
        at = found.end()
    if at - begin >= MOST_BYTES:
        raise Broken(begin, f"has more than {MOST_BYTES >> 10} KiB")
    raise Incomplete(at)


def judge(tokens: list[Token]) -> Create | None:
    """Return the table that a statement creates; None if it is one of those that are left out.

    Raises:
        Broken: it is neither.
    """
    if [one.text for one in tokens[:2]] == ["CREATE", "TABLE"]:
        return _Table(tokens).read()
    said = " ".join(f"`{one.text}`" if one.kind == "name" else one.text.lower() for one in tokens)
    if said not in LEFT_OUT and not OTHERS.fullmatch(said):
        raise Broken(tokens[0].at)
    return None


@dataclass
class _Table:
    """Reads CREATE TABLE, as SHOW CREATE TABLE prints it."""

    tokens: list[Token]
    position: int = 2
    written: list[str] = field(default_factory=list)

    def read(self) -> Create:
        """Return it.

        Raises:
            Broken: it has something else than columns, keys and options of InnoDB.
        """
        self.take("IF", "NOT", "EXISTS")
        table, parts = self.need("name"), list[str]()
        self.expect("(")
        while True:
            parts.append(self.read_key() or self.read_column())
            if not self.take(","):
                break
        self.expect(")")
        options = self.read_options()
        body = ",\n  ".join(parts)
        sql = f"CREATE TABLE `{table}` (\n  {body}\n) {options};\n"
        return Create(table.encode(), sql.encode(errors="surrogateescape"))

    @property
    def next(self) -> Token | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def broken(self) -> Broken:
        return Broken((self.next or self.tokens[-1]).at)

    def take(self, *words: str) -> str:
        """Skip these words if they are next; return them, or an empty text."""
        here = self.tokens[self.position : self.position + len(words)]
        if [one.text.upper() for one in here if one.kind in ("word", "mark")] != list(words):
            return ""
        self.position += len(words)
        return " ".join(words)

    def expect(self, *words: str) -> None:
        """Skip these words.

        Raises:
            Broken: others are next.
        """
        if not self.take(*words):
            raise self.broken()

    def need(self, *kinds: str, pattern: str = "") -> str:
        """Return the text of the next token, which is of one of these kinds.

        Raises:
            Broken: it is not, or does not match.
        """
        one = self.next
        if one is None or one.kind not in kinds or (pattern and not re.fullmatch(pattern, one.text)):
            raise self.broken()
        self.position += 1
        return one.text

    def read_name(self) -> str:
        """Return the name of a column or a key, in quotes."""
        return f"`{self.need('name', pattern=NAME.decode())}`"

    def read_key(self) -> str:
        """Return a key; empty if no key is next."""
        if self.take("PRIMARY", "KEY"):
            what = "PRIMARY KEY"
        elif found := self.take("UNIQUE", "KEY") or self.take("KEY"):
            what = f"{found} {self.read_name()}"
        else:
            return ""
        columns = list[str]()
        self.expect("(")
        while True:
            column = self.read_name()
            if self.take("("):
                column += f"({self.need('number', pattern='[0-9]{1,5}')})"
                self.expect(")")
            columns.append(f"{column} DESC" if self.take("DESC") else column)
            if not self.take(","):
                break
        self.expect(")")
        self.take("USING", "BTREE")
        if self.take("KEY_BLOCK_SIZE"):
            self.expect("=")
            self.need("number")
        return f"{what} ({','.join(columns)}){self.read_comment()}"

    def read_comment(self) -> str:
        """Return the comment of a column or a key; empty without one."""
        return f" COMMENT {self.need('text')}" if self.take("COMMENT") else ""

    def read_column(self) -> str:
        """Return a column."""
        said = [self.read_name(), self.read_type()]
        if self.take("CHARACTER", "SET"):
            said.append(f"CHARACTER SET {self.read_charset()}")
        if self.take("COLLATE"):
            said.append(f"COLLATE {self.read_collation()}")
        while not (self.next is None or self.next.text in (",", ")")):
            said.append(self.read_attribute())
        return " ".join(one for one in said if one)

    def read_type(self) -> str:
        """Return the type of a column."""
        name = self.need("word")
        if name not in TYPES:
            self.position -= 1
            raise self.broken()
        kind, sizes = ("text", list[str]()) if name in ("enum", "set") else ("number", [])
        if self.take("("):
            while True:
                sizes.append(self.need(kind, pattern="" if kind == "text" else "[0-9]{1,10}"))
                if not self.take(","):
                    break
            self.expect(")")
        words = [word for word in ("UNSIGNED", "ZEROFILL") if self.take(word)]
        return " ".join([name + (f"({','.join(sizes)})" if sizes else ""), *(word.lower() for word in words)])

    def read_attribute(self) -> str:
        """Return one of a column's attributes: no default but a literal, or the time on which a row was written."""
        for words in (("NOT", "NULL"), ("NULL",), ("AUTO_INCREMENT",)):
            if found := self.take(*words):
                return found
        if self.take("ON", "UPDATE"):
            return f"ON UPDATE {self.read_now()}"
        if comment := self.read_comment():
            return comment[1:]
        self.expect("DEFAULT")
        if self.take("NULL"):
            return "DEFAULT NULL"
        one = self.next
        if one and one.kind in ("text", "number"):
            return f"DEFAULT {self.need(one.kind)}"
        return f"DEFAULT {self.read_now()}"

    def read_now(self) -> str:
        """Return the only function that a default may have."""
        self.expect("CURRENT_TIMESTAMP")
        if not self.take("("):
            return "CURRENT_TIMESTAMP"
        digits = "" if self.take(")") else self.need("number", pattern="[0-6]")
        if digits:
            self.expect(")")
        return f"CURRENT_TIMESTAMP{f'({digits})' if digits else ''}"

    def read_charset(self) -> str:
        """Return a character set, by the name that all versions have for it."""
        name = self.need("word", pattern="[a-z0-9]{1,32}")
        return "utf8" if name == "utf8mb3" else name

    def read_collation(self) -> str:
        """Return a collation, or that of older versions which is most like it."""
        name = re.sub(r"^utf8mb3_", "utf8_", self.need("word", pattern="[a-z0-9_]{1,64}"))
        if not NEW_COLLATION.search(name):
            return name
        order = "unicode_520_ci" if name.endswith("_ci") else "bin"
        return f"{name.partition('_')[0]}_{order}"

    def read_options(self) -> str:
        """Return the options of the table."""
        engine, said = "", list[str]()
        while one := self.next:
            if one.kind != "word":
                raise self.broken()
            if self.take("DEFAULT", "CHARSET"):
                self.expect("=")
                said.append(f"DEFAULT CHARSET={self.read_charset()}")
                continue
            self.position += 1
            name = one.text.upper()
            self.expect("=")
            if name == "ENGINE":
                engine = self.need("word", pattern="InnoDB")
            elif name == "COLLATE":
                said.append(f"COLLATE={self.read_collation()}")
            elif name == "COMMENT":
                said.append(f"COMMENT={self.need('text')}")
            elif name in KEPT_OPTIONS:
                said.append(f"{name}={self.need('word', 'number', pattern=KEPT_OPTIONS[name])}")
            elif name in DROPPED_OPTIONS or (name == "ENCRYPTION" and (self.next or one).text == "'N'"):
                self.need("word", "number", "text")
            else:
                self.position -= 2
                raise self.broken()
        if not engine:
            raise Broken(self.tokens[-1].at, "creates a table that is not of InnoDB")
        return " ".join(["ENGINE=InnoDB", *said])
