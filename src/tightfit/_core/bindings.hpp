// One function per area that adds its classes to the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace tightfit {

void bind_planning(nanobind::module_& module);
void bind_chain(nanobind::module_& module);
void bind_alive(nanobind::module_& module);
void bind_replay(nanobind::module_& module);
void bind_packing(nanobind::module_& module);
void bind_orders(nanobind::module_& module);

}  // namespace tightfit
