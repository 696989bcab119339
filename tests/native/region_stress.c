/* region.c without a driver, under the compiler's sanitizers: processes and threads that take and give memory at the same time.
 *
 *   region_stress hammer PROCESSES THREADS ROUNDS   in the working directory's files; every second process is killed at the end
 *   region_stress observed PROCESSES THREADS ROUNDS  the same, with an agent that writes all the while what they have, and MODULES
 *                                                   more from the middle on
 *   region_stress crowd PROCESSES                   all at once, each of which takes a MiB and keeps it until all have asked
 *   region_stress forks                             a process takes a slot while another thread forks, and dies before that child;
 *                                                   built with -DMEANWHILE -Dmadvise=madvise_meanwhile
 *   region_stress stops                             takes a context and stops in the middle of it
 *   region_stress watch                             says "watches", and reads the limits that the agent writes then, until they are 0
 *   region_stress fuzz COUNT                        opens COUNT copies of gpushare.config with bytes changed at random
 *
 * Prints the most that was ever held, and what is held at the end, in bytes.
 */
#define _GNU_SOURCE
#include "library.h"
#include "region.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MODULES = 16 << 20 };
static struct { _Atomic uint64_t taken, most, above, refused, ended, begun, done, modules, known; } *seen; /* shared by all processes */
static int rounds, all_threads;

/* start.c's, without its CUDA. */
void say_once(int *said, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    if (!atomic_exchange((_Atomic int *)said, 1)) {
        vfprintf(stderr, format, values);
        fputc('\n', stderr);
    }
    va_end(values);
}

void register_process(void) {}

static void take(uint64_t *place, uint64_t bytes)
{
    struct limits limits;
    uint64_t modules = atomic_load(&seen->known); /* by the library, before it is asked */
    read_limits(0, &limits);
    if (!take_bytes(0, LINEAR, bytes)) {
        atomic_fetch_add(&seen->refused, 1);
        return;
    }
    uint64_t all = atomic_fetch_add(&seen->taken, *place = bytes) + bytes, most = atomic_load(&seen->most);
    while (all > most && !atomic_compare_exchange_weak(&seen->most, &most, all))
        ;
    if (all + modules > limits.memory)
        atomic_fetch_add(&seen->above, 1);
}

static void give(uint64_t *place)
{
    atomic_fetch_sub(&seen->taken, *place); /* first less, then given: `taken` is never more than what is held */
    give_bytes(0, LINEAR, *place);
    *place = 0;
}

static void wait_for_all(int times)
{
    for (atomic_fetch_add(&seen->begun, 1); atomic_load(&seen->begun) < (uint64_t)all_threads * times;)
        sched_yield();
}

static void *hammer(void *seed)
{
    unsigned state = (unsigned)(uintptr_t)seed;
    struct limits limits;
    uint64_t own[8] = {0};
    read_limits(0, &limits);
    /* All at once, and each keeps what it has got until all have asked for more than there is: on a busy machine each would
     * else be done before the next one begins, and the limit never reached. */
    wait_for_all(1);
    for (int i = 0; i < 8; i++)
        take(&own[i], limits.memory / 6);
    wait_for_all(2);
    for (int i = 0; i < rounds; i++) {
        atomic_fetch_add(&seen->done, 1);
        uint64_t *place = &own[rand_r(&state) % 8];
        if (*place)
            give(place);
        else
            take(place, 1 + (uint64_t)rand_r(&state) % (limits.memory / 6));
    }
    for (int i = 0; i < 8; i++)
        if (own[i])
            give(&own[i]);
    return NULL;
}

static void be_process(int number, int threads)
{
    pthread_t all[64];
    forget_region();
    for (int i = 0; i < threads && i < 64; i++)
        pthread_create(&all[i], NULL, hammer, (void *)(uintptr_t)(number * 64 + i + 1));
    for (int i = 0; i < threads && i < 64; i++)
        pthread_join(all[i], NULL);
    atomic_fetch_add(&seen->ended, 1);
    if (number % 2) { /* and one block more, with which it is killed */
        charge_bytes(0, LINEAR, 4096);
        kill(getpid(), SIGKILL);
    }
    _exit(0);
}

