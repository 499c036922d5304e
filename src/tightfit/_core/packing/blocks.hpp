// Blocks to pack: sizes with lifetimes, and functions of them for every packer.
#pragma once

#include <cstdint>
#include <vector>

namespace tightfit::packing {

using Bytes = std::int64_t;

// Time is counted in sections: stretches in which blocks are born and none dies. Two blocks live
// together exactly if they share a section, and the most bytes of a section are alive at its end.
struct Blocks {
    // lower, upper: ticks of birth and death, alive in [lower, upper); at equal ticks a death
    // comes first. Sizes are positive.
    Blocks(const std::vector<std::int64_t>& lower, const std::vector<std::int64_t>& upper,
           std::vector<Bytes> sizes);

    int count() const { return static_cast<int>(size.size()); }
    int sections() const { return static_cast<int>(load.size()); }
    int length(int block) const { return end[block] - begin[block]; }
    bool overlap(int a, int b) const { return begin[a] < end[b] && begin[b] < end[a]; }

    std::vector<Bytes> size;
    std::vector<int> begin, end;  // first section, and the one after the last
    std::vector<std::int64_t> ticks;  // length of the lifetime as it was given
    std::vector<Bytes> load;  // bytes alive in each section
    Bytes lower_bound = 0;  // the largest load
    Bytes unit = 1;  // divides every size, and so every height worth looking at
};

// Offsets of all blocks; empty: none were found. No packing is lower than `bound`.
struct Packing {
    std::vector<Bytes> offsets;
    Bytes height = 0;
    Bytes bound = 0;

    bool found() const { return !offsets.empty(); }
};

// The height of the highest block.
Bytes height_of(const Blocks& blocks, const std::vector<Bytes>& offsets);

// The extreme of a value over the sections of each block: the largest load, the least rank, ...
template <typename Value, typename Better>
std::vector<Value> extreme_over_lifetimes(const Blocks& blocks, const std::vector<Value>& values,
                                          Better better) {
    std::vector<std::vector<Value>> tables{values};  // tables[k][s]: of 2^k sections from s on
    for (int width = 1; 2 * width <= blocks.sections(); width *= 2) {
        const std::vector<Value>& half = tables.back();
        std::vector<Value> whole(half.size() - width);
        for (std::size_t s = 0; s < whole.size(); ++s)
            whole[s] = better(half[s], half[s + width]) ? half[s] : half[s + width];
        tables.push_back(std::move(whole));
    }
    std::vector<Value> found(blocks.count());
    for (int block = 0; block < blocks.count(); ++block) {
        int level = 0;
        while (2 << level <= blocks.length(block)) ++level;
        const Value left = tables[level][blocks.begin[block]];
        const Value right = tables[level][blocks.end[block] - (1 << level)];
        found[block] = better(left, right) ? left : right;
    }
    return found;
}

}  // namespace tightfit::packing
