/* Records -> packets in batches, for prefetching; creation and release of counters. */
#include "tables.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>

#define GAP (30 * NS) /* minimum time between two files that counts as a gap */
/* Inside a file silence proves nothing: the network may be idle, or the capture filtered. A gap is long, much longer than
 * every other silence, and ends a part in which there was traffic for a minute. */
#define QUIET (600 * NS)
#define LONGER 20
#define PART (60 * NS)
#define CERTAIN (36 * 3600 * NS) /* longer silences are gaps in any case: what runs every day runs then */
#define YEAR (366LL * 86400 * NS)
#define AGREED 16u    /* more times in a row that agree with each other are right */
#define FEW 4u /* as many are right if the capture begins or ends with them */
#define UNSET (949363200LL * NS) /* clocks without a battery begin in 1970, 1980 or January 2000 */

#define HUGE (2u << 20) /* bytes of a huge page: with small pages, every access to a large table would miss the TLB */
#define FEW_BYTES (512u << 10)

static void run_batch(void *owner)
{
	Counter *c = owner;
	/* Without branches, which could not be predicted: any flow and any pair are fetched where there is none yet. */
	for (uint32_t i = 0; i < c->batched; i++) {
		Packet *p = c->batch + i;
		const Slot *slot = c->flow_table.slots + ((uint32_t)p->hash & c->flow_table.mask);
		p->flow = slot->hash == (uint32_t)p->hash && slot->index != NONE ? slot->index : 0;
		const char *flow = (const char *)(c->flows + p->flow);
		__builtin_prefetch(flow, 1);
		__builtin_prefetch(flow + LINE, 1);
	}
	for (uint32_t i = 0; i < c->batched; i++) {
		uint32_t pair = c->flows[c->batch[i].flow].pair;
		__builtin_prefetch(c->pairs + (pair < c->pair_count ? pair : 0), 1);
	}
	for (uint32_t i = 0; i < c->batched; i++) {
		const Packet *p = c->batch + i;
		c->now = p->time;
		/* Before it is counted: a discover belongs to the boot that it starts. */
		if (p->protocol == UDP && (p->destination_port == 67 || p->source_port == 67) && p->captured)
			see_dhcp(c, p);
		else if (p->protocol == ICMP6)
			see_neighbour(c, p);
		count_packet(c, p);
	}
	c->batched = 0;
	atomic_store_explicit(&c->seen_packets, c->packets, memory_order_relaxed);
	atomic_store_explicit(&c->seen_bytes, c->bytes, memory_order_relaxed);
}

static void see_fragment(Counter *c, Packet *p)
{
	uint64_t hash = place_of((uint64_t)p->a << 32 | p->b, (uint64_t)p->fragment << 8 | p->protocol);
	Fragment *f = c->fragments + (hash & (FRAGMENTS - 1));
	if (p->what & FIRST_FRAGMENT) {
		*f = (Fragment){p->a, p->b, p->fragment, p->source_port, p->destination_port, p->protocol, 1};
	} else if (f->used && f->a == p->a && f->b == p->b && f->id == p->fragment && f->protocol == p->protocol) {
		p->source_port = f->source_port;
		p->destination_port = f->destination_port;
		p->what |= HAS_PORTS;
	}
}

static bool has_mac(const Packet *p, const uint8_t *mac)
{
	return (p->source_mac && !memcmp(p->source_mac, mac, 6)) || (p->destination_mac && !memcmp(p->destination_mac, mac, 6));
}

/* Whether a DHCP server assigns the address of --node (yiaddr, RFC 2131, figure 1). The link address (chaddr) then
 * identifies packets of its boot without that address. */
static bool is_named(Counter *c, const Packet *p)
{
	if (c->only_length == 6)
		return p->protocol == UDP && p->source_port == 67 && p->captured >= 34 && !memcmp(p->payload + 28, c->only, 6);
	if (p->protocol != UDP || p->source_port != 67 || p->captured < 34 || memcmp(p->payload + 16, c->only, 4))
		return false;
	memcpy(c->only_mac, p->payload + 28, 6);
	c->only_mac_known = true;
	return true;
}

static bool is_wanted(Counter *c, const Packet *p, const Other *other)
{
	const uint8_t *only = c->only;
	if (c->only_length == 6)
		return has_mac(p, only) || is_named(c, p);
	if (c->only_length == 4 && (is_named(c, p) || (c->only_mac_known && p->protocol == UDP && has_mac(p, c->only_mac))))
		return true;
	if (other->arp && c->only_length == 4)
		return !memcmp(other->arp + 14, only, 4) || !memcmp(other->arp + 24, only, 4);
	return p->address_length == c->only_length &&
	       (!memcmp(p->source, only, c->only_length) || !memcmp(p->destination, only, c->only_length));
}