/* What a driver would say now, as the agent writes it. The library must never take more for unattributed than there is. */
static uint64_t observe(struct config *config)
{
    struct config_gpu *gpu = &config->gpu[0];
    uint64_t at = now_ns(), bytes = atomic_load(&seen->taken) + atomic_load(&seen->modules);
    atomic_fetch_add((_Atomic uint32_t *)&gpu->sequence, 1);
    atomic_store((_Atomic uint64_t *)&gpu->observed_at, at);
    atomic_store((_Atomic uint64_t *)&gpu->observed_bytes, bytes);
    atomic_fetch_add((_Atomic uint32_t *)&gpu->sequence, 1);
    while (now_ns() < at + 1000000)
        sched_yield();
    int64_t more = atomic_load((_Atomic int64_t *)&usage_of(0)->unattributed);
    return more > 0 ? (uint64_t)more : 0;
}

static int hammer_all(int processes, int threads, bool is_observed)
{
    uint64_t too_much = 0;
    if (!open_region() || !own_slot())
        return 3;
    seen = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    all_threads = processes * threads;
    for (int i = 0; i < processes; i++)
        if (fork() == 0)
            be_process(i, threads);
    int status, failed = 0, file = open("gpushare.config", O_RDWR);
    struct config *config = mmap(NULL, sizeof *config, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    for (pid_t ended; (ended = waitpid(-1, &status, is_observed ? WNOHANG : 0)) >= 0;) {
        if (ended > 0) {
            failed += !(WIFEXITED(status) && WEXITSTATUS(status) == 0) && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
            continue;
        }
        if (atomic_load(&seen->done) > (uint64_t)processes * threads * rounds / 2)
            atomic_store(&seen->modules, MODULES);
        uint64_t more = observe(config), modules = atomic_load(&seen->modules);
        too_much += more > modules;
        atomic_store(&seen->known, more < modules ? more : modules);
    }
    struct limits limits;
    reclaim_dead();
    read_limits(0, &limits);
    printf("{\"most\": %lu, \"above\": %lu, \"refused\": %lu, \"held\": %lu, \"ended\": %lu, \"failed\": %d, \"known\": %lu, \"too_much\": %lu}\n",
           seen->most, seen->above, seen->refused, held_bytes(0, &limits), seen->ended, failed, seen->known, too_much);
    return 0;
}

static int crowd(int count)
{
    static struct { _Atomic int asked, with_memory; } *all;
    int gate[2], status, failed = 0;
    char byte;
    all = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || pipe(gate))
        return 3;
    for (int i = 0; i < count; i++)
        if (fork() == 0) {
            close(gate[1]);
            if (take_bytes(0, LINEAR, 1 << 20))
                atomic_fetch_add(&all->with_memory, 1);
            atomic_fetch_add(&all->asked, 1);
            _exit(read(gate[0], &byte, 1) == 0 ? 0 : 4);
        }
    while (atomic_load(&all->asked) < count)
        sched_yield();
    close(gate[1]);
    while (wait(&status) > 0)
        failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    reclaim_dead();
    bool has_room = take_bytes(0, LINEAR, 32 << 20); /* with a slot, which one of the dead had */
    printf("{\"with_memory\": %d, \"failed\": %d, \"has_room\": %d}\n", atomic_load(&all->with_memory), failed, has_room);
    return 0;
}

#ifdef MEANWHILE
static _Atomic pid_t *child; /* -1: it may be made */
/* What region.c calls when it has the lock, before it keeps that from children. */
#undef madvise
int madvise(void *address, size_t size, int advice);
int madvise_meanwhile(void *address, size_t size, int advice);
int madvise_meanwhile(void *address, size_t size, int advice)
{
    if (child)
        atomic_store(child, -1);
    for (uint64_t until = now_ns() + 50000000; child && atomic_load(child) < 0 && now_ns() < until;) /* it waits for us */
        sched_yield();
    return madvise(address, size, advice);
}

static void *fork_meanwhile(void *unused)
{
    while (atomic_load(child) == 0)
        sched_yield();
    pid_t made = fork();
    while (made == 0)
        pause();
    atomic_store(child, made);
    return unused;
}

static int forks(void)
{
    struct limits limits;
    pthread_t other;
    int status;
    child = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!open_region())
        return 3;
    pid_t parent = fork();
    if (parent == 0) {
        watch_region();
        pthread_create(&other, NULL, fork_meanwhile, NULL);
        charge_bytes(0, LINEAR, 4096);
        pthread_join(other, NULL);
        _exit(0);
    }
    waitpid(parent, &status, 0);
    read_limits(0, &limits);
    reclaim_dead();
    printf("{\"held\": %lu, \"forked\": %d}\n", held_bytes(0, &limits), atomic_load(child) > 0);
    return kill(atomic_load(child), SIGKILL);
}
#endif

