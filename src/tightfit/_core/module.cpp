#include <nanobind/nanobind.h>

NB_MODULE(_engine, module) {
    module.doc() = "Plan engine of tightfit: schedules, incremental evaluation, search.";
}
