// Backward search over sets of values that must be alive together (docs/search.md, "The least
// budget").
#pragma once

#include <cstdint>

#include "problem.hpp"

namespace tightfit {

struct Reach {
    Bytes bytes;  // no plan computes the op with fewer
    bool exact;  // false: the search was cut off, and more may be needed
    std::int64_t states;
};

// The least bytes with which an op can be computed starting from an empty memory. Every op may be
// computed any number of times here, so the answer is a lower limit for every plan. Answers below
// `floor` are not distinguished from it.
Reach least_bytes(const Problem& problem, int op, Bytes floor, std::int64_t most_states,
                  double seconds);

}  // namespace tightfit
