/* Results as Python objects; analysis/_core.pyi is their documentation. */
#include "results.h"

#include <stdlib.h>

#define VALUES 2048  /* maximum intervals, and maximum latencies, of a row */
#define CLIENTS 4096 /* maximum host indexes of a row */

/* Appends a new reference to a list; returns false, with the exception set, on error. */
static bool add(PyObject *list, PyObject *item)
{
	bool fine = item && !PyList_Append(list, item);
	Py_XDECREF(item);
	return fine;
}

static PyObject *bytes_of(const void *data, size_t length) { return PyBytes_FromStringAndSize(data, (Py_ssize_t)length); }

static PyObject *host_tuple(const Counter *c, uint32_t index)
{
	const Host *host = c->hosts + index;
	PyObject *macs = PyTuple_New(host->macs);
	if (!macs)
		return NULL;
	for (int i = 0; i < host->macs; i++) {
		PyObject *mac = bytes_of(host->mac[i], 6);
		if (!mac || PyTuple_SetItem(macs, i, mac)) {
			Py_DECREF(macs);
			return NULL;
		}
	}
	return Py_BuildValue("(y#Ny#y#KKO)", (const char *)host->address, (Py_ssize_t)host->length, macs, (const char *)host->via,
	                     (Py_ssize_t)(host->flags & HOST_VIA ? 6 : 0), (const char *)host->claimed,
	                     (Py_ssize_t)(host->flags & HOST_CLAIMED ? 6 : 0), (unsigned long long)host->sent,
	                     (unsigned long long)host->received, host->flags & HOST_OUTGOING ? Py_True : Py_False);
}

/* (value, weight) samples of the pairs of a group; the weights add up to all values seen. */
static PyObject *values(const Counter *c, const uint32_t *order, const Group *group, bool latency)
{
	PyObject *list = PyList_New(0);
	size_t there = 0, number = 0;
	for (uint32_t i = group->begin; i < group->end; i++) {
		const Pair *pair = c->pairs + order[i];
		uint32_t seen = latency ? pair->latencies_seen : pair->intervals_seen, room = latency ? LATENCIES : INTERVALS;
		there += seen < room ? seen : room;
	}
	size_t step = there / VALUES + 1;
	for (uint32_t i = group->begin; list && i < group->end; i++) {
		const Pair *pair = c->pairs + order[i];
		uint32_t seen = latency ? pair->latencies_seen : pair->intervals_seen, room = latency ? LATENCIES : INTERVALS;
		uint32_t kept = seen < room ? seen : room;
		for (uint32_t k = 0; list && k < kept; k++, number++) {
			if (number % step)
				continue;
			double value = (double)(latency ? pair->latencies[k] : pair->intervals[k]);
			if (!add(list, Py_BuildValue("(dd)", value, (double)step * seen / kept)))
				Py_CLEAR(list);
		}
	}
	PyObject *tuple = list ? PyList_AsTuple(list) : NULL;
	Py_XDECREF(list);
	return tuple;
}

static PyObject *numbers(const uint64_t *from, int count)
{
	PyObject *tuple = PyTuple_New(count);
	for (int i = 0; tuple && i < count; i++) {
		PyObject *item = PyLong_FromUnsignedLongLong(from[i]);
		if (!item || PyTuple_SetItem(tuple, i, item))
			Py_CLEAR(tuple);
	}
	return tuple;
}

static PyObject *row_tuple(const Counter *c, const uint32_t *order, const Group *group, uint32_t *stamps, uint32_t stamp)
{
	uint64_t packets[2] = {0}, bytes[2] = {0}, steady[BINS] = {0}, boot[BINS] = {0};
	uint64_t opened = 0, midstream = 0, resumed = 0, unanswered = 0, contacts_boot = 0, contacts_steady = 0;
	unsigned long clients = 0, servers = 0;
	int64_t first = INT64_MAX, last = INT64_MIN;
	PyObject *indexes = PyList_New(0);
	for (uint32_t i = group->begin; indexes && i < group->end; i++) {
		const Pair *pair = c->pairs + order[i];
		for (int way = 0; way < 2; way++) {
			packets[way] += pair->packets[way];
			bytes[way] += pair->bytes[way];
		}
		for (int bin = 0; bin < BINS; bin++) {
			steady[bin] += pair->timeline[bin];
			boot[bin] += pair->timeline_boot[bin];
		}
		opened += pair->opened;
		midstream += pair->midstream;
		resumed += pair->resumed;
		unanswered += pair->unanswered;
		contacts_boot += pair->contacts_boot;
		contacts_steady += pair->contacts_steady;
		first = pair->first < first ? pair->first : first;
		last = pair->last > last ? pair->last : last;
		if (stamps[pair->server * 2] != stamp) {
			stamps[pair->server * 2] = stamp;
			servers++;
		}
		if (stamps[pair->client * 2 + 1] != stamp) {
			stamps[pair->client * 2 + 1] = stamp;
			if (++clients <= CLIENTS && !add(indexes, PyLong_FromUnsignedLong(pair->client)))
				Py_CLEAR(indexes);
		}
	}
	PyObject *tuple = indexes ? PyList_AsTuple(indexes) : NULL;
	Py_XDECREF(indexes);
	if (!tuple)
		return NULL;
	return Py_BuildValue("(iiiiikkNKKKK(KK)(KK)LLKKNNNN)", group->protocol, group->port, group->kind, group->client,
	                     group->server, clients, servers, tuple, opened, midstream, resumed, unanswered, packets[0],
	                     packets[1], bytes[0], bytes[1], (long long)first, (long long)last, contacts_boot, contacts_steady,
	                     values(c, order, group, false), values(c, order, group, true), numbers(steady, BINS),
	                     numbers(boot, BINS));
}

