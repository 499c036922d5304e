// Queries, changes and their undo log.
#include "schedule.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tightfit {

namespace {

void remove_item(std::vector<int>& items, int item) {
    const auto found = std::find(items.begin(), items.end(), item);
    *found = items.back();
    items.pop_back();
}

void swap_item(Profile& profile, int stage, Bytes& bytes) {
    const Bytes before = profile.get(stage);
    profile.set(stage, bytes);
    bytes = before;
}

}  // namespace

Schedule::Schedule(std::shared_ptr<const Problem> problem, Bytes budget)
    : problem_(std::move(problem)), stages_(problem_->op_count()), budget_(budget) {
    const int values = problem_->value_count();
    first_choice_.resize(stages_);
    again_choice_.assign(stages_, -1);
    is_dirty_.assign(stages_ + 1, 0);
    requested_.assign(stages_, 0);
    needed_.assign(values, 0);
    read_.assign(values, 0);
    last_reader_.assign(values, -1);
    priced_.assign(values, 0);
    price_.assign(values, 0);
    keep_everything();
}

// ---------------------------------------------------------------------------- queries

bool Schedule::recomputes(int stage) const {
    const auto& computed = computed_[stage];
    return computed.size() > 1 || (computed.size() == 1 && computed[0].op != stage);
}

int Schedule::alternative_at(int op, int stage) const {
    if (problem_->ops[op].alternatives.size() == 1) return 0;
    const auto& list = computed_[stage];
    const auto found =
        std::lower_bound(list.begin(), list.end(), op,
                         [](const Computed& entry, int wanted) { return entry.op < wanted; });
    return found->alternative;
}

bool Schedule::reads_at(const Reader& reader, int stage) const {
    return reader.alternatives >> alternative_at(reader.op, stage) & 1;
}

bool Schedule::used(int value, int stage) const {
    for (const Reader& reader : problem_->values[value].readers) {
        if (reader.op > stage) break;
        if (computed_in_.get(reader.op, stage) && reads_at(reader, stage)) return true;
    }
    return false;
}

int Schedule::next_use(int value, int stage) const {
    int best = stages_;
    for (const Reader& reader : problem_->values[value].readers) {
        int at = computed_in_.next(reader.op, std::max(stage, reader.op), stages_);
        while (at < best && !reads_at(reader, at))
            at = computed_in_.next(reader.op, at + 1, stages_);
        best = std::min(best, at);
    }
    return best;
}

int Schedule::previous_write(int value, int stage) const {
    const Value& info = problem_->values[value];
    int at = computed_in_.previous(info.producer, stage);
    while (at >= 0 && !(info.writers >> alternative_at(info.producer, at) & 1))
        at = computed_in_.previous(info.producer, at - 1);
    return at;
}

int Schedule::previous_event(int value, int stage) const {
    int best = previous_write(value, stage);
    for (const Reader& reader : problem_->values[value].readers) {
        if (reader.op > stage) break;
        int at = computed_in_.previous(reader.op, stage);
        while (at > best && !reads_at(reader, at))
            at = computed_in_.previous(reader.op, at - 1);
        best = std::max(best, at);
    }
    return best;
}

void Schedule::touched_stages(std::vector<int>& stages) const {
    for (std::size_t k = 0; k < log_size_; ++k)
        if (log_[k].change == Change::stage) stages.push_back(log_[k].item);
}

// ---------------------------------------------------------------------------- changes

Schedule::Record& Schedule::push(Change change) {
    if (log_size_ == log_.size()) log_.emplace_back();
    Record& record = log_[log_size_++];
    record.change = change;
    return record;
}

void Schedule::mark_dirty(int stage) {
    if (stage < 0 || stage >= stages_ || is_dirty_[stage]) return;
    is_dirty_[stage] = 1;
    dirty_.push_back(stage);
}

// Flip the residency of a value on stages first..last, which are all in the other state. Stages
// strictly inside that neither read nor compute the value only hold its bytes more or less.
void Schedule::set_range(int value, int first, int last, bool on) {
    if (first > last) return;
    Record& record = push(Change::range);
    record.item = value;
    record.first = first;
    record.last = last;
    record.on = on;
    const Value& info = problem_->values[value];
    for (const Reader& reader : info.readers)
        for (int at = computed_in_.next(reader.op, std::max(first, reader.op), last); at < last;
             at = computed_in_.next(reader.op, at + 1, last))
            mark_dirty(at);
    for (int at = computed_in_.next(info.producer, first, last); at < last;
         at = computed_in_.next(info.producer, at + 1, last))
        mark_dirty(at);
    flip(value, first, last, on);
    mark_dirty(first - 1);
    mark_dirty(last);
    if (problem_->has_options) mark_where_options_change(first, last);
}

