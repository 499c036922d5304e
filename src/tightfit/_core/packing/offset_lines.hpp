// The best-fit heuristic of Sekiyama et al. (arXiv 1804.10001), section 3.2.
#pragma once

#include "blocks.hpp"

namespace tightfit::packing {

// Which of the blocks that fit on a line is placed: the paper takes the longest lifetime.
enum class Choice { lifetime, size, area };

Packing pack_on_offset_lines(const Blocks& blocks, Choice choice);

}  // namespace tightfit::packing
