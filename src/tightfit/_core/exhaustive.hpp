// Small problems solved exactly: the cheapest path through (first computations done, values alive).
#pragma once

#include <cstdint>
#include <vector>

#include "schedule.hpp"

namespace tightfit {

constexpr int kMostExhaustiveValues = 40;

struct Exhaustive {
    bool finished;  // false: cut off, nothing is proven
    bool feasible;
    Cost cost;
    std::vector<Computed> computed;
};

// Any op may be computed again at any time, also twice between two first computations.
Exhaustive solve_exhaustively(const Problem& problem, Bytes budget, std::int64_t most_states);

}  // namespace tightfit
