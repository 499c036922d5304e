// Union-find over evicted storages; `eviction/classes.py` says what a class is.
#pragma once

#include <cstdint>
#include <vector>

namespace tightfit {

class EvictedClasses {
public:
    int add(std::int64_t cost) {
        parent_.push_back(static_cast<int>(parent_.size()));
        cost_.push_back(cost);
        return parent_.back();
    }

    int root(int node) {
        ++looks_;
        for (; parent_[node] != node; ++looks_) node = parent_[node] = parent_[parent_[node]];
        return node;
    }

    void join(int first, int second) {
        first = root(first);
        second = root(second);
        if (first == second) return;
        parent_[second] = first;
        cost_[first] += cost_[second];
    }

    void leave(int node, std::int64_t cost) { cost_[root(node)] -= cost; }
    std::int64_t cost(int root) const { return cost_[root]; }
    std::int64_t looks() const { return looks_; }

private:
    std::vector<int> parent_;
    std::vector<std::int64_t> cost_;
    std::int64_t looks_ = 0;
};

}  // namespace tightfit
