// The checksum of a row of bytes, for each instruction set.
//
// A row's bytes are little-endian 64-bit words, padded with zeros to whole stripes of 64 words. Word l of each stripe
// goes into lane l by lane = rotl((lane ^ word ^ (word >> 32)) * K, 31), lanes begin as (l + 1) * K; in the end the same
// step takes the lanes in order into a total that begins as the size, and total ^ (total >> 32) is the result. Every step is a bijection of the state and of the word, so that a change within one word (any byte, any bits
// of it) always changes the result; others, words that change places among them, do but for a chance of about 2^-64.
// The shift brings a word's high bits, which multiplication would never spread, to where it does. Lanes do not depend on
// each other, so that several multiplications are under way at once. No defence against forgery.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace deepinfer::pages {

constexpr int kLanes = 64;
constexpr std::int64_t kStripe = kLanes * 8;
constexpr std::uint64_t kMultiplier = 0x9E3779B97F4A7C15u;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "checksums are defined over little-endian words");

inline std::uint64_t step(std::uint64_t state, std::uint64_t word) {
    const std::uint64_t mixed = (state ^ word ^ (word >> 32)) * kMultiplier;
    return (mixed << 31) | (mixed >> 33);
}

// Whole stripes into the lanes. Compiled below for more than one instruction set: the compiler makes vectors of lanes.
template <bool kPrefetch>
__attribute__((always_inline)) inline void add_stripes(std::uint64_t* lanes, const char* row, std::int64_t size) {
    for (std::int64_t at = 0; at < size; at += kStripe) {
        // Half a memory page ahead; the processor's own prefetch stops at the end of each. Only where vectors are
        // faster than memory.
        for (std::int64_t line = 0; kPrefetch && line < kStripe; line += 64) __builtin_prefetch(row + at + line + 2048);
        std::uint64_t words[kLanes];
        std::memcpy(words, row + at, sizeof words);
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = step(lanes[lane], words[lane]);
    }
}

using AddStripes = void (*)(std::uint64_t*, const char*, std::int64_t);

inline void add_portable(std::uint64_t* lanes, const char* row, std::int64_t size) {
    add_stripes<false>(lanes, row, size);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void add_avx2(std::uint64_t* lanes, const char* row, std::int64_t size) {
    add_stripes<true>(lanes, row, size);
}

__attribute__((target("avx512f,avx512dq"))) inline void add_avx512(std::uint64_t* lanes, const char* row,
                                                                   std::int64_t size) {
    add_stripes<true>(lanes, row, size);
}
#endif

struct Level {
    const char* name;
    AddStripes add;
};

// What this processor can run, best first.
inline const std::vector<Level>& levels() {
    static const std::vector<Level> found = [] {
        std::vector<Level> list;
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
            list.push_back({"avx512", add_avx512});
        if (__builtin_cpu_supports("avx2")) list.push_back({"avx2", add_avx2});
#endif
        list.push_back({"portable", add_portable});
        return list;
    }();
    return found;
}

inline std::uint64_t sum_of(const char* row, std::int64_t size, AddStripes add) {
    std::uint64_t lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<std::uint64_t>(lane + 1) * kMultiplier;
    const std::int64_t whole = size / kStripe * kStripe;
    add(lanes, row, whole);
    if (whole < size) {
        char rest[kStripe] = {};
        std::memcpy(rest, row + whole, static_cast<std::size_t>(size - whole));
        add(lanes, rest, kStripe);
    }
    auto total = static_cast<std::uint64_t>(size);
    for (const std::uint64_t lane : lanes) total = step(total, lane);
    return total ^ (total >> 32);
}

}  // namespace deepinfer::pages
