// Collectives of the processes ("ranks") that compute one model together, through memory that they share.
//
// Each rank has two buffers. A collective of number s uses those of s % 2: every rank writes its part,
// raises its stamp to s, and waits until all stamps are s. So nobody writes a buffer that another still
// reads: the stamp s + 1 of a rank says that it has read all of s, and who writes for s + 2 has seen it.
//
// Sums are in the order of the ranks on each of them, in float32, so that all have the same bits. A rank that
// waits for long lets other threads of its core run. Idea: the shared-memory collectives of vLLM and DeepSpeed.
//
// A lane is all that a collective needs: stamps, buffers, a number. So threads of one rank that are in different
// lanes sum at the same time. All but the sums of step.cpp use the first.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "ranks.h"

namespace {

constexpr int64_t kMaxRanks = 16, kBufferBytes = 1 << 20;

// Each in a cache line of its own.
struct alignas(128) Stamp {
    std::atomic<uint64_t> value;
};

struct Header {
    Stamp stamps[kMaxRanks];
    std::atomic<int64_t> ended;  // in the first lane's: 1 + a rank that has ended, for those that wait
};

constexpr int64_t kHeaderBytes = (sizeof(Header) + 4095) / 4096 * 4096;

enum Outcome : int64_t { kDone = 0, kEnded = 1, kTimeout = 2 };

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

float widened(float x) { return x; }
float widened(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
void put(float x, float *to) { *to = x; }
// To bfloat16, to the nearest, and of two to the even one. NaN stays NaN.
void put(float x, uint16_t *to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        *to = uint16_t(bits >> 16) | 0x40;
    else
        *to = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

// One rank's side of a lane. number: of the last collective.
struct Lane {
    Header *header;
    unsigned char *buffers;
    const std::atomic<int64_t> *ended;
    int64_t rank, size;
    uint64_t number;
    // By the last collective that failed: the rank that was waited for, or the number that `ended` was given.
    int64_t missing;

    unsigned char *buffer(int64_t of) const {
        return buffers + (of * 2 + int64_t(number % 2)) * kBufferBytes;
    }

    // Raises this rank's stamp, and waits for all others.
    int64_t meet(int64_t deadline_ns) {
        header->stamps[rank].value.store(number, std::memory_order_release);
        for (int64_t other = 0; other < size; ++other) {
            const std::atomic<uint64_t> &stamp = header->stamps[other].value;
            for (int64_t tries = 0; stamp.load(std::memory_order_acquire) < number; ++tries) {
                if (tries < 4000) {
                    pause_briefly();
                    continue;
                }
                sched_yield();
                if (tries % 64) continue;
                missing = other;
                if (const int64_t who = ended->load(std::memory_order_acquire)) {
                    missing = who - 1;
                    return kEnded;
                }
                if (now_ns() > deadline_ns) return kTimeout;
            }
        }
        return kDone;
    }
};

struct Ranks {
    Lane lanes[kRankLanes];
    std::atomic<int64_t> last;  // the lane of the last collective that failed; the first if none did

    int64_t kept(int64_t lane, int64_t outcome) {
        if (outcome != kDone) last.store(lane, std::memory_order_release);
        return outcome;
    }
    Lane &failed() { return lanes[last.load(std::memory_order_acquire)]; }
};

namespace {

int64_t lane_bytes(int64_t size) { return kHeaderBytes + size * 2 * kBufferBytes; }

template <class T> int64_t sum(Lane &ranks, T *data, int64_t count, int64_t deadline_ns) {
    constexpr int64_t kEach = kBufferBytes / sizeof(T), kBlock = 1024;
    for (int64_t first = 0; first < count; first += kEach) {
        const int64_t n = std::min(kEach, count - first);
        ++ranks.number;
        T *to = data + first;
        std::memcpy(ranks.buffer(ranks.rank), to, n * sizeof(T));
        if (const int64_t outcome = ranks.meet(deadline_ns)) return outcome;
        // In blocks that stay in the nearest cache.
        for (int64_t at = 0; at < n; at += kBlock) {
            const int64_t m = std::min(kBlock, n - at);
            float total[kBlock];
            const T *part = reinterpret_cast<const T *>(ranks.buffer(0)) + at;
            for (int64_t i = 0; i < m; ++i) total[i] = widened(part[i]);
            for (int64_t other = 1; other < ranks.size; ++other) {
                part = reinterpret_cast<const T *>(ranks.buffer(other)) + at;
                for (int64_t i = 0; i < m; ++i) total[i] += widened(part[i]);
            }
            for (int64_t i = 0; i < m; ++i) put(total[i], to + at + i);
        }
    }
    return kDone;
}

}  // namespace

// Bytes of the shared memory for so many ranks, which must be zeros at first; 0 if they are too many.
extern "C" int64_t penstock_ranks_bytes(int64_t size) {
    return size < 1 || size > kMaxRanks ? 0 : kRankLanes * lane_bytes(size);
}

extern "C" Ranks *penstock_ranks_make(void *memory, int64_t rank, int64_t size) {
    auto *bytes = static_cast<unsigned char *>(memory);
    auto *ranks = new Ranks{};
    for (int64_t i = 0; i < kRankLanes; ++i) {
        unsigned char *own = bytes + i * lane_bytes(size);
        ranks->lanes[i] = {reinterpret_cast<Header *>(own), own + kHeaderBytes,
                           &static_cast<Header *>(memory)->ended, rank, size, 0, 0};
    }
    return ranks;
}
extern "C" void penstock_ranks_free(Ranks *ranks) { delete ranks; }

extern "C" int64_t penstock_ranks_number(Ranks *ranks) { return int64_t(ranks->failed().number); }
extern "C" int64_t penstock_ranks_missing(Ranks *ranks) { return ranks->failed().missing; }
// The number of the last collective that a rank has come to.
extern "C" int64_t penstock_ranks_stamp(Ranks *ranks, int64_t rank) {
    return int64_t(ranks->failed().header->stamps[rank].value.load(std::memory_order_acquire));
}

// Whoever waits for others, or will, gives up: this rank has ended. Its number may be that of another group.
extern "C" void penstock_ranks_end(Ranks *ranks, int64_t rank) {
    ranks->lanes[0].header->ended.store(rank + 1, std::memory_order_release);
}

// The functions that follow return an Outcome. Times are of CLOCK_MONOTONIC, in ns.

extern "C" int64_t penstock_all_reduce_float(Ranks *ranks, float *data, int64_t count, int64_t deadline_ns) {
    return ranks->kept(0, sum(ranks->lanes[0], data, count, deadline_ns));
}
extern "C" int64_t penstock_all_reduce_bf16(Ranks *ranks, uint16_t *data, int64_t count, int64_t deadline_ns) {
    return ranks->kept(0, sum(ranks->lanes[0], data, count, deadline_ns));
}
// See AllReduce in ranks.h.
extern "C" int64_t penstock_all_reduce_lane(void *memory, int64_t lane, float *data, int64_t count,
                                            int64_t timeout_ns) {
    auto *ranks = static_cast<Ranks *>(memory);
    return ranks->kept(lane, sum(ranks->lanes[lane], data, count, now_ns() + timeout_ns));
}

// Everybody's bytes become those of rank 0.
extern "C" int64_t penstock_broadcast(Ranks *ranks, unsigned char *data, int64_t bytes, int64_t deadline_ns) {
    Lane &lane = ranks->lanes[0];
    for (int64_t first = 0; first < bytes; first += kBufferBytes) {
        const int64_t n = std::min(kBufferBytes, bytes - first);
        ++lane.number;
        if (lane.rank == 0) std::memcpy(lane.buffer(0), data + first, n);
        if (const int64_t outcome = lane.meet(deadline_ns)) return ranks->kept(0, outcome);
        if (lane.rank != 0) std::memcpy(data + first, lane.buffer(0), n);
    }
    return kDone;
}

// `into`, on rank 0 alone: the bytes of all ranks, one rank's after the other's. All have as many.
extern "C" int64_t penstock_gather(Ranks *ranks, const unsigned char *data, int64_t bytes, unsigned char *into,
                                   int64_t deadline_ns) {
    Lane &lane = ranks->lanes[0];
    for (int64_t first = 0; first < bytes; first += kBufferBytes) {
        const int64_t n = std::min(kBufferBytes, bytes - first);
        ++lane.number;
        std::memcpy(lane.buffer(lane.rank), data + first, n);
        if (const int64_t outcome = lane.meet(deadline_ns)) return ranks->kept(0, outcome);
        if (lane.rank != 0) continue;
        for (int64_t other = 0; other < lane.size; ++other)
            std::memcpy(into + other * bytes + first, lane.buffer(other), n);
    }
    return kDone;
}

extern "C" int64_t penstock_barrier(Ranks *ranks, int64_t deadline_ns) {
    ++ranks->lanes[0].number;
    return ranks->kept(0, ranks->lanes[0].meet(deadline_ns));
}
