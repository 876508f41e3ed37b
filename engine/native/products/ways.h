// Ways to multiply that a processor may have besides vectors, each of which may be refused: engine/native/trial.py
// tries them, since flags promise neither right results nor speed.
#pragma once
#include <atomic>
#include <cstdint>

enum Way : std::int64_t { kTilesOfPairs = 1, kTilesOfBytes = 2, kPairedRows = 4 };

inline std::atomic<std::int64_t> refused_ways = 0;

inline bool is_refused(Way way) { return refused_ways.load(std::memory_order_relaxed) & way; }
