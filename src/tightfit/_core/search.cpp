#include "search.hpp"

#include <algorithm>
#include <cmath>

namespace tightfit {

namespace {

constexpr double kLastResort = 1e200;
constexpr double kNoLimit = 1e9;  // seconds
constexpr int kAskedPerLook = 32;  // how often the clock is looked at
constexpr double kKeepReads = 0.75;  // how often a new alternative's reads are kept for it

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Search::Search(Schedule& schedule, std::uint64_t seed, Settings settings)
    : schedule_(schedule), random_(seed), settings_(settings) {
    const Problem& problem = schedule.problem();
    for (int id = 0; id < problem.value_count(); ++id) {
        const Value& value = problem.values[id];
        const Op& op = problem.ops[value.producer];
        if (value.size > 0 && !value.kept() && !value.state && op.recomputable)
            candidates_.push_back(id);
    }
    collect_choosers();
    std::stable_sort(candidates_.begin(), candidates_.end(), [&](int a, int b) {
        return problem.values[a].producer < problem.values[b].producer;
    });
    for (int id : candidates_) births_.push_back(problem.values[id].producer);
}

bool Search::droppable(int value, int stage) const {
    return schedule_.resident(value, stage) && !schedule_.used(value, stage);
}

// ---------------------------------------------------------------------------- relieve and fill

// Values resident but not read in a stage: a random sample of `wanted` of them, or all.
void Search::residents(int stage, int wanted, std::vector<int>& found) {
    found.clear();
    const int born = static_cast<int>(
        std::lower_bound(births_.begin(), births_.end(), stage) - births_.begin());
    if (born > 400 && wanted < born) {
        for (int k = 0; k < wanted * 12 && static_cast<int>(found.size()) < wanted; ++k) {
            const int value = candidates_[random_.below(born)];
            if (droppable(value, stage) &&
                std::find(found.begin(), found.end(), value) == found.end())
                found.push_back(value);
        }
        if (static_cast<int>(found.size()) >= wanted / 2) return;
        found.clear();
    }
    for (int k = 0; k < born; ++k)
        if (droppable(candidates_[k], stage)) found.push_back(candidates_[k]);
    const int count = static_cast<int>(found.size());
    if (count <= wanted) return;
    for (int k = 0; k < wanted; ++k) std::swap(found[k], found[k + random_.below(count - k)]);
    found.resize(wanted);
}

// Try each drop; score = extra cost per byte of overflow it removes. One that lowers this stage
// but not the sum is a last resort.
void Search::score_drops(int stage, const std::vector<int>& values) {
    scored_.clear();
    const Cost cost = schedule_.cost();
    const Bytes overflow = schedule_.overflow(), peak = schedule_.peak_of(stage);
    const double least = 1e-8 * static_cast<double>(cost) + 1e-9;
    const std::size_t mark = schedule_.mark();
    for (int value : values) {
        schedule_.drop(value, stage);
        const double dearer =
            std::max(0.0, static_cast<double>(schedule_.cost() - cost));
        const auto relief = static_cast<double>(overflow - schedule_.overflow());
        const bool lower = schedule_.peak_of(stage) < peak;
        schedule_.undo_to(mark);
        if (!lower) continue;
        const double score =
            relief <= 0 ? kLastResort * (1.0 + dearer)
                        : (dearer + least) / relief * random_.log_normal(settings_.noise);
        scored_.push_back({score, value, stage});
    }
    std::sort(scored_.begin(), scored_.end());
}

Relief Search::relieve(int candidates, int steps, bool batch, double seconds) {
    const auto start = Clock::now();
    std::vector<int> values;
    for (int step = 0; step < steps && !schedule_.fits(); ++step) {
        if (seconds_since(start) > seconds) return Relief::out_of_time;
        const int stage = schedule_.fullest_stage();
        residents(stage, candidates, values);
        score_drops(stage, values);
        const int most = batch ? std::max<int>(1, static_cast<int>(scored_.size()) / 4) : 1;
        int done = 0;
        for (const Scored& one : scored_) {
            if (done >= most || schedule_.fits()) break;
            if (done > 0 && (schedule_.peak_of(stage) <= schedule_.budget() ||
                             one.score >= kLastResort))
                break;
            if (!droppable(one.first, stage)) continue;
            schedule_.drop(one.first, stage);
            ++done;
        }
        if (done == 0) return Relief::stuck;
    }
    return schedule_.fits() ? Relief::fits : Relief::out_of_time;
}

void Search::recomputations(bool local, std::vector<Scored>& events) {
    events.clear();
    std::vector<int> stages;
    if (local) {
        schedule_.touched_stages(stages);
        const auto& all = schedule_.recomputing_stages();
        for (int k = 0; k < 6 && !all.empty(); ++k)
            stages.push_back(all[random_.below(static_cast<int>(all.size()))]);
    } else {
        stages = schedule_.recomputing_stages();
    }
    std::sort(stages.begin(), stages.end());
    stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
    for (int stage : stages)
        for (const Computed& computed : schedule_.computed(stage))
            if (computed.op != stage) events.push_back({0, computed.op, stage});
}

void Search::fill(int passes, int limit, bool local, double seconds) {
    const auto start = Clock::now();
    for (int pass = 0; pass < passes; ++pass)
        if (!fill_once(limit, local, start, seconds)) return;
}

// Returns whether anything was kept and time is left for another pass.
bool Search::fill_once(int limit, bool local, Clock::time_point start, double seconds) {
    std::vector<Scored> events, useful;
    auto late = [&, asked = 0]() mutable {
        return ++asked % kAskedPerLook == 0 && seconds_since(start) > seconds;
    };
    recomputations(local, events);
    const int count = static_cast<int>(events.size());
    const int tried = std::min(count, limit);
    if (tried < count)
        for (int k = 0; k < tried; ++k)
            std::swap(events[k], events[k + random_.below(count - k)]);
    const Cost cost = schedule_.cost();
    const std::size_t mark = schedule_.mark();
    for (int k = 0; k < tried && !late(); ++k) {
        if (!schedule_.retain(events[k].first, events[k].second)) continue;
        const auto saved = static_cast<double>(schedule_.cost() - cost);
        const bool fits = schedule_.fits();
        schedule_.undo_to(mark);
        if (!fits || saved >= 0) continue;
        Bytes bytes = 1;
        for (const auto& alternative : schedule_.problem().ops[events[k].first].alternatives)
            for (int value : alternative.writes)
                bytes = std::max(bytes, schedule_.problem().values[value].size);
        useful.push_back({saved / static_cast<double>(bytes) *
                              random_.log_normal(settings_.noise),
                          events[k].first, events[k].second});
    }
    std::sort(useful.begin(), useful.end());
    bool any = false;
    for (const Scored& one : useful) {
        if (late()) return false;
        const std::size_t before = schedule_.mark();
        const Cost now = schedule_.cost();
        if (!schedule_.retain(one.first, one.second)) continue;
        if (!schedule_.fits() || schedule_.cost() >= now)
            schedule_.undo_to(before);
        else
            any = true;
    }
    return any;
}

Relief Search::descend(double seconds) {
    const auto start = Clock::now();
    const Relief relief = relieve(1000, 1 << 30, true, seconds);
    if (relief == Relief::fits) fill(3, 1 << 30, false, seconds - seconds_since(start));
    schedule_.commit();
    return relief;
}

// ---------------------------------------------------------------------------- perturbations

void Search::drop_random(int count) {
    const int stages = schedule_.stages();
    for (int k = 0; k < count; ++k) {
        for (int attempt = 0; attempt < 10; ++attempt) {
            const int at = random_.below(static_cast<int>(candidates_.size()));
            const int value = candidates_[at], birth = births_[at];
            int stage = birth + 1 + random_.below(std::max(1, stages - 1 - birth));
            if (stage >= stages || !schedule_.resident(value, stage)) {
                const int last = schedule_.previous_resident(value, stages - 1);
                if (last <= birth + 1) continue;
                stage = birth + 1 + random_.below(last - birth);
            }
            if (schedule_.resident(value, stage)) {
                schedule_.drop(value, stage);
                break;
            }
        }
    }
}

void Search::retain_random(int count) {
    for (int k = 0; k < count; ++k) {
        for (int attempt = 0; attempt < 4; ++attempt) {
            const auto& stages = schedule_.recomputing_stages();
            if (stages.empty()) return;
            const int stage = stages[random_.below(static_cast<int>(stages.size()))];
            const auto& computed = schedule_.computed(stage);
            const int op = computed[random_.below(static_cast<int>(computed.size()))].op;
            if (op != stage && schedule_.retain(op, stage)) break;
        }
    }
}

int Search::window_end(int from) {
    const int widest =
        settings_.window > 0 ? settings_.window : 10 + schedule_.stages() / 40;
    return from + 2 + random_.below(widest);
}

void Search::drop_window() {
    const int stage = schedule_.fullest_stage();
    const int from = random_.below(static_cast<int>(candidates_.size()));
    const int end = window_end(births_[from]);
    for (std::size_t k = from; k < candidates_.size() && births_[k] < end; ++k)
        if (births_[k] < stage && droppable(candidates_[k], stage))
            schedule_.drop(candidates_[k], stage);
}

void Search::retain_window() {
    const int from = births_[random_.below(static_cast<int>(births_.size()))];
    const int end = window_end(from);
    const std::vector<int> stages = schedule_.recomputing_stages();
    std::vector<int> ops;
    for (int stage : stages) {
        ops.clear();
        for (const Computed& computed : schedule_.computed(stage))
            if (computed.op >= from && computed.op < end && computed.op != stage)
                ops.push_back(computed.op);
        for (int op : ops) schedule_.retain(op, stage);
    }
}

// Whatever can be chosen for first computations: branches of linked ops, or one op's alternatives.
void Search::collect_choosers() {
    const Problem& problem = schedule_.problem();
    std::vector<char> linked(problem.op_count(), 0);
    for (const Choice& choice : problem.choices)
        for (const Branch& branch : choice)
            for (const auto& [op, alternative] : branch) linked[op] = 1;
    for (int op = 0; op < problem.op_count(); ++op) {
        Choice choice;
        const auto& alternatives = problem.ops[op].alternatives;
        for (int a = 0; a < static_cast<int>(alternatives.size()); ++a)
            if (alternatives[a].first) choice.push_back({{op, a}});
        if (!linked[op] && choice.size() > 1) choosers_.push_back(choice);
    }
    for (const Choice& choice : problem.choices)
        if (choice.size() > 1) choosers_.push_back(choice);
    std::stable_sort(choosers_.begin(), choosers_.end(), [](const Choice& x, const Choice& y) {
        return x.front().front().first < y.front().front().first;
    });
}

void Search::take(const Branch& branch, bool keep) {
    for (const auto& [op, alternative] : branch)
        schedule_.select(op, alternative, schedule_.again_choice(op), keep);
}

void Search::take_random(const Choice& choice) {
    take(choice[random_.below(static_cast<int>(choice.size()))], random_.uniform() < kKeepReads);
}

void Search::take_best(const Choice& choice) {
    double best = 0;
    const Branch* chosen = nullptr;
    const bool keep = random_.uniform() < kKeepReads;
    const std::size_t mark = schedule_.mark();
    const Cost cost = schedule_.cost();
    const double rate = 1e-3 * static_cast<double>(cost) /
                        static_cast<double>(std::max<Bytes>(1, schedule_.budget()));
    for (const Branch& branch : choice) {
        take(branch, keep);
        if (schedule_.mark() == mark) continue;  // the branch taken already
        const double score = static_cast<double>(schedule_.cost()) +
                             rate * static_cast<double>(schedule_.overflow());
        schedule_.undo_to(mark);
        if (chosen != nullptr && score >= best) continue;
        best = score;
        chosen = &branch;
    }
    if (chosen != nullptr) take(*chosen, keep);
}

void Search::perturb_choices(int count) {
    const int choosers = static_cast<int>(choosers_.size());
    switch (random_.below(3)) {
        case 0:
            for (int k = 0; k < count; ++k) take_random(choosers_[random_.below(choosers)]);
            break;
        case 1: {
            const int from = random_.below(choosers), width = 1 + random_.below(4);
            for (int k = from; k < std::min(choosers, from + width); ++k)
                take_random(choosers_[k]);
            break;
        }
        default:
            take_best(choosers_[random_.below(choosers)]);
    }
}

void Search::perturb() {
    const int count = random_.geometric(1.5);
    if (!choosers_.empty() && random_.uniform() < 0.35) {
        perturb_choices(count);
        return;
    }
    const double which = random_.uniform();
    if (which < 0.35)
        drop_random(count);
    else if (which < 0.65)
        retain_random(count);
    else if (which < 0.8)
        drop_window();
    else
        retain_window();
}

// ---------------------------------------------------------------------------- annealing

std::int64_t Search::improve(Limits limits, double hot, double cold, Cost target) {
    const auto start = Clock::now();
    schedule_.commit();
    Snapshot best;
    bool found = schedule_.fits();
    if (found) best = schedule_.snapshot();
    std::int64_t iteration = 0;
    if (candidates_.empty()) return 0;
    for (;; ++iteration) {
        const double share = limits.iterations >= 0
                                 ? static_cast<double>(iteration) /
                                       static_cast<double>(std::max<std::int64_t>(1, limits.iterations))
                                 : seconds_since(start) / limits.seconds;
        if (share >= 1.0 || (found && best.cost <= target)) break;
        const double temperature = hot * std::pow(cold / hot, share);
        const Cost cost = schedule_.cost();
        const Bytes overflow = schedule_.overflow();
        perturb();
        if (!schedule_.fits())
            relieve(settings_.drop_candidates, settings_.relieve_steps, settings_.batch, 1e9);
        if (schedule_.fits()) fill(1, settings_.fill_limit, settings_.local_fill, kNoLimit);
        const auto dearer = static_cast<double>(schedule_.cost() - cost);
        const bool accept =
            !schedule_.fits()
                ? schedule_.overflow() < overflow
                : overflow > 0 || dearer <= 0 ||
                      random_.uniform() < std::exp(-dearer / temperature);
        if (!accept) {
            schedule_.undo_to(0);
            continue;
        }
        schedule_.commit();
        if (schedule_.fits() && (!found || schedule_.cost() < best.cost)) {
            best = schedule_.snapshot();
            found = true;
        }
    }
    if (found && best.cost < schedule_.cost()) schedule_.load(best);
    if (found && !schedule_.fits()) schedule_.load(best);
    return iteration;
}

}  // namespace tightfit
