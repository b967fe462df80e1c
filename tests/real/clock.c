/* Preloaded by /etc/ld.so.preload of a lab host: its programs see another wall clock than this machine.
 *
 * The file OFFSET (-D) holds how far it is ahead, in seconds, as a 64-bit number. It is mapped: a change is a jump of the
 * clock of every program that runs already. Monotonic and boot clocks are not changed, as by a jump of a real one. Times of
 * files are the kernel's.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;

__attribute__((constructor)) static void map_offset(void)
{
    int fd = open(OFFSET, O_RDONLY | O_CLOEXEC);
    void *found = fd < 0 ? MAP_FAILED : mmap(0, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);

    if (found != MAP_FAILED)
        ahead = found;
    if (fd >= 0)
        close(fd);
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    int status = syscall(SYS_clock_gettime, which, now);

    if (!status && ahead && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int status = syscall(SYS_gettimeofday, now, zone);

    if (!status && ahead)
        now->tv_sec += *ahead;
    return status;
}

time_t time(time_t *where)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (where)
        *where = now.tv_sec;
    return now.tv_sec;
}
