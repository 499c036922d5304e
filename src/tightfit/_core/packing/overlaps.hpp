// Which blocks live at the same time.
#pragma once

#include <cstddef>
#include <vector>

#include "blocks.hpp"

namespace tightfit::packing {

class Overlaps {
public:
    explicit Overlaps(const Blocks& blocks);

    struct Range {
        const int* first;
        const int* last;
        const int* begin() const { return first; }
        const int* end() const { return last; }
    };

    // Those that share a section with a block, the smallest first.
    Range neighbours(int block) const { return of(neighbours_, neighbour_start_, block); }
    Range living_in(int section) const { return of(living_, living_start_, section); }

    // Whether there is memory for them: with very many blocks at a time there is not.
    static bool are_few(const Blocks& blocks);

private:
    static Range of(const std::vector<int>& flat, const std::vector<std::size_t>& start, int row) {
        return {flat.data() + start[row], flat.data() + start[row + 1]};
    }

    std::vector<std::size_t> neighbour_start_, living_start_;
    std::vector<int> neighbours_, living_;
};

}  // namespace tightfit::packing
