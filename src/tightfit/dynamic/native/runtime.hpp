// Sees every operator and frees memory when full: as `runtime.py`, below autograd.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "noted.hpp"
#include "settled.hpp"

namespace tightfit::online {

inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

inline bool is_refusal(const c10::Error& error) {  // as hook.c words it
    constexpr char kBegin[] = "tightfit: the budget of";
    return std::strncmp(error.what_without_backtrace(), kBegin, sizeof kBegin - 1) == 0;
}

class Runtime {
public:
    Runtime(Policy policy, double most_again, Outside outside)
        : outside_(std::move(outside)),
          ledger_(most_again),
          pool_(policy, ledger_),
          contents_(pool_, [this](std::int64_t size_bytes) { ended(size_bytes); }),
          repeater_(pool_, ledger_, outside_),
          settled_(contents_, pool_, repeater_) {}

    // ---- calls by others

    const Outside& outside() const { return outside_; }
    const std::string& refused() const { return refused_; }
    Counts take_counts() { return ledger_.take_counts(); }

    void know(c10::StorageImpl* storage, std::int64_t allocated_bytes) {
        const Lock lock = locked();
        contents_.was_before(storage, allocated_bytes);
    }

    // Evicts; runs inside the allocator, in any thread.
    bool make_room(std::int64_t lacking_bytes) {
        const Lock lock(mutex_, std::try_to_lock);
        if (!lock) return false;
        const std::int64_t before = ended_bytes_;
        contents_.process_frees();
        return pool_.free(lacking_bytes) || ended_bytes_ != before;
    }

    // Brings a tensor back that is read without the dispatcher; it may have to stay there.
    void need(const at::Tensor& tensor, bool is_permanent) {
        const Lock lock = locked();
        Content* content = is_plain(tensor) ? contents_.of(storage_of(tensor)) : nullptr;
        if (!content || (content->is_resident && !is_permanent)) return;
        or_exceed([&] {
            if (is_permanent)
                settled_.settle(content);
            else
                repeater_.bring_back(*content);
        });
        pool_.sweep();
    }

    bool is_known(c10::StorageImpl* storage) {
        const Lock lock = locked();
        return contents_.of(storage) != nullptr;
    }

    // A storage is about to get another size: contents computed from it must not need it.
    void before_resizing(c10::StorageImpl* storage) {
        const Lock lock = locked();
        or_exceed([&] { settled_.settle(contents_.of(storage)); });
        or_exceed([&] { settled_.protect_readers(contents_.of(storage), storage); });
    }

    void after_resizing(c10::StorageImpl* storage) {
        const Lock lock = locked();
        const auto size_bytes = static_cast<std::int64_t>(storage->nbytes());
        contents_.put(storage, new Content(size_bytes, {}, storage));
        pool_.sweep();
    }

    void expect_writes(std::int64_t size_bytes) {
        const Lock lock = locked();
        settled_.expect_writes(size_bytes);
    }

    // A training step is over.
    void end_step() {
        const Lock lock = locked();
        contents_.process_frees();
        for (const auto& content : contents_.computed())
            if (content->is_resident && pool_.is_small(*content)) settled_.settle(content);
        ledger_.end_step();
    }

    // Brings back everything the program holds, to leave; returns the bytes that do not fit.
    std::int64_t settle_all() {
        const Lock lock = locked();
        for (const auto& content : contents_.computed())
            if (content->maker) content->maker->forget_reads();
        contents_.process_frees();
        std::int64_t lost_bytes = 0;
        for (const auto& content : contents_.computed()) {
            try {
                settled_.settle(content);
            } catch (const c10::Error& error) {
                if (!is_refusal(error)) throw;
                lost_bytes += content->size_bytes;
            }
        }
        return lost_bytes;
    }

    std::pair<std::int64_t, std::int64_t> weights() {
        const Lock lock = locked();
        return contents_.weights();
    }

    // Frees autograd's tensors of a backward in which an operator has failed.
    void clean_up_failed_backward() {
        if (!has_failed_ || in_backward()) return;
        has_failed_ = false;
        const c10::impl::ExcludeDispatchKeyGuard unseen(kSeen);
        outside_.clean_up_failed_backward();
    }

    void close() {
        const Lock lock = locked();
        contents_.clear();
        pool_.clear();
        last_state_ = at::Tensor();
    }

    // ---- operators

