// Python's view of recorded programs and their replays.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "replay.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tightfit {

namespace {

using Tensors = std::vector<std::tuple<int, int, bool>>;
using Ops = std::vector<std::vector<int>>;
using Moments = std::vector<std::tuple<int, std::int64_t, int, int, std::int64_t>>;

void make_recorded(Recorded* self, std::vector<std::int64_t> bytes, const Tensors& tensors,
                   std::vector<std::int64_t> costs, const Ops& arguments, const Ops& outputs,
                   Recorded::Pairs occurrences, std::vector<int> held) {
    std::vector<RecordedTensor> made;
    for (const auto& [storage, op, is_root] : tensors) made.push_back({storage, op, is_root});
    new (self) Recorded(std::move(bytes), std::move(made), std::move(costs), arguments, outputs,
                        std::move(occurrences), std::move(held));
}

std::pair<ReplayCounts, Moments> replay(const Recorded& recorded, int cost, bool by_size,
                                        bool by_staleness, bool keeps_dead, bool backward_last,
                                        int deallocation, int placement,
                                        std::int64_t budget, std::int64_t most_again,
                                        Replay::Draw draw, bool with_moments) {
    const ReplayPolicy policy{static_cast<CostKind>(cost), by_size, by_staleness, keeps_dead,
                              backward_last};
    Replay run(recorded, policy, static_cast<Deallocation>(deallocation),
               static_cast<Placement>(placement), budget, most_again, std::move(draw),
               with_moments);
    const ReplayCounts counts = run.run();
    Moments moments;
    for (const Moment& m : run.moments())
        moments.emplace_back(static_cast<int>(m.kind), m.clock, m.op, m.tensor, m.memory);
    return {counts, moments};
}

}  // namespace

void bind_replay(nb::module_& module) {
    nb::class_<Recorded>(module, "Recorded")
        .def("__init__", &make_recorded, "storage_bytes"_a, "tensors"_a, "costs"_a, "arguments"_a,
             "outputs"_a, "occurrences"_a, "held"_a);
    nb::class_<ReplayCounts>(module, "ReplayCounts")
        .def_prop_ro("status", [](const ReplayCounts& c) { return static_cast<int>(c.status); })
        .def_ro("max_memory", &ReplayCounts::max_memory)
        .def_ro("total_cost", &ReplayCounts::total_cost)
        .def_ro("evicted", &ReplayCounts::evicted)
        .def_ro("evicted_eager", &ReplayCounts::evicted_eager)
        .def_ro("again", &ReplayCounts::again)
        .def_ro("outputs_again", &ReplayCounts::outputs_again)
        .def_ro("evaluations", &ReplayCounts::evaluations)
        .def_ro("looks", &ReplayCounts::looks)
        .def_ro("max_depth", &ReplayCounts::max_depth);
    module.def("replay", &replay, "recorded"_a, "cost"_a, "by_size"_a, "by_staleness"_a,
               "keeps_dead"_a, "backward_last"_a, "deallocation"_a, "placement"_a, "budget"_a,
               "most_again"_a, "draw"_a, "with_moments"_a);
}

}  // namespace tightfit
