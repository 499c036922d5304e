// Greedy packing: blocks in a given order, each into a hole between those placed before it.
#pragma once

#include <limits>
#include <vector>

#include "blocks.hpp"
#include "orders.hpp"

namespace tightfit::packing {

enum class Hole { first, tightest };

// The places of the blocks placed so far, from the lowest up.
class Placed {
public:
    explicit Placed(const Blocks& blocks);

    // Where a block goes: the lowest or the tightest hole that holds it, else on top.
    Bytes place_for(int block, Hole hole) const;

    void add(int block, Bytes offset);
    void clear() { rows_.clear(); }

private:
    struct Row {
        Bytes offset, top;
        int begin, end;
    };

    const Blocks& blocks_;
    std::vector<Row> rows_;
};

// Nothing is found once a block would end at `limit` or above.
Packing pack_in_order(const Blocks& blocks, const Order& order, Hole hole,
                      Bytes limit = std::numeric_limits<Bytes>::max());

}  // namespace tightfit::packing