    // A tensor is given to an operator: a parameter stays.
    void meet(const at::Tensor& tensor) {
        if (!is_leaf(tensor) || !is_plain(tensor)) return;
        const Lock lock = locked();
        Ref<Content> content = &contents_.content_in(storage_of(tensor));
        if (content->was_asked || content->is_blank) return;  // blank: about to be initialised
        content->was_asked = true;
        if (outside_.is_parameter(tensor)) settled_.settle(content);
    }

    void run(const c10::OperatorHandle& op, const Operator& traits, c10::DispatchKeySet keys,
             torch::jit::Stack* stack) {
        const std::int64_t started = now_ns();
        clean_up_failed_backward();
        Lock lock = locked();
        try {
            run_locked(op, traits, keys, stack, lock);
        } catch (const c10::Error& error) {
            has_failed_ = true;
            refused_ = repeater_.take_refused();
            ledger_.inside_since(started);
            if (is_refusal(error)) outside_.exceeded(traits.name);
            throw;
        } catch (...) {
            has_failed_ = true;
            ledger_.inside_since(started);
            throw;
        }
        ledger_.inside_since(started);
    }

private:
    static constexpr std::int64_t kFixedCost = 1000;

    Lock locked() {
        Lock lock(mutex_, std::try_to_lock);
        if (!lock) outside_.wait_for(lock);
        return lock;
    }

    void ended(std::int64_t size_bytes) {
        ended_bytes_ += size_bytes;
        outside_.note_earlier_freed(size_bytes);
    }

    static bool is_leaf(const at::Tensor& tensor) {
        if (!tensor.requires_grad()) return false;
        return !torch::autograd::impl::get_autograd_meta(tensor)->grad_fn_;
    }

    void run_locked(const c10::OperatorHandle& op, const Operator& traits, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack, Lock& lock) {
        contents_.notice_ends_in_time();
        const auto count = static_cast<std::size_t>(traits.arguments);
        const Arguments arguments(stack->data() + (stack->size() - count), count);
        bool are_plain = true;
        each_tensor(arguments.begin(), arguments.end(), [&](const at::Tensor& tensor) {
            are_plain = are_plain && is_plain(tensor);
            meet(tensor);
        });
        if (!are_plain) return run_outside(op, traits, keys, stack, arguments, lock);
        about_to_write(traits, arguments);
        Noted noted(contents_, op, traits, keys, arguments);
        Call& call = *noted.call;
        if (traits.draws) draw(call, arguments);
        const bool all_there =
            noted.unread.empty() &&
            std::all_of(call.reads.begin(), call.reads.end(),
                        [](const Read& read) { return read.content->is_resident; });
        if (all_there) {
            const Pinned pinned(call, ledger_);
            timed(op, keys, stack, lock);
            record(traits, noted, stack);
        } else {
            Held held = repeater_.hold(call);
            for (auto& [content, storage] : noted.unread) held.lend_memory(*content, *storage);
            timed(op, keys, stack, lock);
            record(traits, noted, stack);
        }
        pool_.sweep();
    }

    // Contents that an operator of the program reads, all of them resident.
    class Pinned {
    public:
        Pinned(Call& call, const Ledger& ledger) : call_(call) {
            for (Read& read : call_.reads) read.content->pin(ledger.clock(), ledger.operators());
        }
        Pinned(const Pinned&) = delete;
        ~Pinned() {
            for (Read& read : call_.reads) read.content->unpin();
        }

    private:
        Call& call_;
    };

    // Threads of the kernel may ask for room: the lock is open meanwhile.
    void timed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
               Lock& lock) {
        const std::int64_t started = ledger_.moment();
        lock.unlock();
        try {
            op.redispatchBoxed(keys, stack);
        } catch (...) {
            lock.lock();
            ledger_.computed_since(started);
            throw;
        }
        lock.lock();
        ledger_.computed_since(started);
    }

    // Runs an operator on tensors of another kind: its arguments stay.
    void run_outside(const c10::OperatorHandle& op, const Operator& traits,
                     c10::DispatchKeySet keys, torch::jit::Stack* stack, Arguments arguments,
                     Lock& lock) {
        each_tensor(arguments.begin(), arguments.end(), [&](const at::Tensor& tensor) {
            Content* known = is_plain(tensor) ? contents_.of(storage_of(tensor)) : nullptr;
            if (known) settled_.settle(known);
        });
        about_to_write(traits, arguments);
        timed(op, keys, stack, lock);
    }

