// Contents that may be evicted, and which go first; `pool.py` says why.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "../../_core/eviction.hpp"
#include "history.hpp"
#include "ledger.hpp"

namespace tightfit::online {

struct Policy {
    CostKind cost;
    bool by_size, by_staleness, keeps_dead;
    std::int64_t smallest_bytes;
    bool look_at_all;
};

class Pool {
public:
    Pool(Policy policy, Ledger& ledger) : policy_(policy), ledger_(ledger) {}

    bool is_small(const Content& content) const {
        return content.size_bytes < policy_.smallest_bytes;
    }

    // A content is resident: it may be evicted if it can be computed again.
    void offer(Content& content) {
        if (is_small(content) || !content.maker || content.position >= 0) return;
        content.position = static_cast<std::int64_t>(contents_.size());
        contents_.emplace_back(&content);
    }

    // A content may not be evicted any more, or is gone; the last one takes its place.
    void withdraw(Content& content) {
        if (content.is_retired) {
            content.is_retired = false;
            std::erase_if(retired_, [&](const auto& other) { return other.get() == &content; });
        }
        if (content.position < 0) return;
        const auto position = static_cast<std::size_t>(std::exchange(content.position, -1));
        Ref<Content> gone = std::move(contents_[position]);
        if (position + 1 < contents_.size()) {
            contents_[position] = std::move(contents_.back());
            contents_[position]->position = static_cast<std::int64_t>(position);
        }
        contents_.pop_back();
    }

    // Evicts until so many bytes are free, or nothing is left; returns whether any were.
    bool free(std::int64_t lacking_bytes) {
        const std::int64_t started = now_ns();
        std::int64_t scoring_ns = 0, freed_bytes = 0;
        while (freed_bytes < lacking_bytes) {
            const std::int64_t before = now_ns();
            rank(candidates());
            scoring_ns += now_ns() - before;
            if (ranked_.empty()) break;
            std::size_t most = ranked_.size();
            if (!policy_.look_at_all) most = std::max<std::size_t>(1, most / kShareOfSample);
            for (std::size_t n = 0; n < most && freed_bytes < lacking_bytes; ++n) {
                Ref<Content> content = next();
                freed_bytes += content->size_bytes;
                evict(*content);
            }
        }
        ranked_.clear();
        ledger_.searched_since(started, scoring_ns);
        return freed_bytes > 0;
    }

    // Frees contents that only the runtime holds.
    void drop(Content& content) {
        withdraw(content);
        content.leave();
        left(content);
    }

    // A content brought back for others is not needed by them now: it goes first of all.
    void retire(Content& content) {
        if (policy_.keeps_dead || !content.maker || content.is_retired) return;
        content.is_retired = true;
        retired_.emplace_back(&content);
    }

    // Frees retired contents: the operator that others were brought back for has run.
    void sweep() {
        while (!retired_.empty()) {
            Ref<Content> content = std::move(retired_.back());
            retired_.pop_back();
            content->is_retired = false;
            if (content->is_private() && !content->locks) drop(*content);
        }
    }

    // The program has let go of a content that was resident.
    void ended(Content& content) {
        withdraw(content);
        content.lose_storage();
        left(content);
    }

    // A content is not resident any more: it joins the class of its evicted neighbours.
    void left(Content& content) {
        if (costs_are_known_) tell_those_after(content);
        if (policy_.cost != CostKind::classes || !content.maker) return;
        content.node = classes_.add(content.maker->cost);
        each_beside(content, [&](int other) { classes_.join(content.node, other); });
    }

    // A content that was gone is about to be resident.
    void came_back(Content& content) {
        if (costs_are_known_) tell_those_after(content);
        if (policy_.cost == CostKind::classes && content.maker && content.node >= 0)
            classes_.leave(content.node, content.maker->cost);
    }

    void clear() {
        retired_.clear();
        for (auto& content : contents_) content->position = -1;
        contents_.clear();
    }

    // ---- terms of a score

