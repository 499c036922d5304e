#include "replay.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace tightfit {

namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();
}

Replay::Replay(const Recorded& recorded, ReplayPolicy policy, Deallocation deallocation,
               Placement placement, std::int64_t budget, std::int64_t most_again, Draw draw,
               bool with_moments)
    : recorded_(recorded),
      policy_(policy),
      deallocation_(deallocation),
      placement_(placement),
      budget_(budget),
      most_again_(most_again),
      draw_(std::move(draw)),
      with_moments_(with_moments),
      hot_(recorded.storages()),
      stored_(recorded.storages()),
      residency_(recorded.storages(), 0),
      residencies_(recorded.storages(), 0),
      defined_at_(recorded.tensors.size(), -1),
      pool_(recorded.storages()),
      arena_(placement == Placement::bytes ? 0 : budget),
      offsets_(recorded.storages(), Arena::kNowhere),
      seen_(recorded.storages(), 0),
      seen_op_(recorded.ops(), 0) {
    for (int s = 0; s < recorded.storages(); ++s) {
        const auto bytes = static_cast<double>(recorded.bytes[s]);
        hot_[s] = {bytes, bytes > 0 ? 1.0 / bytes : kInfinity, 0, 0};
    }
}

ReplayCounts Replay::run() {
    try {
        for (const auto& [event, number] : recorded_.occurrences) {
            switch (static_cast<Event>(event)) {
                case Event::constant:
                    run_first(number);
                    pin(recorded_.tensors[*recorded_.outputs[number].begin()].storage);
                    break;
                case Event::compute: run_first(number); break;
                case Event::hold: hold(number); break;
                case Event::release: release(recorded_.tensors[number].storage); break;
                case Event::backward: backward_ = true; break;
            }
        }
        finish();
    } catch (const Stopped& stopped) {
        counts_.status = stopped.status;
    }
    counts_.total_cost = clock_ - 1;
    counts_.looks += classes_.looks();
    return counts_;
}

void Replay::finish() {
    for (const int tensor : recorded_.held) {
        const auto& [storage, op, is_root] = recorded_.tensors[tensor];
        if (!is_defined(tensor)) materialise(op, tensor, true);
        pin(storage);
    }
}

// -- the program ---------------------------------------------------------------------------------

void Replay::run_first(int op) {
    current_ = op;
    const Span outputs = recorded_.outputs[op];
    for (const int tensor : outputs) create(tensor);
    materialise(op, outputs.begin() == outputs.end() ? -1 : *outputs.begin(), false);
}

// Make a tensor known before it is computed: its storage, cost and neighbours.
void Replay::create(int tensor) {
    const auto& [storage, op, is_root] = recorded_.tensors[tensor];
    Stored& stored = stored_[storage];
    if (is_root) {
        stored.node = classes_.add(0);
        stored.backward = backward_;
    }
    if (recorded_.adds_cost[tensor]) hot_[storage].cost += recorded_.costs[op];
    ++stored.holders;
    for (const int parent : recorded_.fresh[tensor]) {
        ++stored.parents;
        ++stored_[parent].children;
    }
}

void Replay::hold(int tensor) {
    refuse_banished(tensor);
    ++stored_[recorded_.tensors[tensor].storage].holders;
}

void Replay::refuse_banished(int tensor) const {
    if (stored_[recorded_.tensors[tensor].storage].banished)
        throw std::invalid_argument(std::to_string(tensor));
}

void Replay::release(int storage) {
    Stored& stored = stored_[storage];
    if (--stored.holders > 0 || deallocation_ == Deallocation::ignore) return;
    if (deallocation_ == Deallocation::banish)
        try_to_banish(storage);
    else if (stored.resident && !stored.pinned)
        evict(storage, MomentKind::evict_eager);
}

// -- computing -----------------------------------------------------------------------------------

// Run an operator, and before it whatever its arguments lack.
void Replay::materialise(int op, int wanted, bool again) {
    push(op, wanted, again);
    while (!frames_.empty())
        if (!wait_for_argument()) complete();
}

void Replay::push(int op, int wanted, bool again) {
    const int begin = static_cast<int>(missing_.size());
    for (const int argument : recorded_.arguments[op])
        hot_[recorded_.tensors[argument].storage].last_access = clock_;
    for (const int argument : recorded_.arguments[op]) {
        if (is_defined(argument))
            lock(recorded_.tensors[argument].storage);
        else
            missing_.push_back(argument);
    }
    frames_.push_back({op, wanted, again, begin, begin, static_cast<int>(brought_.size())});
    counts_.max_depth = std::max(counts_.max_depth, static_cast<std::int64_t>(frames_.size()));
}