/* ---- times and gaps ----------------------------------------------------------------------------- */

static inline bool is_near(int64_t one, int64_t two)
{
	int64_t far = one - two;
	return far < YEAR && far > -YEAR;
}

/* Counts everything before this packet, which may move in the batch; returns its new place. */
static Packet *run_before(Counter *c, Packet *p)
{
	if (c->batched) {
		Packet kept = *p;
		run_batch(c);
		c->batch[0] = kept;
	}
	return c->batch;
}

/* Time of the last packet, counted or not. */
static inline int64_t last_time(const Counter *c) { return c->alive > c->end ? c->alive : c->end; }

/* Keeps a gap, in place of the shortest if there are many. */
static void keep_gap(Counter *c, int64_t from, int64_t to)
{
	uint32_t at = c->gap_count;
	if (at < MAX_GAPS)
		c->gap_count++;
	else
		for (uint32_t i = at = 0; i < MAX_GAPS; i++)
			if (c->gaps[i].to - c->gaps[i].from < c->gaps[at].to - c->gaps[at].from)
				at = i;
	if (c->gaps[at].to - c->gaps[at].from < to - from) {
		c->gaps[at].from = from;
		c->gaps[at].to = to;
	}
}

/* Ends the part of the capture before `time`. */
static void resume(Counter *c, int64_t time)
{
	int64_t last = last_time(c);
	if (c->resumed <= c->end)
		c->counted_gap = c->gap;
	if (time > last) {
		c->gap += time - last;
		keep_gap(c, last, time);
	}
	c->resumed = c->part = time;
}

static bool is_gap(const Counter *c, int64_t silence)
{
	if (c->fresh)
		return silence > GAP;
	if (silence > CERTAIN)
		return true;
	return silence > QUIET && silence / LONGER > c->quiet && last_time(c) - c->part >= PART;
}

/* A silence longer than all before, or before a file's first packet. Intervals across a gap are unknown, hence
 * `run_before`. */
static Packet *see_silence(Counter *c, Packet *p)
{
	int64_t silence = p->time - last_time(c);
	if (c->odd_times)
		return p;
	if (c->packets && is_gap(c, silence)) {
		p = run_before(c, p);
		resume(c, p->time);
	} else if (silence > c->quiet) {
		c->quiet = silence;
	}
	c->fresh = false;
	return p;
}

/* A packet that --node leaves out shows that the capture ran. */
static void see_other(Counter *c, Packet *p)
{
	if (!c->start || c->odd_times || p->time <= last_time(c) || !is_near(p->time, last_time(c)))
		return;
	see_silence(c, p);
	c->alive = p->time;
}

static void reject_odd(Counter *c)
{
	for (; c->odd_times; c->odd_times--)
		count_skipped(c, "time far from its neighbours'");
}

/* Whether the times before the odd ones were wrong: of a few packets, or of fewer packets, if the clock was not set yet or
 * was ahead. */
static bool began_wrong(const Counter *c)
{
	uint64_t before = c->packets - c->odd_times;
	return before < FEW || (before < c->odd_times && (c->end < UNSET || c->end > c->odd_first));
}

/* The odd times are right. Their packets, a few, were counted at the end of the part before. */
static void accept_odd(Counter *c)
{
	if (began_wrong(c)) {
		c->odd_times = (uint32_t)(c->packets - c->odd_times);
		reject_odd(c);
		c->start = c->end = c->alive = c->bin_base = c->odd_first;
		c->bin_to = 0;
	}
	int64_t last = c->raw > c->odd_first ? c->raw : c->odd_first;
	c->odd_times = 0;
	resume(c, c->odd_first);
	c->start = c->odd_first < c->start ? c->odd_first : c->start;
	c->end = c->alive = last > c->end ? last : c->end;
	c->fresh = false;
}

/* A time more than a year from those before is an error, and the last right one is used, until more than AGREED in a row
 * agree: then the capture goes on there. Returns the packet's place in the batch. */
static Packet *plausible(Counter *c, Packet *p)
{
	int64_t time = p->time;
	if (__builtin_expect(!time, 0)) { /* a simple packet block has no time */
		p->time = c->end;
		return p;
	}
	bool agrees = is_near(time, c->raw);
	c->raw = time;
	if (__builtin_expect(c->odd_times == 0 && agrees, 1))
		return p;
	if (is_near(time, last_time(c))) {
		reject_odd(c);
		return p;
	}
	if (c->odd_times == 0 || !agrees) {
		reject_odd(c);
		c->odd_first = time;
	}
	if (c->odd_times == AGREED) {
		p = run_before(c, p);
		accept_odd(c);
		return p;
	}
	c->odd_times++;
	p->time = c->end;
	return p;
}

