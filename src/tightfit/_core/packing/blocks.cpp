#include "blocks.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace tightfit::packing {

Blocks::Blocks(const std::vector<std::int64_t>& lower, const std::vector<std::int64_t>& upper,
               std::vector<Bytes> sizes)
    : size(std::move(sizes)), begin(size.size()), end(size.size()), ticks(size.size()) {
    if (lower.size() != size.size() || upper.size() != size.size())
        throw std::invalid_argument("every block needs a lower tick, an upper tick and a size");
    std::vector<std::tuple<std::int64_t, bool, int>> events;  // tick, is a birth, block
    events.reserve(2 * size.size());
    for (int block = 0; block < count(); ++block) {
        if (size[block] <= 0 || lower[block] >= upper[block])
            throw std::invalid_argument("a block needs a positive size and a lifetime");
        ticks[block] = upper[block] - lower[block];
        unit = block == 0 ? size[0] : std::gcd(unit, size[block]);
        events.emplace_back(lower[block], true, block);
        events.emplace_back(upper[block], false, block);
    }
    std::sort(events.begin(), events.end());
    int section = 0;
    bool born = false;  // somebody in this section
    for (const auto& [tick, is_birth, block] : events) {
        if (is_birth) {
            begin[block] = section;
        } else {
            section += born;
            end[block] = section;
        }
        born = is_birth;
    }
    load.assign(section + 1, 0);
    for (int block = 0; block < count(); ++block) {
        load[begin[block]] += size[block];
        load[end[block]] -= size[block];
    }
    load.pop_back();
    std::partial_sum(load.begin(), load.end(), load.begin());
    lower_bound = load.empty() ? 0 : *std::max_element(load.begin(), load.end());
}

Bytes height_of(const Blocks& blocks, const std::vector<Bytes>& offsets) {
    Bytes height = 0;
    for (int block = 0; block < blocks.count(); ++block)
        height = std::max(height, offsets[block] + blocks.size[block]);
    return height;
}

}  // namespace tightfit::packing
