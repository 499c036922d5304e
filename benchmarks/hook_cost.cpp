/* How long PyTorch's CPU allocator takes for one block: asked for, and freed at once. */
#include <c10/core/CPUAllocator.h>

#include <ctime>

static double processor_seconds() {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/* Returns the nanoseconds of processor time for one block of so many bytes. */
extern "C" double nanoseconds_of_a_block(long count, long size) {
    c10::Allocator *allocator = c10::GetCPUAllocator();
    double started = processor_seconds();
    for (long i = 0; i < count; i++)
        allocator->allocate(static_cast<size_t>(size));
    return 1e9 * (processor_seconds() - started) / static_cast<double>(count);
}
