/* Feeds the native core with mutated captures, and checks that its counts are consistent.
 *
 *   fuzz SEED COUNT FILE...      COUNT inputs made of the files, reproducible by SEED
 *   fuzz SEED COUNT/AT FILE...   only the AT-th of them, to debug a failure
 *
 * The core is compiled with -Dread=fuzz_read and the like (test_core_fuzz.py): reads have odd sizes, allocations
 * fail at times. With clang -fsanitize=fuzzer -DLIBFUZZER, libFuzzer calls LLVMFuzzerTestOneInput.
 */
#undef read
#undef poll
#undef fstat
#undef realloc
#undef aligned_alloc
#undef getrandom
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <unistd.h>

#define MOST (96u << 10) /* bytes of an input */
#define PATIENCE_S 20    /* CPU time for one input; the environment variable PATIENCE_S overrides it */

/* ---- pseudorandom numbers ------------------------------------------------------------------- */

static uint32_t throw_dice(uint64_t *dice, uint32_t sides)
{
	*dice += 0x9e3779b97f4a7c15ULL; /* splitmix64 */
	uint64_t x = *dice;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
	x ^= x >> 31;
	return (uint32_t)((x >> 32) * sides >> 32);
}

static uint64_t dice, read_dice; /* separate, because reads may be in another thread */

static uint32_t roll(uint32_t sides) { return throw_dice(&dice, sides); }
static uint32_t read_roll(uint32_t sides) { return throw_dice(&read_dice, sides); }

/* ---- replacements of system calls ------------------------------------------------------------- */

static const uint8_t *feed;
static size_t feed_left;
static uint32_t piece, scarce; /* largest read, and one in how many reallocs fails */
static bool large;             /* the file, so that it is read ahead */

int fuzz_poll(struct pollfd *one, nfds_t count, int wait_ms)
{
	(void)count, (void)wait_ms;
	one->revents = POLLIN;
	if (read_roll(50) == 0) {
		errno = EINTR;
		return -1;
	}
	return read_roll(50) != 0;
}

void __asan_poison_memory_region(void const volatile *from, size_t size) __attribute__((weak));
void __asan_unpoison_memory_region(void const volatile *from, size_t size) __attribute__((weak));

/* Bytes that were not read yet must not be accessed. Not checked for the ring, whose memory is mapped twice. */
static void guard(const uint8_t *to, size_t got, size_t room)
{
	if (__asan_poison_memory_region && !large) {
		__asan_unpoison_memory_region(to, got);
		__asan_poison_memory_region(to + got, room - got);
	}
}

ssize_t fuzz_read(int descriptor, void *to, size_t room)
{
	(void)descriptor;
	if (read_roll(50) == 0) {
		errno = read_roll(2) ? EINTR : EAGAIN;
		return -1;
	}
	size_t most = room < feed_left ? room : feed_left, got = 1 + read_roll(piece);
	got = got < most ? got : most;
	guard(to, got, room);
	memcpy(to, feed, got);
	feed += got;
	feed_left -= got;
	return (ssize_t)got;
}

int fuzz_fstat(int descriptor, struct stat *status)
{
	(void)descriptor;
	*status = (struct stat){.st_mode = large ? S_IFREG : S_IFIFO, .st_size = 1 << 30};
	return 0;
}

void *fuzz_realloc(void *old, size_t size) { return scarce && roll(scarce) == 0 ? NULL : realloc(old, size); }

void *fuzz_aligned_alloc(size_t line, size_t size)
{
	return scarce && roll(scarce) == 0 ? NULL : aligned_alloc(line, size);
}

ssize_t fuzz_getrandom(void *to, size_t size, unsigned flags)
{
	(void)flags;
	for (size_t i = 0; i < size; i++)
		((uint8_t *)to)[i] = (uint8_t)roll(256);
	return (ssize_t)size;
}

/* ---- one input ------------------------------------------------------------------------------- */

static unsigned long long at;

static void report_input(void) { fprintf(stderr, "input %llu\n", at); }

