// A matrix of bits, one row per item and one column per stage, with searches along a row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tightfit {

class BitMatrix {
public:
    void reset(int rows, int columns) {
        words_ = (columns + 63) / 64;
        bits_.assign(static_cast<std::size_t>(rows) * words_, 0);
    }

    bool get(int row, int column) const {
        return bits_[index(row, column)] >> (column & 63) & 1;
    }

    void set(int row, int column, bool on) {
        std::uint64_t& word = bits_[index(row, column)];
        const std::uint64_t bit = std::uint64_t{1} << (column & 63);
        word = on ? word | bit : word & ~bit;
    }

    // Set columns first..last of a row.
    void fill(int row, int first, int last, bool on) {
        for (int column = first; column <= last;) {
            const int end = std::min(last, column | 63);
            const int length = end - column + 1;
            const std::uint64_t ones =
                length == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << length) - 1;
            std::uint64_t& word = bits_[index(row, column)];
            word = on ? word | ones << (column & 63) : word & ~(ones << (column & 63));
            column = end + 1;
        }
    }

    // First set column >= column, or `none`.
    int next(int row, int column, int none) const {
        const std::uint64_t* words = &bits_[static_cast<std::size_t>(row) * words_];
        int word = column >> 6;
        if (word >= words_) return none;
        std::uint64_t rest = words[word] & (~std::uint64_t{0} << (column & 63));
        while (rest == 0) {
            if (++word >= words_) return none;
            rest = words[word];
        }
        return word * 64 + __builtin_ctzll(rest);
    }

    // Last set column <= column, or -1.
    int previous(int row, int column) const {
        if (column < 0) return -1;
        const std::uint64_t* words = &bits_[static_cast<std::size_t>(row) * words_];
        int word = column >> 6;
        std::uint64_t rest = words[word];
        const int shift = column & 63;
        if (shift < 63) rest &= (std::uint64_t{1} << (shift + 1)) - 1;
        while (rest == 0) {
            if (--word < 0) return -1;
            rest = words[word];
        }
        return word * 64 + 63 - __builtin_clzll(rest);
    }

    int words() const { return words_; }
    std::vector<std::uint64_t>& data() { return bits_; }
    const std::vector<std::uint64_t>& data() const { return bits_; }

private:
    std::size_t index(int row, int column) const {
        return static_cast<std::size_t>(row) * words_ + (column >> 6);
    }

    int words_ = 0;
    std::vector<std::uint64_t> bits_;
};

}  // namespace tightfit
