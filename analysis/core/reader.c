/* Capture files -> records: pcap in all its variants, and pcapng.
 *
 * pcap: draft-ietf-opsawg-pcap. pcapng: draft-ietf-opsawg-pcapng. After an invalid record, reading resumes at the next
 * offset with three plausible records in a row, or with a block whose two lengths agree.
 */
#include "core.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_INTERFACES 4096u
#define CHAIN 3
#define FAR 157680000LL /* five years in seconds: maximum distance between records found by searching */
#define AHEAD 2048 /* prefetch distance in bytes */
#define EARLY 315532800LL /* 1980: earlier times are accepted only if other records confirm them */
#define MAX_WIRE (16u << 20)
#define LATEST (INT64_MAX / 2)

static_assert(CHAIN * (24 + MAX_CAPTURED) < WINDOW / 2, "a chain of records has room in half a window");

/* ---- the window on the file: source.c fills it -------------------------------------------------- */

static size_t held(const Source *s) { return s->end - s->start; }

static void fill(Source *s, const Sink *sink, size_t wanted)
{
	if (held(s) < wanted && !s->ended)
		source_fill(s, sink, wanted);
}

static inline bool need(Source *s, const Sink *sink, size_t wanted)
{
	if (__builtin_expect(held(s) < wanted, 0))
		fill(s, sink, wanted);
	return held(s) >= wanted;
}

static uint64_t offset_of(const Source *s, size_t place) { return s->base + place; }

/* Skips bytes, possibly more than the window holds. */
static bool skip(Source *s, const Sink *sink, uint64_t count)
{
	while (count > held(s)) {
		count -= held(s);
		s->start = s->end;
		if (!need(s, sink, 1))
			return false;
	}
	s->start += (size_t)count;
	return true;
}

/* ---- pcap ------------------------------------------------------------------------------------- */

typedef struct {
	bool big;
	uint32_t header, limit, link, scale; /* scale: nanoseconds of a part of a second */
	int64_t last_s;
} Pcap;

static bool pcap_open(const uint8_t *p, Pcap *pcap)
{
	static const struct {
		uint32_t magic, header, scale;
	} dialects[] = {
	    {0xa1b2c3d4u, 16, 1000}, {0xa1b23c4du, 16, 1}, {0xa1b2cd34u, 24, 1000}, /* the last: "modified" */
	};
	for (size_t i = 0; i < sizeof dialects / sizeof *dialects; i++)
		for (int big = 0; big < 2; big++)
			if (get32(p, big) == dialects[i].magic) {
				uint32_t snap = get32(p + 16, big);
				pcap->big = big;
				pcap->header = dialects[i].header;
				pcap->scale = dialects[i].scale;
				/* Some writers exceed the snap length in their header. */
				pcap->limit = snap && snap < MAX_CAPTURED && snap > 65535 ? snap : MAX_CAPTURED;
				pcap->link = get32(p + 20, big) & 0xffffu;
				pcap->last_s = -1;
				return true;
			}
	return false;
}

/* Whether a record header is plausible: stricter than for accepted records. Some microsecond files hold nanoseconds. */
static bool likely(const Pcap *pcap, const uint8_t *p)
{
	uint32_t part = get32(p + 4, pcap->big), captured = get32(p + 8, pcap->big), wire = get32(p + 12, pcap->big);
	return captured && captured <= pcap->limit && wire && wire <= MAX_WIRE && part < NS;
}

static bool near(int64_t one, int64_t two) { return llabs(one - two) < FAR; }

/* Whether a chain of records begins at `place`; all of it is in the window, or the file ends. When searching, the times
   must agree with the last record, or at least with each other. */
static bool chain_here(const Source *s, const Pcap *pcap, size_t place, bool searching)
{
	int64_t first = 0;
	int enough = 1; /* records at the end of the file */
	for (int i = 0; i < CHAIN; i++) {
		if (place == s->end && s->ended)
			return i >= enough;
		if (s->end - place < pcap->header)
			return s->ended && i >= enough;
		const uint8_t *p = s->data + place;
		if (!likely(pcap, p))
			return false;
		int64_t second = get32(p, pcap->big);
		if (i == 0) {
			first = second;
			bool far = searching && (pcap->last_s < 0 || !near(second, pcap->last_s));
			enough = far ? 2 : 1;
			if (far && second < EARLY)
				return false;
		} else if (searching && !near(second, first)) {
			return false;
		}
		uint32_t captured = get32(p + 8, pcap->big);
		if (s->end - place - pcap->header < captured)
			return s->ended && i >= enough;
		place += pcap->header + captured;
	}
	return true;
}