#define HOLDS(what)                                                                                                    \
	do {                                                                                                           \
		if (!(what)) {                                                                                         \
			fprintf(stderr, "line %d: does not hold: %s\n", __LINE__, #what);                              \
			report_input();                                                                                        \
			abort();                                                                                       \
		}                                                                                                      \
	} while (0)

typedef struct {
	Sink sink; /* of the counter */
	const Source *source;
	uint64_t records, problems, ends, last;
	uint32_t stop_after, copies;
	uint8_t *copy[WINDOW / 16];
} Watched;

/* The two decoders agree. */
static void compare(const Record *record)
{
	Packet fast, full;
	Other other;
	if (!decode_usual(record, &fast))
		return;
	HOLDS(decode(record, &full, &other));
	HOLDS(fast.time == full.time && fast.wire == full.wire && fast.length == full.length);
	HOLDS(fast.payload == full.payload && fast.captured == full.captured && fast.address_length == full.address_length);
	HOLDS(!memcmp(fast.source, full.source, 4) && !memcmp(fast.destination, full.destination, 4));
	HOLDS(fast.protocol == full.protocol && fast.flags == full.flags && fast.what == full.what);
	HOLDS(fast.source_port == full.source_port && fast.destination_port == full.destination_port);
	HOLDS(fast.sequence == full.sequence && fast.chunk == full.chunk);
	HOLDS(fast.source_mac == full.source_mac && fast.destination_mac == full.destination_mac);
}

static bool watch_record(void *owner, const Record *record)
{
	Watched *w = owner;
	const Source *s = w->source;
	HOLDS(record->data >= s->data && record->data + record->captured <= s->data + s->end);
	HOLDS(record->captured <= MAX_CAPTURED && record->wire >= record->captured && record->wire <= 16u << 20);
	HOLDS(record->time >= 0);
	w->records++;
	if (w->stop_after && w->records == w->stop_after)
		*w->source->stopped = true;
	/* In a separate allocation, so that the sanitizer finds accesses beyond the record. */
	Record own = *record;
	HOLDS(w->copies < sizeof w->copy / sizeof *w->copy);
	own.data = w->copy[w->copies++] = malloc(record->captured);
	memcpy(w->copy[w->copies - 1], record->data, record->captured);
	compare(&own);
	return w->sink.record(w->sink.owner, &own);
}

static void watch_moving(void *owner)
{
	Watched *w = owner;
	w->sink.moving(w->sink.owner);
	while (w->copies)
		free(w->copy[--w->copies]);
}

static void watch_problem(void *owner, uint64_t offset, const char *what)
{
	Watched *w = owner;
	HOLDS(!w->problems++ || offset > w->last); /* increasing offsets: reading terminates */
	w->last = offset;
	w->sink.problem(w->sink.owner, offset, what);
}

static void watch_end(void *owner, uint64_t offset)
{
	Watched *w = owner;
	HOLDS(!w->ends++);
	w->sink.truncated(w->sink.owner, offset);
}

static bool peek_record(void *owner, const Record *record)
{
	*(int64_t *)owner = record->time;
	return false;
}
static void pass_moving(void *owner) { (void)owner; }
static void pass_problem(void *owner, uint64_t offset, const char *what) { (void)owner, (void)offset, (void)what; }
static void pass_end(void *owner, uint64_t offset) { (void)owner, (void)offset; }

/* The same as first_time of module.c. */
static void peek(const uint8_t *data, size_t size)
{
	int64_t time = -1;
	atomic_bool stopped = false;
	atomic_ullong count = 0;
	Source source = {
	    .descriptor = -1, .prefix = data, .prefix_left = size, .stopped = &stopped, .read_bytes = &count};
	HOLDS(source_begin(&source));
	Sink sink = {&time, peek_record, pass_moving, pass_problem, pass_end};
	read_capture(&source, &sink);
	HOLDS(time >= -1);
	source_end(&source);
}

static void configure(Counter *c, const uint8_t *data, size_t size)
{
	static const First firsts[] = {
	    {.protocol = TCP, .port = 6817, .offset = 10, .length = 2, .low = {0x03, 0}, .high = {0x05, 0xff}},
	    {.protocol = TCP, .port = 80, .offset = 0, .length = 4, .low = "GET ", .high = "GET "},
	    {.protocol = UDP, .port = 514, .offset = 0, .length = 1, .low = "<", .high = "<"},
	    {.protocol = TCP, .port = 0, .offset = 96, .length = 32, .low = {0}, .high = {255, 255, 255}},
	    {.protocol = TCP, .port = 0, .offset = 0, .length = 4, .low = "SSH-", .high = "SSH-"},
	    {.protocol = UDP, .port = 0, .offset = 4, .length = 1, .low = {1}, .high = {9}},
	};
	static const uint16_t known[] = {22, 25, 53, 67, 69, 80, 123, 514, 2049, 6817};
	for (size_t i = 0; i < sizeof known / sizeof *known; i++)
		for (int row = 0; row < 3; row++)
			c->known[row][known[i] >> 3] |= (uint8_t)(1 << (known[i] & 7));
	for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) {
		if (roll(3) == 0)
			continue;
		c->first[c->firsts++] = firsts[i];
		if (firsts[i].port)
			c->matched[firsts[i].protocol == UDP][firsts[i].port >> 3] |= (uint8_t)(1 << (firsts[i].port & 7));
		else
			c->any_first = true;
	}
	c->sampled[c->sampleds++] = (Sampled){.protocol = UDP, .port = 67, .wanted = roll(100)};
	c->sampled[c->sampleds++] = (Sampled){.protocol = TCP, .port = 6817, .wanted = roll(10)};
	c->sampled[c->sampleds++] = (Sampled){.protocol = ICMP, .port = 0, .wanted = roll(10)};
	c->max_flows = roll(3) ? 64 : 64 + roll(5000);
	c->max_pairs = roll(3) ? 64 : 64 + roll(5000);
	c->keep_flows = roll(2) ? 0 : roll(2) ? 10 : 1u << 20;
	if (roll(6) == 0) {
		c->only_length = (uint8_t[]){4, 6, 16}[roll(3)];
		if (size > 16)
			memcpy(c->only, data + roll((uint32_t)(size - 16)), c->only_length);
	}
}

