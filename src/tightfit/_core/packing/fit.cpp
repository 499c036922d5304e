#include "fit.hpp"

#include <algorithm>

namespace tightfit::packing {

Placed::Placed(const Blocks& blocks) : blocks_(blocks) { rows_.reserve(blocks.count()); }

Bytes Placed::place_for(int block, Hole hole) const {
    const Bytes size = blocks_.size[block];
    const int begin = blocks_.begin[block], end = blocks_.end[block];
    Bytes top = 0, found = -1, tightest = std::numeric_limits<Bytes>::max();
    for (const Row& row : rows_) {
        if (!((row.begin < end) & (begin < row.end))) continue;
        const Bytes room = row.offset - top;
        if (room >= size && room < tightest) {
            found = top;
            tightest = room;
            if (hole == Hole::first) break;
        }
        top = std::max(top, row.top);
    }
    return found < 0 ? top : found;
}

void Placed::add(int block, Bytes offset) {
    const Row row{offset, offset + blocks_.size[block], blocks_.begin[block], blocks_.end[block]};
    const auto above = [](const Row& a, const Row& b) { return a.offset < b.offset; };
    rows_.insert(std::upper_bound(rows_.begin(), rows_.end(), row, above), row);
}

Packing pack_in_order(const Blocks& blocks, const Order& order, Hole hole, Bytes limit) {
    Packing packing{std::vector<Bytes>(blocks.count(), 0)};
    Placed placed(blocks);
    for (int block : order) {
        const Bytes offset = placed.place_for(block, hole);
        packing.height = std::max(packing.height, offset + blocks.size[block]);
        if (packing.height >= limit) return {};
        packing.offsets[block] = offset;
        placed.add(block, offset);
    }
    return packing;
}

}  // namespace tightfit::packing
