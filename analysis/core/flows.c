/* Packets -> flows -> pairs of a client and a service.
 *
 * A flow is both directions of one 5-tuple. It is folded into (added to) its pair when the table is full or everything
 * is read: closed flows first, then those idle for longest. Sums do not depend on the time of folding.
 */
#include "tables.h"

#include <stdlib.h>

#define SILENCE NS           /* a client's packet after this idle time is a new contact */
#define LOADING (1ULL << 20) /* a node that transfers this many bytes in a boot flow is still booting */
#define GIVEN_UP (30 * NS)   /* a request without an answer for this long has failed */
#define NFS 2049u
#define DYNAMIC 32768u       /* first dynamic server port */

static uint32_t sampled(const Counter *c, uint8_t protocol, uint16_t port)
{
	for (uint32_t i = 0; i < c->sampleds; i++)
		if (c->sampled[i].protocol == protocol && c->sampled[i].port == port)
			return i;
	return NONE;
}

/* ---- flows: who is the client -------------------------------------------------------------------- */

static inline uint64_t learnt_key(uint32_t host, uint8_t protocol, uint16_t port)
{
	return (uint64_t)host << 32 | (uint64_t)port << 8 | protocol;
}

static void learn_server(Counter *c, uint32_t host, uint8_t protocol, uint16_t port)
{
	uint64_t key = learnt_key(host, protocol, port);
	c->learnt[place_of(key, 1) & (LEARNT - 1)] = key + 1;
}

static bool learnt_server(const Counter *c, uint32_t host, uint8_t protocol, uint16_t port)
{
	uint64_t key = learnt_key(host, protocol, port);
	return c->learnt[place_of(key, 1) & (LEARNT - 1)] == key + 1;
}

/* Whether the sender of a flow's first packet is the server, for flows without a recognizable start. */
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
	if (p->protocol == UDP && p->source_port == 67 && p->destination_port == 68) /* DHCP's two ports, RFC 2131, 4.1 */
		return true;
	/* An NFS client binds a port below 1024 (resvport of nfs(5)), which may belong to another service. */
	if (here && (p->source_port == NFS || p->destination_port == NFS))
		return p->source_port == NFS;
	here = learnt_server(c, source, p->protocol, p->source_port);
	there = learnt_server(c, destination, p->protocol, p->destination_port);
	if (here != there)
		return here;
	if (p->protocol == UDP || p->protocol == SCTP)
		return false;
	/* A segment in the middle of an unknown connection: servers usually have the lower port. */
	return p->source_port < p->destination_port;
}

static Transfer *transfer_at(Counter *c, uint32_t client, uint16_t port)
{
	return c->transfers + (place_of((uint64_t)client << 16 | port, 2) & (TRANSFERS - 1));
}

/* Whether a datagram between dynamic ports is one of TFTP's data, or acknowledges one (RFC 1350, 5): of some captures the
 * request is missing. Sizes of blocks are 512 or more, and in practice multiples of four (RFC 2348). */
static bool is_block(const Packet *p, Flow *flow)
{
	bool data = p->payload[1] == 3, fits = data ? p->length >= 516 && p->length % 4 == 0 : p->length == 4;
	uint16_t port = data ? p->source_port : p->destination_port;
	if (p->payload[0] || !(data || p->payload[1] == 4) || !fits || port < DYNAMIC)
		return false;
	flow->client = data ? !p->way : p->way;
	return true;
}

/* TFTP's data comes from a port that is not announced (RFC 1350, 4). */
static bool is_transfer(Counter *c, const Packet *p, Flow *flow)
{
	if (p->captured >= 2 && is_block(p, flow))
		return true;
	const Transfer *to = transfer_at(c, p->b, p->destination_port);
	if (to->used && to->client == p->b && to->server == p->a && to->port == p->destination_port) {
		flow->client = !p->way;
		return true;
	}
	return false;
}

/* ---- flows: from the first packet to the fold ---------------------------------------------------- */

/* Returns 1: the first line has the pattern; 0: it has not; -1: more bytes are needed. */
static int in_first_line(const First *first, const uint8_t *data, uint32_t got)
{
	const uint8_t *end = got ? memchr(data, '\n', got) : NULL;
	uint32_t room = end ? (uint32_t)(end - data) : got;
	for (uint32_t at = 0; at + first->length <= room; at++)
		if (!memcmp(data + at, first->low, first->length))
			return 1;
	return end || got == GATHERED ? 0 : -1;
}