static void read_one(Counter *c, const uint8_t *data, size_t size)
{
	uint32_t prefix = roll(4) ? 0 : roll((uint32_t)size + 1);
	feed = data + prefix;
	feed_left = size - prefix;
	Source source = {.descriptor = 0, .prefix = data, .prefix_left = prefix, .stopped = &c->stopped,
	                 .read_bytes = &c->read_bytes};
	large = roll(8) == 0;
	if (!counter_open(c))
		return;
	HOLDS(source_begin(&source));
	static Watched watched; /* large */
	watched.sink = counter_sink(c);
	watched.source = &source;
	watched.records = watched.problems = watched.ends = watched.copies = 0;
	watched.stop_after = roll(20) ? 0 : 1 + roll(100);
	Sink sink = {&watched, watch_record, watch_moving, watch_problem, watch_end};
	int status = read_capture(&source, &sink);
	HOLDS(status == READ_OK || status == READ_NOT_A_CAPTURE);
	HOLDS(watched.records <= size / 12 + 1);
	HOLDS(c->batched == 0);
	source_end(&source);
	c->file++;
}

static void hold_counts(const Counter *c)
{
	uint64_t packets = c->beyond[0], bytes = c->beyond[1], kept = 0, others = 0, spanned = 0;
	uint32_t tail = 0;
	for (uint32_t i = 0; i < c->other_count; i++) {
		others += c->others[i].packets;
		bytes += c->others[i].bytes;
	}
	for (uint32_t i = 0; i < c->pair_count; i++) {
		const Pair *p = c->pairs + i;
		packets += p->packets[0] + p->packets[1];
		bytes += p->bytes[0] + p->bytes[1];
		HOLDS(p->client < c->host_count && p->server < c->host_count);
		HOLDS(p->first <= p->last && (p->kind <= c->firsts || p->kind == EMPTY || p->kind == UNREAD));
		HOLDS(p->packets[0] + p->packets[1] > 0);
	}
	HOLDS(packets + others == c->packets && packets + others >= c->cut);
	for (uint32_t i = 0; i < c->file; i++)
		spanned += c->spans[i].packets;
	HOLDS(spanned == c->packets);
	HOLDS(bytes == c->bytes);
	for (uint32_t i = 0; i < c->kept_count; i++)
		kept += c->kept[i].packets[0] + c->kept[i].packets[1];
	HOLDS(c->out_of_memory || c->kept_count >= c->keep_flows || kept + others == c->packets);
	HOLDS(c->start <= c->end && c->host_count <= MAX_HOSTS && c->link_count <= MAX_LINKS);
	HOLDS(c->pair_count <= c->max_pairs && c->boot_count <= MAX_BOOTS);
	for (uint32_t i = 0; i < c->sample_count; i++)
		HOLDS(c->samples[i].length && c->samples[i].length <= MAX_PAYLOAD);
	for (uint32_t gather = c->free_gather; gather != NONE; gather = c->gathers[gather].next)
		HOLDS(++tail <= MAX_GATHERS);
	HOLDS(tail == MAX_GATHERS);
}

