// Storages that may be evicted, in the order in which they became so.
#pragma once

#include <cstddef>
#include <vector>

namespace tightfit {

class Pool {
public:
    static constexpr int kGap = -1;

    explicit Pool(int storages) : place_(storages, kGap) {}

    bool contains(int storage) const { return place_[storage] != kGap; }
    int size() const { return size_; }

    // In order, with gaps where a storage has left.
    const std::vector<int>& slots() const { return slots_; }

    void append(int storage) {
        if (contains(storage)) return;
        place_[storage] = static_cast<int>(slots_.size());
        slots_.push_back(storage);
        ++size_;
    }

    void remove(int storage) {
        if (!contains(storage)) return;
        slots_[place_[storage]] = kGap;
        place_[storage] = kGap;
        --size_;
        while (!slots_.empty() && slots_.back() == kGap) slots_.pop_back();
        if (slots_.size() > static_cast<std::size_t>(size_ + size_ / 8 + 32)) close_gaps();
    }

    int nth(int n) const {
        for (const int storage : slots_)
            if (storage != kGap && n-- == 0) return storage;
        return kGap;
    }

private:
    void close_gaps() {
        std::size_t end = 0;
        for (const int storage : slots_) {
            if (storage == kGap) continue;
            place_[storage] = static_cast<int>(end);
            slots_[end++] = storage;
        }
        slots_.resize(end);
    }

    std::vector<int> slots_, place_;
    int size_ = 0;
};

}  // namespace tightfit