// Stages from `first` to before `last` in which another option fits now, or a chosen one no more.
void Schedule::mark_where_options_change(int first, int last) {
    while (first < last) {
        const int end = std::min(last, slack_down_.end_of_block(first));
        if (slack_down_.least_around(first) <= 0 || slack_up_.least_around(first) < 0)
            for (int stage = first; stage < end; ++stage)
                if (slack_down_.get(stage) <= 0 || slack_up_.get(stage) < 0) mark_dirty(stage);
        first = end;
    }
}

void Schedule::flip(int value, int first, int last, bool on) {
    const Bytes bytes = on ? problem_->values[value].size : -problem_->values[value].size;
    const bool before = resident_.get(value, first - 1);
    const bool after = last < stages_ && resident_.get(value, last + 1);
    if (!before) {
        if (on)
            starts_[first - 1].push_back(value);
        else
            remove_item(starts_[first - 1], value);
    }
    if (after) {
        if (on)
            remove_item(starts_[last], value);
        else
            starts_[last].push_back(value);
    }
    resident_.fill(value, first, last, on);
    if (bytes == 0) return;
    base_.add(first, last, bytes);
    overflow_ += peak_.add_above(first, last - 1, bytes, budget_);
    if (!problem_->has_options) return;
    slack_down_.add(first, last - 1, bytes);
    slack_up_.add(first, last - 1, -bytes);
}

void Schedule::set_choice(int op, int first, int again) {
    Record& record = push(Change::choice);
    record.item = op;
    record.first = first_choice_[op];
    record.last = again_choice_[op];
    first_choice_[op] = first;
    again_choice_[op] = again;
    for (int stage = next_computed(op, op); stage < stages_; stage = next_computed(op, stage + 1))
        mark_dirty(stage);
}

// Evaluate the dirty stages. Where a recomputation vanished, residency that only served it goes;
// where one appeared that cannot run, its inputs are kept instead.
void Schedule::flush() {
    const std::size_t most = 1000 * (static_cast<std::size_t>(stages_) + 100);
    for (std::size_t k = 0; k < dirty_.size(); ++k) {
        if (k > most) throw std::logic_error("the schedule does not settle: a bug of the engine");
        refresh(dirty_[k]);
    }
    dirty_.clear();
}

void Schedule::refresh(int stage) {
    is_dirty_[stage] = 0;
    Record& record = push(Change::stage);
    record.item = stage;
    repairs_.clear();
    evaluate(stage, record.entry, repairs_);
    store(stage, record.entry);
    const std::vector<Repair> repairs = repairs_;
    settle(stage, record.entry);
    for (const Repair& one : repairs) repair(one);
}

// Put a new entry in place; `entry` then holds the old one.
void Schedule::store(int stage, Entry& entry) {
    for (const Computed& old : computed_[stage]) computed_in_.set(old.op, stage, false);
    swap_entry(stage, entry);
    for (const Computed& now : computed_[stage]) computed_in_.set(now.op, stage, true);
    const bool on = recomputes(stage);
    int& place = recomputing_at_[stage];
    if (on && place < 0) {
        place = static_cast<int>(recomputing_.size());
        recomputing_.push_back(stage);
    } else if (!on && place >= 0) {
        const int moved = recomputing_.back();
        recomputing_[place] = moved;
        recomputing_at_[moved] = place;
        recomputing_.pop_back();
        place = -1;
    }
}

void Schedule::swap_entry(int stage, Entry& entry) {
    std::swap(computed_[stage], entry.computed);
    cost_ += entry.cost - stage_cost_[stage];
    std::swap(stage_cost_[stage], entry.cost);
    overflow_ += std::max<Bytes>(0, entry.peak - budget_) -
                 std::max<Bytes>(0, peak_.get(stage) - budget_);
    swap_item(peak_, stage, entry.peak);
    swap_item(slack_down_, stage, entry.slack_down);
    swap_item(slack_up_, stage, entry.slack_up);
}

