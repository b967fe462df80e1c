/* Pairs of a client and a service: contacts, intervals and timelines. */
#include "tables.h"

#include <stdlib.h>

#define SILENCE NS /* minimum time between two contacts */
#define ROUTER 16u /* a link address with more addresses belongs to a router */
#define TRIES 256u /* a client that tries more ports where no service is known scans */

/* ---- pairs --------------------------------------------------------------------------------------- */

static uint64_t pair_hash(const Counter *c, uint32_t client, uint32_t server, uint8_t protocol, uint16_t port, uint8_t kind)
{
	return hash_words(c, (uint64_t)client << 32 | server, (uint64_t)protocol << 32 | (uint64_t)port << 8 | kind);
}

static uint32_t search_pair(const Counter *c, uint32_t client, uint32_t server, uint8_t protocol, uint16_t port,
                            uint8_t kind, uint32_t hash)
{
	const Table *table = &c->pair_table;
	for (uint32_t at = hash & table->mask; table->slots[at].index != NONE; at = (at + 1) & table->mask) {
		const Pair *pair = c->pairs + table->slots[at].index;
		if (table->slots[at].hash == hash && pair->client == client && pair->server == server &&
		    pair->protocol == protocol && pair->port == port && pair->kind == kind)
			return table->slots[at].index;
	}
	return NONE;
}

bool has_pair(const Counter *c, uint32_t client, uint32_t server, uint8_t protocol, uint16_t port, uint8_t kind)
{
	uint32_t hash = (uint32_t)pair_hash(c, client, server, protocol, port, kind);
	return search_pair(c, client, server, protocol, port, kind, hash) != NONE;
}

uint32_t find_pair(Counter *c, uint32_t client, uint32_t server, uint8_t protocol, uint16_t port, uint8_t kind)
{
	for (int turn = 0;; turn++) {
		uint32_t hash = (uint32_t)pair_hash(c, client, server, protocol, port, kind);
		uint32_t found = search_pair(c, client, server, protocol, port, kind, hash);
		if (found != NONE)
			return found;
		/* When the table is almost full, the addresses behind a router are counted as one. */
		const Host *far = c->hosts + server, *near = c->hosts + client;
		bool tight = c->pair_count >= c->max_pairs - c->max_pairs / 4;
		if (tight && turn == 0) {
			uint32_t far_side = c->links[far->link].addresses > ROUTER ? together(c, far->link) : server;
			uint32_t near_side = c->links[near->link].addresses > ROUTER ? together(c, near->link) : client;
			if (far_side != server || near_side != client) {
				server = far_side;
				client = near_side;
				continue;
			}
		}
		/* From half of the table on, a scan's further ports are counted as one: it must not displace services. */
		bool unknown = port && (!kind || kind == EMPTY) && !bit(c->known, protocol, port);
		if (unknown && near->tried > TRIES && c->pair_count >= c->max_pairs / 2) {
			port = 0;
			continue;
		}
		if (c->pair_count == c->max_pairs || !widen(&c->pair_table, c->pair_count))
			return NONE;
		Pair *pair = c->pairs + c->pair_count; /* all zero */
		c->hosts[client].tried += unknown;
		pair->client = client;
		pair->server = server;
		pair->protocol = protocol;
		pair->port = port;
		pair->kind = kind;
		pair->hash = hash;
		pair->first = INT64_MAX;
		pair->last = pair->contact = INT64_MIN;
		table_add(&c->pair_table, hash, c->pair_count);
		return c->pair_count++;
	}
}

/* Deterministic, so that results are reproducible. */
static uint32_t roll(Counter *c, uint32_t sides)
{
	c->dice ^= c->dice << 13;
	c->dice ^= c->dice >> 7;
	c->dice ^= c->dice << 17;
	return (uint32_t)((c->dice >> 32) * sides >> 32);
}

void keep_value(Counter *c, float *kept, uint32_t room, uint32_t *seen, int64_t span)
{
	if (*seen == UINT32_MAX)
		return;
	uint32_t at = *seen < room ? *seen : roll(c, *seen + 1);
	(*seen)++;
	if (at < room)
		kept[at] = (float)((double)span / (double)NS);
}

static void fold_timeline(uint16_t *bins)
{
	for (int i = 0; i < BINS; i++) {
		uint32_t sum = 2 * i + 1 < BINS ? (uint32_t)bins[2 * i] + bins[2 * i + 1] : 0;
		bins[i] = sum > UINT16_MAX ? UINT16_MAX : (uint16_t)sum;
	}
}

static uint32_t bin_of(Counter *c, int64_t now)
{
	if (now >= c->bin_from && now < c->bin_to) /* the part of the previous contact: divisions are slow */
		return c->bin_at;
	if (now <= c->bin_base)
		return 0;
	while ((now - c->bin_base) / c->bin >= BINS) {
		for (uint32_t i = 0; i < c->pair_count; i++) {
			fold_timeline(c->pairs[i].timeline);
			fold_timeline(c->pairs[i].timeline_boot);
		}
		c->bin *= 2;
	}
	c->bin_at = (uint32_t)((now - c->bin_base) / c->bin);
	c->bin_from = c->bin_base + c->bin_at * c->bin;
	c->bin_to = c->bin_from + c->bin;
	return c->bin_at;
}

/* A host without an address yet, which is booting: 0.0.0.0 or ::. */
static bool is_nameless(const Host *host)
{
	static const uint8_t nothing[16];
	return host->length && same_address(host->address, nothing, host->length);
}

void contact(Counter *c, Pair *pair, int64_t now)
{
	if (pair->contact != INT64_MIN && now - pair->contact < SILENCE && now >= pair->contact)
		return;
	/* An interval across a gap is unknown. */
	if (pair->contact != INT64_MIN && now > pair->contact && pair->contact >= c->resumed)
		keep_value(c, pair->intervals, INTERVALS, &pair->intervals_seen, now - pair->contact);
	if (now > pair->contact) /* an idle connection is counted late */
		pair->contact = now;
	/* Either side may be the booting node. */
	Link *link = c->links + c->hosts[pair->client].link;
	if (!booting(c, link, now)) {
		Link *far = c->links + c->hosts[pair->server].link;
		if (booting(c, far, now))
			link = far;
	}
	uint32_t bin = bin_of(c, now);
	uint16_t *timeline = pair->timeline;
	bool nameless = is_nameless(c->hosts + pair->client);
	if (link->booting || nameless) {
		if (!nameless && pair->boots != link->boots) {
			pair->boots = link->boots;
			link->novel = now;
		}
		pair->contacts_boot++;
		timeline = pair->timeline_boot;
	} else {
		pair->contacts_steady++;
	}
	if (timeline[bin] != UINT16_MAX)
		timeline[bin]++;
}