// Lock storages that are back; true if an operator was pushed that brings back the next one.
bool Replay::wait_for_argument() {
    for (int& next = frames_.back().next; next < static_cast<int>(missing_.size()); ++next) {
        const int tensor = missing_[next];
        const auto& [storage, op, is_root] = recorded_.tensors[tensor];
        if (!is_defined(tensor)) {
            refuse_banished(tensor);
            push(op, tensor, true);
            return true;
        }
        lock(storage);
    }
    return false;
}

void Replay::complete() {
    const Frame frame = frames_.back();
    compute(frame);
    for (const int argument : recorded_.arguments[frame.op])
        unlock(recorded_.tensors[argument].storage);
    if (again_cost_ > most_again_) throw Stopped{ReplayStatus::thrash};
    if (frame.again && deallocation_ == Deallocation::banish) retry_to_banish(frame.op);
    if (!policy_.keeps_dead && deallocation_ == Deallocation::eager) free_dead(frame);
    missing_.resize(frame.missing);
    frames_.pop_back();
}

void Replay::compute(const Frame& frame) {
    allocate(frame.op);
    clock_ += recorded_.costs[frame.op];
    std::int64_t twice = 0;
    arriving_.clear();
    for (const int tensor : recorded_.outputs[frame.op]) {
        const auto& [storage, op, is_root] = recorded_.tensors[tensor];
        const bool is_banished = stored_[storage].banished;
        if (is_root && (stored_[storage].resident || is_banished)) twice += recorded_.bytes[storage];
        if (tensor != frame.wanted && !is_banished) arriving_.push_back(tensor);
    }
    if (frame.wanted >= 0) arriving_.push_back(frame.wanted);
    if (frame.again) {
        again_cost_ += recorded_.costs[frame.op];
        ++counts_.again;
        note_again(frame.op, frame.wanted);
    }
    for (const int tensor : arriving_) define(tensor, frame.again);
    memory_ -= twice;
    release_temporaries();
}

// Make room for all outputs of an operator, also for those that are resident already.
void Replay::allocate(int op) {
    const std::int64_t needed = recorded_.new_bytes[op];
    if (placement_ == Placement::bytes) {
        while (memory_ + needed > budget_) evict_one();
    } else {
        for (const int tensor : recorded_.outputs[op])
            if (recorded_.tensors[tensor].is_root) place(recorded_.tensors[tensor].storage);
        keep_needed_temporaries();
    }
    memory_ += needed;
    counts_.max_memory = std::max(counts_.max_memory, memory_);
}

// Find addresses for a storage, or for its second copy.
void Replay::place(int storage) {
    const std::int64_t size = recorded_.bytes[storage];
    if (size == 0) return;
    std::int64_t offset;
    const bool is_temporary = stored_[storage].resident || stored_[storage].banished;
    while ((offset = arena_.take(size, is_temporary ? recorded_.storages() : storage)) ==
           Arena::kNowhere) {
        const bool by_window = placement_ == Placement::window ||
                               (placement_ == Placement::mixed && arena_.free() >= size);
        by_window ? evict_window(size) : evict_one();
    }
    if (is_temporary)
        temporaries_.push_back({storage, offset});
    else
        offsets_[storage] = offset;
}

// A storage that was resident when its second copy found a place may have been evicted since.
void Replay::keep_needed_temporaries() {
    const auto is_needed = [this](const std::pair<int, std::int64_t>& temporary) {
        const auto [storage, offset] = temporary;
        if (stored_[storage].resident || stored_[storage].banished) return false;
        arena_.hand_to(offset, storage);
        offsets_[storage] = offset;
        return true;
    };
    temporaries_.erase(std::remove_if(temporaries_.begin(), temporaries_.end(), is_needed),
                       temporaries_.end());
}

void Replay::release_temporaries() {
    for (const auto& [storage, offset] : temporaries_) arena_.give_back(offset);
    temporaries_.clear();
}

// Tensors that come back: the wanted one first, then the others.
void Replay::note_again(int op, int wanted) {
    const auto came_back = [this](int tensor, MomentKind kind) {
        if (is_defined(tensor) || stored_[recorded_.tensors[tensor].storage].banished) return;
        ++counts_.outputs_again;
        note(kind, tensor);
    };
    if (wanted >= 0) came_back(wanted, MomentKind::remat);
    for (const int tensor : recorded_.outputs[op])
        if (tensor != wanted) came_back(tensor, MomentKind::remat_sibling);
}

