// Contents brought back: the calls that made them run again, with a stack of our own.
// Kirisame et al., appendix C.4; `repeater.py` says which contents are locked when.
#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "held.hpp"
#include "outside.hpp"

namespace tightfit::online {

constexpr c10::DispatchKey kSeen = c10::DispatchKey::Fake;  // where operators are intercepted

// Lets operators run once more as they ran first: below autograd and autocast, unseen by any mode.
class Below {
    c10::impl::ExcludeDispatchKeyGuard guard_{
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet({kSeen, c10::DispatchKey::Python,
                             c10::DispatchKey::PythonTLSSnapshot,
                             c10::DispatchKey::PythonDispatcher})};
};

// Visits the tensors among values, in lists too.
template <class Do>
void each_tensor(const c10::IValue* first, const c10::IValue* last, Do act) {
    for (; first != last; ++first) {
        if (first->isTensor()) {
            if (first->toTensor().defined()) act(first->toTensor());
        } else if (first->isList()) {
            const auto items = first->toListRef();
            each_tensor(items.begin(), items.end(), act);
        }
    }
}

class Repeater {
public:
    Repeater(Pool& pool, Ledger& ledger, const Outside& outside)
        : pool_(pool), ledger_(ledger), outside_(outside) {}

    // The operator that could not run again, if that was why something failed just now.
    std::string take_refused() { return std::exchange(refused_, {}); }

    // Makes inputs of a call resident, and locks them.
    Held hold(Call& call) {
        for (Read& read : call.reads) {
            read.content->used_at = ledger_.clock();
            read.content->last_op = ledger_.operators();
        }
        Frame top(nullptr, call, pool_);
        if (!top.missing.empty()) work(top);
        top.held.mark_running();
        return std::move(top.held);
    }

    // Makes a content resident.
    void bring_back(Content& content) {
        if (content.is_resident) return;
        Frame frame(&content, maker_of(content), pool_);
        work(frame);
    }

private:
    // A call that waits until all it reads is there.
    struct Frame {
        Frame(Content* wanted_, Call& call_, Pool& pool)
            : wanted(wanted_), call(&call_), held(pool) {
            lock_reads();
        }

        // The content to be computed next; null if all are resident. A content evicted while the
        // call waited is computed again, and stays this time.
        Content* next_missing() {
            for (;; ++rounds) {
                while (!missing.empty()) {
                    Content& content = *missing.back();
                    if (!held.lock(content)) return &content;
                    if (rounds) held.mark_running(content);
                    missing.pop_back();
                }
                lock_reads();
                if (missing.empty()) return nullptr;
            }
        }

        void lock_reads() {
            for (Read& read : call->reads)
                if (!held.lock(*read.content)) missing.push_back(read.content.get());
            const auto cost = [](const Content* c) { return c->maker ? c->maker->cost : 0; };
            std::stable_sort(missing.begin(), missing.end(), [&](auto* first, auto* second) {
                return cost(first) < cost(second);  // the dearest is the last
            });
        }

        Ref<Content> wanted;  // why it runs; none: for the program, and it runs elsewhere
        Ref<Call> call;
        Held held;
        std::vector<Content*> missing;
        int rounds = 0;
    };

    Call& maker_of(Content& content) {
        if (!content.maker)
            outside_.refuse("a tensor's memory is gone and how it was computed is unknown");
        for (Read& read : content.maker->reads) read.content->used_at = ledger_.clock();
        return *content.maker;
    }

    // Runs calls that a frame waits for, and then its own.
    void work(Frame& bottom) {
        const Below below;
        std::vector<std::unique_ptr<Frame>> above;
        const auto top = [&]() -> Frame& { return above.empty() ? bottom : *above.back(); };
        try {
            for (;;) {
                Frame& frame = top();
                if (Content* lacking = frame.next_missing()) {
                    above.push_back(std::make_unique<Frame>(lacking, maker_of(*lacking), pool_));
                    continue;
                }
                if (frame.wanted) {
                    frame.held.mark_running();
                    run(frame);
                    frame.held.release();
                }
                if (above.empty()) return;
                above.pop_back();
            }
        } catch (...) {
            if (top().wanted) refused_ = top().call->name;
            while (!above.empty()) above.pop_back();
            bottom.held.release();
            throw;
        }
    }