static void hold_groups(const Counter *c)
{
	uint8_t *roles = malloc(c->host_count + 1u), *scanned = calloc(c->pair_count + 1u, 1);
	Group *groups = NULL;
	uint32_t count = 0, next = 0;
	HOLDS(roles && scanned);
	for (uint32_t i = 0; i < c->host_count; i++)
		roles[i] = (uint8_t)roll(6);
	for (uint32_t i = 0; i < c->pair_count; i++)
		scanned[i] = !roll(4);
	uint32_t *order = order_pairs(c, roles, scanned, &groups, &count);
	HOLDS(order);
	for (uint32_t i = 0; i < count; i++) {
		HOLDS(groups[i].begin == next && groups[i].end > next);
		for (; next < groups[i].end; next++) {
			const Pair *p = c->pairs + order[next];
			HOLDS(order[next] < c->pair_count && p->protocol == groups[i].protocol);
			bool apart = scanned[order[next]];
			HOLDS(groups[i].port == (apart ? 0 : p->port) && groups[i].kind == (apart ? SCANNED : p->kind));
			HOLDS(roles[p->client] == groups[i].client && roles[p->server] == groups[i].server);
		}
	}
	HOLDS(next == c->pair_count);
	free(order);
	free(groups);
	free(roles);
	free(scanned);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint32_t pieces[] = {1, 7, 100, 4096, 1u << 20};
#ifdef LIBFUZZER
	dice = 0;
	for (int i = 0; i < 2 && size > 24; i++)
		dice = dice << 8 | data[--size];
#endif
	piece = pieces[roll(5)];
	read_dice = dice;
	scarce = 0;
	peek(data, size);
	Counter *c = calloc(1, sizeof *c);
	HOLDS(c);
	configure(c, data, size);
	HOLDS(counter_begin(c));
	scarce = roll(20) ? 0 : 3 + roll(10);
	for (uint32_t files = 1 + (roll(5) == 0); files; files--)
		read_one(c, data, size);
	if (roll(10) == 0) { /* append another file */
		counter_finish(c);
		read_one(c, data, size);
	}
	counter_finish(c);
	hold_counts(c);
	hold_groups(c);
	counter_end(c);
	free(c);
	return 0;
}

#ifndef LIBFUZZER

/* ---- mutation of seeds ------------------------------------------------------------------------- */

typedef struct {
	uint8_t *data;
	uint32_t size;
} Bytes;

static void insert(Bytes *b, uint32_t place, const uint8_t *from, uint32_t count)
{
	if (count > MOST - b->size)
		count = MOST - b->size;
	memmove(b->data + place + count, b->data + place, b->size - place);
	memmove(b->data + place, from, count);
	b->size += count;
}

static void cut(Bytes *b, uint32_t place, uint32_t count)
{
	memmove(b->data + place, b->data + place + count, b->size - place - count);
	b->size -= count;
}

static void put(Bytes *b, uint32_t place, uint32_t value, int width, bool big)
{
	for (int i = 0; i < width && place + (uint32_t)i < b->size; i++)
		b->data[place + (uint32_t)i] = (uint8_t)(value >> 8 * (big ? width - 1 - i : i));
}

static uint32_t odd_number(void)
{
	static const uint32_t odd[] = {0, 1, 2, 3, 4, 7, 8, 11, 12, 13, 16, 20, 27, 28, 40, 64, 127, 128, 255, 256, 1023, 4095,
	                               4096, 8192, 8193, 32767, 32768, 65535, 65536, 262143, 262144, 262145, 524288, 524289,
	                               999999, 1000000, 999999999, 1000000000, 16u << 20, (16u << 20) + 1, 0x7fffffff,
	                               0x80000000, 0xfffffff0, 0xfffffffc, 0xffffffff, 0x0a0d0d0a, 0x1a2b3c4d};
	uint32_t number = odd[roll(sizeof odd / sizeof *odd)];
	return roll(3) ? number : number + roll(9) - 4;
}

