// `server._events`: token ids -> the bytes of their server-sent events. Types and docstrings are in server/_events.pyi.
//
// Promises: the texts joined are what Python's incremental UTF-8 decoder makes of the pieces joined, escaped as JSON;
// an id that is whole characters by itself costs two copies, its escaped form is made once. One thread at a time may
// use a writer. Knows nothing about sockets or requests.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr std::size_t kIdBytes = 4;

struct Piece {
    std::string raw;
    std::string escaped;  // only of whole pieces
    bool whole = false;   // valid UTF-8 without its neighbours
};

void append_escaped(std::string& out, std::string_view text) {
    static const char* const hex = "0123456789abcdef";
    for (const char c : text) {
        switch (c) {
            case '"': out += "\\\""; break;
            case '\\': out += "\\\\"; break;
            case '\b': out += "\\b"; break;
            case '\f': out += "\\f"; break;
            case '\n': out += "\\n"; break;
            case '\r': out += "\\r"; break;
            case '\t': out += "\\t"; break;
            default:
                if (static_cast<unsigned char>(c) < 0x20) {
                    out += "\\u00";
                    out += hex[(c >> 4) & 0xF];
                    out += hex[c & 0xF];
                } else {
                    out += c;
                }
        }
    }
}

// ---- PieceTable ----

struct TableObject {
    PyObject_HEAD
    std::vector<Piece>* pieces;
};

PyTypeObject* table_type = nullptr;

bool add_piece(std::vector<Piece>& pieces, PyObject* item) {
    Piece piece;
    if (item == Py_None) {
        piece.whole = true;
    } else {
        char* data = nullptr;
        Py_ssize_t size = 0;
        if (PyBytes_AsStringAndSize(item, &data, &size) < 0) return false;
        piece.raw.assign(data, static_cast<std::size_t>(size));
        PyObject* text = PyUnicode_DecodeUTF8(data, size, "strict");
        piece.whole = text != nullptr;
        if (text == nullptr) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) return false;
            PyErr_Clear();
        } else {
            Py_DECREF(text);
            append_escaped(piece.escaped, piece.raw);
        }
    }
    pieces.push_back(std::move(piece));
    return true;
}

int table_init(PyObject* self, PyObject* args, PyObject*) {
    PyObject* given = nullptr;
    if (!PyArg_ParseTuple(args, "O", &given)) return -1;
    PyObject* items = PySequence_Fast(given, "pieces must be a sequence of bytes and None");
    if (items == nullptr) return -1;
    auto* table = reinterpret_cast<TableObject*>(self);
    int status = 0;
    try {
        delete table->pieces;
        table->pieces = nullptr;
        table->pieces = new std::vector<Piece>();
        for (Py_ssize_t i = 0; status == 0 && i < PySequence_Fast_GET_SIZE(items); ++i) {
            if (!add_piece(*table->pieces, PySequence_Fast_GET_ITEM(items, i))) status = -1;
        }
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        status = -1;
    }
    Py_DECREF(items);
    return status;
}

void table_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    delete reinterpret_cast<TableObject*>(self)->pieces;
    type->tp_free(self);
    Py_DECREF(type);
}

PyType_Slot table_slots[] = {
    {Py_tp_init, reinterpret_cast<void*>(table_init)},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(table_dealloc)},
    {0, nullptr},
};

PyType_Spec table_spec = {"server._events.PieceTable", sizeof(TableObject), 0, Py_TPFLAGS_DEFAULT, table_slots};

// ---- EventWriter ----

struct Writer {
    PyObject* table = nullptr;  // owned
    std::string head;           // an event up to its text, the opening quote included
    std::string tail;           // the closing quote and the rest
    std::string pending;        // bytes of a character whose end has not come
    std::string out;            // reused between calls
    bool skip_empty = false;
};

struct WriterObject {
    PyObject_HEAD
    Writer* writer;
};

const std::vector<Piece>& pieces_of(const Writer& writer) {
    return *reinterpret_cast<TableObject*>(writer.table)->pieces;
}

// The characters that are certain now, as a new str; the rest stays pending.
PyObject* decode_pending(Writer& writer, std::string_view more) {
    writer.pending.append(more);
    Py_ssize_t used = 0;
    PyObject* text = PyUnicode_DecodeUTF8Stateful(writer.pending.data(), static_cast<Py_ssize_t>(writer.pending.size()),
                                                  "replace", &used);
    if (text != nullptr) writer.pending.erase(0, static_cast<std::size_t>(used));
    return text;
}

bool append_decoded(Writer& writer, const Piece& piece, std::string& out) {
    PyObject* text = decode_pending(writer, piece.raw);
    if (text == nullptr) return false;
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data != nullptr) append_escaped(out, std::string_view(data, static_cast<std::size_t>(size)));
    Py_DECREF(text);
    return data != nullptr;
}

