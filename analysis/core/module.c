/* Python module of the core; analysis/_core.pyi is its documentation. */
#include "results.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define ABI 5

typedef struct {
	PyObject_HEAD
	Counter *counter;
	bool busy; /* written and read with the GIL held */
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

/* Calls `take` for every item of a sequence. */
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
	if (offset != ANYWHERE && offset + first->length > GATHERED) {
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
		set_bit(counter->matched, protocol, port);
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
	if (begun && !self->counter) { /* code of the arguments may have called __init__ again */
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
	static char *names[] = {"descriptor", "prefix", "zstd", NULL};
	Self *self = (Self *)object;
	int descriptor, status = READ_ERROR, zstd = 0;
	const char *prefix = "";
	Py_ssize_t length = 0;
	if (!PyArg_ParseTupleAndKeywords(args, words, "i|y#p", names, &descriptor, &prefix, &length, &zstd))
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
	if (zstd && !(source.zstd = zstd_begin())) {
		PyErr_SetString(PyExc_NotImplementedError, "this machine has no libzstd");
		return NULL;
	}
	if (!source_begin(&source))
		return PyErr_NoMemory();
	if (!counter_open(counter)) {
		source_end(&source);
		return PyErr_NoMemory();
	}
	Sink sink = counter_sink(counter);
	self->busy = true;
	Py_BEGIN_ALLOW_THREADS
	status = read_capture(&source, &sink);
	source_end(&source);
	Py_END_ALLOW_THREADS
	self->busy = false;
	if (source.damage) {
		counter_problem(counter, source.base + source.end, source.damage);
		counter->truncated = true;
	}
	atomic_store(&counter->stopped, false); /* stop applies to this file only */
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
		atomic_store(&self->counter->stopped, true);
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
	Counter *c = ((Self *)object)->counter;
	if (!c)
		return PyLong_FromLong(0);
	return PyLong_FromUnsignedLongLong(which == NULL            ? atomic_load(&c->seen_packets)
	                                   : *(char *)which == 'b' ? atomic_load(&c->seen_bytes)
	                                                           : atomic_load(&c->read_bytes));
}

/* ---- results -------------------------------------------------------------------------------------- */

#define GIVE(what)                                                                                  \
	static PyObject *counter_##what(PyObject *object, PyObject *Py_UNUSED(none))                    \
	{                                                                                               \
		const Counter *counter = idle((Self *)object);                                              \
		return counter ? give_##what(counter) : NULL;                                               \
	}
GIVE(hosts)
GIVE(links)
GIVE(samples)
GIVE(boots)
GIVE(problems)
GIVE(flows)
GIVE(totals)
GIVE(files)
GIVE(attempts)

static PyObject *counter_rows(PyObject *object, PyObject *args)
{
	const char *roles, *scanned = NULL;
	Py_ssize_t length, pairs = 0;
	const Counter *counter = idle((Self *)object);
	if (!counter || !PyArg_ParseTuple(args, "y#|y#", &roles, &length, &scanned, &pairs))
		return NULL;
	if (pairs && pairs != (Py_ssize_t)counter->pair_count)
		return PyErr_Format(PyExc_ValueError, "%zd marks for %u pairs", pairs, counter->pair_count);
	return give_rows(counter, roles, length, pairs ? scanned : NULL);
}

/* ---- the first packet's time, for sorting files --------------------------------------------------- */

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

static PyObject *has_zstd(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
	Zstd *zstd = zstd_begin();
	zstd_end(zstd);
	return PyBool_FromLong(zstd != NULL);
}

static PyObject *first_time(PyObject *Py_UNUSED(module), PyObject *args)
{
	const char *data;
	Py_ssize_t length;
	int zstd = 0;
	if (!PyArg_ParseTuple(args, "y#|p", &data, &length, &zstd))
		return NULL;
	First_time found = {.time = -1};
	atomic_bool stopped = false;
	atomic_ullong count = 0;
	Source source = {.descriptor = -1, .prefix = (const uint8_t *)data,
	                 .prefix_left = (size_t)length, .stopped = &stopped, .read_bytes = &count};
	source.zstd = zstd ? zstd_begin() : NULL;
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
    {"attempts", counter_attempts, METH_NOARGS, NULL},
    {"samples", counter_samples, METH_NOARGS, NULL},
    {"boots", counter_boots, METH_NOARGS, NULL},
    {"problems", counter_problems, METH_NOARGS, NULL},
    {"flows", counter_flows, METH_NOARGS, NULL},
    {"files", counter_files, METH_NOARGS, NULL},
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
    {"has_zstd", has_zstd, METH_NOARGS, NULL},
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
