// `engine.native._kernels`: attention of a whole step, linear layers over few rows, normalisation of rows. Types are
// in the .pyi beside the Python code.
//
// Addresses come from one Python wrapper for each, which has checked the tensors behind them; sizes and the step's tables
// are checked here, before the first access. Promises ValueError for whatever does not fit, and runs without the GIL.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>
#include <string>
#include <system_error>

#include "attention.hpp"
#include "attention_plan.hpp"

namespace {

using namespace deepinfer;
using namespace deepinfer::attention;

// Bound of the heads and of their sizes: far above any model, and no product of two of them overflows.
constexpr std::int64_t kMaxDim = 1 << 16;
constexpr unsigned kMaxThreads = 1024;

// Kernels that this processor can run, best first.
const std::vector<const Kernel*>& kernels() {
    static const std::vector<const Kernel*> found = [] {
        std::vector<const Kernel*> list;
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            list.push_back(&kAvx512);
        if (avx2) list.push_back(&kAvx2);
#endif
        list.push_back(&kPortable);
        return list;
    }();
    return found;
}

// What does not fit, in words; empty if all does.
std::string fault_of(const Problem& p) {
    const auto within = [](std::int64_t x) { return x >= 1 && x <= kMaxDim; };
    if (!within(p.heads) || !within(p.kv_heads) || !within(p.k_dim) || !within(p.v_dim))
        return "heads and head sizes must be 1 to " + std::to_string(kMaxDim);
    if (p.heads % p.kv_heads != 0)
        return std::to_string(p.heads) + " heads are no multiple of " + std::to_string(p.kv_heads) + " kv heads";
    if (p.window < 0) return "window is " + std::to_string(p.window) + ", must not be negative";
    if (p.starts[0] != 0 || p.table_starts[0] != 0) return "spans and tables must start at 0";
    return {};
}

std::string fault_of_span(const Problem& p, std::int64_t span, std::int64_t table_size) {
    const std::string name = "span " + std::to_string(span) + ": ";
    const std::int64_t first = p.starts[span], end = p.starts[span + 1], context = p.contexts[span];
    if (first >= end || end > p.tokens) return name + "its rows are not within the " + std::to_string(p.tokens);
    if (context < end - first) return name + "its context is shorter than itself";
    const std::int64_t table = p.table_starts[span], table_end = p.table_starts[span + 1];
    if (table_end < table || table_end > table_size) return name + "its table is not within the tables";
    if ((context - 1) / kBlock >= table_end - table) return name + "its table is shorter than its context";
    for (std::int64_t place = table; place <= table + (context - 1) / kBlock; ++place)
        if (p.blocks[place] < 0 || p.blocks[place] >= p.num_blocks)
            return name + "block " + std::to_string(p.blocks[place]) + " is not one of " + std::to_string(p.num_blocks);
    return {};
}

// A one-dimensional, dense array of T, held as long as this lives.
template <typename T>
class Array {
  public:
    // False: a Python error is set.
    bool take(PyObject* object, const char* name) {
        if (PyObject_GetBuffer(object, &view_, PyBUF_ND) != 0) return false;
        held_ = true;
        if (view_.ndim == 1 && view_.itemsize == sizeof(T)) return true;
        PyErr_Format(PyExc_ValueError, "%s must be one dimension of %zu-byte integers", name, sizeof(T));
        return false;
    }
    Array() = default;
    ~Array() {
        if (held_) PyBuffer_Release(&view_);
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    const T* data() const { return static_cast<const T*>(view_.buf); }
    std::int64_t size() const { return view_.len / static_cast<std::int64_t>(sizeof(T)); }

  private:
    Py_buffer view_{};
    bool held_ = false;
};

struct Tables {
    Array<std::int64_t> starts, contexts, table_starts;
    Array<std::int32_t> blocks;
};

// False: a Python error is set.
bool take_tables(PyObject* const (&objects)[4], Tables& tables, Problem& p) {
    if (!tables.starts.take(objects[0], "starts") || !tables.contexts.take(objects[1], "contexts") ||
        !tables.table_starts.take(objects[2], "table_starts") || !tables.blocks.take(objects[3], "blocks"))
        return false;
    p.spans = tables.contexts.size();
    p.starts = tables.starts.data();
    p.contexts = tables.contexts.data();
    p.table_starts = tables.table_starts.data();
    p.blocks = tables.blocks.data();
    std::string fault;
    if (tables.starts.size() != p.spans + 1 || tables.table_starts.size() != p.spans + 1)
        fault = "starts and table_starts need one entry more than contexts";
    else
        fault = fault_of(p);
    for (std::int64_t span = 0; fault.empty() && span < p.spans; ++span)
        fault = fault_of_span(p, span, tables.blocks.size());
    if (fault.empty() && p.starts[p.spans] != p.tokens) fault = "the spans do not cover all rows";
    if (fault.empty()) return true;
    PyErr_SetString(PyExc_ValueError, fault.c_str());
    return false;
}

// 0, or the errno of threads that could not be started, or -1 for memory. Runs without the GIL.
template <typename Work>
int translated(const Work& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    } catch (const std::system_error& error) {
        return error.code().value();
    }
}

PyObject* result_of(int failed) {
    if (failed == 0) Py_RETURN_NONE;
    if (failed < 0) return PyErr_NoMemory();
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
}

// False: a Python error is set.
bool check_run(int level, int threads) {
    if (level < 0 || static_cast<std::size_t>(level) >= kernels().size())
        PyErr_Format(PyExc_ValueError, "level %d is not one of %zu", level, kernels().size());
    else if (threads < 1 || static_cast<unsigned>(threads) > kMaxThreads)
        PyErr_Format(PyExc_ValueError, "threads is %d, must be 1 to %u", threads, kMaxThreads);
    return PyErr_Occurred() == nullptr;
}

PyObject* attend(PyObject*, PyObject* args) {
    Problem p{};
    unsigned long long q, k, v, out, k_pages, v_pages, sinks;
    const char* element;
    PyObject* tables_given[4];
    int level, threads, use_openmp;
    static_assert(sizeof(long long) == sizeof(std::int64_t));
    const auto whole = [](std::int64_t& x) { return reinterpret_cast<long long*>(&x); };
    if (!PyArg_ParseTuple(args, "s(KLL)(KLL)(KLL)K(KL)(KL)(LLLLLL)(OOOO)fLfKiip:attend", &element,                 //
                          &q, whole(p.q.token_stride), whole(p.q.head_stride),                                     //
                          &k, whole(p.k.token_stride), whole(p.k.head_stride),                                     //
                          &v, whole(p.v.token_stride), whole(p.v.head_stride), &out,                               //
                          &k_pages, whole(p.k_pages.block_stride), &v_pages, whole(p.v_pages.block_stride),        //
                          whole(p.tokens), whole(p.heads), whole(p.kv_heads), whole(p.k_dim), whole(p.v_dim),      //
                          whole(p.num_blocks), &tables_given[0], &tables_given[1], &tables_given[2],               //
                          &tables_given[3], &p.scaling, whole(p.window), &p.softcap, &sinks, &level, &threads,     //
                          &use_openmp))
        return nullptr;
    const std::string name = element;
    if (name != "float32" && name != "bfloat16")
        return PyErr_Format(PyExc_ValueError, "element type %s is neither float32 nor bfloat16", element);
    if (!check_run(level, threads)) return nullptr;
    p.element = name == "float32" ? Element::kFloat32 : Element::kBfloat16;
    p.q.data = reinterpret_cast<const void*>(q);
    p.k.data = reinterpret_cast<const void*>(k);
    p.v.data = reinterpret_cast<const void*>(v);
    p.out = reinterpret_cast<void*>(out);
    p.k_pages.data = reinterpret_cast<void*>(k_pages);
    p.v_pages.data = reinterpret_cast<void*>(v_pages);
    p.sinks = reinterpret_cast<const float*>(sinks);
    Tables tables;
    if (!take_tables(tables_given, tables, p)) return nullptr;
    int failed;
    Py_BEGIN_ALLOW_THREADS;
    failed = translated([&] {
        const Kernel& kernel = *kernels()[static_cast<std::size_t>(level)];
        store_step(p, kernel, static_cast<unsigned>(threads), use_openmp != 0);
        Plan(p).run(kernel, static_cast<unsigned>(threads), use_openmp != 0);
    });
    Py_END_ALLOW_THREADS;
    return result_of(failed);
}

PyObject* linear(PyObject*, PyObject* args) {
    unsigned long long x, weight, bias, out;
    LinearProblem p{};
    int level, threads;
    const auto whole = [](std::int64_t& number) { return reinterpret_cast<long long*>(&number); };
    if (!PyArg_ParseTuple(args, "KKKK(LLL)ii:linear", &x, &weight, &bias, &out, whole(p.rows), whole(p.columns),
                          whole(p.depth), &level, &threads))
        return nullptr;
    if (p.rows < 0 || p.columns < 0 || p.depth < 0)
        return PyErr_Format(PyExc_ValueError, "rows, columns and depth must not be negative");
    if (!check_run(level, threads)) return nullptr;
    p.x = reinterpret_cast<const float*>(x);
    p.weight = reinterpret_cast<const float*>(weight);
    p.bias = reinterpret_cast<const float*>(bias);
    p.out = reinterpret_cast<float*>(out);
    int failed;
    Py_BEGIN_ALLOW_THREADS;
    failed = translated([&] {
        const Kernel& kernel = *kernels()[static_cast<std::size_t>(level)];
        run_jobs(ceil_div(p.columns, kLinearColumns), static_cast<unsigned>(threads), true,
                 [&](std::int64_t job, unsigned) {
                     const std::int64_t first = job * kLinearColumns;
                     kernel.linear(p, first, std::min(p.columns, first + kLinearColumns));
                 });
    });
    Py_END_ALLOW_THREADS;
    return result_of(failed);
}

PyObject* normalize(PyObject*, PyObject* args) {
    unsigned long long x, weight, out;
    NormProblem p{};
    int level, threads;
    const auto whole = [](std::int64_t& number) { return reinterpret_cast<long long*>(&number); };
    if (!PyArg_ParseTuple(args, "KKKLLfii:normalize", &x, &weight, &out, whole(p.rows), whole(p.size), &p.epsilon,
                          &level, &threads))
        return nullptr;
    if (p.rows < 0 || p.size < 0) return PyErr_Format(PyExc_ValueError, "rows and size must not be negative");
    if (!check_run(level, threads)) return nullptr;
    p.x = reinterpret_cast<const float*>(x);
    p.weight = reinterpret_cast<const float*>(weight);
    p.out = reinterpret_cast<float*>(out);
    int failed;
    Py_BEGIN_ALLOW_THREADS;
    failed = translated([&] {
        const Kernel& kernel = *kernels()[static_cast<std::size_t>(level)];
        run_jobs(ceil_div(p.rows, kNormRows), static_cast<unsigned>(threads), true, [&](std::int64_t job, unsigned) {
            const std::int64_t first = job * kNormRows;
            kernel.normalize(p, first, std::min(p.rows, first + kNormRows));
        });
    });
    Py_END_ALLOW_THREADS;
    return result_of(failed);
}

PyMethodDef methods[] = {{"attend", attend, METH_VARARGS, nullptr},
                         {"linear", linear, METH_VARARGS, nullptr},
                         {"normalize", normalize, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "engine.native._kernels", nullptr, 0, methods, nullptr, nullptr,
                          nullptr,               nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() {
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    PyObject* levels = PyTuple_New(static_cast<Py_ssize_t>(kernels().size()));
    for (std::size_t i = 0; levels != nullptr && i < kernels().size(); ++i)
        PyTuple_SET_ITEM(levels, static_cast<Py_ssize_t>(i), PyUnicode_FromString(kernels()[i]->name));
    if (levels == nullptr || PyModule_AddObjectRef(module, "LEVELS", levels) != 0 ||
        PyModule_AddIntConstant(module, "BLOCK_SIZE", kBlock) != 0) {
        Py_XDECREF(levels);
        Py_DECREF(module);
        return nullptr;
    }
    Py_DECREF(levels);
    return module;
}
