#include <nanobind/nanobind.h>

#include "bindings.hpp"

NB_MODULE(_engine, module) {
    module.doc() = "Plan engine of tightfit: schedules, incremental evaluation, search.";
    tightfit::bind_planning(module);
    tightfit::bind_chain(module);
    tightfit::bind_executed(module);
    tightfit::bind_replay(module);
}
