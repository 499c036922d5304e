// Python's view of the packers. Packing releases the interpreter lock.
#include "../bindings.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "registry.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tightfit {

namespace {

using packing::Bytes;
using Ticks = std::vector<std::int64_t>;

// Offsets in bytes, and a bound that no packing's height is below.
std::tuple<std::vector<Bytes>, Bytes> pack(const std::string& name, const Ticks& lower,
                                           const Ticks& upper, std::vector<Bytes> sizes,
                                           double seconds, std::uint64_t seed) {
    const auto& all = packing::packers();
    const auto chosen = std::find_if(all.begin(), all.end(),
                                     [&](const packing::Packer& p) { return p.name == name; });
    if (chosen == all.end()) throw std::invalid_argument("no packer is called " + name);
    const packing::Blocks blocks(lower, upper, std::move(sizes));
    if (blocks.count() == 0) return {};
    packing::Packing packed = chosen->pack(blocks, packing::Limits(seconds, seed));
    return {std::move(packed.offsets), std::max(packed.bound, blocks.lower_bound)};
}

std::vector<std::string> packer_names() {
    std::vector<std::string> names;
    for (const packing::Packer& packer : packing::packers()) names.emplace_back(packer.name);
    return names;
}

}  // namespace

void bind_packing(nb::module_& module) {
    module.def("pack", &pack, "name"_a, "lower"_a, "upper"_a, "sizes"_a, "seconds"_a, "seed"_a,
               nb::call_guard<nb::gil_scoped_release>());
    module.def("packer_names", &packer_names);
}

}  // namespace tightfit
