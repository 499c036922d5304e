// One contiguous range of addresses; `tests/support/reference/arena.py` is the same in Python.
#pragma once

#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace tightfit {

class Arena {
public:
    static constexpr int kHole = -1;
    static constexpr std::int64_t kNowhere = -1;

    explicit Arena(std::int64_t size) {
        if (size > 0) add(0, size, kHole);
    }

    std::int64_t free() const { return free_; }

    // The offset of the smallest hole that fits, now its owner's; kNowhere if there is none.
    std::int64_t take(std::int64_t size, int owner) {
        const std::int64_t needed = rounded(size);
        const auto hole = holes_.lower_bound({needed, 0});
        if (hole == holes_.end()) return kNowhere;
        const auto [found, offset] = *hole;
        remove(pieces_.find(offset));
        add(offset, needed, owner);
        if (found > needed) add(offset + needed, found - needed, kHole);
        return offset;
    }

    void give_back(std::int64_t offset) {
        auto piece = pieces_.find(offset);
        std::int64_t begin = offset, size = piece->second.size;
        if (piece != pieces_.begin() && std::prev(piece)->second.owner == kHole) {
            begin = std::prev(piece)->first;
            size += std::prev(piece)->second.size;
            remove(std::prev(piece));
        }
        const auto after = std::next(piece);
        if (after != pieces_.end() && after->second.owner == kHole) {
            size += after->second.size;
            remove(after);
        }
        remove(piece);
        add(begin, size, kHole);
    }

    void hand_to(std::int64_t offset, int owner) { pieces_.at(offset).owner = owner; }

    // Bytes of the holes directly before and after a range.
    std::int64_t free_beside(std::int64_t offset) const {
        const auto piece = pieces_.find(offset);
        std::int64_t free = 0;
        if (piece != pieces_.begin() && std::prev(piece)->second.owner == kHole)
            free += std::prev(piece)->second.size;
        const auto after = std::next(piece);
        if (after != pieces_.end() && after->second.owner == kHole) free += after->second.size;
        return free;
    }

    // Owners whose ranges, with the holes between them, make room at the least sum of costs; empty
    // if there is no such window. A negative cost: the owner may not go.
    template <class Cost>
    std::vector<int> cheapest_window(std::int64_t size, Cost cost) const {
        const std::int64_t needed = rounded(size);
        struct Seen {
            std::int64_t size;
            int owner;
            double cost;
        };
        std::vector<Seen> seen;
        std::vector<int> best;
        double least = 0;
        for (const auto& [offset, piece] : pieces_) {
            const double own = piece.owner == kHole ? 0.0 : cost(piece.owner);
            if (own < 0) {
                seen.clear();
                continue;
            }
            seen.push_back({piece.size, piece.owner, own});
            std::int64_t total = 0;
            std::size_t first = seen.size();
            while (first > 0 && total < needed) total += seen[--first].size;
            if (total < needed) continue;
            seen.erase(seen.begin(), seen.begin() + static_cast<std::ptrdiff_t>(first));
            double sum = 0;
            for (const Seen& each : seen)
                if (each.owner != kHole) sum += each.cost;
            if (!best.empty() && sum >= least) continue;
            least = sum;
            best.clear();
            for (const Seen& each : seen)
                if (each.owner != kHole) best.push_back(each.owner);
        }
        return best;
    }

private:
    struct Piece {
        std::int64_t size;
        int owner;
    };
    using Pieces = std::map<std::int64_t, Piece>;

    static std::int64_t rounded(std::int64_t size) { return (size + 511) / 512 * 512; }

    void add(std::int64_t offset, std::int64_t size, int owner) {
        pieces_[offset] = {size, owner};
        if (owner != kHole) return;
        holes_.insert({size, offset});
        free_ += size;
    }

    void remove(Pieces::iterator piece) {
        if (piece->second.owner == kHole) {
            holes_.erase({piece->second.size, piece->first});
            free_ -= piece->second.size;
        }
        pieces_.erase(piece);
    }

    Pieces pieces_;
    std::set<std::pair<std::int64_t, std::int64_t>> holes_;  // by size, then offset
    std::int64_t free_ = 0;
};

}  // namespace tightfit
