// From a step's spans to tiles for the kernels, and running them: which tiles, in what order, in whose memory.
//
// Promises results that do not depend on the number of threads or on the other spans of the step: how a span is cut
// depends on that span alone, and pieces are merged in their order. Knows nothing about vectors or Python.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <new>
#include <vector>

#include "attention.hpp"
#include "team.hpp"

namespace deepinfer::attention {

// The tiles of a span, one for each key head, are cut along its context until there are about this many pieces in all,
// so that one long sequence with few new tokens keeps many threads busy. More would cost more: each piece begins with
// memory that nobody has asked for yet, and one thread merges them. A piece is at least a block.
constexpr std::int64_t kMaxPieces = 32;

// Below this a copy is over before a second thread would have begun.
constexpr std::int64_t kMinTokensToShare = 64;

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Floats on cache line borders; not initialised. Throws std::bad_alloc.
class Floats {
  public:
    explicit Floats(std::int64_t count)
        : data_(static_cast<float*>(
              ::operator new(static_cast<std::size_t>(count) * sizeof(float), std::align_val_t{64}))) {}
    ~Floats() { ::operator delete(data_, std::align_val_t{64}); }
    Floats(const Floats&) = delete;
    Floats& operator=(const Floats&) = delete;
    float* data() const { return data_; }

  private:
    float* data_;
};

// Sizes of buffers, in floats.
struct Sizes {
    std::int64_t width, rows, q, keys, values, scores;

    explicit Sizes(const Problem& p)
        : width(ceil_div(p.v_dim, kWidest) * kWidest),
          rows(tokens_of_tile(p) * (p.heads / p.kv_heads)),
          q(rows * p.k_dim),
          keys(p.k_dim * kBlock),
          values(kBlock * width),
          scores(rows * kBlock) {}

    static std::int64_t tokens_of_tile(const Problem& p) {
        return std::max<std::int64_t>(1, kTileRows / (p.heads / p.kv_heads));
    }

    // A state of as many rows as a tile has.
    std::int64_t state(std::int64_t tile_rows) const { return tile_rows * (width + 2); }
    State state_at(float* at, std::int64_t tile_rows) const {
        return {at, at + tile_rows * width, at + tile_rows * (width + 1)};
    }

    // What one worker needs: scratch memory, then a state.
    std::int64_t scratch() const { return q + keys + values + scores; }
    Scratch scratch_at(float* at) const { return {at, at + q, at + q + keys, at + q + keys + values}; }
};

// The tiles of one attention call. A tile in pieces has one job for each; who ends last merges them.
class Plan {
  public:
    // Later spans and later tiles first: they see the longest contexts, and long jobs must not start last.
    explicit Plan(const Problem& problem) : problem_(problem), sizes_(problem) {
        for (std::int64_t span = problem.spans - 1; span >= 0; --span) add_span(span);
    }

    void run(const Kernel& kernel, unsigned threads, bool use_openmp) {
        const std::int64_t each = ceil_div(sizes_.scratch() + sizes_.state(sizes_.rows), kWidest) * kWidest;
        const Floats own(each * threads), shared(shared_floats_);
        run_jobs(static_cast<std::int64_t>(jobs_.size()), threads, use_openmp, [&](std::int64_t number, unsigned worker) {
            const Job& job = jobs_[static_cast<std::size_t>(number)];
            float* memory = own.data() + each * worker;
            const Scratch scratch = sizes_.scratch_at(memory);
            if (job.group != nullptr) return run_piece(kernel, job, scratch, shared.data() + job.group->states);
            const State state = sizes_.state_at(memory + sizes_.scratch(), rows_of(job.tile));
            kernel.attend(problem_, job.tile, scratch, state);
            kernel.finish(problem_, job.tile, state);
        });
    }

  private:
    // A tile in pieces: its states lie behind each other.
    struct Group {
        std::int64_t states, pieces;
        std::atomic<std::int64_t> left;
        Group(std::int64_t at, std::int64_t count) : states(at), pieces(count), left(count) {}
    };

