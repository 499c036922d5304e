// The default packer: a portfolio, then exact search and squeaky wheel in turns.
#pragma once

#include "blocks.hpp"
#include "limits.hpp"

namespace tightfit::packing {

// Deterministic unless time runs out.
Packing pack_automatically(const Blocks& blocks, const Limits& limits);

// The exact search alone: from the portfolio's packing down to the proven least.
Packing pack_exactly(const Blocks& blocks, const Limits& limits);

}  // namespace tightfit::packing