/* Moves to the next place with valid records; returns false at the end of the file. */
static bool pcap_search(Source *s, const Sink *sink, const Pcap *pcap)
{
	s->start++;
	for (;;) {
		fill(s, sink, WINDOW / 2);
		size_t stop = s->ended ? s->end : s->end - CHAIN * (pcap->header + MAX_CAPTURED);
		for (; s->start < stop; s->start++)
			if (chain_here(s, pcap, s->start, true))
				return true;
		if (s->ended)
			return false;
	}
}

/* Whether the records after one with an unusual header confirm it; `second` is then their time. */
static bool is_followed(Source *s, const Sink *sink, const Pcap *pcap, uint32_t captured, int64_t *second)
{
	fill(s, sink, WINDOW / 2);
	if (held(s) < (size_t)pcap->header + captured)
		return false;
	size_t next = s->start + pcap->header + captured;
	if (next == s->end && s->ended)
		return true;
	if (!chain_here(s, pcap, next, false))
		return false;
	*second = get32(s->data + next, pcap->big);
	return true;
}

/* `big` and `header` are constants in the calls, so that the usual variant is specialized. */
static inline __attribute__((always_inline)) void pcap_records(Source *s, const Sink *sink, Pcap *pcap, const bool big,
                                                                const uint32_t header)
{
	const uint32_t parts = (uint32_t)NS / pcap->scale;
	while (need(s, sink, header)) {
		const uint8_t *p = s->data + s->start;
		uint32_t second = get32(p, big), part = get32(p + 4, big);
		uint32_t captured = get32(p + 8, big), wire = get32(p + 12, big);
		uint64_t offset = offset_of(s, s->start);
		bool sane = captured <= pcap->limit && wire <= MAX_WIRE, timed = part < parts;
		int64_t now = second;
		if (sane && __builtin_expect(pcap->last_s < 0, 0))
			pcap->last_s = now;
		/* No captured bytes, more than on the wire, a jump of years: all possible, but also signs of damage. */
		if (sane && __builtin_expect(!timed || captured - 1u >= wire || !near(now, pcap->last_s), 0))
			sane = is_followed(s, sink, pcap, captured, &now);
		if (__builtin_expect(!sane, 0)) {
			sink->problem(sink->owner, offset, "corrupt record");
			if (!pcap_search(s, sink, pcap))
				return;
			continue;
		}
		if (!need(s, sink, (size_t)header + captured)) {
			if (atomic_load(s->stopped))
				return;
			/* Its end is missing, or its length is wrong. */
			if (!pcap_search(s, sink, pcap)) {
				sink->truncated(sink->owner, offset);
				return;
			}
			sink->problem(sink->owner, offset, "corrupt record");
			continue;
		}
		p = s->data + s->start;
		/* Another thread has read it: where the two processors share no cache, each line would be waited for. */
		for (uint32_t line = 0; line < header + captured; line += LINE)
			__builtin_prefetch(p + AHEAD + line);
		pcap->last_s = now;
		Record record = {
		    .time = (int64_t)second * NS + (timed ? (int64_t)part * pcap->scale : 0),
		    .data = p + header,
		    .captured = captured,
		    .wire = wire < captured ? captured : wire,
		    .link = pcap->link,
		};
		if (!sink->record(sink->owner, &record))
			return;
		s->start += header + captured;
	}
	if (held(s) && !atomic_load(s->stopped))
		sink->truncated(sink->owner, offset_of(s, s->start));
}

/* ---- pcapng ----------------------------------------------------------------------------------- */

enum { IDB = 1, OLD_PACKET = 2, SIMPLE = 3, NAMES = 4, STATISTICS = 5, ENHANCED = 6, SECTION = 0x0A0D0D0A };

typedef struct {
	uint32_t link, snap;
	uint8_t resolution;
	int64_t offset; /* seconds added to every time */
} Interface;

typedef struct {
	bool big;
	uint32_t count;
	Interface *interfaces;
	int64_t last;
} Pcapng;