void Schedule::settle(int stage, const Entry& before) {
    std::vector<int> vanished, written;
    const auto& now = computed_[stage];
    std::size_t k = 0;
    for (const Computed& old : before.computed) {
        while (k < now.size() && now[k].op < old.op) ++k;
        if (k < now.size() && now[k].op == old.op && now[k].alternative == old.alternative)
            continue;
        const auto& reads = problem_->ops[old.op].alternatives[old.alternative].reads;
        vanished.insert(vanished.end(), reads.begin(), reads.end());
    }
    for (const Computed& one : now)
        for (int value : problem_->ops[one.op].alternatives[one.alternative].writes)
            if (resident_.get(value, stage) && !problem_->values[value].kept())
                written.push_back(value);
    for (int value : vanished) trim(value, stage);
    for (int value : written)
        if (resident_.get(value, stage)) clear_until(value, stage);
}

// Free a value whose residency ends at this stage without a reader here.
void Schedule::trim(int value, int stage) {
    if (stage == 0 || problem_->values[value].kept() || !resident_.get(value, stage) ||
        resident_.get(value, stage + 1) || used(value, stage))
        return;
    clear_until(value, stage);
}

// Clear residency from the last event before the stage up to it.
void Schedule::clear_until(int value, int stage) {
    const int event = previous_event(value, stage - 1);
    const int first = std::max(event + 1, resident_.around(value, stage).first);
    set_range(value, first, stage, false);
}

// Where a value may not begin at a stage's end it begins at the next one that may compute it, if
// any before it is read.
void Schedule::repair(const Repair& repair) {
    const int value = repair.value, stage = repair.stage;
    if (!repair.extend) {
        int last = stage;
        while (resident_.get(value, last + 1)) {
            ++last;
            if (problem_->may_recompute(problem_->values[value].producer, last)) break;
        }
        set_range(value, stage + 1, last, false);
        return;
    }
    keep_until(value, stage);
}

// Keep a value from its last instance up to the start of a stage.
void Schedule::keep_until(int value, int stage) {
    if (resident_.get(value, stage)) return;
    const int held = resident_.previous(value, stage);
    const int written = previous_write(value, stage - 1);
    const int from = std::max({held, written, problem_->values[value].producer});
    set_range(value, from + 1, stage, true);
}

bool Schedule::drop(int value, int stage) {
    if (!resident_.get(value, stage) || problem_->values[value].kept()) return false;
    const int use = std::min(next_use(value, stage), stages_ - 1);
    const int event = previous_event(value, stage - 1);
    const Run run = resident_.around(value, stage);
    set_range(value, std::max(event + 1, run.first), std::min(use, run.last), false);
    flush();
    return true;
}

bool Schedule::retain(int op, int stage) {
    if (stage <= op || !is_computed(op, stage)) return false;
    bool any = false;
    for (int value :
         problem_->ops[op].alternatives[alternative_at(op, stage)].writes) {
        if (resident_.get(value, stage)) continue;
        if (!resident_.get(value, stage + 1) && !used(value, stage)) continue;
        const int from = std::max(resident_.previous(value, stage),
                                  previous_write(value, stage - 1));
        if (from < 0) continue;
        set_range(value, from + 1, stage, true);
        any = true;
    }
    flush();
    return any;
}

bool Schedule::select(int op, int first, int again, bool keep) {
    if (first == first_choice_[op] && again == again_choice_[op]) return false;
    std::vector<std::pair<int, int>> before;
    for (int stage = next_computed(op, op); stage < stages_; stage = next_computed(op, stage + 1))
        before.emplace_back(stage, alternative_at(op, stage));
    set_choice(op, first, again);
    if (keep)
        for (int value : problem_->ops[op].alternatives[first].reads) keep_until(value, op);
    flush();
    for (const auto& [stage, alternative] : before)
        for (int value : problem_->ops[op].alternatives[alternative].reads) trim(value, stage);
    flush();
    return true;
}

void Schedule::undo_to(std::size_t mark) {
    while (log_size_ > mark) {
        Record& record = log_[log_size_ - 1];
        if (record.change == Change::range) {
            flip(record.item, record.first, record.last, !record.on);
        } else if (record.change == Change::stage) {
            store(record.item, record.entry);
        } else {
            first_choice_[record.item] = record.first;
            again_choice_[record.item] = record.last;
        }
        --log_size_;
    }
}

}  // namespace tightfit
