// The clock, which runs by costs and not by time, counts of events, and where time went.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

namespace tightfit::online {

inline std::int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Counts of events, in the order in which `Ledger.add` of ledger.py takes them.
struct Counts {
    std::int64_t operators = 0, evictions = 0, again = 0;
    std::int64_t all_ns = 0, first_ns = 0, again_ns = 0, scoring_ns = 0, search_ns = 0;
};

class Ledger {
public:
    explicit Ledger(double most_again) : most_again_(most_again) {}

    std::int64_t clock() const { return clock_; }
    std::int64_t operators() const { return operators_; }

    // Counts since this was asked last.
    Counts take_counts() {
        taken_search_ns_ += counts_.search_ns;
        return std::exchange(counts_, {});
    }

    // The time now, less the time of searches.
    std::int64_t moment() const { return now_ns() - counts_.search_ns - taken_search_ns_; }

    void ran_first(std::int64_t cost) {
        ++operators_;
        ++counts_.operators;
        clock_ += cost;
        step_cost_ += cost;
    }
    void ran_again(std::int64_t cost, std::int64_t started) {
        ++counts_.again;
        counts_.again_ns += moment() - started;
        clock_ += cost;
        again_cost_ += cost;
    }
    void evicted() { ++counts_.evictions; }
    void computed_since(std::int64_t started) { counts_.first_ns += moment() - started; }
    void inside_since(std::int64_t started_ns) { counts_.all_ns += now_ns() - started_ns; }
    void searched_since(std::int64_t started_ns, std::int64_t scoring_ns) {
        counts_.search_ns += now_ns() - started_ns;
        counts_.scoring_ns += scoring_ns;
    }

    // How often the step's own cost was spent on computing again, where that is beyond the limit.
    double thrashes() const {
        const auto own = static_cast<double>(step_cost_ > last_step_ ? step_cost_ : last_step_);
        const auto again = static_cast<double>(again_cost_);
        return again > most_again_ * own ? again / (own > 0 ? own : 1) : 0;
    }
    void end_step() {
        last_step_ = step_cost_;
        step_cost_ = again_cost_ = 0;
    }

private:
    Counts counts_;
    std::int64_t operators_ = 0, taken_search_ns_ = 0;
    double most_again_;
    std::int64_t clock_ = 1;
    std::int64_t step_cost_ = 0, again_cost_ = 0, last_step_ = 0;
};

}  // namespace tightfit::online