static void see_span(Counter *c, int64_t time)
{
	Span *span = c->spans + c->file;
	if (!span->packets || time < span->first)
		span->first = time;
	if (!span->packets || time > span->last)
		span->last = time;
	span->packets++;
}

bool grow(void *array, uint32_t *room, size_t size, uint32_t least, uint32_t most)
{
	uint32_t wanted = *room == 0 ? least : *room > most / 2 ? most : *room * 2;
	void *old, *more;
	memcpy(&old, array, sizeof old);
	if (wanted > most)
		wanted = most;
	if (wanted <= *room || !(more = realloc(old, wanted * size)))
		return false;
	memcpy(array, &more, sizeof more);
	*room = wanted;
	return true;
}

bool counter_open(Counter *c)
{
	if (c->file == c->span_room && !grow(&c->spans, &c->span_room, sizeof *c->spans, 16, MAX_FILES))
		return false;
	c->spans[c->file] = (Span){0};
	c->fresh = true;
	c->calm = 0;
	return true;
}

/* Checks the time of a packet; returns its place in the batch. */
static Packet *check_time(Counter *c, Packet *p)
{
	if (__builtin_expect(c->start == 0, 0)) {
		c->start = c->end = c->part = c->bin_base = c->raw = p->time;
		for (uint32_t i = 0; p->time && i < c->batched; i++) /* earlier packets had no time */
			c->batch[i].time = p->time;
	} else {
		p = plausible(c, p);
	}
	if (__builtin_expect(p->time - c->end > c->quiet || c->fresh, 0))
		p = see_silence(c, p);
	if (p->time > c->end)
		c->end = p->time;
	if (p->time < c->start)
		c->start = p->time;
	const Span *span = c->spans + c->file;
	bool calm = c->start && !c->only_length && !c->fresh && !c->odd_times && c->alive <= c->end && span->packets &&
	            span->first <= c->end && span->last <= c->end;
	c->calm = calm ? (uint64_t)(c->quiet < YEAR ? c->quiet : YEAR - 1) + 1 : 0;
	return p;
}

static inline void count_record(Counter *c, const Record *record)
{
	if (record->captured < record->wire) {
		c->cut++;
		c->cut_at = record->captured > c->cut_at ? record->captured : c->cut_at;
	}
	c->packets++;
	c->bytes += record->wire;
}

/* Decodes any packet and checks its time. Returns its place in the batch; NULL if it belongs to no flow. */
static __attribute__((noinline)) Packet *take_unusual(Counter *c, const Record *record, Packet *p)
{
	Other other;
	bool flow = decode(record, p, &other);
	if (c->only_length && !is_wanted(c, p, &other)) {
		see_other(c, p);
		return NULL;
	}
	p = check_time(c, p);
	see_span(c, p->time);
	count_record(c, record);
	if (flow)
		return p;
	count_other(c, other.what, other.value, 1, record->wire);
	if (other.arp)
		claim(c, other.arp + 14, 4, other.arp + 8);
	return NULL;
}

/* Finds the two ends of a flow, and where it is in the table. */
static inline void find_ends(Counter *c, Packet *p)
{
	p->a = host_of(c, p->source, p->address_length, p->source_mac);
	p->b = host_of(c, p->destination, p->address_length, p->destination_mac);
	if (__builtin_expect(p->what & (FIRST_FRAGMENT | LATER_FRAGMENT), 0))
		see_fragment(c, p);
	uint64_t sender = end_of(p->a, p->source_port), receiver = end_of(p->b, p->destination_port);
	p->way = sender > receiver;
	p->ends[0] = sender < receiver ? sender : receiver;
	p->ends[1] = sender < receiver ? receiver : sender;
	p->hash = hash_words(c, p->ends[0], p->ends[1] << 8 | p->protocol);
	__builtin_prefetch(c->flow_table.slots + ((uint32_t)p->hash & c->flow_table.mask));
}

static bool take_record(void *owner, const Record *record)
{
	Counter *c = owner;
	Packet *p = c->batch + c->batched; /* moves if those before it are counted first */
	if (__builtin_expect((uint64_t)(record->time - c->end) < c->calm && decode_usual(record, p), 1)) {
		Span *span = c->spans + c->file;
		c->raw = c->end = span->last = record->time;
		span->packets++;
		count_record(c, record);
	} else if (!(p = take_unusual(c, record, p))) {
		return true;
	}
	find_ends(c, p);
	Host *from = c->hosts + p->a, *to = c->hosts + p->b;
	from->sent++;
	to->received++;
	if (p->source_mac && !(from->macs && same_mac(from->mac[0], p->source_mac)))
		learn_mac(c, p->a, p->source_mac);
	if (p->destination_mac) {
		memcpy(to->via, p->destination_mac, 6);
		to->flags |= HOST_VIA;
	}
	if (__builtin_expect(p->what & OUTGOING, 0))
		from->flags |= HOST_OUTGOING;
	if (++c->batched < BATCH)
		return true;
	run_batch(c);
	return !c->out_of_memory && !atomic_load_explicit(&c->stopped, memory_order_relaxed);
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
	c->calm = 0;
	run_batch(c);
	/* At the end fewer times suffice, but only later ones: a clock may have been reset. */
	if (c->odd_times >= FEW && c->odd_first > c->end)
		accept_odd(c);
	else
		reject_odd(c);
	if (c->resumed > c->end) /* after the last packet of --node */
		c->gap = c->counted_gap;
	for (uint32_t i = 0; i < c->flow_count; i++)
		if (c->flows[i].flags & FLOW_USED)
			fold(c, i);
	c->flow_count = c->free_count = 0;
	memset(c->flow_table.slots, 0xff, ((size_t)c->flow_table.mask + 1) * sizeof(Slot));
	for (uint32_t i = 0; i < c->link_count; i++)
		booting(c, c->links + i, c->end);
}

