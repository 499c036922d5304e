// Whole states of a schedule: the start, snapshots, and the check against a fresh computation.
#include <algorithm>
#include <string>

#include "schedule.hpp"

namespace tightfit {

void Schedule::clear() {
    resident_.reset(problem_->value_count());
    computed_in_.reset(stages_);
    base_.reset(stages_ + 1);
    peak_.reset(stages_);
    slack_down_.reset(stages_);
    slack_up_.reset(stages_);
    stage_cost_.assign(stages_ + 1, 0);
    computed_.assign(stages_ + 1, {});
    starts_.assign(stages_ + 1, {});
    recomputing_.clear();
    recomputing_at_.assign(stages_ + 1, -1);
    cost_ = 0;
    overflow_ = 0;
    log_size_ = 0;
    dirty_.clear();
    std::fill(is_dirty_.begin(), is_dirty_.end(), 0);
}

// Every value from birth to its last reader, with the first choice of every op.
void Schedule::keep_everything() {
    for (int op = 0; op < stages_; ++op) first_choice_[op] = problem_->ops[op].first_choice;
    std::fill(again_choice_.begin(), again_choice_.end(), -1);
    clear();
    std::vector<int> last(problem_->value_count(), -1);
    for (int op = stages_ - 1; op >= 0; --op) {
        const auto& node = problem_->ops[op];
        const auto& alternative = node.alternatives[first_choice_[op]];
        bool wanted = node.required;
        for (int value : alternative.writes) wanted = wanted || last[value] >= 0;
        if (!wanted) continue;
        for (int value : alternative.reads) last[value] = std::max(last[value], op);
    }
    for (int value = 0; value < problem_->value_count(); ++value) {
        const int birth = problem_->values[value].producer;
        if (last[value] > birth) resident_.fill(value, birth + 1, last[value], true);
    }
    rebuild();
}

Snapshot Schedule::snapshot() const {
    Snapshot snapshot{{}, first_choice_, again_choice_, cost_};
    for (int value = 0; value < problem_->value_count(); ++value)
        for (const Run& run : resident_.of(value))
            snapshot.resident.push_back({value, run.first, run.last});
    return snapshot;
}

void Schedule::load(const Snapshot& snapshot) {
    first_choice_ = snapshot.first_choice;
    again_choice_ = snapshot.again_choice;
    load_ranges(snapshot.resident);
}

void Schedule::load_ranges(const std::vector<Range>& ranges) {
    clear();
    for (const auto& [value, first, last] : ranges)
        if (value >= 0 && value < problem_->value_count())
            resident_.fill(value, std::max(0, first), std::min(stages_, last), true);
    rebuild();
}

// Derive everything from residency and choices, after making residency legal.
void Schedule::rebuild() {
    for (int id = 0; id < problem_->value_count(); ++id) {
        const Value& value = problem_->values[id];
        resident_.fill(id, 0, value.producer, false);
        if (value.kept()) {
            resident_.fill(id, value.producer + 1, stages_, false);
            resident_.fill(id, value.producer + 1, value.kept_until, true);
        } else {
            resident_.set(id, stages_, false);
        }
        for (const Run& run : resident_.of(id)) {
            base_.add(run.first, run.last, value.size);
            starts_[run.first - 1].push_back(id);
        }
    }
    for (int stage = 0; stage < stages_; ++stage) mark_dirty(stage);
    flush();
    normalise();
    commit();
}

// Free every stretch of residency that ends without a reader, the latest first: the rest of it may
// end without one, too.
void Schedule::normalise() {
    std::vector<std::vector<int>> ends(stages_ + 1);
    for (int value = 0; value < problem_->value_count(); ++value)
        for (const Run& run : resident_.of(value)) ends[run.last].push_back(value);
    for (int stage = stages_ - 1; stage >= 1; --stage) {
        std::sort(ends[stage].begin(), ends[stage].end());
        for (int value : ends[stage]) {
            const int first = resident_.around(value, stage).first;
            trim(value, stage);
            const int last = resident_.previous(value, stage);
            if (last < stage && last >= first) ends[last].push_back(value);
        }
    }
    flush();
}

void Schedule::set_budget(Bytes budget) {
    budget_ = budget;
    if (problem_->has_options)
        for (int stage = 0; stage < stages_; ++stage) mark_dirty(stage);
    overflow_ = peak_.above(budget_);
    flush();
    commit();
}

void Schedule::set_fastest(bool fastest) {
    if (fastest_ == fastest) return;
    fastest_ = fastest;
    set_budget(budget_);
}

std::string Schedule::check() const {
    const auto where = [](const char* what, int stage) {
        return std::string(what) + " of stage " + std::to_string(stage);
    };
    Cost cost = 0;
    Bytes overflow = 0;
    std::size_t recomputing = 0;
    for (int stage = 0; stage < stages_; ++stage) {
        Bytes base = 0;
        std::vector<int> starts, stored = starts_[stage];
        for (int value = 0; value < problem_->value_count(); ++value) {
            if (resident_.get(value, stage)) base += problem_->values[value].size;
            if (!resident_.get(value, stage) && resident_.get(value, stage + 1))
                starts.push_back(value);
        }
        std::sort(stored.begin(), stored.end());
        if (base != base_.get(stage)) return where("base bytes", stage);
        if (starts != stored) return where("beginning values", stage);
        Entry entry;
        std::vector<Repair> repairs;
        evaluate(stage, entry, repairs);
        if (!repairs.empty()) return where("an impossible recomputation", stage);
        if (!(entry.computed == computed_[stage])) return where("computed ops", stage);
        if (entry.cost != stage_cost_[stage]) return where("cost", stage);
        if (entry.peak != peak_.get(stage)) return where("peak", stage);
        for (int op = 0; op < stages_; ++op) {
            const bool listed =
                std::any_of(entry.computed.begin(), entry.computed.end(),
                            [&](const Computed& one) { return one.op == op; });
            if (listed != computed_in_.get(op, stage)) return where("stages of an op", stage);
        }
        if (recomputes(stage) != (recomputing_at_[stage] >= 0)) return where("listing", stage);
        recomputing += recomputes(stage);
        cost += entry.cost;
        overflow += std::max<Bytes>(0, entry.peak - budget_);
    }
    if (cost != cost_) return "total cost";
    if (overflow != overflow_) return "overflow";
    if (recomputing != recomputing_.size()) return "number of recomputing stages";
    return dirty_.empty() ? "" : "unflushed stages";
}

}  // namespace tightfit
