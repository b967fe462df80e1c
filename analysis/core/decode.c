/* Records -> packets: decodes the headers from the link to the transport.
 *
 * LINKTYPE_ numbers and cooked headers: www.tcpdump.org/linktypes. A frame may be truncated anywhere (snap length):
 * the available bytes are used, and nothing beyond them is read.
 */
#include "core.h"

#include <string.h>

enum { LINK_NULL = 0, LINK_ETHERNET = 1, LINK_RAW = 101, LINK_LOOP = 108, LINK_SLL = 113, LINK_IPV4 = 228, LINK_IPV6 = 229,
       LINK_IPOIB = 242, LINK_SLL2 = 276 };
enum { ETHERTYPE_IPV4 = 0x0800, ETHERTYPE_ARP = 0x0806, ETHERTYPE_IPV6 = 0x86dd };
#define TAGS 4
#define EXTENSIONS 12

typedef struct {
	const uint8_t *at;
	size_t left;
} Bytes;

static void pass(Bytes *b, size_t count)
{
	b->at += count;
	b->left -= count;
}

static bool other_is(Other *other, int what, uint32_t value)
{
	other->what = what;
	other->value = value;
	return false;
}

static bool transport(Bytes b, size_t length, Packet *p)
{
	/* length: of the IP payload, from the network header; b.left bytes of it were captured */
	if (b.left > length)
		b.left = length;
	size_t header = 0;
	if (p->protocol == TCP || p->protocol == UDP || p->protocol == SCTP) {
		if (b.left < 4)
			return false;
		p->source_port = be16(b.at);
		p->destination_port = be16(b.at + 2);
		p->what |= HAS_PORTS;
	}
	if (p->protocol == TCP) {
		if (b.left >= 8)
			p->sequence = be32(b.at + 4);
		header = 20;
		if (b.left >= 14) {
			header = (size_t)(b.at[12] >> 4) * 4;
			if (header < 20)
				header = 20;
			p->flags = b.at[13];
			p->what |= HAS_FLAGS;
		}
	} else if (p->protocol == UDP) {
		header = 8;
	} else if (p->protocol == SCTP) {
		header = 12;
		if (b.left > 12)
			p->chunk = b.at[12];
	} else if ((p->protocol == ICMP || p->protocol == ICMP6) && b.left) {
		p->chunk = b.at[0];
	}
	p->length = length > header ? (uint32_t)(length - header) : 0;
	p->payload = b.at;
	if (b.left > header) {
		p->payload += header;
		p->captured = (uint32_t)(b.left - header);
	}
	return true;
}

static bool finish_ip(Bytes b, size_t length, bool first, bool later, Packet *p, Other *other)
{
	if (later) {
		p->what |= LATER_FRAGMENT;
		return true;
	}
	if (first)
		p->what |= FIRST_FRAGMENT;
	if (!transport(b, length, p))
		return other_is(other, OTHER_SHORT, 0);
	return true;
}

static bool ipv4(Bytes b, Packet *p, Other *other)
{
	if (b.left < 20)
		return other_is(other, OTHER_SHORT, 0);
	size_t header = (size_t)(b.at[0] & 15) * 4, total = be16(b.at + 2);
	if (b.at[0] >> 4 != 4 || header < 20)
		return other_is(other, OTHER_BROKEN, 0);
	/* Segmentation offload leaves 0 here: use the wire length. */
	if (!total)
		total = p->wire < 65536 && p->wire > b.left ? p->wire : b.left;
	if (total < header)
		return other_is(other, OTHER_BROKEN, 0);
	uint16_t fragment = be16(b.at + 6);
	p->fragment = be16(b.at + 4);
	p->protocol = b.at[9];
	p->address_length = 4;
	memcpy(p->source, b.at + 12, 4);
	memcpy(p->destination, b.at + 16, 4);
	bool later = (fragment & 0x1fff) != 0, first = !later && (fragment & 0x2000);
	if (b.left < header)
		return other_is(other, OTHER_SHORT, 0);
	pass(&b, header);
	return finish_ip(b, total - header, first, later, p, other);
}

