#include "recorded.hpp"

#include <stdexcept>
#include <unordered_set>

namespace tightfit {

Lists::Lists(const std::vector<std::vector<int>>& lists) : starts_{0} {
    for (const auto& list : lists) {
        numbers_.insert(numbers_.end(), list.begin(), list.end());
        starts_.push_back(static_cast<int>(numbers_.size()));
    }
}

Recorded::Recorded(std::vector<std::int64_t> storage_bytes, std::vector<RecordedTensor> made,
                   std::vector<std::int64_t> op_costs,
                   const std::vector<std::vector<int>>& arguments_of,
                   const std::vector<std::vector<int>>& outputs_of, Pairs happened,
                   std::vector<int> held_tensors)
    : bytes(std::move(storage_bytes)),
      tensors(std::move(made)),
      costs(std::move(op_costs)),
      arguments(arguments_of),
      outputs(outputs_of),
      occurrences(std::move(happened)),
      held(std::move(held_tensors)),
      adds_cost(tensors.size(), 0) {
    if (arguments_of.size() != costs.size() || outputs_of.size() != costs.size())
        throw std::invalid_argument("the tables of operators differ in length");
    std::vector<std::vector<int>> parents_of(storages()), children_of(storages());
    std::vector<std::vector<int>> fresh_of(tensors.size()), views_of(storages());
    std::unordered_set<std::int64_t> edges;
    for (int op = 0; op < ops(); ++op) {
        std::int64_t sum = 0;
        for (const int tensor : outputs[op]) {
            const auto& [storage, maker, is_root] = tensors.at(tensor);
            if (is_root) sum += bytes.at(storage);
            const auto& before = views_of[storage];
            adds_cost[tensor] = before.empty() || tensors[before.back()].op != op;
            views_of[storage].push_back(tensor);
            for (const int argument : arguments[op]) {
                const int parent = tensors.at(argument).storage;
                const auto edge = static_cast<std::int64_t>(parent) * storages() + storage;
                if (parent == storage || !edges.insert(edge).second) continue;
                parents_of[storage].push_back(parent);
                children_of[parent].push_back(storage);
                fresh_of[tensor].push_back(parent);
            }
        }
        new_bytes.push_back(sum);
    }
    parents = Lists(parents_of);
    children = Lists(children_of);
    fresh = Lists(fresh_of);
    views = Lists(views_of);
}

}  // namespace tightfit
