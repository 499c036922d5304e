#include "orders.hpp"

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <numeric>

namespace tightfit::packing {

namespace {

using Key = std::vector<double>;

// Largest first by the first key; ties by the next one; then as requested.
Order descending(const Blocks& blocks, std::initializer_list<const Key*> keys) {
    Order order = as_requested(blocks);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        for (const Key* key : keys)
            if ((*key)[a] != (*key)[b]) return (*key)[a] > (*key)[b];
        return false;
    });
    return order;
}

struct Keys {
    explicit Keys(const Blocks& blocks) {
        const std::vector<Bytes> loads =
            extreme_over_lifetimes(blocks, blocks.load, std::greater<Bytes>());
        for (int block = 0; block < blocks.count(); ++block) {
            size.push_back(static_cast<double>(blocks.size[block]));
            length.push_back(blocks.length(block));
            ticks.push_back(static_cast<double>(blocks.ticks[block]));
            area.push_back(size[block] * length[block]);
            area_in_ticks.push_back(size[block] * ticks[block]);
            load.push_back(static_cast<double>(loads[block]));
        }
    }

    Key size, length, ticks, area, area_in_ticks, load;
};

// How many other blocks live at some time of each block's life.
Key neighbours(const Blocks& blocks) {
    std::vector<int> born(blocks.sections() + 1, 0), died(blocks.sections() + 1, 0);
    for (int block = 0; block < blocks.count(); ++block) {
        ++born[blocks.begin[block] + 1];
        ++died[blocks.end[block]];
    }
    std::partial_sum(born.begin(), born.end(), born.begin());  // born before each section
    std::partial_sum(died.begin(), died.end(), died.begin());
    Key found;
    for (int block = 0; block < blocks.count(); ++block)
        found.push_back(born[blocks.end[block]] - died[blocks.begin[block]] - 1);
    return found;
}

}  // namespace

Order by_size(const Blocks& blocks) {
    const Keys keys(blocks);
    return descending(blocks, {&keys.size, &keys.length});
}

Order by_lifetime(const Blocks& blocks) {
    const Keys keys(blocks);
    return descending(blocks, {&keys.length, &keys.size});
}

Order by_area(const Blocks& blocks) {
    const Keys keys(blocks);
    return descending(blocks, {&keys.area});
}

Order by_load(const Blocks& blocks) {
    const Keys keys(blocks);
    return descending(blocks, {&keys.load, &keys.area, &keys.length});
}

Order by_breadth(const Blocks& blocks) {
    std::vector<int> sections(blocks.sections());
    std::iota(sections.begin(), sections.end(), 0);
    std::stable_sort(sections.begin(), sections.end(),
                     [&](int a, int b) { return blocks.load[a] > blocks.load[b]; });
    std::vector<int> rank(sections.size());
    for (std::size_t place = 0; place < sections.size(); ++place)
        rank[sections[place]] = static_cast<int>(place);
    const std::vector<int> best = extreme_over_lifetimes(blocks, rank, std::less<int>());
    Order order = as_requested(blocks);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        return best[a] != best[b] ? best[a] < best[b] : blocks.size[a] > blocks.size[b];
    });
    return order;
}

Order as_requested(const Blocks& blocks) {
    Order order(blocks.count());
    std::iota(order.begin(), order.end(), 0);
    return order;
}

Order from_the_bottom(const std::vector<Bytes>& offsets) {
    Order order(offsets.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return offsets[a] < offsets[b]; });
    return order;
}

std::vector<SearchOrder> search_orders(const Blocks& blocks) {
    const Keys k(blocks);
    const Key degree = neighbours(blocks);
    const Order load_ticks = descending(blocks, {&k.load, &k.ticks, &k.area_in_ticks});
    const Order load_length = descending(blocks, {&k.load, &k.length, &k.area});
    return {
        {load_ticks, false},
        {load_ticks, true},
        {descending(blocks, {&k.ticks, &k.area_in_ticks, &k.load}), false},
        {load_length, false},
        {load_length, true},
        {descending(blocks, {&degree, &k.length, &k.area}), false},
        {descending(blocks, {&k.length, &k.area, &k.load}), false},
        {descending(blocks, {&k.load, &k.size, &k.length}), true},
        {descending(blocks, {&k.load, &k.area_in_ticks, &k.ticks}), true},
        {descending(blocks, {&k.load, &k.area, &k.length}), false},
    };
}

}  // namespace tightfit::packing
