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
// Parts of a copy that advance together: the processor's own prefetch stops at the end of each memory page, so one part
// alone waits for memory there, four keep reads under way.
constexpr std::size_t kStrands = 4;
constexpr std::size_t kLongestStrand = 64 << 10;
constexpr std::size_t kAhead = 8 * kLine;

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

inline void stream_bytes(char* dst, const char* src, std::size_t size) {
    const std::size_t head = std::min(size, (kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine) % kLine);
    std::memcpy(dst, src, head);
    std::size_t at = head;
    while (size - at >= kStrands * kLine) {
        const std::size_t strand = std::min(kLongestStrand, (size - at) / kStrands / kLine * kLine);
        for (std::size_t line = at; line < at + strand; line += kLine)
            for (std::size_t k = 0; k < kStrands; ++k) stream_line(dst + line + k * strand, src + line + k * strand);
        at += kStrands * strand;
    }
    for (; at + kLine <= size; at += kLine) stream_line(dst + at, src + at);
    std::memcpy(dst + at, src + at, size - at);
    _mm_sfence();  // whoever is told of the copy later must see it
}

#else

inline void stream_bytes(char* dst, const char* src, std::size_t size) { std::memcpy(dst, src, size); }

#endif

}  // namespace deepinfer::pages
