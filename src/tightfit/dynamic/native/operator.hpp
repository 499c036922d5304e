// Facts about an operator for the runtime; `operators.py` reads them from the schema, once each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tightfit::online {

enum class Unread : std::uint8_t { no, replaced, statistics };

struct Operator {
    std::string name;
    bool is_composite = false;  // made of others, which are seen one by one
    bool is_view = false;
    bool makes_blank = false;
    bool draws = false;
    bool repeats = false;
    bool replaces = false;
    std::int64_t weight = 1;
    int arguments = 0, returns = 0;
    std::vector<int> written, statistics;
    int training = -1;  // the position of the argument that says so
    int dtype = -1;
};

}  // namespace tightfit::online
