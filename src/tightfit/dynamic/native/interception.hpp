// Where operators are intercepted: a boxed fallback on a dispatch key below autograd.
#pragma once

#include <torch/library.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>

#include "runtime.hpp"

namespace tightfit::online {

inline std::atomic<Runtime*> active{nullptr};  // the runtime of the region, while there is one

// Facts about operators, in every region of the process.
inline const Operator& described(const c10::OperatorHandle& op, const Outside& outside) {
    struct Known {
        c10::OperatorName name;
        Operator traits;
    };
    static std::mutex mutex;
    static ska::flat_hash_map<const void*, std::unique_ptr<Known>> known;
    std::unique_lock<std::mutex> lock(mutex);
    if (const auto found = known.find(&op.schema());
        found != known.end() && found->second->name == op.operator_name())
        return found->second->traits;
    lock.unlock();  // Python is asked
    auto asked = std::make_unique<Known>(Known{op.operator_name(), outside.describe(op)});
    lock.lock();
    std::unique_ptr<Known>& kept = known[&op.schema()];
    kept = std::move(asked);
    return kept->traits;
}

inline void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
    keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kSeen);
    Runtime* runtime = active.load(std::memory_order_acquire);
    if (!runtime) return op.redispatchBoxed(keys, stack);
    const Operator& traits = described(op, runtime->outside());
    if (traits.is_composite) return op.redispatchBoxed(keys, stack);
    const c10::impl::ExcludeDispatchKeyGuard unseen(kSeen);
    if (!traits.is_view) return runtime->run(op, traits, keys, stack);
    const c10::IValue& first = (*stack)[stack->size() - static_cast<std::size_t>(traits.arguments)];
    if (first.isTensor() && first.toTensor().defined()) runtime->meet(first.toTensor());
    op.redispatchBoxed(keys, stack);
}

// Sets the interception up, once in a process; returns why that cannot be, or nothing.
inline std::string install() {
    static std::unique_ptr<torch::Library> library;
    if (library) return {};
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kSeen))
        return "something else intercepts operators at the dispatch key Fake";
    library = std::make_unique<torch::Library>(
        torch::Library::IMPL, "_", kSeen, __FILE__, static_cast<std::uint32_t>(__LINE__));
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
    return {};
}

// Operators of this thread are seen from now on, or no more; those of the backward it starts too.
inline void see(bool is_seen) { c10::impl::tls_set_dispatch_key_included(kSeen, is_seen); }

// The function that the allocator's hook calls where the limit is reached.
inline int make_room(std::int64_t lacking_bytes) {
    Runtime* runtime = active.load(std::memory_order_acquire);
    if (!runtime) return 0;
    const c10::impl::ExcludeDispatchKeyGuard unseen(kSeen);
    return runtime->make_room(lacking_bytes) ? 1 : 0;
}

}  // namespace tightfit::online