    void run(Frame& frame) {
        if (const double times = ledger_.thrashes()) outside_.thrashes(times);
        Call& call = *frame.call;
        std::vector<Storage> made;
        for (const Written& written : call.written) made.push_back(to_write(call, written));
        std::vector<c10::StorageImpl*> known;
        torch::jit::Stack stack = arguments(call, made, known);
        const std::int64_t started = ledger_.moment();
        run_with_state(call, stack);
        ledger_.ran_again(call.cost, started);
        each_tensor(stack.data(), stack.data() + stack.size(), [&](const at::Tensor& tensor) {
            c10::StorageImpl* storage = storage_of(tensor);
            if (!storage->nbytes() || std::find(known.begin(), known.end(), storage) != known.end())
                return;
            known.push_back(storage);
            made.push_back(shared(storage));
        });
        stack.clear();
        if (made.size() != call.outputs.size())
            outside_.refuse(call.name + " made " + std::to_string(made.size()) +
                            " storages when it ran again, and " +
                            std::to_string(call.outputs.size()) +
                            " before: it does not repeat itself");
        for (std::size_t n = 0; n < made.size(); ++n)
            if (Content* content = call.outputs[n]; content && !content->is_resident)
                arrive(*content, made[n], frame);
    }

    // The memory that a call overwrites: its own if only it needs that, or else a copy.
    Storage to_write(Call& call, const Written& written) {
        if (written.read < 0) return new_memory(written.size_bytes);
        Content& content = *call.reads[static_cast<std::size_t>(written.read)].content;
        Storage storage = content.memory();
        if (!content.is_private() || content.locks != 1 || !content.maker) return copy_of(storage);
        pool_.drop(content);
        return storage;
    }

    // The arguments of a call, with tensors in the place of places; also tells their storages.
    torch::jit::Stack arguments(Call& call, const std::vector<Storage>& made,
                                std::vector<c10::StorageImpl*>& known) {
        torch::jit::Stack stack(call.arguments.begin(), call.arguments.end());
        for (int number : call.numbers) {
            auto& value = stack[static_cast<std::size_t>(number)];
            value = at::native::wrapped_scalar_tensor(value.toScalar());
        }
        int copied = -1;
        for (const Place& place : call.places) {
            Storage storage = memory_for(call, place, made);
            known.push_back(storage.get());
            at::Tensor tensor = place.geometry.in(std::move(storage));
            auto& value = stack[static_cast<std::size_t>(place.argument)];
            if (place.item < 0) {
                value = std::move(tensor);
                continue;
            }
            const bool is_first = std::exchange(copied, place.argument) != place.argument;
            const auto item = static_cast<std::size_t>(place.item);
            if (value.isTensorList()) {
                auto list = is_first ? value.toTensorList().copy() : value.toTensorList();
                list.set(item, std::move(tensor));
                value = std::move(list);
            } else {
                auto list = value.toOptionalTensorList();
                if (is_first) list = list.copy();
                list.set(item, std::move(tensor));
                value = std::move(list);
            }
        }
        return stack;
    }

    Storage memory_for(Call& call, const Place& place, const std::vector<Storage>& made) {
        if (place.read < 0)
            return place.written < 0 ? new_memory(place.size_bytes)
                                     : made[static_cast<std::size_t>(place.written)];
        for (std::size_t n = 0; n < call.written.size(); ++n)
            if (call.written[n].read == place.read) return made[n];
        Content& content = *call.reads[static_cast<std::size_t>(place.read)].content;
        Storage storage = content.memory();
        if (static_cast<std::int64_t>(storage->nbytes()) != content.size_bytes)
            outside_.refuse(call.name + " reads memory that was resized out of sight");
        return storage;
    }

    // Runs a call with the random numbers, and with gradients enabled or not, as it ran first.
    static void run_with_state(Call& call, torch::jit::Stack& stack) {
        const c10::AutoGradMode mode(call.with_grad);
        if (!call.drawn_from) return call.function.redispatchBoxed(call.keys, &stack);
        at::Generator& generator = *call.drawn_from;
        const auto set = [&](const at::Tensor& state) {
            const std::lock_guard<std::mutex> lock(generator.mutex());
            generator.set_state(state);
        };
        const at::Tensor now = generator.get_state();
        set(call.state);
        try {
            call.function.redispatchBoxed(call.keys, &stack);
        } catch (...) {
            set(now);
            throw;
        }
        set(now);
    }

    // A content was computed: into the storage that waits for it, or for those who need it.
    void arrive(Content& content, const Storage& storage, Frame& frame) {
        if (static_cast<std::int64_t>(storage->nbytes()) != content.size_bytes)
            outside_.refuse(frame.call->name + " made " + std::to_string(storage->nbytes()) +
                            " bytes when it ran again, and " + std::to_string(content.size_bytes) +
                            " before: it does not repeat itself");
        Storage waiting = content.memory();
        if (!waiting && &content != frame.wanted.get() && !content.locks) return;
        pool_.came_back(content);
        if (waiting) {
            fill(*waiting, *storage);
            content.arrive({});
        } else {
            content.arrive(storage);
        }
        pool_.offer(content);
        if (content.maker) content.maker->release_reads();
    }

    Pool& pool_;
    Ledger& ledger_;
    const Outside& outside_;
    std::string refused_;
};

}  // namespace tightfit::online
