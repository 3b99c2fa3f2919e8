// `ipc._ring`: the classes of ring.hpp for Python. Types and docstrings are in ipc/_ring.pyi.
//
// Promises: a message or record is consumed only once its Python object exists; the GIL is released only around copies
// long enough to pay for it. The life of an object is in handle.hpp.
#include "handle.hpp"  // Python.h has to be the first header of all

#include <vector>

#include "ring.hpp"

namespace {

using namespace deepinfer;

// Below about a quarter of a megabyte (tens of microseconds) the hand-over costs more than the copy.
constexpr std::uint64_t kReleaseGilBytes = 256 * 1024;

template <typename Copy>
void run_copy(std::uint64_t bytes, Copy copy) {
    if (bytes < kReleaseGilBytes) {
        copy();
        return;
    }
    Py_BEGIN_ALLOW_THREADS;
    copy();
    Py_END_ALLOW_THREADS;
}

template <typename Part>
PyObject* waiting(PyObject* self, PyObject*) {
    return with_part<Part>(self, [](auto& part) { return PyLong_FromUnsignedLongLong(part.waiting()); });
}

template <typename Part>
PyObject* waiting_records(PyObject* self, PyObject*) {
    return with_part<Part>(
        self, [](auto& part) { return PyLong_FromUnsignedLongLong(part.waiting() / kTokenBytes); });
}

// ---- token ring ----

PyObject* token_push(PyObject* self, PyObject* records) {
    return with_part<TokenWriter>(self, [&](auto& part) -> PyObject* {
        Py_buffer view;
        if (PyObject_GetBuffer(records, &view, PyBUF_ND) != 0) return nullptr;
        PyObject* taken = nullptr;
        if (view.itemsize != kTokenBytes || view.ndim != 1) {
            PyErr_Format(PyExc_ValueError, "records have %zd bytes in %d dimensions instead of %u in one",
                         view.itemsize, view.ndim, kTokenBytes);
        } else {
            taken = translated(state_of(self), [&] {
                return PyLong_FromUnsignedLongLong(
                    part.push(view.buf, static_cast<std::uint64_t>(view.len) / kTokenBytes));
            });
        }
        PyBuffer_Release(&view);
        return taken;
    });
}

PyObject* token_pop(PyObject* self, PyObject* limit) {
    return with_part<TokenReader>(self, [&](auto& part) -> PyObject* {
        std::uint64_t most = 0;
        if (!parse_unsigned(limit, UINT64_MAX, "limit", most)) return nullptr;
        const std::uint64_t count = part.ready(most);
        PyObject* bytes = PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kTokenBytes));
        if (bytes == nullptr) return nullptr;
        State* state = state_of(self);
        PyObject* records = PyObject_CallFunctionObjArgs(state->frombuffer, bytes, state->dtype, nullptr);
        // Consumed only once the array exists: an allocation that fails must not lose records.
        if (records != nullptr) part.pop(PyByteArray_AS_STRING(bytes), count);
        Py_DECREF(bytes);
        return records;
    });
}

// ---- message ring ----

// Buffers of the parts of one message, given back on every way out.
class Parts {
  public:
    explicit Parts(PyObject* tuple) {
        const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
        views_.reserve(static_cast<std::size_t>(count));
        for (Py_ssize_t index = 0; index < count; ++index) {
            Py_buffer view;
            if (PyObject_GetBuffer(PyTuple_GET_ITEM(tuple, index), &view, PyBUF_SIMPLE) != 0) return;
            views_.push_back(view);
            length_ += static_cast<std::uint64_t>(view.len);
        }
        complete_ = true;
    }
    ~Parts() {
        for (Py_buffer& view : views_) PyBuffer_Release(&view);
    }
    Parts(const Parts&) = delete;
    Parts& operator=(const Parts&) = delete;

    bool complete() const { return complete_; }
    std::uint64_t length() const { return length_; }

    void write(MessageWriter& writer) const noexcept {
        for (const Py_buffer& view : views_) writer.append(view.buf, static_cast<std::uint64_t>(view.len));
    }

  private:
    std::vector<Py_buffer> views_;
    std::uint64_t length_ = 0;
    bool complete_ = false;
};

PyObject* message_push(PyObject* self, PyObject* args) {
    return with_part<MessageWriter>(self, [&](auto& part) -> PyObject* {
        const Parts parts(args);
        if (!parts.complete()) return nullptr;
        if (!part.begin(parts.length())) Py_RETURN_FALSE;
        run_copy(parts.length(), [&]() noexcept { parts.write(part); });
        part.commit();
        Py_RETURN_TRUE;
    });
}

// The first message as a new reference, nullptr with an error set, or nullptr without: the ring is empty.
PyObject* take_message(MessageReader& part) {
    std::uint64_t length = 0;
    if (!part.peek(length)) return nullptr;
    PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(length));
    if (bytes == nullptr) return nullptr;
    run_copy(length, [&]() noexcept { part.read(PyBytes_AS_STRING(bytes), length); });
    part.drop(length);
    return bytes;
}