static bool ipv6(Bytes b, Packet *p, Other *other)
{
	if (b.left < 40)
		return other_is(other, OTHER_SHORT, 0);
	if (b.at[0] >> 4 != 6)
		return other_is(other, OTHER_BROKEN, 0);
	size_t length = be16(b.at + 4);
	uint8_t next = b.at[6];
	bool first = false, later = false;
	p->address_length = 16;
	memcpy(p->source, b.at + 8, 16);
	memcpy(p->destination, b.at + 24, 16);
	pass(&b, 40);
	if (!length) /* a jumbogram, or offload */
		length = b.left;
	for (int i = 0; i < EXTENSIONS; i++) {
		size_t size;
		bool options = next == 0 || next == 43 || next == 60 || next == 139 || next == 140;
		if (!options && next != 44 && next != 51)
			break;
		if (b.left < 8)
			return other_is(other, OTHER_SHORT, 0);
		size = next == 44 ? 8 : next == 51 ? ((size_t)b.at[1] + 2) * 4 : ((size_t)b.at[1] + 1) * 8;
		if (next == 44) {
			uint16_t fragment = be16(b.at + 2);
			p->fragment = be32(b.at + 4);
			later = fragment >> 3 != 0;
			first = !later && (fragment & 1);
		}
		next = b.at[0];
		if (size > length)
			return other_is(other, OTHER_BROKEN, 0);
		if (size > b.left)
			return other_is(other, OTHER_SHORT, 0);
		pass(&b, size);
		length -= size;
		if (later)
			break;
	}
	p->protocol = next;
	return finish_ip(b, length, first, later, p, other);
}

static bool network(Bytes b, uint16_t type, Packet *p, Other *other)
{
	for (int i = 0; i < TAGS && (type == 0x8100 || type == 0x88a8 || type == 0x9100 || type == 0x9200); i++) {
		if (b.left < 4)
			return other_is(other, OTHER_SHORT, 0);
		type = be16(b.at + 2);
		pass(&b, 4);
	}
	if (type == ETHERTYPE_IPV4)
		return ipv4(b, p, other);
	if (type == ETHERTYPE_IPV6)
		return ipv6(b, p, other);
	if (type == ETHERTYPE_ARP) {
		/* Ethernet and IPv4: the only kind on these networks */
		if (b.left >= 28 && be16(b.at) == 1 && be16(b.at + 2) == ETHERTYPE_IPV4 && b.at[4] == 6 && b.at[5] == 4)
			other->arp = b.at;
		return other_is(other, OTHER_ARP, 0);
	}
	if (type < 1536)
		return other_is(other, OTHER_LLC, 0);
	return other_is(other, OTHER_ETHERTYPE, type);
}

static bool raw_ip(Bytes b, Packet *p, Other *other)
{
	if (!b.left)
		return other_is(other, OTHER_SHORT, 0);
	return b.at[0] >> 4 == 6 ? ipv6(b, p, other) : ipv4(b, p, other);
}

static bool loopback(Bytes b, bool network_order, Packet *p, Other *other)
{
	if (b.left < 4)
		return other_is(other, OTHER_SHORT, 0);
	uint32_t family = network_order ? be32(b.at) : le32(b.at);
	if (family > 0xffff) /* written in the other byte order */
		family = __builtin_bswap32(family);
	pass(&b, 4);
	if (family == 2)
		return ipv4(b, p, other);
	/* AF_INET6 of Linux, the BSDs and macOS */
	if (family == 10 || family == 24 || family == 28 || family == 30)
		return ipv6(b, p, other);
	return other_is(other, OTHER_BROKEN, 0);
}

