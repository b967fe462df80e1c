/* The core for Python; analysis/_core.pyi says what everything means. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ABI 1
#define VALUES 2048    /* of a row: as many intervals, and as many latencies */
#define CLIENTS 4096   /* of a row: as many numbers of hosts */

typedef struct {
	PyObject_HEAD
	Counter *counter;
	volatile bool busy;
} Self;

/* ---- arguments --------------------------------------------------------------------------------- */

static long number(PyObject *tuple, Py_ssize_t at, long most)
{
	PyObject *item = PySequence_GetItem(tuple, at);
	if (!item)
		return -1;
	long value = PyLong_AsLong(item);
	Py_DECREF(item);
	if (value == -1 && PyErr_Occurred())
		return -1;
	if (value < 0 || value > most) {
		PyErr_Format(PyExc_ValueError, "%ld is not in 0..%ld", value, most);
		return -1;
	}
	return value;
}

static int row_of(long protocol) { return protocol == TCP ? 0 : protocol == UDP ? 1 : protocol == SCTP ? 2 : -1; }

static void set_bit(uint8_t map[3][8192], long protocol, long port)
{
	int row = row_of(protocol);
	if (row >= 0)
		map[row][port >> 3] |= (uint8_t)(1 << (port & 7));
}

/* Calls take for every item of a sequence. */
static int each(PyObject *sequence, Py_ssize_t most, int (*take)(Counter *, PyObject *), Counter *counter)
{
	Py_ssize_t count = PySequence_Size(sequence);
	if (count < 0)
		return -1;
	if (count > most) {
		PyErr_Format(PyExc_ValueError, "more than %zd entries", most);
		return -1;
	}
	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *item = PySequence_GetItem(sequence, i);
		int status = item ? take(counter, item) : -1;
		Py_XDECREF(item);
		if (status)
			return -1;
	}
	return 0;
}

static int take_port(Counter *counter, PyObject *item)
{
	long protocol = number(item, 0, 255), port = protocol < 0 ? -1 : number(item, 1, 65535);
	if (port < 0)
		return -1;
	set_bit(counter->known, protocol, port);
	return 0;
}

static int take_bytes(PyObject *item, Py_ssize_t at, uint8_t *to, uint8_t *length)
{
	PyObject *bytes = PySequence_GetItem(item, at);
	char *data;
	Py_ssize_t size;
	if (!bytes || PyBytes_AsStringAndSize(bytes, &data, &size) < 0) {
		Py_XDECREF(bytes);
		return -1;
	}
	if (size < 1 || size > PATTERN) {
		PyErr_Format(PyExc_ValueError, "a pattern has 1 to %d bytes", PATTERN);
		Py_DECREF(bytes);
		return -1;
	}
	memcpy(to, data, (size_t)size);
	*length = (uint8_t)size;
	Py_DECREF(bytes);
	return 0;
}

static int take_first(Counter *counter, PyObject *item)
{
	First *first = counter->first + counter->firsts;
	uint8_t high;
	long protocol = number(item, 0, 255), port = protocol < 0 ? -1 : number(item, 1, 65535);
	long offset = port < 0 ? -1 : number(item, 2, 255);
	if (offset < 0 || take_bytes(item, 3, first->low, &first->length) || take_bytes(item, 4, first->high, &high))
		return -1;
	if (offset + first->length > GATHERED) {
		PyErr_Format(PyExc_ValueError, "a pattern ends within the first %d bytes", GATHERED);
		return -1;
	}
	if (high != first->length) {
		PyErr_SetString(PyExc_ValueError, "low and high are not equally long");
		return -1;
	}
	first->protocol = (uint8_t)protocol;
	first->port = (uint16_t)port;
	first->offset = (uint8_t)offset;
	if (port) {
		set_bit(counter->known, protocol, port);
		set_bit(counter->told, protocol, port);
	} else {
		counter->any_first = true;
	}
	counter->firsts++;
	return 0;
}

static int take_sampled(Counter *counter, PyObject *item)
{
	long protocol = number(item, 0, 255), port = protocol < 0 ? -1 : number(item, 1, 65535);
	long wanted = port < 0 ? -1 : number(item, 2, 65536);
	if (wanted < 0)
		return -1;
	counter->sampled[counter->sampleds++] =
	    (Sampled){.protocol = (uint8_t)protocol, .port = (uint16_t)port, .wanted = (uint32_t)wanted};
	return 0;
}

