// Dynamic tensor rematerialization of a recorded program (Kirisame et al., appendix C).
// `tests/support/reference/replay.py` is the same in readable Python; tests compare the two.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "eviction.hpp"
#include "pool.hpp"
#include "recorded.hpp"

namespace tightfit {

enum class Deallocation : int { eager, banish, ignore };

// The aim of an eviction; `eviction/replayed.py` explains each.
enum class Placement : int { bytes, arena, neighbours, window, mixed };

struct ReplayPolicy {
    CostKind cost;
    bool by_size, by_staleness;
    bool keeps_dead, backward_last;
};

enum class MomentKind : int { evict, evict_eager, remat, remat_sibling };

struct Moment {
    MomentKind kind;
    std::int64_t clock;
    int op, tensor;
    std::int64_t memory;
};

enum class ReplayStatus : int { ok, oom, thrash };

struct ReplayCounts {
    ReplayStatus status = ReplayStatus::ok;
    std::int64_t max_memory = 0, total_cost = 0;
    std::int64_t evicted = 0, evicted_eager = 0, again = 0, outputs_again = 0;
    std::int64_t evaluations = 0, looks = 0, max_depth = 0;
};

class Replay {
public:
    using Draw = std::function<int(int)>;

    Replay(const Recorded& recorded, ReplayPolicy policy, Deallocation deallocation,
           Placement placement, std::int64_t budget, std::int64_t most_again, Draw draw,
           bool with_moments);

    ReplayCounts run();
    const std::vector<Moment>& moments() const { return moments_; }

    // The terms of a score.
    std::int64_t own_cost(int storage) const { return hot_[storage].cost; }
    Reached reached_before(int storage) { return reached(storage, true); }
    Reached reached_after(int storage) { return reached(storage, false); }
    std::int64_t cost_of_classes(int storage);
    std::int64_t cost_of_operators(int storage);

private:
    struct Stopped {
        ReplayStatus status;
    };

    // Facts of a storage for a score.
    struct Hot {
        double bytes, per_byte;
        std::int64_t last_access, cost;
    };

    struct Stored {
        int locks = 0, holders = 0;
        int parents = 0, children = 0;  // how many of the recorded ones are known
        int node = -1;  // its class while it is not resident
        bool resident = false, was_resident = false, pinned = false, banished = false;
        bool backward = false;
    };

    // An operator that waits until its missing arguments are back.
    struct Frame {
        int op, wanted;
        bool again;
        int missing, next;  // where its missing arguments begin, and the next one
        int brought;  // how many storages had been brought back before
    };

    void run_first(int op);
    void create(int tensor);
    void hold(int tensor);
    void release(int storage);
    void refuse_banished(int tensor) const;
    void finish();

    void materialise(int op, int wanted, bool again);
    void push(int op, int wanted, bool again);
    bool wait_for_argument();
    void complete();
    void compute(const Frame& frame);
    void allocate(int op);
    void place(int storage);
    void keep_needed_temporaries();
    void release_temporaries();
    void define(int tensor, bool again);
    void note_again(int op, int wanted);
    void free_dead(const Frame& frame);
    void free_if_dead(int storage);

    void evict_one();
    void evict_window(std::int64_t size);
    int cheapest();
    template <class Score>
    int least_score(Score score_of);
    std::vector<int> cheapest_window(std::int64_t size, bool only_first_class);
    void evict(int storage, MomentKind kind);
    void join_classes(int storage);
    Reached reached(int storage, bool towards_parents);
    bool is_evicted(int storage) const {
        return stored_[storage].was_resident && !stored_[storage].resident &&
               !stored_[storage].banished;
    }

    void try_to_banish(int storage);
    void retry_to_banish(int op);

    bool is_defined(int tensor) const {
        return defined_at_[tensor] == residency_[recorded_.tensors[tensor].storage];
    }
    Span parents(int s) const { return recorded_.parents.first_of(s, stored_[s].parents); }
    Span children(int s) const { return recorded_.children.first_of(s, stored_[s].children); }
    void pin(int storage);
    void lock(int storage);
    void unlock(int storage);
    void note(MomentKind kind, int tensor);

    const Recorded& recorded_;
    const ReplayPolicy policy_;
    const Deallocation deallocation_;
    const Placement placement_;
    const std::int64_t budget_, most_again_;
    const Draw draw_;
    const bool with_moments_;

    std::vector<Hot> hot_;
    std::vector<Stored> stored_;
    std::vector<int> residency_;  // per storage: how often it has become resident; 0: it is not
    std::vector<int> defined_at_;  // per tensor: the residency in which it was computed
    std::vector<int> residencies_;  // per storage, also while it is not resident
    Pool pool_;
    Arena arena_;
    std::vector<std::int64_t> offsets_;  // per storage, in the arena
    std::vector<std::pair<int, std::int64_t>> temporaries_;  // storages computed a second time
    EvictedClasses classes_;
    std::vector<Frame> frames_;
    std::vector<int> missing_, brought_, front_, roots_, arriving_;
    std::vector<int> seen_, seen_op_;
    int search_ = 0;
    bool backward_ = false;
    int current_ = -1;
    std::int64_t clock_ = 1, memory_ = 0, again_cost_ = 0;
    ReplayCounts counts_;
    std::vector<Moment> moments_;
};

}  // namespace tightfit
