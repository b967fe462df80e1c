/* The native core of `sms classify`: shared declarations.
 *
 * source.c   files -> bytes                 reader.c  bytes -> records
 * decode.c   records -> packets
 * counter.c  packets in batches             hosts.c   addresses, link addresses, boots
 * flows.c    packets -> flows               pairs.c   flows -> pairs of a client and a service
 * rows.c     pairs -> rows by role          module.c, results.c  Python interface (only these use Python)
 *
 * Captures are untrusted: every length is checked against the available bytes, every table has a fixed limit, and
 * no loop runs more often than there are bytes. Times are nanoseconds since 1970.
 */
#ifndef SMS_CORE_H
#define SMS_CORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define NS 1000000000LL
#define MAX_CAPTURED 262144u /* libpcap's MAXIMUM_SNAPLEN */
#define WINDOW (2u << 20)    /* holds three records of the maximum size at any offset */
#define BATCH 64
#define LINE 64 /* bytes that processors read at once */
#define BINS 64
#define PATTERN 32
#define GATHERED 128 /* first bytes of a client that are matched */
#define MAX_GATHERS 8192u
#define MAX_FIRST 252 /* a kind is one byte, and 0 is none */
#define ANYWHERE 255  /* offset of a pattern that may begin anywhere in the client's first line */
#define UNREAD 253    /* kind of pairs for flows whose first bytes would name the service, but were not captured */
#define EMPTY 254     /* kind of pairs for TCP connections without data, which a scan consists of */
#define SCANNED 255   /* kind of the groups of scans */
#define MAX_HOSTS 131072u
#define MAX_LINKS 65536u
#define MAX_BOOTS 65536u
#define MAX_ADDRESSES 4096u /* per link address; further ones behind a router are counted together */
#define MAX_SAMPLED 64
#define MAX_SAMPLES (MAX_SAMPLED * 65536u)
#define MAX_PAYLOAD 1024u
#define MAX_PROBLEMS 100
#define MAX_FILES (1u << 20)
#define MAX_OTHERS 96
#define MAX_GAPS 64
#define INTERVALS 16
#define LATENCIES 32
#define NONE UINT32_MAX
#define WAITS (NONE - 1) /* a flow whose pair depends on first bytes not seen yet */

enum { TCP = 6, UDP = 17, ICMP = 1, ICMP6 = 58, SCTP = 132 };

/* ---- numbers in captures ------------------------------------------------------------------- */

static inline uint16_t be16(const uint8_t *p) { return (uint16_t)(p[0] << 8 | p[1]); }
static inline uint32_t be32(const uint8_t *p)
{
	return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}
static inline uint32_t le32(const uint8_t *p)
{
	return (uint32_t)p[3] << 24 | (uint32_t)p[2] << 16 | (uint32_t)p[1] << 8 | p[0];
}
static inline uint16_t le16(const uint8_t *p) { return (uint16_t)(p[1] << 8 | p[0]); }
static inline uint32_t get32(const uint8_t *p, bool big) { return big ? be32(p) : le32(p); }
static inline uint16_t get16(const uint8_t *p, bool big) { return big ? be16(p) : le16(p); }

/* ---- source.c, reader.c ----------------------------------------------------------------------------- */

typedef struct {
	int64_t time;
	const uint8_t *data;
	uint32_t captured, wire;
	uint32_t link; /* LINKTYPE_ of the frame */
} Record;

typedef struct {
	void *owner;
	/* Called for each record; its data is valid until `moving` is called. */
	bool (*record)(void *owner, const Record *record);
	/* Called before the data of earlier records moves. */
	void (*moving)(void *owner);
	/* Called for unreadable data. `what` is a constant string. */
	void (*problem)(void *owner, uint64_t offset, const char *what);
	/* Called if the file ended in the middle of a record. */
	void (*truncated)(void *owner, uint64_t offset);
} Sink;

typedef struct Ahead Ahead;
typedef struct Zstd Zstd;

