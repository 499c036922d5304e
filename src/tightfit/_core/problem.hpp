// A planning problem: ops in the fixed order of their first computation, the values they write and
// read, and the ways to compute them. It never changes after `finish`.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tightfit {

using Bytes = std::int64_t;
using Cost = std::int64_t;  // integer units chosen by the caller, so that undoing a move is exact
using Mask = std::uint64_t;

constexpr int kMaxAlternatives = 64;

// One way to run an alternative: the cheapest option that fits at the moment it runs is taken.
struct Option {
    Cost cost;
    Bytes workspace;
    int overwrites;  // value whose storage the first written value takes over, or -1
    int alternative;  // position in the graph's op, handed back with the schedule
    int variant;
};

// Ways to compute an op that read and write the same values.
struct Alternative {
    std::vector<int> reads;  // every value read, its own op's values included
    std::vector<int> own_reads;  // values of the op itself, which must have stayed resident
    std::vector<int> writes;
    std::vector<Option> options;  // by cost, then bytes
    bool first;  // may serve the first computation
    bool again;  // may serve a later one
    int must_overwrite = -1;  // value gone afterwards because every option overwrites it, or -1
    Cost least_cost() const { return options.front().cost; }
};

struct Op {
    bool required;  // false: computed only if it is read
    bool crossing;  // a segment crossing: costs nothing, nothing is recomputed in its stage
    int program;  // recomputed only in stages of the same program
    int segment;  // an op that is not required is computed only in stages of its own segment
    int first_choice = 0;  // alternative of the first computation before any move
    std::vector<Alternative> alternatives;
    bool recomputable = false;
};

// Linked alternatives of first computations: exactly one branch is taken as a whole.
using Branch = std::vector<std::pair<int, int>>;  // op, alternative
using Choice = std::vector<Branch>;

struct Reader {
    int op;
    Mask alternatives;  // those that read the value
};

struct Value {
    Bytes size;
    int producer;
    int kept_until;  // resident from birth to this stage whatever happens, or -1
    bool state;  // held only if its op is computed again (the state of a random generator)
    Mask writers = 0;  // alternatives of the producer that write it
    std::vector<Reader> readers;  // by op
    bool kept() const { return kept_until >= 0; }
};

class Problem {
public:
    int add_value(Bytes size, int producer, int kept_until, bool state);
    int add_op(bool required, bool crossing, int program, int segment);
    int add_alternative(int op, std::vector<int> reads, std::vector<int> writes, bool first,
                        bool again);
    void add_option(int op, int alternative, Cost cost, Bytes workspace, int overwrites,
                    int graph_alternative, int variant);
    void add_choice(Choice choice);
    // Link readers and writers and check every index; throws std::invalid_argument.
    void finish();

    int op_count() const { return static_cast<int>(ops.size()); }
    int value_count() const { return static_cast<int>(values.size()); }
    bool may_recompute(int op, int stage) const;
    Mask readers_of(int value, int op) const;  // the op's alternatives that read the value

    std::vector<Op> ops;
    std::vector<Value> values;
    std::vector<Choice> choices;
    bool has_options = false;  // some alternative has more than one option
    bool has_trade_offs = false;  // ... that cost differently

private:
    void link(int op);
    void take_default_branch(const Choice& choice);
    void check_alternative(int op, const Alternative& alternative) const;
    void sort_options(Alternative& alternative) const;
};

}  // namespace tightfit
