// Recursive checkpointing over the segments of a chain (docs/search.md, "Chains").
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tightfit {

// Values that may be kept of a segment between its forward and its backward range, in units of
// memory.
struct KeepOption {
    int units;
    double cost;  // of the forward pass that makes it and of later recomputation
};

struct ChainSegment {
    double forward_cost;  // from the values at its start to those at its end
    double inner_cost;  // of computing again everything its backward range needs
    int backward_units;  // peak of its backward range
    int entry_units;  // values before it that its backward range needs
    int forward_units;  // peak of its forward pass
    int gradient_units;  // gradients alive when its backward range begins
    std::vector<KeepOption> options;  // with the values at its start stored elsewhere
    std::vector<KeepOption> closed_options;  // that need nothing from before the segment
};

// Cheapest handling of segments first..last for every amount of memory, with the values at the
// start stored (`stored`) or only alive at the beginning (`passing`).
class ChainTable {
public:
    // boundary_units[s * (segments + 1) + e]: values at the start of e made after the start of s.
    ChainTable(std::vector<ChainSegment> segments, std::vector<int> boundary_units, int units);

    enum Decision : int {
        impossible = -2,
        leaf = -1,  // recompute the segment when its backward range begins
        store = -3,  // store the values at the start
        keep = 10000,  // + option: keep it, and go on with the next segment
        keep_closed = 20000,  // + option
    };  // else: the segment before which values are stored next

    double cost(bool stored, int first, int last, int units) const;
    int decision(bool stored, int first, int last, int units) const;
    int units() const { return units_; }

private:
    struct Cell {
        double cost;
        int decision;
    };

    Cell* row(bool stored, int first, int last);
    const Cell* row(bool stored, int first, int last) const;
    void fill(int first, int last);
    void fill_leaf(int segment);
    void fill_splits(int first, int last);
    void fill_options(int first, int last);
    void fill_store(int first, int last);

    std::vector<ChainSegment> segments_;
    std::vector<int> boundary_units_;
    int units_;
    std::vector<Cell> stored_, passing_;
};

}  // namespace tightfit
