// Ways to multiply that a processor may have besides vectors, each of which may be refused: engine/native/trial.py
// tries them, since flags promise neither right results nor speed.
#pragma once
#include <atomic>
#include <cstdint>

enum Way : std::int64_t { kTilesOfPairs = 1, kTilesOfBytes = 2, kPairedRows = 4 };

inline std::atomic<std::int64_t> refused_ways = 0;

inline bool is_refused(Way way) { return refused_ways.load(std::memory_order_relaxed) & way; }

// Whether weights are prefetched by instructions for few rows too, where these cost more than they hide if the
// processor prefetches a stream by itself: engine/native/trial.py times it.
inline std::atomic<bool> prefetches_for_few = false;

inline bool prefetches(std::int64_t rows, std::int64_t enough) {
    return rows >= enough || prefetches_for_few.load(std::memory_order_relaxed);
}
