/* Packets -> flows -> pairs of a client and a service.
 *
 * A flow is both directions of one 5-tuple. It is folded into its pair when room is wanted or all is read: closed
 * ones first, then those that were silent longest. Sums do not depend on when that happens.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define SILENCE NS                 /* a client that says something after so long makes a new contact */
#define SETTLED (30 * NS)          /* a node that asked for nothing new for so long has booted */
#define LOADING (1ULL << 20)       /* ... or loaded so many more bytes of what it asked for while it booted */
#define YEAR (366LL * 86400 * NS)
#define DYNAMIC 32768u             /* server ports from here on are given out by systems, not by standards */
#define ROUTER 16u                 /* a link address with more addresses behind it is a router's */

/* ---- hashing: seeded, so that no capture can be made that collides ----------------------------- */

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

static inline uint32_t hash_address(const Counter *c, const uint8_t *address, uint8_t length)
{
	if (length == 4) {
		uint32_t value;
		memcpy(&value, address, 4);
		return (uint32_t)(mix((value ^ c->seed[0]) * (c->seed[1] | 1)) >> 16);
	}
	return (uint32_t)(mix((word(address) ^ c->seed[0]) * (c->seed[1] | 1) + (word(address + 8) ^ c->seed[2]) * (c->seed[3] | 1)) >> 16);
}

static inline uint64_t hash_words(const Counter *c, uint64_t one, uint64_t two)
{
	return mix(mix((one ^ c->seed[0]) * (c->seed[1] | 1)) + (two ^ c->seed[2]) * (c->seed[3] | 1));
}

/* ---- what was asked for ------------------------------------------------------------------------ */

static int family(uint8_t protocol)
{
	return protocol == TCP ? 0 : protocol == UDP ? 1 : protocol == SCTP ? 2 : -1;
}

static inline bool bit(const uint8_t map[3][8192], uint8_t protocol, uint16_t port)
{
	int row = family(protocol);
	return row >= 0 && (map[row][port >> 3] >> (port & 7) & 1);
}

static uint32_t sampled(const Counter *c, uint8_t protocol, uint16_t port)
{
	for (uint32_t i = 0; i < c->sampleds; i++)
		if (c->sampled[i].protocol == protocol && c->sampled[i].port == port)
			return i;
	return NONE;
}

/* ---- what no flow is made of ------------------------------------------------------------------- */

static void count_other(Counter *c, int what, uint32_t value, uint64_t packets, uint64_t bytes)
{
	for (uint32_t i = 0; i < c->other_count; i++) {
		OtherCount *o = c->others + i;
		/* The last one takes all that there is no room for. */
		if ((o->what == what && o->value == value) || i == MAX_OTHERS - 1) {
			o->packets += packets;
			o->bytes += bytes;
			return;
		}
	}
	bool last = c->other_count == MAX_OTHERS - 1;
	c->others[c->other_count++] = (OtherCount){last ? OTHER_TOO_MANY : what, last ? 0 : value, packets, bytes};
}

static void count_skipped(Counter *c, const char *reason)
{
	for (uint32_t i = 0; i < c->skipped_count; i++)
		if (!strcmp(c->skipped[i].reason, reason)) {
			c->skipped[i].count++;
			return;
		}
	if (c->skipped_count < sizeof c->skipped / sizeof *c->skipped)
		c->skipped[c->skipped_count++] = (Skipped){reason, 1};
}

void counter_problem(Counter *c, uint64_t offset, const char *what)
{
	count_skipped(c, what);
	if (c->problem_count < MAX_PROBLEMS)
		c->problems[c->problem_count++] = (Problem){c->file, offset, what};
}

/* ---- link addresses, and the boots of those who have them --------------------------------------- */

static uint32_t link_of(Counter *c, const uint8_t *mac)
{
	static const uint8_t none[8];
	uint64_t value = 0;
	memcpy(&value, mac ? mac : none, 6);
	uint32_t at = (uint32_t)hash_words(c, value, 0) & (SLOTS_LINK - 1);
	for (;; at = (at + 1) & (SLOTS_LINK - 1)) {
		uint32_t index = c->link_slots[at];
		if (index == NONE)
			break;
		if (!memcmp(c->links[index].mac, &value, 6))
			return index;
	}
	if (c->link_count == MAX_LINKS)
		return 0;
	Link *link = c->links + c->link_count;
	memcpy(link->mac, &value, 6);
	link->together = NONE;
	link->boot = NONE;
	c->link_slots[at] = c->link_count;
	return c->link_count++;
}

static void settle(Counter *c, Link *link, int64_t when)
{
	link->booting = false;
	if (link->boot != NONE)
		c->boots[link->boot].settled = when;
}

static bool booting(Counter *c, Link *link, int64_t now)
{
	if (link->booting && now - link->novel > SETTLED)
		settle(c, link, link->novel);
	return link->booting;
}