bool widen(Table *table, uint32_t entries)
{
	size_t size = table->slots ? (size_t)table->mask + 1 : 0, more = size ? size * 2 : SLOTS;
	if (entries < size / 2)
		return true;
	Slot *old = table->slots, *slots = aligned_alloc(more * sizeof *slots < HUGE ? LINE : HUGE, more * sizeof *slots);
	if (!slots)
		return false;
	if (more * sizeof *slots >= HUGE)
		madvise(slots, more * sizeof *slots, MADV_HUGEPAGE);
	memset(slots, 0xff, more * sizeof *slots);
	*table = (Table){slots, (uint32_t)more - 1};
	for (size_t i = 0; i < size; i++)
		if (old[i].index != NONE)
			table_add(table, old[i].hash, old[i].index);
	free(old);
	return true;
}

/* Zeros at the start of a line; `place` is what free() wants. Memory that is not used yet costs nothing, and what a small
 * capture uses is in small pages. */
static void *lines(void **place, size_t size)
{
	*place = calloc(1, size + LINE);
	if (!*place)
		return NULL;
	uintptr_t start = ((uintptr_t)*place + LINE - 1) & ~(uintptr_t)(LINE - 1), far = (start + FEW_BYTES) & ~(uintptr_t)4095;
	if (size > FEW_BYTES + HUGE)
		madvise((void *)far, start + size - far, MADV_HUGEPAGE);
	return (void *)start;
}

bool counter_begin(Counter *c)
{
	if (getrandom(c->seed, sizeof c->seed, GRND_NONBLOCK) != sizeof c->seed)
		memset(c->seed, 0x5a, sizeof c->seed);
	c->seed[1] |= 1;
	c->seed[3] |= 1;
	c->dice = 0x9e3779b97f4a7c15ULL;
	c->bin = NS;
	c->hosts = calloc(MAX_HOSTS, sizeof *c->hosts);
	c->links = calloc(MAX_LINKS, sizeof *c->links);
	c->link_slots = malloc(SLOTS_LINK * sizeof *c->link_slots);
	c->flows = lines(&c->flows_place, c->max_flows * sizeof *c->flows);
	c->free_flows = malloc(c->max_flows * sizeof *c->free_flows);
	c->pairs = lines(&c->pairs_place, c->max_pairs * sizeof *c->pairs);
	c->learnt = calloc(LEARNT, sizeof *c->learnt);
	c->fragments = calloc(FRAGMENTS, sizeof *c->fragments);
	c->transfers = calloc(TRANSFERS, sizeof *c->transfers);
	c->gathers = malloc(MAX_GATHERS * sizeof *c->gathers);
	if (!c->hosts || !c->links || !c->link_slots || !c->flows || !c->free_flows || !c->pairs || !c->learnt ||
	    !c->fragments || !c->transfers || !c->gathers || !widen(&c->host_table, 0) || !widen(&c->flow_table, 0) ||
	    !widen(&c->pair_table, 0))
		return false;
	for (uint32_t i = 0; i < MAX_GATHERS; i++)
		c->gathers[i].next = i + 1 < MAX_GATHERS ? i + 1 : NONE;
	memset(c->link_slots, 0xff, SLOTS_LINK * sizeof *c->link_slots);
	link_of(c, NULL); /* index 0: no link address */
	return counter_open(c);
}

void counter_end(Counter *c)
{
	free(c->spans);
	free(c->hosts);
	free(c->host_table.slots);
	free(c->links);
	free(c->link_slots);
	free(c->boots);
	free(c->flows_place);
	free(c->free_flows);
	free(c->flow_table.slots);
	free(c->pairs_place);
	free(c->pair_table.slots);
	free(c->learnt);
	free(c->fragments);
	free(c->transfers);
	free(c->gathers);
	free(c->samples);
	free(c->kept);
}
