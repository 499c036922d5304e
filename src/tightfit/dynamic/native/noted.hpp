// The arguments of a call about to run: contents it reads, contents it overwrites.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "contents.hpp"
#include "operator.hpp"
#include "repeater.hpp"

namespace tightfit::online {

using Arguments = c10::ArrayRef<c10::IValue>;

// Whether a call only writes its running statistics.
inline bool trains(const Operator& traits, Arguments arguments) {
    if (traits.statistics.empty()) return false;
    if (traits.training < 0) return true;
    const c10::IValue& value = arguments[static_cast<std::size_t>(traits.training)];
    return value.isBool() && value.toBool();
}

// Visits the tensors that a call overwrites, its running statistics included.
template <class Do>
void each_overwritten(const Operator& traits, Arguments arguments, Do act) {
    const auto visit = [&](int position) {
        const c10::IValue& value = arguments[static_cast<std::size_t>(position)];
        each_tensor(&value, &value + 1, act);
    };
    for (int position : traits.written) visit(position);
    if (trains(traits, arguments))
        for (int position : traits.statistics) visit(position);
}

class Noted {
public:
    Noted(Contents& contents, const c10::OperatorHandle& op, const Operator& traits,
          c10::DispatchKeySet keys, Arguments arguments)
        : call(new Call(op, traits.name, keys)),
          repeats(traits.repeats && !traits.makes_blank),
          contents_(contents) {
        const bool writes = !traits.written.empty() || !traits.statistics.empty();
        for (std::size_t n = 0; n < arguments.size(); ++n)
            note(arguments[n], static_cast<int>(n),
                 writes ? unread_kind(traits, arguments, static_cast<int>(n)) : Unread::no);
        if (writes)
            each_overwritten(traits, arguments, [&](const at::Tensor& tensor) {
                overwrites(storage_of(tensor));
            });
    }

    // A result computed from nothing has this type, under every later default.
    void fix(const Operator& traits, const at::Tensor& output) {
        if (traits.dtype < 0 || !call->reads.empty()) return;
        c10::IValue& dtype = call->arguments[static_cast<std::size_t>(traits.dtype)];
        if (dtype.isNone()) dtype = static_cast<std::int64_t>(output.scalar_type());
    }

    Ref<Call> call;
    bool repeats;
    c10::SmallVector<Storage, 1> written;  // whose content is computed again, as the call's
    c10::SmallVector<std::pair<Ref<Content>, Storage>, 1> unread;

private:
    static bool has(const std::vector<int>& positions, int position) {
        return std::find(positions.begin(), positions.end(), position) != positions.end();
    }

    static Unread unread_kind(const Operator& traits, Arguments arguments, int position) {
        if (has(traits.statistics, position) && trains(traits, arguments)) return Unread::statistics;
        return traits.replaces && has(traits.written, position) ? Unread::replaced : Unread::no;
    }

    void note(const c10::IValue& value, int position, Unread kind) {
        if (value.isTensor()) {
            const at::Tensor& tensor = value.toTensor();
            if (!tensor.defined()) return call->arguments.push_back(value);
            if (is_number(tensor)) {
                call->numbers.push_back(position);
                return call->arguments.push_back(number_in(tensor));
            }
            call->arguments.emplace_back();
            return argument(tensor, position, kind);
        }
        if (value.isTensorList()) return note_list<at::Tensor>(value.toTensorList(), position);
        if (value.isOptionalTensorList())
            return note_list<std::optional<at::Tensor>>(value.toOptionalTensorList(), position);
        if (holds_more(value)) repeats = false;
        call->arguments.push_back(value);
    }

    // Numbers come as tensors, of which no other code knows: they are kept as numbers.
    static bool is_number(const at::Tensor& tensor) {
        if (!tensor.unsafeGetTensorImpl()->is_wrapped_number() || !tensor.is_cpu()) return false;
        const at::ScalarType type = tensor.scalar_type();
        return type == at::kDouble || type == at::kLong || type == at::kComplexDouble;
    }

    static c10::IValue number_in(const at::Tensor& tensor) {
        if (tensor.scalar_type() == at::kDouble) return *tensor.const_data_ptr<double>();
        if (tensor.scalar_type() == at::kLong) return *tensor.const_data_ptr<std::int64_t>();
        return *tensor.const_data_ptr<c10::complex<double>>();
    }

    // Whether tensors may be hidden in a value.
    static bool holds_more(const c10::IValue& value) {
        return value.isStorage() || value.isObject() || value.isCapsule() || value.isPyObject() ||
               value.isTuple() || value.isGenericDict() ||
               (value.isList() && !value.toListRef().empty() &&
                (value.toListRef()[0].isList() || value.toListRef()[0].isTensor()));
    }

    template <class Item>
    void note_list(const c10::List<Item>& items, int position) {
        c10::List<Item> empty;
        empty.reserve(items.size());
        for (std::size_t n = 0; n < items.size(); ++n) {
            const Item item = items.get(n);
            const at::Tensor* tensor = tensor_of(item);
            if (tensor) place(*tensor, position, static_cast<int>(n));
            empty.push_back(tensor ? Item() : item);
        }
        call->arguments.emplace_back(std::move(empty));
    }

    static const at::Tensor* tensor_of(const at::Tensor& item) {
        return item.defined() ? &item : nullptr;
    }
    static const at::Tensor* tensor_of(const std::optional<at::Tensor>& item) {
        return item && item->defined() ? &*item : nullptr;
    }

    // A place where a content is read, or a blank if that content is not read.
    void argument(const at::Tensor& tensor, int position, Unread kind) {
        if (kind == Unread::no) return place(tensor, position, -1);
        c10::StorageImpl* storage = storage_of(tensor);
        Content& content = contents_.content_in(storage);
        if (kind == Unread::statistics) return blank(tensor, position, content, -1);
        const bool is_whole = tensor.nbytes() == storage->nbytes();
        if (!is_whole || (!content.maker && !content.is_blank)) return place(tensor, position, -1);
        if (written_in(storage) < 0) {
            call->written.push_back({-1, content.size_bytes});
            written.push_back(shared(storage));
            unread.emplace_back(&content, shared(storage));
        }
        blank(tensor, position, content, written_in(storage));
    }

    void place(const at::Tensor& tensor, int position, int item) {
        Content& content = contents_.content_in(storage_of(tensor));
        int read = call->read_of(content);
        if (read < 0) {
            read = static_cast<int>(call->reads.size());
            Read& added = call->reads.emplace_back();
            added.content = &content;
            if (!content.maker) added.kept = shared(storage_of(tensor));
        }
        call->places.push_back(
            {position, item, read, -1, content.size_bytes, Geometry(tensor)});
    }

    void blank(const at::Tensor& tensor, int position, const Content& content, int among) {
        call->places.push_back({position, -1, -1, among, content.size_bytes, Geometry(tensor)});
    }

    int written_in(const c10::StorageImpl* storage) const {
        for (std::size_t n = 0; n < written.size(); ++n)
            if (written[n].get() == storage) return static_cast<int>(n);
        return -1;
    }

    // A content is read and overwritten: without its maker nothing here can be repeated.
    void overwrites(c10::StorageImpl* storage) {
        const Content& content = contents_.content_in(storage);
        const int read = call->read_of(content);
        if (read < 0 || written_in(storage) >= 0) return;
        call->written.push_back({read, content.size_bytes});
        written.push_back(shared(storage));
        if (!content.maker) repeats = false;
    }

    Contents& contents_;
};

}  // namespace tightfit::online
