// Squeaky wheel: place in order below a target; the first block that does not fit moves forward.
#pragma once

#include <cstdint>
#include <vector>

#include "../random.hpp"
#include "blocks.hpp"
#include "limits.hpp"
#include "orders.hpp"

namespace tightfit::packing {

class SqueakyWheel {
public:
    SqueakyWheel(const Blocks& blocks, const Limits& limits);

    // Lowers a packing; stops at the lower bound, after so many moves, or when time is up.
    Packing improve(Packing best, std::int64_t most_moves);

private:
    const Blocks& blocks_;
    const Limits& limits_;
    Random random_;
    std::vector<Order> starts_;
    int round_ = 0;
    int moves_per_round_;
};

}  // namespace tightfit::packing
