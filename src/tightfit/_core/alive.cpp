// Which objects of some classes live: found without letting another thread run meanwhile.

#include <Python.h>
#include <nanobind/nanobind.h>

#include <unordered_set>

#include "bindings.hpp"

namespace nb = nanobind;

namespace tightfit {
namespace {

// `gc.get_objects` hands out tuples that another thread has only half made, and to finish one that
// other code refers to is an error. Here no other code does when the next thread runs.
nb::list alive(nb::iterable kinds) {
    std::unordered_set<PyObject *> wanted;
    for (nb::handle kind : kinds) wanted.insert(kind.ptr());
    nb::list found;
    nb::object objects = nb::module_::import_("gc").attr("get_objects")();
    Py_ssize_t count = PyList_GET_SIZE(objects.ptr());
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *object = PyList_GET_ITEM(objects.ptr(), i);
        if (wanted.count(reinterpret_cast<PyObject *>(Py_TYPE(object)))) found.append(nb::borrow(object));
    }
    return found;
}

}  // namespace

void bind_alive(nb::module_ &module) {
    module.def("alive", &alive, nb::arg("kinds"));
}

}  // namespace tightfit
