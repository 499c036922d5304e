#include "orders.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "random.hpp"

namespace tightfit {

int OrderProblem::add_value(Bytes size, int kept_group) {
    values_.push_back({size, kept_group, -1, {}});
    return static_cast<int>(values_.size()) - 1;
}

int OrderProblem::add_op(int group, std::vector<int> reads, std::vector<int> writes, Bytes extra,
                         std::vector<int> after) {
    const int op = op_count();
    if (group < 0 || (op > 0 && group < ops_.back().group))
        throw std::invalid_argument("groups are numbered in the order of the ops");
    for (int value : reads) {
        const int writer = values_.at(value).writer;
        if (writer < 0) throw std::invalid_argument("an op reads a value that no op has written");
        values_[value].readers.push_back(op);
        after.push_back(writer);
    }
    for (int value : writes) {
        Value& written = values_.at(value);
        written.writer = op;
        if (written.kept_group >= 0) {
            kept_bytes_.resize(std::max<std::size_t>(kept_bytes_.size(), written.kept_group + 1));
            kept_bytes_[written.kept_group] += written.size;
        }
    }
    kept_bytes_.resize(std::max<std::size_t>(kept_bytes_.size(), group + 1));
    for (int earlier : after)
        if (earlier < 0 || earlier >= op) throw std::invalid_argument("an op follows a later one");
    std::sort(after.begin(), after.end());
    after.erase(std::unique(after.begin(), after.end()), after.end());
    for (int earlier : after) ops_[earlier].before.push_back(op);
    group_end_.resize(group + 1, op);
    group_end_[group] = op + 1;
    ops_.push_back({group, std::move(reads), std::move(writes), extra, std::move(after), {}});
    return op;
}

// An order with the bytes alive at each of its positions.
class OrderWalk {
public:
    OrderWalk(const OrderProblem& problem, Order order)
        : problem_(problem),
          order_(std::move(order)),
          position_(order_.size()),
          alive_before_(order_.size() + 1, 0),
          during_(order_.size(), 0) {
        for (std::size_t at = 0; at < order_.size(); ++at)
            position_.at(order_[at]) = static_cast<int>(at);
        weigh(0, static_cast<int>(order_.size()));
    }

    const Order& order() const { return order_; }
    int op_at(int at) const { return order_[at]; }
    int position(int op) const { return position_[op]; }
    Bytes during(int at) const { return during_[at]; }
    Bytes peak() const {
        return during_.empty() ? 0 : *std::max_element(during_.begin(), during_.end());
    }

    // Put other ops, the same ones in another order, at the positions from `first` on.
    void rearrange(int first, const Order& ops) {
        for (std::size_t k = 0; k < ops.size(); ++k) {
            order_[first + k] = ops[k];
            position_[ops[k]] = first + static_cast<int>(k);
        }
        weigh(first, first + static_cast<int>(ops.size()));
    }

    // The excess over a number of bytes, summed over positions.
    Bytes excess(int first, int end, Bytes target) const {
        Bytes sum = 0;
        for (int at = first; at < end; ++at) sum += std::max<Bytes>(0, during_[at] - target);
        return sum;
    }

private:
    // Nothing before `first` or from `end` on depends on the order between them.
    void weigh(int first, int end) {
        Bytes alive = alive_before_[first];
        for (int at = first; at < end; ++at) {
            alive_before_[at] = alive;
            const OrderProblem::Op& op = problem_.ops_[order_[at]];
            for (int value : op.writes) alive += problem_.values_[value].size;
            during_[at] = alive + op.extra;
            for (int value : op.writes) alive -= ended(value, at);
            for (int value : op.reads) alive -= ended(value, at);
            alive -= kept_until(at);
        }
        alive_before_[end] = alive;
    }

    // Bytes that end with the group of which the last op runs at a position.
    Bytes kept_until(int at) const {
        const int following = at + 1 < static_cast<int>(order_.size())
                                  ? problem_.ops_[order_[at + 1]].group
                                  : problem_.ops_[order_[at]].group;
        Bytes bytes = 0;
        for (int group = problem_.ops_[order_[at]].group; group < following; ++group)
            bytes += problem_.kept_bytes_[group];
        return bytes;
    }

    // Bytes freed at a position because the value is not read later.
    Bytes ended(int value, int at) const {
        const OrderProblem::Value& one = problem_.values_[value];
        if (one.kept_group >= 0) return 0;
        for (int reader : one.readers)
            if (position_[reader] > at) return 0;
        return one.size;
    }

