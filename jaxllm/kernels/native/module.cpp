// The Python module jaxllm.kernels._native: capsules for XLA, and what the process may set or ask.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include <unordered_map>
#include <vector>

#include "chunk_tables.h"
#include "ffi.h"
#include "masks.h"
#include "ops.h"
#include "pool.h"
#include "weight_tables.h"

// Names of kernels and why they could not be compiled, up to a null; setup.py writes it.
extern "C" const char* const jaxllm_refused_backends[][2];

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

PyObject* names_of_backends(bool built) {
  const char* names[8];
  const int count = jaxllm::backends(names, built);
  PyObject* all = PyTuple_New(count);
  for (int i = 0; all && i < count; i++) PyTuple_SetItem(all, i, PyUnicode_FromString(names[i]));
  return all;
}
PyObject* backends(PyObject*, PyObject*) { return names_of_backends(false); }
PyObject* built_backends(PyObject*, PyObject*) { return names_of_backends(true); }

PyObject* refused_backends(PyObject*, PyObject*) {
  PyObject* all = PyDict_New();
  for (const char* const(*each)[2] = jaxllm_refused_backends; all && (*each)[0]; each++) {
    PyObject* reason = PyUnicode_FromString((*each)[1]);
    if (!reason || PyDict_SetItemString(all, (*each)[0], reason)) Py_CLEAR(all);
    Py_XDECREF(reason);
  }
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

// The buffers that open tables read, by the tables' handles; under Python's lock.
using Held = std::unordered_map<uint64_t, std::vector<Py_buffer>>;
Held held, held_chunks;

void release(std::vector<Py_buffer>& buffers) {
  for (Py_buffer& each : buffers) PyBuffer_Release(&each);
  buffers.clear();
}

jaxllm::Type type_of(const Py_buffer& buffer) {
  const char* format = buffer.format ? buffer.format : "B";
  if (*format && strchr("@=<", *format)) format++;
  if (!format[0] || format[1]) return jaxllm::Type::kNone;
  switch (format[0]) {
    case '?':
      return jaxllm::Type::kBool;
    case 'b':
      return jaxllm::Type::kS8;
    case 'B':
      return jaxllm::Type::kU8;
    case 'H':
      return jaxllm::Type::kU16;
    case 'e':
      return jaxllm::Type::kF16;
    case 'f':
      return jaxllm::Type::kF32;
    case 'i':
    case 'l':
      return buffer.itemsize == 4 ? jaxllm::Type::kS32 : jaxllm::Type::kNone;
    default:
      return jaxllm::Type::kNone;
  }
}

// Reads what a Python buffer holds; false with a Python error where kernels cannot read it.
bool read_array(PyObject* object, std::vector<Py_buffer>& buffers, jaxllm::Array& out) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object, &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return false;
  buffers.push_back(buffer);
  out.type = type_of(buffer);
  out.data = buffer.buf;
  const size_t size = jaxllm::bytes_of(out.type);
  if (out.type == jaxllm::Type::kNone || size != static_cast<size_t>(buffer.itemsize) || buffer.ndim < 1 ||
      buffer.ndim > static_cast<int>(jaxllm::kMostDimensions)) {
    PyErr_SetString(PyExc_ValueError,
                    "an array has a type or a number of dimensions that kernels do not read");
    return false;
  }
  if (reinterpret_cast<uintptr_t>(buffer.buf) % size) {
    PyErr_SetString(PyExc_ValueError, "an array is not aligned");
    return false;
  }
  out.rank = static_cast<uint8_t>(buffer.ndim);
  out.count = 1;
  for (int i = 0; i < buffer.ndim; i++) {
    out.dims[i] = static_cast<size_t>(buffer.shape[i]);
    out.count *= out.dims[i];
  }
  if (out.count * size != static_cast<size_t>(buffer.len)) {
    PyErr_SetString(PyExc_ValueError, "an array's size does not fit its shape");
    return false;
  }
  return true;
}