void Replay::define(int tensor, bool again) {
    const int storage = recorded_.tensors[tensor].storage;
    Stored& stored = stored_[storage];
    if (!stored.resident) {
        if (policy_.cost == CostKind::classes) classes_.leave(stored.node, hot_[storage].cost);
        stored.resident = stored.was_resident = true;
        residency_[storage] = ++residencies_[storage];
        if (stored.locks == 0 && !stored.pinned) pool_.append(storage);
    }
    defined_at_[tensor] = residency_[storage];
    if (!again) hot_[storage].last_access = clock_;
}

// Free storages that came back for an operator that has run, but for held ones.
void Replay::free_dead(const Frame& frame) {
    auto kept = brought_.begin() + frame.brought;
    for (auto each = kept; each != brought_.end(); ++each) {
        const Stored& stored = stored_[*each];
        if (stored.resident && stored.holders == 0 && (stored.locks > 0 || stored.pinned))
            *kept++ = *each;
        else
            free_if_dead(*each);
    }
    brought_.erase(kept, brought_.end());
    for (const int tensor : recorded_.outputs[frame.op])
        brought_.push_back(recorded_.tensors[tensor].storage);
    if (frames_.size() > 1) return;
    for (const int tensor : recorded_.outputs[frame.op])
        free_if_dead(recorded_.tensors[tensor].storage);
    brought_.clear();
}

void Replay::free_if_dead(int storage) {
    if (stored_[storage].holders == 0 && pool_.contains(storage))
        evict(storage, MomentKind::evict_eager);
}

// -- evicting ------------------------------------------------------------------------------------

void Replay::evict_one() {
    if (pool_.size() == 0) throw Stopped{ReplayStatus::oom};
    evict(cheapest(), MomentKind::evict);
}

// Evict neighbours in the arena together, of the backward pass only if nothing else makes room.
void Replay::evict_window(std::int64_t size) {
    std::vector<int> window;
    if (policy_.backward_last) window = cheapest_window(size, true);
    if (window.empty()) window = cheapest_window(size, false);
    if (window.empty()) throw Stopped{ReplayStatus::oom};
    for (const int storage : window) evict(storage, MomentKind::evict);
}

std::vector<int> Replay::cheapest_window(std::int64_t size, bool only_first_class) {
    return arena_.cheapest_window(size, [&](int s) {
        if (s >= recorded_.storages() || !pool_.contains(s)) return -1.0;
        if (only_first_class && stored_[s].backward) return -1.0;
        ++counts_.evaluations;
        const auto staleness = static_cast<double>(clock_ - hot_[s].last_access);
        const auto cost = std::max(0.0, static_cast<double>(cost_of(policy_.cost, *this, s)));
        return staleness > 0 ? cost / staleness : std::numeric_limits<double>::max();
    });
}

int Replay::cheapest() {
    if (policy_.cost == CostKind::random) {
        ++counts_.evaluations;
        return pool_.nth(draw_(pool_.size()));
    }
    const Hot* const hot = hot_.data();
    const bool has_neighbours =
        placement_ == Placement::neighbours || placement_ == Placement::mixed;
    if (policy_.cost == CostKind::none && !policy_.by_staleness && policy_.by_size &&
        !has_neighbours)
        return least_score([hot](int s) { return hot[s].per_byte; });
    const auto weight = [this, hot, has_neighbours](int s) {
        double bytes = hot[s].bytes;
        if (has_neighbours && policy_.by_size && bytes > 0)
            bytes += static_cast<double>(arena_.free_beside(offsets_[s]));
        return weight_of(policy_, bytes, static_cast<double>(clock_ - hot[s].last_access));
    };
    return least_score([&](int s) {
        return score_of(weight(s), [&] { return cost_of(policy_.cost, *this, s); });
    });
}

// The candidate with the least score, the last of several; a score of zero ends the search.
template <class Score>
int Replay::least_score(Score score_of) {
    const auto& slots = pool_.slots();
    const auto is_first_class = [this](int s) { return s >= 0 && !stored_[s].backward; };
    const bool only_first_class =
        policy_.backward_last && std::any_of(slots.begin(), slots.end(), is_first_class);
    std::int64_t evaluations = 0;
    int chosen = Pool::kGap;
    double least = kInfinity;
    for (const int s : slots) {
        if (s < 0 || (only_first_class && stored_[s].backward)) continue;
        ++evaluations;
        const double score = score_of(s);
        if (score <= least) {
            least = score;
            chosen = s;
        }
        if (score == 0) break;
    }
    counts_.evaluations += evaluations;
    return chosen;
}