typedef struct {
	uint8_t *data; /* at least WINDOW bytes; allocated by source_begin */
	Ahead *ahead;  /* read-ahead thread; NULL without one */
	size_t start, end;
	uint64_t base; /* offset in the file of data[0] */
	int descriptor; /* -1: only the prefix is read */
	const uint8_t *prefix;
	size_t prefix_left;
	bool ended;
	int error;              /* errno of read(2) */
	Zstd *zstd;             /* decompressor, or NULL */
	const char *damage;     /* why decompression ended early, or NULL */
	atomic_bool *stopped; /* set by another thread */
	atomic_ullong *read_bytes;
} Source;

/* Returns false if out of memory. The caller has set the input fields. */
bool source_begin(Source *source);
void source_end(Source *source);
/* Like read(2), without decompression; also returns 0 if another thread called stop. */
ssize_t source_pull(Source *source, uint8_t *to, size_t room);
/* Fills the window with at least `wanted` bytes (at most half a WINDOW), unless the file ends. */
void source_fill(Source *source, const Sink *sink, size_t wanted);

/* Returns NULL if this machine has no libzstd. */
Zstd *zstd_begin(void);
void zstd_end(Zstd *zstd);
/* Like read(2), with decompression; source->damage says why it ended early. */
ssize_t zstd_read(Zstd *zstd, Source *source, uint8_t *to, size_t room);

enum { READ_OK = 0, READ_NOT_A_CAPTURE = 1, READ_ERROR = 2 };

/* Reads one capture to its end. source->error holds errno after READ_ERROR. */
int read_capture(Source *source, const Sink *sink);

/* ---- decode.c ------------------------------------------------------------------------------- */

enum { HAS_FLAGS = 1, HAS_PORTS = 2, LATER_FRAGMENT = 4, FIRST_FRAGMENT = 8, OUTGOING = 16 };
enum { FIN = 1, SYN = 2, RST = 4, ACK = 16 };

/* Kinds of frames without a flow; `value` has the details. */
enum { OTHER_ARP, OTHER_LLC, OTHER_ETHERTYPE, OTHER_LINK, OTHER_SHORT, OTHER_BROKEN, OTHER_FRAGMENT, OTHER_TOO_MANY };

typedef struct {
	int64_t time;
	uint32_t wire, length; /* length: of the payload above the transport header, from the headers */
	const uint8_t *payload;
	uint32_t captured; /* of the payload */
	uint8_t source[16], destination[16];
	uint8_t address_length; /* 4, 16 */
	uint8_t protocol, flags, what;
	uint16_t source_port, destination_port;
	uint32_t sequence, fragment; /* TCP's number, the datagram's identification */
	const uint8_t *source_mac, *destination_mac;
	uint8_t chunk; /* first chunk of SCTP, type of ICMP */
	/* for flows.c */
	uint32_t a, b;    /* sender and receiver */
	uint64_t ends[2]; /* host and port of both, the smaller number first; way: index of the sender */
	uint64_t hash;
	uint32_t flow;
	uint8_t way;
} Packet;

typedef struct {
	int what; /* OTHER_..., or -1 */
	uint32_t value;
	const uint8_t *arp; /* the ARP packet of Ethernet and IPv4, 28 bytes */
} Other;

/* Returns false if the packet belongs to no flow; `other` then has its kind. */
bool decode(const Record *record, Packet *packet, Other *other);
/* The same, faster, for TCP and UDP in IPv4 in Ethernet with whole headers. Returns false, and decides nothing, for all
 * others. */
bool decode_usual(const Record *record, Packet *packet);

/* ---- counter.c ------------------------------------------------------------------------------- */

typedef struct {
	uint8_t address[16];
	uint8_t mac[2][6], via[6], claimed[6];
	uint8_t length, macs, flags; /* flags: HOST_ */
	uint32_t hash, link;
	uint32_t tried; /* pairs with it as the client at ports where no service is known */
	uint64_t sent, received;
} Host;
enum { HOST_VIA = 1, HOST_CLAIMED = 2, HOST_OUTGOING = 4, HOST_TOGETHER = 8 };

/* A link address, and the boot of the node that has it. */
typedef struct {
	uint8_t mac[6];
	bool booting;
	uint32_t addresses, together, boots, boot;
	int64_t novel;
} Link;

typedef struct {
	uint8_t mac[6];
	int64_t began, settled;
} Boot;

/* One end of a flow: a host and its port in one number. */
static inline uint64_t end_of(uint32_t host, uint16_t port) { return (uint64_t)host << 16 | port; }
static inline uint32_t host_at(uint64_t end) { return (uint32_t)(end >> 16); }
static inline uint16_t port_at(uint64_t end) { return (uint16_t)end; }

