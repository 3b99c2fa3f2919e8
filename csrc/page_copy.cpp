// `hicache._copy`: rows of host memory copied, summed and prefaulted on several threads. Types are in hicache/_copy.pyi.
//
// Promises: every row is checked before the first byte is written, ValueError names the one that does not fit; memory is
// touched without the GIL; all threads have ended when a call returns. Knows nothing about pages or pools.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "page_copy.hpp"
#include "page_stream.hpp"
#include "page_sum.hpp"
#include "team.hpp"

namespace {

using namespace deepinfer;
using namespace deepinfer::pages;

constexpr unsigned kMaxThreads = 1024;
// Small enough to spread one large row over all threads, large enough that taking the next tile costs nothing.
constexpr std::int64_t kTileBytes = 256 << 10;
// Starting and joining a thread takes some 20 microseconds; this much memory takes ten times as long to copy.
constexpr std::int64_t kBytesPerThread = 2 << 20;
// From here on a copy goes around the caches: it would not be in them any more when somebody reads it, and a plain store
// reads every line before it writes it.
constexpr std::int64_t kStreamedBytes = 4 << 20;
// One system call each.
constexpr std::int64_t kPrefaultBytes = 64 << 20;

// ---- arguments ----

// A buffer of Python's, held as long as this lives.
class View {
  public:
    View() = default;
    ~View() {
        if (held_) PyBuffer_Release(&view_);
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    // False: a Python error is set.
    bool take(PyObject* object, int flags) {
        held_ = PyObject_GetBuffer(object, &view_, PyBUF_ND | PyBUF_FORMAT | flags) == 0;
        return held_;
    }
    const Py_buffer& operator*() const { return view_; }
    char* bytes() const { return static_cast<char*>(view_.buf); }

  private:
    Py_buffer view_{};
    bool held_ = false;
};

struct Matrix {
    View view;
    std::int64_t rows = 0, row_bytes = 0;

    bool take(PyObject* object, const char* name, bool writable) {
        if (!view.take(object, writable ? PyBUF_WRITABLE : 0)) return false;
        if ((*view).ndim != 2 || (*view).itemsize != 1) {
            PyErr_Format(PyExc_ValueError, "%s must be two dimensions of bytes", name);
            return false;
        }
        rows = (*view).shape[0];
        row_bytes = (*view).shape[1];
        return true;
    }
    char* row(std::int64_t index) const { return view.bytes() + index * row_bytes; }
};

// Copied while it is checked: the list belongs to Python code that runs on while the GIL is released.
struct RowList {
    std::vector<std::int64_t> rows;

