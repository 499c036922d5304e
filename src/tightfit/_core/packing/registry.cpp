#include "registry.hpp"

#include "automatic.hpp"
#include "fit.hpp"
#include "offset_lines.hpp"
#include "orders.hpp"
#include "portfolio.hpp"
#include "squeaky.hpp"

namespace tightfit::packing {

namespace {

template <Choice choice>
Packing on_offset_lines(const Blocks& blocks, const Limits&) {
    return pack_on_offset_lines(blocks, choice);
}

template <Order (*order)(const Blocks&), Hole hole>
Packing in_order(const Blocks& blocks, const Limits&) {
    return pack_in_order(blocks, order(blocks), hole);
}

Packing by_squeaky_wheel(const Blocks& blocks, const Limits& limits) {
    return SqueakyWheel(blocks, limits)
        .improve(pack_by_portfolio(blocks, limits), std::numeric_limits<std::int64_t>::max());
}

}  // namespace

const std::vector<Packer>& packers() {
    static const std::vector<Packer> all{
        {"auto", pack_automatically},
        {"paper", on_offset_lines<Choice::lifetime>},
        {"paper_area", on_offset_lines<Choice::area>},
        {"paper_size", on_offset_lines<Choice::size>},
        {"greedy_size", in_order<by_size, Hole::first>},
        {"greedy_breadth", in_order<by_breadth, Hole::first>},
        {"first_fit", in_order<as_requested, Hole::first>},
        {"portfolio", pack_by_portfolio},
        {"exact", pack_exactly},
        {"squeaky_wheel", by_squeaky_wheel},
    };
    return all;
}

}  // namespace tightfit::packing