PyObject* message_pop(PyObject* self, PyObject*) {
    return with_part<MessageReader>(self, [](auto& part) -> PyObject* {
        PyObject* bytes = take_message(part);
        if (bytes == nullptr && PyErr_Occurred() == nullptr) Py_RETURN_NONE;
        return bytes;
    });
}

PyObject* message_pop_all(PyObject* self, PyObject*) {
    return with_part<MessageReader>(self, [](auto& part) -> PyObject* {
        // What is published from here on waits for the next call, or a busy writer could hold us here for ever.
        std::uint64_t left = part.waiting();
        PyObject* list = PyList_New(0);
        while (list != nullptr && left != 0) {
            PyObject* bytes = nullptr;
            try {
                bytes = take_message(part);
            } catch (...) {
                Py_DECREF(list);
                throw;
            }
            if (bytes == nullptr || PyList_Append(list, bytes) != 0) Py_CLEAR(list);
            if (bytes != nullptr) left -= message_footprint(static_cast<std::uint64_t>(PyBytes_GET_SIZE(bytes)));
            Py_XDECREF(bytes);
        }
        return list;
    });
}

// ---- bell and pulse ----

PyObject* bell_prepare(PyObject* self, PyObject*) {
    return with_part<BellFlag>(self, [](auto& part) {
        part.prepare_sleep();
        Py_RETURN_NONE;
    });
}

PyObject* bell_cancel(PyObject* self, PyObject*) {
    return with_part<BellFlag>(self, [](auto& part) {
        part.cancel_sleep();
        Py_RETURN_NONE;
    });
}

PyObject* bell_should_ring(PyObject* self, PyObject*) {
    return with_part<BellFlag>(self, [](auto& part) { return PyBool_FromLong(part.should_ring()); });
}

PyObject* pulse_write(PyObject* self, PyObject* args) {
    return with_part<PulseBlock>(self, [&](auto& part) -> PyObject* {
        PyObject *time_ns, *step, *state, *pid;
        if (!PyArg_ParseTuple(args, "OOOO:write", &time_ns, &step, &state, &pid)) return nullptr;
        Pulse pulse;
        std::uint64_t small[2];
        if (!parse_unsigned(time_ns, UINT64_MAX, "time_ns", pulse.time_ns)) return nullptr;
        if (!parse_unsigned(step, UINT64_MAX, "step", pulse.step)) return nullptr;
        if (!parse_unsigned(state, UINT32_MAX, "state", small[0])) return nullptr;
        if (!parse_unsigned(pid, UINT32_MAX, "pid", small[1])) return nullptr;
        pulse.state = static_cast<std::uint32_t>(small[0]);
        pulse.pid = static_cast<std::uint32_t>(small[1]);
        part.write(pulse);
        Py_RETURN_NONE;
    });
}

PyObject* pulse_read(PyObject* self, PyObject*) {
    return with_part<PulseBlock>(self, [](auto& part) {
        const Pulse pulse = part.read();
        return Py_BuildValue("KKII", static_cast<unsigned long long>(pulse.time_ns),
                             static_cast<unsigned long long>(pulse.step), static_cast<unsigned int>(pulse.state),
                             static_cast<unsigned int>(pulse.pid));
    });
}

// ---- tables ----

constexpr PyMethodDef kEnd = {nullptr, nullptr, 0, nullptr};

PyMethodDef token_writer_methods[] = {{"push", token_push, METH_O, nullptr},
                                      {"waiting", waiting_records<TokenWriter>, METH_NOARGS, nullptr},
                                      {"close", close<TokenWriter>, METH_NOARGS, nullptr},
                                      kEnd};
PyMethodDef token_reader_methods[] = {{"pop", token_pop, METH_O, nullptr},
                                      {"waiting", waiting_records<TokenReader>, METH_NOARGS, nullptr},
                                      {"close", close<TokenReader>, METH_NOARGS, nullptr},
                                      kEnd};
PyMethodDef message_writer_methods[] = {{"push", message_push, METH_VARARGS, nullptr},
                                        {"waiting", waiting<MessageWriter>, METH_NOARGS, nullptr},
                                        {"close", close<MessageWriter>, METH_NOARGS, nullptr},
                                        kEnd};
PyMethodDef message_reader_methods[] = {{"pop", message_pop, METH_NOARGS, nullptr},
                                        {"pop_all", message_pop_all, METH_NOARGS, nullptr},
                                        {"waiting", waiting<MessageReader>, METH_NOARGS, nullptr},
                                        {"close", close<MessageReader>, METH_NOARGS, nullptr},
                                        kEnd};
PyMethodDef bell_methods[] = {{"prepare_sleep", bell_prepare, METH_NOARGS, nullptr},
                              {"cancel_sleep", bell_cancel, METH_NOARGS, nullptr},
                              {"should_ring", bell_should_ring, METH_NOARGS, nullptr},
                              {"close", close<BellFlag>, METH_NOARGS, nullptr},
                              kEnd};