bool append_event(Writer& writer, std::int32_t id) {
    static const Piece unknown{"", "", true};
    const auto& pieces = pieces_of(writer);
    const bool known = id >= 0 && static_cast<std::size_t>(id) < pieces.size();
    const Piece& piece = known ? pieces[static_cast<std::size_t>(id)] : unknown;
    const std::size_t before = writer.out.size();
    writer.out += writer.head;
    const std::size_t start = writer.out.size();
    // A piece without bytes must not end an open character: the decoder would not see an end there either.
    if (piece.raw.empty() || (piece.whole && writer.pending.empty())) {
        writer.out += piece.escaped;
    } else if (!append_decoded(writer, piece, writer.out)) {
        return false;
    }
    if (writer.skip_empty && writer.out.size() == start) {
        writer.out.resize(before);
    } else {
        writer.out += writer.tail;
    }
    return true;
}

PyObject* writer_push(PyObject* self, PyObject* given) {
    Py_buffer ids;
    if (PyObject_GetBuffer(given, &ids, PyBUF_SIMPLE) < 0) return nullptr;
    if (ids.itemsize != static_cast<Py_ssize_t>(kIdBytes)) {
        PyBuffer_Release(&ids);
        PyErr_SetString(PyExc_ValueError, "ids must be 4 bytes each");
        return nullptr;
    }
    Writer& writer = *reinterpret_cast<WriterObject*>(self)->writer;
    PyObject* result = nullptr;
    try {
        writer.out.clear();
        bool good = true;
        for (Py_ssize_t at = 0; good && at + static_cast<Py_ssize_t>(kIdBytes) <= ids.len; at += kIdBytes) {
            std::int32_t id = 0;
            std::memcpy(&id, static_cast<const char*>(ids.buf) + at, kIdBytes);
            good = append_event(writer, id);
        }
        if (good) result = PyBytes_FromStringAndSize(writer.out.data(), static_cast<Py_ssize_t>(writer.out.size()));
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
    PyBuffer_Release(&ids);
    return result;
}

PyObject* writer_text(PyObject* self, PyObject* given) {
    const long id = PyLong_AsLong(given);
    if (id == -1 && PyErr_Occurred()) return nullptr;
    Writer& writer = *reinterpret_cast<WriterObject*>(self)->writer;
    const auto& pieces = pieces_of(writer);
    const bool known = id >= 0 && static_cast<std::size_t>(id) < pieces.size();
    return decode_pending(writer, known ? std::string_view(pieces[static_cast<std::size_t>(id)].raw) : "");
}

PyObject* writer_flush(PyObject* self, PyObject*) {
    Writer& writer = *reinterpret_cast<WriterObject*>(self)->writer;
    PyObject* text =
        PyUnicode_DecodeUTF8(writer.pending.data(), static_cast<Py_ssize_t>(writer.pending.size()), "replace");
    if (text != nullptr) writer.pending.clear();
    return text;
}

int writer_init(PyObject* self, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"table", "head", "tail", "skip_empty", nullptr};
    PyObject* table = nullptr;
    const char *head = nullptr, *tail = nullptr;
    Py_ssize_t head_size = 0, tail_size = 0;
    int skip_empty = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!y#y#|$p", const_cast<char**>(names), table_type, &table, &head,
                                     &head_size, &tail, &tail_size, &skip_empty)) {
        return -1;
    }
    if (reinterpret_cast<TableObject*>(table)->pieces == nullptr) {
        PyErr_SetString(PyExc_ValueError, "the piece table was not initialised");
        return -1;
    }
    Writer& writer = *reinterpret_cast<WriterObject*>(self)->writer;
    try {
        writer.head.assign(head, static_cast<std::size_t>(head_size)).append("\"");
        writer.tail.assign("\"").append(tail, static_cast<std::size_t>(tail_size));
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return -1;
    }
    writer.skip_empty = skip_empty != 0;
    Py_INCREF(table);
    Py_XSETREF(writer.table, table);
    return 0;
}

PyObject* writer_new(PyTypeObject* type, PyObject*, PyObject*) {
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) return nullptr;
    auto* writer = new (std::nothrow) Writer();
    if (writer == nullptr) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    reinterpret_cast<WriterObject*>(self)->writer = writer;
    return self;
}

void writer_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Writer* writer = reinterpret_cast<WriterObject*>(self)->writer;
    if (writer != nullptr) Py_XDECREF(writer->table);
    delete writer;
    type->tp_free(self);
    Py_DECREF(type);
}

PyMethodDef writer_methods[] = {
    {"push", writer_push, METH_O, nullptr},
    {"text", writer_text, METH_O, nullptr},
    {"flush", writer_flush, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot writer_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(writer_new)},
    {Py_tp_init, reinterpret_cast<void*>(writer_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(writer_dealloc)},
    {Py_tp_methods, writer_methods},
    {0, nullptr},
};

PyType_Spec writer_spec = {"server._events.EventWriter", sizeof(WriterObject), 0, Py_TPFLAGS_DEFAULT, writer_slots};

PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "server._events", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

bool add_type(PyObject* module, PyType_Spec& spec, PyTypeObject** kept) {
    PyObject* type = PyType_FromSpec(&spec);
    if (type == nullptr) return false;
    if (kept != nullptr) *kept = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
    const bool added = PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) == 0;
    Py_DECREF(type);
    return added;
}

}  // namespace

PyMODINIT_FUNC PyInit__events() {
    PyObject* module = PyModule_Create(&module_def);
    if (module == nullptr) return nullptr;
    if (!add_type(module, table_spec, &table_type) || !add_type(module, writer_spec, nullptr)) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
