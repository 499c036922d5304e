// Python's view of the chain's table.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "chain.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tightfit {

namespace {

using Options = std::vector<std::pair<int, double>>;

ChainSegment segment(double forward_cost, double inner_cost, int backward_units, int entry_units,
                     int forward_units, int gradient_units, const Options& options,
                     const Options& closed_options) {
    ChainSegment made{forward_cost,  inner_cost,     backward_units, entry_units,
                      forward_units, gradient_units, {},             {}};
    for (const auto& [units, cost] : options) made.options.push_back({units, cost});
    for (const auto& [units, cost] : closed_options) made.closed_options.push_back({units, cost});
    return made;
}

}  // namespace

void bind_chain(nb::module_& module) {
    nb::class_<ChainSegment>(module, "ChainSegment")
        .def("__init__",
             [](ChainSegment* self, double forward_cost, double inner_cost, int backward_units,
                int entry_units, int forward_units, int gradient_units, const Options& options,
                const Options& closed_options) {
                 new (self) ChainSegment(segment(forward_cost, inner_cost, backward_units,
                                                 entry_units, forward_units, gradient_units,
                                                 options, closed_options));
             },
             "forward_cost"_a, "inner_cost"_a, "backward_units"_a, "entry_units"_a,
             "forward_units"_a, "gradient_units"_a, "options"_a, "closed_options"_a);
    nb::class_<ChainTable>(module, "ChainTable")
        .def(nb::init<std::vector<ChainSegment>, std::vector<int>, int>(), "segments"_a,
             "boundary_units"_a, "units"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("cost", &ChainTable::cost, "stored"_a, "first"_a, "last"_a, "units"_a)
        .def("decision", &ChainTable::decision, "stored"_a, "first"_a, "last"_a, "units"_a);
}

}  // namespace tightfit
