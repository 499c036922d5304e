// Every packer by its name.
#pragma once

#include <vector>

#include "blocks.hpp"
#include "limits.hpp"

namespace tightfit::packing {

struct Packer {
    const char* name;
    Packing (*pack)(const Blocks&, const Limits&);
};

const std::vector<Packer>& packers();

}  // namespace tightfit::packing
