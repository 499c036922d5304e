#include "exact.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace tightfit::packing {

namespace {

constexpr int kNodesPerLook = 64;  // at the clock
constexpr std::size_t kSuspects = 8;

}  // namespace

ExactSearch::ExactSearch(const Blocks& blocks, const Overlaps& overlaps, const SearchOrder& order,
                         Bytes capacity)
    : blocks_(blocks), overlaps_(overlaps), renews_loads_(order.renews_loads),
      capacity_(capacity), order_(order.order),
      ids_(order.order), position_(blocks.count()), rank_(blocks.count()),
      is_placed_(blocks.count(), 0), lowest_(blocks.count(), 0), total_(blocks.load),
      crossing_(blocks.load.size(), 0),
      witness_(blocks.load.size(), 0), component_(blocks.load.size(), 0) {
    for (int rank = 0; rank < blocks.count(); ++rank)
        rank_[ids_[rank]] = position_[ids_[rank]] = rank;
    rank_at_start_ = rank_;
    for (int block = 0; block < blocks.count(); ++block)
        for (int s = blocks.begin[block]; s + 1 < blocks.end[block]; ++s) ++crossing_[s];
}

ExactSearch::Answer ExactSearch::run(std::int64_t most_nodes, const Limits& limits) {
    const Component everything{0, blocks_.count(), 0, blocks_.sections()};
    if (!may_fit(everything, kStart)) return Answer::impossible;
    frames_.push_back({everything, kStart, 0, 0, false});  // the components of the whole
    split(everything);
    Signal signal = Signal::solved;  // begin with the first component
    for (std::int64_t nodes = 0; !frames_.empty();) {
        Frame& frame = frames_.back();
        if (signal == Signal::solved) {
            if (waiting_.size() > frame.waiting) {
                const Component next = waiting_.back();
                waiting_.pop_back();
                if (renews_loads_) renew_ranks(next);
                push(next, kStart);
                signal = Signal::none;
            } else {
                frames_.pop_back();
            }
            continue;
        }
        if (signal == Signal::failed) {
            undo_to(frame.placed);
            waiting_.resize(frame.waiting);
        }
        if (!frame.has_attempts) {
            frames_.pop_back();
            signal = Signal::failed;
            continue;
        }
        if (++nodes > most_nodes) return Answer::unfinished;
        if (nodes % kNodesPerLook == 0 && limits.is_over()) return Answer::unfinished;
        signal = attempt(frame);
    }
    return signal == Signal::solved ? Answer::found : Answer::impossible;
}

// Place the next candidate of a frame and go on to the rest of its component.
ExactSearch::Signal ExactSearch::attempt(Frame& frame) {
    const int block = next_candidate(frame);
    frame.has_attempts = block >= 0;
    if (block < 0) return Signal::failed;
    const Step step{lowest_[block], rank_[block]};
    frame.after = step;
    if (!suspects_may_fit(frame.blocks, {step.offset, step.rank - 1})) {
        frame.has_attempts = false;  // nor can anything that comes later
        return Signal::failed;
    }
    const Component rest{frame.blocks.first, frame.blocks.last - 1, frame.blocks.begin,
                         frame.blocks.end};
    const int other = ids_[rest.last];
    std::swap(ids_[position_[block]], ids_[rest.last]);
    std::swap(position_[block], position_[other]);
    place(block);
    if (rest.first == rest.last) return Signal::solved;
    if (!may_fit(rest, step)) return Signal::failed;
    if (!is_cut(block)) {
        push(rest, step);
        return Signal::none;
    }
    split(rest);
    return Signal::solved;  // begin with the first component
}

// The next block in the order of building. A block that cannot end below the lowest possible top of
// another need not come before it.
int ExactSearch::next_candidate(const Frame& frame) const {
    Bytes lowest_top = std::numeric_limits<Bytes>::max();
    Step best{std::numeric_limits<Bytes>::max(), 0};
    int found = -1;
    for (int p = frame.blocks.first; p < frame.blocks.last; ++p) {
        const int block = ids_[p];
        const Step step{lowest_[block], rank_[block]};
        lowest_top = std::min(lowest_top, step.offset + blocks_.size[block]);
        if (frame.after < step && step < best) {
            best = step;
            found = block;
        }
    }
    return best.offset < lowest_top ? found : -1;
}

void ExactSearch::place(int block) {
    placed_.push_back({block, raised_.size(), renewed_.size()});
    is_placed_[block] = 1;
    for (int s = blocks_.begin[block]; s < blocks_.end[block]; ++s)
        total_[s] -= blocks_.size[block];
    for (int s = blocks_.begin[block]; s + 1 < blocks_.end[block]; ++s) --crossing_[s];
    const Bytes top = lowest_[block] + blocks_.size[block];
    for (int other : overlaps_.neighbours(block))
        if (!is_placed_[other] && lowest_[other] < top) {
            raised_.emplace_back(other, lowest_[other]);
            lowest_[other] = top;
        }
}

void ExactSearch::undo_to(std::size_t placed) {
    while (placed_.size() > placed) {
        const auto [block, raised, renewed] = placed_.back();
        placed_.pop_back();
        is_placed_[block] = 0;
        for (int s = blocks_.begin[block]; s < blocks_.end[block]; ++s)
            total_[s] += blocks_.size[block];
        for (int s = blocks_.begin[block]; s + 1 < blocks_.end[block]; ++s) ++crossing_[s];
        for (; raised_.size() > raised; raised_.pop_back())
            lowest_[raised_.back().first] = raised_.back().second;
        for (; renewed_.size() > renewed; renewed_.pop_back())
            rank_[renewed_.back().first] = renewed_.back().second;
    }
}

