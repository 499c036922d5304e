// The terms of a policy's score, in the simulator and while a program runs.
// `eviction/policies/policy.py` says what each cost counts, `eviction/classes.py` what a class is.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace tightfit {

// The numbers are those of `Cost` in Python.
enum class CostKind : int { none, local, before, around, count, classes, operators, random };

// The evicted storages on one side of a storage: how many, and the sum of their own costs.
struct Reached {
    std::int64_t count = 0, cost = 0;
};

// A storage's cost of one kind, as of now.
template <class Terms, class Storage>
std::int64_t cost_of(CostKind kind, Terms& terms, Storage& storage) {
    switch (kind) {
        case CostKind::none:
        case CostKind::random: return 1;
        case CostKind::local: return terms.own_cost(storage);
        case CostKind::before: return terms.own_cost(storage) + terms.reached_before(storage).cost;
        case CostKind::classes: return terms.own_cost(storage) + terms.cost_of_classes(storage);
        case CostKind::operators: return terms.cost_of_operators(storage);
        case CostKind::around:
        case CostKind::count: break;
    }
    const Reached before = terms.reached_before(storage), after = terms.reached_after(storage);
    if (kind == CostKind::count) return 1 + before.count + after.count;
    return terms.own_cost(storage) + before.cost + after.cost;
}

// The divisor of the cost.
template <class Policy>
double weight_of(const Policy& policy, double bytes, double staleness) {
    const double weight = policy.by_size ? bytes : 1.0;
    return policy.by_staleness ? weight * staleness : weight;
}

// The candidate with the least score is evicted; costs without a weight are not computed.
template <class Cost>
double score_of(double weight, Cost cost) {
    return weight > 0 ? static_cast<double>(cost()) / weight
                      : std::numeric_limits<double>::infinity();
}

// Union-find over evicted storages.
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