/* Returns 1 + the index of the pattern that the first bytes match; 0: none; -1: more bytes are needed. */
static int kind_of(const Counter *c, uint8_t protocol, uint16_t port, const uint8_t *data, uint32_t got)
{
	bool known = bit(c->known, protocol, port);
	int none = 0;
	for (uint32_t i = 0; i < c->firsts; i++) {
		const First *first = c->first + i;
		if (first->protocol != protocol || (first->port ? first->port != port : known))
			continue;
		if (first->offset == ANYWHERE) {
			int found = in_first_line(first, data, got);
			if (found > 0)
				return (int)i + 1;
			none = found < 0 ? found : none;
			continue;
		}
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
	return none;
}

static inline uint16_t server_port(const Flow *f) { return port_at(f->ends[!f->client]); }
static inline uint32_t client_of(const Flow *f) { return host_at(f->ends[f->client]); }
static inline uint32_t server_of(const Flow *f) { return host_at(f->ends[!f->client]); }

static void assign(Counter *c, Flow *f, uint8_t kind)
{
	uint16_t port = server_port(f);
	if (kind == UNREAD && !bit(c->matched, f->protocol, port))
		kind = 0;
	if (f->flags & FLOW_TFTP)
		port = 69;
	else if (family(f->protocol) < 0)
		port = 0;
	else if (port >= DYNAMIC && !bit(c->known, f->protocol, port))
		port = 0;
	uint32_t client = client_of(f), server = server_of(f);
	uint32_t index = find_pair(c, client, server, f->protocol, port, kind);
	f->pair = index;
	if (index == NONE)
		return;
	Pair *pair = c->pairs + index;
	/* A flow that continues after its state was dropped was not open before the capture began. */
	if ((f->flags & FLOW_MIDSTREAM) && c->dropped &&
	    (pair->last != INT64_MIN || has_pair(c, client, server, f->protocol, port, EMPTY)))
		f->flags = (uint16_t)((f->flags & ~FLOW_MIDSTREAM) | FLOW_RESUMED);
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

/* Assigns the flow to its pair, with what the first bytes show; kind -1: they were not captured, or not all. */
static void decide(Counter *c, Flow *f, int kind)
{
	uint32_t gather = f->pair;
	if (gather != NONE) {
		c->gathers[gather].next = c->free_gather;
		c->free_gather = gather;
	}
	assign(c, f, kind < 0 ? UNREAD : (uint8_t)kind);
	f->sample = sampled(c, f->protocol, server_port(f));
}

/* Appends to a client's first bytes, and assigns the flow once they identify the service. */
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
	if (ahead > UINT32_MAX / 2) /* retransmission */
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

/* The client's first message is complete, as far as it was captured. */
static void conclude(Counter *c, Flow *f)
{
	decide(c, f, f->pair != NONE && c->gathers[f->pair].got ? 0 : -1);
}

static void keep_flow(Counter *c, const Flow *f)
{
	if (c->kept_count == c->kept_room && !grow(&c->kept, &c->kept_room, sizeof *c->kept, 1024, c->keep_flows)) {
		c->out_of_memory = true;
		return;
	}
	int up = f->client;
	c->kept[c->kept_count++] = (Kept){
	    client_of(f), server_of(f), port_at(f->ends[up]), server_port(f), f->protocol,
	    {f->packets[up], f->packets[!up]}, {f->bytes[up], f->bytes[!up]}};
}

void fold(Counter *c, uint32_t index)
{
	Flow *f = c->flows + index;
	if (f->sample == WAITS && f->protocol == TCP && (f->flags & (FLOW_OPENED | FLOW_DATA)) == FLOW_OPENED)
		decide(c, f, EMPTY);
	else if (f->sample == WAITS)
		conclude(c, f);
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
	Slot *slots = c->flow_table.slots;
	uint32_t mask = c->flow_table.mask, at = c->flows[index].hash & mask;
	while (slots[at].index != index)
		at = (at + 1) & mask;
	/* Later entries of the probe sequence move up (Knuth, 6.4 R). */
	for (uint32_t next = (at + 1) & mask; slots[next].index != NONE; next = (next + 1) & mask) {
		uint32_t home = slots[next].hash & mask;
		if (((next - home) & mask) >= ((next - at) & mask)) {
			slots[at] = slots[next];
			at = next;
		}
	}
	slots[at].index = NONE;
	c->free_flows[c->free_count++] = index;
}

static bool is_old(const Flow *f, int64_t now, int pass)
{
	int64_t idle = now - f->last;
	if (pass == 0)
		return (f->flags & FLOW_CLOSED) && idle > 5 * NS;
	if (pass > 5)
		return true;
	int64_t patience = (f->protocol == TCP && !(f->flags & FLOW_CLOSED) ? 900 : 60) * NS;
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
		serves = p->protocol == ICMP ? p->chunk == 0 : p->chunk == 129; /* echo reply */
	} else if (p->what & HAS_PORTS) {
		serves = sender_serves(c, p);
		if (serves || p->protocol == TCP)
			state = FLOW_MIDSTREAM;
	}
	f->client = serves ? !p->way : p->way;
	f->flags = (uint16_t)(FLOW_USED | state);
	if (state == FLOW_OPENED && p->protocol == TCP)
		learn_server(c, server_of(f), TCP, server_port(f));
	if (p->protocol == UDP && !bit(c->known, UDP, p->source_port) && !bit(c->known, UDP, p->destination_port) &&
	    is_transfer(c, p, f))
		f->flags = FLOW_USED | FLOW_TFTP;
	else if (p->protocol == UDP && !serves)
		learn_server(c, p->b, UDP, p->destination_port);
	uint16_t port = server_port(f);
	bool known = bit(c->known, p->protocol, port);
	bool wait = (p->what & HAS_PORTS) && !(f->flags & FLOW_TFTP) &&
	            (known ? bit(c->matched, p->protocol, port) : c->any_first);
	wait |= p->protocol == TCP && state == FLOW_OPENED; /* for data: without any it is EMPTY */
	f->pair = NONE;
	f->sample = wait ? WAITS : NONE;
	/* A new connection is a contact; in an open one, a client's packet is. */
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
	if (c->sample_count == c->sample_room && !grow(&c->samples, &c->sample_room, sizeof *c->samples, 64, MAX_SAMPLES))
		return;
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
		/* A retransmitted request keeps its time, or the latency would be too short. */
		if (!f->request || p->time - f->request > GIVEN_UP)
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
		if (f->sample == WAITS)
			conclude(c, f);
		if (f->pair != NONE && p->time >= f->request && f->request >= c->resumed) {
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
	int way = p->way;
	bool from_client = way == f->client;
	uint64_t before = f->bytes[way];
	f->packets[way]++;
	f->bytes[way] += p->wire;
	if (p->time > f->last)
		f->last = p->time;
	if (p->what & LATER_FRAGMENT)
		return;
	if (p->flags & (FIN | RST))
		f->flags |= (uint16_t)(p->flags & RST ? FLOW_CLOSED : 512 << way);
	/* A client acknowledges only what it got: of some captures the server's packets are missing. */
	if (from_client ? (p->flags & (SYN | RST | ACK)) == ACK : p->length || (p->flags & (SYN | ACK)) == (SYN | ACK))
		f->flags |= FLOW_ANSWERED;
	if (p->length)
		f->flags |= FLOW_DATA;
	if (p->length || p->protocol == ICMP || p->protocol == ICMP6)
		speak(c, f, p, from_client);
	if ((f->flags & FLOW_BOOT) && before / LOADING != f->bytes[way] / LOADING) {
		Link *link = c->links + c->hosts[client_of(f)].link;
		if (booting(c, link, p->time))
			link->novel = p->time;
	}
}

static uint32_t open_flow(Counter *c, const Packet *p)
{
	if (!c->free_count && c->flow_count == c->max_flows)
		make_room(c);
	if (!widen(&c->flow_table, c->flow_count - c->free_count)) {
		c->out_of_memory = true;
		return NONE;
	}
	uint32_t index = c->free_count ? c->free_flows[--c->free_count] : c->flow_count++;
	Flow *f = c->flows + index;
	memset(f, 0, sizeof *f);
	f->ends[0] = p->ends[0];
	f->ends[1] = p->ends[1];
	f->protocol = p->protocol;
	f->hash = (uint32_t)p->hash;
	f->sequence = p->sequence;
	f->first = f->last = p->time;
	f->spoke = p->time;
	table_add(&c->flow_table, f->hash, index);
	begin(c, f, p);
	return index;
}

static inline bool is_flow(const Flow *f, const Packet *p)
{
	return f->ends[0] == p->ends[0] && f->ends[1] == p->ends[1] && f->protocol == p->protocol;
}

static uint32_t find_flow(const Counter *c, const Packet *p)
{
	const Table *table = &c->flow_table;
	uint32_t hash = (uint32_t)p->hash;
	for (uint32_t at = hash & table->mask; table->slots[at].index != NONE; at = (at + 1) & table->mask)
		if (table->slots[at].hash == hash && is_flow(c->flows + table->slots[at].index, p))
			return table->slots[at].index;
	return NONE;
}

void count_packet(Counter *c, const Packet *p)
{
	uint32_t index = p->flow;
	/* Since the prefetch it may have been folded, and its entry reused. */
	if (!(c->flows[index].flags & FLOW_USED) || !is_flow(c->flows + index, p))
		index = find_flow(c, p);
	if (index == NONE) {
		if ((p->what & LATER_FRAGMENT) && !(p->what & HAS_PORTS)) {
			count_other(c, OTHER_FRAGMENT, 0, 1, p->wire);
			return;
		}
		index = open_flow(c, p);
	} else if (p->protocol == TCP && (p->flags & (SYN | ACK)) == SYN && p->sequence != c->flows[index].sequence) {
		/* The ports are reused by another connection. */
		fold(c, index);
		forget(c, index);
		index = open_flow(c, p);
	}
	if (index == NONE) {
		c->beyond[0]++;
		c->beyond[1] += p->wire;
		return;
	}
	update(c, c->flows + index, p);
}
