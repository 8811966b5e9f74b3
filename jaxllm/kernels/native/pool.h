// One pool of threads for all kernels of the process.
#pragma once
#include <stddef.h>

#include <type_traits>

#include "reading.h"

namespace jaxllm {

// Most threads a pool may have.
constexpr int kMaxThreads = 256;

// Sets how many threads take part in a task, the caller's included. Waits for a task underway.
void set_threads(int count);
int threads();

// Calls work(context, i) once for each i in [0, count), spread over the threads; returns when all are done.
// Tasks are handed out one at a time in order, so that a thread which is slow takes fewer of them. One
// parallel call runs at a time; a second caller waits. Threads that have nothing left to do ask memory for
// their part of `next`. Not to be used after a fork: a child has no threads.
void parallel(size_t count, void (*work)(void*, size_t), void* context, const Upcoming& next);

template <class Function>
void parallel(size_t count, Function&& function, const Upcoming& next = {}) {
  parallel(
      count, [](void* context, size_t i) { (*static_cast<std::remove_reference_t<Function>*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&function)), next);
}

// What a thread's memory is for: a caller's own activations and sums, and what each task works in.
enum Slot { kActivations, kMarks, kExcess, kHidden, kGathered, kMass, kTaskOut, kTaskWork, kSlots };

// `bytes` of memory of this thread's own, aligned to 64, kept until it asks for more in the same slot.
// Null when memory has run out.
void* thread_scratch(Slot slot, size_t bytes);

}  // namespace jaxllm
