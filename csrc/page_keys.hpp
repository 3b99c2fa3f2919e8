// The key of a page of token ids: 128 bits that follow from the key before it and from its own tokens.
//
// Promises: the same bytes as hicache/keys_py.py on every 64-bit little-endian machine; no memory is allocated.
// It is fast, not cryptographic: whoever finds a page by its key compares the tokens too, so two pages with one key
// cost a miss. The chain starts at a secret root: nobody outside can aim at such a pair, or at one bucket of a table.
//
// A page is 64 words. Four lanes take two words each in turn, so that four multiplications are under way at a time;
// each lane starts from the parent's key, and at the end they are folded into one. A lane carries 128 bits from step to
// step: with one 64-bit word a local change would be seen by 64 bits only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace deepinfer {

constexpr std::size_t kPageTokens = 128;
constexpr std::size_t kKeyBytes = 16;
constexpr std::size_t kLanes = 4;
constexpr std::size_t kStepsPerPage = kPageTokens * sizeof(std::int32_t) / (kLanes * kKeyBytes);

struct PageKey {
    std::uint64_t x, y;
};

// Fractional parts of the square roots of the first eight primes: numbers nobody chose.
constexpr PageKey kLaneSalt[kLanes] = {
    {0x6a09e667f3bcc908, 0xbb67ae8584caa73b},
    {0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1},
    {0x510e527fade682d1, 0x9b05688c2b3e6c1f},
    {0x1f83d9abfb41bd6b, 0x5be0cd19137e2179},
};

inline PageKey load_key(const std::uint8_t* bytes) noexcept {
    PageKey key;
    std::memcpy(&key, bytes, kKeyBytes);
    return key;
}

// Both halves of a product are biased at one end, so they are put together crosswise; the factors go in once more, or a
// factor of zero would swallow the other.
inline PageKey absorb(PageKey state, PageKey words) noexcept {
    __extension__ typedef unsigned __int128 Wide;
    const std::uint64_t a = state.x ^ words.x;
    const std::uint64_t b = state.y ^ words.y;
    const Wide product = static_cast<Wide>(a) * b;
    const auto low = static_cast<std::uint64_t>(product);
    const auto high = static_cast<std::uint64_t>(product >> 64);
    return {(low ^ high) + b, (high + (low << 32 | low >> 32)) ^ a};
}

inline PageKey page_key(PageKey parent, const std::uint8_t* ids) noexcept {
    PageKey lanes[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = {parent.x + kLaneSalt[lane].x, parent.y ^ kLaneSalt[lane].y};
    }
    for (std::size_t step = 0; step < kStepsPerPage; ++step) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            lanes[lane] = absorb(lanes[lane], load_key(ids + (step * kLanes + lane) * kKeyBytes));
        }
    }
    PageKey key = parent;
    for (const PageKey& lane : lanes) key = absorb(key, lane);
    return absorb(key, kLaneSalt[0]);
}

// Keys of `pages` consecutive pages into `out`, 16 bytes each.
inline void page_keys(const std::uint8_t* parent, const std::uint8_t* ids, std::size_t pages,
                      std::uint8_t* out) noexcept {
    PageKey key = load_key(parent);
    for (std::size_t page = 0; page < pages; ++page) {
        key = page_key(key, ids + page * kPageTokens * sizeof(std::int32_t));
        std::memcpy(out + page * kKeyBytes, &key, kKeyBytes);
    }
}

}  // namespace deepinfer
