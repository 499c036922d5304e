// Random numbers that are the same on every platform.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

namespace tightfit {

class Random {
public:
    explicit Random(std::uint64_t seed) : engine_(seed * 7919 + 17) {}

    double uniform() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }

    // An integer in [0, count).
    int below(int count) {
        return static_cast<int>((engine_() >> 32) * static_cast<std::uint64_t>(count) >> 32);
    }

    double log_normal(double sigma) {
        const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
        return std::exp(sigma * radius * std::cos(6.283185307179586 * uniform()));
    }

    // 1, 2, 3, ... with the given scale, at most 12.
    int geometric(double scale) {
        const int count = 1 + static_cast<int>(-std::log(1.0 - uniform()) * scale);
        return count > 12 ? 12 : count;
    }

private:
    std::mt19937_64 engine_;
};

}  // namespace tightfit
