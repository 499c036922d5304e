// Evaluating one stage: which ops it computes, their cost, how many bytes it holds at most.
#include <algorithm>
#include <limits>

#include "schedule.hpp"

namespace tightfit {

namespace {
constexpr Bytes kFar = std::numeric_limits<Bytes>::max() / 4;
constexpr double kUnreachable = 1e30;  // of a value that may not be computed again
}

void Schedule::evaluate(int stage, Entry& entry, std::vector<Repair>& repairs) const {
    ++epoch_;
    entry.computed.clear();
    entry.cost = 0;
    entry.slack_down = entry.slack_up = kFar;
    close(stage, entry, repairs);
    walk(stage, entry);
}

void Schedule::request(int op) const {
    if (requested_[op] == epoch_) return;
    requested_[op] = epoch_;
    heap_.push_back(op);
    std::push_heap(heap_.begin(), heap_.end());
}

// Collect the ops of the stage from the last to the first: when an op is reached all its readers
// in the stage are known, hence which of its values are needed and who reads a value last.
void Schedule::close(int stage, Entry& entry, std::vector<Repair>& repairs) const {
    heap_.clear();
    if (problem_->ops[stage].required) request(stage);
    for (int value : starts_[stage]) {
        needed_[value] = epoch_;
        request(problem_->values[value].producer);
    }
    while (!heap_.empty()) {
        const int op = heap_.front();
        std::pop_heap(heap_.begin(), heap_.end());
        heap_.pop_back();
        const int chosen = choose(op, stage, repairs);
        if (chosen < 0) continue;
        entry.computed.push_back({op, chosen, 0});
        const Alternative& alternative = problem_->ops[op].alternatives[chosen];
        const int gone = alternative.must_overwrite;
        if (gone >= 0 && resident_.get(gone, stage + 1)) repairs.push_back({gone, stage, false});
        for (int value : alternative.reads) {
            if (read_[value] != epoch_) {
                read_[value] = epoch_;
                last_reader_[value] = op;
            }
            if (resident_.get(value, stage)) continue;
            needed_[value] = epoch_;
            request(problem_->values[value].producer);
        }
    }
    std::reverse(entry.computed.begin(), entry.computed.end());
}

int Schedule::choose(int op, int stage, std::vector<Repair>& repairs) const {
    if (op == stage) return first_choice_[op];
    if (problem_->may_recompute(op, stage)) return choose_again(op, stage, repairs);
    const bool extend = !problem_->ops[stage].crossing;
    for (const Alternative& alternative : problem_->ops[op].alternatives)
        for (int value : alternative.writes)
            if (needed_[value] == epoch_) repairs.push_back({value, stage, extend});
    return -1;
}

bool Schedule::own_reads_resident(const Alternative& alternative, int stage) const {
    for (int value : alternative.own_reads)
        if (!resident_.get(value, stage)) return false;
    return true;
}

// About the cost of a value in a stage: 0 where it exists or is wanted anyway. Needs of several
// values are counted for each of them, the same way for all that are compared.
double Schedule::price_of(int value, int stage) const {
    if (resident_.get(value, stage) || needed_[value] == epoch_) return 0;
    if (priced_[value] == epoch_) return price_[value];
    const int maker = problem_->values[value].producer;
    double least = kUnreachable;
    if (problem_->may_recompute(maker, stage) || maker == stage) {
        const auto& alternatives = problem_->ops[maker].alternatives;
        for (int a = 0; a < static_cast<int>(alternatives.size()); ++a)
            if (alternatives[a].again && problem_->values[value].writers >> a & 1)
                least = std::min(least, price_of_running(maker, a, 0, stage));
    }
    priced_[value] = epoch_;
    return price_[value] = least;
}

// The cost of an alternative with its inputs; `shared`: as do all that are compared.
double Schedule::price_of_running(int op, int number, Mask shared, int stage) const {
    const Alternative& alternative = problem_->ops[op].alternatives[number];
    auto total = static_cast<double>(alternative.least_cost());
    for (int value : alternative.reads) {
        if (shared != 0 && (problem_->readers_of(value, op) & shared) == shared) continue;
        total += price_of(value, stage);
    }
    return std::min(total, kUnreachable);
}

// The alternative of a recomputation: the forced one if it applies, else the cheapest, with its
// inputs, that writes all that is needed and whose own values (saved statistics, a generator's
// state) are resident.
int Schedule::choose_again(int op, int stage, std::vector<Repair>& repairs) const {
    const auto& alternatives = problem_->ops[op].alternatives;
    const int count = static_cast<int>(alternatives.size());
    if (count == 1 && alternatives[0].own_reads.empty()) return 0;
    Mask eligible = 0;
    for (int a = 0; a < count; ++a)
        if (alternatives[a].again) eligible |= Mask{1} << a;
    for (const Alternative& alternative : alternatives)
        for (int value : alternative.writes)
            if (needed_[value] == epoch_) eligible &= problem_->values[value].writers;
    int possible = -1;
    Mask able = 0;
    const auto rank = [&](int a) { return 2 * alternatives[a].least_cost() - (a == first_choice_[op]); };
    for (int a = 0; a < count; ++a) {
        if (!(eligible >> a & 1)) continue;
        if (possible < 0 || rank(a) < rank(possible)) possible = a;
        if (!own_reads_resident(alternatives[a], stage)) continue;
        if (a == again_choice_[op]) return a;
        able |= Mask{1} << a;
    }
    if (able != 0) return cheapest(op, able, stage);
    if (possible >= 0) {
        for (int value : alternatives[possible].own_reads)
            if (!resident_.get(value, stage)) repairs.push_back({value, stage, true});
        return -1;
    }
    for (const Alternative& alternative : alternatives)
        for (int value : alternative.writes)
            if (needed_[value] == epoch_) repairs.push_back({value, stage, true});
    return -1;
}

// Of some alternatives the cheapest with its inputs; if equal, that of the first computation.
int Schedule::cheapest(int op, Mask able, int stage) const {
    const bool only_one = (able & (able - 1)) == 0;
    int best = -1;
    double least = 0;
    for (int a = 0; able >> a != 0; ++a) {
        if (!(able >> a & 1)) continue;
        if (only_one) return a;
        const double price = price_of_running(op, a, able, stage);
        if (best >= 0 && (price > least || (price == least && a != first_choice_[op]))) continue;
        best = a;
        least = price;
    }
    return best;
}

// Run the collected ops in order and follow the bytes alive. A value not resident at the start of
// the next stage is freed after its last reader in this one.
void Schedule::walk(int stage, Entry& entry) const {
    Bytes live = base_.get(stage);
    entry.peak = live;
    for (Computed& computed : entry.computed) {
        const Alternative& alternative =
            problem_->ops[computed.op].alternatives[computed.alternative];
        Bytes temporary = 0;
        for (int id : alternative.writes) {
            const Value& value = problem_->values[id];
            if (value.state && !resident_.get(id, stage + 1)) continue;
            if (resident_.get(id, stage))
                temporary += value.size;
            else
                live += value.size;
        }
        run_option(stage, computed, live + temporary, entry);
        for (int id : alternative.reads)
            if (last_reader_[id] == computed.op && !resident_.get(id, stage + 1) &&
                !problem_->values[id].kept())
                live -= problem_->values[id].size;
        for (int id : alternative.writes) {
            const Value& value = problem_->values[id];
            if (!value.state && read_[id] != epoch_ && !resident_.get(id, stage) &&
                !resident_.get(id, stage + 1) && !value.kept())
                live -= value.size;
        }
    }
}

void Schedule::run_option(int stage, Computed& computed, Bytes live, Entry& entry) const {
    const Alternative& alternative =
        problem_->ops[computed.op].alternatives[computed.alternative];
    const auto& options = alternative.options;
    const auto bytes_of = [&](const Option& option) {
        const Bytes saved =
            option.overwrites < 0 ? 0 : problem_->values[option.overwrites].size;
        return live + option.workspace - saved;
    };
    int chosen = -1;
    Bytes least = kFar;
    if (options.size() == 1) {
        chosen = 0;
        least = bytes_of(options[0]);
    }
    for (int k = 0; chosen < 0 && k < static_cast<int>(options.size()); ++k) {
        if (options[k].overwrites >= 0 && !may_overwrite(stage, computed, options[k])) continue;
        const Bytes bytes = bytes_of(options[k]);
        if (fastest_ || bytes <= budget_) {
            chosen = k;
            least = bytes;
            if (!fastest_) entry.slack_up = std::min(entry.slack_up, budget_ - bytes);
        } else {
            entry.slack_down = std::min(entry.slack_down, bytes - budget_);
            if (bytes < least) {
                least = bytes;
                computed.option = k;
            }
        }
    }
    if (chosen >= 0) computed.option = chosen;
    entry.peak = std::max(entry.peak, least);
    entry.cost += options[computed.option].cost;
}

// In place: sizes are equal, this op is the last reader in the stage, the value is not kept, and
// the value written is not alive already.
bool Schedule::may_overwrite(int stage, const Computed& computed, const Option& option) const {
    const int target = option.overwrites;
    const int written =
        problem_->ops[computed.op].alternatives[computed.alternative].writes.front();
    return last_reader_[target] == computed.op && !resident_.get(target, stage + 1) &&
           !problem_->values[target].kept() && !resident_.get(written, stage) &&
           problem_->values[target].size == problem_->values[written].size;
}

}  // namespace tightfit
