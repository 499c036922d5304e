#include "reach.hpp"

#include <algorithm>
#include <chrono>
#include <queue>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tightfit {

namespace {

using Values = std::vector<int>;  // descending, without repetition

struct State {
    Bytes bottleneck;  // the most bytes alive from here to the op
    Values alive;
    bool operator<(const State& other) const {  // the queue gives the largest first
        if (bottleneck != other.bottleneck) return bottleneck > other.bottleneck;
        return alive > other.alive;
    }
};

struct Hash {
    std::size_t operator()(const Values& values) const {
        std::size_t hash = values.size();
        for (int value : values)
            hash = (hash ^ static_cast<std::size_t>(value)) * 0x9E3779B97F4A7C15ULL;
        return hash;
    }
};

class Search {
public:
    explicit Search(const Problem& problem) : problem_(problem) {
        kept_before_.resize(problem.op_count() + 1, 0);
        std::vector<Bytes> made(problem.op_count(), 0);
        for (const Value& value : problem.values)
            if (value.kept_until >= problem.op_count() && problem.ops[value.producer].required)
                made[value.producer] += value.size;
        for (int op = 0; op < problem.op_count(); ++op)
            kept_before_[op + 1] = kept_before_[op] + made[op];
    }

    Reach run(int op, Bytes floor, std::int64_t most_states, double seconds) {
        const auto start = std::chrono::steady_clock::now();
        expand(Values{}, op, floor);
        std::int64_t states = 0;
        Bytes proven = floor;
        while (!queue_.empty()) {
            const State state = queue_.top();
            queue_.pop();
            proven = std::max(proven, state.bottleneck);
            if (state.alive.empty()) return {proven, true, states};
            if (!closed_.insert(state.alive).second) continue;
            if (++states >= most_states) return {proven, false, states};
            if (states % 256 == 0 &&
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() >
                    seconds)
                return {proven, false, states};
            for (std::size_t k = 0; k < state.alive.size(); ++k) {
                const int producer = problem_.values[state.alive[k]].producer;
                if (k > 0 && problem_.values[state.alive[k - 1]].producer == producer) continue;
                expand(state.alive, producer, state.bottleneck);
            }
        }
        return {proven, true, states};
    }

private:
    // Add the states before an op computes some of the values alive.
    void expand(const Values& alive, int op, Bytes bottleneck) {
        for (const Alternative& way : problem_.ops[op].alternatives) {
            Values before, during;
            for (int value : alive)
                if (std::find(way.writes.begin(), way.writes.end(), value) == way.writes.end())
                    before.push_back(value);
            if (!alive.empty() && before.size() == alive.size()) continue;
            for (int value : way.reads)
                if (!fixed(value)) before.push_back(value);
            tidy(before);
            during = before;
            for (int value : way.writes)
                if (!fixed(value)) during.push_back(value);
            tidy(during);
            const Bytes bytes = weigh(during, op) + least_workspace(way);
            const Bytes most = std::max(bottleneck, bytes);
            if (closed_.count(before) == 0) queue_.push({most, std::move(before)});
        }
    }

    // States of generators are left out, and so are values kept to the end: they are counted apart.
    bool fixed(int value) const {
        return problem_.values[value].state ||
               problem_.values[value].kept_until >= problem_.op_count();
    }

    // Bytes alive, with values kept to the end by the ops that have certainly run.
    Bytes weigh(const Values& values, int op) const {
        Bytes bytes = 0;
        int latest = op;
        for (int value : values) {
            bytes += problem_.values[value].size;
            latest = std::max(latest, problem_.values[value].producer);
        }
        return bytes + kept_before_[latest + 1];
    }

    Bytes least_workspace(const Alternative& way) const {
        Bytes least = way.options.front().workspace;
        for (const Option& option : way.options) {
            const Bytes saved =
                option.overwrites < 0 ? 0 : problem_.values[option.overwrites].size;
            least = std::min(least, option.workspace - saved);
        }
        return least;
    }

    static void tidy(Values& values) {
        std::sort(values.begin(), values.end(), std::greater<int>());
        values.erase(std::unique(values.begin(), values.end()), values.end());
    }

    const Problem& problem_;
    std::vector<Bytes> kept_before_;  // kept to the end, made before an op
    std::priority_queue<State> queue_;
    std::unordered_set<Values, Hash> closed_;
};

}  // namespace

Reach least_bytes(const Problem& problem, int op, Bytes floor, std::int64_t most_states,
                  double seconds) {
    return Search(problem).run(op, floor, most_states, seconds);
}

}  // namespace tightfit
