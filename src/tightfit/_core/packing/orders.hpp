// Orders in which blocks are placed one after the other.
#pragma once

#include <vector>

#include "blocks.hpp"

namespace tightfit::packing {

using Order = std::vector<int>;

Order by_size(const Blocks& blocks);
Order by_lifetime(const Blocks& blocks);
Order by_area(const Blocks& blocks);  // size x lifetime
Order by_load(const Blocks& blocks);  // largest load of the lifetime, area, lifetime
Order by_breadth(const Blocks& blocks);  // fullest section first; in a section by size
Order as_requested(const Blocks& blocks);
Order from_the_bottom(const std::vector<Bytes>& offsets);

// How the exact search looks at blocks of equal offset: by load, area, lifetime, size or the number
// of neighbours in time, in several sequences (MiniMalloc's three among them).
struct SearchOrder {
    Order order;
    bool renews_loads;  // where blocks fall apart, those of the most unplaced bytes come first
};

// The most successful first.
std::vector<SearchOrder> search_orders(const Blocks& blocks);

}  // namespace tightfit::packing
