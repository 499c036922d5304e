// The core as Python sees it. Every function gives up Python's lock before it takes the region's.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>

#include "interception.hpp"

namespace py = pybind11;
using namespace tightfit::online;

namespace {

using WithoutLock = py::call_guard<py::gil_scoped_release>;

// Calls Python under its lock; its errors pass through operators and autograd unchanged.
template <class Result, class... Given>
Result ask(const py::object& function, const Given&... given) {
    const py::gil_scoped_acquire lock;
    try {
        py::object result = function(given...);
        if constexpr (!std::is_void_v<Result>) return result.template cast<Result>();
    } catch (py::error_already_set& error) {
        error.restore();
        python_error raised;
        raised.persist();
        throw raised;
    }
}

// A function of Python that lives as long as the core, and ends under Python's lock.
std::shared_ptr<py::object> function_of(const py::object& owner, const char* name) {
    return {new py::object(owner.attr(name)), [](py::object* function) {
                const py::gil_scoped_acquire lock;
                delete function;
            }};
}

using Facts = std::tuple<std::string, bool, bool, bool, bool, bool, bool, std::int64_t,
                         std::vector<int>, std::vector<int>, int, int>;

Operator operator_from(const c10::OperatorHandle& op, Facts facts) {
    Operator traits;
    std::tie(traits.name, traits.is_composite, traits.is_view, traits.makes_blank, traits.draws,
             traits.repeats, traits.replaces, traits.weight, traits.written, traits.statistics,
             traits.training, traits.dtype) = std::move(facts);
    traits.arguments = static_cast<int>(op.schema().arguments().size());
    traits.returns = static_cast<int>(op.schema().returns().size());
    return traits;
}

Outside outside_of(const py::object& python) {
    Outside outside;
    outside.wait_for = [](Lock& lock) {
        if (!PyGILState_Check()) return lock.lock();
        const py::gil_scoped_release release;
        lock.lock();
    };
    outside.describe = [f = function_of(python, "describe")](const c10::OperatorHandle& op) {
        const auto& name = op.operator_name();
        return operator_from(op, ask<Facts>(*f, name.name, name.overload_name));
    };
    outside.is_parameter = [f = function_of(python, "is_parameter")](const at::Tensor& tensor) {
        return ask<bool>(*f, tensor);
    };
    outside.note_earlier_freed = [f = function_of(python, "note_earlier_freed")](
                                     std::int64_t size_bytes) {
        ask<void>(*f, size_bytes);
    };
    outside.clean_up_failed_backward = [f = function_of(python, "free_failed_backward")] {
        ask<void>(*f);
    };
    outside.exceeded = [f = function_of(python, "raise_exceeded")](const std::string& name) {
        ask<void>(*f, name);
    };
    outside.thrashes = [f = function_of(python, "raise_thrashes")](double times) {
        ask<void>(*f, times);
    };
    outside.refuse = [f = function_of(python, "raise_bad_input")](const std::string& text) {
        ask<void>(*f, text);
    };
    return outside;
}

std::unique_ptr<Runtime> runtime_of(const py::object& python, int cost, bool by_size,
                                    bool by_staleness, bool keeps_dead,
                                    std::int64_t smallest_bytes, bool look_at_all,
                                    double most_again) {
    const Policy policy{static_cast<tightfit::CostKind>(cost), by_size, by_staleness,
                        keeps_dead, smallest_bytes, look_at_all};
    return std::make_unique<Runtime>(policy, most_again, outside_of(python));
}

c10::StorageImpl* storage_at(std::uintptr_t address) {  // `_cdata` of a torch.UntypedStorage
    return reinterpret_cast<c10::StorageImpl*>(address);
}

void begin(Runtime& runtime) {
    active = &runtime;
    see(true);
}

void forget(Runtime& runtime) {
    Runtime* expected = &runtime;
    active.compare_exchange_strong(expected, nullptr);
    runtime.close();
}

py::tuple take_counts(Runtime& runtime) {
    const Counts c = runtime.take_counts();
    return py::make_tuple(c.operators, c.evictions, c.again, c.all_ns, c.first_ns, c.again_ns,
                          c.scoring_ns, c.search_ns);
}

}  // namespace

PYBIND11_MODULE(TIGHTFIT_MODULE, module) {
    module.def("install", &install);
    module.def("address_of_make_room", [] { return reinterpret_cast<std::uintptr_t>(&make_room); });
    py::class_<Runtime>(module, "Runtime")
        .def(py::init(&runtime_of))
        .def("begin", &begin)
        .def("end", [](Runtime&) { see(false); })
        .def("take_counts", &take_counts)
        .def("refused", &Runtime::refused, WithoutLock())
        .def(
            "know",
            [](Runtime& self, std::uintptr_t storage, std::int64_t allocated_bytes) {
                self.know(storage_at(storage), allocated_bytes);
            },
            WithoutLock())
        .def("make_room", &Runtime::make_room, WithoutLock())
        .def("need", &Runtime::need, WithoutLock())
        .def(
            "is_known",
            [](Runtime& self, std::uintptr_t storage) {
                return self.is_known(storage_at(storage));
            },
            WithoutLock())
        .def(
            "before_resizing",
            [](Runtime& self, std::uintptr_t storage) {
                self.before_resizing(storage_at(storage));
            },
            WithoutLock())
        .def(
            "after_resizing",
            [](Runtime& self, std::uintptr_t storage) { self.after_resizing(storage_at(storage)); },
            WithoutLock())
        .def("expect_writes", &Runtime::expect_writes, WithoutLock())
        .def("end_step", &Runtime::end_step, WithoutLock())
        .def("settle_all", &Runtime::settle_all, WithoutLock())
        .def("weights", &Runtime::weights, WithoutLock())
        .def("clean_up_failed_backward", &Runtime::clean_up_failed_backward, WithoutLock())
        .def("close", &forget, WithoutLock());
}