    struct Job {
        Tile tile;
        Group* group;
        std::int64_t piece;
    };

    std::int64_t rows_of(const Tile& tile) const { return tile.count * (problem_.heads / problem_.kv_heads); }

    void add_span(std::int64_t span) {
        const std::int64_t tokens = problem_.starts[span + 1] - problem_.starts[span];
        const std::int64_t tiles = ceil_div(tokens, Sizes::tokens_of_tile(problem_));
        // Alike, or the threads that get the larger ones end last.
        const std::int64_t each = ceil_div(tokens, tiles);
        const std::int64_t pieces = std::max<std::int64_t>(1, kMaxPieces / (tiles * problem_.kv_heads));
        for (std::int64_t first = (tokens - 1) / each * each; first >= 0; first -= each) {
            const std::int64_t position = problem_.contexts[span] - tokens + first;
            const std::int64_t count = std::min(each, tokens - first);
            const std::int64_t seen_from =
                problem_.window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - problem_.window);
            Tile tile{span, 0, first, count, seen_from / kBlock, ceil_div(position + count, kBlock)};
            for (; tile.kv_head < problem_.kv_heads; ++tile.kv_head) add_tile(tile, pieces);
        }
    }

    void add_tile(const Tile& tile, std::int64_t most_pieces) {
        const std::int64_t blocks = tile.high_block - tile.low_block;
        const std::int64_t each = ceil_div(blocks, most_pieces);
        const std::int64_t pieces = ceil_div(blocks, each);
        if (pieces == 1) {
            jobs_.push_back({tile, nullptr, 0});
            return;
        }
        groups_.emplace_back(shared_floats_, pieces);
        shared_floats_ += pieces * sizes_.state(rows_of(tile));
        for (std::int64_t piece = 0; piece < pieces; ++piece) {
            Tile part = tile;
            part.low_block = tile.low_block + piece * each;
            part.high_block = std::min(tile.high_block, part.low_block + each);
            jobs_.push_back({part, &groups_.back(), piece});
        }
    }

    void run_piece(const Kernel& kernel, const Job& job, const Scratch& scratch, float* states) const {
        const std::int64_t rows = rows_of(job.tile);
        const auto state = [&](std::int64_t piece) {
            return sizes_.state_at(states + piece * sizes_.state(rows), rows);
        };
        kernel.attend(problem_, job.tile, scratch, state(job.piece));
        // Pairs with itself: the last to come sees what all others wrote before they came.
        if (job.group->left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        for (std::int64_t piece = 1; piece < job.group->pieces; ++piece)
            kernel.merge(state(0), state(piece), rows, problem_.v_dim);
        kernel.finish(problem_, job.tile, state(0));
    }

    const Problem& problem_;
    const Sizes sizes_;
    std::vector<Job> jobs_;
    std::deque<Group> groups_;  // jobs point into it: it never moves its elements
    std::int64_t shared_floats_ = 0;
};

// Puts the step's keys and values into their blocks.
inline void store_step(const Problem& problem, const Kernel& kernel, unsigned threads, bool use_openmp) {
    struct Part {
        std::int64_t span, first, count;
    };
    std::vector<Part> parts;
    for (std::int64_t span = 0; span < problem.spans; ++span) {
        const std::int64_t tokens = problem.starts[span + 1] - problem.starts[span];
        for (std::int64_t first = 0; first < tokens; first += kMinTokensToShare)
            parts.push_back({span, first, std::min(kMinTokensToShare, tokens - first)});
    }
    const unsigned hands = problem.tokens > kMinTokensToShare ? threads : 1;
    run_jobs(static_cast<std::int64_t>(parts.size()), hands, use_openmp, [&](std::int64_t number, unsigned) {
        const Part& part = parts[static_cast<std::size_t>(number)];
        kernel.store(problem, part.span, part.first, part.count);
    });
}

}  // namespace deepinfer::attention
