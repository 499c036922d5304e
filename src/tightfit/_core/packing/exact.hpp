// Exact search for a packing below a capacity, after MiniMalloc (Moffitt, ASPLOS 2023).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "blocks.hpp"
#include "limits.hpp"
#include "orders.hpp"
#include "overlaps.hpp"

namespace tightfit::packing {

// Every packing can be pushed down until each block rests on the ground or on another one, and
// then be built from the bottom up. The search places blocks by (offset, rank in an order), each
// at the lowest offset that those below leave, and splits wherever no block without a place lives
// across a border in time. Blocks keep a lowest offset; where the order of building forbids it,
// something else must come below, which raises it further (MiniMalloc does not use that). Sections
// that turned out too full lately are looked at first: one that is too full whatever comes next
// ends all attempts of its component at once.
class ExactSearch {
public:
    enum class Answer { found, impossible, unfinished };

    ExactSearch(const Blocks& blocks, const Overlaps& overlaps, const SearchOrder& order,
                Bytes capacity);

    Answer run(std::int64_t most_nodes, const Limits& limits);

    const std::vector<Bytes>& offsets() const { return lowest_; }

private:
    // Where the search stands in the order of building.
    struct Step {
        Bytes offset;
        int rank;

        bool operator<(const Step& other) const {
            return offset != other.offset ? offset < other.offset : rank < other.rank;
        }
    };

    static constexpr Step kStart{-1, -1};

    // Blocks that are connected in time: a range of ids_, as a set.
    struct Component {
        int first, last;
        int begin, end;  // their sections
    };

    // A component that is being packed; below it in the stack is its parent.
    struct Frame {
        Component blocks;
        Step after;  // later blocks are placed after this step
        std::size_t placed;  // blocks placed before its current attempt
        std::size_t waiting;  // components that were waiting then
        bool has_attempts;
    };

    struct Undo {
        int block;
        std::size_t raised, renewed;  // how many were raised and ranked again before it
    };

    enum class Signal { none, solved, failed };

    Signal attempt(Frame& frame);
    int next_candidate(const Frame& frame) const;
    void place(int block);
    void undo_to(std::size_t placed);
    bool may_fit(const Component& blocks, Step after);
    bool suspects_may_fit(const Component& blocks, Step after);
    bool section_may_fit(int section, Step after);
    bool is_low_enough(int block, int section, Step after) const;
    Bytes least_offset(int block, Step after) const;
    void push(const Component& blocks, Step after);
    bool is_cut(int block) const;
    void split(const Component& blocks);
    void renew_ranks(const Component& blocks);
    int smallest_unplaced_neighbour(int block) const;

    const Blocks& blocks_;
    const Overlaps& overlaps_;
    bool renews_loads_;
    Bytes capacity_;
    const Order& order_;
    std::vector<int> ids_, position_;
    std::vector<int> rank_, rank_at_start_;  // least first among blocks of equal offset
    std::vector<char> is_placed_;
    std::vector<Bytes> lowest_;  // the lowest offset left by the blocks placed so far
    std::vector<Bytes> total_;  // unplaced bytes of each section
    std::vector<int> crossing_;  // unplaced blocks that live across the end of each section
    std::vector<int> witness_;  // a block of each section that was low enough when last asked
    std::vector<int> component_, moved_;  // scratch of `split`
    std::vector<Frame> frames_;
    std::vector<Component> waiting_;
    std::vector<Undo> placed_;
    std::vector<std::pair<int, Bytes>> raised_;  // blocks with their lowest offsets before
    std::vector<std::pair<int, int>> renewed_;  // blocks with their ranks before
    std::vector<int> suspects_;  // sections that were too full lately, the last one first
};

}  // namespace tightfit::packing
