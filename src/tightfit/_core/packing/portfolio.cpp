#include "portfolio.hpp"

#include <functional>
#include <utility>

#include "fit.hpp"
#include "offset_lines.hpp"
#include "orders.hpp"

namespace tightfit::packing {

Packing pack_by_portfolio(const Blocks& blocks, const Limits& limits) {
    Packing best = pack_on_offset_lines(blocks, Choice::area);
    const auto keep = [&](Packing found) {
        if (found.found() && found.height < best.height) best = std::move(found);
    };
    const auto in_order = [&](Order (*order)(const Blocks&), Hole hole) {
        return [&blocks, &best, order, hole] {
            return pack_in_order(blocks, order(blocks), hole, best.height);
        };
    };
    const std::function<Packing()> others[] = {
        [&] { return pack_on_offset_lines(blocks, Choice::lifetime); },
        in_order(by_breadth, Hole::tightest),
        in_order(by_size, Hole::first),
        in_order(by_load, Hole::first),
        in_order(by_lifetime, Hole::tightest),
        in_order(by_area, Hole::first),
        [&] { return pack_on_offset_lines(blocks, Choice::size); },
        in_order(by_size, Hole::tightest),
        in_order(by_area, Hole::tightest),
        in_order(by_load, Hole::tightest),
        in_order(by_breadth, Hole::first),
        in_order(by_lifetime, Hole::first),
    };
    for (const auto& pack : others) {
        if (best.height == blocks.lower_bound || limits.is_over()) break;
        keep(pack());
    }
    return best;
}

}  // namespace tightfit::packing