PyObject *give_rows(const Counter *c, const char *roles, Py_ssize_t length, const char *scanned)
{
	if (length != (Py_ssize_t)c->host_count) {
		PyErr_Format(PyExc_ValueError, "%zd roles for %u hosts", length, c->host_count);
		return NULL;
	}
	Group *groups = NULL;
	uint32_t count = 0;
	uint32_t *order = order_pairs(c, (const uint8_t *)roles, (const uint8_t *)scanned, &groups, &count);
	uint32_t *stamps = calloc((size_t)c->host_count + 1, 2 * sizeof *stamps);
	PyObject *list = order && stamps ? PyList_New(0) : PyErr_NoMemory();
	for (uint32_t i = 0; list && i < count; i++)
		if (!add(list, row_tuple(c, order, groups + i, stamps, i + 1)))
			Py_CLEAR(list);
	free(order);
	free(groups);
	free(stamps);
	return list;
}

/* Whether the pair can be part of a scan: connections without data, or few packets. */
static bool is_attempt(const Pair *pair)
{
	return pair->kind == EMPTY || (pair->protocol != TCP && pair->opened && !pair->midstream && !pair->resumed &&
	                               pair->packets[0] <= 3ULL * pair->opened);
}

PyObject *give_attempts(const Counter *c)
{
	PyObject *list = PyList_New(0);
	for (uint32_t i = 0; list && i < c->pair_count; i++) {
		const Pair *pair = c->pairs + i;
		if (is_attempt(pair) &&
		    !add(list, Py_BuildValue("(IIIiiIIKKLL)", i, pair->client, pair->server, pair->protocol, pair->port,
		                             pair->opened, pair->unanswered, (unsigned long long)pair->packets[0],
		                             (unsigned long long)pair->packets[1], (long long)pair->first,
		                             (long long)pair->last)))
			Py_CLEAR(list);
	}
	return list;
}

static PyObject *link_tuple(const Counter *c, uint32_t index)
{
	const Pair *pair = c->pairs + index;
	return Py_BuildValue("(IIiiKK)", pair->client, pair->server, pair->protocol, pair->port,
	                     (unsigned long long)(pair->packets[0] + pair->packets[1]),
	                     (unsigned long long)(pair->bytes[0] + pair->bytes[1]));
}

static PyObject *sample_tuple(const Counter *c, uint32_t index)
{
	const Sample *sample = c->samples + index;
	return Py_BuildValue("(iiOLIIy#)", sample->protocol, sample->port, sample->from_client ? Py_True : Py_False,
	                     (long long)sample->time, sample->source, sample->destination, (const char *)sample->payload,
	                     (Py_ssize_t)sample->length);
}

static PyObject *boot_tuple(const Counter *c, uint32_t index)
{
	const Boot *boot = c->boots + index;
	return Py_BuildValue("(y#LL)", (const char *)boot->mac, (Py_ssize_t)6, (long long)boot->began, (long long)boot->settled);
}

static PyObject *problem_tuple(const Counter *c, uint32_t index)
{
	const Problem *problem = c->problems + index;
	return Py_BuildValue("(IKs)", problem->file, (unsigned long long)problem->offset, problem->what);
}

static PyObject *flow_tuple(const Counter *c, uint32_t index)
{
	const Kept *flow = c->kept + index;
	const Host *client = c->hosts + flow->client, *server = c->hosts + flow->server;
	return Py_BuildValue("(y#iy#iiKKKK)", (const char *)client->address, (Py_ssize_t)client->length, flow->client_port,
	                     (const char *)server->address, (Py_ssize_t)server->length, flow->server_port, flow->protocol,
	                     (unsigned long long)flow->packets[0], (unsigned long long)flow->bytes[0],
	                     (unsigned long long)flow->packets[1], (unsigned long long)flow->bytes[1]);
}

