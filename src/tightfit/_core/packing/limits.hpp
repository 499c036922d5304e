// How long a packer may search.
#pragma once

#include <chrono>
#include <cstdint>

namespace tightfit::packing {

class Limits {
public:
    Limits(double seconds, std::uint64_t seed) : seed(seed), deadline_(after(Clock::now(), seconds)) {}

    bool is_over() const { return Clock::now() >= deadline_; }

    // The same, but over once a share of the rest has passed.
    Limits share(double fraction) const {
        const std::chrono::duration<double> left = deadline_ - Clock::now();
        return Limits(left.count() * fraction, seed);
    }

    std::uint64_t seed;

private:
    using Clock = std::chrono::steady_clock;

    static Clock::time_point after(Clock::time_point start, double seconds) {
        const double bounded = seconds < 1e7 ? seconds : 1e7;
        return start + std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(bounded > 0 ? bounded : 0));
    }

    Clock::time_point deadline_;
};

}  // namespace tightfit::packing