static int counter_init(PyObject *object, PyObject *args, PyObject *words)
{
	static char *names[] = {"ports", "first", "samples", "node", "max_flows", "max_pairs", "keep_flows", NULL};
	Self *self = (Self *)object;
	PyObject *ports, *first, *samples;
	const char *node = "";
	Py_ssize_t node_length = 0, max_flows = 131072, max_pairs = 65536, keep = 0;
	if (!PyArg_ParseTupleAndKeywords(args, words, "OOO|y#nnn", names, &ports, &first, &samples, &node, &node_length,
	                                 &max_flows, &max_pairs, &keep))
		return -1;
	if (self->counter) {
		PyErr_SetString(PyExc_RuntimeError, "begun already");
		return -1;
	}
	if (keep < 0 || keep > UINT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "keep_flows is between 0 and 4294967295");
		return -1;
	}
	if (max_flows < 64 || max_flows > 1u << 22 || max_pairs < 64 || max_pairs > 1u << 22) {
		PyErr_SetString(PyExc_ValueError, "max_flows and max_pairs are between 64 and 4194304");
		return -1;
	}
	if (node_length != 0 && node_length != 4 && node_length != 6 && node_length != 16) {
		PyErr_SetString(PyExc_ValueError, "node has 4, 6 or 16 bytes");
		return -1;
	}
	Counter *counter = calloc(1, sizeof *counter);
	if (!counter) {
		PyErr_NoMemory();
		return -1;
	}
	counter->max_flows = (uint32_t)max_flows;
	counter->max_pairs = (uint32_t)max_pairs;
	counter->keep_flows = (uint32_t)keep;
	memcpy(counter->only, node, (size_t)node_length);
	counter->only_length = (uint8_t)node_length;
	bool fine = !each(ports, 65536, take_port, counter) && !each(first, MAX_FIRST, take_first, counter) &&
	            !each(samples, MAX_SAMPLED, take_sampled, counter);
	bool begun = fine && counter_begin(counter);
	if (begun && !self->counter) { /* the arguments' own code may have come here again */
		self->counter = counter;
		return 0;
	}
	if (begun)
		PyErr_SetString(PyExc_RuntimeError, "begun already");
	else if (fine)
		PyErr_NoMemory();
	counter_end(counter);
	free(counter);
	return -1;
}

static void counter_free(PyObject *object)
{
	Self *self = (Self *)object;
	PyTypeObject *type = Py_TYPE(object);
	if (self->counter) {
		counter_end(self->counter);
		free(self->counter);
	}
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
	release(object);
	Py_DECREF(type);
}

static Counter *idle(Self *self)
{
	if (!self->counter || self->busy) {
		PyErr_SetString(PyExc_RuntimeError, self->counter ? "another thread reads" : "not begun");
		return NULL;
	}
	return self->counter;
}

/* ---- reading ------------------------------------------------------------------------------------ */

