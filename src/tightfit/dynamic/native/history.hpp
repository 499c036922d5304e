// The memory of the runtime: contents of storages, and the calls that made them; as `history.py`.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "counted.hpp"
#include "memory.hpp"

namespace tightfit::online {

struct Call;
struct Content;

// A content that a call reads; those of one content form a list.
struct Read {
    Ref<Content> content;
    Call* call = nullptr;
    Storage kept;       // held as long as the call is: it cannot be computed again
    Storage kept_back;  // held while a result of the call is evicted
    Read *before = nullptr, *after = nullptr;
};

// One content of one storage.
struct Content final : Counted {
    Content(std::int64_t size, Ref<Call> maker_, c10::StorageImpl* storage)
        : size_bytes(size), maker(std::move(maker_)), storage(shared(storage)) {}
    ~Content() override;

    const std::int64_t size_bytes;
    Ref<Call> maker;  // the call that computes it; none: it cannot be computed again, and stays
    bool is_backward = false, is_blank = false;
    bool is_resident = true, is_held = true;
    bool was_asked = false;  // whether it is a parameter's content
    int locks = 0, fast_locks = 0;
    std::int64_t used_at = 0, last_op = 0;
    std::int64_t known_cost = -1;  // its cost as found by the pool; -1: to be found
    std::int64_t look = 0;         // the search that has seen it last
    std::int64_t position = -1;    // among contents that may be evicted
    bool is_retired = false;
    int node = -1;  // among the classes of evicted contents
    WeakStorage storage;
    Storage own;
    Read *first = nullptr, *last = nullptr;  // its readers

    Storage memory() const { return own ? own : is_held ? storage.lock() : Storage(); }
    bool is_private() const { return static_cast<bool>(own); }

    void pin(std::int64_t clock, std::int64_t op) {
        used_at = clock;
        last_op = op;
        ++locks;
        ++fast_locks;
    }
    void unpin() {
        --locks;
        --fast_locks;
    }
    void leave() {
        is_resident = false;
        own.reset();
    }
    void lose_storage() {
        is_held = false;
        if (!own) is_resident = false;
    }
    void arrive(Storage memory) {
        is_resident = true;
        own = std::move(memory);
        node = -1;
    }
    void move(Storage memory) {
        is_held = false;
        own = std::move(memory);
    }
    void stay();  // forget how it was computed: it is never evicted again
    void add_reader(Read& read) {
        read.before = last;
        (last ? last->after : first) = &read;
        last = &read;
    }
    void remove_reader(Read& read) {
        (read.before ? read.before->after : first) = read.after;
        (read.after ? read.after->before : last) = read.before;
    }
};

// A tensor argument: a content and the tensor's geometry in it, or any memory if it is not read.
struct Place {
    int argument;
    int item;  // of a list; -1: the argument itself
    int read;  // among the call's; -1: not read
    int written = -1;  // if not read: among contents that the call writes; -1: it is not needed
    std::int64_t size_bytes;
    Geometry geometry;
};

// Memory that a call overwrites: of a content that it also reads, or any.
struct Written {
    int read;  // -1: any
    std::int64_t size_bytes;
};

// An operator that ran, and all that is needed to run it again.
struct Call final : Counted {
    Call(const c10::OperatorHandle& op, const std::string& name_, c10::DispatchKeySet keys_)
        : function(op), name(name_), keys(keys_) {}
    ~Call() override {
        if (!is_linked) return;
        for (Read& read : reads) read.content->remove_reader(read);
    }

    c10::OperatorHandle function;
    const std::string& name;
    c10::DispatchKeySet keys;  // below the interception
    c10::SmallVector<c10::IValue, 4> arguments;  // none in the place of places
    c10::SmallVector<int, 1> numbers;  // arguments that were numbers, though tensors to the kernel
    c10::SmallVector<Place, 2> places;
    c10::SmallVector<Read, 2> reads;  // each content once; they do not move once linked
    c10::SmallVector<Written, 1> written;
    c10::SmallVector<Content*, 1> outputs;  // contents it wrote, then new storages; none if gone
    std::int64_t cost = 0;
    std::int64_t look = 0;
    bool with_grad = false;
    bool is_linked = false;
    std::optional<at::Generator> drawn_from;
    at::Tensor state;  // of the generator, before

    int read_of(const Content& content) const {
        for (std::size_t n = 0; n < reads.size(); ++n)
            if (reads[n].content.get() == &content) return static_cast<int>(n);
        return -1;
    }

    // From now on its contents know it, and contents that cannot be computed again are held.
    void link() {
        is_linked = true;
        for (Read& read : reads) {
            read.call = this;
            Content& content = *read.content;
            content.add_reader(read);
            if (!content.maker && !read.kept) read.kept = content.memory();
        }
    }

    // A result was evicted: its inputs stay while that is so, or are evicted.
    void keep_reads() {
        for (Read& read : reads)
            if (read.content->is_resident && read.content->is_held && !read.kept)
                read.kept_back = read.content->memory();
    }

    void forget_reads() {
        for (Read& read : reads) read.kept_back.reset();
    }

    // A result came back, or is not needed.
    void release_reads() {
        for (Content* output : outputs)
            if (output && !output->is_resident && output->is_held) return;
        forget_reads();
    }
};

inline void Content::stay() {
    if (!maker) return;
    for (Content*& output : maker->outputs)
        if (output == this) output = nullptr;
    maker = {};
}

inline Content::~Content() { stay(); }

}  // namespace tightfit::online
