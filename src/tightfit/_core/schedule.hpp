// A schedule held as residency of values over stages, evaluated incrementally, with undo.
//
// Stage t is everything after first computation t-1 up to and including first computation t. The
// residency bits say which values are alive when a stage begins; together with the chosen
// alternatives they determine the whole schedule: a stage computes the closure, under reads, of
// its own op and of the values that begin to be resident at its end, stopping at resident values.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "problem.hpp"
#include "profile.hpp"
#include "runs.hpp"

namespace tightfit {

struct Computed {
    int op;
    int alternative;
    int option;
    bool operator==(const Computed& other) const {
        return op == other.op && alternative == other.alternative && option == other.option;
    }
};

// A value that is resident from one stage to another.
using Range = std::array<int, 3>;

// The decisions of a schedule; enough to load it again.
struct Snapshot {
    std::vector<Range> resident;
    std::vector<int> first_choice;
    std::vector<int> again_choice;
    Cost cost = 0;
};

class Schedule {
public:
    Schedule(std::shared_ptr<const Problem> problem, Bytes budget);

    // ---- its parts
    const Problem& problem() const { return *problem_; }
    int stages() const { return stages_; }
    Bytes budget() const { return budget_; }
    Cost cost() const { return cost_; }
    Bytes overflow() const { return overflow_; }  // bytes over budget, summed over stages
    bool fits() const { return overflow_ == 0; }
    Bytes peak() const { return stages_ > 0 ? peak_.get(peak_.fullest()) : 0; }
    int fullest_stage() const { return peak_.fullest(); }
    Bytes peak_of(int stage) const { return peak_.get(stage); }
    Bytes base_of(int stage) const { return base_.get(stage); }
    const std::vector<Computed>& computed(int stage) const { return computed_[stage]; }
    const std::vector<int>& recomputing_stages() const { return recomputing_; }
    bool resident(int value, int stage) const { return resident_.get(value, stage); }
    bool is_computed(int op, int stage) const { return computed_in_.get(op, stage); }
    int first_choice(int op) const { return first_choice_[op]; }
    int again_choice(int op) const { return again_choice_[op]; }

    // ---- queries of a value or op along the stages
    bool used(int value, int stage) const;  // read in that stage
    int next_use(int value, int stage) const;  // first stage >= stage that reads it, or stages()
    int previous_event(int value, int stage) const;  // last stage <= stage that reads or writes it
    int previous_write(int value, int stage) const;
    int next_computed(int op, int stage) const {
        return computed_in_.next(op, stage, stages_);
    }
    int previous_resident(int value, int stage) const { return resident_.previous(value, stage); }

    // ---- changes; each leaves the schedule consistent and can be undone up to the last commit
    void set_range(int value, int first, int last, bool on);  // call flush() afterwards
    void set_choice(int op, int first, int again);  // call flush() afterwards
    void flush();
    bool drop(int value, int stage);  // free it around the stage, compute it again at its next use
    bool retain(int op, int stage);  // keep results of a recomputation in the stage
    // Other alternatives (again = -1: the cheapest); `keep`: present inputs of the first
    // computation are kept for it rather than computed again.
    bool select(int op, int first, int again, bool keep);

    std::size_t mark() const { return log_size_; }
    void undo_to(std::size_t mark);
    void commit() { log_size_ = 0; }
    // Stages evaluated since the last commit, for searches that look near their own changes.
    void touched_stages(std::vector<int>& stages) const;

    // ---- whole states; these end the transaction
    void set_budget(Bytes budget);
    // True: every op takes its cheapest option even where it does not fit, so that a search sees
    // the overflow; false: the cheapest that fits.
    void set_fastest(bool fastest);
    void keep_everything();
    Snapshot snapshot() const;
    void load(const Snapshot& snapshot);
    // Residency with the present choices.
    void load_ranges(const std::vector<Range>& ranges);
    std::string check() const;  // "" or the first field that differs from a fresh computation

private:
    struct Entry {  // the result of evaluating a stage
        std::vector<Computed> computed;
        Cost cost = 0;
        Bytes peak = 0;
        Bytes slack_down = 0;  // once this many bytes fewer are alive a cheaper option fits
        Bytes slack_up = 0;  // with more than this many further bytes a chosen option fits no more
    };
    enum class Change { range, stage, choice };
    struct Record {
        Change change;
        int item, first, last;
        bool on;
        Entry entry;
    };
    struct Repair {
        int value, stage;
        bool extend;  // keep it up to the stage; if false, let it begin one stage later
    };

    // evaluation of one stage
    void evaluate(int stage, Entry& entry, std::vector<Repair>& repairs) const;
    void close(int stage, Entry& entry, std::vector<Repair>& repairs) const;
    int choose(int op, int stage, std::vector<Repair>& repairs) const;
    int choose_again(int op, int stage, std::vector<Repair>& repairs) const;
    int cheapest(int op, Mask able, int stage) const;
    double price_of(int value, int stage) const;
    double price_of_running(int op, int number, Mask shared, int stage) const;
    bool own_reads_resident(const Alternative& alternative, int stage) const;
    void request(int op) const;
    void walk(int stage, Entry& entry) const;
    void run_option(int stage, Computed& computed, Bytes live, Entry& entry) const;
    bool may_overwrite(int stage, const Computed& computed, const Option& option) const;

    // bookkeeping
    Record& push(Change change);
    void store(int stage, Entry& entry);
    void swap_entry(int stage, Entry& entry);
    void flip(int value, int first, int last, bool on);
    void mark_dirty(int stage);
    void mark_where_options_change(int first, int last);
    void refresh(int stage);
    void settle(int stage, const Entry& before);
    void trim(int value, int stage);
    void clear_until(int value, int stage);
    void repair(const Repair& repair);
    void keep_until(int value, int stage);
    int alternative_at(int op, int stage) const;
    bool reads_at(const Reader& reader, int stage) const;
    bool recomputes(int stage) const;
    void clear();
    void rebuild();
    void normalise();

    std::shared_ptr<const Problem> problem_;
    int stages_;
    Bytes budget_;
    bool fastest_ = false;
    Cost cost_ = 0;
    Bytes overflow_ = 0;
    Runs resident_;  // stages 0..stages at whose start a value is alive
    Runs computed_in_;  // stages that compute an op
    Profile base_, peak_, slack_down_, slack_up_;
    std::vector<Cost> stage_cost_;
    std::vector<std::vector<Computed>> computed_;
    std::vector<std::vector<int>> starts_;  // values that begin to be resident at the stage's end
    std::vector<int> recomputing_, recomputing_at_;
    std::vector<int> first_choice_, again_choice_;

    std::vector<Record> log_;
    std::size_t log_size_ = 0;
    std::vector<int> dirty_;
    std::vector<char> is_dirty_;
    std::vector<Repair> repairs_;

    // scratch of evaluate(), stamped with an epoch instead of being cleared
    mutable int epoch_ = 0;
    mutable std::vector<int> heap_;
    mutable std::vector<int> requested_, needed_, read_, last_reader_, priced_;
    mutable std::vector<double> price_;
};

}  // namespace tightfit
