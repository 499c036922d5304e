// A recorded program as the replay sees it: numbers only, settled once for many replays.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tightfit {

// Consecutive numbers in a table.
struct Span {
    const int* first;
    const int* last;
    const int* begin() const { return first; }
    const int* end() const { return last; }
};

// Lists of numbers of any length, one after the other.
class Lists {
public:
    Lists() : starts_{0} {}
    explicit Lists(const std::vector<std::vector<int>>& lists);
    Span operator[](int n) const {
        return {numbers_.data() + starts_[n], numbers_.data() + starts_[n + 1]};
    }
    Span first_of(int n, int count) const {
        return {numbers_.data() + starts_[n], numbers_.data() + starts_[n] + count};
    }

private:
    std::vector<int> numbers_, starts_;
};

struct RecordedTensor {
    int storage;
    int op;
    bool is_root;  // made together with its storage; else a view of it
};

enum class Event : int { constant, compute, hold, release, backward };

struct Recorded {
    using Pairs = std::vector<std::pair<int, int>>;

    Recorded(std::vector<std::int64_t> storage_bytes, std::vector<RecordedTensor> tensors,
             std::vector<std::int64_t> op_costs, const std::vector<std::vector<int>>& arguments,
             const std::vector<std::vector<int>>& outputs, Pairs occurrences,
             std::vector<int> held);

    int storages() const { return static_cast<int>(bytes.size()); }
    int ops() const { return static_cast<int>(costs.size()); }

    std::vector<std::int64_t> bytes;  // per storage
    std::vector<RecordedTensor> tensors;
    std::vector<std::int64_t> costs;  // per op
    Lists arguments, outputs;  // tensors per op
    Pairs occurrences;  // event, and its op or tensor
    std::vector<int> held;  // tensors, in the order in which they are made resident at the end
    std::vector<std::int64_t> new_bytes;  // per op: of the storages that it makes
    // Neighbours of a storage, in the order in which tensors become known. `fresh` are, for a
    // tensor, the parents that its storage did not have before.
    Lists parents, children, fresh;
    Lists views;  // tensors per storage
    std::vector<char> adds_cost;  // per tensor: the first that its op makes of its storage
};

}  // namespace tightfit
