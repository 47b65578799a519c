// SPDX-License-Identifier: Apache-2.0
// Threads that share one job's chunks. The caller takes chunks too and waits only for chunks that a helper has
// already begun: where the system runs something else on a helper's processor, the caller does the work alone
// instead of waiting at a barrier, which is what makes OpenMP collapse beside a busy neighbour.
#pragma once

#include <cstdint>

namespace neuron {

using ChunkWork = void (*)(void* context, int64_t chunk);

// Runs work(context, chunk) for each chunk in [0, chunks) and returns when all are done. Not reentrant.
void run_chunks(int64_t chunks, ChunkWork work, void* context);

// The calling thread on cpus[0] and one helper on each of the others; replaces earlier helpers.
void place_threads(const int32_t* cpus, int64_t count);

template <typename Body>
void parallel_chunks(int64_t chunks, Body body) {
  run_chunks(chunks, [](void* context, int64_t chunk) { (*static_cast<Body*>(context))(chunk); }, &body);
}

}  // namespace neuron
