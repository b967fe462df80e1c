/* Pairs -> groups with the same protocol, port, kind and roles. */
#include "core.h"

#include <stdlib.h>

typedef struct {
	uint64_t key;
	uint32_t pair;
} Entry;

static int by_key(const void *one, const void *two)
{
	const Entry *a = one, *b = two;
	if (a->key != b->key)
		return a->key < b->key ? -1 : 1;
	return a->pair < b->pair ? -1 : a->pair > b->pair;
}

static uint64_t key_of(const Pair *pair, const uint8_t *roles, bool scanned)
{
	uint64_t place = scanned ? SCANNED : (uint64_t)pair->port << 8 | pair->kind;
	return (uint64_t)pair->protocol << 40 | place << 16 | (uint64_t)roles[pair->client] << 8 | roles[pair->server];
}

uint32_t *order_pairs(const Counter *c, const uint8_t *roles, const uint8_t *scanned, Group **groups,
                      uint32_t *group_count)
{
	size_t count = c->pair_count ? c->pair_count : 1;
	Entry *entries = malloc(count * sizeof *entries);
	uint32_t *order = malloc(count * sizeof *order);
	*groups = malloc(count * sizeof **groups);
	*group_count = 0;
	if (!entries || !order || !*groups) {
		free(entries);
		free(order);
		free(*groups);
		*groups = NULL;
		return NULL;
	}
	for (uint32_t i = 0; i < c->pair_count; i++)
		entries[i] = (Entry){key_of(c->pairs + i, roles, scanned && scanned[i]), i};
	qsort(entries, c->pair_count, sizeof *entries, by_key);
	for (uint32_t i = 0; i < c->pair_count; i++) {
		const Pair *pair = c->pairs + entries[i].pair;
		order[i] = entries[i].pair;
		if (i == 0 || entries[i].key != entries[i - 1].key) {
			uint64_t key = entries[i].key;
			(*groups)[(*group_count)++] = (Group){pair->protocol, (uint8_t)(key >> 16), roles[pair->client],
			                                      roles[pair->server], (uint16_t)(key >> 24), i, i};
		}
		(*groups)[*group_count - 1].end = i + 1;
	}
	free(entries);
	return order;
}
