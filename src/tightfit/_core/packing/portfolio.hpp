// Several constructive packers, the best of them.
#pragma once

#include "blocks.hpp"
#include "limits.hpp"

namespace tightfit::packing {

// Stops at the lower bound; after the first two packers also when time is up.
Packing pack_by_portfolio(const Blocks& blocks, const Limits& limits);

}  // namespace tightfit::packing