typedef struct {
	/* Fields used for every packet are in the first 64 bytes: a packet without payload needs no others. */
	_Alignas(LINE) uint64_t ends[2]; /* the smaller number first */
	uint32_t pair;                   /* of a waiting flow: its Gather */
	uint16_t flags;
	uint8_t protocol, client; /* client: which end */
	int64_t last;
	uint64_t packets[2], bytes[2];
	int64_t request, spoke, first;
	uint32_t sample; /* index into sampled, NONE, or WAITS */
	uint32_t sequence, hash;
} Flow;
/* FLOW_DATA: a payload was seen. FLOW_CLOSED: by its two ends, the smaller number first. */
enum { FLOW_USED = 1, FLOW_OPENED = 2, FLOW_MIDSTREAM = 4, FLOW_RESUMED = 8, FLOW_ANSWERED = 16, FLOW_BOOT = 32,
       FLOW_TFTP = 64, FLOW_CONTACT = 128, FLOW_DATA = 256, FLOW_CLOSED = 512 | 1024 };

typedef struct {
	/* Fields used for every contact and answer are in the first 64 bytes. */
	_Alignas(LINE) uint32_t client, server, hash;
	uint16_t port;
	uint8_t protocol, kind;
	int64_t first, last, contact;
	uint32_t boots, contacts_boot, contacts_steady, intervals_seen, latencies_seen;
	uint32_t opened, midstream, resumed, unanswered;
	uint64_t packets[2], bytes[2];
	float intervals[INTERVALS], latencies[LATENCIES];
	uint16_t timeline[BINS], timeline_boot[BINS];
} Pair;

typedef struct {
	uint8_t protocol, offset, length;
	uint16_t port;
	uint8_t low[PATTERN], high[PATTERN];
} First;

/* The first bytes of a client until they identify the service: a message's length may be sent separately. */
typedef struct {
	uint32_t next; /* TCP sequence number of the next byte; of a free entry: the next free entry */
	uint8_t got;
	bool begun;
	uint8_t data[GATHERED];
} Gather;

typedef struct {
	uint8_t protocol;
	uint16_t port;
	uint32_t wanted, kept;
} Sampled;

typedef struct {
	uint8_t protocol;
	uint16_t port, length;
	bool from_client;
	int64_t time;
	uint32_t source, destination;
	uint8_t payload[MAX_PAYLOAD];
} Sample;

typedef struct {
	int what;
	uint32_t value;
	uint64_t packets, bytes;
} OtherCount;

typedef struct {
	uint32_t file;
	uint64_t offset;
	const char *what;
} Problem;

/* Times and packets of a file. */
typedef struct {
	int64_t first, last;
	uint64_t packets;
} Span;

typedef struct {
	const char *reason;
	uint64_t count;
} Skipped;

typedef struct {
	uint32_t a, b, id;
	uint16_t source_port, destination_port;
	uint8_t protocol, used;
} Fragment;

typedef struct {
	uint32_t client, server;
	uint16_t port;
	bool used;
} Transfer;

typedef struct {
	uint32_t hash, index;
} Slot;

/* Where entries of an array are, by their hashes. Small while there are few: each entry is a line of the cache. */
typedef struct {
	Slot *slots;
	uint32_t mask;
} Table;

/* A single flow, kept for comparison with the counts of other programs. */
typedef struct {
	uint32_t client, server;
	uint16_t client_port, server_port;
	uint8_t protocol;
	uint64_t packets[2], bytes[2];
} Kept;

#define SLOTS_LINK (MAX_LINKS * 2)
#define FRAGMENTS 4096u
#define TRANSFERS 1024u
#define LEARNT 65536u
#define SLOTS 1024u /* of an empty table */

#ifdef SMALL_TABLES /* for the fuzzer: tables that a small capture fills */
#undef MAX_CAPTURED
#define MAX_CAPTURED 4096u
#undef WINDOW
#define WINDOW (32u << 10)
#undef MAX_GATHERS
#define MAX_GATHERS 8u
#undef MAX_HOSTS
#define MAX_HOSTS 256u
#undef MAX_LINKS
#define MAX_LINKS 64u
#undef MAX_ADDRESSES
#define MAX_ADDRESSES 16u
#undef FRAGMENTS
#define FRAGMENTS 16u
#undef TRANSFERS
#define TRANSFERS 4u
#undef LEARNT
#define LEARNT 16u
#undef SLOTS
#define SLOTS 8u
#endif

