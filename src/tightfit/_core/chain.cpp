#include "chain.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tightfit {

namespace {
constexpr double kNever = 1e300;
}

ChainTable::ChainTable(std::vector<ChainSegment> segments, std::vector<int> boundary_units,
                       int units)
    : segments_(std::move(segments)), boundary_units_(std::move(boundary_units)), units_(units) {
    const std::size_t count = segments_.size();
    if (units < 1 || boundary_units_.size() != count * (count + 1))
        throw std::invalid_argument("the chain's tables have the wrong size");
    stored_.assign(count * count * (units + 1), {kNever, impossible});
    passing_ = stored_;
    for (std::size_t length = 1; length <= count; ++length)
        for (std::size_t first = 0; first + length <= count; ++first)
            fill(static_cast<int>(first), static_cast<int>(first + length - 1));
}

ChainTable::Cell* ChainTable::row(bool stored, int first, int last) {
    auto& table = stored ? stored_ : passing_;
    return &table[(static_cast<std::size_t>(first) * segments_.size() + last) * (units_ + 1)];
}

const ChainTable::Cell* ChainTable::row(bool stored, int first, int last) const {
    return const_cast<ChainTable*>(this)->row(stored, first, last);
}

double ChainTable::cost(bool stored, int first, int last, int units) const {
    return row(stored, first, last)[units].cost;
}

int ChainTable::decision(bool stored, int first, int last, int units) const {
    return row(stored, first, last)[units].decision;
}

void ChainTable::fill(int first, int last) {
    if (first == last) {
        fill_leaf(first);
    } else {
        fill_splits(first, last);
        fill_options(first, last);
    }
    if (first > 0) fill_store(first, last);
}

void ChainTable::fill_leaf(int segment) {
    const ChainSegment& info = segments_[segment];
    Cell* stored = row(true, segment, segment);
    Cell* passing = row(false, segment, segment);
    for (int m = info.backward_units; m <= units_; ++m) stored[m] = {info.inner_cost, leaf};
    for (int m = info.backward_units + info.entry_units; m <= units_; ++m)
        passing[m] = {info.inner_cost, leaf};
}

// Run the first segments forward without keeping anything, store the values before segment
// `split`, handle the rest, then come back to the first segments.
void ChainTable::fill_splits(int first, int last) {
    Cell* cells = row(true, first, last);
    int transient = 0;
    double forward = 0;
    for (int split = first + 1; split <= last; ++split) {
        const int held =
            split - 1 > first ? boundary_units_[first * (segments_.size() + 1) + split - 1] : 0;
        transient = std::max(transient, segments_[split - 1].forward_units + held);
        forward += segments_[split - 1].forward_cost;
        const int kept = boundary_units_[first * (segments_.size() + 1) + split];
        const Cell* rest = row(true, split, last);
        const Cell* back = row(true, first, split - 1);
        for (int m = std::max(kept, transient + segments_[last].gradient_units); m <= units_; ++m) {
            const double cost = forward + rest[m - kept].cost + back[m].cost;
            if (cost < cells[m].cost) cells[m] = {cost, split};
        }
    }
}

// Keep part of the first segment for its backward range and go on.
void ChainTable::fill_options(int first, int last) {
    const ChainSegment& info = segments_[first];
    const Cell* rest = row(false, first + 1, last);
    const int forward = info.forward_units + segments_[last].gradient_units;
    const auto take = [&](Cell* cells, const std::vector<KeepOption>& options, int backward,
                          int tag) {
        for (int k = 0; k < static_cast<int>(options.size()); ++k)
            for (int m = std::max({options[k].units, backward, forward}); m <= units_; ++m) {
                const double cost = options[k].cost + rest[m - options[k].units].cost;
                if (cost < cells[m].cost) cells[m] = {cost, tag + k};
            }
    };
    take(row(true, first, last), info.options, info.backward_units, keep);
    take(row(false, first, last), info.closed_options, info.backward_units + info.entry_units,
         keep_closed);
}

void ChainTable::fill_store(int first, int last) {
    const int bytes = boundary_units_[(first - 1) * (segments_.size() + 1) + first];
    const Cell* stored = row(true, first, last);
    Cell* passing = row(false, first, last);
    for (int m = bytes; m <= units_; ++m)
        if (stored[m - bytes].cost < passing[m].cost)
            passing[m] = {stored[m - bytes].cost, store};
}

}  // namespace tightfit
