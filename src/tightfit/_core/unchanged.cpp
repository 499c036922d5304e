// Whether a module still holds what it held when it was looked at, asked before every step.
//
// Compared by identity first; nothing is made anew but the few facts of a tensor.

#include <Python.h>
#include <nanobind/nanobind.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace tightfit {
namespace {

bool is_equal(PyObject *one, PyObject *other) {
    if (one == other) return true;
    int equal = PyObject_RichCompareBool(one, other, Py_EQ);
    if (equal < 0) throw nb::python_error();
    return equal == 1;
}

PyObject *item(PyObject *tuple, Py_ssize_t index) { return PyTuple_GET_ITEM(tuple, index); }

PyObject *found_in(PyObject *held, PyObject *key) {
    PyObject *found = PyDict_GetItemWithError(held, key);
    if (!found && PyErr_Occurred()) throw nb::python_error();
    return found;
}

// An ellipsis in place of a value: only its type matters.
bool same_values(PyObject *own, PyObject *names, PyObject *types, PyObject *values) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
        PyObject *found = found_in(own, item(names, i)), *value = item(values, i);
        if (!found) return false;
        if (found == value) continue;
        if (reinterpret_cast<PyObject *>(Py_TYPE(found)) != item(types, i)) return false;
        if (value != Py_Ellipsis && !is_equal(found, value)) return false;
    }
    return true;
}

// The keys of a dictionary in their order, and the addresses of what it holds where they are given.
bool same_keys(PyObject *held, PyObject *keys, PyObject *addresses) {
    if (PyDict_GET_SIZE(held) != PyTuple_GET_SIZE(keys)) return false;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; PyDict_Next(held, &position, &key, &value); ++i) {
        if (!is_equal(key, item(keys, i))) return false;
        if (addresses && PyLong_AsVoidPtr(item(addresses, i)) != value) return false;
    }
    return true;
}

class Facts {
public:
    Facts()
        : shape_(PyUnicode_InternFromString("shape")),
          stride_(PyUnicode_InternFromString("stride")),
          others_{PyUnicode_InternFromString("dtype"), PyUnicode_InternFromString("device"),
                  PyUnicode_InternFromString("requires_grad")} {}

    // `signature`: shape, strides, dtype, device, whether it requires a gradient.
    bool same(PyObject *tensor, PyObject *signature) const {
        if (!PyTuple_Check(item(signature, 1))) return false;  // not strided: look anew
        nb::object shape = nb::steal(PyObject_GetAttr(tensor, shape_));
        if (!shape.is_valid()) throw nb::python_error();
        if (!is_equal(shape.ptr(), item(signature, 0))) return false;
        nb::object stride = nb::steal(PyObject_CallMethodNoArgs(tensor, stride_));
        if (!stride.is_valid()) {  // no longer strided
            PyErr_Clear();
            return false;
        }
        if (!is_equal(stride.ptr(), item(signature, 1))) return false;
        for (int i = 0; i < 3; ++i) {
            nb::object fact = nb::steal(PyObject_GetAttr(tensor, others_[i]));
            if (!fact.is_valid()) throw nb::python_error();
            if (!is_equal(fact.ptr(), item(signature, 2 + i))) return false;
        }
        return true;
    }

private:
    PyObject *shape_, *stride_, *others_[3];
};

nb::object target_of(PyObject *reference) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *target = nullptr;
    if (PyWeakref_GetRef(reference, &target) < 0) throw nb::python_error();
    return nb::steal(target);
#else
    return nb::borrow(PyWeakref_GetObject(reference));
#endif
}

bool same_tensors(PyObject *held, PyObject *names, PyObject *references, PyObject *signatures) {
    static const Facts facts;
    if (!same_keys(held, names, nullptr)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
        // asking a tensor may run Python code, which may change the dictionary
        nb::object tensor = nb::borrow(found_in(held, item(names, i)));
        if (!tensor.is_valid()) return false;
        PyObject *reference = item(references, i);
        if (reference == Py_None || tensor.is_none()) {
            if (tensor.ptr() != reference) return false;
            continue;
        }
        if (!target_of(reference).is(tensor)) return false;
        if (!facts.same(tensor.ptr(), item(signatures, i))) return false;
    }
    return true;
}

// What a module was: see `same_module` in `_engine.pyi`.
enum Record { kReference, kKind, kCount, kNames, kTypes, kValues, kKeys, kTensors };

bool same_contents(PyObject *own, PyObject *record) {
    if (PyDict_GET_SIZE(own) != PyLong_AsSsize_t(item(record, kCount))) return false;
    if (!same_values(own, item(record, kNames), item(record, kTypes), item(record, kValues))) return false;
    PyObject *keys = item(record, kKeys), *tensors = item(record, kTensors);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); ++i) {  // holder, its keys, addresses or None
        PyObject *each = item(keys, i), *held = found_in(own, item(each, 0)), *addresses = item(each, 2);
        if (!held || !PyDict_Check(held)) return false;
        if (!same_keys(held, item(each, 1), addresses == Py_None ? nullptr : addresses)) return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {  // holder, names, tensors, signatures
        PyObject *each = item(tensors, i), *held = found_in(own, item(each, 0));
        if (!held || !PyDict_Check(held)) return false;
        if (!same_tensors(held, item(each, 1), item(each, 2), item(each, 3))) return false;
    }
    return true;
}

bool same_module(nb::tuple record, nb::handle others) {
    static PyObject *dict = PyUnicode_InternFromString("__dict__");
    nb::object module = target_of(item(record.ptr(), kReference));
    if (!module.is_valid() || module.is_none()) return false;
    if (reinterpret_cast<PyObject *>(Py_TYPE(module.ptr())) != item(record.ptr(), kKind)) return false;
    if (!others.is_none()) return same_contents(others.ptr(), record.ptr());
    nb::object own = nb::steal(PyObject_GetAttr(module.ptr(), dict));
    if (!own.is_valid()) throw nb::python_error();
    return same_contents(own.ptr(), record.ptr());
}

nb::list changed_modules(nb::list records) {
    nb::list changed;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(records.ptr()); ++i) {
        nb::object record = nb::borrow(PyList_GET_ITEM(records.ptr(), i));
        if (!same_module(nb::borrow<nb::tuple>(record), nb::none())) changed.append(i);
    }
    return changed;
}

}  // namespace

void bind_unchanged(nb::module_ &module) {
    module.def("same_module", &same_module, nb::arg("record"), nb::arg("own").none());
    module.def("changed_modules", &changed_modules, nb::arg("records"));
}

}  // namespace tightfit
