/* The peer of the native core: a bare flow counter. Packets and bytes of each 5-tuple of IPv4 in a pcap file, and nothing
 * else: no addresses, no roles, no times, no damage; it trusts the file.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCK (1u << 20)
#define MASK ((1u << 20) - 1)

typedef struct {
	uint32_t a, b;
	uint16_t port_a, port_b;
	uint8_t protocol, used;
	uint64_t packets, bytes;
} Flow;

static Flow *table;
static uint64_t flows, packets;

static void count(const uint8_t *p, uint32_t captured, uint32_t wire)
{
	packets++;
	if (captured < 34 || p[12] != 8 || p[13] != 0)
		return;
	p += 14;
	captured -= 14;
	uint32_t header = (p[0] & 15) * 4u, a, b;
	uint16_t port_a = 0, port_b = 0;
	uint8_t protocol = p[9];
	memcpy(&a, p + 12, 4);
	memcpy(&b, p + 16, 4);
	if ((protocol == 6 || protocol == 17) && captured >= header + 4) {
		memcpy(&port_a, p + header, 2);
		memcpy(&port_b, p + header + 2, 2);
	}
	if (a > b || (a == b && port_a > port_b)) {
		uint32_t host = a;
		uint16_t port = port_a;
		a = b;
		b = host;
		port_a = port_b;
		port_b = port;
	}
	uint64_t hash = ((uint64_t)a << 32 | b) * 0x9e3779b97f4a7c15ULL;
	hash ^= ((uint64_t)port_a << 32 | (uint64_t)port_b << 8 | protocol) * 0xd6e8feb86659fd93ULL;
	hash ^= hash >> 32;
	hash *= 0xd6e8feb86659fd93ULL;
	hash ^= hash >> 32;
	uint32_t at = (uint32_t)hash & MASK;
	for (; table[at].used; at = (at + 1) & MASK)
		if (table[at].a == a && table[at].b == b && table[at].port_a == port_a && table[at].port_b == port_b &&
		    table[at].protocol == protocol)
			break;
	Flow *flow = table + at;
	if (!flow->used) {
		*flow = (Flow){a, b, port_a, port_b, protocol, 1, 0, 0};
		if (++flows > MASK / 2)
			exit(1);
	}
	flow->packets++;
	flow->bytes += wire;
}

int main(int arguments, char **argv)
{
	int file = arguments > 1 ? open(argv[1], O_RDONLY) : 0;
	uint8_t *buffer = malloc(2 * BLOCK);
	size_t start = 24, end = 0;
	table = calloc(MASK + 1, sizeof *table);
	if (!buffer || !table)
		return 1;
	for (ssize_t got; (got = read(file, buffer + end, BLOCK)) > 0;) {
		end += (size_t)got;
		while (end >= start + 16) {
			uint32_t captured, wire;
			memcpy(&captured, buffer + start + 8, 4);
			memcpy(&wire, buffer + start + 12, 4);
			if (captured > BLOCK / 2)
				return 1;
			if (end < start + 16 + captured)
				break;
			count(buffer + start + 16, captured, wire);
			start += 16 + captured;
		}
		memmove(buffer, buffer + start, end - start);
		end -= start;
		start = 0;
	}
	printf("%llu packets, %llu flows\n", (unsigned long long)packets, (unsigned long long)flows);
	return 0;
}
