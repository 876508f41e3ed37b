// A link: messages from one process to another, through memory that they share, in the order that they are sent.
//
// The memory has room for several messages: the sender writes number n where n - slots was, once that has been
// taken. Each side counts up a number of its own, and sleeps on the other's: unlike ranks that meet in a layer
// (ranks.cpp), one that waits here may wait for as long as another stage of the model computes.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace {

// Each in cache lines of its own. Numbers may begin again at 0: only differences count.
struct alignas(128) Count {
    std::atomic<uint32_t> value;
};

struct Link {
    Count counts[2];  // messages sent, messages taken
    alignas(128) std::atomic<uint32_t> ended;
};

constexpr int64_t kSlice = 50'000'000;  // ns of sleep, after which it looks for the end of the other side

enum Outcome : int64_t { kDone = 0, kEnded = 1, kTimeout = 2 };  // as in ranks.cpp

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// The memory is shared between processes, so neither std::atomic's own waiting nor a private futex will do.
void futex(std::atomic<uint32_t> &word, int operation, uint32_t value, const timespec *timeout) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

// Waits until a count, 0: sent, 1: taken, is at least `number`. Returns an Outcome. deadline_ns: of CLOCK_MONOTONIC.
extern "C" int64_t penstock_link_wait(void *memory, int64_t which, uint32_t number, int64_t deadline_ns) {
    auto *link = static_cast<Link *>(memory);
    std::atomic<uint32_t> &count = link->counts[which].value;
    for (;;) {
        const uint32_t seen = count.load(std::memory_order_acquire);
        if (int32_t(seen - number) >= 0) return kDone;
        if (link->ended.load(std::memory_order_acquire)) return kEnded;
        const int64_t left = deadline_ns - now_ns();
        if (left <= 0) return kTimeout;
        const int64_t sleep = left < kSlice ? left : kSlice;
        const timespec timeout{sleep / 1000000000, sleep % 1000000000};
        futex(count, FUTEX_WAIT, seen, &timeout);
    }
}

// One message more is sent, or taken.
extern "C" void penstock_link_count(void *memory, int64_t which) {
    std::atomic<uint32_t> &count = static_cast<Link *>(memory)->counts[which].value;
    count.fetch_add(1, std::memory_order_release);
    futex(count, FUTEX_WAKE, INT_MAX, nullptr);
}

// Whoever waits for the other side, or will, gives up.
extern "C" void penstock_link_end(void *memory) {
    auto *link = static_cast<Link *>(memory);
    link->ended.store(1, std::memory_order_release);
    for (Count &count : link->counts) futex(count.value, FUTEX_WAKE, INT_MAX, nullptr);
}