/* A DHCP discover (RFC 2131) of a node that is not booting already begins its boot. */
static void see_dhcp(Counter *c, const Packet *p)
{
	static const uint8_t cookie[4] = {0x63, 0x82, 0x53, 0x63};
	if (p->captured < 244 || p->payload[0] != 1 || p->payload[1] != 1 || p->payload[2] != 6 ||
	    memcmp(p->payload + 236, cookie, 4))
		return;
	bool discover = false;
	for (uint32_t at = 240; at + 2 < p->captured && p->payload[at] != 255;) {
		if (!p->payload[at]) {
			at++;
			continue;
		}
		if (p->payload[at] == 53)
			discover = p->payload[at + 2] == 1;
		at += 2u + p->payload[at + 1];
	}
	if (!discover)
		return;
	Link *link = c->links + link_of(c, p->payload + 28);
	if (link == c->links || booting(c, link, p->time))
		return;
	link->booting = true;
	link->boots++;
	link->discovered = link->novel = p->time;
	link->boot = NONE;
	if (c->boot_count == c->boot_room && c->boot_room < MAX_BOOTS) {
		uint32_t room = c->boot_room ? c->boot_room * 2 : 1024;
		Boot *more = realloc(c->boots, room * sizeof *more);
		if (!more)
			return;
		c->boots = more;
		c->boot_room = room;
	}
	if (c->boot_count < c->boot_room) {
		link->boot = c->boot_count;
		Boot *boot = c->boots + c->boot_count++;
		memcpy(boot->mac, link->mac, 6);
		boot->began = p->time;
		boot->settled = 0;
	}
}

/* ---- addresses ---------------------------------------------------------------------------------- */

static uint32_t new_host(Counter *c, const uint8_t *address, uint8_t length, uint32_t hash, uint32_t link)
{
	Host *host = c->hosts + c->host_count;
	memset(host, 0, sizeof *host);
	memcpy(host->address, address, length);
	host->length = length;
	host->hash = hash;
	host->link = link;
	c->links[link].addresses++;
	return c->host_count++;
}

/* One host for all further addresses behind a router. */
static uint32_t together(Counter *c, uint32_t link)
{
	static const uint8_t nothing[16];
	Link *l = c->links + link;
	if (l->together == NONE) {
		if (c->host_count >= MAX_HOSTS)
			return 0;
		l->together = new_host(c, nothing, 0, 0, link);
		Host *host = c->hosts + l->together;
		host->flags |= HOST_TOGETHER;
		if (link) {
			memcpy(host->mac[0], l->mac, 6);
			host->macs = 1;
		}
	}
	return l->together;
}

static uint32_t host_of(Counter *c, const uint8_t *address, uint8_t length, const uint8_t *mac)
{
	uint32_t hash = hash_address(c, address, length), at = hash & (SLOTS_HOST - 1);
	for (;; at = (at + 1) & (SLOTS_HOST - 1)) {
		Slot *slot = c->host_slots + at;
		if (slot->index == NONE)
			break;
		if (slot->hash == hash) {
			Host *host = c->hosts + slot->index;
			if (host->length == length && !memcmp(host->address, address, length))
				return slot->index;
		}
	}
	uint32_t link = link_of(c, mac);
	/* Without link addresses nobody can tell who is a router: then there may be as many as there is room for. */
	uint32_t most = link ? MAX_ADDRESSES : MAX_HOSTS / 2;
	if (c->links[link].addresses >= most || c->host_count >= MAX_HOSTS - MAX_HOSTS / 8)
		return together(c, c->host_count >= MAX_HOSTS - MAX_HOSTS / 8 ? 0 : link);
	uint32_t index = new_host(c, address, length, hash, link);
	c->host_slots[at] = (Slot){hash, index};
	return index;
}

static void learn_mac(Counter *c, uint32_t index, const uint8_t *mac)
{
	Host *host = c->hosts + index;
	if (host->flags & HOST_TOGETHER)
		return;
	for (int i = 0; i < host->macs; i++)
		if (!memcmp(host->mac[i], mac, 6))
			return;
	if (host->macs < 2)
		memcpy(host->mac[host->macs++], mac, 6);
	if (host->macs == 1)
		host->link = link_of(c, mac);
}

static void claim(Counter *c, const uint8_t *address, uint8_t length, const uint8_t *mac)
{
	static const uint8_t nothing[16];
	if (!memcmp(address, nothing, length) || (mac[0] & 1))
		return;
	Host *host = c->hosts + host_of(c, address, length, mac);
	if (host->flags & HOST_TOGETHER)
		return;
	memcpy(host->claimed, mac, 6);
	host->flags |= HOST_CLAIMED;
}

/* A neighbour advertisement (RFC 4861, 4.4) with the target's link address. */
static void see_neighbour(Counter *c, const Packet *p)
{
	if (p->protocol == ICMP6 && p->chunk == 136 && p->captured >= 32 && p->payload[24] == 2 && p->payload[25] == 1)
		claim(c, p->payload + 8, 16, p->payload + 26);
}

/* ---- pairs --------------------------------------------------------------------------------------- */

static uint64_t pair_hash(const Counter *c, uint32_t client, uint32_t server, uint8_t protocol, uint16_t port, uint8_t kind)
{
	return hash_words(c, (uint64_t)client << 32 | server, (uint64_t)protocol << 32 | (uint64_t)port << 8 | kind);
}

static bool more_pairs(Counter *c)
{
	uint32_t room = c->pair_room * 2 > c->max_pairs ? c->max_pairs : c->pair_room * 2;
	Pair *more = realloc(c->pairs, room * sizeof *more);
	if (!more)
		return false;
	c->pairs = more;
	c->pair_room = room;
	return true;
}

