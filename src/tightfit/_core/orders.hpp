// Orders in which the ops of a step, each run once, need little memory (docs/search.md, "Orders").
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "problem.hpp"

namespace tightfit {

using Order = std::vector<int>;  // ops in the order in which they run

// Ops in groups that run one after the other, numbered in one valid order; within its group an op
// may run anywhere after ops that it has to follow.
class OrderProblem {
public:
    // A value lives from the op that writes it to the last one that reads it, and at least to the
    // end of a group (-1: of none). Returns its number.
    int add_value(Bytes size, int kept_group);

    // `extra`: bytes that the op needs only while it runs, negative by overwritten bytes.
    // `after`: earlier ops that it follows. Returns its number.
    int add_op(int group, std::vector<int> reads, std::vector<int> writes, Bytes extra,
               std::vector<int> after);

    int op_count() const { return static_cast<int>(ops_.size()); }

    // The most bytes alive in an order.
    Bytes peak(const Order& order) const;

    // Bytes that every order has alive between two groups: the quick part of `floor`.
    Bytes alive_between_groups() const;

    // Bytes that every order has alive at one time: between two groups, or while an op runs, what ops certainly before it
    // have written for ops certainly after it.
    Bytes floor() const;

    // List scheduling: of the ops that may come next, the one that leaves the fewest bytes alive;
    // from the first op to the last, or from the last one back.
    Order scheduled_forwards() const;
    Order scheduled_backwards() const;

    // Local moves from an order on: until its peak is at most `enough`, or time or moves are over.
    // The result never has a higher peak.
    Order lowered(const Order& order, Bytes enough, double seconds, std::int64_t moves,
                  std::uint64_t seed) const;

private:
    friend class OrderWalk;
    friend class OrderList;
    friend class OrderSearch;

    std::vector<std::vector<Mask>> predecessors() const;

    // The position of the first op of a group.
    int group_begin(int group) const { return group > 0 ? group_end_[group - 1] : 0; }

    struct Value {
        Bytes size;
        int kept_group;
        int writer = -1;
        std::vector<int> readers;
    };
    struct Op {
        int group;
        std::vector<int> reads, writes;
        Bytes extra;
        std::vector<int> after, before;  // ops that it follows, and that follow it
    };

    std::vector<Value> values_;
    std::vector<Op> ops_;
    std::vector<int> group_end_;  // the position after the last op of each group
    std::vector<Bytes> kept_bytes_;  // by the group to whose end they are kept
};

}  // namespace tightfit
