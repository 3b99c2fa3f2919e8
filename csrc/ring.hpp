// One-writer one-reader rings of two processes that share memory.
//
// Promises: a reader sees whole records or none, whatever moment the writer dies at; nothing the other process
// leaves in the shared bytes makes this side read or write outside of them. Knows nothing of Python or of what
// the records mean; `ipc/ring_py.py` is the same in Python.
//
// A ring in memory, at a multiple of 128 bytes (W: writer, R: reader, F: whoever formats, before the others attach):
//
//     byte   0  u32 magic       F   "DIRG"
//            4  u32 version     F   kLayoutVersion
//            8  u32 unit        F   32: token records, 8: messages; cursors move in multiples of it
//           12  u32 zero        F
//           16  u64 capacity    F   bytes of data, a power of two
//          128  u64 tail        W   bytes ever published; the next record goes to data[tail % capacity]
//          256  u64 head        R   bytes ever consumed
//          384  data[capacity]  W   [head, tail) is published, the rest is the writer's to scribble on
//
// Legal states: head <= tail <= head + capacity, both multiples of `unit`, neither ever steps back. Cursors count up
// for ever (2^64 bytes outlast the machine), so full and empty need no extra bit. The two cursors lie 128 bytes
// apart because x86 fetches cache lines in pairs: closer, each side's stores would evict the other's cursor.
//
// A message is `u32 length, u32 length ^ kGuard, bytes, padding to 8`. It may wrap anywhere behind its first 8 bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "block.hpp"

namespace deepinfer {

constexpr std::uint32_t kMagic = 0x47524944;  // "DIRG" in memory
constexpr std::uint32_t kLayoutVersion = 1;
constexpr std::uint32_t kTokenBytes = 32;
constexpr std::uint32_t kMessageUnit = 8;
constexpr std::uint64_t kMessageOverhead = 8;
// Tells a message's first bytes from text, ids or zeros that something wrote over them.
constexpr std::uint32_t kGuard = 0x5AFE1E57;
// Lengths are u32; half of that range leaves no sum of two of them that could overflow.
constexpr std::uint64_t kMaxCapacity = std::uint64_t{1} << 31;

// The other side left bytes that no legal history of the ring explains.
struct RingCorrupt : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The message would not fit into the empty ring.
struct MessageTooLarge : std::length_error {
    using std::length_error::length_error;
};

struct RingHeader {
    alignas(kLine) std::uint32_t magic;
    std::uint32_t version;
    std::uint32_t unit;
    std::uint32_t zero;
    std::uint64_t capacity;
    alignas(kLine) std::atomic<std::uint64_t> tail;
    alignas(kLine) std::atomic<std::uint64_t> head;
};

constexpr std::size_t kHeaderBytes = 384;
static_assert(sizeof(RingHeader) == kHeaderBytes && offsetof(RingHeader, capacity) == 16);
static_assert(offsetof(RingHeader, tail) == 128 && offsetof(RingHeader, head) == 256);
inline bool legal_capacity(std::uint64_t capacity, std::uint32_t unit) {
    return capacity >= unit && capacity <= kMaxCapacity && (capacity & (capacity - 1)) == 0;
}

// Makes `memory` an empty ring. Before any writer or reader attaches.
inline void format_ring(void* memory, std::size_t bytes, std::uint32_t unit, std::uint64_t capacity) {
    check_aligned(memory);
    if (!legal_capacity(capacity, unit)) {
        throw RingFormat("capacity " + std::to_string(capacity) + " is no power of two between " +
                         std::to_string(unit) + " and " + std::to_string(kMaxCapacity));
    }
    if (bytes != kHeaderBytes + capacity) {
        throw RingFormat(describe("the memory's size", bytes, kHeaderBytes + capacity));
    }
    auto* header = static_cast<RingHeader*>(memory);
    header->magic = kMagic;
    header->version = kLayoutVersion;
    header->unit = unit;
    header->zero = 0;
    header->capacity = capacity;
    header->tail.store(0, std::memory_order_relaxed);
    header->head.store(0, std::memory_order_relaxed);
}

// What both ends have: the checked header and copies to and from the circle of data.
class RingEnd {
  public:
    std::uint64_t capacity() const { return capacity_; }

