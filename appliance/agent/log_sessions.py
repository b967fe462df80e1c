"""TCP sessions of log senders, closed before the addresses of an instance change hosts.

A sender over plain TCP considers a line delivered once its own kernel has it. After the switch the target knows none of
the sessions and resets them: everything in the sender's buffer is lost, and on a silent session the first line is. So
each session gets a FIN while the network is still up: a sender such as rsyslogd sees it before its next line, and
sends that on a new connection. What the sender wrote before is still read, since only our direction is closed.
New connections are not refused, which a sender may answer with a pause of half a minute, or by discarding the line.
Their first packet is dropped: the sender's kernel repeats it a second later, and the target accepts.

A sender over RELP keeps each line until it is acknowledged, so these sessions are reset: what was not acknowledged is
sent again to the target. rsyslogd notices a FIN there only after its next line, which would wait for the one after it.

The daemon need not take part: this process duplicates its sockets (pidfd_getfd(2)).
"""

import array
import ctypes
import errno
import fcntl
import os
import socket
import struct
import termios
import time
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

LIBC = ctypes.CDLL(None, use_errno=True)
SYSCALL = LIBC.syscall
SYSCALL.restype = ctypes.c_long
SYS_PIDFD_GETFD = 438
"""The same number on every architecture."""
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
"""asm-generic/socket.h."""

ESTABLISHED, FIN_WAIT1 = 1, 4
"""net/tcp_states.h."""
NO_SYN = (
    (0x30, 0, 0, 13),  # ldb [13]: the flags of the TCP header
    (0x45, 0, 1, 0x02),  # a SYN
    (0x06, 0, 0, 0),  # drop it
    (0x06, 0, 0, 0xFFFFFFFF),
)
"""Filter of a listening socket (bpf(4)): connections that have begun are completed, no other begins."""


class LogSessions:
    """The sessions that the daemons of an instance accept on some ports; ``reset_ports``: reset instead of closed."""

    def __init__(self, pid: int, ports: Sequence[int], reset_ports: Sequence[int] = ()) -> None:
        self.pid = pid
        self.ports = frozenset(ports)
        self.reset_ports = frozenset(reset_ports)
        self._closed: List[socket.socket] = []
        """Duplicates of the sockets of closed sessions."""
        self._known: Set[int] = set()
        """Inodes of sockets that ``close`` has seen."""
        self._owners: Optional[List[int]] = None
        """Processes with such sockets. Their descriptors tell all: to read /proc/net/tcp takes 10 ms each time."""

    def close(self) -> None:
        """Let no connection begin, and send a FIN or RST on each session; called again, on those begun meanwhile.

        Raises:
            OSError: the kernel does not allow it.
        """
        owners = []
        for pid in self._processes() if self._owners is None else self._owners:
            mine = False
            for inode, one, listens in self._sockets(pid, self._known):
                mine = True
                self._known.add(inode)
                if listens:
                    with one:
                        attach_filter(one, NO_SYN)
                elif one.getsockname()[1] in self.reset_ports:
                    with one:
                        _reset(one)
                else:
                    self._closed.append(one)
                    _shut_down(one)
            if mine:
                owners.append(pid)
        self._owners = owners if self._owners is None else self._owners

    def reopen(self) -> None:
        """Let connections begin again, and forget the closed sessions.

        Raises:
            OSError: not possible in a process; it was tried in all of them.
        """
        while self._closed:
            self._closed.pop().close()
        failed: Optional[OSError] = None
        for pid in self._processes():
            try:
                for _, one, listens in self._sockets(pid, set()):
                    with one:
                        if listens:
                            _detach_filter(one)
            except OSError as error:
                failed = error
        self._known.clear()
        self._owners = None
        if failed:
            raise failed

    def wait_until_noticed(self, patience_s: float) -> bool:
        """Wait until each sender's kernel has acknowledged the FIN; return whether all have."""
        return self._wait(patience_s, lambda one: _state(one) in (ESTABLISHED, FIN_WAIT1))

    def wait_until_read(self, patience_s: float) -> bool:
        """Wait until the daemons have read all that was received; return whether they have."""
        return self._wait(patience_s, lambda one: _unread(one) > 0)

    def _wait(self, patience_s: float, pending: Callable[[socket.socket], bool]) -> bool:
        end = time.monotonic() + patience_s
        while any(pending(one) for one in self._closed):
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True

    def _sockets(self, pid: int, known: Set[int]) -> Iterator[Tuple[int, socket.socket, bool]]:
        """Yield the sockets of these ports that a process has open, except known ones: inode, duplicate, if it listens.

        The caller closes the duplicates.
        """
        for inode, one in _duplicate_sockets(pid, known):
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                if one.getsockname()[1] in self.ports:
                    yield inode, one, bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                    continue
            one.close()

    def _processes(self) -> List[int]:
        """Return the processes in the network namespace of the instance."""
        if not self.ports:
            return []
        found, network = [], os.stat("/proc/%d/ns/net" % self.pid).st_ino
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and os.stat("/proc/%s/ns/net" % name).st_ino == network:
                    found.append(int(name))
            except OSError:
                continue  # it has ended
        return found


