// `hicache._keys`: page_keys.hpp for Python. Types and docstrings are in hicache/_keys.pyi.
//
// Promises: nothing is read beyond the whole pages of the ids it is given.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "page_keys.hpp"

namespace {

using namespace deepinfer;

// Both buffers of one call, given back on every way out.
class Buffers {
  public:
    ~Buffers() {
        if (parent.obj != nullptr) PyBuffer_Release(&parent);
        if (ids.obj != nullptr) PyBuffer_Release(&ids);
    }
    bool take(PyObject* parent_given, PyObject* ids_given) {
        return PyObject_GetBuffer(parent_given, &parent, PyBUF_SIMPLE) == 0 &&
               PyObject_GetBuffer(ids_given, &ids, PyBUF_ND) == 0;
    }

    Py_buffer parent{};
    Py_buffer ids{};
};

bool fit(const Buffers& buffers) {
    if (buffers.parent.len != static_cast<Py_ssize_t>(kKeyBytes)) {
        PyErr_Format(PyExc_ValueError, "parent has %zd bytes instead of %zu", buffers.parent.len, kKeyBytes);
        return false;
    }
    if (buffers.ids.itemsize != static_cast<Py_ssize_t>(sizeof(std::int32_t)) || buffers.ids.ndim != 1) {
        PyErr_Format(PyExc_ValueError, "ids have %zd bytes in %d dimensions instead of 4 in one", buffers.ids.itemsize,
                     buffers.ids.ndim);
        return false;
    }
    return true;
}

PyObject* extend(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "extend takes parent and ids, got %zd arguments", count);
        return nullptr;
    }
    Buffers buffers;
    if (!buffers.take(args[0], args[1]) || !fit(buffers)) return nullptr;
    const std::size_t pages = static_cast<std::size_t>(buffers.ids.len) / (kPageTokens * sizeof(std::int32_t));
    PyObject* keys = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(pages * kKeyBytes));
    if (keys == nullptr) return nullptr;
    page_keys(static_cast<const std::uint8_t*>(buffers.parent.buf), static_cast<const std::uint8_t*>(buffers.ids.buf),
              pages, reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(keys)));
    return keys;
}

// Python keeps functions of every signature behind one type; the flags say which it is.
template <typename Function>
PyCFunction as_method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"extend", as_method(extend), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "hicache._keys", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__keys() { return PyModule_Create(&module_def); }