static uint32_t find_pair(Counter *c, uint32_t client, uint32_t server, uint8_t protocol, uint16_t port, uint8_t kind)
{
	for (int turn = 0;; turn++) {
		uint32_t hash = (uint32_t)pair_hash(c, client, server, protocol, port, kind), at = hash & c->pair_mask;
		for (; c->pair_slots[at] != NONE; at = (at + 1) & c->pair_mask) {
			Pair *pair = c->pairs + c->pair_slots[at];
			if (pair->hash == hash && pair->client == client && pair->server == server && pair->protocol == protocol &&
			    pair->port == port && pair->kind == kind)
				return c->pair_slots[at];
		}
		/* When it gets tight, the addresses behind a router are counted as one. */
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
		if (c->pair_count >= c->max_pairs || (c->pair_count == c->pair_room && !more_pairs(c)))
			return NONE;
		Pair *pair = c->pairs + c->pair_count;
		memset(pair, 0, sizeof *pair);
		pair->client = client;
		pair->server = server;
		pair->protocol = protocol;
		pair->port = port;
		pair->kind = kind;
		pair->hash = hash;
		pair->first = INT64_MAX;
		pair->last = pair->contact = INT64_MIN;
		c->pair_slots[at] = c->pair_count;
		return c->pair_count++;
	}
}

/* The same number every time: reports of one capture are equal. */
static uint32_t roll(Counter *c, uint32_t sides)
{
	c->dice ^= c->dice << 13;
	c->dice ^= c->dice >> 7;
	c->dice ^= c->dice << 17;
	return (uint32_t)((c->dice >> 32) * sides >> 32);
}

/* Reservoir sampling (Vitter 1985, algorithm R). */
static void keep_value(Counter *c, float *kept, uint32_t room, uint32_t *seen, int64_t span)
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

static int bin_of(Counter *c, int64_t now)
{
	if (now <= c->bin_base)
		return 0;
	while ((now - c->bin_base) / c->bin >= BINS) {
		for (uint32_t i = 0; i < c->pair_count; i++) {
			fold_timeline(c->pairs[i].timeline);
			fold_timeline(c->pairs[i].timeline_boot);
		}
		c->bin *= 2;
	}
	return (int)((now - c->bin_base) / c->bin);
}

