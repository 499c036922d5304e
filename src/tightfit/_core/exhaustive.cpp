#include "exhaustive.hpp"

#include <algorithm>
#include <queue>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

namespace tightfit {

namespace {

using Alive = std::uint64_t;
constexpr std::uint64_t kAliveMask = (std::uint64_t{1} << kMostExhaustiveValues) - 1;

class PathSearch {
public:
    PathSearch(const Problem& problem, Bytes budget) : problem_(problem), budget_(budget) {
        if (problem.value_count() > kMostExhaustiveValues || problem.op_count() >= 1 << 20)
            throw std::invalid_argument("too many values for an exhaustive search");
        expiring_.assign(problem.op_count(), 0);
        for (int id = 0; id < problem.value_count(); ++id) {
            const int until = problem.values[id].kept_until;
            if (until >= 0 && until < problem.op_count()) expiring_[until] |= Alive{1} << id;
            if (until < 0) free_ |= Alive{1} << id;
        }
    }

    Exhaustive run(std::int64_t most_states) {
        reach(0, 0, 0, {-1, 0, 0});
        std::int64_t states = 0;
        while (!queue_.empty()) {
            const auto [cost, key] = queue_.top();
            queue_.pop();
            if (cost > best_[key].cost) continue;
            const int done = static_cast<int>(key >> kMostExhaustiveValues);
            if (done == problem_.op_count()) return {true, true, cost, path(key)};
            if (++states > most_states) return {false, false, 0, {}};
            from_ = key;
            expand(done, key & kAliveMask, cost);
        }
        return {true, false, 0, {}};
    }

private:
    struct Step {
        Cost cost;
        std::uint64_t parent;
        Computed computed;  // op -1: nothing was computed
    };

    void expand(int done, Alive alive, Cost cost) {
        for (Alive rest = alive & free_; rest != 0; rest &= rest - 1)
            reach(done, alive & ~(rest & -rest), cost, {-1, 0, 0});
        const Op& next = problem_.ops[done];
        for (int a = 0; a < static_cast<int>(next.alternatives.size()); ++a)
            if (next.alternatives[a].first) compute(done, done, a, alive, cost);
        if (!next.required) reach(done + 1, alive & ~expiring_[done], cost, {-1, 0, 0});
        for (int op = 0; op < done; ++op) {
            if (!problem_.may_recompute(op, done)) continue;
            const Op& node = problem_.ops[op];
            for (int a = 0; a < static_cast<int>(node.alternatives.size()); ++a)
                if (node.alternatives[a].again) compute(done, op, a, alive, cost);
        }
    }

    void compute(int done, int op, int number, Alive alive, Cost cost) {
        const Alternative& way = problem_.ops[op].alternatives[number];
        for (int value : way.reads)
            if (!(alive >> value & 1)) return;
        Alive written = 0, states = 0;
        Bytes second = 0;
        for (int value : way.writes) {
            const Alive bit = Alive{1} << value;
            if (problem_.values[value].state)
                states |= bit;
            else
                written |= bit;
            if (alive & bit) second += problem_.values[value].size;
        }
        for (int k = 0; k < static_cast<int>(way.options.size()); ++k)
            for (const Alive held : {Alive{0}, states}) {
                run_option(done, op, {op, number, k}, alive, alive | written | held, second, cost);
                if (states == 0) break;
            }
    }

    void run_option(int done, int op, Computed computed, Alive before, Alive after, Bytes second,
                    Cost cost) {
        const Alternative& way = problem_.ops[op].alternatives[computed.alternative];
        const Option& option = way.options[computed.option];
        if (option.overwrites >= 0) {
            const Value& target = problem_.values[option.overwrites];
            const int written = way.writes.front();
            if (target.kept() || before >> written & 1 ||
                target.size != problem_.values[written].size)
                return;
            after &= ~(Alive{1} << option.overwrites);
        }
        if (weigh(after) + second + option.workspace > budget_) return;
        const bool first = op == done;
        reach(done + (first ? 1 : 0), first ? after & ~expiring_[done] : after,
              cost + option.cost, computed);
    }

    Bytes weigh(Alive alive) const {
        Bytes bytes = 0;
        for (; alive != 0; alive &= alive - 1)
            bytes += problem_.values[__builtin_ctzll(alive)].size;
        return bytes;
    }

    void reach(int done, Alive alive, Cost cost, Computed computed) {
        const std::uint64_t key =
            static_cast<std::uint64_t>(done) << kMostExhaustiveValues | alive;
        const auto [place, fresh] = best_.try_emplace(key, Step{cost, from_, computed});
        if (!fresh) {
            if (cost >= place->second.cost) return;
            place->second = {cost, from_, computed};
        }
        queue_.emplace(cost, key);
    }

    std::vector<Computed> path(std::uint64_t key) const {
        std::vector<Computed> steps;
        while (key != 0) {
            const Step& step = best_.at(key);
            if (step.computed.op >= 0) steps.push_back(step.computed);
            key = step.parent;
        }
        std::reverse(steps.begin(), steps.end());
        return steps;
    }

    using Entry = std::pair<Cost, std::uint64_t>;
    const Problem& problem_;
    Bytes budget_;
    std::vector<Alive> expiring_;  // values that end with a stage
    Alive free_ = 0;  // values that may be freed at any time
    std::uint64_t from_ = 0;
    std::unordered_map<std::uint64_t, Step> best_;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue_;
};

}  // namespace

Exhaustive solve_exhaustively(const Problem& problem, Bytes budget, std::int64_t most_states) {
    return PathSearch(problem, budget).run(most_states);
}

}  // namespace tightfit
