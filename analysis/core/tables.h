/* Shared declarations of the tables: hosts.c, pairs.c, flows.c, counter.c. */
#ifndef SMS_TABLES_H
#define SMS_TABLES_H

#include "core.h"

#include <string.h>

/* ---- hashing: seeded, so that no capture can force collisions ---------------------------------- */

static inline uint64_t mix(uint64_t x)
{
	x ^= x >> 32;
	x *= 0xd6e8feb86659fd93ULL;
	return x ^ x >> 32;
}

static inline uint64_t word(const uint8_t *p)
{
	uint64_t value;
	memcpy(&value, p, 8);
	return value;
}

/* Multiplication by a random odd factor (Dietzfelbinger 1997), then mixed: with the product alone, the addresses of a network
 * follow each other in the table with some factors, and the search for one passes hundreds of others. */
static inline uint32_t hash_address(const Counter *c, const uint8_t *address, uint8_t length)
{
	if (length == 4) {
		uint32_t value;
		memcpy(&value, address, 4);
		return (uint32_t)mix((value ^ c->seed[0]) * c->seed[1]);
	}
	return (uint32_t)(mix((word(address) ^ c->seed[0]) * c->seed[1] + (word(address + 8) ^ c->seed[2]) * c->seed[3]) >> 16);
}

/* Not memcmp: this runs twice per packet, and the call would cost more than the comparison. */
static inline bool same_address(const uint8_t *one, const uint8_t *two, uint8_t length)
{
	if (length == 4) {
		uint32_t a, b;
		memcpy(&a, one, 4);
		memcpy(&b, two, 4);
		return a == b;
	}
	return word(one) == word(two) && word(one + 8) == word(two + 8);
}

static inline bool same_mac(const uint8_t *one, const uint8_t *two)
{
	uint32_t a, b;
	uint16_t c, d;
	memcpy(&a, one, 4);
	memcpy(&b, two, 4);
	memcpy(&c, one + 4, 2);
	memcpy(&d, two + 4, 2);
	return a == b && c == d;
}

/* For tables where later entries replace earlier ones: unseeded, so that results are reproducible. */
static inline uint64_t place_of(uint64_t one, uint64_t two)
{
	return mix(mix(one * 0x9e3779b97f4a7c15ULL + 1) + two * 0xc2b2ae3d27d4eb4fULL);
}

static inline uint64_t hash_words(const Counter *c, uint64_t one, uint64_t two)
{
	uint64_t sum = (one ^ c->seed[0]) * c->seed[1] + (two ^ c->seed[2]) * c->seed[3];
	return mix(sum ^ sum >> 29);
}

/* ---- options ----------------------------------------------------------------------------------- */

static inline int family(uint8_t protocol)
{
	return protocol == TCP ? 0 : protocol == UDP ? 1 : protocol == SCTP ? 2 : -1;
}

static inline bool bit(const uint8_t map[3][8192], uint8_t protocol, uint16_t port)
{
	int row = family(protocol);
	return row >= 0 && (map[row][port >> 3] >> (port & 7) & 1);
}

/* ---- counter.c ------------------------------------------------------------------------------- */

/* Enlarges an array: first to `least` entries, then doubling up to `most`; `array` is the address of the pointer to it.
 * Returns false if out of memory or at the maximum. */
bool grow(void *array, uint32_t *room, size_t size, uint32_t least, uint32_t most);
/* Doubles a table if half of it is used by so many entries. Returns false if out of memory. */
bool widen(Table *table, uint32_t entries);

static inline void table_add(Table *table, uint32_t hash, uint32_t index)
{
	uint32_t at = hash & table->mask;
	while (table->slots[at].index != NONE)
		at = (at + 1) & table->mask;
	table->slots[at] = (Slot){hash, index};
}

/* ---- hosts.c --------------------------------------------------------------------------------- */

void count_other(Counter *c, int what, uint32_t value, uint64_t packets, uint64_t bytes);
void count_skipped(Counter *c, const char *reason);
/* Returns the index of a link address; NULL stands for none and has index 0. */
uint32_t link_of(Counter *c, const uint8_t *mac);
/* Returns whether the node of a link address is booting; ends the boot of one without new contacts for SETTLED. */
bool booting(Counter *c, Link *link, int64_t now);
void see_dhcp(Counter *c, const Packet *p);
void see_neighbour(Counter *c, const Packet *p);
/* Finds an address that is not in its first slot, or adds it; returns its index. */
uint32_t search_host(Counter *c, const uint8_t *address, uint8_t length, uint32_t hash, const uint8_t *mac);
/* Returns the host that stands for all further addresses behind a router. */
uint32_t together(Counter *c, uint32_t link);
void learn_mac(Counter *c, uint32_t index, const uint8_t *mac);
void claim(Counter *c, const uint8_t *address, uint8_t length, const uint8_t *mac);

static inline uint32_t host_of(Counter *c, const uint8_t *address, uint8_t length, const uint8_t *mac)
{
	uint32_t hash = hash_address(c, address, length);
	const Slot *slot = c->host_table.slots + (hash & c->host_table.mask);
	if (__builtin_expect(slot->hash == hash && slot->index != NONE, 1)) {
		const Host *host = c->hosts + slot->index;
		if (__builtin_expect(host->length == length && same_address(host->address, address, length), 1))
			return slot->index;
	}
	return search_host(c, address, length, hash, mac);
}

/* ---- pairs.c --------------------------------------------------------------------------------- */

/* Finds or adds a pair; returns its index, NONE if the table is full. */
uint32_t find_pair(Counter *c, uint32_t client, uint32_t server, uint8_t protocol, uint16_t port, uint8_t kind);
bool has_pair(const Counter *c, uint32_t client, uint32_t server, uint8_t protocol, uint16_t port, uint8_t kind);
/* Reservoir sampling (Vitter 1985, algorithm R). */
void keep_value(Counter *c, float *kept, uint32_t room, uint32_t *seen, int64_t span);
/* Counts a contact of a client with a service, at most once a second. */
void contact(Counter *c, Pair *pair, int64_t now);

/* ---- flows.c --------------------------------------------------------------------------------- */

void count_packet(Counter *c, const Packet *p);
void fold(Counter *c, uint32_t index);

#endif