/* A client speaks to a service, at most once a second. */
static void contact(Counter *c, Pair *pair, int64_t now)
{
	if (pair->contact != INT64_MIN && now - pair->contact < SILENCE && now >= pair->contact)
		return;
	if (pair->contact != INT64_MIN && now > pair->contact)
		keep_value(c, pair->intervals, INTERVALS, &pair->intervals_seen, now - pair->contact);
	if (now > pair->contact) /* a connection that never said a word is counted late */
		pair->contact = now;
	/* The node is the one that boots, whoever of the two it is. */
	Link *link = c->links + c->hosts[pair->client].link;
	if (!booting(c, link, now)) {
		Link *far = c->links + c->hosts[pair->server].link;
		if (booting(c, far, now))
			link = far;
	}
	int bin = bin_of(c, now);
	uint16_t *timeline = pair->timeline;
	if (link->booting) {
		if (pair->boots != link->boots) {
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

/* ---- flows: who is the client -------------------------------------------------------------------- */

static inline uint64_t learnt_key(uint32_t host, uint8_t protocol, uint16_t port)
{
	return (uint64_t)host << 32 | (uint64_t)port << 8 | protocol;
}

static void learn_server(Counter *c, uint32_t host, uint8_t protocol, uint16_t port)
{
	uint64_t key = learnt_key(host, protocol, port);
	c->learnt[hash_words(c, key, 1) & (LEARNT - 1)] = key + 1;
}

static bool learnt_server(const Counter *c, uint32_t host, uint8_t protocol, uint16_t port)
{
	uint64_t key = learnt_key(host, protocol, port);
	return c->learnt[hash_words(c, key, 1) & (LEARNT - 1)] == key + 1;
}

/* Whether the sender of a flow's first packet is its server, for flows whose beginning does not say. */
static bool sender_serves(const Counter *c, const Packet *p)
{
	uint32_t source = p->a, destination = p->b;
	bool here = bit(c->known, p->protocol, p->source_port), there = bit(c->known, p->protocol, p->destination_port);
	if (p->protocol == UDP && p->source_port == 123 && p->destination_port == 123 && p->captured) {
		unsigned mode = p->payload[0] & 7; /* RFC 5905, figure 10 */
		if (mode == 4 || mode == 3)
			return mode == 4;
	}
	if (here != there)
		return here;
	here = learnt_server(c, source, p->protocol, p->source_port);
	there = learnt_server(c, destination, p->protocol, p->destination_port);
	if (here != there)
		return here;
	if (p->protocol == UDP || p->protocol == SCTP)
		return false;
	/* A segment in the middle of a connection, and nothing known: servers have the lower ports, as a rule. */
	return p->source_port < p->destination_port;
}

static Transfer *transfer_at(Counter *c, uint32_t client, uint16_t port)
{
	return c->transfers + (hash_words(c, (uint64_t)client << 16 | port, 2) & (TRANSFERS - 1));
}

/* TFTP's data comes from a port that nobody announced (RFC 1350, 4). */
static bool is_transfer(Counter *c, const Packet *p, Flow *flow)
{
	const Transfer *to = transfer_at(c, p->b, p->destination_port);
	if (to->used && to->client == p->b && to->server == p->a && to->port == p->destination_port) {
		flow->client = flow->a == p->b && flow->a_port == p->destination_port ? 0 : 1;
		return true;
	}
	return false;
}

/* ---- flows: from the first packet to the fold ---------------------------------------------------- */

/* 1 + the index of what the first bytes match; 0: nothing; -1: more of them would tell. */
static int kind_of(const Counter *c, uint8_t protocol, uint16_t port, const uint8_t *data, uint32_t got)
{
	bool known = bit(c->known, protocol, port);
	for (uint32_t i = 0; i < c->firsts; i++) {
		const First *first = c->first + i;
		if (first->protocol != protocol || (first->port ? first->port != port : known))
			continue;
		uint32_t there = got > first->offset ? got - first->offset : 0, same = 0;
		there = there < first->length ? there : first->length;
		while (same < there && data[first->offset + same] >= first->low[same] &&
		       data[first->offset + same] <= first->high[same])
			same++;
		if (same == first->length)
			return (int)i + 1;
		if (same == there)
			return -1;
	}
	return 0;
}

static inline uint16_t server_port(const Flow *f) { return f->client ? f->a_port : f->b_port; }

static void assign(Counter *c, Flow *f, uint8_t kind)
{
	uint16_t port = server_port(f);
	if (f->flags & FLOW_TFTP)
		port = 69;
	else if (family(f->protocol) < 0)
		port = 0;
	else if (port >= DYNAMIC && !bit(c->known, f->protocol, port))
		port = 0;
	uint32_t client = f->client ? f->b : f->a, server = f->client ? f->a : f->b;
	uint32_t index = find_pair(c, client, server, f->protocol, port, kind);
	f->pair = index;
	if (index == NONE)
		return;
	Pair *pair = c->pairs + index;
	/* A flow that comes back after its state was dropped is not one that was open before the capture began. */
	if ((f->flags & FLOW_MIDSTREAM) && c->dropped && pair->last != INT64_MIN)
		f->flags = (uint8_t)((f->flags & ~FLOW_MIDSTREAM) | FLOW_RESUMED);
	if (f->first < pair->first)
		pair->first = f->first;
	if (f->last > pair->last)
		pair->last = f->last;
	if (f->flags & FLOW_CONTACT)
		contact(c, pair, f->spoke);
	Link *link = c->links + c->hosts[client].link;
	if (link->booting && !(f->flags & FLOW_BOOT) && booting(c, link, f->first))
		f->flags |= FLOW_BOOT;
}

/* The first bytes tell what they can: the flow gets its pair. */
static void decide(Counter *c, Flow *f, int kind)
{
	uint32_t gather = f->pair;
	if (gather != NONE) {
		c->gathers[gather].next = c->free_gather;
		c->free_gather = gather;
	}
	assign(c, f, kind > 0 ? (uint8_t)kind : 0);
	f->sample = sampled(c, f->protocol, server_port(f));
}

/* Adds what a client sent to its first bytes, and decides when they tell. */
static void gather(Counter *c, Flow *f, const Packet *p)
{
	uint16_t port = server_port(f);
	if (p->protocol != TCP) {
		decide(c, f, kind_of(c, f->protocol, port, p->payload, p->captured));
		return;
	}
	if (f->pair == NONE) {
		if (c->free_gather == NONE) {
			decide(c, f, kind_of(c, f->protocol, port, p->payload, p->captured));
			return;
		}
		f->pair = c->free_gather;
		c->free_gather = c->gathers[f->pair].next;
		c->gathers[f->pair] = (Gather){.next = p->sequence};
	}
	Gather *g = c->gathers + f->pair;
	uint32_t ahead = p->sequence - g->next;
	if (ahead > UINT32_MAX / 2) /* sent again */
		return;
	if (!ahead) {
		uint32_t room = (uint32_t)(GATHERED - g->got), more = p->captured < room ? p->captured : room;
		memcpy(g->data + g->got, p->payload, more);
		g->got = (uint8_t)(g->got + more);
		g->next += p->length;
	}
	int kind = kind_of(c, f->protocol, port, g->data, g->got);
	if (kind >= 0 || ahead || p->captured < p->length || g->got == GATHERED)
		decide(c, f, kind);
}

static void keep_flow(Counter *c, const Flow *f)
{
	if (c->kept_count == c->kept_room) {
		uint32_t room = c->kept_room ? c->kept_room * 2 : 1024;
		Kept *more = realloc(c->kept, room * sizeof *more);
		if (!more) {
			c->out_of_memory = true;
			return;
		}
		c->kept = more;
		c->kept_room = room;
	}
	int up = f->client;
	c->kept[c->kept_count++] = (Kept){
	    up ? f->b : f->a, up ? f->a : f->b, up ? f->b_port : f->a_port, up ? f->a_port : f->b_port, f->protocol,
	    {f->packets[up], f->packets[!up]}, {f->bytes[up], f->bytes[!up]}};
}

static void fold(Counter *c, uint32_t index)
{
	Flow *f = c->flows + index;
	if (f->sample == WAITS)
		decide(c, f, 0);
	if (c->kept_count < c->keep_flows)
		keep_flow(c, f);
	if (f->pair == NONE) {
		c->beyond[0] += f->packets[0] + f->packets[1];
		c->beyond[1] += f->bytes[0] + f->bytes[1];
	} else {
		Pair *pair = c->pairs + f->pair;
		int up = f->client; /* packets[up]: from the client */
		pair->packets[0] += f->packets[up];
		pair->packets[1] += f->packets[!up];
		pair->bytes[0] += f->bytes[up];
		pair->bytes[1] += f->bytes[!up];
		if (f->last > pair->last)
			pair->last = f->last;
		pair->opened += (f->flags & FLOW_OPENED) != 0;
		pair->midstream += (f->flags & FLOW_MIDSTREAM) != 0;
		pair->resumed += (f->flags & FLOW_RESUMED) != 0;
		pair->unanswered += (f->flags & (FLOW_OPENED | FLOW_ANSWERED)) == FLOW_OPENED;
	}
	f->flags = 0;
}

static void forget(Counter *c, uint32_t index)
{
	uint32_t mask = c->flow_mask, at = c->flows[index].hash & mask;
	while (c->flow_slots[at].index != index)
		at = (at + 1) & mask;
	/* Those that had to stand further on move up (Knuth, 6.4 R). */
	for (uint32_t next = (at + 1) & mask; c->flow_slots[next].index != NONE; next = (next + 1) & mask) {
		uint32_t home = c->flow_slots[next].hash & mask;
		if (((next - home) & mask) >= ((next - at) & mask)) {
			c->flow_slots[at] = c->flow_slots[next];
			at = next;
		}
	}
	c->flow_slots[at].index = NONE;
	c->free_flows[c->free_count++] = index;
}

static bool is_old(const Flow *f, int64_t now, int pass)
{
	int64_t idle = now - f->last;
	if (pass == 0)
		return f->closed && idle > 5 * NS;
	if (pass > 5)
		return true;
	int64_t patience = (f->protocol == TCP && !f->closed ? 900 : 60) * NS;
	return idle > patience >> (2 * (pass - 1));
}

static void make_room(Counter *c)
{
	for (int pass = 0; c->free_count < c->max_flows / 16; pass++) {
		for (uint32_t i = 0; i < c->flow_count && c->free_count < c->max_flows / 4; i++)
			if ((c->flows[i].flags & FLOW_USED) && is_old(c->flows + i, c->now, pass)) {
				fold(c, i);
				forget(c, i);
			}
	}
	c->dropped = true;
}

static void begin(Counter *c, Flow *f, const Packet *p)
{
	bool sender_is_a = f->a == p->a && f->a_port == p->source_port;
	bool serves = false;
	uint8_t state = FLOW_OPENED;
	if (p->protocol == TCP && (p->what & HAS_FLAGS)) {
		if (p->flags & SYN) {
			serves = (p->flags & ACK) != 0;
		} else {
			serves = sender_serves(c, p);
			state = FLOW_MIDSTREAM;
		}
	} else if (p->protocol == ICMP || p->protocol == ICMP6) {
		serves = p->protocol == ICMP ? p->chunk == 0 : p->chunk == 129; /* an echo's reply */
	} else if (p->what & HAS_PORTS) {
		serves = sender_serves(c, p);
		if (serves || p->protocol == TCP)
			state = FLOW_MIDSTREAM;
	}
	f->client = sender_is_a == serves;
	f->flags = (uint8_t)(FLOW_USED | state);
	if (state == FLOW_OPENED && p->protocol == TCP)
		learn_server(c, f->client ? f->a : f->b, TCP, server_port(f));
	if (p->protocol == UDP && !bit(c->known, UDP, p->source_port) && !bit(c->known, UDP, p->destination_port) &&
	    is_transfer(c, p, f))
		f->flags = FLOW_USED | FLOW_TFTP;
	else if (p->protocol == UDP && !serves)
		learn_server(c, p->b, UDP, p->destination_port);
	uint16_t port = server_port(f);
	bool known = bit(c->known, p->protocol, port);
	bool wait = (p->what & HAS_PORTS) && !(f->flags & FLOW_TFTP) &&
	            (known ? bit(c->told, p->protocol, port) : c->any_first);
	f->pair = NONE;
	f->sample = wait ? WAITS : NONE;
	/* A connection is a contact; in the middle of one, what the client says is. */
	if (state == FLOW_OPENED && !(f->flags & FLOW_TFTP)) {
		f->flags |= FLOW_CONTACT;
		f->spoke = p->time;
	}
	if (!wait) {
		assign(c, f, 0);
		f->sample = sampled(c, p->protocol, port);
	}
}

static void keep_sample(Counter *c, const Flow *f, const Packet *p, bool from_client)
{
	Sampled *wanted = c->sampled + f->sample;
	if (wanted->kept >= wanted->wanted || !p->captured)
		return;
	if (c->sample_count == c->sample_room) {
		uint32_t room = c->sample_room ? c->sample_room * 2 : 64;
		Sample *more = realloc(c->samples, room * sizeof *more);
		if (!more)
			return;
		c->samples = more;
		c->sample_room = room;
	}
	Sample *sample = c->samples + c->sample_count++;
	sample->protocol = p->protocol;
	sample->port = wanted->port;
	sample->from_client = from_client;
	sample->time = p->time;
	sample->source = p->a;
	sample->destination = p->b;
	sample->length = (uint16_t)(p->captured < MAX_PAYLOAD ? p->captured : MAX_PAYLOAD);
	memcpy(sample->payload, p->payload, sample->length);
	wanted->kept++;
}

static void speak(Counter *c, Flow *f, const Packet *p, bool from_client)
{
	if (from_client) {
		if (f->sample == WAITS && p->length)
			gather(c, f, p);
		if (!f->request)
			f->request = p->time;
		if (p->time - f->spoke >= SILENCE || !(f->flags & FLOW_CONTACT)) {
			f->flags |= FLOW_CONTACT;
			f->spoke = p->time;
			if (f->pair != NONE && f->sample != WAITS)
				contact(c, c->pairs + f->pair, p->time);
		}
		if (p->protocol == UDP && p->destination_port == 69 && p->captured > 1 && p->payload[0] == 0)
			*transfer_at(c, p->a, p->source_port) = (Transfer){p->a, p->b, p->source_port, true};
	} else if (f->request) {
		if (f->sample == WAITS) /* the client has said what it had to say */
			decide(c, f, 0);
		if (f->pair != NONE && p->time >= f->request) {
			Pair *pair = c->pairs + f->pair;
			keep_value(c, pair->latencies, LATENCIES, &pair->latencies_seen, p->time - f->request);
		}
		f->request = 0;
	}
	if (f->sample < WAITS)
		keep_sample(c, f, p, from_client);
}

static void update(Counter *c, Flow *f, const Packet *p)
{
	int way = f->a == p->a && f->a_port == p->source_port ? 0 : 1;
	bool from_client = way == f->client;
	uint64_t before = f->bytes[way];
	f->packets[way]++;
	f->bytes[way] += p->wire;
	if (p->time > f->last)
		f->last = p->time;
	if (p->what & LATER_FRAGMENT)
		return;
	if (p->flags & (FIN | RST))
		f->closed |= p->flags & RST ? 3 : (uint8_t)(1 << way);
	if (!from_client && (p->length || (p->flags & (SYN | ACK)) == (SYN | ACK)))
		f->flags |= FLOW_ANSWERED;
	if (p->length || p->protocol == ICMP || p->protocol == ICMP6)
		speak(c, f, p, from_client);
	if ((f->flags & FLOW_BOOT) && before / LOADING != f->bytes[way] / LOADING) {
		Link *link = c->links + c->hosts[f->client ? f->b : f->a].link;
		if (booting(c, link, p->time))
			link->novel = p->time;
	}
}

static uint32_t open_flow(Counter *c, const Packet *p, uint32_t at)
{
	if (!c->free_count && c->flow_count == c->max_flows) {
		make_room(c);
		for (at = (uint32_t)p->hash & c->flow_mask; c->flow_slots[at].index != NONE; at = (at + 1) & c->flow_mask)
			;
	}
	if (!c->free_count && c->flow_count == c->flow_room) {
		uint32_t room = c->flow_room * 2 > c->max_flows ? c->max_flows : c->flow_room * 2;
		Flow *more = realloc(c->flows, room * sizeof *more);
		if (!more) {
			c->out_of_memory = true;
			return NONE;
		}
		c->flows = more;
		c->flow_room = room;
	}
	uint32_t index = c->free_count ? c->free_flows[--c->free_count] : c->flow_count++;
	Flow *f = c->flows + index;
	memset(f, 0, sizeof *f);
	bool swap = p->a > p->b || (p->a == p->b && p->source_port > p->destination_port);
	f->a = swap ? p->b : p->a;
	f->b = swap ? p->a : p->b;
	f->a_port = swap ? p->destination_port : p->source_port;
	f->b_port = swap ? p->source_port : p->destination_port;
	f->protocol = p->protocol;
	f->hash = (uint32_t)p->hash;
	f->sequence = p->sequence;
	f->first = f->last = p->time;
	f->spoke = p->time;
	c->flow_slots[at] = (Slot){(uint32_t)p->hash, index};
	begin(c, f, p);
	return index;
}

static bool is_flow(const Flow *f, const Packet *p)
{
	if (f->protocol != p->protocol)
		return false;
	return (f->a == p->a && f->b == p->b && f->a_port == p->source_port && f->b_port == p->destination_port) ||
	       (f->a == p->b && f->b == p->a && f->a_port == p->destination_port && f->b_port == p->source_port);
}

static uint32_t find_flow(const Counter *c, const Packet *p, uint32_t *at)
{
	uint32_t hash = (uint32_t)p->hash;
	for (*at = hash & c->flow_mask; c->flow_slots[*at].index != NONE; *at = (*at + 1) & c->flow_mask)
		if (c->flow_slots[*at].hash == hash && is_flow(c->flows + c->flow_slots[*at].index, p))
			return c->flow_slots[*at].index;
	return NONE;
}

static void count_packet(Counter *c, const Packet *p)
{
	uint32_t at, index = find_flow(c, p, &at);
	if (index == NONE) {
		if ((p->what & LATER_FRAGMENT) && !(p->what & HAS_PORTS)) {
			count_other(c, OTHER_FRAGMENT, 0, 1, p->wire);
			return;
		}
		index = open_flow(c, p, at);
	} else if (p->protocol == TCP && (p->flags & (SYN | ACK)) == SYN && p->sequence != c->flows[index].sequence) {
		/* The ports are used again: another connection. */
		fold(c, index);
		forget(c, index);
		find_flow(c, p, &at);
		index = open_flow(c, p, at);
	}
	if (index == NONE) {
		c->beyond[0]++;
		c->beyond[1] += p->wire;
		return;
	}
	update(c, c->flows + index, p);
}

/* ---- a batch of packets at a time, so that memory is fetched ahead ------------------------------- */

static void run_batch(void *owner)
{
	Counter *c = owner;
	for (uint32_t i = 0; i < c->batched; i++) {
		const Slot *slot = c->flow_slots + ((uint32_t)c->batch[i].hash & c->flow_mask);
		if (slot->index != NONE)
			__builtin_prefetch(c->flows + slot->index, 1);
		__builtin_prefetch((const char *)(c->flows + (slot->index != NONE ? slot->index : 0)) + 64, 1);
	}
	for (uint32_t i = 0; i < c->batched; i++) {
		const Packet *p = c->batch + i;
		c->now = p->time;
		count_packet(c, p);
		if (p->protocol == UDP && p->destination_port == 67 && p->captured)
			see_dhcp(c, p);
		else if (p->protocol == ICMP6)
			see_neighbour(c, p);
	}
	c->batched = 0;
}

static void see_fragment(Counter *c, Packet *p)
{
	uint64_t hash = hash_words(c, (uint64_t)p->a << 32 | p->b, (uint64_t)p->fragment << 8 | p->protocol);
	Fragment *f = c->fragments + (hash & (FRAGMENTS - 1));
	if (p->what & FIRST_FRAGMENT) {
		*f = (Fragment){p->a, p->b, p->fragment, p->source_port, p->destination_port, p->protocol, 1};
	} else if (f->used && f->a == p->a && f->b == p->b && f->id == p->fragment && f->protocol == p->protocol) {
		p->source_port = f->source_port;
		p->destination_port = f->destination_port;
		p->what |= HAS_PORTS;
	}
}

static bool is_wanted(const Counter *c, const Packet *p, const Other *other)
{
	const uint8_t *only = c->only;
	if (c->only_length == 6)
		return (p->source_mac && !memcmp(p->source_mac, only, 6)) ||
		       (p->destination_mac && !memcmp(p->destination_mac, only, 6));
	if (other->arp && c->only_length == 4)
		return !memcmp(other->arp + 14, only, 4) || !memcmp(other->arp + 24, only, 4);
	return p->address_length == c->only_length &&
	       (!memcmp(p->source, only, c->only_length) || !memcmp(p->destination, only, c->only_length));
}

/* A time more than a year from the one before is a mistake, until sixteen in a row agree. */
static int64_t plausible(Counter *c, int64_t time)
{
	int64_t far = time - c->raw;
	bool agrees = far < YEAR && far > -YEAR;
	c->raw = time;
	if (__builtin_expect(c->odd_times == 0 && agrees, 1))
		return time;
	int64_t from_last = time - c->end;
	if (from_last < YEAR && from_last > -YEAR) {
		c->odd_times = 0;
		return time;
	}
	c->odd_times = agrees ? c->odd_times + 1 : 1;
	if (c->odd_times > 16) {
		c->odd_times = 0;
		if (c->packets < 64) /* it was the beginning that was wrong: a clock not set yet */
			c->start = c->end = c->bin_base = time;
		return time;
	}
	count_skipped(c, "time far from its neighbours'");
	return c->end;
}

static bool take_record(void *owner, const Record *record)
{
	Counter *c = owner;
	Packet *p = c->batch + c->batched;
	Other other;
	bool flow = decode(record, p, &other);
	if (c->only_length && !is_wanted(c, p, &other))
		return true;
	if (__builtin_expect(c->packets == 0, 0)) {
		c->start = c->end = c->bin_base = c->raw = p->time;
	} else {
		p->time = plausible(c, p->time);
	}
	if (p->time > c->end)
		c->end = p->time;
	if (p->time < c->start)
		c->start = p->time;
	c->packets++;
	c->bytes += record->wire;
	if (!flow) {
		count_other(c, other.what, other.value, 1, record->wire);
		if (other.arp)
			claim(c, other.arp + 14, 4, other.arp + 8);
		return true;
	}
	p->a = host_of(c, p->source, p->address_length, p->source_mac);
	p->b = host_of(c, p->destination, p->address_length, p->destination_mac);
	Host *from = c->hosts + p->a, *to = c->hosts + p->b;
	from->sent++;
	to->received++;
	if (p->source_mac && (!from->macs || memcmp(from->mac[0], p->source_mac, 6)))
		learn_mac(c, p->a, p->source_mac);
	if (p->destination_mac) {
		memcpy(to->via, p->destination_mac, 6);
		to->flags |= HOST_VIA;
	}
	if (p->what & OUTGOING)
		from->flags |= HOST_OUTGOING;
	if (__builtin_expect(p->what & (FIRST_FRAGMENT | LATER_FRAGMENT), 0))
		see_fragment(c, p);
	bool swap = p->a > p->b || (p->a == p->b && p->source_port > p->destination_port);
	uint64_t hosts = swap ? (uint64_t)p->b << 32 | p->a : (uint64_t)p->a << 32 | p->b;
	uint64_t ports = swap ? (uint64_t)p->destination_port << 16 | p->source_port
	                      : (uint64_t)p->source_port << 16 | p->destination_port;
	p->hash = hash_words(c, hosts, ports << 8 | p->protocol);
	__builtin_prefetch(c->flow_slots + ((uint32_t)p->hash & c->flow_mask));
	if (++c->batched == BATCH)
		run_batch(c);
	return !c->stopped && !c->out_of_memory;
}

static void take_problem(void *owner, uint64_t offset, const char *what) { counter_problem(owner, offset, what); }

static void take_end(void *owner, uint64_t offset)
{
	Counter *c = owner;
	c->truncated = true;
	if (c->problem_count < MAX_PROBLEMS)
		c->problems[c->problem_count++] = (Problem){c->file, offset, "ends in the middle of a record"};
}

Sink counter_sink(Counter *c) { return (Sink){c, take_record, run_batch, take_problem, take_end}; }

void counter_finish(Counter *c)
{
	run_batch(c);
	for (uint32_t i = 0; i < c->flow_count; i++)
		if (c->flows[i].flags & FLOW_USED)
			fold(c, i);
	c->flow_count = c->free_count = 0;
	memset(c->flow_slots, 0xff, ((size_t)c->flow_mask + 1) * sizeof *c->flow_slots);
	for (uint32_t i = 0; i < c->link_count; i++)
		booting(c, c->links + i, c->end);
}

static uint32_t slots_for(uint32_t entries)
{
	uint32_t slots = 64;
	while (slots < entries * 2)
		slots *= 2;
	return slots;
}

bool counter_begin(Counter *c)
{
	if (getrandom(c->seed, sizeof c->seed, GRND_NONBLOCK) != sizeof c->seed)
		memset(c->seed, 0x5a, sizeof c->seed);
	c->dice = 0x9e3779b97f4a7c15ULL;
	c->bin = NS;
	c->flow_mask = slots_for(c->max_flows) - 1;
	c->pair_mask = slots_for(c->max_pairs) - 1;
	c->flow_room = c->max_flows < 4096 ? c->max_flows : 4096;
	c->pair_room = c->max_pairs < 1024 ? c->max_pairs : 1024;
	c->hosts = calloc(MAX_HOSTS, sizeof *c->hosts);
	c->host_slots = malloc(SLOTS_HOST * sizeof *c->host_slots);
	c->links = calloc(MAX_LINKS, sizeof *c->links);
	c->link_slots = malloc(SLOTS_LINK * sizeof *c->link_slots);
	c->flows = malloc(c->flow_room * sizeof *c->flows);
	c->free_flows = malloc(c->max_flows * sizeof *c->free_flows);
	c->flow_slots = malloc(((size_t)c->flow_mask + 1) * sizeof *c->flow_slots);
	c->pairs = malloc(c->pair_room * sizeof *c->pairs);
	c->pair_slots = malloc(((size_t)c->pair_mask + 1) * sizeof *c->pair_slots);
	c->learnt = calloc(LEARNT, sizeof *c->learnt);
	c->fragments = calloc(FRAGMENTS, sizeof *c->fragments);
	c->transfers = calloc(TRANSFERS, sizeof *c->transfers);
	c->gathers = malloc(MAX_GATHERS * sizeof *c->gathers);
	if (!c->hosts || !c->host_slots || !c->links || !c->link_slots || !c->flows || !c->free_flows || !c->flow_slots ||
	    !c->pairs || !c->pair_slots || !c->learnt || !c->fragments || !c->transfers || !c->gathers)
		return false;
	for (uint32_t i = 0; i < MAX_GATHERS; i++)
		c->gathers[i].next = i + 1 < MAX_GATHERS ? i + 1 : NONE;
	memset(c->host_slots, 0xff, SLOTS_HOST * sizeof *c->host_slots);
	memset(c->link_slots, 0xff, SLOTS_LINK * sizeof *c->link_slots);
	memset(c->flow_slots, 0xff, ((size_t)c->flow_mask + 1) * sizeof *c->flow_slots);
	memset(c->pair_slots, 0xff, ((size_t)c->pair_mask + 1) * sizeof *c->pair_slots);
	link_of(c, NULL); /* the first link stands for none */
	return true;
}

void counter_end(Counter *c)
{
	free(c->hosts);
	free(c->host_slots);
	free(c->links);
	free(c->link_slots);
	free(c->boots);
	free(c->flows);
	free(c->free_flows);
	free(c->flow_slots);
	free(c->pairs);
	free(c->pair_slots);
	free(c->learnt);
	free(c->fragments);
	free(c->transfers);
	free(c->gathers);
	free(c->samples);
	free(c->kept);
}
