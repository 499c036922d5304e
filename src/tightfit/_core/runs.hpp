// Sets of stages, one per item, each held as sorted runs that neither touch nor overlap. Most items
// have one or two, so that memory and time do not grow with the number of stages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tightfit {

struct Run {
    int first, last;
};

class Runs {
public:
    void reset(int items) {
        items_.resize(items);
        for (auto& runs : items_) runs.clear();
    }

    const std::vector<Run>& of(int item) const { return items_[item]; }

    bool get(int item, int stage) const {
        const auto& runs = items_[item];
        const std::size_t at = position(runs, stage);
        return at < runs.size() && runs[at].first <= stage;
    }

    void set(int item, int stage, bool on) { fill(item, stage, stage, on); }

    // Set stages first..last of an item.
    void fill(int item, int first, int last, bool on) {
        if (first > last) return;
        if (on)
            insert(items_[item], first, last);
        else
            erase(items_[item], first, last);
    }

    // First set stage >= stage, or `none`.
    int next(int item, int stage, int none) const {
        const auto& runs = items_[item];
        const std::size_t at = position(runs, stage);
        return at < runs.size() ? std::max(stage, runs[at].first) : none;
    }

    // Last set stage <= stage, or -1.
    int previous(int item, int stage) const {
        const auto& runs = items_[item];
        const std::size_t at = position(runs, stage);
        if (at < runs.size() && runs[at].first <= stage) return stage;
        return at > 0 ? runs[at - 1].last : -1;
    }

    // The run that holds a set stage.
    Run around(int item, int stage) const {
        const auto& runs = items_[item];
        return runs[position(runs, stage)];
    }

private:
    static constexpr std::size_t kShort = 12;  // below, walking is faster than halving

    // First run that ends at the stage or later.
    static std::size_t position(const std::vector<Run>& runs, int stage) {
        std::size_t at = 0;
        if (runs.size() > kShort) {
            const auto found = std::lower_bound(
                runs.begin(), runs.end(), stage,
                [](const Run& run, int wanted) { return run.last < wanted; });
            return found - runs.begin();
        }
        while (at < runs.size() && runs[at].last < stage) ++at;
        return at;
    }

    static void insert(std::vector<Run>& runs, int first, int last) {
        const std::size_t at = position(runs, first - 1);
        std::size_t end = at;
        for (; end < runs.size() && runs[end].first <= last + 1; ++end) {
            first = std::min(first, runs[end].first);
            last = std::max(last, runs[end].last);
        }
        if (end == at) {
            runs.insert(runs.begin() + at, {first, last});
            return;
        }
        runs[at] = {first, last};
        runs.erase(runs.begin() + at + 1, runs.begin() + end);
    }

    static void erase(std::vector<Run>& runs, int first, int last) {
        std::size_t at = position(runs, first);
        if (at == runs.size() || runs[at].first > last) return;
        const Run head{runs[at].first, first - 1};
        std::size_t end = at;
        while (end < runs.size() && runs[end].last <= last) ++end;
        Run tail{0, -1};
        if (end < runs.size() && runs[end].first <= last) tail = {last + 1, runs[end++].last};
        const bool keeps_head = head.first <= head.last, keeps_tail = tail.first <= tail.last;
        if (keeps_head && keeps_tail && end == at + 1) {
            runs[at] = head;
            runs.insert(runs.begin() + at + 1, tail);
            return;
        }
        if (keeps_head) runs[at++] = head;
        if (keeps_tail) runs[at++] = tail;
        runs.erase(runs.begin() + at, runs.begin() + end);
    }

    std::vector<std::vector<Run>> items_;
};

}  // namespace tightfit
