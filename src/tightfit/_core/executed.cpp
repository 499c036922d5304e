// Which Python code runs in a while, and which of some builtins it calls: a profile function in C,
// as one in Python would make a trace three times slower.

#include <Python.h>
#include <frameobject.h>
#include <nanobind/nanobind.h>

#include <unordered_set>

#include "bindings.hpp"

namespace nb = nanobind;

namespace tightfit {
namespace {

nb::object code_of(PyFrameObject *frame) {
    return nb::steal(reinterpret_cast<PyObject *>(PyFrame_GetCode(frame)));
}

nb::object globals_of(PyFrameObject *frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return nb::steal(PyFrame_GetGlobals(frame));
#else
    return nb::borrow(frame->f_globals);
#endif
}

constexpr int kMostCallers = 6;

class ExecutedCode {
public:
    ExecutedCode(nb::iterable builtins, nb::iterable codes) : kept_(codes) {
        for (nb::handle function : builtins) {
            if (PyCFunction_Check(function.ptr()))
                builtins_.insert(reinterpret_cast<PyCFunctionObject *>(function.ptr())->m_ml);
        }
        for (nb::handle code : codes) watched_.insert(code.ptr());
    }

    void start() {
        thread_ = PyThreadState_Get();
        before_ = thread_->c_profilefunc;
        before_object_ = nb::borrow(thread_->c_profileobj);
        self_ = nb::capsule(this);
        PyEval_SetProfile(&ExecutedCode::event, self_.ptr());
    }

    void stop() {
        if (thread_ == nullptr) return;
        PyEval_SetProfile(before_, before_object_.ptr());
        thread_ = nullptr;
        before_object_ = self_ = nb::object();
    }

    void pause() { ++pauses_; }
    void resume() { --pauses_; }

    void mute() {
        if (is_cheap_to_mute() && muted_++ == 0) PyEval_SetProfile(before_, before_object_.ptr());
    }

    void unmute() {
        if (is_cheap_to_mute() && --muted_ == 0)
            PyEval_SetProfile(&ExecutedCode::event, self_.ptr());
    }

    nb::list codes() const { return codes_; }
    nb::list calls() const { return calls_; }

private:
    // Up to Python 3.11 code runs slower by a half while anybody listens; since 3.12 code is rewritten
    // whenever somebody begins or ends, which costs more than listening. Threads listen by themselves.
    bool is_cheap_to_mute() const {
        return PY_VERSION_HEX < 0x030C0000 && thread_ == PyThreadState_Get();
    }

    static int event(PyObject *self, PyFrameObject *frame, int what, PyObject *argument) {
        auto *own = static_cast<ExecutedCode *>(PyCapsule_GetPointer(self, nullptr));
        if (own == nullptr) return -1;
        if (own->pauses_ == 0) {
            if (what == PyTrace_CALL) own->note_code(frame);
            if (what == PyTrace_C_CALL) own->note_builtin(frame, argument);
        }
        if (own->before_ != nullptr)
            return own->before_(own->before_object_.ptr(), frame, what, argument);
        return 0;
    }

    void note_code(PyFrameObject *frame) {
        nb::object code = code_of(frame);
        if (seen_.insert(code.ptr()).second)  // the list keeps it alive, so its address stays its
            codes_.append(nb::make_tuple(code, globals_of(frame)));
        if (watched_.find(code.ptr()) != watched_.end()) {
            nb::object back = nb::steal(reinterpret_cast<PyObject *>(PyFrame_GetBack(frame)));
            note_call(code, back);
        }
    }

    void note_builtin(PyFrameObject *frame, PyObject *function) {
        if (!PyCFunction_Check(function)) return;
        PyMethodDef *method = reinterpret_cast<PyCFunctionObject *>(function)->m_ml;
        if (builtins_.find(method) != builtins_.end())
            note_call(nb::borrow(function), nb::borrow(reinterpret_cast<PyObject *>(frame)));
    }

    void note_call(nb::object called, nb::object frame) {
        nb::list callers;
        for (int i = 0; i < kMostCallers && frame.is_valid(); ++i) {
            auto *own = reinterpret_cast<PyFrameObject *>(frame.ptr());
            callers.append(code_of(own));
            frame = nb::steal(reinterpret_cast<PyObject *>(PyFrame_GetBack(own)));
        }
        calls_.append(nb::make_tuple(called, nb::tuple(callers)));
    }

    std::unordered_set<PyMethodDef *> builtins_;
    std::unordered_set<PyObject *> watched_, seen_;
    nb::list codes_, calls_;
    nb::object kept_, self_;
    PyThreadState *thread_ = nullptr;  // that listens
    Py_tracefunc before_ = nullptr;
    nb::object before_object_;
    int pauses_ = 0, muted_ = 0;
};

}  // namespace

void bind_executed(nb::module_ &module) {
    nb::class_<ExecutedCode>(module, "ExecutedCode",
                             "Notes which Python code this thread runs, and who calls what is watched.")
        .def(nb::init<nb::iterable, nb::iterable>(), nb::arg("builtins"), nb::arg("codes"))
        .def("start", &ExecutedCode::start, "Begin to listen; a profiler that runs is told as before.")
        .def("stop", &ExecutedCode::stop, "Listen no longer.")
        .def("pause", &ExecutedCode::pause, "Hear nothing until resumed as often.")
        .def("resume", &ExecutedCode::resume, "Hear again.")
        .def("mute", &ExecutedCode::mute, "As pause, and faster where that makes code run faster.")
        .def("unmute", &ExecutedCode::unmute, "Hear again what was muted as often.")
        .def_prop_ro("codes", &ExecutedCode::codes, "Pairs of code and its globals, once each.")
        .def_prop_ro("calls", &ExecutedCode::calls, "Pairs of a watched builtin or code and its callers, the nearest first.");
}

}  // namespace tightfit