    bool take(PyObject* object, std::int64_t count, const char* name) {
        View view;
        if (!view.take(object, 0)) return false;
        const char* format = (*view).format;
        const bool is_signed = std::strchr("il", format[std::strlen(format) - 1]) != nullptr;
        if ((*view).ndim != 1 || (*view).itemsize != 4 || std::strchr("ilIL", format[std::strlen(format) - 1]) == nullptr) {
            PyErr_Format(PyExc_ValueError, "%s rows must be one dimension of 4-byte integers", name);
            return false;
        }
        rows.resize(static_cast<std::size_t>((*view).shape[0]));
        for (std::size_t i = 0; i < rows.size(); ++i) {
            std::uint32_t raw;
            std::memcpy(&raw, view.bytes() + i * sizeof raw, sizeof raw);
            rows[i] = is_signed ? static_cast<std::int32_t>(raw) : static_cast<std::int64_t>(raw);
            if (rows[i] >= 0 && rows[i] < count) continue;
            PyErr_Format(PyExc_ValueError, "%s row %lld is not one of %lld", name, static_cast<long long>(rows[i]),
                         static_cast<long long>(count));
            return false;
        }
        return true;
    }
    std::int64_t size() const { return static_cast<std::int64_t>(rows.size()); }
};

bool check_threads(int threads) {
    if (threads >= 1 && static_cast<unsigned>(threads) <= kMaxThreads) return true;
    PyErr_Format(PyExc_ValueError, "threads is %d, must be 1 to %u", threads, kMaxThreads);
    return false;
}

// Two threads writing one row would mix their bytes.
bool check_distinct(const RowList& list) {
    std::vector<std::int64_t> sorted = list.rows;
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice == sorted.end()) return true;
    PyErr_Format(PyExc_ValueError, "dst row %lld is named twice", static_cast<long long>(*twice));
    return false;
}

bool check_copy(const Matrix& dst, const RowList& dst_rows, const Matrix& src, const RowList& src_rows) {
    if (dst.row_bytes != src.row_bytes) {
        PyErr_Format(PyExc_ValueError, "rows of %lld bytes cannot be copied to rows of %lld bytes",
                     static_cast<long long>(src.row_bytes), static_cast<long long>(dst.row_bytes));
        return false;
    }
    if (dst_rows.size() != src_rows.size()) {
        PyErr_Format(PyExc_ValueError, "%lld source rows for %lld destination rows",
                     static_cast<long long>(src_rows.size()), static_cast<long long>(dst_rows.size()));
        return false;
    }
    if (!check_distinct(dst_rows)) return false;
    if (dst.row(0) < src.row(src.rows) && src.row(0) < dst.row(dst.rows)) {
        PyErr_SetString(PyExc_ValueError, "dst and src overlap");
        return false;
    }
    return true;
}

unsigned threads_for(std::int64_t bytes, int most) {
    return static_cast<unsigned>(std::clamp<std::int64_t>(bytes / kBytesPerThread, 1, most));
}

// ---- work ----

void plain_bytes(char* dst, const char* src, std::size_t size) { std::memcpy(dst, src, size); }

void copy_rows(const Matrix& dst, const RowList& to, const Matrix& src, const RowList& from, int threads) {
    const std::int64_t bytes = to.size() * dst.row_bytes;
    const std::int64_t tiles = to.size() * tiles_in_row(dst.row_bytes, kTileBytes);
    const auto copy_bytes = bytes < kStreamedBytes ? plain_bytes : stream_bytes;
    run_jobs(tiles, threads_for(bytes, threads), false, [&](std::int64_t job, unsigned) {
        const Tile tile = tile_at(job, dst.row_bytes, kTileBytes);
        const auto index = static_cast<std::size_t>(tile.index);
        copy_bytes(dst.row(to.rows[index]) + tile.offset, src.row(from.rows[index]) + tile.offset,
                   static_cast<std::size_t>(tile.size));
    });
}

// 0 or an errno.
int prefault_range(char* begin, char* end) {
#ifdef MADV_POPULATE_WRITE
    // Reports what a plain store would answer with a signal, and leaves the bytes alone.
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(begin) & ~(page - 1);
    if (madvise(reinterpret_cast<void*>(first), reinterpret_cast<std::uintptr_t>(end) - first, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL) return errno;
#endif
    // Writes the byte that is there, whoever else writes it now. One store a 4 kB page; larger ones only get more.
    for (char* at = begin; at < end; at += 4096) __atomic_fetch_or(at, 0, __ATOMIC_RELAXED);
    if (begin < end) __atomic_fetch_or(end - 1, 0, __ATOMIC_RELAXED);
    return 0;
}

int prefault_all(char* begin, std::int64_t size, int threads) {
    std::atomic<int> failed{0};
    const std::int64_t pieces = tiles_in_row(size, kPrefaultBytes);
    run_jobs(pieces, static_cast<unsigned>(threads), false, [&](std::int64_t piece, unsigned) {
        char* at = begin + piece * kPrefaultBytes;
        const int error = prefault_range(at, std::min(at + kPrefaultBytes, begin + size));
        if (error != 0) failed.store(error, std::memory_order_relaxed);
    });
    return failed.load(std::memory_order_relaxed);
}

// ---- module ----

PyObject* copy(PyObject*, PyObject* args) {
    PyObject *given_dst, *given_to, *given_src, *given_from;
    int threads;
    if (!PyArg_ParseTuple(args, "OOOOi:copy", &given_dst, &given_to, &given_src, &given_from, &threads)) return nullptr;
    try {
        Matrix dst, src;
        RowList to, from;
        if (!dst.take(given_dst, "dst", true) || !src.take(given_src, "src", false) ||
            !to.take(given_to, dst.rows, "dst") || !from.take(given_from, src.rows, "src") || !check_threads(threads) ||
            !check_copy(dst, to, src, from))
            return nullptr;
        Py_BEGIN_ALLOW_THREADS;
        copy_rows(dst, to, src, from, threads);
        Py_END_ALLOW_THREADS;
        Py_RETURN_NONE;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

PyObject* sums(PyObject*, PyObject* args) {
    PyObject *given, *given_rows, *given_out;
    int threads, level = 0;
    if (!PyArg_ParseTuple(args, "OOOi|i:sums", &given, &given_rows, &given_out, &threads, &level)) return nullptr;
    if (level < 0 || static_cast<std::size_t>(level) >= levels().size())
        return PyErr_Format(PyExc_ValueError, "level %d is not one of %zu", level, levels().size());
    const AddStripes add = levels()[static_cast<std::size_t>(level)].add;
    try {
        Matrix data;
        RowList rows;
        View out;
        if (!data.take(given, "buffer", false) || !rows.take(given_rows, data.rows, "buffer") ||
            !out.take(given_out, PyBUF_WRITABLE))
            return nullptr;
        if ((*out).ndim != 1 || (*out).itemsize != 8)
            return PyErr_Format(PyExc_ValueError, "out must be one dimension of 8-byte integers");
        if (!check_threads(threads)) return nullptr;
        if ((*out).shape[0] != rows.size())
            return PyErr_Format(PyExc_ValueError, "%lld rows for %zd sums", static_cast<long long>(rows.size()),
                                (*out).shape[0]);
        Py_BEGIN_ALLOW_THREADS;
        run_jobs(rows.size(), threads_for(rows.size() * data.row_bytes, threads), false, [&](std::int64_t i, unsigned) {
            const std::uint64_t sum = sum_of(data.row(rows.rows[static_cast<std::size_t>(i)]), data.row_bytes, add);
            std::memcpy(out.bytes() + i * 8, &sum, 8);
        });
        Py_END_ALLOW_THREADS;
        Py_RETURN_NONE;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

PyObject* prefault(PyObject*, PyObject* args) {
    PyObject* given;
    int threads;
    if (!PyArg_ParseTuple(args, "Oi:prefault", &given, &threads)) return nullptr;
    Matrix data;
    if (!data.take(given, "buffer", true) || !check_threads(threads)) return nullptr;
    int failed;
    Py_BEGIN_ALLOW_THREADS;
    failed = prefault_all(data.row(0), data.rows * data.row_bytes, threads);
    Py_END_ALLOW_THREADS;
    if (failed == 0) Py_RETURN_NONE;
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyMethodDef methods[] = {{"copy", copy, METH_VARARGS, nullptr},
                         {"sums", sums, METH_VARARGS, nullptr},
                         {"prefault", prefault, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "hicache._copy", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__copy() {
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    PyObject* names = PyTuple_New(static_cast<Py_ssize_t>(levels().size()));
    for (std::size_t i = 0; names != nullptr && i < levels().size(); ++i)
        PyTuple_SET_ITEM(names, static_cast<Py_ssize_t>(i), PyUnicode_FromString(levels()[i].name));
    if (names == nullptr || PyModule_AddObjectRef(module, "LEVELS", names) != 0 ||
        PyModule_AddIntConstant(module, "MAX_THREADS", kMaxThreads) != 0) {
        Py_XDECREF(names);
        Py_DECREF(module);
        return nullptr;
    }
    Py_DECREF(names);
    return module;
}