  protected:
    RingEnd(void* memory, std::size_t bytes, std::uint32_t unit) {
        check_aligned(memory);
        if (bytes < kHeaderBytes) throw RingFormat(describe("the memory's size", bytes, kHeaderBytes));
        header_ = static_cast<RingHeader*>(memory);
        data_ = static_cast<unsigned char*>(memory) + kHeaderBytes;
        if (header_->magic != kMagic) throw RingFormat(describe("magic", header_->magic, kMagic));
        if (header_->version != kLayoutVersion) {
            throw RingFormat(describe("version", header_->version, kLayoutVersion));
        }
        if (header_->unit != unit) throw RingFormat(describe("unit", header_->unit, unit));
        // Copied once: a header that changes later must not move our bounds.
        capacity_ = header_->capacity;
        unit_ = unit;
        if (!legal_capacity(capacity_, unit) || bytes != kHeaderBytes + capacity_) {
            throw RingFormat(describe("capacity", capacity_, bytes - kHeaderBytes));
        }
    }

    void copy_in(std::uint64_t cursor, const void* source, std::uint64_t bytes) noexcept {
        const std::uint64_t at = cursor & (capacity_ - 1);
        const std::uint64_t first = bytes < capacity_ - at ? bytes : capacity_ - at;
        std::memcpy(data_ + at, source, first);
        std::memcpy(data_, static_cast<const unsigned char*>(source) + first, bytes - first);
    }

    void copy_out(std::uint64_t cursor, void* target, std::uint64_t bytes) const noexcept {
        const std::uint64_t at = cursor & (capacity_ - 1);
        const std::uint64_t first = bytes < capacity_ - at ? bytes : capacity_ - at;
        std::memcpy(target, data_ + at, first);
        std::memcpy(static_cast<unsigned char*>(target) + first, data_, bytes - first);
    }

    // Returns `found` if it lies in [oldest, newest] of a history that only moves forward.
    std::uint64_t checked(const char* name, std::uint64_t found, std::uint64_t oldest, std::uint64_t newest) const {
        if (found - oldest > newest - oldest || found % unit_ != 0) {
            throw RingCorrupt(std::string(name) + " cursor is " + std::to_string(found) + ", not a multiple of " +
                              std::to_string(unit_) + " between " + std::to_string(oldest) + " and " +
                              std::to_string(newest));
        }
        return found;
    }

    RingHeader* header_;
    unsigned char* data_;
    std::uint64_t capacity_;
    std::uint32_t unit_;
};

// The writing end. Its own cursor is the private `tail_`; the shared one only tells the reader.
class Writer : public RingEnd {
  public:
    Writer(void* memory, std::size_t bytes, std::uint32_t unit) : RingEnd(memory, bytes, unit) {
        // pairs with Reader::consume and, where an earlier writer was in this memory, with its publish
        head_seen_ = header_->head.load(std::memory_order_acquire);
        tail_ = header_->tail.load(std::memory_order_acquire);
        checked("head", head_seen_, head_seen_, head_seen_);
        checked("tail", tail_, head_seen_, head_seen_ + capacity_);
    }

    // Bytes published and not yet consumed, as of now.
    std::uint64_t waiting() {
        // pairs with Reader::consume: the reader has left the bytes before head, they may be overwritten
        head_seen_ = checked("head", header_->head.load(std::memory_order_acquire), head_seen_, tail_);
        return tail_ - head_seen_;
    }

  protected:
    // Free bytes; looks at the reader's cursor only when the last look does not grant `wanted`.
    std::uint64_t space(std::uint64_t wanted) {
        const std::uint64_t known = capacity_ - (tail_ - head_seen_);
        return known >= wanted ? known : capacity_ - waiting();
    }

    void publish(std::uint64_t bytes) noexcept {
        tail_ += bytes;
        // pairs with Reader::waiting: whoever sees the new tail sees the bytes before it
        header_->tail.store(tail_, std::memory_order_release);
    }

    std::uint64_t tail_;
    std::uint64_t head_seen_;
};

// The reading end. Its own cursor is the private `head_`; the shared one only tells the writer.
class Reader : public RingEnd {
  public:
    Reader(void* memory, std::size_t bytes, std::uint32_t unit) : RingEnd(memory, bytes, unit) {
        // pairs with Writer::publish and, where an earlier reader was in this memory, with its consume
        head_ = header_->head.load(std::memory_order_acquire);
        tail_seen_ = header_->tail.load(std::memory_order_acquire);
        checked("head", head_, head_, head_);
        checked("tail", tail_seen_, head_, head_ + capacity_);
    }

    // Bytes published and not yet consumed, as of now.
    std::uint64_t waiting() {
        // pairs with Writer::publish: the bytes before tail are complete
        tail_seen_ = checked("tail", header_->tail.load(std::memory_order_acquire), tail_seen_, head_ + capacity_);
        return tail_seen_ - head_;
    }