def attach_filter(one: socket.socket, program: Sequence["tuple[int, int, int, int]"]) -> None:
    """Attach a filter to a socket (bpf(4)): code, jump if true, jump if false, value of each instruction."""
    held = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(program), ctypes.addressof(held)))


def _open_sockets(pid: int) -> Dict[int, int]:
    """Return the inodes of a process's sockets, by descriptor."""
    found: Dict[int, int] = {}
    try:
        for name in os.listdir("/proc/%d/fd" % pid):
            target = os.readlink("/proc/%d/fd/%s" % (pid, name))
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    except OSError:
        pass  # it ends
    return found


def _duplicate_sockets(pid: int, known: Set[int]) -> Iterator[Tuple[int, socket.socket]]:
    """Yield inodes and duplicates of a process's sockets, except known ones."""
    wanted = {number: inode for number, inode in _open_sockets(pid).items() if inode not in known}
    if not wanted:
        return
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for descriptor, inode in wanted.items():
            found = _get_descriptor(process, descriptor)
            if found >= 0 and os.fstat(found).st_ino == inode:
                yield inode, socket.socket(fileno=found)
            elif found >= 0:
                os.close(found)  # the process has opened something else meanwhile
    finally:
        os.close(process)


def _get_descriptor(process: int, descriptor: int) -> int:
    """Return a duplicate of a descriptor of another process, given by its pidfd; -1 if either is gone.

    Raises:
        OSError: it is not permitted, or the kernel is older than 5.6.
    """
    number = ctypes.c_long(SYS_PIDFD_GETFD)
    found = SYSCALL(number, ctypes.c_int(process), ctypes.c_int(descriptor), ctypes.c_uint(0))
    error = ctypes.get_errno()
    if found < 0 and error not in (errno.EBADF, errno.ESRCH):
        raise OSError(error, os.strerror(error))
    return int(found)


def _shut_down(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the sender has closed it meanwhile


def _reset(one: socket.socket) -> None:
    """Send an RST, although the daemon has the socket open (connect(2) with AF_UNSPEC); it sees the end, too."""
    address = struct.pack("H14x", socket.AF_UNSPEC)
    if LIBC.connect(one.fileno(), address, len(address)) < 0:
        _shut_down(one)


def _detach_filter(one: socket.socket) -> None:
    try:
        one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    except OSError:
        pass  # it has none


def _state(one: socket.socket) -> int:
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _unread(one: socket.socket) -> int:
    """Return how many bytes the kernel has acknowledged that the daemon has not read."""
    found = array.array("i", [0])
    fcntl.ioctl(one, termios.FIONREAD, found)
    return found[0]