    static std::int64_t own_cost(const Content& content) {
        return content.maker ? content.maker->cost : 0;
    }

    Reached reached_before(Content& content) { return reached<true>(content); }
    Reached reached_after(Content& content) { return reached<false>(content); }

    std::int64_t cost_of_classes(Content& content) {
        std::int64_t sum = 0;
        roots_.clear();
        each_beside(content, [&](int node) { roots_.push_back(classes_.root(node)); });
        std::sort(roots_.begin(), roots_.end());
        roots_.erase(std::unique(roots_.begin(), roots_.end()), roots_.end());
        for (int root : roots_) sum += classes_.cost(root);
        return sum;
    }

    // It is kept in mind until it may change.
    std::int64_t cost_of_operators(Content& content) {
        costs_are_known_ = true;
        return content.known_cost = own_cost(content) + cost_before(*content.maker);
    }

private:
    static constexpr int kRecentOperators = 8;
    static constexpr int kMostAncestors = 512;
    static constexpr std::size_t kLeastSample = 64;
    static constexpr std::size_t kShareOfSample = 4;

    struct Ranked {
        double score;
        std::size_t order;
        Ref<Content> content;
        bool operator<(const Ranked& other) const {  // heaps have the greatest in front
            return score != other.score ? score > other.score : order > other.order;
        }
    };

    void evict(Content& content) {
        withdraw(content);
        if (Storage storage = content.memory()) take_memory(*storage);
        if (content.maker && content.is_held) content.maker->keep_reads();
        content.leave();
        left(content);
        ledger_.evicted();
    }

    // Makes a heap of candidates by score; those alike in the order they are in.
    void rank(const std::vector<Content*>& candidates) {
        ranked_.clear();
        for (Content* content : candidates) {
            const double score = policy_.cost == CostKind::random ? draw() : score_now(*content);
            ranked_.push_back({score, ranked_.size(), content});
        }
        std::make_heap(ranked_.begin(), ranked_.end());
    }

    // Takes the one with the least score; scores rise when neighbours are evicted.
    Ref<Content> next() {
        for (;;) {
            std::pop_heap(ranked_.begin(), ranked_.end());
            Ranked& least = ranked_.back();
            const double score =
                policy_.cost == CostKind::random ? least.score : score_now(*least.content);
            if (score <= least.score) break;
            least.score = score;
            std::push_heap(ranked_.begin(), ranked_.end());
        }
        Ref<Content> found = std::move(ranked_.back().content);
        ranked_.pop_back();
        return found;
    }

    double score_now(Content& content) {
        const auto staleness = static_cast<double>(ledger_.clock() - content.used_at + 1);
        const auto bytes = static_cast<double>(content.size_bytes);
        return score_of(weight_of(policy_, bytes, staleness), [&] {
            const bool is_known = content.known_cost >= 0;
            return is_known ? content.known_cost : cost_of(policy_.cost, *this, content);
        });
    }

    // Candidates for eviction, or a sample: retired contents, else the first turn there is.
    std::vector<Content*> candidates() {
        std::vector<Content*> found;
        for (auto& content : retired_)
            if (content->is_private() && !content->locks) found.push_back(content.get());
        if (!found.empty()) return found;
        const auto count = contents_.size();
        const auto root = static_cast<std::size_t>(std::sqrt(static_cast<double>(count)));
        const std::size_t size = std::max(kLeastSample, root);
        if (policy_.look_at_all || size >= count) {
            first_turn(count, found);
            return found;
        }
        for (std::size_t n = 0; n < size; ++n) {  // the sample comes to the front
            const std::size_t other = n + random_() % (count - n);
            std::swap(contents_[n], contents_[other]);
            contents_[n]->position = static_cast<std::int64_t>(n);
            contents_[other]->position = static_cast<std::int64_t>(other);
        }
        if (first_turn(size, found) != 0) {  // another may come earlier
            first_turn(count, found);
            for (std::size_t n = 0; found.size() > size && n < size; ++n)
                std::swap(found[n], found[n + random_() % (found.size() - n)]);
            if (found.size() > size) found.resize(size);
        }
        return found;
    }

