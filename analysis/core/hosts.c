/* Addresses, link addresses and boots of nodes; traffic without flows. */
#include "tables.h"

#include <stdlib.h>

#define SETTLED (90 * NS) /* a boot has ended after this time without contacts with new services */

/* ---- traffic without flows --------------------------------------------------------------------- */

void count_other(Counter *c, int what, uint32_t value, uint64_t packets, uint64_t bytes)
{
	for (uint32_t i = 0; i < c->other_count; i++) {
		OtherCount *o = c->others + i;
		/* The last entry takes everything beyond the limit. */
		if ((o->what == what && o->value == value) || i == MAX_OTHERS - 1) {
			o->packets += packets;
			o->bytes += bytes;
			return;
		}
	}
	bool last = c->other_count == MAX_OTHERS - 1;
	c->others[c->other_count++] = (OtherCount){last ? OTHER_TOO_MANY : what, last ? 0 : value, packets, bytes};
}

void count_skipped(Counter *c, const char *reason)
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

/* ---- link addresses and boots -------------------------------------------------------------------- */

uint32_t link_of(Counter *c, const uint8_t *mac)
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

bool booting(Counter *c, Link *link, int64_t now)
{
	if (link->booting && now - link->novel > SETTLED)
		settle(c, link, link->novel);
	return link->booting;
}

/* Whether a DHCP message (RFC 2131) is a discover, or the offer for a discover that was not seen. */
static bool is_discover(const Packet *p)
{
	static const uint8_t cookie[4] = {0x63, 0x82, 0x53, 0x63};
	if (p->captured < 16 || p->payload[0] < 1 || p->payload[0] > 2 || p->payload[1] != 1 || p->payload[2] != 6 ||
	    (p->captured >= 240 && memcmp(p->payload + 236, cookie, 4)))
		return false;
	for (uint32_t at = 240; at + 2 < p->captured && p->payload[at] != 255;) {
		if (!p->payload[at]) {
			at++;
			continue;
		}
		if (p->payload[at] == 53)
			return p->payload[at + 2] == p->payload[0];
		at += 2u + p->payload[at + 1];
	}
	/* Cut before the message type: a client without an address, also behind a relay, has just booted. */
	static const uint8_t nothing[4];
	return p->captured < p->length && p->length >= 244 && p->payload[0] == 1 && !memcmp(p->payload + 12, nothing, 4) &&
	       p->destination_port == 67;
}

/* The client's link address (chaddr); if it was cut, that of a frame which the client itself sent, without an address. */
static const uint8_t *client_mac(const Packet *p)
{
	static const uint8_t nothing[4];
	if (p->captured >= 34)
		return p->payload + 28;
	return p->address_length == 4 && !memcmp(p->source, nothing, 4) ? p->source_mac : NULL;
}

/* A DHCP discover starts the boot of a node, unless it is booting already. */
void see_dhcp(Counter *c, const Packet *p)
{
	if (!is_discover(p))
		return;
	Link *link = c->links + link_of(c, client_mac(p));
	if (link == c->links || booting(c, link, p->time))
		return;
	link->booting = true;
	link->boots++;
	link->novel = p->time;
	link->boot = NONE;
	if (c->boot_count < c->boot_room || grow(&c->boots, &c->boot_room, sizeof *c->boots, 1024, MAX_BOOTS)) {
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

/* Returns the host for all further addresses behind a router. */
uint32_t together(Counter *c, uint32_t link)
{
	static const uint8_t nothing[16];
	Link *l = c->links + link;
	if (l->together == NONE) {
		if (c->host_count >= MAX_HOSTS) /* that of no link address was created before the table was full */
			return c->links->together;
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

uint32_t search_host(Counter *c, const uint8_t *address, uint8_t length, uint32_t hash, const uint8_t *mac)
{
	const Table *table = &c->host_table;
	for (uint32_t at = hash & table->mask; table->slots[at].index != NONE; at = (at + 1) & table->mask)
		if (table->slots[at].hash == hash) {
			const Host *host = c->hosts + table->slots[at].index;
			if (host->length == length && same_address(host->address, address, length))
				return table->slots[at].index;
		}
	uint32_t link = link_of(c, mac);
	/* Without link addresses routers cannot be recognized: use half of the table. */
	uint32_t most = link ? MAX_ADDRESSES : MAX_HOSTS / 2;
	if (c->links[link].addresses >= most || c->host_count >= MAX_HOSTS - MAX_HOSTS / 8)
		return together(c, c->host_count >= MAX_HOSTS - MAX_HOSTS / 8 ? 0 : link);
	if (!widen(&c->host_table, c->host_count * 2)) {
		c->out_of_memory = true;
		return together(c, 0);
	}
	uint32_t index = new_host(c, address, length, hash, link);
	table_add(&c->host_table, hash, index);
	return index;
}

void learn_mac(Counter *c, uint32_t index, const uint8_t *mac)
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

void claim(Counter *c, const uint8_t *address, uint8_t length, const uint8_t *mac)
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
void see_neighbour(Counter *c, const Packet *p)
{
	if (p->protocol == ICMP6 && p->chunk == 136 && p->captured >= 32 && p->payload[24] == 2 && p->payload[25] == 1)
		claim(c, p->payload + 8, 16, p->payload + 26);
}