    const OrderProblem& problem_;
    Order order_;
    std::vector<int> position_;
    std::vector<Bytes> alive_before_, during_;
};

// Ops chosen one after the other, each time the ready one that leaves the fewest bytes alive.
class OrderList {
public:
    OrderList(const OrderProblem& problem, bool backwards)
        : problem_(problem),
          backwards_(backwards),
          waits_for_(problem.op_count()),
          readers_left_(problem.values_.size()) {
        for (std::size_t v = 0; v < problem.values_.size(); ++v)
            readers_left_[v] = static_cast<int>(problem.values_[v].readers.size());
        for (int op = 0; op < problem.op_count(); ++op)
            waits_for_[op] = static_cast<int>(earlier(op).size());
    }

    Order run() {
        Order order;
        int first = 0;
        for (const int end : problem_.group_end_) {
            groups_.push_back({first, end});
            first = end;
        }
        if (backwards_) std::reverse(groups_.begin(), groups_.end());
        for (const auto& [begin, end] : groups_) {
            ready_.clear();
            for (int op = begin; op < end; ++op)
                if (waits_for_[op] == 0) ready_.push_back(op);
            for (int count = begin; count < end; ++count) order.push_back(take());
        }
        if (backwards_) std::reverse(order.begin(), order.end());
        return order;
    }

private:
    const std::vector<int>& earlier(int op) const {
        return backwards_ ? problem_.ops_[op].before : problem_.ops_[op].after;
    }
    const std::vector<int>& later(int op) const {
        return backwards_ ? problem_.ops_[op].after : problem_.ops_[op].before;
    }

    int take() {
        std::size_t best = 0;
        Bytes least = growth(ready_[0]);
        for (std::size_t k = 1; k < ready_.size(); ++k) {
            const Bytes bytes = growth(ready_[k]);
            const bool sooner = backwards_ ? ready_[k] > ready_[best] : ready_[k] < ready_[best];
            if (bytes < least || (bytes == least && sooner)) {
                best = k;
                least = bytes;
            }
        }
        const int op = ready_[best];
        ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(best));
        for (int value : problem_.ops_[op].reads) --readers_left_[value];
        const int group = problem_.ops_[op].group;
        for (int next : later(op))
            if (--waits_for_[next] == 0 && problem_.ops_[next].group == group)
                ready_.push_back(next);
        return op;
    }

    // Forwards: bytes alive after the op less those before it; backwards the other way round.
    Bytes growth(int op) const {
        const OrderProblem::Op& one = problem_.ops_[op];
        Bytes made = 0, freed = 0;
        for (int value : one.writes) {
            const OrderProblem::Value& written = problem_.values_[value];
            if (written.kept_group >= 0 || !written.readers.empty()) made += written.size;
        }
        for (int value : one.reads) {
            const OrderProblem::Value& read = problem_.values_[value];
            const int readers = backwards_ ? static_cast<int>(read.readers.size()) : 1;
            if (read.kept_group < 0 && readers_left_[value] == readers) freed += read.size;
        }
        return backwards_ ? freed - made : made - freed;
    }

    const OrderProblem& problem_;
    bool backwards_;
    std::vector<int> waits_for_;  // ops that have to be chosen before each
    std::vector<int> readers_left_;  // readers of each value that are not chosen yet
    std::vector<std::pair<int, int>> groups_;
    std::vector<int> ready_;
};

namespace {

constexpr double kFirstStep = 0.1, kLastStep = 0.0005;  // of the peak, by which to lower it
constexpr double kHot = 0.003, kCold = 1e-6;  // of the target: excess accepted at random
constexpr int kMovesPerOp = 40, kLeastMoves = 4000;  // towards one target
constexpr int kFurthest = 2000;  // positions that one move spans
constexpr int kMovesPerClock = 64;
// Graphs of so few ops end with wide moves. Their values are few: one more is a large share.
constexpr int kSmall = 64, kWideMoves = 20000;
constexpr double kWideHot = 0.1;

}  // namespace