    // Finds those whose turn it is among the first ones, and returns their turn.
    // Gradients in flight and contents just used go only if nothing else may. Contents that a call
    // waits for go last of all: they will have to come back.
    int first_turn(std::size_t count, std::vector<Content*>& found) const {
        const std::int64_t latest = ledger_.operators() - kRecentOperators;
        int first = 4;
        for (std::size_t n = 0; n < count; ++n) {
            Content& content = *contents_[n];
            int turn = content.is_backward ? 1 : 0;
            if (content.locks) {
                if (content.fast_locks) continue;
                turn = 3;
            } else if (content.last_op > latest) {
                turn = 2;
            }
            if (turn < first) {
                first = turn;
                found.clear();
            }
            if (turn == first) found.push_back(&content);
        }
        return first;
    }

    double draw() { return std::uniform_real_distribution<double>()(random_); }

    // The cost of the calls that would have to run before one: each once, at most 512 of them.
    std::int64_t cost_before(Call& call) {
        const std::int64_t look = ++looks_;
        std::int64_t cost = 0;
        int count = 0;
        call.look = look;
        calls_.assign(1, &call);
        while (!calls_.empty() && count < kMostAncestors) {
            Call& reader = *calls_.back();
            calls_.pop_back();
            for (Read& read : reader.reads) {
                Content& content = *read.content;
                Call* maker = content.maker.get();
                if (content.is_resident || !maker) continue;
                content.known_cost = maker->cost;  // counted: notified if that changes
                if (maker->look == look) continue;
                maker->look = look;
                cost += maker->cost;
                ++count;
                calls_.push_back(maker);
            }
        }
        return cost;
    }

    // The cost of a content has changed: forget costs of those that would need it first.
    void tell_those_after(Content& content) {
        content.known_cost = -1;
        front_.assign(1, &content);
        while (!front_.empty()) {
            Content& next = *front_.back();
            front_.pop_back();
            each_after(next, [&](Content& other) {
                if (other.known_cost < 0) return;
                other.known_cost = -1;
                if (!other.is_resident) front_.push_back(&other);
            });
        }
    }

    template <class Do>
    static void each_before(Content& content, Do act) {
        if (!content.maker) return;
        for (Read& read : content.maker->reads) act(*read.content);
    }

    template <class Do>
    static void each_after(Content& content, Do act) {
        for (Read* read = content.first; read; read = read->after)
            for (Content* output : read->call->outputs)
                if (output) act(*output);
    }

    // Evicted contents that are reached through evicted contents only, each once.
    template <bool is_before>
    Reached reached(Content& content) {
        const std::int64_t look = ++looks_;
        Reached found;
        content.look = look;
        front_.assign(1, &content);
        while (!front_.empty() && found.count < kMostAncestors) {
            Content& next = *front_.back();
            front_.pop_back();
            const auto visit = [&](Content& other) {
                if (other.is_resident || other.look == look) return;
                other.look = look;
                ++found.count;
                found.cost += own_cost(other);
                front_.push_back(&other);
            };
            if constexpr (is_before)
                each_before(next, visit);
            else
                each_after(next, visit);
        }
        return found;
    }

    // Visits the nodes of the neighbours that are not resident.
    template <class Do>
    void each_beside(Content& content, Do act) {
        const auto visit = [&](Content& other) {
            if (!other.is_resident && other.node >= 0) act(other.node);
        };
        each_before(content, visit);
        each_after(content, visit);
    }

    Policy policy_;
    Ledger& ledger_;
    std::vector<Ref<Content>> contents_, retired_;
    std::vector<Ranked> ranked_;
    EvictedClasses classes_;
    std::minstd_rand random_;
    bool costs_are_known_ = false;
    std::int64_t looks_ = 0;
    std::vector<int> roots_;
    std::vector<Call*> calls_;
    std::vector<Content*> front_;
};

}  // namespace tightfit::online