// The arrays of rows, a sequence of sequences of buffers or None; false with a Python error.
bool read_rows(PyObject* rows, std::vector<Py_buffer>& buffers, std::vector<jaxllm::Array>& arrays) {
  const Py_ssize_t count = PySequence_Size(rows);
  Py_ssize_t columns = -1;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* row = PySequence_GetItem(rows, i);
    const Py_ssize_t own = row ? PySequence_Size(row) : -1;
    bool good = own >= 0;
    if (good && columns >= 0 && own != columns) {
      PyErr_SetString(PyExc_ValueError, "rows of a weight table must have as many columns");
      good = false;
    }
    columns = own;
    for (Py_ssize_t j = 0; good && j < own; j++) {
      PyObject* each = PySequence_GetItem(row, j);
      jaxllm::Array array;
      good = each && (Py_IsNone(each) || read_array(each, buffers, array));
      Py_XDECREF(each);
      arrays.push_back(array);
    }
    Py_XDECREF(row);
    if (!good) return false;
  }
  return count >= 0;
}

PyObject* open_table(PyObject*, PyObject* rows) {
  std::vector<Py_buffer> buffers;
  std::vector<jaxllm::Array> arrays;
  if (!read_rows(rows, buffers, arrays)) {
    release(buffers);
    return nullptr;
  }
  const uint64_t handle = jaxllm::open_table(std::move(arrays), static_cast<size_t>(PySequence_Size(rows)));
  if (handle == 0) {
    release(buffers);
    PyErr_SetString(PyExc_ValueError,
                    "a weight table needs a row and a column, and fewer tables must be open");
    return nullptr;
  }
  held.emplace(handle, std::move(buffers));
  return PyLong_FromUnsignedLongLong(handle);
}

PyObject* closed(PyObject* number, bool (*close)(uint64_t), Held& buffers) {
  const unsigned long long handle = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return nullptr;
  bool done;
  Py_BEGIN_ALLOW_THREADS done = close(handle);
  Py_END_ALLOW_THREADS const auto found = buffers.find(handle);
  if (done && found != buffers.end()) {
    release(found->second);
    buffers.erase(found);
  }
  return PyBool_FromLong(done);
}

PyObject* close_table(PyObject*, PyObject* number) { return closed(number, jaxllm::close_table, held); }

// Reads the blobs of one chunk, `layers` buffers of bytes; false with a Python error.
bool read_blobs(PyObject* chunk, size_t layers, std::vector<Py_buffer>& buffers) {
  if (PySequence_Size(chunk) != static_cast<Py_ssize_t>(layers)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "each chunk needs a blob in each layer");
    return false;
  }
  for (size_t layer = 0; layer < layers; layer++) {
    PyObject* each = PySequence_GetItem(chunk, static_cast<Py_ssize_t>(layer));
    Py_buffer buffer;
    const bool good = each && PyObject_GetBuffer(each, &buffer, PyBUF_SIMPLE) == 0;
    Py_XDECREF(each);
    if (!good) return false;
    buffers.push_back(buffer);
  }
  return true;
}

// The numbers of a sequence; false with a Python error.
bool read_numbers(PyObject* sequence, std::vector<long>& out) {
  const Py_ssize_t count = PySequence_Size(sequence);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* each = PySequence_GetItem(sequence, i);
    out.push_back(each ? PyLong_AsLong(each) : -1);
    Py_XDECREF(each);
    if (PyErr_Occurred()) return false;
  }
  return count >= 0;
}