static PyObject *file_tuple(const Counter *c, uint32_t index)
{
	const Span *span = c->spans + index;
	return Py_BuildValue("(LLK)", (long long)span->first, (long long)span->last, (unsigned long long)span->packets);
}

static PyObject *list_of(const Counter *c, uint32_t count, PyObject *(*tuple)(const Counter *, uint32_t))
{
	PyObject *list = PyList_New(0);
	for (uint32_t i = 0; list && i < count; i++)
		if (!add(list, tuple(c, i)))
			Py_CLEAR(list);
	return list;
}

PyObject *give_hosts(const Counter *c) { return list_of(c, c->host_count, host_tuple); }
PyObject *give_links(const Counter *c) { return list_of(c, c->pair_count, link_tuple); }
PyObject *give_samples(const Counter *c) { return list_of(c, c->sample_count, sample_tuple); }
PyObject *give_boots(const Counter *c) { return list_of(c, c->boot_count, boot_tuple); }
PyObject *give_problems(const Counter *c) { return list_of(c, c->problem_count, problem_tuple); }
PyObject *give_flows(const Counter *c) { return list_of(c, c->kept_count, flow_tuple); }
PyObject *give_files(const Counter *c) { return list_of(c, c->file, file_tuple); }

static PyObject *other_name(const OtherCount *other)
{
	switch (other->what) {
	case OTHER_ARP:
		return PyUnicode_FromString("ARP");
	case OTHER_LLC:
		return PyUnicode_FromString("LLC (spanning tree and the like)");
	case OTHER_ETHERTYPE:
		if (other->value == 0x88cc)
			return PyUnicode_FromString("LLDP");
		return PyUnicode_FromFormat("ethertype 0x%04x", other->value);
	case OTHER_LINK:
		return PyUnicode_FromFormat("frames of link type %u", other->value);
	case OTHER_SHORT:
		return PyUnicode_FromString("cut off in its headers");
	case OTHER_BROKEN:
		return PyUnicode_FromString("broken IP header");
	case OTHER_FRAGMENT:
		return PyUnicode_FromString("fragment without its first");
	default:
		return PyUnicode_FromString("further kinds");
	}
}

static bool put(PyObject *dict, const char *key, PyObject *value)
{
	bool fine = value && !PyDict_SetItemString(dict, key, value);
	Py_XDECREF(value);
	return fine;
}

static PyObject *others(const Counter *c)
{
	PyObject *dict = PyDict_New();
	for (uint32_t i = 0; dict && i < c->other_count; i++) {
		PyObject *name = other_name(c->others + i);
		PyObject *value = Py_BuildValue("(KK)", (unsigned long long)c->others[i].packets,
		                                (unsigned long long)c->others[i].bytes);
		if (!name || !value || PyDict_SetItem(dict, name, value))
			Py_CLEAR(dict);
		Py_XDECREF(name);
		Py_XDECREF(value);
	}
	return dict;
}

/* Without those after the last packet that is counted (--node). */
static PyObject *gaps(const Counter *c)
{
	PyObject *list = PyList_New(0);
	for (uint32_t i = 0; list && i < c->gap_count; i++)
		if (c->gaps[i].to <= c->end &&
		    !add(list, Py_BuildValue("(LL)", (long long)c->gaps[i].from, (long long)c->gaps[i].to)))
			Py_CLEAR(list);
	return list;
}

static PyObject *skipped(const Counter *c)
{
	PyObject *dict = PyDict_New();
	for (uint32_t i = 0; dict && i < c->skipped_count; i++)
		if (!put(dict, c->skipped[i].reason, PyLong_FromUnsignedLongLong(c->skipped[i].count)))
			Py_CLEAR(dict);
	return dict;
}

PyObject *give_totals(const Counter *c)
{
	PyObject *dict = PyDict_New();
	if (!dict)
		return NULL;
	if (put(dict, "packets", PyLong_FromUnsignedLongLong(c->packets)) &&
	    put(dict, "bytes", PyLong_FromUnsignedLongLong(c->bytes)) && put(dict, "start_ns", PyLong_FromLongLong(c->start)) &&
	    put(dict, "end_ns", PyLong_FromLongLong(c->end)) && put(dict, "truncated", PyBool_FromLong(c->truncated)) &&
	    put(dict, "cut", PyLong_FromUnsignedLongLong(c->cut)) && put(dict, "cut_at", PyLong_FromUnsignedLong(c->cut_at)) &&
	    put(dict, "gap_ns", PyLong_FromLongLong(c->gap)) && put(dict, "gaps", gaps(c)) &&
	    put(dict, "bin_ns", PyLong_FromLongLong(c->bin)) && put(dict, "other", others(c)) && put(dict, "skipped", skipped(c)) &&
	    put(dict, "beyond", Py_BuildValue("(KK)", (unsigned long long)c->beyond[0], (unsigned long long)c->beyond[1])))
		return dict;
	Py_DECREF(dict);
	return NULL;
}