  protected:
    // Readable bytes; looks at the writer's cursor only when the last look does not grant `wanted`.
    std::uint64_t available(std::uint64_t wanted) {
        const std::uint64_t known = tail_seen_ - head_;
        return known >= wanted ? known : waiting();
    }

    void consume(std::uint64_t bytes) noexcept {
        head_ += bytes;
        // pairs with Writer::waiting: our copies of these bytes are finished
        header_->head.store(head_, std::memory_order_release);
    }

    std::uint64_t head_;
    std::uint64_t tail_seen_;
};

class TokenWriter : public Writer {
  public:
    TokenWriter(void* memory, std::size_t bytes) : Writer(memory, bytes, kTokenBytes) {}

    // Writes as many of `count` records as fit and publishes them at once; returns how many.
    std::uint64_t push(const void* records, std::uint64_t count) {
        const std::uint64_t wanted = count < capacity_ / kTokenBytes ? count : capacity_ / kTokenBytes;
        const std::uint64_t room = space(wanted * kTokenBytes) / kTokenBytes;
        const std::uint64_t taken = wanted < room ? wanted : room;
        if (taken != 0) {
            copy_in(tail_, records, taken * kTokenBytes);
            publish(taken * kTokenBytes);
        }
        return taken;
    }
};

class TokenReader : public Reader {
  public:
    TokenReader(void* memory, std::size_t bytes) : Reader(memory, bytes, kTokenBytes) {}

    // How many of at most `limit` records can be popped.
    std::uint64_t ready(std::uint64_t limit) {
        const std::uint64_t wanted = limit < capacity_ / kTokenBytes ? limit : capacity_ / kTokenBytes;
        const std::uint64_t here = available(wanted * kTokenBytes) / kTokenBytes;
        return wanted < here ? wanted : here;
    }

    // Copies out `count` records, no more than `ready` said.
    void pop(void* target, std::uint64_t count) noexcept {
        copy_out(head_, target, count * kTokenBytes);
        consume(count * kTokenBytes);
    }
};

inline std::uint64_t message_footprint(std::uint64_t length) {
    return kMessageOverhead + (length + kMessageUnit - 1) / kMessageUnit * kMessageUnit;
}

// One message: begin, append its parts, commit. Without a commit nothing has happened.
class MessageWriter : public Writer {
  public:
    MessageWriter(void* memory, std::size_t bytes) : Writer(memory, bytes, kMessageUnit) {}

    // False: no room now.
    bool begin(std::uint64_t length) {
        if (length > capacity_ - kMessageOverhead) {
            throw MessageTooLarge("a message of " + std::to_string(length) + " bytes cannot pass a ring of " +
                                  std::to_string(capacity_));
        }
        if (space(message_footprint(length)) < message_footprint(length)) return false;
        const auto size = static_cast<std::uint32_t>(length);
        const std::uint32_t prefix[2] = {size, size ^ kGuard};
        copy_in(tail_, prefix, sizeof prefix);
        written_ = 0;
        return true;
    }

    void append(const void* part, std::uint64_t bytes) noexcept {
        copy_in(tail_ + kMessageOverhead + written_, part, bytes);
        written_ += bytes;
    }

    void commit() noexcept { publish(message_footprint(written_)); }

  private:
    std::uint64_t written_ = 0;
};

class MessageReader : public Reader {
  public:
    MessageReader(void* memory, std::size_t bytes) : Reader(memory, bytes, kMessageUnit) {}

    // True, and the first message's length: one is there.
    bool peek(std::uint64_t& length) {
        const std::uint64_t here = available(kMessageOverhead);
        if (here == 0) return false;
        // Copied before it is checked: the other process could change it in between.
        std::uint32_t prefix[2];
        copy_out(head_, prefix, sizeof prefix);
        if ((prefix[0] ^ prefix[1]) != kGuard || message_footprint(prefix[0]) > here) {
            throw RingCorrupt("message length " + std::to_string(prefix[0]) + " (guard " + std::to_string(prefix[1]) +
                              ") with " + std::to_string(here) + " bytes published");
        }
        length = prefix[0];
        return true;
    }

    // Copies out the message of `length` bytes that `peek` saw.
    void read(void* target, std::uint64_t length) const noexcept { copy_out(head_ + kMessageOverhead, target, length); }

    void drop(std::uint64_t length) noexcept { consume(message_footprint(length)); }
};

}  // namespace deepinfer
