/* Preloaded: one clock for several processes, which stands still while one of them computes. Of all that take part one runs at a time,
 * in the order of the times at which their sleeps end; so a minute of the fake driver's GPU passes in a second, and always in the same
 * way, however busy the machine is.
 *
 *   VIRTUAL_TIME   file that they share, made empty by who starts them
 *   VIRTUAL_COUNT  how many take part: the clock begins when all of them have started
 *
 * A process takes part with one thread, from its start until it returns from main or calls exit.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NEVER UINT64_MAX
#define BEGINNING_NS 1000000000000ull /* of CLOCK_MONOTONIC */
#define EPOCH_NS 1700000000000000000ull
#define CALL_NS 200 /* what a question for the time takes; so a loop that only waits for it comes to its end */
enum { MOST = 64, NOBODY = -1, DEADLINE_S = 120 };

struct shared {
    _Atomic uint32_t lock, turns; /* `turns` counts each change of `running`, for who waits for that */
    _Atomic int running;
    int count, expected;
    uint64_t now;
    uint64_t wake[MOST];
};
static struct shared *shared;
static int own;

static long futex(_Atomic uint32_t *word, int operation, uint32_t value)
{
    struct timespec deadline = {.tv_sec = DEADLINE_S};
    return syscall(SYS_futex, word, operation, value, operation == FUTEX_WAIT ? &deadline : NULL, NULL, 0);
}

static void hand_over(void)
{
    int next = NOBODY;
    for (int i = 0; i < shared->count; i++)
        if (shared->wake[i] != NEVER && (next == NOBODY || shared->wake[i] < shared->wake[next]))
            next = i;
    if (next != NOBODY && shared->wake[next] > shared->now)
        shared->now = shared->wake[next];
    atomic_store(&shared->running, next);
    atomic_fetch_add(&shared->turns, 1);
    futex(&shared->turns, FUTEX_WAKE, INT32_MAX);
}

static void wait_for_turn(void)
{
    for (uint32_t turns = atomic_load(&shared->turns); atomic_load(&shared->running) != own; turns = atomic_load(&shared->turns))
        if (futex(&shared->turns, FUTEX_WAIT, turns) != 0 && errno == ETIMEDOUT) {
            fprintf(stderr, "virtual time: the others have not come so far in %d s\n", DEADLINE_S);
            _exit(98);
        }
}

static void sleep_until(uint64_t time)
{
    shared->wake[own] = time;
    hand_over();
    wait_for_turn();
}

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("VIRTUAL_TIME"), *count = getenv("VIRTUAL_COUNT");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0 || !count || ftruncate(file, sizeof *shared) != 0)
        return;
    struct shared *mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        return;
    while (atomic_exchange(&mapped->lock, 1))
        ;
    shared = mapped;
    own = shared->count++;
    shared->wake[own] = 0;
    if (own == 0)
        atomic_store(&shared->running, NOBODY);
    shared->expected = atoi(count);
    int is_last = shared->count == shared->expected;
    atomic_store(&shared->lock, 0);
    if (is_last)
        hand_over();
    wait_for_turn();
}

__attribute__((destructor)) static void end(void)
{
    if (!shared)
        return;
    shared->wake[own] = NEVER;
    hand_over();
    shared = NULL;
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    if (!shared || (clock != CLOCK_MONOTONIC && clock != CLOCK_REALTIME))
        return (int)syscall(SYS_clock_gettime, clock, time);
    shared->now += CALL_NS; /* whoever asks may hold a lock: it goes on, though another one's sleep has ended meanwhile */
    uint64_t now = shared->now + (clock == CLOCK_MONOTONIC ? BEGINNING_NS : EPOCH_NS);
    *time = (struct timespec){.tv_sec = (time_t)(now / 1000000000), .tv_nsec = (long)(now % 1000000000)};
    return 0;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *rest)
{
    if (!shared)
        return (int)syscall(SYS_clock_nanosleep, clock, flags, time, rest);
    uint64_t ns = (uint64_t)time->tv_sec * 1000000000 + (uint64_t)time->tv_nsec;
    uint64_t beginning = clock == CLOCK_MONOTONIC ? BEGINNING_NS : EPOCH_NS;
    sleep_until(flags & TIMER_ABSTIME ? (ns > beginning + shared->now ? ns - beginning : shared->now) : shared->now + ns);
    return 0;
}

int nanosleep(const struct timespec *time, struct timespec *rest) { return clock_nanosleep(CLOCK_MONOTONIC, 0, time, rest); }
