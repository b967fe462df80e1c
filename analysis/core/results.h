/* Results as Python objects: new references, or NULL with the exception set. */
#ifndef SMS_RESULTS_H
#define SMS_RESULTS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "core.h"

PyObject *give_hosts(const Counter *counter);
PyObject *give_links(const Counter *counter);
PyObject *give_samples(const Counter *counter);
PyObject *give_boots(const Counter *counter);
PyObject *give_problems(const Counter *counter);
PyObject *give_flows(const Counter *counter);
PyObject *give_totals(const Counter *counter);
PyObject *give_files(const Counter *counter);
PyObject *give_attempts(const Counter *counter);
/* scanned: NULL, or a byte for each pair. */
PyObject *give_rows(const Counter *counter, const char *roles, Py_ssize_t length, const char *scanned);

#endif