// (tokens, width, half, keys by token, values by token, rotated), heads of layers, bits of chunks, chunks.
PyObject* open_chunks(PyObject*, PyObject* arguments) {
  PyObject *form, *heads, *bits, *chunks;
  std::vector<long> of_form, of_heads, of_bits;
  if (!PyArg_ParseTuple(arguments, "OOOO", &form, &heads, &bits, &chunks) || !read_numbers(form, of_form) ||
      !read_numbers(heads, of_heads) || !read_numbers(bits, of_bits)) {
    return nullptr;
  }
  const size_t layers = of_heads.size(), count = of_bits.size();
  if (of_form.size() != 6 || of_form[0] < 1 || of_form[1] < 1 ||
      PySequence_Size(chunks) != static_cast<Py_ssize_t>(count)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a table of chunks has another form");
    return nullptr;
  }
  jaxllm::ChunkTable table;
  table.form = {static_cast<size_t>(of_form[0]),
                static_cast<size_t>(of_form[1]),
                of_form[2] != 0,
                of_form[3] != 0,
                of_form[4] != 0,
                of_form[5] != 0};
  for (const long each : of_heads) table.heads.push_back(each < 1 ? 0 : static_cast<size_t>(each));
  for (const long each : of_bits) table.bits.push_back(static_cast<int8_t>(each < 0 || each > 8 ? -1 : each));
  std::vector<Py_buffer> buffers;
  for (size_t i = 0; i < count; i++) {
    PyObject* chunk = PySequence_GetItem(chunks, static_cast<Py_ssize_t>(i));
    const bool good = chunk && read_blobs(chunk, layers, buffers);
    Py_XDECREF(chunk);
    if (!good) {
      release(buffers);
      return nullptr;
    }
  }
  for (size_t i = 0; i < layers * count; i++) {
    const Py_buffer& blob = buffers[i % count * layers + i / count];
    table.blobs.push_back(static_cast<const uint8_t*>(blob.buf));
    table.bytes.push_back(static_cast<size_t>(blob.len));
  }
  const char* const what = jaxllm::wrong_chunks(table);
  const uint64_t handle = what ? 0 : jaxllm::open_chunks(std::move(table));
  if (handle == 0) {
    release(buffers);
    PyErr_SetString(PyExc_ValueError, what ? what : "too many tables of chunks are open");
    return nullptr;
  }
  held_chunks.emplace(handle, std::move(buffers));
  return PyLong_FromUnsignedLongLong(handle);
}

PyObject* close_chunks(PyObject*, PyObject* number) {
  return closed(number, jaxllm::close_chunks, held_chunks);
}

PyObject* open_channel(PyObject*, PyObject* arguments) {
  int descriptor;
  const char* plain;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(arguments, "iy#", &descriptor, &plain, &bytes)) return nullptr;
  const uint64_t handle = jaxllm::open_channel(descriptor, {plain, plain + bytes});
  if (handle == 0) {
    PyErr_SetString(PyExc_ValueError, "it is no open socket, or too many channels of masks are open");
    return nullptr;
  }
  return PyLong_FromUnsignedLongLong(handle);
}

PyObject* close_channel(PyObject*, PyObject* number) {
  static Held none;
  return closed(number, jaxllm::close_channel, none);
}

PyMethodDef kMethods[] = {
    {"targets", targets, METH_NOARGS, "XLA FFI handlers by name, as capsules."},
    {"backends", backends, METH_NOARGS, "Names of the kernels that this processor runs, fastest first."},
    {"built_backends", built_backends, METH_NOARGS, "Names of the kernels in this library, fastest first."},
    {"refused_backends", refused_backends, METH_NOARGS,
     "Why, by name, kernels could not be compiled for their instruction set."},
    {"backend", backend, METH_NOARGS, "Name of the kernels in use."},
    {"use_backend", use_backend, METH_O, "Chooses kernels by name, for the whole process."},
    {"threads", threads, METH_NOARGS, "Threads that share a kernel's work, the caller's included."},
    {"set_threads", set_threads, METH_O, "Sets their number, for the whole process."},
    {"busy_ns", busy_ns, METH_NOARGS, "Nanoseconds spent in kernels since the process began."},
    {"read_all", read_all, METH_O, "Reads a buffer once, by all threads; returns a sum nobody needs."},
    {"open_table", open_table, METH_O,
     "Opens a weight table of rows of buffers or None, which it holds; returns its handle."},
    {"close_table", close_table, METH_O, "Closes a weight table; whether it was open."},
    {"open_chunks", open_chunks, METH_VARARGS,
     "Opens a table of chunks, whose blobs it holds: form, heads, bits, chunks; returns its handle."},
    {"close_chunks", close_chunks, METH_O, "Closes a table of chunks; whether it was open."},
    {"open_channel", open_channel, METH_VARARGS,
     "Opens a channel of masks: a socket, of which it has a descriptor of its own, and the bits of plain "
     "text; returns its handle."},
    {"close_channel", close_channel, METH_O, "Closes a channel of masks; whether it was open."},
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
