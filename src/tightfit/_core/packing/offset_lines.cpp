#include "offset_lines.hpp"

#include <algorithm>
#include <limits>
#include <list>
#include <numeric>
#include <set>
#include <utility>

namespace tightfit::packing {

namespace {

// Blocks without a place, by the section of their birth; those placed are stepped over.
class Unplaced {
public:
    explicit Unplaced(const Blocks& blocks)
        : start_(blocks.sections() + 1, 0), flat_(blocks.count()), next_(blocks.count() + 1) {
        for (int section : blocks.begin) ++start_[section + 1];
        std::partial_sum(start_.begin(), start_.end(), start_.begin());
        std::vector<int> place(start_);
        for (int block = 0; block < blocks.count(); ++block)
            flat_[place[blocks.begin[block]]++] = block;
        std::iota(next_.begin(), next_.end(), 0);
    }

    // Calls visit(position, block) for those born in sections [begin, end).
    template <typename Visit>
    void born_in(int begin, int end, Visit visit) {
        for (int p = alive(start_[begin]); p < start_[end]; p = alive(p + 1)) visit(p, flat_[p]);
    }

    void remove(int position) { next_[position] = position + 1; }

private:
    int alive(int position) {
        while (next_[position] != position) {
            next_[position] = next_[next_[position]];
            position = next_[position];
        }
        return position;
    }

    std::vector<int> start_, flat_, next_;
};

// Offset lines from left to right; the lowest, then leftmost, is the current one.
class Skyline {
public:
    struct Line {
        int begin, end;
        Bytes height;
    };
    using Place = std::list<Line>::iterator;

    explicit Skyline(int sections) {
        lines_.push_back({0, sections, 0});
        queue_.insert(lines_.begin());
    }

    const Line& lowest() const { return **queue_.begin(); }

    // Put a block with sections [begin, end) on the lowest line.
    void place(int begin, int end, Bytes size) {
        const Place line = take_lowest();
        const Line whole = *line;
        if (whole.begin < begin)
            queue_.insert(lines_.insert(line, {whole.begin, begin, whole.height}));
        if (end < whole.end)
            queue_.insert(lines_.insert(std::next(line), {end, whole.end, whole.height}));
        *line = {begin, end, whole.height + size};
        join(line);
    }

    // Merge the lowest line with the lower of its neighbours, or with both where they are equal.
    void lift() {
        const Place line = take_lowest();
        Bytes height = std::numeric_limits<Bytes>::max();
        if (line != lines_.begin()) height = std::prev(line)->height;
        if (std::next(line) != lines_.end()) height = std::min(height, std::next(line)->height);
        line->height = height;
        join(line);
    }

private:
    struct Lower {
        bool operator()(Place a, Place b) const {
            return a->height != b->height ? a->height < b->height : a->begin < b->begin;
        }
    };

    Place take_lowest() {
        const Place line = *queue_.begin();
        queue_.erase(queue_.begin());
        return line;
    }

    // Merge a line that is not in the queue with neighbours of its height, and queue it.
    void join(Place line) {
        if (line != lines_.begin() && std::prev(line)->height == line->height) {
            line->begin = std::prev(line)->begin;
            drop(std::prev(line));
        }
        if (std::next(line) != lines_.end() && std::next(line)->height == line->height) {
            line->end = std::next(line)->end;
            drop(std::next(line));
        }
        queue_.insert(line);
    }

    void drop(Place line) {
        queue_.erase(line);
        lines_.erase(line);
    }

    std::list<Line> lines_;
    std::set<Place, Lower> queue_;
};

std::pair<double, double> worth(const Blocks& blocks, int block, Choice choice) {
    const double size = static_cast<double>(blocks.size[block]);
    const double length = blocks.length(block);
    if (choice == Choice::lifetime) return {length, size};
    if (choice == Choice::size) return {size, length};
    return {size * length, size};
}

}  // namespace

Packing pack_on_offset_lines(const Blocks& blocks, Choice choice) {
    Packing packing{std::vector<Bytes>(blocks.count(), 0)};
    Unplaced unplaced(blocks);
    Skyline skyline(blocks.sections());
    std::vector<std::pair<double, double>> worths;
    for (int block = 0; block < blocks.count(); ++block)
        worths.push_back(worth(blocks, block, choice));
    for (int left = blocks.count(); left > 0;) {
        const Skyline::Line line = skyline.lowest();
        int best = -1, position = -1;
        unplaced.born_in(line.begin, line.end, [&](int place, int block) {
            if (blocks.end[block] > line.end) return;
            if (best < 0 || worths[block] > worths[best]) best = block, position = place;
        });
        if (best < 0) {
            skyline.lift();
            continue;
        }
        packing.offsets[best] = line.height;
        skyline.place(blocks.begin[best], blocks.end[best], blocks.size[best]);
        unplaced.remove(position);
        --left;
    }
    packing.height = height_of(blocks, packing.offsets);
    return packing;
}

}  // namespace tightfit::packing