static int64_t time_of(const Interface *interface, uint64_t units)
{
	unsigned power = interface->resolution & 0x7f;
	__int128 ns;
	if (interface->resolution & 0x80) {
		if (power >= 64)
			ns = 0;
		else
			ns = (__int128)(units >> power) * NS +
			     (power ? (__int128)(((unsigned __int128)(units & ((1ULL << power) - 1)) * (uint64_t)NS) >> power) : 0);
	} else if (power <= 9) {
		uint64_t factor = 1;
		for (unsigned i = power; i < 9; i++)
			factor *= 10;
		ns = (__int128)units * (__int128)factor;
	} else {
		for (unsigned i = 9; i < power && units; i++)
			units /= 10;
		ns = (__int128)units;
	}
	ns += (__int128)interface->offset * NS;
	return ns < 0 ? 0 : ns > LATEST ? LATEST : (int64_t)ns;
}

static void add_interface(Pcapng *ng, const uint8_t *body, size_t length)
{
	if (length < 8 || ng->count >= MAX_INTERFACES)
		return;
	Interface interface = {.link = get16(body, ng->big), .snap = get32(body + 4, ng->big), .resolution = 6};
	for (size_t at = 8; at + 4 <= length;) {
		uint16_t code = get16(body + at, ng->big), size = get16(body + at + 2, ng->big);
		at += 4;
		if (!code || size > length - at)
			break;
		if (code == 9 && size == 1)
			interface.resolution = body[at];
		if (code == 14 && size == 8) {
			uint64_t low = get32(body + at + (ng->big ? 4 : 0), ng->big), high = get32(body + at + (ng->big ? 0 : 4), ng->big);
			uint64_t seconds = high << 32 | low;
			/* An offset of more than 30,000 years is invalid. */
			interface.offset = seconds < 1ULL << 40 || seconds > UINT64_MAX - (1ULL << 40) ? (int64_t)seconds : 0;
		}
		at += ((size_t)size + 3) & ~(size_t)3;
	}
	ng->interfaces[ng->count++] = interface;
}

static bool packet_block(const Source *s, const Sink *sink, Pcapng *ng, uint32_t type, const uint8_t *body, size_t length)
{
	Record record = {.time = ng->last};
	uint32_t number = 0;
	size_t header = type == SIMPLE ? 4 : 20;
	if (length < header)
		goto broken;
	if (type != SIMPLE) {
		number = type == OLD_PACKET ? get16(body, ng->big) : get32(body, ng->big);
		record.captured = get32(body + 12, ng->big);
		record.wire = get32(body + 16, ng->big);
	} else {
		record.wire = record.captured = get32(body, ng->big);
	}
	if (number >= ng->count) {
		sink->problem(sink->owner, offset_of(s, s->start), "packet of an interface that was not described");
		return true;
	}
	const Interface *interface = ng->interfaces + number;
	if (type == SIMPLE) {
		if (interface->snap && record.captured > interface->snap)
			record.captured = interface->snap;
		if (record.captured > length - header)
			record.captured = (uint32_t)(length - header);
	} else {
		uint64_t units = (uint64_t)get32(body + 4, ng->big) << 32 | get32(body + 8, ng->big);
		record.time = ng->last = time_of(interface, units);
	}
	if (record.captured > length - header || record.captured > MAX_CAPTURED || record.wire > MAX_WIRE)
		goto broken;
	record.data = body + header;
	record.link = interface->link;
	if (record.wire < record.captured)
		record.wire = record.captured;
	return sink->record(sink->owner, &record);
broken:
	sink->problem(sink->owner, offset_of(s, s->start), "corrupt record");
	return true;
}

/* Returns the length of a complete block of a known type at this place, for searching; 0: none. */
static uint32_t block_here(const Source *s, bool big, size_t place)
{
	if (s->end - place < 12)
		return 0;
	const uint8_t *p = s->data + place;
	uint32_t type = get32(p, big);
	if (type == SECTION) {
		if (s->end - place < 28)
			return 0;
		uint32_t order = be32(p + 8);
		if (order != 0x1A2B3C4Du && order != 0x4D3C2B1Au)
			return 0;
		big = order == 0x1A2B3C4Du;
	} else if (type < IDB || type > ENHANCED) {
		return 0;
	}
	uint32_t length = get32(p + 4, big);
	bool fine = length >= 12 && length % 4 == 0 && length <= s->end - place && length <= WINDOW / 4 &&
	            get32(p + length - 4, big) == length;
	return fine ? length : 0;
}

static bool block_search(Source *s, const Sink *sink, bool big)
{
	s->start++;
	for (;;) {
		fill(s, sink, WINDOW / 2);
		size_t stop = s->ended ? s->end : s->end - WINDOW / 4;
		for (; s->start < stop; s->start++)
			if (block_here(s, big, s->start))
				return true;
		if (s->ended)
			return false;
	}
}