// Annealing towards lower and lower targets; its measure is the excess over the target.
class OrderSearch {
public:
    OrderSearch(const OrderProblem& problem, const Order& order, std::int64_t moves,
                double seconds, std::uint64_t seed)
        : problem_(problem),
          walk_(problem, order),
          best_(order),
          best_peak_(walk_.peak()),
          random_(seed),
          moves_left_(moves),
          stop_(std::chrono::steady_clock::now() +
                std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                    std::chrono::duration<double>(std::min(seconds, 1e6)))),
          chosen_(problem.op_count(), 0) {}

    Order run(Bytes enough) {
        lower(enough);
        if (best_peak_ > enough && problem_.op_count() <= kSmall) {
            is_wide_ = true;
            moves_left_ = kWideMoves;
            lower(enough);
        }
        return best_;
    }

private:
    void lower(Bytes enough) {
        double step = kFirstStep;
        while (best_peak_ > enough && step > kLastStep && !out_of_time()) {
            const auto lower = static_cast<Bytes>(static_cast<double>(best_peak_) * (1.0 - step));
            if (reach(std::max(enough, lower)))
                step = std::min(kFirstStep, 1.5 * step);
            else
                step /= 2;
        }
    }

    bool out_of_time() {
        if (moves_left_ <= 0) return true;
        if (moves_left_ % kMovesPerClock == 0 && std::chrono::steady_clock::now() >= stop_)
            moves_left_ = 0;
        return moves_left_ <= 0;
    }

    // Look for an order whose peak is at most the target.
    bool reach(Bytes target) {
        const int ops = problem_.op_count();
        walk_.rearrange(0, best_);
        Bytes excess = walk_.excess(0, ops, target);
        find_fullest();
        const int most = std::max(kLeastMoves, kMovesPerOp * ops);
        const double hot = (is_wide_ ? kWideHot : kHot) * static_cast<double>(target);
        for (int k = 0; k < most && !out_of_time(); ++k, --moves_left_) {
            const double heat = hot * std::pow(kCold / kHot, static_cast<double>(k) / most);
            excess += move(target, heat);
            if (excess > 0) continue;
            best_ = walk_.order();
            best_peak_ = walk_.peak();
            return true;
        }
        return false;
    }

    // Try one move; return by how much the excess changed.
    Bytes move(Bytes target, double heat) {
        const int at = full_position(target);
        int first, end;
        if (random_.uniform() < 0.5 ? !pull_before(at, first, end) : !push_after(at, first, end))
            return 0;
        const Bytes before = walk_.excess(first, end, target);
        old_.assign(walk_.order().begin() + first, walk_.order().begin() + end);
        walk_.rearrange(first, new_);
        const Bytes change = walk_.excess(first, end, target) - before;
        if (change > 0 && random_.uniform() >= std::exp(-static_cast<double>(change) / heat)) {
            walk_.rearrange(first, old_);
            return 0;
        }
        find_fullest();
        return change;
    }

    void find_fullest() {
        fullest_ = 0;
        for (int at = 1; at < problem_.op_count(); ++at)
            if (walk_.during(at) > walk_.during(fullest_)) fullest_ = at;
    }

    // A position above the target: the fullest one, or one at random.
    int full_position(Bytes target) {
        for (int k = 0; k < 4 && random_.uniform() < 0.75; ++k) {
            const int at = random_.below(problem_.op_count());
            if (walk_.during(at) > target) return at;
        }
        return fullest_;
    }

    // From 1 to the given number; short distances as often as long ones.
    int distance(int most) {
        most = std::min(most, kFurthest);
        return std::min(most, static_cast<int>(std::exp(random_.uniform() * std::log(most + 1.0))));
    }

    // By how much a wide move goes beyond the full position: over what fills it, too.
    int further(int most) { return is_wide_ ? random_.below(most + 1) : 0; }

    // Let an op that runs later, and all that it waits for, run before position `at`.
    bool pull_before(int at, int& first, int& end) {
        const int group = problem_.ops_[walk_.op_at(at)].group;
        const int most = problem_.group_end_[group] - 1 - at;
        if (most < 1) return false;
        first = at - further(at - problem_.group_begin(group));
        end = at + distance(most) + 1;
        chosen_[walk_.op_at(end - 1)] = 1;
        for (int k = end - 1; k >= first; --k)
            if (chosen_[walk_.op_at(k)])
                for (int earlier : problem_.ops_[walk_.op_at(k)].after)
                    if (walk_.position(earlier) >= first) chosen_[earlier] = 1;
        return arrange(first, end, true);
    }

    // Let an op that runs earlier, and all that waits for it, run after position `at`.
    bool push_after(int at, int& first, int& end) {
        const int group = problem_.ops_[walk_.op_at(at)].group;
        const int most = at - problem_.group_begin(group);
        if (most < 1) return false;
        end = at + 1 + further(problem_.group_end_[group] - 1 - at);
        first = at - distance(most);
        chosen_[walk_.op_at(first)] = 1;
        for (int k = first; k < end; ++k)
            if (chosen_[walk_.op_at(k)])
                for (int later : problem_.ops_[walk_.op_at(k)].before)
                    if (walk_.position(later) < end) chosen_[later] = 1;
        return arrange(first, end, false);
    }

    // The ops of a window with the chosen ones first or last; false if nothing changes.
    bool arrange(int first, int end, bool chosen_first) {
        new_.clear();
        for (const bool part : {chosen_first, !chosen_first})
            for (int k = first; k < end; ++k)
                if (static_cast<bool>(chosen_[walk_.op_at(k)]) == part)
                    new_.push_back(walk_.op_at(k));
        bool same = true;
        for (int k = first; k < end; ++k) {
            chosen_[walk_.op_at(k)] = 0;
            same = same && new_[k - first] == walk_.op_at(k);
        }
        return !same;
    }

    const OrderProblem& problem_;
    OrderWalk walk_;
    Order best_;
    Bytes best_peak_;
    Random random_;
    std::int64_t moves_left_;
    std::chrono::steady_clock::time_point stop_;
    int fullest_ = 0;
    bool is_wide_ = false;
    std::vector<char> chosen_;
    Order old_, new_;
};

