#include "overlaps.hpp"

#include <algorithm>
#include <numeric>

#include "orders.hpp"

namespace tightfit::packing {

namespace {

constexpr int kMostBlocks = 12000;
constexpr std::size_t kMostEntries = 60000000;

}  // namespace

Overlaps::Overlaps(const Blocks& blocks)
    : neighbour_start_(blocks.count() + 1, 0), living_start_(blocks.sections() + 1, 0) {
    const int count = blocks.count();
    for (int a = 0; a < count; ++a) {
        for (int b = 0; b < count; ++b) neighbour_start_[a + 1] += a != b && blocks.overlap(a, b);
        for (int s = blocks.begin[a]; s < blocks.end[a]; ++s) ++living_start_[s + 1];
    }
    for (auto* start : {&neighbour_start_, &living_start_})
        std::partial_sum(start->begin(), start->end(), start->begin());
    neighbours_.resize(neighbour_start_.back());
    living_.resize(living_start_.back());
    std::vector<std::size_t> next(neighbour_start_), next_living(living_start_);
    Order largest_first = by_size(blocks);
    for (auto a = largest_first.rbegin(); a != largest_first.rend(); ++a) {
        for (int b = 0; b < count; ++b)
            if (*a != b && blocks.overlap(*a, b)) neighbours_[next[b]++] = *a;
        for (int s = blocks.begin[*a]; s < blocks.end[*a]; ++s) living_[next_living[s]++] = *a;
    }
}

bool Overlaps::are_few(const Blocks& blocks) {
    if (blocks.count() > kMostBlocks) return false;
    std::vector<int> alive(blocks.sections() + 1, 0);
    std::size_t entries = 0;
    for (int block = 0; block < blocks.count(); ++block) {
        ++alive[blocks.begin[block]];
        --alive[blocks.end[block]];
        entries += blocks.length(block);
    }
    std::partial_sum(alive.begin(), alive.end(), alive.begin());
    // each pair is counted where the later one is born, and entered for both
    for (int begin : blocks.begin) entries += 2 * static_cast<std::size_t>(alive[begin]);
    return entries <= kMostEntries;
}

}  // namespace tightfit::packing