/* Whether two consecutive blocks are inside of an alleged block, which is then invalid. */
static bool blocks_inside(Source *s, const Sink *sink, bool big, uint32_t length)
{
	fill(s, sink, WINDOW / 2);
	size_t stop = length < held(s) ? s->start + length : s->end;
	for (size_t place = s->start + 1; place < stop; place++) {
		uint32_t one = block_here(s, big, place);
		if (one && place + one < stop && block_here(s, big, place + one))
			return true;
	}
	return false;
}

/* Returns the length of the block at the start of the window; 0 if it is invalid. */
static uint32_t block_length(Source *s, const Sink *sink, Pcapng *ng, uint32_t *type)
{
	*type = get32(s->data + s->start, ng->big);
	if (*type == SECTION) {
		if (!need(s, sink, 28))
			return 28;
		uint32_t order = be32(s->data + s->start + 8);
		if (order != 0x1A2B3C4Du && order != 0x4D3C2B1Au)
			return 0;
		ng->big = order == 0x1A2B3C4Du;
	}
	uint32_t length = get32(s->data + s->start + 4, ng->big);
	uint32_t least = *type == SECTION ? 28 : 12;
	return length >= least && length % 4 == 0 ? length : 0;
}

/* Skips a block that is not needed, of any size; returns false at the end of the file. */
static bool pass_block(Source *s, const Sink *sink, bool big, uint32_t length)
{
	uint64_t offset = offset_of(s, s->start);
	if (blocks_inside(s, sink, big, length)) {
		sink->problem(sink->owner, offset, "corrupt record");
		return block_search(s, sink, big);
	}
	if (!skip(s, sink, length - 4) || !need(s, sink, 4)) {
		if (!atomic_load(s->stopped))
			sink->truncated(sink->owner, offset);
		return false;
	}
	bool fine = get32(s->data + s->start, big) == length;
	if (!fine)
		sink->problem(sink->owner, offset, "corrupt record");
	s->start += fine ? 4 : 0;
	return fine || block_search(s, sink, big);
}

static void pcapng_blocks(Source *s, const Sink *sink, Pcapng *ng)
{
	while (need(s, sink, 12)) {
		uint64_t offset = offset_of(s, s->start);
		uint32_t type, length = block_length(s, sink, ng, &type);
		bool packet = type == ENHANCED || type == SIMPLE || type == OLD_PACKET;
		if (length > WINDOW / 4 && (type == NAMES || (type > ENHANCED && type != SECTION))) {
			if (!pass_block(s, sink, ng->big, length)) /* names, secrets, custom blocks: not needed */
				return;
			continue;
		}
		bool there = length && length <= WINDOW / 4 && need(s, sink, length);
		if (!there || get32(s->data + s->start + length - 4, ng->big) != length) {
			bool missing = length && length <= WINDOW / 4 && !there;
			if (atomic_load(s->stopped))
				return;
			/* Its end is missing, or its length is wrong. */
			bool found = block_search(s, sink, ng->big);
			if (missing && !found)
				sink->truncated(sink->owner, offset);
			else
				sink->problem(sink->owner, offset, "corrupt record");
			if (!found)
				return;
			continue;
		}
		const uint8_t *p = s->data + s->start;
		if (type == SECTION)
			ng->count = 0;
		else if (type == IDB)
			add_interface(ng, p + 8, length - 12);
		else if (packet && !packet_block(s, sink, ng, type, p + 8, length - 12))
			return;
		s->start += length;
	}
	if (held(s) && !atomic_load(s->stopped))
		sink->truncated(sink->owner, offset_of(s, s->start));
}

int read_capture(Source *s, const Sink *sink)
{
	Pcap pcap;
	int status = READ_NOT_A_CAPTURE;
	if (need(s, sink, 24) && pcap_open(s->data + s->start, &pcap)) {
		s->start += 24;
		if (!pcap.big && pcap.header == 16)
			pcap_records(s, sink, &pcap, false, 16);
		else
			pcap_records(s, sink, &pcap, pcap.big, pcap.header);
		status = READ_OK;
	} else if (held(s) >= 12 && be32(s->data + s->start) == SECTION) {
		Pcapng ng = {.interfaces = calloc(MAX_INTERFACES, sizeof(Interface))};
		if (!ng.interfaces) {
			s->error = ENOMEM;
			return READ_ERROR;
		}
		pcapng_blocks(s, sink, &ng);
		free(ng.interfaces);
		status = READ_OK;
	}
	sink->moving(sink->owner);
	return s->error ? READ_ERROR : status;
}
