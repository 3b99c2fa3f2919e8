// Walks through the columns of the page index: chains of a hash table, paths of a forest, rows of tokens.
//
// Promises: the same answers as hicache/walks_py.py; no number is followed that is outside of its column, and no chain
// longer than the column: broken links are an error, never a read elsewhere and never a loop without end.
// What the columns mean is in hicache/pages.py and hicache/buckets.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace deepinfer {

constexpr std::int32_t kNone = -1;

// A number in a column does not fit the column it points into.
struct BrokenLink : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename T>
struct Column {
    T* data = nullptr;
    std::size_t size = 0;

    T& operator[](std::int32_t slot) const {
        if (slot < 0 || static_cast<std::size_t>(slot) >= size) {
            throw BrokenLink("slot " + std::to_string(slot) + " is outside of " + std::to_string(size));
        }
        return data[slot];
    }
};

struct KeyWords {
    std::uint64_t low, high;

    bool operator==(const KeyWords& other) const { return low == other.low && high == other.high; }
};

// Chains of slots by key: `heads` has a power of two buckets.
struct Chains {
    Column<std::int32_t> heads;
    Column<std::int32_t> after;
    Column<const KeyWords> keys;

    std::int32_t& head(const KeyWords& key) const { return heads.data[key.low & (heads.size - 1)]; }

    std::int32_t find(const KeyWords& key) const {
        std::int32_t slot = head(key);
        for (std::size_t steps = 0; slot != kNone && !(keys[slot] == key); ++steps) {
            if (steps > after.size) throw BrokenLink("a bucket's chain has no end");
            slot = after[slot];
        }
        return slot;
    }

    void link(std::int32_t slot) const {
        std::int32_t& first = head(keys[slot]);
        after[slot] = first;
        first = slot;
    }

    void unlink(std::int32_t slot) const {
        std::int32_t* link = &head(keys[slot]);
        for (std::size_t steps = 0; *link != slot; ++steps) {
            if (*link == kNone || steps > after.size) {
                throw BrokenLink("slot " + std::to_string(slot) + " is not in its bucket");
            }
            link = &after[*link];
        }
        *link = after[slot];
    }
};

// How many of these rows of `tokens` equal the rows of `ids` before the first that does not.
inline std::size_t agreeing(Column<const std::uint8_t> tokens, Column<const std::int32_t> slots,
                            Column<const std::uint8_t> ids, std::size_t row_bytes) {
    const std::size_t rows = std::min(slots.size, ids.size / row_bytes);
    const std::size_t most = tokens.size / row_bytes;
    for (std::size_t row = 0; row < rows; ++row) {
        const std::int32_t slot = slots.data[row];
        if (slot < 0 || static_cast<std::size_t>(slot) >= most) {
            throw BrokenLink("slot " + std::to_string(slot) + " is outside of " + std::to_string(most));
        }
        if (std::memcmp(tokens.data + static_cast<std::size_t>(slot) * row_bytes, ids.data + row * row_bytes,
                        row_bytes) != 0) {
            return row;
        }
    }
    return rows;
}

// `slot` (or none) and all before it, first page first.
inline std::vector<std::int32_t> path(Column<const std::int32_t> parents, std::int32_t slot) {
    std::vector<std::int32_t> slots;
    for (; slot != kNone; slot = parents[slot]) {
        if (slots.size() >= parents.size) throw BrokenLink("a path has no beginning");
        slots.push_back(slot);
    }
    std::reverse(slots.begin(), slots.end());
    return slots;
}

// What decides whether a page goes together with its only child.
struct Pages {
    Column<const std::int32_t> parent, children, pins;
    Column<const std::uint8_t> status;
    Column<const std::int32_t> line;  // one number more than there are slots; kNone: not in line
    std::uint8_t ready;
};

// `slot` and those before it that are left without children once it is gone, at most so many, the last page first.
inline std::vector<std::int32_t> climb(const Pages& pages, std::int32_t slot, std::size_t most) {
    std::vector<std::int32_t> slots{slot};
    most = std::min(most, pages.parent.size);
    while (slots.size() < most) {
        slot = pages.parent[slot];
        if (slot == kNone || pages.children[slot] != 1 || pages.pins[slot] != 0 || pages.status[slot] != pages.ready ||
            pages.line[slot] != kNone) {
            break;
        }
        slots.push_back(slot);
    }
    return slots;
}

}  // namespace deepinfer
