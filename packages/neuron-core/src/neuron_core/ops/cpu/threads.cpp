// SPDX-License-Identifier: Apache-2.0
// Each compute thread on a processor of its own: ours, and those of the OpenMP pool that compiled graphs and
// PyTorch's operators use.
#include <omp.h>
#include <pthread.h>
#include <sched.h>

#include "kernels.h"
#include "pool.h"

namespace neuron {

void pin_threads(const int32_t* cpus, int64_t count) {
  omp_set_num_threads(static_cast<int>(count));
#pragma omp parallel num_threads(count)
  {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[omp_get_thread_num()], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }
  place_threads(cpus, count);
}

}  // namespace neuron
