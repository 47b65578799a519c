// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace neuron {
namespace {

constexpr int kSpins = 4000;           // about 50 us: longer than the gap between two kernels of a step
constexpr uint32_t kClosed = ~0u;      // index of a job that hands out no more chunks

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void bind_to(pthread_t thread, int32_t cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}

// A job is known by its epoch. A chunk is claimed by exchanging the pair (epoch, next index) as one word, so a helper
// that wakes late can neither claim a chunk of another job nor read another job's fields for its own.
class Pool {
 public:
  explicit Pool(const std::vector<int32_t>& cpus) {
    for (size_t i = 1; i < cpus.size(); ++i) {
      helpers_.emplace_back([this] { help(); });
      if (cpus[i] >= 0) bind_to(helpers_.back().native_handle(), cpus[i]);
    }
  }

  ~Pool() {
    stop_ = true;
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  void run(int64_t chunks, ChunkWork work, void* context) {
    if (helpers_.empty() || chunks <= 1 || chunks >= kClosed) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) work(context, chunk);
      return;
    }
    const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    work_.store(work, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    chunks_.store(static_cast<uint32_t>(chunks), std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(pair(epoch, 0), std::memory_order_release);
    epoch_.store(epoch);
    epoch_.notify_all();
    take(epoch);
    for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; ++spins)
      spins < kSpins ? relax() : static_cast<void>(sched_yield());
    ticket_.store(pair(epoch, kClosed), std::memory_order_release);
  }

 private:
  static uint64_t pair(uint32_t epoch, uint32_t index) { return static_cast<uint64_t>(epoch) << 32 | index; }

  void take(uint32_t epoch) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> 32 == epoch) {
      const ChunkWork work = work_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      const uint32_t index = static_cast<uint32_t>(ticket);
      if (index >= chunks_.load(std::memory_order_relaxed)) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      work(context, index);
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void help() {
    uint32_t seen = 0;
    while (!stop_) {
      uint32_t epoch = epoch_.load(std::memory_order_acquire);
      for (int spins = 0; epoch == seen && spins < kSpins; ++spins) {
        relax();
        epoch = epoch_.load(std::memory_order_acquire);
      }
      if (epoch == seen) {
        epoch_.wait(seen);
        continue;
      }
      seen = epoch;
      take(epoch);
    }
  }

  std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  std::atomic<ChunkWork> work_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> chunks_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

std::mutex guard;      // one job at a time, whichever thread brings it
Pool* pool = nullptr;  // never destroyed at exit: a helper may outlive static destruction

// A forked child has the pool's memory and none of its threads.
const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = nullptr; });

std::vector<int32_t> unplaced() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  return std::vector<int32_t>(CPU_COUNT(&set), -1);
}

}  // namespace

void run_chunks(int64_t chunks, ChunkWork work, void* context) {
  const std::lock_guard<std::mutex> lock(guard);
  if (pool == nullptr) pool = new Pool(unplaced());
  pool->run(chunks, work, context);
}

void place_threads(const int32_t* cpus, int64_t count) {
  const std::lock_guard<std::mutex> lock(guard);
  delete pool;
  pool = new Pool(std::vector<int32_t>(cpus, cpus + count));
  bind_to(pthread_self(), cpus[0]);
}

}  // namespace neuron
