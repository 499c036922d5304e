// Python's view of problems, schedules and the search. Long calls release the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <tuple>

#include "bindings.hpp"
#include "exhaustive.hpp"
#include "reach.hpp"
#include "search.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tightfit {

namespace {

using Ranges = nb::ndarray<nb::numpy, int, nb::shape<-1, 3>, nb::c_contig>;
using Row = std::tuple<int, int, int>;

Ranges resident_ranges(const Schedule& schedule) {
    auto* ranges = new std::vector<Range>(schedule.snapshot().resident);
    nb::capsule owner(ranges, [](void* p) noexcept { delete static_cast<std::vector<Range>*>(p); });
    return Ranges(ranges->data(), {ranges->size(), 3}, owner);
}

Snapshot to_snapshot(const Schedule& schedule, const Ranges& ranges, std::vector<int> first,
                     std::vector<int> again) {
    const std::size_t stages = schedule.stages();
    if (first.size() != stages || again.size() != stages)
        throw std::invalid_argument("the snapshot belongs to another problem");
    Snapshot snapshot;
    snapshot.resident.resize(ranges.shape(0));
    std::memcpy(snapshot.resident.data(), ranges.data(), ranges.size() * sizeof(int));
    snapshot.first_choice = std::move(first);
    snapshot.again_choice = std::move(again);
    return snapshot;
}

Row graph_row(const Problem& problem, const Computed& one) {
    const Option& option =
        problem.ops[one.op].alternatives[one.alternative].options[one.option];
    return {one.op, option.alternative, option.variant};
}

std::vector<Row> computes(const Schedule& schedule) {
    std::vector<Row> rows;
    for (int stage = 0; stage < schedule.stages(); ++stage)
        for (const Computed& one : schedule.computed(stage))
            rows.push_back(graph_row(schedule.problem(), one));
    return rows;
}

std::vector<int> first_choices(const Schedule& schedule) {
    std::vector<int> choices(schedule.stages());
    for (int op = 0; op < schedule.stages(); ++op) choices[op] = schedule.first_choice(op);
    return choices;
}

std::vector<int> again_choices(const Schedule& schedule) {
    std::vector<int> choices(schedule.stages());
    for (int op = 0; op < schedule.stages(); ++op) choices[op] = schedule.again_choice(op);
    return choices;
}

void bind_problem(nb::module_& module) {
    nb::class_<Problem>(module, "Problem")
        .def(nb::init<>())
        .def("add_value", &Problem::add_value, "size"_a, "producer"_a, "kept_until"_a, "state"_a)
        .def("add_op", &Problem::add_op, "required"_a, "crossing"_a, "program"_a,
             "segment"_a)
        .def("add_alternative", &Problem::add_alternative, "op"_a, "reads"_a, "writes"_a,
             "first"_a, "again"_a)
        .def("add_option", &Problem::add_option, "op"_a, "alternative"_a, "cost"_a,
             "workspace"_a, "overwrites"_a, "graph_alternative"_a, "variant"_a)
        .def("add_choice", &Problem::add_choice, "branches"_a)
        .def("finish", &Problem::finish)
        .def("first_alternatives",
             [](const Problem& problem, int op) {
                 std::vector<int> ways;
                 const auto& alternatives = problem.ops.at(op).alternatives;
                 for (int a = 0; a < static_cast<int>(alternatives.size()); ++a)
                     if (alternatives[a].first) ways.push_back(a);
                 return ways;
             },
             "op"_a)
        .def_ro("has_trade_offs", &Problem::has_trade_offs)
        .def_prop_ro("op_count", &Problem::op_count)
        .def_prop_ro("value_count", &Problem::value_count);
}

void bind_schedule(nb::module_& module) {
    nb::class_<Schedule>(module, "Schedule")
        .def(nb::init<std::shared_ptr<const Problem>, Bytes>(), "problem"_a, "budget"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("budget", &Schedule::budget)
        .def_prop_ro("cost", &Schedule::cost)
        .def_prop_ro("overflow", &Schedule::overflow)
        .def_prop_ro("fits", &Schedule::fits)
        .def_prop_ro("stages", &Schedule::stages)
        .def("peak", &Schedule::peak)
        .def("fullest_stage", &Schedule::fullest_stage)
        .def("peaks",
             [](const Schedule& s) {
                 std::vector<Bytes> peaks(s.stages());
                 for (int t = 0; t < s.stages(); ++t) peaks[t] = s.peak_of(t);
                 return peaks;
             })
        .def("computes", &computes)
        .def("computed",
             [](const Schedule& s, int stage) {
                 std::vector<int> ops;
                 for (const Computed& one : s.computed(stage)) ops.push_back(one.op);
                 return ops;
             })
        .def("resident", &Schedule::resident, "value"_a, "stage"_a)
        .def("drop", &Schedule::drop, "value"_a, "stage"_a)
        .def("retain", &Schedule::retain, "op"_a, "stage"_a)
        .def("select", &Schedule::select, "op"_a, "first"_a, "again"_a, "keep"_a)
        .def("mark", &Schedule::mark)
        .def("undo_to", &Schedule::undo_to, "mark"_a)
        .def("commit", &Schedule::commit)
        .def("set_budget", &Schedule::set_budget, "budget"_a)
        .def("set_fastest", &Schedule::set_fastest, "fastest"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("keep_everything", &Schedule::keep_everything)
        .def("ranges", &resident_ranges)
        .def("first_choices", &first_choices)
        .def("again_choices", &again_choices)
        .def("load",
             [](Schedule& s, const Ranges& ranges, std::vector<int> first,
                std::vector<int> again) {
                 const Snapshot snapshot =
                     to_snapshot(s, ranges, std::move(first), std::move(again));
                 nb::gil_scoped_release release;
                 s.load(snapshot);
             },
             "ranges"_a, "first_choices"_a, "again_choices"_a)
        .def("load_ranges", &Schedule::load_ranges, "ranges"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("check", &Schedule::check);
}

void bind_search(nb::module_& module) {
    nb::class_<Settings>(module, "Settings")
        .def(nb::init<>())
        .def_rw("drop_candidates", &Settings::drop_candidates)
        .def_rw("fill_limit", &Settings::fill_limit)
        .def_rw("relieve_steps", &Settings::relieve_steps)
        .def_rw("window", &Settings::window)
        .def_rw("local_fill", &Settings::local_fill)
        .def_rw("batch", &Settings::batch)
        .def_rw("noise", &Settings::noise);
    nb::enum_<Relief>(module, "Relief")
        .value("FITS", Relief::fits)
        .value("STUCK", Relief::stuck)
        .value("OUT_OF_TIME", Relief::out_of_time);
    nb::class_<Search>(module, "Search")
        .def(nb::init<Schedule&, std::uint64_t, Settings>(), "schedule"_a, "seed"_a,
             "settings"_a, nb::keep_alive<1, 2>())
        .def("relieve", &Search::relieve, "candidates"_a, "steps"_a, "batch"_a, "seconds"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("fill", &Search::fill, "passes"_a, "limit"_a, "local"_a, "seconds"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("descend", &Search::descend, "seconds"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("improve",
             [](Search& search, double seconds, std::int64_t iterations, double hot, double cold,
                Cost target) {
                 return search.improve({seconds, iterations}, hot, cold, target);
             },
             "seconds"_a, "iterations"_a, "hot"_a, "cold"_a, "target"_a,
             nb::call_guard<nb::gil_scoped_release>());
}

void bind_exact(nb::module_& module) {
    module.attr("MOST_EXHAUSTIVE_VALUES") = kMostExhaustiveValues;
    module.def(
        "solve_exhaustively",
        [](const Problem& problem, Bytes budget, std::int64_t most_states) {
            const Exhaustive found = solve_exhaustively(problem, budget, most_states);
            std::vector<Row> rows;
            for (const Computed& one : found.computed) rows.push_back(graph_row(problem, one));
            return std::make_tuple(found.finished, found.feasible, found.cost, rows);
        },
        "problem"_a, "budget"_a, "most_states"_a);
    module.def(
        "least_bytes",
        [](const Problem& problem, int op, Bytes floor, std::int64_t most_states,
           double seconds) {
            const Reach reach = least_bytes(problem, op, floor, most_states, seconds);
            return std::make_pair(reach.bytes, reach.exact);
        },
        "problem"_a, "op"_a, "floor"_a, "most_states"_a, "seconds"_a,
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_planning(nb::module_& module) {
    bind_problem(module);
    bind_schedule(module);
    bind_search(module);
    bind_exact(module);
}

}  // namespace tightfit
