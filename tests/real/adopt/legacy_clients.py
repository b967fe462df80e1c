"""Clients that a compute node of a lab lacks, as programs for its Python: they print what the server answers."""

DNS = """
import socket, sys
print(socket.gethostbyname(sys.argv[1]))
"""
DHCP = """
import socket, struct, sys
mac = bytes.fromhex(sys.argv[1].replace(":", ""))
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
sock.bind(("", 68))
sock.settimeout(10)
# RFC 2131: BOOTREQUEST, with the broadcast flag; option 53: DHCPDISCOVER
head = struct.pack("!BBBBIHH16x16s192x", 1, 1, 6, 0, 7, 0, 0x8000, mac)
sock.sendto(head + bytes([99, 130, 83, 99, 53, 1, 1, 255]), ("255.255.255.255", 67))
print(socket.inet_ntoa(sock.recv(2000)[16:20]))
"""
NFS = """
import socket, struct, sys

def opaque(data):
    return struct.pack("!I", len(data)) + data + bytes(-len(data) % 4)

def unix():
    body = struct.pack("!I", 0) + opaque(b"node") + struct.pack("!III", 2000, 2000, 0)
    return struct.pack("!I", 1) + opaque(body) + struct.pack("!II", 0, 0)

# RFC 7530: a COMPOUND of PUTROOTFH and a LOOKUP for each part of the path
parts = [part.encode() for part in sys.argv[1].split("/") if part]
ops = struct.pack("!I", 24) + b"".join(struct.pack("!I", 15) + opaque(part) for part in parts)
ops = opaque(b"") + struct.pack("!II", 0, 1 + len(parts)) + ops
call = struct.pack("!IIIIII", 7, 0, 2, 100003, 4, 1) + unix() + ops
sock = socket.create_connection(("10.77.0.1", 2049), 10)
sock.sendall(struct.pack("!I", 0x80000000 | len(call)) + call)
sock.settimeout(10)
reply = sock.recv(4000)
# record mark, id, reply, accepted, verifier of two words, status of the call; then that of the COMPOUND
print(struct.unpack("!8I", reply[:32])[7])
"""
NTP = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(10)
sock.sendto(b"\\x23" + bytes(47), ("10.77.0.1", 123))
print(sock.recv(99)[1])
"""
