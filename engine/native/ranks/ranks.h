// ranks.cpp and step.cpp agree on this.
#pragma once
#include <cstdint>

// So many sums may be computed at the same time, by different threads of each rank.
constexpr int64_t kRankLanes = 8;

// Sums `count` numbers over all ranks, in place. lane: no two calls of a rank have the same at a time. Returns
// an Outcome of ranks.cpp; 0 is success.
using AllReduce = int64_t (*)(void *ranks, int64_t lane, float *data, int64_t count, int64_t timeout_ns);