/* Offsets of the records of an unmodified capture. */
static uint32_t find_records(const Bytes *b, uint32_t *places, uint32_t most, bool *big)
{
	uint32_t count = 0, place = 0, magic = b->size >= 24 ? le32(b->data) : 0;
	bool ng = magic == 0x0a0d0d0a;
	*big = ng ? b->data[8] == 0x1a : b->size && b->data[0] == 0xa1;
	bool modified = b->size >= 24 && get32(b->data, *big) == 0xa1b2cd34;
	for (place = ng ? 0 : 24; count < most && place + 16 <= b->size;) {
		uint32_t length = ng ? get32(b->data + place + 4, *big) : get32(b->data + place + 8, *big) + (modified ? 24 : 16);
		places[count++] = place;
		if (length < 8 || length > b->size - place)
			break;
		place += length;
	}
	return count;
}

/* Appends a record with an Ethernet frame, with few or many different addresses and ports. */
static void add_frame(Bytes *b, bool big, uint32_t second, uint32_t width)
{
	uint8_t record[16 + 14 + 20 + 20 + 300] = {0};
	Bytes r = {record, sizeof record};
	uint32_t payload = roll(3) ? roll(40) : 0, protocol = roll(3) ? TCP : UDP;
	static const uint16_t ports[] = {67, 69, 123, 514, 80, 6817, 22, 2049};
	uint8_t *frame = record + 16, *ip = frame + 14, *head = ip + 20;
	bool dhcp = roll(30) == 0;
	if (dhcp) {
		protocol = UDP;
		payload = 250;
	}
	uint32_t captured = 14 + 20 + (protocol == TCP ? 20 : 8) + payload;
	put(&r, 0, second, 4, big);
	put(&r, 4, roll(1000000), 4, big);
	put(&r, 8, captured, 4, big);
	put(&r, 12, roll(9) ? captured : captured + roll(1500), 4, big);
	put(&r, 16 + 4, roll(width), 2, true);
	put(&r, 16 + 10, roll(width), 2, true);
	put(&r, 16 + 12, 0x0800, 2, true);
	ip[0] = 0x45;
	put(&r, 30 + 2, captured - 14, 2, true);
	ip[9] = (uint8_t)protocol;
	put(&r, 30 + 12, 0x0a000000 + roll(width), 4, true);
	put(&r, 30 + 16, 0x0a000000 + roll(width), 4, true);
	put(&r, 50, roll(2) ? ports[roll(8)] : 1024 + roll(width), 2, true);
	put(&r, 52, roll(2) ? ports[roll(8)] : 1024 + roll(width), 2, true);
	if (protocol == TCP) {
		put(&r, 54, roll(100), 4, true);
		head[12] = 0x50;
		head[13] = (uint8_t)(roll(2) ? ACK : roll(64));
	}
	uint8_t *body = head + (protocol == TCP ? 20 : 8);
	for (uint32_t i = 0; i < payload; i++)
		body[i] = dhcp ? 0 : (uint8_t)(roll(3) ? (uint32_t)"GET <SSH-"[i % 9] : roll(256));
	if (dhcp) {
		body[0] = body[1] = 1;
		body[2] = 6;
		body[33] = (uint8_t)roll(width);
		put(&r, (uint32_t)(body - record) + 236, 0x63825363, 4, true);
		memcpy(body + 240, "\x35\x01\x01\xff", 4);
		put(&r, 52, 67, 2, true);
	}
	insert(b, b->size, record, 16 + captured);
}

static void storm(Bytes *b, bool big)
{
	uint32_t width = 2 + roll(roll(2) ? 20 : 3000), second = 1700000000 + roll(1000), count = roll(900);
	uint32_t pace = roll(4) ? 2 : roll(2) ? 1000 : 100000000;
	for (; count; count--) {
		add_frame(b, big, second, width);
		second += roll(pace);
	}
}

