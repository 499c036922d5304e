// Calls of the core into Python. They may be made under the region's lock: no thread that holds
// Python's lock waits for that one.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <mutex>
#include <string>

#include "operator.hpp"

namespace tightfit::online {

using Lock = std::unique_lock<std::recursive_mutex>;

struct Outside {
    std::function<void(Lock&)> wait_for;  // without Python's lock
    std::function<Operator(const c10::OperatorHandle&)> describe;
    std::function<bool(const at::Tensor&)> is_parameter;
    std::function<void(std::int64_t)> note_earlier_freed;
    std::function<void()> clean_up_failed_backward;
    // These raise.
    std::function<void(const std::string&)> exceeded;
    std::function<void(double)> thrashes;
    std::function<void(const std::string&)> refuse;
};

}  // namespace tightfit::online
