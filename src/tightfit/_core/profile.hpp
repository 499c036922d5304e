// Bytes along the stages, added to over whole runs of stages. A block remembers the number added to
// all of it and its most and least, so that a long run costs little more than its number of blocks.
#pragma once

#include <algorithm>
#include <vector>

#include "problem.hpp"

namespace tightfit {

class Profile {
public:
    void reset(int stages) {
        stages_ = stages;
        items_.assign(stages, 0);
        blocks_.assign((stages + kBlock - 1) / kBlock, Block{});
    }

    Bytes get(int stage) const { return items_[stage] + blocks_[stage / kBlock].added; }

    void set(int stage, Bytes bytes) {
        Block& block = blocks_[stage / kBlock];
        Bytes& item = items_[stage];
        if (item == block.most || item == block.least) block.stale = true;
        item = bytes - block.added;
        block.most = std::max(block.most, item);
        block.least = std::min(block.least, item);
    }

    // Add to stages first..last.
    void add(int first, int last, Bytes bytes) {
        for (int end; first <= last; first = end) {
            end = std::min(last + 1, end_of_block(first));
            Block& block = blocks_[first / kBlock];
            if (end - first == kBlock) {
                block.added += bytes;
                continue;
            }
            for (int stage = first; stage < end; ++stage) items_[stage] += bytes;
            block.stale = true;
        }
    }

    // The same; returns by how much the sum of the bytes above a limit grows.
    Bytes add_above(int first, int last, Bytes bytes, Bytes limit) {
        Bytes growth = 0;
        for (int stage = first, end; stage <= last; stage = end) {
            end = std::min(last + 1, end_of_block(stage));
            growth += change(stage, end, bytes, limit);
        }
        add(first, last, bytes);
        return growth;
    }

    // The sum of the bytes above a limit.
    Bytes above(Bytes limit) const {
        Bytes sum = 0;
        for (int stage = 0; stage < stages_; ++stage)
            sum += std::max<Bytes>(0, get(stage) - limit);
        return sum;
    }

    // The first stage with the most bytes; 0 if there is none.
    int fullest() const {
        int best = 0;
        Bytes most = 0;
        for (int number = 0; number < static_cast<int>(blocks_.size()); ++number) {
            const Bytes here = fresh(number).most + blocks_[number].added;
            if (number > 0 && here <= most) continue;
            most = here;
            best = number * kBlock;
        }
        const int end = std::min(stages_, end_of_block(best));
        return static_cast<int>(
            std::max_element(items_.begin() + best, items_.begin() + end) - items_.begin());
    }

    // The first stage behind the block of this one.
    int end_of_block(int stage) const { return std::min(stages_, (stage / kBlock + 1) * kBlock); }

    // The least bytes in the block of a stage.
    Bytes least_around(int stage) const {
        const int number = stage / kBlock;
        return fresh(number).least + blocks_[number].added;
    }

private:
    static constexpr int kBlock = 64;

    struct Block {
        Bytes added = 0;
        mutable Bytes most = 0, least = 0;  // without the number added to all of it
        mutable bool stale = false;
    };

    const Block& fresh(int number) const {
        const Block& block = blocks_[number];
        if (!block.stale) return block;
        const auto begin = items_.begin() + number * kBlock;
        const auto end = items_.begin() + end_of_block(number * kBlock);
        Bytes most = *begin, least = *begin;
        for (auto item = begin; item != end; ++item) {
            most = std::max(most, *item);
            least = std::min(least, *item);
        }
        block.most = most;
        block.least = least;
        block.stale = false;
        return block;
    }

    // How the sum of the bytes above a limit changes when bytes are added to stages of one block.
    Bytes change(int first, int end, Bytes bytes, Bytes limit) const {
        const int number = first / kBlock;
        const Bytes added = blocks_[number].added;
        if (end - first >= kBlock / 4) {
            const Block& block = fresh(number);
            if (block.most + added + std::max<Bytes>(0, bytes) <= limit) return 0;
            if (block.least + added + std::min<Bytes>(0, bytes) >= limit)
                return bytes * (end - first);
        }
        Bytes sum = 0;
        for (int stage = first; stage < end; ++stage) {
            const Bytes old = items_[stage] + added - limit;
            sum += std::max<Bytes>(0, old + bytes) - std::max<Bytes>(0, old);
        }
        return sum;
    }

    int stages_ = 0;
    std::vector<Bytes> items_;
    std::vector<Block> blocks_;
};

}  // namespace tightfit