static PyObject *counter_read(PyObject *object, PyObject *args, PyObject *words)
{
	static char *names[] = {"descriptor", "prefix", NULL};
	Self *self = (Self *)object;
	int descriptor, status = READ_ERROR;
	const char *prefix = "";
	Py_ssize_t length = 0;
	if (!PyArg_ParseTupleAndKeywords(args, words, "i|y#", names, &descriptor, &prefix, &length))
		return NULL;
	Counter *counter = idle(self);
	if (!counter)
		return NULL;
	Source source = {
	    .descriptor = descriptor,
	    .prefix = (const uint8_t *)prefix,
	    .prefix_left = (size_t)length,
	    .stopped = &counter->stopped,
	    .read_bytes = &counter->read_bytes,
	};
	if (!source_begin(&source))
		return PyErr_NoMemory();
	Sink sink = counter_sink(counter);
	self->busy = true;
	Py_BEGIN_ALLOW_THREADS
	status = read_capture(&source, &sink);
	source_end(&source);
	Py_END_ALLOW_THREADS
	self->busy = false;
	counter->file++;
	if (counter->out_of_memory)
		return PyErr_NoMemory();
	if (status == READ_ERROR) {
		errno = source.error;
		return PyErr_SetFromErrno(PyExc_OSError);
	}
	if (status == READ_NOT_A_CAPTURE) {
		PyErr_SetString(PyExc_ValueError, "neither pcap nor pcapng");
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *counter_stop(PyObject *object, PyObject *Py_UNUSED(none))
{
	Self *self = (Self *)object;
	if (self->counter)
		self->counter->stopped = true;
	Py_RETURN_NONE;
}

static PyObject *counter_fold(PyObject *object, PyObject *Py_UNUSED(none))
{
	Counter *counter = idle((Self *)object);
	if (!counter)
		return NULL;
	counter_finish(counter);
	Py_RETURN_NONE;
}

static PyObject *get_count(PyObject *object, void *which)
{
	const Counter *counter = ((Self *)object)->counter;
	if (!counter)
		return PyLong_FromLong(0);
	return PyLong_FromUnsignedLongLong(which == NULL ? counter->packets : *(char *)which == 'b' ? counter->bytes : counter->read_bytes);
}

/* ---- what was counted --------------------------------------------------------------------------- */

/* Appends a new reference to a list; false, with the error set, when either went wrong. */
static bool add(PyObject *list, PyObject *item)
{
	bool fine = item && !PyList_Append(list, item);
	Py_XDECREF(item);
	return fine;
}

static PyObject *bytes_of(const void *data, size_t length) { return PyBytes_FromStringAndSize(data, (Py_ssize_t)length); }

static PyObject *host_tuple(const Host *host)
{
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

static PyObject *counter_hosts(PyObject *object, PyObject *Py_UNUSED(none))
{
	Counter *counter = idle((Self *)object);
	PyObject *list = counter ? PyList_New(0) : NULL;
	for (uint32_t i = 0; list && i < counter->host_count; i++)
		if (!add(list, host_tuple(counter->hosts + i)))
			Py_CLEAR(list);
	return list;
}

/* (value, weight) of what the pairs of a group kept: together they stand for all that was seen. */
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

static PyObject *counter_rows(PyObject *object, PyObject *args)
{
	const char *roles;
	Py_ssize_t length;
	Counter *c = idle((Self *)object);
	if (!c || !PyArg_ParseTuple(args, "y#", &roles, &length))
		return NULL;
	if (length != (Py_ssize_t)c->host_count) {
		PyErr_Format(PyExc_ValueError, "%zd roles for %u hosts", length, c->host_count);
		return NULL;
	}
	Group *groups = NULL;
	uint32_t count = 0;
	uint32_t *order = order_pairs(c, (const uint8_t *)roles, &groups, &count);
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

static PyObject *counter_links(PyObject *object, PyObject *Py_UNUSED(none))
{
	Counter *c = idle((Self *)object);
	PyObject *list = c ? PyList_New(0) : NULL;
	for (uint32_t i = 0; list && i < c->pair_count; i++) {
		const Pair *pair = c->pairs + i;
		if (!add(list, Py_BuildValue("(IIiiKK)", pair->client, pair->server, pair->protocol, pair->port,
		                             (unsigned long long)(pair->packets[0] + pair->packets[1]),
		                             (unsigned long long)(pair->bytes[0] + pair->bytes[1]))))
			Py_CLEAR(list);
	}
	return list;
}

static PyObject *counter_samples(PyObject *object, PyObject *Py_UNUSED(none))
{
	Counter *c = idle((Self *)object);
	PyObject *list = c ? PyList_New(0) : NULL;
	for (uint32_t i = 0; list && i < c->sample_count; i++) {
		const Sample *sample = c->samples + i;
		if (!add(list, Py_BuildValue("(iiOLIIy#)", sample->protocol, sample->port, sample->from_client ? Py_True : Py_False,
		                             (long long)sample->time, sample->source, sample->destination,
		                             (const char *)sample->payload, (Py_ssize_t)sample->length)))
			Py_CLEAR(list);
	}
	return list;
}

static PyObject *counter_boots(PyObject *object, PyObject *Py_UNUSED(none))
{
	Counter *c = idle((Self *)object);
	PyObject *list = c ? PyList_New(0) : NULL;
	for (uint32_t i = 0; list && i < c->boot_count; i++)
		if (!add(list, Py_BuildValue("(y#LL)", (const char *)c->boots[i].mac, (Py_ssize_t)6, (long long)c->boots[i].began,
		                             (long long)c->boots[i].settled)))
			Py_CLEAR(list);
	return list;
}

static PyObject *counter_problems(PyObject *object, PyObject *Py_UNUSED(none))
{
	Counter *c = idle((Self *)object);
	PyObject *list = c ? PyList_New(0) : NULL;
	for (uint32_t i = 0; list && i < c->problem_count; i++)
		if (!add(list, Py_BuildValue("(IKs)", c->problems[i].file, (unsigned long long)c->problems[i].offset,
		                             c->problems[i].what)))
			Py_CLEAR(list);
	return list;
}

static PyObject *counter_flows(PyObject *object, PyObject *Py_UNUSED(none))
{
	Counter *c = idle((Self *)object);
	PyObject *list = c ? PyList_New(0) : NULL;
	for (uint32_t i = 0; list && i < c->kept_count; i++) {
		const Kept *flow = c->kept + i;
		const Host *client = c->hosts + flow->client, *server = c->hosts + flow->server;
		if (!add(list, Py_BuildValue("(y#iy#iiKKKK)", (const char *)client->address, (Py_ssize_t)client->length,
		                             flow->client_port, (const char *)server->address, (Py_ssize_t)server->length,
		                             flow->server_port, flow->protocol, (unsigned long long)flow->packets[0],
		                             (unsigned long long)flow->bytes[0], (unsigned long long)flow->packets[1],
		                             (unsigned long long)flow->bytes[1])))
			Py_CLEAR(list);
	}
	return list;
}

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

static PyObject *skipped(const Counter *c)
{
	PyObject *dict = PyDict_New();
	for (uint32_t i = 0; dict && i < c->skipped_count; i++)
		if (!put(dict, c->skipped[i].reason, PyLong_FromUnsignedLongLong(c->skipped[i].count)))
			Py_CLEAR(dict);
	return dict;
}

static PyObject *counter_totals(PyObject *object, PyObject *Py_UNUSED(none))
{
	Counter *c = idle((Self *)object);
	PyObject *dict = c ? PyDict_New() : NULL;
	if (!dict)
		return NULL;
	if (put(dict, "packets", PyLong_FromUnsignedLongLong(c->packets)) &&
	    put(dict, "bytes", PyLong_FromUnsignedLongLong(c->bytes)) && put(dict, "start_ns", PyLong_FromLongLong(c->start)) &&
	    put(dict, "end_ns", PyLong_FromLongLong(c->end)) && put(dict, "truncated", PyBool_FromLong(c->truncated)) &&
	    put(dict, "bin_ns", PyLong_FromLongLong(c->bin)) && put(dict, "other", others(c)) && put(dict, "skipped", skipped(c)) &&
	    put(dict, "beyond", Py_BuildValue("(KK)", (unsigned long long)c->beyond[0], (unsigned long long)c->beyond[1])))
		return dict;
	Py_DECREF(dict);
	return NULL;
}

/* ---- the first packet's time, for ordering files -------------------------------------------------- */

typedef struct {
	int64_t time;
} First_time;

static bool peek_record(void *owner, const Record *record)
{
	((First_time *)owner)->time = record->time;
	return false;
}
static void peek_moving(void *owner) { (void)owner; }
static void peek_problem(void *owner, uint64_t offset, const char *what) { (void)owner, (void)offset, (void)what; }
static void peek_end(void *owner, uint64_t offset) { (void)owner, (void)offset; }

static PyObject *first_time(PyObject *Py_UNUSED(module), PyObject *args)
{
	const char *data;
	Py_ssize_t length;
	if (!PyArg_ParseTuple(args, "y#", &data, &length))
		return NULL;
	First_time found = {.time = -1};
	volatile bool stopped = false;
	volatile uint64_t count = 0;
	Source source = {.descriptor = -1, .prefix = (const uint8_t *)data,
	                 .prefix_left = (size_t)length, .stopped = &stopped, .read_bytes = &count};
	if (!source_begin(&source))
		return PyErr_NoMemory();
	Sink sink = {&found, peek_record, peek_moving, peek_problem, peek_end};
	read_capture(&source, &sink);
	source_end(&source);
	return PyLong_FromLongLong(found.time);
}

/* ---- the module ----------------------------------------------------------------------------------- */

static PyMethodDef counter_methods[] = {
    {"read", (PyCFunction)(void (*)(void))counter_read, METH_VARARGS | METH_KEYWORDS, NULL},
    {"stop", counter_stop, METH_NOARGS, NULL},
    {"finish", counter_fold, METH_NOARGS, NULL},
    {"hosts", counter_hosts, METH_NOARGS, NULL},
    {"rows", counter_rows, METH_VARARGS, NULL},
    {"links", counter_links, METH_NOARGS, NULL},
    {"samples", counter_samples, METH_NOARGS, NULL},
    {"boots", counter_boots, METH_NOARGS, NULL},
    {"problems", counter_problems, METH_NOARGS, NULL},
    {"flows", counter_flows, METH_NOARGS, NULL},
    {"totals", counter_totals, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef counter_counts[] = {
    {"packets", get_count, NULL, NULL, NULL},
    {"bytes", get_count, NULL, NULL, "b"},
    {"read_bytes", get_count, NULL, NULL, "r"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot counter_slots[] = {
    {Py_tp_init, counter_init},
    {Py_tp_dealloc, counter_free},
    {Py_tp_methods, counter_methods},
    {Py_tp_getset, counter_counts},
    {0, NULL},
};

static PyType_Spec counter_spec = {
    .name = "analysis._core.Counter",
    .basicsize = sizeof(Self),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = counter_slots,
};

static PyMethodDef module_methods[] = {
    {"first_time", first_time, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module)
{
	PyObject *type = PyType_FromSpec(&counter_spec);
	if (!type)
		return -1;
	int status = PyModule_AddObjectRef(module, "Counter", type);
	Py_DECREF(type);
	return status ? status : PyModule_AddIntConstant(module, "ABI", ABI);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "analysis._core",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module); }
