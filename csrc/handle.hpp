// A C++ part over shared memory as a Python object: made from a buffer, closed once, used by one call at a time.
//
// Promises: the mapping stays alive until `close`; what the part throws becomes an error of ipc.errors. Knows nothing
// of what a part does.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <new>

#include "ring.hpp"

namespace deepinfer {

// What the module looked up at import.
struct State {
    PyObject* corrupt;
    PyObject* format;
    PyObject* too_large;
    PyObject* frombuffer;
    PyObject* dtype;
};

template <typename Part>
struct Handle {
    PyObject_HEAD
    Part* part;        // null once closed
    Py_buffer memory;  // what `part` points into
    bool busy;         // a call is using `part`, perhaps without the GIL
};

template <typename Part>
Handle<Part>* handle_of(PyObject* self) {
    return reinterpret_cast<Handle<Part>*>(self);
}

// Runs `body` and turns what it throws into a Python error.
template <typename Body>
PyObject* translated(State* state, Body body) {
    try {
        return body();
    } catch (const RingCorrupt& error) {
        PyErr_SetString(state->corrupt, error.what());
    } catch (const RingFormat& error) {
        PyErr_SetString(state->format, error.what());
    } catch (const MessageTooLarge& error) {
        PyErr_SetString(state->too_large, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
    return nullptr;
}

inline State* state_of(PyObject* self) { return static_cast<State*>(PyType_GetModuleState(Py_TYPE(self))); }

inline PyObject* refuse_busy(PyObject* self) {
    PyErr_Format(PyExc_RuntimeError, "this %s is in use by another call", Py_TYPE(self)->tp_name);
    return nullptr;
}

// Runs `body` on an open object that nobody can close or use meanwhile: not a thread that gets the GIL during a long
// copy, nor a finalizer that an allocation happens to run.
template <typename Part, typename Body>
PyObject* with_part(PyObject* self, Body body) {
    auto* handle = handle_of<Part>(self);
    if (handle->busy) return refuse_busy(self);
    if (handle->part == nullptr) {
        PyErr_Format(PyExc_ValueError, "this %s is closed", Py_TYPE(self)->tp_name);
        return nullptr;
    }
    handle->busy = true;
    PyObject* result = translated(state_of(self), [&] { return body(*handle->part); });
    handle->busy = false;
    return result;
}

inline bool parse_unsigned(PyObject* number, std::uint64_t most, const char* name, std::uint64_t& value) {
    const unsigned long long parsed = PyLong_AsUnsignedLongLong(number);
    if (parsed == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) return false;
    if (parsed > most) {
        PyErr_Format(PyExc_OverflowError, "%s %llu is above %llu", name, parsed, static_cast<unsigned long long>(most));
        return false;
    }
    value = parsed;
    return true;
}

template <typename Part>
PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"memory", nullptr};
    Py_buffer memory;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "w*", const_cast<char**>(names), &memory)) return nullptr;
    auto* state = static_cast<State*>(PyType_GetModuleState(type));
    PyObject* self = translated(state, [&]() -> PyObject* {
        Part* part = new Part(memory.buf, static_cast<std::size_t>(memory.len));
        PyObject* object = type->tp_alloc(type, 0);
        if (object == nullptr) {
            delete part;
            return nullptr;
        }
        handle_of<Part>(object)->part = part;
        handle_of<Part>(object)->memory = memory;
        return object;
    });
    if (self == nullptr) PyBuffer_Release(&memory);
    return self;
}

template <typename Part>
void give_back(Handle<Part>* handle) {
    if (handle->part == nullptr) return;
    delete handle->part;
    handle->part = nullptr;
    PyBuffer_Release(&handle->memory);
}

template <typename Part>
void destroy(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    give_back(handle_of<Part>(self));
    type->tp_free(self);
    Py_DECREF(type);
}

template <typename Part>
PyObject* close(PyObject* self, PyObject*) {
    auto* handle = handle_of<Part>(self);
    if (handle->busy) return refuse_busy(self);
    give_back(handle);
    Py_RETURN_NONE;
}

template <typename Part>
int add_type(PyObject* module, const char* name, PyMethodDef* methods) {
    PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create<Part>)},
                           {Py_tp_dealloc, reinterpret_cast<void*>(destroy<Part>)},
                           {Py_tp_methods, methods},
                           {0, nullptr}};
    PyType_Spec spec = {name, sizeof(Handle<Part>), 0, Py_TPFLAGS_DEFAULT, slots};
    PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
    if (type == nullptr) return -1;
    const int result = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type));
    Py_DECREF(type);
    return result;
}

}  // namespace deepinfer
