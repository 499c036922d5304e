#include "automatic.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "exact.hpp"
#include "portfolio.hpp"
#include "squeaky.hpp"

namespace tightfit::packing {

namespace {

constexpr int kFirstNodes = 2;  // per block and order, doubled each round
constexpr int kMovesPerBlock = 1;  // of the squeaky wheel, doubled each round

// The exact search below several capacities, in rounds of more and more nodes.
class Narrowing {
public:
    Narrowing(const Blocks& blocks, const Limits& limits)
        : blocks_(blocks), limits_(limits), overlaps_(blocks), orders_(search_orders(blocks)) {}

    // Look for packings as low as the bound, halfway to it, and just below the best one.
    void round(Packing& best, std::int64_t nodes) const {
        for (int part : {0, 1, 2}) {
            if (best.height == best.bound || limits_.is_over()) return;
            const Bytes steps = (best.height - best.bound) / blocks_.unit;
            const Bytes above[] = {0, steps / 2, steps - 1};
            if (part > 0 && above[part] == above[part - 1]) continue;
            look_below(best, best.bound + above[part] * blocks_.unit, nodes / (1 + 3 * (part > 0)));
        }
    }

private:
    void look_below(Packing& best, Bytes capacity, std::int64_t nodes) const {
        for (const SearchOrder& order : orders_) {
            if (limits_.is_over()) return;
            ExactSearch search(blocks_, overlaps_, order, capacity);
            const ExactSearch::Answer answer = search.run(nodes, limits_);
            if (answer == ExactSearch::Answer::unfinished) continue;
            if (answer == ExactSearch::Answer::impossible) {
                best.bound = capacity + blocks_.unit;
            } else {
                best.offsets = search.offsets();
                best.height = height_of(blocks_, best.offsets);
            }
            return;
        }
    }

    const Blocks& blocks_;
    const Limits& limits_;
    Overlaps overlaps_;
    std::vector<SearchOrder> orders_;
};

Packing narrowed(const Blocks& blocks, const Limits& limits, bool with_wheel) {
    Packing best = pack_by_portfolio(blocks, limits);
    best.bound = blocks.lower_bound;
    std::optional<Narrowing> exact;
    if (best.height > best.bound && Overlaps::are_few(blocks)) exact.emplace(blocks, limits);
    SqueakyWheel wheel(blocks, limits);
    std::int64_t nodes = std::int64_t{kFirstNodes} * blocks.count();
    std::int64_t moves = std::int64_t{kMovesPerBlock} * blocks.count();
    while (best.height > best.bound && !limits.is_over() && (exact || with_wheel)) {
        if (exact) exact->round(best, nodes);
        if (with_wheel && best.height > best.bound) {
            const Bytes bound = best.bound;
            best = wheel.improve(std::move(best), moves);
            best.bound = bound;
        }
        nodes = std::min(2 * nodes, std::numeric_limits<std::int64_t>::max() / 4);
        moves = std::min(2 * moves, std::numeric_limits<std::int64_t>::max() / 4);
    }
    return best;
}

}  // namespace

Packing pack_automatically(const Blocks& blocks, const Limits& limits) {
    return narrowed(blocks, limits, true);
}

Packing pack_exactly(const Blocks& blocks, const Limits& limits) {
    return narrowed(blocks, limits, false);
}

}  // namespace tightfit::packing