void Replay::evict(int storage, MomentKind kind) {
    Stored& stored = stored_[storage];
    pool_.remove(storage);
    memory_ -= recorded_.bytes[storage];
    stored.resident = false;
    residency_[storage] = 0;
    if (placement_ != Placement::bytes && recorded_.bytes[storage] > 0)
        arena_.give_back(offsets_[storage]);
    stored.node = classes_.add(hot_[storage].cost);
    if (policy_.cost == CostKind::classes) join_classes(storage);
    ++(kind == MomentKind::evict ? counts_.evicted : counts_.evicted_eager);
    note(kind, *recorded_.views[storage].begin());
}

void Replay::join_classes(int storage) {
    const auto join = [&](int other) {
        if (stored_[other].banished) return;
        ++counts_.looks;
        if (!stored_[other].resident) classes_.join(stored_[storage].node, stored_[other].node);
    };
    for (const int parent : parents(storage)) join(parent);
    for (const int child : children(storage)) join(child);
}

// The sum over the distinct classes next to a storage.
std::int64_t Replay::cost_of_classes(int storage) {
    std::int64_t sum = 0;
    roots_.clear();
    const auto add = [&](int other) {
        if (stored_[other].banished) return;
        ++counts_.looks;
        if (stored_[other].resident) return;
        const int root = classes_.root(stored_[other].node);
        if (std::find(roots_.begin(), roots_.end(), root) != roots_.end()) return;
        roots_.push_back(root);
        sum += classes_.cost(root);
    };
    for (const int parent : parents(storage)) add(parent);
    for (const int child : children(storage)) add(child);
    return sum;
}

// The evicted storages reached through evicted ones only.
Reached Replay::reached(int storage, bool towards_parents) {
    Reached found;
    ++search_;
    front_.assign(1, storage);
    while (!front_.empty()) {
        const int from = front_.back();
        front_.pop_back();
        for (const int s : towards_parents ? parents(from) : children(from)) {
            if (stored_[s].banished) continue;
            ++counts_.looks;
            if (!is_evicted(s) || seen_[s] == search_) continue;
            seen_[s] = search_;
            ++found.count;
            found.cost += hot_[s].cost;
            front_.push_back(s);
        }
    }
    return found;
}

// Cost of every operator that would have to run to bring a storage back, each once.
std::int64_t Replay::cost_of_operators(int storage) {
    std::int64_t sum = 0;
    const auto add = [&](int s) {
        for (const int tensor : recorded_.views[s]) {
            const int op = recorded_.tensors[tensor].op;
            if (op > current_ || seen_op_[op] == search_) continue;
            seen_op_[op] = search_;
            sum += recorded_.costs[op];
        }
    };
    ++search_;
    add(storage);
    front_.assign(1, storage);
    while (!front_.empty()) {
        const int from = front_.back();
        front_.pop_back();
        for (const int s : parents(from)) {
            if (stored_[s].banished) continue;
            ++counts_.looks;
            if (!is_evicted(s) || seen_[s] == search_) continue;
            seen_[s] = search_;
            add(s);
            front_.push_back(s);
        }
    }
    return sum;
}

// -- banishing -----------------------------------------------------------------------------------

// Free a dead storage for good, unless one of its children may have to come back.
void Replay::try_to_banish(int storage) {
    std::vector<int> dead{storage};
    while (!dead.empty()) {
        const int s = dead.back();
        dead.pop_back();
        Stored& stored = stored_[s];
        const auto comes_back = [this](int child) { return is_evicted(child); };
        const Span below = children(s);
        if (stored.banished || stored.locks > 0 ||
            std::any_of(below.begin(), below.end(), comes_back))
            continue;
        if (stored.resident) evict(s, MomentKind::evict_eager);
        stored.banished = true;
        stored.pinned = false;
        for (const int child : below)
            if (!stored_[child].banished) pin(child);
        const Span above = parents(s);
        for (const int* parent = above.end(); parent != above.begin();)
            if (stored_[*--parent].holders == 0) dead.push_back(*parent);
    }
}

void Replay::retry_to_banish(int op) {
    for (const int tensor : recorded_.outputs[op])
        for (const int parent : parents(recorded_.tensors[tensor].storage))
            if (!stored_[parent].banished && stored_[parent].holders == 0) try_to_banish(parent);
}

// -- small steps ---------------------------------------------------------------------------------

void Replay::pin(int storage) {
    stored_[storage].pinned = true;
    pool_.remove(storage);
}

void Replay::lock(int storage) {
    ++stored_[storage].locks;
    pool_.remove(storage);
}

void Replay::unlock(int storage) {
    Stored& stored = stored_[storage];
    if (--stored.locks == 0 && stored.resident && !stored.pinned) pool_.append(storage);
}

void Replay::note(MomentKind kind, int tensor) {
    if (with_moments_) moments_.push_back({kind, clock_, current_, tensor, memory_});
}

}  // namespace tightfit
