// `hicache._walks`: page_walks.hpp for Python. Types and docstrings are in hicache/_walks.pyi.
//
// Promises: buffers of another element size are refused, and all are given back on every way out.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <new>
#include <type_traits>

#include "page_walks.hpp"

namespace {

using namespace deepinfer;

constexpr std::size_t kMaxBuffers = 5;

// A Python error is set already.
struct PythonError {};

// The buffers of one call. Their columns are valid as long as it lives.
class Buffers {
  public:
    Buffers() = default;
    Buffers(const Buffers&) = delete;
    Buffers& operator=(const Buffers&) = delete;
    ~Buffers() {
        for (std::size_t index = 0; index < count_; ++index) PyBuffer_Release(&views_[index]);
    }

    // A contiguous column of T. Where T is more than a number, the buffer's elements are parts of it.
    template <typename T>
    Column<T> column(PyObject* given, std::size_t item_bytes = sizeof(T)) {
        const int flags = std::is_const_v<T> ? PyBUF_ND : PyBUF_ND | PyBUF_WRITABLE;
        Py_buffer& view = views_[count_];
        if (PyObject_GetBuffer(given, &view, flags) != 0) throw PythonError();
        ++count_;
        if (item_bytes != 1 && view.itemsize != static_cast<Py_ssize_t>(item_bytes)) {
            PyErr_Format(PyExc_ValueError, "a column has %zd bytes an element instead of %zu", view.itemsize,
                         item_bytes);
            throw PythonError();
        }
        return {static_cast<T*>(view.buf), static_cast<std::size_t>(view.len) / sizeof(T)};
    }

  private:
    std::array<Py_buffer, kMaxBuffers> views_{};
    std::size_t count_ = 0;
};

template <typename Call>
PyObject* guarded(Py_ssize_t count, Py_ssize_t wanted, Call call) {
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", wanted, count);
        return nullptr;
    }
    try {
        Buffers buffers;
        return call(buffers);
    } catch (const PythonError&) {
        return nullptr;
    } catch (const BrokenLink& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
    return nullptr;
}

std::int32_t number(PyObject* given) {
    const long value = PyLong_AsLong(given);
    if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError();
    if (value < kNone || value > INT32_MAX) throw BrokenLink("slot " + std::to_string(value) + " is no slot");
    return static_cast<std::int32_t>(value);
}

PyObject* as_bytes(const std::vector<std::int32_t>& slots) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(slots.data()),
                                     static_cast<Py_ssize_t>(slots.size() * sizeof(std::int32_t)));
}

Chains table_of(Buffers& buffers, PyObject* const* args) {
    Chains table{buffers.column<std::int32_t>(args[0]), buffers.column<std::int32_t>(args[1]),
                  buffers.column<const KeyWords>(args[2], sizeof(std::uint64_t))};
    if (table.heads.size == 0 || (table.heads.size & (table.heads.size - 1)) != 0) {
        throw BrokenLink(std::to_string(table.heads.size) + " buckets are no power of two");
    }
    return table;
}

PyObject* find(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return guarded(count, 4, [&](Buffers& buffers) {
        const Chains table = table_of(buffers, args);
        const auto keys = buffers.column<const KeyWords>(args[3], sizeof(std::uint64_t));
        std::vector<std::int32_t> found(keys.size);
        std::transform(keys.data, keys.data + keys.size, found.begin(),
                       [&](const KeyWords& key) { return table.find(key); });
        return as_bytes(found);
    });
}

template <void (Chains::*Change)(std::int32_t) const>
PyObject* change(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return guarded(count, 4, [&](Buffers& buffers) {
        const Chains table = table_of(buffers, args);
        const auto slots = buffers.column<const std::int32_t>(args[3]);
        for (std::size_t index = 0; index < slots.size; ++index) (table.*Change)(slots.data[index]);
        return Py_NewRef(Py_None);
    });
}

PyObject* agreeing(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return guarded(count, 4, [&](Buffers& buffers) {
        const auto tokens = buffers.column<const std::uint8_t>(args[0]);
        const auto slots = buffers.column<const std::int32_t>(args[1]);
        const auto ids = buffers.column<const std::uint8_t>(args[2]);
        const std::int32_t row_bytes = number(args[3]);
        if (row_bytes < 1) throw BrokenLink("rows of " + std::to_string(row_bytes) + " bytes");
        return PyLong_FromSize_t(deepinfer::agreeing(tokens, slots, ids, static_cast<std::size_t>(row_bytes)));
    });
}

PyObject* path(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return guarded(count, 2, [&](Buffers& buffers) {
        return as_bytes(deepinfer::path(buffers.column<const std::int32_t>(args[0]), number(args[1])));
    });
}

PyObject* climb(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return guarded(count, 4, [&](Buffers& buffers) {
        if (!PyTuple_Check(args[0]) || PyTuple_GET_SIZE(args[0]) != static_cast<Py_ssize_t>(kMaxBuffers)) {
            throw BrokenLink("columns are no tuple of " + std::to_string(kMaxBuffers));
        }
        Pages pages{};
        pages.parent = buffers.column<const std::int32_t>(PyTuple_GET_ITEM(args[0], 0));
        pages.children = buffers.column<const std::int32_t>(PyTuple_GET_ITEM(args[0], 1));
        pages.pins = buffers.column<const std::int32_t>(PyTuple_GET_ITEM(args[0], 2));
        pages.status = buffers.column<const std::uint8_t>(PyTuple_GET_ITEM(args[0], 3));
        pages.line = buffers.column<const std::int32_t>(PyTuple_GET_ITEM(args[0], 4));
        pages.ready = static_cast<std::uint8_t>(number(args[1]));
        return as_bytes(deepinfer::climb(pages, number(args[2]), static_cast<std::size_t>(number(args[3]))));
    });
}

// Python keeps functions of every signature behind one type; the flags say which it is.
template <typename Function>
PyCFunction as_method(Function function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"find", as_method(find), METH_FASTCALL, nullptr},
    {"link", as_method(change<&Chains::link>), METH_FASTCALL, nullptr},
    {"unlink", as_method(change<&Chains::unlink>), METH_FASTCALL, nullptr},
    {"agreeing", as_method(agreeing), METH_FASTCALL, nullptr},
    {"path", as_method(path), METH_FASTCALL, nullptr},
    {"climb", as_method(climb), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "hicache._walks", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__walks() { return PyModule_Create(&module_def); }
