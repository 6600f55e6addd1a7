/* Shifts the wall clock of the processes that preload it: CLOCK_REALTIME plus the nanoseconds in the file REGROW_FAKE_CLOCK
 * (one int64 in the machine's byte order, mapped, so that a change takes effect at once). Monotonic clocks are left alone. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;

__attribute__((constructor)) static void open_shift(void) {
    const char *path = getenv("REGROW_FAKE_CLOCK");
    int handle = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (handle < 0) return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, handle, 0);
    close(handle);
    if (mapped != MAP_FAILED) shift = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = (int)syscall(SYS_clock_gettime, clock, now);
    if (status == 0 && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t moved = (int64_t)now->tv_nsec + *shift % 1000000000;
        now->tv_sec += *shift / 1000000000 + (moved >= 1000000000) - (moved < 0);
        now->tv_nsec = (moved + 1000000000) % 1000000000;
    }
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return (time_t)-1;
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}
