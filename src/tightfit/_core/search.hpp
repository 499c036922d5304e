// Greedy descent below the budget and large-neighbourhood search over a schedule.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "random.hpp"
#include "schedule.hpp"

namespace tightfit {

// How the search perturbs and repairs; the defaults suit graphs of a few hundred ops.
struct Settings {
    int drop_candidates = 24;  // residents tried per step of `relieve`
    int fill_limit = 200;  // recomputations tried per pass of `fill`
    int relieve_steps = 200;
    int window = 0;  // widest run of values perturbed together; 0: by the size of the graph
    bool local_fill = false;  // `fill` looks only near the last change
    bool batch = false;  // `relieve` applies the best quarter of its candidates at once
    double noise = 0.3;  // sigma of the log-normal noise on scores
};

enum class Relief { fits, stuck, out_of_time };

struct Limits {
    double seconds;
    std::int64_t iterations;  // < 0: no limit; else seconds are ignored
};

class Search {
public:
    Search(Schedule& schedule, std::uint64_t seed, Settings settings);

    // Drop values at the fullest stage, the cheapest per byte of overflow first, until the
    // schedule fits, no drop helps, or time or steps are up.
    Relief relieve(int candidates, int steps, bool batch, double seconds);
    // Keep results of recomputations wherever there is room, the most expensive per byte first,
    // until nothing helps or time is up.
    void fill(int passes, int limit, bool local, double seconds);
    // First plan: relieve with all candidates, then fill.
    Relief descend(double seconds);
    // Simulated annealing over perturb-relieve-fill steps; leaves the best schedule loaded.
    // Returns the number of iterations done.
    std::int64_t improve(Limits limits, double hot, double cold, Cost target);

private:
    using Clock = std::chrono::steady_clock;
    struct Scored {
        double score;
        int first, second;
        bool operator<(const Scored& other) const {
            if (score != other.score) return score < other.score;
            return first != other.first ? first < other.first : second < other.second;
        }
    };

    void perturb();
    void perturb_choices(int count);
    void drop_random(int count);
    void retain_random(int count);
    void drop_window();
    void retain_window();
    void collect_choosers();
    void take(const Branch& branch, bool keep);
    void take_random(const Choice& choice);
    void take_best(const Choice& choice);
    bool droppable(int value, int stage) const;
    void residents(int stage, int wanted, std::vector<int>& found);
    void score_drops(int stage, const std::vector<int>& values);
    void recomputations(bool local, std::vector<Scored>& events);
    bool fill_once(int limit, bool local, Clock::time_point start, double seconds);
    int window_end(int from);

    Schedule& schedule_;
    Random random_;
    Settings settings_;
    std::vector<int> candidates_;  // values worth dropping, by birth
    std::vector<int> births_;  // of the candidates
    std::vector<Choice> choosers_;  // ops with several alternatives, and linked ones, by op
    std::vector<Scored> scored_;
};

}  // namespace tightfit
