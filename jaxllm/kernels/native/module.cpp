// The Python module jaxllm.kernels._native: capsules for XLA, and what the process may set or ask.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ffi.h"
#include "ops.h"
#include "pool.h"

namespace {

PyObject* targets(PyObject*, PyObject*) {
  PyObject* all = PyDict_New();
  if (!all) return nullptr;
  for (const jaxllm::Target* const* list = jaxllm::kTargets; *list; list++) {
    for (const jaxllm::Target* each = *list; each->name; each++) {
      PyObject* capsule = PyCapsule_New(each->handler, nullptr, nullptr);
      if (!capsule || PyDict_SetItemString(all, each->name, capsule) < 0) {
        Py_XDECREF(capsule);
        Py_DECREF(all);
        return nullptr;
      }
      Py_DECREF(capsule);
    }
  }
  return all;
}

PyObject* backends(PyObject*, PyObject*) {
  const char* names[8];
  const int count = jaxllm::backends(names);
  PyObject* all = PyTuple_New(count);
  for (int i = 0; all && i < count; i++) PyTuple_SetItem(all, i, PyUnicode_FromString(names[i]));
  return all;
}

PyObject* backend(PyObject*, PyObject*) { return PyUnicode_FromString(jaxllm::backend().name); }

PyObject* use_backend(PyObject*, PyObject* name) {
  PyObject* bytes = PyUnicode_AsUTF8String(name);
  if (!bytes) return nullptr;
  const bool found = jaxllm::use_backend(PyBytes_AsString(bytes));
  Py_DECREF(bytes);
  if (!found) return PyErr_Format(PyExc_ValueError, "no kernels named %R run on this processor", name);
  Py_RETURN_NONE;
}

PyObject* threads(PyObject*, PyObject*) { return PyLong_FromLong(jaxllm::threads()); }

PyObject* set_threads(PyObject*, PyObject* count) {
  const long value = PyLong_AsLong(count);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  if (value < 1 || value > jaxllm::kMaxThreads) {
    return PyErr_Format(PyExc_ValueError, "threads must be in [1, %d], got %ld", jaxllm::kMaxThreads, value);
  }
  Py_BEGIN_ALLOW_THREADS jaxllm::set_threads(static_cast<int>(value));
  Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

PyObject* busy_ns(PyObject*, PyObject*) { return PyLong_FromLongLong(jaxllm::busy_ns()); }

PyObject* read_all(PyObject*, PyObject* object) {
  PyObject* view = PyMemoryView_FromObject(object);
  if (!view) return nullptr;
  Py_buffer buffer;
  if (PyObject_GetBuffer(view, &buffer, PyBUF_C_CONTIGUOUS) < 0) {
    Py_DECREF(view);
    return nullptr;
  }
  int64_t sum;
  Py_BEGIN_ALLOW_THREADS sum = jaxllm::read_all(buffer.buf, static_cast<size_t>(buffer.len));
  Py_END_ALLOW_THREADS PyBuffer_Release(&buffer);
  Py_DECREF(view);
  return PyLong_FromLongLong(sum);
}

PyMethodDef kMethods[] = {
    {"targets", targets, METH_NOARGS, "XLA FFI handlers by name, as capsules."},
    {"backends", backends, METH_NOARGS, "Names of the kernels that this processor runs, fastest first."},
    {"backend", backend, METH_NOARGS, "Name of the kernels in use."},
    {"use_backend", use_backend, METH_O, "Chooses kernels by name, for the whole process."},
    {"threads", threads, METH_NOARGS, "Threads that share a kernel's work, the caller's included."},
    {"set_threads", set_threads, METH_O, "Sets their number, for the whole process."},
    {"busy_ns", busy_ns, METH_NOARGS, "Nanoseconds spent in kernels since the process began."},
    {"read_all", read_all, METH_O, "Reads a buffer once, by all threads; returns a sum nobody needs."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_native",
                       "Native CPU kernels.",
                       -1,
                       kMethods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&kModule); }