typedef struct {
	/* options */
	uint8_t known[3][8192];     /* TCP, UDP, SCTP: bit of a port where a service listens */
	uint8_t matched[3][8192];   /* ... where first bytes are matched as well */
	First first[MAX_FIRST];
	uint32_t firsts;
	bool any_first;
	Sampled sampled[MAX_SAMPLED];
	uint32_t sampleds;
	uint8_t only[16], only_length, only_mac[6]; /* --node */
	bool only_mac_known;
	uint32_t max_flows, max_pairs, keep_flows;

	/* results */
	uint64_t packets, bytes;
	atomic_ullong seen_packets, seen_bytes, read_bytes; /* for another thread, which shows the progress */
	atomic_bool stopped;
	uint64_t cut; /* packets captured only in part */
	uint32_t cut_at;
	int64_t resumed, gap; /* end of the last gap in or between files, and total of all gaps */
	int64_t counted_gap;  /* of those before the last packet that is counted */
	struct {
		int64_t from, to;
	} gaps[MAX_GAPS]; /* the longest, in no order */
	uint32_t gap_count;
	int64_t alive, part, quiet; /* last packet that --node left out; begin since the last gap; longest silence */
	bool fresh; /* the next packet is a file's first */
	uint64_t calm; /* a packet less than this after `end` needs none of the checks of times; 0: every packet does */
	Span *spans; /* of each file */
	uint32_t span_room;
	int64_t start, end, now, raw;
	int64_t odd_first; /* the first of odd_times packets in a row that agree with each other, not with those before */
	uint32_t odd_times;
	bool truncated;
	uint32_t file;
	uint64_t seed[4], dice;
	Host *hosts;
	uint32_t host_count;
	Table host_table;
	Link *links;
	uint32_t link_count;
	uint32_t *link_slots;
	Boot *boots;
	uint32_t boot_count, boot_room;
	Flow *flows;
	void *flows_place, *pairs_place;
	uint32_t flow_count;
	uint32_t *free_flows, free_count;
	Table flow_table;
	bool dropped;
	Pair *pairs;
	uint32_t pair_count;
	Table pair_table;
	int64_t bin;
	int64_t bin_base, bin_from, bin_to; /* the part of the timeline of the previous contact */
	uint32_t bin_at;
	uint64_t *learnt;
	Fragment *fragments;
	Transfer *transfers;
	Gather *gathers;
	uint32_t free_gather;
	Sample *samples;
	uint32_t sample_count, sample_room;
	Kept *kept;
	uint32_t kept_count, kept_room;
	OtherCount others[MAX_OTHERS];
	uint32_t other_count;
	Problem problems[MAX_PROBLEMS];
	uint32_t problem_count;
	Skipped skipped[16];
	uint32_t skipped_count;
	uint64_t beyond[2];
	Packet batch[BATCH];
	uint32_t batched;
	bool out_of_memory;
} Counter;

/* Returns false if out of memory. The caller has set the options. */
bool counter_begin(Counter *counter);
void counter_end(Counter *counter);
Sink counter_sink(Counter *counter);
/* Starts the next file. Returns false if out of memory. */
bool counter_open(Counter *counter);
/* Adds all flows to their pairs. */
void counter_finish(Counter *counter);
void counter_problem(Counter *counter, uint64_t offset, const char *what);

/* ---- rows.c ---------------------------------------------------------------------------------- */

typedef struct {
	uint8_t protocol, kind, client, server;
	uint16_t port;
	uint32_t begin, end; /* in the order returned by order_pairs */
} Group;

/* Returns the pairs ordered by group; NULL if out of memory. The caller frees both results.
 * scanned: a byte for each pair, or NULL; those that are not 0 are in groups of their own, with kind SCANNED and port 0. */
uint32_t *order_pairs(const Counter *counter, const uint8_t *roles, const uint8_t *scanned, Group **groups,
                      uint32_t *group_count);

#endif
