"""The other services of a survey: time, logs, mail, exports, cron, accounts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from appliance.plan.adopt.frames import Frames
from appliance.plan.adopt.model import Accounts, Peers, Scheduled
from appliance.text import printable

TIME_FILES = ("/etc/chrony.conf", "/etc/chrony/chrony.conf", "/etc/ntp.conf", "/etc/ntpsec/ntp.conf")
TIME_FOLDERS = ("/etc/chrony.d", "/etc/chrony/conf.d", "/etc/chrony/sources.d")
CRONTABS = ("/var/spool/cron/crontabs", "/var/spool/cron", "/var/spool/cron/tabs")
GANESHA = "/etc/ganesha/ganesha.conf"
"""Settings of an NFS server in user space."""
LONGEST_LINE = 4096
"""Characters of a line that are read: what is searched in one takes the square of its length."""
FIRST_USER = 1000
NOBODY = (65534, 65535)


def lines_of(frames: Frames, files: Iterable[str], folders: Iterable[str] = ()) -> list[str]:
    """Return the lines of these files and folders, without comments and empty ones."""
    sections = [frames.files[path] for path in files if path in frames.files] + frames.below(*folders)
    lines = [line[:LONGEST_LINE].strip() for section in sections for line in section.lines]
    return [line for line in lines if line and not line.startswith(("#", "!", ";"))]


def read_peers(frames: Frames) -> Peers:
    """Return the other machines that the node follows, sends to, and receives from."""
    time = lines_of(frames, TIME_FILES, TIME_FOLDERS)
    logs = lines_of(frames, ("/etc/rsyslog.conf",), ("/etc/rsyslog.d",))
    mail = _postfix(frames)
    clocks = [words[1] for words in map(str.split, time) if words[0] in ("server", "pool", "peer") and len(words) > 1]
    root = re.search(r"^root:\s*(\S+)", frames.text("/etc/aliases"), re.MULTILINE)
    exports = lines_of(frames, ("/etc/exports",), ("/etc/exports.d",))
    paths = re.findall(r'^[ \t]*Path[ \t]*=[ \t]*"?([^";\s]+)', frames.text(GANESHA), re.MULTILINE | re.IGNORECASE)
    exports += [f"{path} (NFS-Ganesha)" for path in paths]
    names = [words[1] for words in map(str.split, lines_of(frames, ("/etc/resolv.conf",))) if len(words) > 1]
    relay = mail.get("relayhost", "") or next(
        iter(re.findall(r"define\(`SMART_HOST',\s*`([^']+)'", frames.text("/etc/mail/sendmail.mc"))), ""
    )
    return Peers(
        clocks=_clean(one for one in clocks if not one.startswith("127.")),
        serves_time=any(line.split()[0] in ("allow", "broadcast") for line in time),
        logs_from=_clean(_receives(logs)),
        logs_to=_clean(_forwards(logs)),
        relay=printable(relay, 253),
        mail_domain=printable(mail.get("mydomain", "") or mail.get("myorigin", ""), 253),
        mail_root=printable(root[1], 200) if root else "",
        nameservers=_clean(one for one in names if re.fullmatch(r"[0-9.]+", one) and not one.startswith("127.")),
        exports=_clean(exports),
    )


def _clean(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(printable(one, 300) for one in values))[:200]


def _receives(lines: list[str]) -> Iterable[str]:
    for line in lines:
        if found := re.search(r'input\(\s*type="im(udp|p?tcp|relp)".{0,1000}?port="([0-9]{1,5})"', line):
            yield f"{found[1].replace('ptcp', 'tcp')}/{found[2]}"
        elif found := re.match(r"\$(UDP|InputTCP|InputRELP)ServerRun\s+([0-9]{1,5})", line):
            yield f"{found[1].removeprefix('Input').lower()}/{found[2]}"


def _forwards(lines: list[str]) -> Iterable[str]:
    text = "\n".join(lines)
    yield from re.findall(r"^\S+\s+(@@?[A-Za-z0-9.\[\]:-]{1,253})", text, re.MULTILINE)
    for action in re.findall(r"action\(([^()]*)\)", text):
        if 'type="omfwd"' not in action:
            continue
        values: dict[str, str] = {key.lower(): value for key, value in re.findall(r'\b(\w+)="([^"]*)"', action)}
        mark = "@@" if values.get("protocol", "udp").lower() == "tcp" else "@"
        target = values.get("target", "")
        if target:
            yield f"{mark}{target}:{values.get('port', '514')}"


def _postfix(frames: Frames) -> dict[str, str]:
    text = re.sub(r"\n[ \t]+", " ", frames.text("/etc/postfix/main.cf"))
    return {key: value.strip() for key, value in re.findall(r"^([a-z_]+)\s*=\s*(.*)$", text, re.MULTILINE)}


def read_scheduled(frames: Frames) -> tuple[Scheduled, ...]:
    """Return what cron runs: only the program of each command, whose arguments may be secrets."""
    found = []
    for path in ("/etc/crontab", *(one.name for one in frames.below("/etc/cron.d", *CRONTABS))):
        own = path.startswith("/var/spool")
        for line in lines_of(frames, (path,)):
            words = line.split()
            count = 1 if line.startswith("@") else 5
            if re.match(r"[A-Za-z_][A-Za-z0-9_]*\s*=", line) or len(words) <= count + (not own):
                continue
            program = _first_program(" ".join(words[count + (not own) :]))
            found.append(
                Scheduled(file=path, when=printable(" ".join(words[:count]), 60), program=printable(program, 120))
            )
    for every in ("hourly", "daily", "weekly", "monthly"):
        found += [
            Scheduled(file=f"/etc/cron.{every}", when=f"@{every}", program=printable(name.strip(), 120))
            for name in frames.output(f"cron-{every}")
        ]
    return tuple(found[:500])


def merge_accounts(frames: Frames, name: str) -> tuple[str, int]:
    """Return the text of a passwd or group file with the ids from which jobs come, and how many are in no file.

    Those of the directory are those that getent lists and the file does not have.
    """
    own = [line for line in frames.text(f"/etc/{name}").split("\n") if line]
    names = {line.partition(":")[0] for line in own}
    extra = [line for line in frames.output(name) if line.partition(":")[0] not in names]
    kept: dict[str, str] = {}
    directory = 0
    for at, line in enumerate((*own, *extra)):
        words = line.split(":")
        width = 7 if name == "passwd" else 4
        number = words[2] if len(words) == width else ""
        if not re.fullmatch(r"[0-9]{1,10}", number) or not line.isprintable() or not words[0] or words[0] in kept:
            continue
        if int(number) >= FIRST_USER and int(number) not in NOBODY:
            kept[words[0]] = ":".join([words[0], "x", *words[2:]])
            directory += at >= len(own)
    return "".join(f"{line}\n" for line in kept.values()), directory


def _first_program(command: str) -> str:
    """Return the program that a command of cron runs, after what it tests first."""
    for part in re.split(r"&&|\|\||[;|{}]", command):
        words = [word for word in part.split() if re.fullmatch(r"/?[A-Za-z0-9_\[][A-Za-z0-9_./+-]*", word)]
        if words and words[0] not in ("test", "[", "cd", "if", "then"):
            return words[0]
    return ""


def read_accounts(frames: Frames) -> Accounts:
    """Return how many users and groups there are."""
    users, directory = merge_accounts(frames, "passwd")
    groups, _ = merge_accounts(frames, "group")
    places = ("/etc/sssd/sssd.conf", "/etc/nslcd.conf", "/etc/yp.conf")
    return Accounts(
        users=users.count("\n"),
        groups=groups.count("\n"),
        from_directory=directory,
        directory=next((one for one in places if one in frames.files), ""),
    )