// Per op a bit for each op of its group that certainly runs before it.
std::vector<std::vector<Mask>> OrderProblem::predecessors() const {
    std::vector<std::vector<Mask>> found(op_count());
    for (int op = 0; op < op_count(); ++op) {
        const int group = ops_[op].group;
        const int first = group_begin(group);
        found[op].resize((op - first) / 64 + 1, 0);
        for (int earlier : ops_[op].after) {
            if (earlier < first) continue;
            for (std::size_t k = 0; k < found[earlier].size(); ++k)
                found[op][k] |= found[earlier][k];
            found[op][(earlier - first) / 64] |= Mask{1} << (earlier - first) % 64;
        }
    }
    return found;
}

Bytes OrderProblem::alive_between_groups() const {
    std::vector<Bytes> alive(group_end_.size() + 1, 0);
    for (const Value& value : values_) {
        if (value.writer < 0) continue;
        int last = value.kept_group;
        for (int reader : value.readers) last = std::max(last, ops_[reader].group - 1);
        for (int group = ops_[value.writer].group; group <= last; ++group)
            alive[group] += value.size;
    }
    return *std::max_element(alive.begin(), alive.end());
}

Bytes OrderProblem::floor() const {
    const std::vector<std::vector<Mask>> before = predecessors();
    const auto precedes = [&](int a, int b) {
        if (ops_[a].group != ops_[b].group) return ops_[a].group < ops_[b].group;
        const int group = ops_[a].group;
        const int bit = a - group_begin(group);
        return a < b && (before[b][bit / 64] >> bit % 64 & 1) != 0;
    };
    std::vector<Bytes> alive(op_count());
    for (int op = 0; op < op_count(); ++op) alive[op] = ops_[op].extra;
    for (const Value& value : values_) {
        if (value.writer < 0) continue;
        for (int op = value.writer; op < op_count(); ++op) {
            const auto needs_it = [&](int reader) { return op == reader || precedes(op, reader); };
            const bool kept = value.kept_group >= ops_[op].group;
            if (op != value.writer && !precedes(value.writer, op)) continue;
            if (op == value.writer || kept ||
                std::any_of(value.readers.begin(), value.readers.end(), needs_it))
                alive[op] += value.size;
        }
    }
    alive.push_back(alive_between_groups());
    return *std::max_element(alive.begin(), alive.end());
}

Bytes OrderProblem::peak(const Order& order) const { return OrderWalk(*this, order).peak(); }

Order OrderProblem::scheduled_forwards() const { return OrderList(*this, false).run(); }

Order OrderProblem::scheduled_backwards() const { return OrderList(*this, true).run(); }

Order OrderProblem::lowered(const Order& order, Bytes enough, double seconds, std::int64_t moves,
                            std::uint64_t seed) const {
    return OrderSearch(*this, order, moves, seconds, seed).run(enough);
}

}  // namespace tightfit
