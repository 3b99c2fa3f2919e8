// Running a function on several threads at once, in the thread pool that torch uses where there is one.
//
// A pool of our own would fight torch's for the cores: its threads spin for a while after each operation. So OpenMP's
// entry point is looked up among what the process has loaded already (torch brings its own copy of that library, under
// a name that differs between builds, so it cannot be linked against); without one, threads are started for each call.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace deepinfer {

using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

inline OpenMpParallel openmp_parallel() {
    // GCC's library and LLVM's both export it; its signature is part of GCC's binary interface.
    static const auto found = reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}

// Calls body(job, worker) once for each job below `jobs`, in rising order of start; worker < threads, and no two calls
// run with the same worker at once. `body` must not throw.
template <typename Body>
void run_jobs(std::int64_t jobs, unsigned threads, bool use_openmp, const Body& body) {
    if (jobs <= 1 || threads <= 1) {
        for (std::int64_t job = 0; job < jobs; ++job) body(job, 0u);
        return;
    }
    struct Shared {
        const Body& body;
        std::int64_t jobs;
        std::atomic<std::int64_t> next_job{0};
        std::atomic<unsigned> next_worker{0};
    } shared{body, jobs};
    const auto work = [](void* data) {
        auto& all = *static_cast<Shared*>(data);
        const unsigned worker = all.next_worker.fetch_add(1, std::memory_order_relaxed);
        for (std::int64_t job; (job = all.next_job.fetch_add(1, std::memory_order_relaxed)) < all.jobs;)
            all.body(job, worker);
    };
    if (use_openmp && openmp_parallel() != nullptr) {
        // Always the whole team: OpenMP ends and restarts threads when the size of a team changes.
        openmp_parallel()(work, &shared, threads, 0);
        return;
    }
    std::vector<std::thread> others;
    try {
        for (unsigned thread = 1; thread < threads; ++thread) others.emplace_back(work, &shared);
    } catch (const std::exception&) {
        // The system gives no more threads, or no memory for them: those that run do all of it.
    }
    work(&shared);
    for (std::thread& other : others) other.join();
}

}  // namespace deepinfer
