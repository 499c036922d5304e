// Contents that stay: brought back for good, or about to be written over.
#pragma once

#include <optional>
#include <vector>

#include "contents.hpp"
#include "repeater.hpp"

namespace tightfit::online {

class Settled {
public:
    Settled(Contents& contents, Pool& pool, Repeater& repeater)
        : contents_(contents), pool_(pool), repeater_(repeater) {}

    // So much is about to be overwritten, as parameters are by an optimizer; 0: no longer.
    void expect_writes(std::int64_t size_bytes) { copy_bytes_ = size_bytes; }

    // Brings a content back, to stay: how it was computed is forgotten.
    void settle(Ref<Content> content) {
        if (!content->maker) return;
        repeater_.bring_back(*content);
        Storage storage = content->memory();
        pool_.withdraw(*content);
        content->stay();
        if (!storage) return;
        for (Read* read = content->first; read; read = read->after) read->kept = storage;
    }

    // Makes contents that were computed from an overwritten content independent of it.
    // Those that the program holds are brought back to stay, if they are less than a copy of the
    // content; or else they get a copy of it.
    void protect_readers(Ref<Content> content, c10::StorageImpl* storage) {
        if (!content->first) return;
        const auto held = held_after(*content, std::max(content->size_bytes, copy_bytes_));
        for (const Ref<Content>& other : held) settle(other);
        if (!content->first) return;
        content->move(copy_of(shared(storage)));
        const auto size_bytes = static_cast<std::int64_t>(storage->nbytes());
        contents_.put(storage, new Content(size_bytes, {}, storage));
    }

private:
    // Contents that the program holds, computed from a content; none above so many bytes.
    static std::vector<Ref<Content>> held_after(Content& content, std::int64_t most_bytes) {
        static std::int64_t looks = -1;  // others, of the pool, count upwards
        const std::int64_t look = --looks;
        std::vector<Ref<Content>> found;
        std::vector<Content*> front{&content};
        std::int64_t size_bytes = 0;
        while (!front.empty()) {
            Content& next = *front.back();
            front.pop_back();
            for (Read* read = next.first; read; read = read->after)
                for (Content* output : read->call->outputs) {
                    if (!output || !output->maker || output->look == look) continue;
                    output->look = look;
                    front.push_back(output);
                    if (!output->is_held) continue;
                    size_bytes += output->size_bytes;
                    found.emplace_back(output);
                }
            if (size_bytes > most_bytes) return {};
        }
        return found;
    }

    Contents& contents_;
    Pool& pool_;
    Repeater& repeater_;
    std::int64_t copy_bytes_ = 0;
};

}  // namespace tightfit::online