/* A process that has died or is stopped in the middle of taking a context: what the agent saw, though long after the last change,
   must not be taken for what that lacks. */
static int stops(void)
{
    struct limits limits;
    int file = open("gpushare.config", O_RDWR);
    struct config *config = mmap(NULL, sizeof *config, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    struct usage_slot *own = open_region() ? own_slot() : NULL;
    if (!own)
        return 3;
    own->pending[0] = own->held[0] = own->of_kind[CONTEXT] = 8 << 20;
    config->gpu[0].observed_at = now_ns() + 1000000000;
    read_limits(0, &limits);
    printf("{\"stopped\": %lu", held_bytes(0, &limits));
    own->pending[0] = 0;
    printf(", \"went_on\": %lu}\n", held_bytes(0, &limits));
    return 0;
}

/* Of what the agent writes at once all numbers are one number, as far as they have room for it. */
static int watch(void)
{
    uint64_t reads = 0, torn = 0, changes = 0, last = 0;
    struct limits limits;
    puts("watches");
    fflush(stdout);
    do {
        const struct config_gpu *seen = &limits.seen;
        read_limits(0, &limits);
        uint64_t number = seen->memory;
        torn += seen->cores != number || seen->ceiling != (number & 1 ? number : 0) || limits.has_ceiling;
        torn += (seen->flags & HAS_CEILING) != (number & 1 ? HAS_CEILING : 0);
        number = seen->observed_at;
        torn += seen->observed_bytes != number || seen->busy_since != number || seen->busy_until != number ||
                seen->busy_ns != number || seen->others_ns != number || seen->published_at != number ||
                seen->companions != number || seen->full != number || limits.between_ns != (double)number * 1000;
        changes += number != last;
        last = number;
        reads++;
    } while (limits.memory);
    printf("{\"reads\": %lu, \"changes\": %lu, \"torn\": %lu}\n", reads, changes, torn);
    return 0;
}

static int fuzz(int count)
{
    char whole[CONFIG_BYTES];
    int file = open("gpushare.config", O_RDWR), failed = 0, opened = 0;
    if (read(file, whole, sizeof whole) != sizeof whole)
        return 3;
    for (int i = 0; i < count; i++) {
        char changed[CONFIG_BYTES];
        unsigned state = (unsigned)i;
        memcpy(changed, whole, sizeof whole);
        for (int k = rand_r(&state) % 16; k >= 0; k--)
            changed[rand_r(&state) % (rand_r(&state) % 2 ? 16 : sizeof changed)] = (char)rand_r(&state);
        if (pwrite(file, changed, sizeof changed, 0) != sizeof changed || ftruncate(file, i % 10 ? (off_t)sizeof changed : rand_r(&state) % 5000))
            return 3;
        if (fork() == 0) {
            struct limits limits;
            bool is_open = open_region();
            for (int gpu = 0; is_open && gpu < MOST_GPUS; gpu++) {
                read_limits(gpu, &limits);
                if (take_bytes(gpu, LINEAR, 1 << 20))
                    give_bytes(gpu, LINEAR, 1 << 20);
            }
            gpu_named("00000000-0000-4000-8000-000000000000");
            _exit(is_open ? 1 : 0);
        }
        int status;
        wait(&status);
        failed += !WIFEXITED(status) || WEXITSTATUS(status) > 1;
        opened += WIFEXITED(status) && WEXITSTATUS(status) == 1;
    }
    printf("{\"failed\": %d, \"opened\": %d}\n", failed, opened);
    return 0;
}

int main(int count, char **words)
{
    if (count == 5 && (strcmp(words[1], "hammer") == 0 || strcmp(words[1], "observed") == 0)) {
        rounds = atoi(words[4]);
        return hammer_all(atoi(words[2]), atoi(words[3]), words[1][0] == 'o');
    }
#ifdef MEANWHILE
    if (count == 2 && strcmp(words[1], "forks") == 0)
        return forks();
#endif
    if (count == 2 && strcmp(words[1], "stops") == 0)
        return stops();
    if (count == 2 && strcmp(words[1], "watch") == 0)
        return open_region() ? watch() : 3;
    if (count == 3 && strcmp(words[1], "crowd") == 0)
        return crowd(atoi(words[2]));
    return count == 3 && strcmp(words[1], "fuzz") == 0 ? fuzz(atoi(words[2])) : 2;
}
