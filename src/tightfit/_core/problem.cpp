#include "problem.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

namespace tightfit {

namespace {

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

void sort_unique(std::vector<int>& items) {
    std::sort(items.begin(), items.end());
    items.erase(std::unique(items.begin(), items.end()), items.end());
}

}  // namespace

int Problem::add_value(Bytes size, int producer, int kept_until, bool state) {
    Value value{};
    value.size = size;
    value.producer = producer;
    value.kept_until = kept_until;
    value.state = state;
    values.push_back(std::move(value));
    return value_count() - 1;
}

int Problem::add_op(bool required, bool crossing, int program, int segment) {
    Op op{};
    op.required = required;
    op.crossing = crossing;
    op.program = program;
    op.segment = segment;
    ops.push_back(std::move(op));
    return op_count() - 1;
}

int Problem::add_alternative(int op, std::vector<int> reads, std::vector<int> writes, bool first,
                             bool again) {
    Alternative alternative{};
    alternative.reads = std::move(reads);
    sort_unique(alternative.reads);
    alternative.writes = std::move(writes);
    alternative.first = first;
    alternative.again = again;
    auto& list = ops.at(op).alternatives;
    list.push_back(std::move(alternative));
    return static_cast<int>(list.size()) - 1;
}

void Problem::add_option(int op, int alternative, Cost cost, Bytes workspace, int overwrites,
                         int graph_alternative, int variant) {
    ops.at(op).alternatives.at(alternative).options.push_back(
        {cost, workspace, overwrites, graph_alternative, variant});
}

void Problem::add_choice(Choice choice) { choices.push_back(std::move(choice)); }

// The branch that keeps the most first choices as they are.
void Problem::take_default_branch(const Choice& choice) {
    require(!choice.empty(), "a choice without branches");
    const Branch* best = nullptr;
    int fewest = 0;
    for (const Branch& branch : choice) {
        int changed = 0;
        for (const auto& [op, alternative] : branch) {
            require(op >= 0 && op < op_count() && alternative >= 0 &&
                        alternative < static_cast<int>(ops[op].alternatives.size()),
                    "a choice names an unknown alternative");
            changed += ops[op].first_choice != alternative;
        }
        if (best != nullptr && changed >= fewest) continue;
        best = &branch;
        fewest = changed;
    }
    for (const auto& [op, alternative] : *best) ops[op].first_choice = alternative;
}

void Problem::finish() {
    for (const Value& value : values) {
        require(value.producer >= 0 && value.producer < op_count(), "a value has no producer");
        require(value.size >= 0, "a value has a negative size");
    }
    for (int op = 0; op < op_count(); ++op) link(op);
    for (const Choice& choice : choices) take_default_branch(choice);
}

void Problem::link(int op) {
    Op& node = ops[op];
    const int count = static_cast<int>(node.alternatives.size());
    require(count > 0 && count <= kMaxAlternatives, "an op needs 1 to 64 alternatives");
    node.first_choice = -1;
    for (int a = 0; a < count; ++a) {
        Alternative& alternative = node.alternatives[a];
        check_alternative(op, alternative);
        sort_options(alternative);
        alternative.must_overwrite = alternative.options.front().overwrites;
        for (const Option& option : alternative.options)
            if (option.overwrites < 0) alternative.must_overwrite = -1;
        has_options = has_options || alternative.options.size() > 1;
        has_trade_offs =
            has_trade_offs || alternative.options.front().cost < alternative.options.back().cost;
        node.recomputable = node.recomputable || alternative.again;
        if (alternative.first && node.first_choice < 0) node.first_choice = a;
        for (int value : alternative.writes) values[value].writers |= Mask{1} << a;
        for (int value : alternative.reads) {
            if (values[value].producer == op) alternative.own_reads.push_back(value);
            auto& readers = values[value].readers;
            if (readers.empty() || readers.back().op != op) readers.push_back({op, 0});
            readers.back().alternatives |= Mask{1} << a;
        }
    }
    require(node.first_choice >= 0, "no alternative of an op serves its first computation");
}

void Problem::sort_options(Alternative& alternative) const {
    const auto bytes = [this](const Option& option) {
        return option.workspace - (option.overwrites < 0 ? 0 : values[option.overwrites].size);
    };
    std::sort(alternative.options.begin(), alternative.options.end(),
              [&](const Option& x, const Option& y) {
                  return std::make_tuple(x.cost, bytes(x), x.alternative, x.variant) <
                         std::make_tuple(y.cost, bytes(y), y.alternative, y.variant);
              });
}

void Problem::check_alternative(int op, const Alternative& alternative) const {
    require(!alternative.options.empty(), "an alternative has no option");
    for (int value : alternative.writes)
        require(value >= 0 && value < value_count() && values[value].producer == op,
                "an alternative writes a value of another op");
    for (int value : alternative.reads)
        require(value >= 0 && value < value_count() && values[value].producer <= op,
                "an alternative reads a value of a later op");
}

bool Problem::may_recompute(int op, int stage) const {
    if (!ops[op].recomputable || ops[stage].crossing) return false;
    return ops[op].required ? ops[op].program == ops[stage].program
                            : ops[op].segment == ops[stage].segment;
}

Mask Problem::readers_of(int value, int op) const {
    const auto& readers = values[value].readers;
    const auto found = std::lower_bound(
        readers.begin(), readers.end(), op,
        [](const Reader& reader, int wanted) { return reader.op < wanted; });
    return found != readers.end() && found->op == op ? found->alternatives : 0;
}

}  // namespace tightfit