PyMethodDef pulse_methods[] = {{"write", pulse_write, METH_VARARGS, nullptr},
                               {"read", pulse_read, METH_NOARGS, nullptr},
                               {"close", close<PulseBlock>, METH_NOARGS, nullptr},
                               kEnd};

PyObject* format_memory(PyObject* module, PyObject* args, std::uint32_t unit) {
    Py_buffer memory;
    PyObject* number;
    if (!PyArg_ParseTuple(args, "w*O", &memory, &number)) return nullptr;
    std::uint64_t units = 0;
    PyObject* done = nullptr;
    if (parse_unsigned(number, kMaxCapacity, "capacity", units)) {
        done = translated(static_cast<State*>(PyModule_GetState(module)), [&] {
            format_ring(memory.buf, static_cast<std::size_t>(memory.len), unit,
                        unit == kTokenBytes ? units * kTokenBytes : units);
            return Py_NewRef(Py_None);
        });
    }
    PyBuffer_Release(&memory);
    return done;
}

PyObject* format_token_ring(PyObject* module, PyObject* args) { return format_memory(module, args, kTokenBytes); }
PyObject* format_message_ring(PyObject* module, PyObject* args) { return format_memory(module, args, kMessageUnit); }

PyMethodDef functions[] = {{"format_token_ring", format_token_ring, METH_VARARGS, nullptr},
                           {"format_message_ring", format_message_ring, METH_VARARGS, nullptr},
                           kEnd};

int import_into(PyObject*& slot, const char* module, const char* name) {
    PyObject* imported = PyImport_ImportModule(module);
    if (imported == nullptr) return -1;
    slot = PyObject_GetAttrString(imported, name);
    Py_DECREF(imported);
    return slot == nullptr ? -1 : 0;
}

int add_constants(PyObject* module) {
    const struct {
        const char* name;
        std::uint64_t value;
    } constants[] = {{"LAYOUT_VERSION", kLayoutVersion}, {"TOKEN_BYTES", kTokenBytes},
                     {"HEADER_BYTES", kHeaderBytes},     {"LINE_BYTES", kLine},
                     {"BELL_BYTES", BellFlag::kBytes},   {"PULSE_BYTES", PulseBlock::kBytes},
                     {"MESSAGE_OVERHEAD", kMessageOverhead}};
    for (const auto& constant : constants) {
        if (PyModule_AddIntConstant(module, constant.name, static_cast<long>(constant.value)) != 0) return -1;
    }
    return 0;
}

int execute(PyObject* module) {
    auto* state = static_cast<State*>(PyModule_GetState(module));
    if (import_into(state->corrupt, "ipc.errors", "RingCorruptError") != 0) return -1;
    if (import_into(state->format, "ipc.errors", "RingFormatError") != 0) return -1;
    if (import_into(state->too_large, "ipc.errors", "MessageTooLargeError") != 0) return -1;
    if (import_into(state->frombuffer, "numpy", "frombuffer") != 0) return -1;
    if (import_into(state->dtype, "ipc.layout", "TOKEN_DTYPE") != 0) return -1;
    if (add_constants(module) != 0) return -1;
    if (add_type<TokenWriter>(module, "ipc._ring.TokenWriter", token_writer_methods) != 0) return -1;
    if (add_type<TokenReader>(module, "ipc._ring.TokenReader", token_reader_methods) != 0) return -1;
    if (add_type<MessageWriter>(module, "ipc._ring.MessageWriter", message_writer_methods) != 0) return -1;
    if (add_type<MessageReader>(module, "ipc._ring.MessageReader", message_reader_methods) != 0) return -1;
    if (add_type<BellFlag>(module, "ipc._ring.BellFlag", bell_methods) != 0) return -1;
    return add_type<PulseBlock>(module, "ipc._ring.PulseBlock", pulse_methods);
}

int visit_state(PyObject* module, visitproc visit, void* arg) {
    auto* state = static_cast<State*>(PyModule_GetState(module));
    Py_VISIT(state->corrupt);
    Py_VISIT(state->format);
    Py_VISIT(state->too_large);
    Py_VISIT(state->frombuffer);
    Py_VISIT(state->dtype);
    return 0;
}

int clear_state(PyObject* module) {
    auto* state = static_cast<State*>(PyModule_GetState(module));
    Py_CLEAR(state->corrupt);
    Py_CLEAR(state->format);
    Py_CLEAR(state->too_large);
    Py_CLEAR(state->frombuffer);
    Py_CLEAR(state->dtype);
    return 0;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(execute)}, {0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "ipc._ring",
                          "Native rings, bell flag and pulse block over shared memory.",
                          sizeof(State),
                          functions,
                          module_slots,
                          visit_state,
                          clear_state,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ring() { return PyModuleDef_Init(&definition); }
