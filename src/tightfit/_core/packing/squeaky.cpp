#include "squeaky.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "../random.hpp"
#include "fit.hpp"
#include "orders.hpp"

namespace tightfit::packing {

namespace {

constexpr int kMovesPerRound = 200;
constexpr int kMostMoves = 1000000;
constexpr double kGrowth = 1.6;  // of the distance a block moves, each time it is moved

// One attempt at a target height, from one order.
class Wheel {
public:
    Wheel(const Blocks& blocks, Order order, Hole hole, Bytes target)
        : blocks_(blocks), order_(std::move(order)), hole_(hole), target_(target),
          placed_(blocks), offsets_(blocks.count(), 0), moved_(blocks.count(), 0) {}

    Packing turn(int most_moves, Random& random, const Limits& limits) {
        for (int move = 0; move < most_moves; ++move) {
            const int stuck = place_from(done_);
            if (stuck < 0) return {offsets_, height_of(blocks_, offsets_)};
            if (stuck == 0 || (move % 16 == 0 && limits.is_over())) return {};
            move_forward(stuck, random);
        }
        return {};
    }

private:
    // The position of the first block that ends above the target; -1 if all have a place.
    int place_from(int position) {
        for (; position < blocks_.count(); ++position) {
            const int block = order_[position];
            const Bytes offset = placed_.place_for(block, hole_);
            if (offset + blocks_.size[block] > target_) {
                done_ = position;
                return position;
            }
            offsets_[block] = offset;
            placed_.add(block, offset);
        }
        return -1;
    }

    // To just before a block that lives at the same time; blocks before it stay placed.
    void move_forward(int position, Random& random) {
        const int block = order_[position];
        const double most = std::pow(kGrowth, std::min(++moved_[block], 40));
        const int distance = static_cast<int>(std::min<double>(position, std::max(1.0, most)));
        int to = position - 1 - random.below(distance);
        while (to > 0 && !blocks_.overlap(order_[to], block)) --to;
        const auto first = order_.begin() + to;
        std::rotate(first, order_.begin() + position, order_.begin() + position + 1);
        placed_.clear();
        for (done_ = 0; done_ < to; ++done_) placed_.add(order_[done_], offsets_[order_[done_]]);
    }

    const Blocks& blocks_;
    Order order_;
    Hole hole_;
    Bytes target_;
    Placed placed_;
    std::vector<Bytes> offsets_;
    std::vector<int> moved_;
    int done_ = 0;
};

// The order with every rank moved by a normal distribution of 2 to 12 % of the blocks.
Order shaken(const Order& order, Random& random) {
    const double spread = (0.02 + 0.1 * random.uniform()) * static_cast<double>(order.size());
    std::vector<std::pair<double, int>> ranks;
    for (std::size_t rank = 0; rank < order.size(); ++rank)
        ranks.emplace_back(static_cast<double>(rank) + spread * std::log(random.log_normal(1.0)),
                           order[rank]);
    std::sort(ranks.begin(), ranks.end());
    Order moved;
    for (const auto& [rank, block] : ranks) moved.push_back(block);
    return moved;
}

}  // namespace

SqueakyWheel::SqueakyWheel(const Blocks& blocks, const Limits& limits)
    : blocks_(blocks), limits_(limits), random_(limits.seed),
      starts_{{}, by_size(blocks), by_lifetime(blocks), by_area(blocks), by_load(blocks),
              by_breadth(blocks)},
      moves_per_round_(kMovesPerRound) {}

Packing SqueakyWheel::improve(Packing best, std::int64_t most_moves) {
    const int count = static_cast<int>(starts_.size());
    starts_[0] = from_the_bottom(best.offsets);
    for (; most_moves > 0 && best.height > blocks_.lower_bound && !limits_.is_over(); ++round_) {
        const Bytes excess = best.height - blocks_.lower_bound;
        const Bytes targets[] = {blocks_.lower_bound, best.height - blocks_.unit,
                                 blocks_.lower_bound + excess * 7 / 10};
        const Order& start = starts_[round_ % count];
        const Hole hole = random_.below(4) == 0 ? Hole::tightest : Hole::first;
        Wheel wheel(blocks_, round_ < count ? start : shaken(start, random_), hole,
                    targets[round_ % 3]);
        Packing found = wheel.turn(moves_per_round_, random_, limits_);
        most_moves -= moves_per_round_;
        if (found.found() && found.height < best.height) {
            starts_[0] = from_the_bottom(found.offsets);
            best = std::move(found);
        } else if (round_ % (2 * count) == 2 * count - 1) {
            moves_per_round_ = std::min(2 * moves_per_round_, kMostMoves);
        }
    }
    return best;
}

}  // namespace tightfit::packing
