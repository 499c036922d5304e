// References that are counted without atomics: a region's history changes under one lock.
#pragma once

#include <utility>
#include <vector>

namespace tightfit::online {

struct Counted {
    virtual ~Counted() = default;
    int references = 0;
};

// Frees objects without references, one after the other: objects they referred to may follow, and
// chains of calls are longer than the stack.
inline void end(Counted* last) {
    static std::vector<Counted*> ending;
    static bool is_at_work = false;
    ending.push_back(last);
    if (is_at_work) return;
    is_at_work = true;
    while (!ending.empty()) {
        Counted* next = ending.back();
        ending.pop_back();
        delete next;
    }
    is_at_work = false;
}

template <class T>
class Ref {
public:
    Ref() = default;
    Ref(T* to) : to_(to) {
        if (to_) ++to_->references;
    }
    Ref(const Ref& other) : Ref(other.to_) {}
    Ref(Ref&& other) noexcept : to_(std::exchange(other.to_, nullptr)) {}
    Ref& operator=(Ref other) noexcept {
        std::swap(to_, other.to_);
        return *this;
    }
    ~Ref() {
        if (to_ && --to_->references == 0) end(to_);
    }

    T* get() const { return to_; }
    T* operator->() const { return to_; }
    T& operator*() const { return *to_; }
    explicit operator bool() const { return to_ != nullptr; }

private:
    T* to_ = nullptr;
};

}  // namespace tightfit::online