static void tamper(Bytes *b, const Bytes *other, const uint32_t *places, uint32_t count, bool big)
{
	uint32_t place = roll(b->size), length = roll(roll(3) ? 64 : 4096), width = 1u << roll(3);
	uint32_t record = count ? places[roll(count)] : 0;
	if (record >= b->size) /* already truncated */
		record = 0;
	length = length < b->size - place ? length : b->size - place;
	switch (roll(13)) {
	case 0:
		b->data[place] ^= (uint8_t)(1 << roll(8));
		break;
	case 1:
		b->data[place] = (uint8_t)roll(256);
		break;
	case 2:
		put(b, place, odd_number(), (int)width, roll(2));
		break;
	case 3: /* a field of a record's header */
	case 4:
	case 5:
		put(b, record + 4 * roll(7), odd_number(), 4, roll(9) ? big : !big);
		break;
	case 6: /* flip a bit of it */
		place = record + roll(16);
		if (place < b->size)
			b->data[place] ^= (uint8_t)(1 << roll(8));
		break;
	case 7:
		if (roll(4) == 0)
			b->size = 1 + place;
		break;
	case 8:
		if (length < b->size)
			cut(b, place, length);
		break;
	case 9:
		insert(b, place, b->data + roll(b->size - length + 1), length);
		break;
	case 10:
		length = length < other->size ? length : other->size;
		insert(b, roll(2) ? place : record, other->data + roll(other->size - length + 1), length);
		break;
	case 11:
		for (uint32_t i = 0; i < length; i++)
			b->data[place + i] = (uint8_t)roll(256);
		break;
	default:
		put(b, place & ~3u, roll(2) ? 0 : 0xffffffff, 4, false);
	}
}

static void make_input(Bytes *b, const Bytes *seeds, uint32_t count)
{
	static uint32_t places[4096];
	bool big = false;
	const Bytes *seed = seeds + roll(count);
	memcpy(b->data, seed->data, seed->size);
	b->size = seed->size;
	if (le32(b->data) != 0x0a0d0d0a && roll(4) == 0)
		storm(b, b->data[0] == 0xa1);
	uint32_t found = find_records(b, places, sizeof places / sizeof *places, &big);
	for (uint32_t times = roll(4) ? roll(8) : roll(100); times && b->size > 1; times--)
		tamper(b, seeds + roll(count), places, found, big);
}

static Bytes read_seed(const char *name)
{
	FILE *file = fopen(name, "rb");
	Bytes seed = {malloc(MOST), 0};
	if (!file || !seed.data) {
		perror(name);
		_exit(2);
	}
	seed.size = (uint32_t)fread(seed.data, 1, MOST * 2 / 3, file);
	fclose(file);
	return seed;
}

static void too_long(int number)
{
	(void)number;
	fprintf(stderr, "does not end\n");
	report_input();
	abort();
}

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

int main(int count, char **argv)
{
	if (count < 4) {
		fprintf(stderr, "fuzz SEED COUNT[/AT] FILE...\n");
		return 2;
	}
	char *rest;
	unsigned long long seed = strtoull(argv[1], NULL, 10), inputs = strtoull(argv[2], &rest, 10), first = 0;
	if (*rest == '/')
		inputs = (first = strtoull(rest + 1, NULL, 10)) + 1;
	uint32_t seeds_there = (uint32_t)count - 3;
	Bytes *seeds = calloc(seeds_there, sizeof *seeds);
	for (uint32_t i = 0; i < seeds_there; i++) {
		seeds[i] = read_seed(argv[i + 3]);
		if (seeds[i].size < 24) {
			fprintf(stderr, "%s is too short for a seed\n", argv[i + 3]);
			_exit(2);
		}
	}
	signal(SIGPROF, too_long);
	if (__sanitizer_set_death_callback)
		__sanitizer_set_death_callback(report_input);
	const char *patience = getenv("PATIENCE_S");
	struct itimerval wait = {.it_value.tv_sec = patience ? atoi(patience) : PATIENCE_S};
	uint8_t *room = malloc(MOST);
	for (at = first; at < inputs; at++) {
		setitimer(ITIMER_PROF, &wait, NULL);
		dice = seed * 0xd1342543de82ef95ULL + at;
		Bytes made = {room, 0};
		make_input(&made, seeds, seeds_there);
		/* An allocation of the exact size, so that the sanitizer finds accesses beyond it. */
		uint8_t *data = malloc(made.size);
		memcpy(data, made.data, made.size);
		if (*rest == '/') {
			FILE *file = fopen("input", "wb");
			if (file) {
				fwrite(data, 1, made.size, file);
				fclose(file);
			}
		}
		LLVMFuzzerTestOneInput(data, made.size);
		free(data);
	}
	printf("%llu inputs\n", at - first);
	for (uint32_t i = 0; i < seeds_there; i++)
		free(seeds[i].data);
	free(seeds);
	free(room);
	return 0;
}
#endif
