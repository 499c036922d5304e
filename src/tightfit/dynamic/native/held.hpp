// Contents that are locked, with their storages.
#pragma once

#include <utility>
#include <vector>

#include "pool.hpp"

namespace tightfit::online {

// While others are computed, they may be evicted if nothing else is left: only inputs of a running
// operator must stay.
class Held {
public:
    explicit Held(Pool& pool) : pool_(&pool) {}
    Held(Held&& other) noexcept
        : pool_(other.pool_), locks_(std::exchange(other.locks_, {})) {}
    Held& operator=(Held&&) = delete;
    ~Held() { release(); }

    // Locks a content if it is resident; returns whether it is.
    bool lock(Content& content) {
        Storage memory = content.is_resident ? content.memory() : Storage();
        if (!memory) {
            if (content.is_resident) pool_->ended(content);
            return false;
        }
        Lock* known = find(content);
        if (!known) {
            ++content.locks;
            known = &locks_.emplace_back();
            known->content = &content;
        }
        known->memory = std::move(memory);
        return true;
    }

    // From now on a content may not be evicted.
    void mark_running(Content& content) {
        if (Lock* lock = find(content)) mark_running(*lock);
    }

    void mark_running() {
        for (Lock& lock : locks_) mark_running(lock);
    }

    // Lets a storage whose content is not read be written, whether it has memory or not.
    void lend_memory(Content& content, c10::StorageImpl& storage) {
        if (!lock(content)) {
            fill(storage, *new_memory(content.size_bytes));
            lent_.emplace_back(&content, shared(&storage));
        }
        mark_running(content);
    }

    // Unlocks them; contents that were not written after all have no memory again.
    void release() {
        for (auto& [content, storage] : lent_)
            if (content->is_held) take_memory(*storage);
        lent_.clear();
        std::vector<Lock> locks = std::exchange(locks_, {});
        for (Lock& lock : locks) {
            --lock.content->locks;
            if (lock.is_fast) --lock.content->fast_locks;
            lock.memory.reset();
            if (lock.content->is_private() && !lock.content->locks) pool_->retire(*lock.content);
        }
    }

private:
    struct Lock {
        Ref<Content> content;
        Storage memory;
        bool is_fast = false;
    };

    Lock* find(const Content& content) {
        for (Lock& lock : locks_)
            if (lock.content.get() == &content) return &lock;
        return nullptr;
    }

    static void mark_running(Lock& lock) {
        if (lock.is_fast) return;
        lock.is_fast = true;
        ++lock.content->fast_locks;
    }

    Pool* pool_;
    std::vector<Lock> locks_;
    std::vector<std::pair<Ref<Content>, Storage>> lent_;
};

}  // namespace tightfit::online