// Whether no section is too full above the least offset that any of its blocks can have.
bool ExactSearch::may_fit(const Component& blocks, Step after) {
    if (!suspects_may_fit(blocks, after)) return false;
    for (int p = blocks.first; p < blocks.last; ++p) {
        const Bytes least = least_offset(ids_[p], after);
        if (least < 0 || least + blocks_.size[ids_[p]] > capacity_) return false;
    }
    for (int section = blocks.begin; section < blocks.end; ++section) {
        if (is_low_enough(witness_[section], section, after)) continue;
        if (section_may_fit(section, after)) continue;
        suspects_.insert(suspects_.begin(), section);
        if (suspects_.size() > kSuspects) suspects_.pop_back();
        return false;
    }
    return true;
}

bool ExactSearch::suspects_may_fit(const Component& blocks, Step after) {
    const auto guilty = std::find_if(suspects_.begin(), suspects_.end(), [&](int section) {
        return blocks.begin <= section && section < blocks.end && !section_may_fit(section, after);
    });
    if (guilty == suspects_.end()) return true;
    std::rotate(suspects_.begin(), guilty, guilty + 1);
    return false;
}

// Whether some block of a section can be low enough; it is the section's witness from then on.
bool ExactSearch::section_may_fit(int section, Step after) {
    for (int block : overlaps_.living_in(section))
        if (is_low_enough(block, section, after)) {
            witness_[section] = block;
            return true;
        }
    return total_[section] == 0;
}

bool ExactSearch::is_low_enough(int block, int section, Step after) const {
    const Bytes highest = capacity_ - total_[section];
    if (is_placed_[block] || lowest_[block] > highest) return false;
    const Bytes least = least_offset(block, after);
    return least >= 0 && least <= highest;
}

// A block whose turn in the order of building is over rests on one that comes later; -1: on none.
Bytes ExactSearch::least_offset(int block, Step after) const {
    if (after < Step{lowest_[block], rank_[block]}) return lowest_[block];
    const int below = smallest_unplaced_neighbour(block);
    return below < 0 ? -1 : after.offset + blocks_.size[below];
}

int ExactSearch::smallest_unplaced_neighbour(int block) const {
    for (int other : overlaps_.neighbours(block))
        if (!is_placed_[other]) return other;
    return -1;
}

// Whether blocks without a place may have fallen apart where this one lives.
bool ExactSearch::is_cut(int block) const {
    const auto first = crossing_.begin() + blocks_.begin[block];
    const auto last = crossing_.begin() + blocks_.end[block] - 1;
    return std::find(first, last, 0) != last;
}

// Let the components of these blocks wait; that of the fewest blocks is taken first.
void ExactSearch::split(const Component& blocks) {
    const std::size_t waiting = waiting_.size();
    waiting_.push_back({0, 0, blocks.begin, blocks.begin});
    for (int section = blocks.begin; section < blocks.end; ++section) {
        component_[section] = static_cast<int>(waiting_.size()) - 1;
        waiting_.back().end = section + 1;
        if (section + 1 < blocks.end && crossing_[section] == 0)
            waiting_.push_back({0, 0, section + 1, section + 1});
    }
    const auto of = [&](int block) -> Component& {
        return waiting_[component_[blocks_.begin[block]]];
    };
    const auto first = ids_.begin() + blocks.first, last = ids_.begin() + blocks.last;
    moved_.assign(first, last);
    for (int block : moved_) ++of(block).last;
    int next = blocks.first;
    for (auto part = waiting_.begin() + waiting; part != waiting_.end(); ++part) {
        part->first = next;
        next += std::exchange(part->last, next);
    }
    for (int block : moved_) {
        position_[block] = of(block).last++;
        ids_[position_[block]] = block;
    }
    const auto is_empty = [](const Component& part) { return part.first == part.last; };
    waiting_.erase(std::remove_if(waiting_.begin() + waiting, waiting_.end(), is_empty),
                   waiting_.end());
    std::stable_sort(waiting_.begin() + waiting, waiting_.end(), [](const auto& a, const auto& b) {
        return a.last - a.first > b.last - b.first;
    });
}

// Rank blocks that fell apart from others by the loads that are left.
void ExactSearch::renew_ranks(const Component& blocks) {
    std::vector<std::pair<Bytes, int>> keys;  // least first: load, rank at the start
    for (int p = blocks.first; p < blocks.last; ++p) {
        const auto load = std::max_element(total_.begin() + blocks_.begin[ids_[p]],
                                           total_.begin() + blocks_.end[ids_[p]]);
        keys.emplace_back(-*load, rank_at_start_[ids_[p]]);
    }
    std::sort(keys.begin(), keys.end());
    for (int p = blocks.first; p < blocks.last; ++p) {
        const int block = order_[keys[p - blocks.first].second];
        renewed_.emplace_back(block, rank_[block]);
        rank_[block] = p - blocks.first;
    }
}

void ExactSearch::push(const Component& blocks, Step after) {
    frames_.push_back({blocks, after, placed_.size(), waiting_.size(), true});
}

}  // namespace tightfit::packing
