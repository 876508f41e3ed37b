// Threads that run one step together.
//
// A step is a row of phases, each with units of work that any thread may take. A thread first takes those of
// its own share, one after the other, so that it reads memory as one stream: what the processor fetches
// ahead of a unit is then the thread's next one, and not one that another reads as well. Then it helps the
// others with theirs. A phase ends when its units are done, not when every thread has arrived: a thread
// that the system has put aside delays the others by the unit it holds, and by nothing if it holds none. When
// it comes back it finds that nothing is left to take, and passes on. So what it may touch without a unit in
// hand belongs to the job, which it keeps alive.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "native/products/vectors.h"

// Waits while the value is `old`. At first it spins, for some ten microseconds; then it sleeps and gives
// its core back.
inline void wait_while(const std::atomic<std::uint32_t> &value, std::uint32_t old) {
    for (int spins = 0; spins < 1000; ++spins) {
        if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
    value.wait(old, std::memory_order_acquire);
}

// How many units of a share are taken.
struct alignas(64) Share {
    std::atomic<std::uint32_t> taken{0};
};

class alignas(64) Phase {
  public:
    // Runs work(unit) for the units that are left, and returns when all are done, by whichever thread.
    template <class Work> void run(int thread, int64_t units, Work work) {
        const std::uint32_t all = std::uint32_t(units);
        for (int i = 0; i < num_shares_; ++i) {
            const int share = (thread + i) % num_shares_;
            const int64_t first = start(share, units);
            const std::uint32_t count = std::uint32_t(start(share + 1, units) - first);
            std::atomic<std::uint32_t> &taken = shares_[share].taken;
            for (std::uint32_t unit; (unit = taken.fetch_add(1, std::memory_order_relaxed)) < count;) {
                work(first + unit);
                if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == all) done_.notify_all();
            }
        }
        for (std::uint32_t done; (done = done_.load(std::memory_order_acquire)) != all;)
            wait_while(done_, done);
    }

  private:
    friend class Phases;

    int64_t start(int64_t share, int64_t units) const {
        return (units * share + num_shares_ - 1) / num_shares_;
    }

    Share *shares_ = nullptr;
    int num_shares_ = 0;
    alignas(64) std::atomic<std::uint32_t> done_{0};
};

class Phases {
  public:
    Phases(int64_t count, int64_t num_shares)
        : shares_(new Share[count * num_shares]), phases_(new Phase[count]) {
        for (int64_t i = 0; i < count; ++i) {
            phases_[i].shares_ = shares_.get() + i * num_shares;
            phases_[i].num_shares_ = int(num_shares);
        }
    }
    Phase *first() const { return phases_.get(); }

  private:
    std::unique_ptr<Share[]> shares_;
    std::unique_ptr<Phase[]> phases_;
};

class Job {
  public:
    virtual ~Job() = default;
    virtual void run(int thread) = 0;  // thread: 0 is the one that called Team::run
};

class Team {
  public:
    // There may be fewer threads than asked for, where the system gives no more.
    explicit Team(int threads) {
        try {
            for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { work(i); });
        } catch (const std::system_error &) {
        }
    }
    ~Team() {
        publish(nullptr, true);
        for (std::thread &thread : threads_) thread.join();
    }
    Team(const Team &) = delete;

    int64_t size() const { return int64_t(threads_.size()) + 1; }

    // Returns when the calling thread has run the job; others may still be on their way out of it.
    void run(std::shared_ptr<Job> job) {
        publish(job, false);
        job->run(0);
    }

  private:
    void publish(std::shared_ptr<Job> job, bool is_last) {
        if (threads_.empty()) return;
        {
            const std::lock_guard lock(mutex_);
            job_ = std::move(job);
            is_last_ = is_last;
        }
        number_.fetch_add(1, std::memory_order_release);
        number_.notify_all();
    }
    void work(int thread) {
        for (std::uint32_t number = 0;;) {
            wait_while(number_, number);
            number = number_.load(std::memory_order_acquire);
            std::shared_ptr<Job> job;
            {
                const std::lock_guard lock(mutex_);
                if (is_last_) return;
                job = job_;
            }
            job->run(thread);
        }
    }

    std::mutex mutex_;
    std::shared_ptr<Job> job_;
    bool is_last_ = false;
    std::atomic<std::uint32_t> number_{0};
    std::vector<std::thread> threads_;
};