/* Linux cooked: the sender's link address alone, and whether this machine sent it (4). */
static bool cooked(Bytes b, size_t header, Packet *p, Other *other)
{
	if (b.left < header)
		return other_is(other, OTHER_SHORT, 0);
	bool second = header == 20;
	uint16_t kind = second ? b.at[10] : be16(b.at);
	uint16_t size = second ? b.at[11] : be16(b.at + 4);
	uint16_t hardware = second ? be16(b.at + 8) : be16(b.at + 2);
	uint16_t type = second ? be16(b.at) : be16(b.at + 14);
	if (kind == 4)
		p->what |= OUTGOING;
	if (size == 6 && hardware == 1)
		p->source_mac = b.at + (second ? 12 : 6);
	pass(&b, header);
	return network(b, type, p, other);
}

bool decode_usual(const Record *record, Packet *p)
{
	const uint8_t *frame = record->data, *ip = frame + 14, *head = ip + 20;
	if (record->link != LINK_ETHERNET || record->captured < 42 || be32(frame + 12) >> 8 != 0x080045)
		return false;
	bool tcp = ip[9] == TCP;
	uint32_t total = be16(ip + 2), left = record->captured - 34, least = tcp ? 20 : 8;
	if ((!tcp && ip[9] != UDP) || (be16(ip + 6) & 0x3fff) || total < 20 + least || left < least)
		return false;
	uint32_t header = tcp ? (uint32_t)(head[12] >> 4) * 4 : 8;
	if (header < least)
		return false;
	uint32_t length = total - 20;
	left = left < length ? left : length;
	p->time = record->time;
	p->wire = record->wire;
	p->length = length > header ? length - header : 0;
	bool any = left > header;
	p->payload = head + (any ? header : 0);
	p->captured = any ? left - header : 0;
	memcpy(p->source, ip + 12, 4);
	memcpy(p->destination, ip + 16, 4);
	p->address_length = 4;
	p->protocol = ip[9];
	p->flags = tcp ? head[13] : 0;
	p->what = tcp ? HAS_PORTS | HAS_FLAGS : HAS_PORTS;
	p->source_port = be16(head);
	p->destination_port = be16(head + 2);
	p->sequence = tcp ? be32(head + 4) : 0;
	p->fragment = 0;
	p->source_mac = frame + 6;
	p->destination_mac = frame;
	p->chunk = 0;
	return true;
}

bool decode(const Record *record, Packet *p, Other *other)
{
	Bytes b = {record->data, record->captured};
	p->time = record->time;
	p->wire = record->wire;
	p->length = p->captured = p->sequence = p->fragment = 0;
	p->payload = NULL;
	p->address_length = p->protocol = p->flags = p->what = p->chunk = 0;
	p->source_port = p->destination_port = 0;
	p->source_mac = p->destination_mac = NULL;
	other->what = -1;
	other->arp = NULL;
	switch (record->link) {
	case LINK_ETHERNET:
		if (b.left < 14)
			return other_is(other, OTHER_SHORT, 0);
		p->destination_mac = b.at;
		p->source_mac = b.at + 6;
		pass(&b, 14);
		return network(b, be16(b.at - 2), p, other);
	case LINK_IPOIB: /* two InfiniBand addresses, then RFC 4391's header */
		if (b.left < 44)
			return other_is(other, OTHER_SHORT, 0);
		pass(&b, 44);
		return network(b, be16(b.at - 4), p, other);
	case LINK_SLL:
		return cooked(b, 16, p, other);
	case LINK_SLL2:
		return cooked(b, 20, p, other);
	case 12: /* LINKTYPE_RAW as some systems wrote it */
	case 14:
	case LINK_RAW:
	case LINK_IPV4:
	case LINK_IPV6:
		return raw_ip(b, p, other);
	case LINK_NULL:
		return loopback(b, false, p, other);
	case LINK_LOOP:
		return loopback(b, true, p, other);
	default:
		return other_is(other, OTHER_LINK, record->link);
	}
}

