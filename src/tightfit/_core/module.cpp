#include <nanobind/nanobind.h>

#include "bindings.hpp"

NB_MODULE(_engine, module) {
    nanobind::set_leak_warnings(false);  // a search in the background may outlive the interpreter
    module.doc() = "The C++ core of tightfit: schedules, their evaluation and search; packing of blocks.";
    tightfit::bind_planning(module);
    tightfit::bind_chain(module);
    tightfit::bind_alive(module);
    tightfit::bind_replay(module);
    tightfit::bind_packing(module);
    tightfit::bind_orders(module);
}