    // Contents that an operator overwrites and that are lost must not be needed again.
    void about_to_write(const Operator& traits, Arguments arguments) {
        if (traits.written.empty() && traits.statistics.empty()) return;
        if (trains(traits, arguments))
            for (int position : traits.statistics) {
                const c10::IValue& value = arguments[static_cast<std::size_t>(position)];
                each_tensor(&value, &value + 1, [&](const at::Tensor& tensor) {
                    if (!is_plain(tensor)) return;
                    settled_.settle(&contents_.content_in(storage_of(tensor)));
                });
            }
        each_overwritten(traits, arguments, [&](const at::Tensor& tensor) {
            if (!is_plain(tensor)) return;
            c10::StorageImpl* storage = storage_of(tensor);
            Content& content = contents_.content_in(storage);
            if (!content.maker) settled_.protect_readers(&content, storage);
        });
    }

    // Remembers how the results were computed, if that can be done again.
    void record(const Operator& traits, Noted& noted, torch::jit::Stack* stack) {
        const c10::IValue* end = stack->data() + stack->size();
        const c10::IValue* first = end - traits.returns;
        Call& call = *noted.call;
        bool are_plain = true;
        c10::SmallVector<c10::StorageImpl*, 4> changed;
        for (const Storage& storage : noted.written) changed.push_back(storage.get());
        std::int64_t size_bytes = 0;
        for (const Read& read : call.reads) size_bytes += read.content->size_bytes;
        each_tensor(first, end, [&](const at::Tensor& tensor) {
            if (!is_plain(tensor)) {
                are_plain = false;
                return;
            }
            c10::StorageImpl* storage = storage_of(tensor);
            if (!tensor.is_cpu() || !storage->nbytes() || contents_.of(storage) ||
                std::find(changed.begin(), changed.end(), storage) != changed.end())
                return;
            changed.push_back(storage);
            size_bytes += static_cast<std::int64_t>(storage->nbytes());
        });
        if (!are_plain) {  // it may be a view of an argument
            for (Read& read : call.reads) settled_.settle(read.content);
            return;
        }
        const std::int64_t cost = kFixedCost + traits.weight * size_bytes;
        ledger_.ran_first(cost);
        if (changed.empty()) return;
        call.cost = cost;
        call.with_grad = c10::GradMode::is_enabled();
        if (noted.repeats) {
            if (traits.returns == 1 && first->isTensor()) noted.fix(traits, first->toTensor());
            call.link();
        }
        const bool is_backward = !call.with_grad && in_backward();
        for (c10::StorageImpl* storage : changed) {
            Ref<Content> content = new Content(static_cast<std::int64_t>(storage->nbytes()),
                                               noted.repeats ? noted.call : nullptr, storage);
            content->is_backward = is_backward;
            content->is_blank = traits.makes_blank;
            content->used_at = ledger_.clock();
            content->last_op = ledger_.operators();
            if (noted.repeats) call.outputs.push_back(content.get());
            contents_.put(storage, content);
        }
    }

    // Notes the generator of a call and its state; states alike are kept once.
    void draw(Call& call, Arguments arguments) {
        call.drawn_from = at::detail::getDefaultCPUGenerator();
        for (const c10::IValue& value : arguments)
            if (value.isGenerator()) call.drawn_from = value.toGenerator();
        at::Tensor state = call.drawn_from->get_state();
        const bool is_last = last_state_.defined() && state.nbytes() == last_state_.nbytes() &&
                             std::memcmp(state.const_data_ptr(), last_state_.const_data_ptr(),
                                         state.nbytes()) == 0;
        if (!is_last) last_state_ = std::move(state);
        call.state = last_state_;
    }

    template <class Act>
    void or_exceed(Act act) {
        try {
            act();
        } catch (const c10::Error& error) {
            if (!is_refusal(error)) throw;
            refused_ = repeater_.take_refused();
            outside_.exceeded("bringing a tensor back");
        }
    }

    std::recursive_mutex mutex_;
    Outside outside_;
    Ledger ledger_;
    Pool pool_;
    Contents contents_;
    Repeater repeater_;
    Settled settled_;
    std::string refused_;
    at::Tensor last_state_;
    std::int64_t ended_bytes_ = 0;
    bool has_failed_ = false;
};

}  // namespace tightfit::online
