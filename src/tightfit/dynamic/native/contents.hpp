// Which content is in which storage, for as long as the program holds the storage.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <functional>

#include "history.hpp"
#include "pool.hpp"

namespace tightfit::online {

class Contents {
public:
    // Called with the bytes that have ended and were there before the region.
    using Ended = std::function<void(std::int64_t)>;

    Contents(Pool& pool, Ended ended) : pool_(pool), ended_(std::move(ended)) {}

    // This one exists already, and stays where it is.
    void was_before(c10::StorageImpl* storage, std::int64_t allocated_bytes) {
        put(storage, new Content(static_cast<std::int64_t>(storage->nbytes()), {}, storage));
        stored_[storage].before_bytes = allocated_bytes;
    }

    // The content of a storage; null if it is not known.
    Content* of(c10::StorageImpl* storage) const {
        const auto found = stored_.find(storage);
        return found == stored_.end() ? nullptr : found->second.content.get();
    }

    // The content of a storage; a new content stays where it is.
    Content& content_in(c10::StorageImpl* storage) {
        if (Content* known = of(storage)) return *known;
        return put(storage, new Content(static_cast<std::int64_t>(storage->nbytes()), {}, storage));
    }

    // A storage holds something new, or is met for the first time.
    Content& put(c10::StorageImpl* storage, Ref<Content> content) {
        Stored& stored = stored_[storage];
        Ref<Content> old = std::exchange(stored.content, content);
        if (old) {
            content->was_asked = old->was_asked;
            for (Read* read = old->first; read; read = read->after) release_read(*read);
            lost(*old);
        }
        pool_.offer(*content);
        return *content;
    }

    // Catches up with storages that the program has freed, and with contents held by them alone.
    void process_frees() {
        while (notice_some_ends()) {
        }
    }

    // Catches up now and then: as often as costs little for each operator.
    void notice_ends_in_time() {
        if (++calls_since_ > std::max<std::size_t>(64, stored_.size())) notice_some_ends();
    }

    // Contents that are held and could be computed again.
    std::vector<Ref<Content>> computed() const {
        std::vector<Ref<Content>> found;
        for (auto& [storage, stored] : stored_)
            if (stored.content->maker) found.push_back(stored.content);
        return found;
    }

    // The resident bytes that stay for ever, and those that could be evicted.
    std::pair<std::int64_t, std::int64_t> weights() const {
        std::int64_t kept = 0, needed = 0;
        for (auto& [storage, stored] : stored_)
            if (stored.content->is_resident)
                (stored.content->maker ? needed : kept) += stored.content->size_bytes;
        return {kept, needed};
    }

    void clear() {
        for (auto& [storage, stored] : stored_) stored.content->lose_storage();
        stored_.clear();
    }

    // A content that a call reads has memory of its own now.
    static void release_read(Read& read) {
        read.kept.reset();
        read.kept_back.reset();
    }

private:
    struct Stored {
        Ref<Content> content;
        std::int64_t before_bytes = 0;
    };

    // One look at every storage; returns whether any has ended.
    bool notice_some_ends() {
        calls_since_ = 0;
        gone_.clear();
        for (auto& [storage, stored] : stored_)
            if (stored.content->storage.expired()) gone_.push_back(storage);
        std::int64_t before_bytes = 0;
        for (c10::StorageImpl* storage : gone_) {
            const auto found = stored_.find(storage);
            Ref<Content> content = std::move(found->second.content);
            before_bytes += found->second.before_bytes;
            stored_.erase(found);
            lost(*content);
        }
        if (before_bytes) ended_(before_bytes);
        return !gone_.empty();
    }

    void lost(Content& content) {
        if (content.is_private()) return;
        if (content.is_resident) return pool_.ended(content);
        content.lose_storage();
        if (content.maker) content.maker->release_reads();
    }

    Pool& pool_;
    Ended ended_;
    ska::flat_hash_map<c10::StorageImpl*, Stored> stored_;
    std::vector<c10::StorageImpl*> gone_;
    std::size_t calls_since_ = 0;
};

}  // namespace tightfit::online
