// Python's view of orders of ops. Searching releases the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "orders.hpp"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tightfit {

void bind_orders(nb::module_& module) {
    const nb::call_guard<nb::gil_scoped_release> unlocked;
    nb::class_<OrderProblem>(module, "OrderProblem")
        .def(nb::init<>())
        .def("add_value", &OrderProblem::add_value, "size"_a, "kept_group"_a)
        .def("add_op", &OrderProblem::add_op, "group"_a, "reads"_a, "writes"_a, "extra"_a,
             "after"_a)
        .def_prop_ro("op_count", &OrderProblem::op_count)
        .def("peak", &OrderProblem::peak, "order"_a)
        .def("alive_between_groups", &OrderProblem::alive_between_groups)
        .def("floor", &OrderProblem::floor, unlocked)
        .def("scheduled_forwards", &OrderProblem::scheduled_forwards, unlocked)
        .def("scheduled_backwards", &OrderProblem::scheduled_backwards, unlocked)
        .def("lowered", &OrderProblem::lowered, "order"_a, "enough"_a, "seconds"_a, "moves"_a,
             "seed"_a, unlocked);
}

}  // namespace tightfit
