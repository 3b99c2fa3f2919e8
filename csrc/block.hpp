// The two smallest things in shared memory, each 128 bytes at a multiple of 128: the flag that says that a consumer
// sleeps, and an engine's sign of life. Also what every kind of shared memory is checked for.
//
//     bell   u32 sleeping   consumer sets and clears, producer clears when it rings
//     pulse  u64 time_ns, u64 step, u32 state, u32 pid   all the engine's
//
// Promises: no wake-up is lost; no field of the pulse is older than its time. Knows nothing of eventfds or clocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace deepinfer {

// Two lines of 64 bytes, because x86 fetches them in pairs: what lies closer together shares its cache misses.
constexpr std::size_t kLine = 128;

// The memory is not what it should be: a ring of this version, kind and size, or a block of that size.
struct RingFormat : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An atomic with a hidden lock would put the lock into one process only.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

inline void check_aligned(const void* memory) {
    if (reinterpret_cast<std::uintptr_t>(memory) % kLine != 0) {
        throw RingFormat("the memory does not start at a multiple of " + std::to_string(kLine) + " bytes");
    }
}

inline std::string describe(const char* name, std::uint64_t found, std::uint64_t wanted) {
    return std::string(name) + " is " + std::to_string(found) + " instead of " + std::to_string(wanted);
}

// The flag beside an eventfd: a producer pays for a system call only when the consumer sleeps.
//
//     consumer  sets `sleeping`, fences, looks at the rings once more, sleeps on the eventfd if they are empty
//     producer  publishes, fences, and if `sleeping` is set clears it and writes the eventfd
//
// With both fences at least one side sees the other's store, so no wake-up is lost.
class BellFlag {
  public:
    static constexpr std::size_t kBytes = kLine;

    BellFlag(void* memory, std::size_t bytes) {
        check_aligned(memory);
        if (bytes != kBytes) throw RingFormat(describe("the bell's size", bytes, kBytes));
        sleeping_ = static_cast<std::atomic<std::uint32_t>*>(memory);
    }

    void prepare_sleep() noexcept {
        sleeping_->store(1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fence in should_ring
    }

    void cancel_sleep() noexcept { sleeping_->store(0, std::memory_order_relaxed); }

    bool should_ring() noexcept {
        std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fence in prepare_sleep
        if (sleeping_->load(std::memory_order_relaxed) == 0) return false;
        return sleeping_->exchange(0, std::memory_order_relaxed) != 0;
    }

  private:
    std::atomic<std::uint32_t>* sleeping_;
};

// What an engine says of itself on every pass of its loop.
struct Pulse {
    std::uint64_t time_ns;
    std::uint64_t step;
    std::uint32_t state;
    std::uint32_t pid;
};

// No sequence lock: an engine that died in mid-write would leave it odd and the reader without an answer. Instead the
// time goes last and is read first, so the other fields are never older than it says.
class PulseBlock {
  public:
    static constexpr std::size_t kBytes = kLine;

    PulseBlock(void* memory, std::size_t bytes) {
        check_aligned(memory);
        if (bytes != kBytes) throw RingFormat(describe("the pulse block's size", bytes, kBytes));
        shared_ = static_cast<Shared*>(memory);
    }

    void write(const Pulse& pulse) noexcept {
        shared_->step.store(pulse.step, std::memory_order_relaxed);
        shared_->state.store(pulse.state, std::memory_order_relaxed);
        shared_->pid.store(pulse.pid, std::memory_order_relaxed);
        shared_->time_ns.store(pulse.time_ns, std::memory_order_release);  // pairs with the acquire in read
    }

    Pulse read() const noexcept {
        Pulse pulse;
        pulse.time_ns = shared_->time_ns.load(std::memory_order_acquire);  // pairs with the release in write
        pulse.step = shared_->step.load(std::memory_order_relaxed);
        pulse.state = shared_->state.load(std::memory_order_relaxed);
        pulse.pid = shared_->pid.load(std::memory_order_relaxed);
        return pulse;
    }

  private:
    struct Shared {
        std::atomic<std::uint64_t> time_ns;
        std::atomic<std::uint64_t> step;
        std::atomic<std::uint32_t> state;
        std::atomic<std::uint32_t> pid;
    };
    static_assert(sizeof(Shared) == 24);

    Shared* shared_;
};

}  // namespace deepinfer
