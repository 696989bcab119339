/* The limits of the container, and what its processes use of them, counted in one file that all of them map.
 *
 * No lock is held anywhere: a program may be killed at every instruction, and the next one must find a state that is right. So each
 * process writes the memory that it has into a slot of its own and nowhere else, and the container's use is the sum of the slots. A
 * slot is its process's as long as that holds a lock on one byte of the file; who finds the byte unlocked takes the slot as empty.
 *
 * Whose the lock is, and when it ends, must not depend on what the program does with its files: a daemon closes all descriptors that
 * it does not know. So no descriptor is kept. A lock of F_OFD_SETLK is the open file's, and a map keeps the file open as well as a
 * descriptor does: each slot's lock hangs on a map of its own, which nothing but the process's end or exec removes. It is not
 * inherited by a child of fork, who would hold its parent's slot beyond the parent's end.
 */
#define _GNU_SOURCE
#include "region.h"

#include "library.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CONFIG_PATH GPUSHARE_DIRECTORY "/gpushare.config"
#define USAGE_PATH GPUSHARE_DIRECTORY "/usage"
#ifndef LONGEST_WRITE_NS
#define LONGEST_WRITE_NS 20000000u /* of the agent, which may be interrupted meanwhile */
#endif
enum { MOST_TRIES = 100, CONTENTION_TRIES = 2000, RETRY_NS = 100000000, LONGEST_FORK_NS = 1000000000 };

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER; /* of opening, and of taking a slot */
static const struct config *config;
static struct usage *usage;
static struct usage_slot *_Atomic slot;
static void *lock_of_slot; /* the map on which it hangs */
static _Atomic bool is_opened;

#define LOAD(field) atomic_load_explicit((_Atomic __typeof__(field) *)&(field), memory_order_relaxed)
#define STORE(field, value) atomic_store_explicit((_Atomic __typeof__(field) *)&(field), value, memory_order_relaxed)
/* Sequentially consistent: two processes that ask at once must not both read the state before the other's question. */
#define ADD(field, value) atomic_fetch_add((_Atomic __typeof__(field) *)&(field), value)

/* Not a store: who was interrupted before it would put an older time over a newer one. */
static void raise_to(uint64_t *place, uint64_t value)
{
    uint64_t found = LOAD(*place);
    while (found < value && !atomic_compare_exchange_weak((_Atomic uint64_t *)place, &found, value))
        ;
}

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- locks ---- */

static __thread int forbidden __attribute__((tls_model("initial-exec"))),
    state_before __attribute__((tls_model("initial-exec"))); /* how often, one within the other */

void forbid_cancel(void)
{
    if (forbidden++ == 0)
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state_before);
}

void allow_cancel(void)
{
    int unused;
    if (--forbidden == 0)
        pthread_setcancelstate(state_before, &unused);
}

void hold(pthread_mutex_t *of)
{
    forbid_cancel();
    pthread_mutex_lock(of);
}

void release(pthread_mutex_t *of)
{
    pthread_mutex_unlock(of);
    allow_cancel();
}

/* ---- opening ---- */

static int open_file(const char *path, int access) { return open(path, access | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); }

/* NULL with the reason; the size is looked at first, because to read behind a file's end is a signal. */
static void *map_file(const char *path, size_t size, int access, const char **reason)
{
    struct stat found;
    int file = open_file(path, access & PROT_WRITE ? O_RDWR : O_RDONLY);
    void *mapped = MAP_FAILED;
    if (file < 0)
        *reason = "it cannot be opened";
    else if (fstat(file, &found) != 0 || !S_ISREG(found.st_mode) || found.st_size < (off_t)size)
        *reason = "it is too short";
    else if ((mapped = mmap(NULL, size, access, MAP_SHARED, file, 0)) == MAP_FAILED)
        *reason = "it cannot be mapped";
    if (file >= 0)
        close(file);
    return mapped == MAP_FAILED ? NULL : mapped;
}

static const struct config *open_config(const char **reason)
{
    const struct config *opened = map_file(CONFIG_PATH, CONFIG_BYTES, PROT_READ, reason);
    if (opened && (memcmp(opened->magic, CONFIG_MAGIC, 4) != 0 || opened->layout != CONFIG_LAYOUT || opened->size != CONFIG_BYTES ||
                   opened->gpus > MOST_GPUS)) {
        *reason = "it is of another version of the agent";
        munmap((void *)(uintptr_t)opened, CONFIG_BYTES);
        return NULL;
    }
    return opened;
}

static struct usage *open_usage(const char **reason)
{
    struct usage *opened = map_file(USAGE_PATH, sizeof *opened, PROT_READ | PROT_WRITE, reason);
    if (opened && (memcmp(opened->magic, USAGE_MAGIC, 4) != 0 || opened->layout != USAGE_LAYOUT || opened->slots != MOST_SLOTS)) {
        *reason = "it is of another version of the agent";
        munmap(opened, sizeof *opened);
        return NULL;
    }
    return opened;
}

/* What has failed once is tried again, but not at each of a million launches. A child of fork may have another clock (time
   namespaces), before which `next` lies by days. */
static bool is_time_for(uint64_t *next, uint64_t now)
{
    bool is_time = now >= *next || *next - now > RETRY_NS;
    if (is_time)
        *next = now + RETRY_NS;
    return is_time;
}

bool open_region(void)
{
    static int said;
    static uint64_t next;
    const char *reason = NULL, *path = CONFIG_PATH;
    if (atomic_load_explicit(&is_opened, memory_order_acquire))
        return true;
    hold(&guard);
    if (!is_opened && is_time_for(&next, now_ns())) {
        config = config ? config : open_config(&reason);
        if (config && (path = USAGE_PATH) != NULL)
            usage = open_usage(&reason);
        if (usage)
            atomic_store_explicit(&is_opened, true, memory_order_release);
        else
            say_once(&said, "%s: %s: no memory of a GPU can be allocated. Start the container again", path, reason);
    }
    bool is_open = is_opened;
    release(&guard);
    return is_open;
}

/* A child that is made while a slot is being taken has the descriptor, and a map that is not yet kept from it: it would hold its
   parent's slot. So fork waits for that. It does not wait for ever: a handler of a signal may fork over the thread that it has
   interrupted. A child of clone or _Fork, which run no handlers, may hold a slot in that way until it ends or calls exec. */
static __thread bool is_forking __attribute__((tls_model("initial-exec")));

static void hold_region(void)
{
    uint64_t until = now_ns() + LONGEST_FORK_NS;
    while (!(is_forking = pthread_mutex_trylock(&guard) == 0) && now_ns() < until)
        sched_yield();
}

static void release_region(void)
{
    if (is_forking)
        pthread_mutex_unlock(&guard);
    is_forking = false;
}

static void renew_guard(void)
{
    guard = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    is_forking = false;
}

void watch_region(void) { pthread_atfork(hold_region, release_region, renew_guard); }

/* Its limits stay the parent's, as both are of one container; the slot does not. */
void forget_region(void)
{
    guard = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    lock_of_slot = NULL; /* not in the child's memory */
    atomic_store(&slot, NULL);
}

/* ---- limits ---- */

int gpu_named(const char *uuid)
{
    if (!open_region())
        return -1;
    for (int i = 0; i < (int)config->gpus && i < MOST_GPUS; i++)
        if (strncmp(config->gpu[i].uuid + 4, uuid, sizeof config->gpu[i].uuid - 4) == 0)
            return i;
    return -1;
}

int only_instance(void)
{
    int found = -1;
    if (!open_region())
        return -1;
    for (int i = 0; i < (int)config->gpus && i < MOST_GPUS; i++)
        if (memcmp(config->gpu[i].uuid, "MIG-", 4) == 0)
            found = found == -1 ? i : -2;
    return found < 0 ? -1 : found;
}

/* Whether to read again, because the agent is writing: its thread may have to wait for a processor in the middle of that. One that has
   died there leaves the sequence odd: the same odd one is waited for once, and then what is there is believed. Each number is read whole,
   so they are all right, some new and some old. */
static bool waits_for_agent(int gpu, uint32_t sequence, int tries, uint64_t *until)
{
    static _Atomic uint32_t in_vain[MOST_GPUS];
    if (sequence & 1 && LOAD(in_vain[gpu]) == sequence)
        return false;
    if (tries < MOST_TRIES)
        return true;
    uint64_t now = now_ns();
    *until = *until ? *until : now + LONGEST_WRITE_NS;
    if (now < *until)
        return sched_yield(), true;
    STORE(in_vain[gpu], sequence);
    return false;
}

void read_limits(int gpu, struct limits *limits)
{
    const struct config_gpu *from = &config->gpu[gpu];
    struct config_gpu *to = &limits->seen;
    uint64_t until = 0;
    for (int tries = 0;; tries++) {
        uint32_t sequence = atomic_load_explicit((const _Atomic uint32_t *)&from->sequence, memory_order_acquire);
        to->flags = LOAD(*(uint32_t *)(uintptr_t)&from->flags);
        to->memory = LOAD(*(uint64_t *)(uintptr_t)&from->memory);
        to->cores = LOAD(*(uint32_t *)(uintptr_t)&from->cores);
        to->ceiling = LOAD(*(uint32_t *)(uintptr_t)&from->ceiling);
        to->observed_at = LOAD(*(uint64_t *)(uintptr_t)&from->observed_at);
        to->observed_bytes = LOAD(*(uint64_t *)(uintptr_t)&from->observed_bytes);
        to->busy_since = LOAD(*(uint64_t *)(uintptr_t)&from->busy_since);
        to->busy_until = LOAD(*(uint64_t *)(uintptr_t)&from->busy_until);
        to->busy_ns = LOAD(*(uint64_t *)(uintptr_t)&from->busy_ns);
        to->others_ns = LOAD(*(uint64_t *)(uintptr_t)&from->others_ns);
        to->published_at = LOAD(*(uint32_t *)(uintptr_t)&from->published_at);
        to->companions = LOAD(*(uint16_t *)(uintptr_t)&from->companions);
        to->full = LOAD(*(uint16_t *)(uintptr_t)&from->full);
        limits->between_ns = LOAD(*(uint16_t *)(uintptr_t)&config->between_us[gpu]) * 1000.0;
        limits->context = LOAD(*(uint32_t *)(uintptr_t)&config->context_kib[gpu]) * (uint64_t)1024;
        atomic_thread_fence(memory_order_acquire);
        if (!(sequence & 1) && LOAD(*(uint32_t *)(uintptr_t)&from->sequence) == sequence)
            break;
        if (!waits_for_agent(gpu, sequence, tries, &until))
            break;
    }
    /* A file in which somebody on the host has written, or of which he has left a part, reads as zeros, and that is not "no limit".
       To read one that he has emptied is a signal (SIGBUS), which ends the program. The agent only writes numbers in it, or puts
       another file in its place. */
    if (LOAD(*(uint32_t *)(uintptr_t)&config->layout) != CONFIG_LAYOUT || LOAD(*(char *)(uintptr_t)&from->uuid[0]) == 0) {
        static int said;
        say_once(&said, "%s is empty: no memory of a GPU can be allocated. Start the container again", CONFIG_PATH);
        *limits = (struct limits){.limits_memory = true};
        return;
    }
    limits->limits_memory = to->flags & LIMITS_MEMORY;
    limits->limits_cores = to->flags & LIMITS_CORES && to->cores < 10000;
    limits->is_instance = LOAD(*(char *)(uintptr_t)&from->uuid[0]) == 'M';
    limits->has_ceiling = to->flags & HAS_CEILING && to->ceiling > to->cores;
    limits->memory = to->memory;
    limits->cores = to->cores / 10000.0;
    limits->ceiling = to->ceiling / 10000.0;
}

struct usage_gpu *usage_of(int gpu) { return &usage->gpu[gpu]; }

/* ---- slots ---- */

/* 0, or an errno: EAGAIN where another process holds it. */
static int lock_slot(int file, unsigned index, short type)
{
    struct flock byte = {.l_type = type, .l_whence = SEEK_SET, .l_start = FIRST_LOCKED_BYTE + (off_t)index, .l_len = 1};
    return fcntl(file, F_OFD_SETLK, &byte) == 0 ? 0 : errno == EACCES ? EAGAIN : errno;
}

/* Most containers have a few processes: who sums need not look at all slots. */
static struct usage_slot *end_of_slots(void)
{
    uint32_t used = atomic_load((_Atomic uint32_t *)&usage->used_slots);
    return usage->slot + (used < MOST_SLOTS ? used : MOST_SLOTS);
}

static void note_used_slot(uint32_t index)
{
    uint32_t used = LOAD(usage->used_slots);
    while (used <= index && !atomic_compare_exchange_weak((_Atomic uint32_t *)&usage->used_slots, &used, index + 1))
        ;
}

static bool begin_window(int gpu, uint64_t found);

static bool is_empty(void)
{
    bool is = true;
    for (struct usage_slot *one = usage->slot; one < end_of_slots(); one++)
        is = is && LOAD(one->pid) == 0;
    return is;
}

/* Of a process that has ended. What the agent has observed until now has its memory in it, and would be taken for what no slot
   explains: the next program would be refused as much. So it counts no more, nor does what was concluded from it, unless others may
   have it. */
static void note_end(int gpu, bool had_memory)
{
    struct usage_gpu *use = &usage->gpu[gpu];
    if (is_empty() || LOAD(use->unattributed) < 0)
        STORE(use->unattributed, 0);
    if (had_memory) {
        raise_to(&use->ended_at, now_ns());
        raise_to(&use->changed_at, now_ns());
    }
}

static void clear_slot(struct usage_slot *of)
{
    STORE(of->pid, 0);
    for (int gpu = 0; gpu < MOST_GPUS; gpu++) {
        bool had_memory = LOAD(of->held[gpu]) != 0 || LOAD(of->pending[gpu]) != 0;
        if (had_memory || LOAD(usage->gpu[gpu].unattributed) != 0)
            note_end(gpu, had_memory);
        STORE(of->held[gpu], 0);
        STORE(of->pending[gpu], 0);
        STORE(of->unseen[gpu], 0);
    }
    for (int kind = 0; kind < KINDS; kind++)
        STORE(of->of_kind[kind], 0);
    STORE(of->unhooked, 0);
}

/* A lock keeps a new process out meanwhile. */
static void clear_dead(int file)
{
    for (struct usage_slot *one = usage->slot; one < end_of_slots(); one++) {
        unsigned i = (unsigned)(one - usage->slot);
        if (one == atomic_load(&slot) || LOAD(one->pid) == 0 || lock_slot(file, i, F_WRLCK) != 0)
            continue;
        clear_slot(one);
        lock_slot(file, i, F_UNLCK);
    }
}

/* The first slot that no process holds; NULL with an errno. */
static struct usage_slot *take_slot(int *failed)
{
    int file = open_file(USAGE_PATH, O_RDWR);
    struct usage_slot *taken = NULL;
    *failed = file < 0 ? errno : EAGAIN;
    for (unsigned i = 0; i < MOST_SLOTS && *failed == EAGAIN; i++)
        if ((*failed = lock_slot(file, i, F_WRLCK)) == 0)
            taken = &usage->slot[i];
    if (taken) {
        lock_of_slot = mmap(NULL, 1, PROT_NONE, MAP_SHARED, file, 0);
        if (lock_of_slot == MAP_FAILED || madvise(lock_of_slot, 1, MADV_DONTFORK) != 0) {
            *failed = errno;
            taken = NULL;
            if (lock_of_slot != MAP_FAILED)
                munmap(lock_of_slot, 1);
        }
    }
    if (taken) {
        clear_slot(taken); /* whose process has died may be in it still: the lock says that it is nobody's */
        clear_dead(file);  /* what was theirs alone must not be taken for this one's */
    }
    if (file >= 0)
        close(file); /* the map keeps the lock */
    return taken;
}

static void say_why_no_slot(int failed)
{
    static int said;
    if (failed == EAGAIN)
        say_once(&said, "more than %d processes of the container use a GPU: this one gets no memory there", MOST_SLOTS);
    else
        say_once(&said, "%s cannot be opened, mapped or locked (F_OFD_SETLK): %s: this process gets no memory of a GPU", USAGE_PATH,
                 strerror(failed));
}

void container_names(char *pod_uid, char *container)
{
    memcpy(pod_uid, config->pod_uid, sizeof config->pod_uid);
    memcpy(container, config->container, sizeof config->container);
    pod_uid[sizeof config->pod_uid - 1] = container[sizeof config->container - 1] = 0;
}

struct usage_slot *own_slot(void)
{
    static uint64_t next;
    bool is_new = false;
    int failed = 0;
    struct usage_slot *own = atomic_load_explicit(&slot, memory_order_acquire);
    if (own || !open_region())
        return own;
    hold(&guard);
    own = atomic_load(&slot);
    if (!own && is_time_for(&next, now_ns()) && (own = take_slot(&failed)) != NULL) {
        bool is_first = is_empty();
        note_used_slot((uint32_t)(own - usage->slot));
        STORE(own->started_at, now_ns());
        STORE(own->raises, (uint32_t)own->started_at);
        STORE(own->pid, getpid());
        for (int gpu = 0; gpu < (int)config->gpus && gpu < MOST_GPUS; gpu++) {
            raise_to(&usage->gpu[gpu].changed_at, now_ns()); /* what was observed before says nothing of it */
            if (is_first)
                begin_window(gpu, LOAD(usage->gpu[gpu].window));
        }
        next = 0;
        is_new = true;
        atomic_store_explicit(&slot, own, memory_order_release);
    }
    release(&guard);
    if (failed)
        say_why_no_slot(failed);
    if (is_new) /* a child of fork, too, because it has come here again */
        register_process();
    return own;
}

void reclaim_dead(void)
{
    if (!open_region())
        return;
    hold(&guard);
    int file = open_file(USAGE_PATH, O_RDWR); /* none after chroot, or where the user may no more: then others do it */
    if (file >= 0) {
        clear_dead(file);
        close(file);
    }
    release(&guard);
}

unsigned list_slots(int gpu, struct slot_use *uses, unsigned room)
{
    unsigned count = 0;
    reclaim_dead();
    for (const struct usage_slot *one = usage->slot; one < end_of_slots() && count < room; one++)
        if (LOAD(*(int32_t *)(uintptr_t)&one->pid) != 0 && LOAD(*(uint64_t *)(uintptr_t)&one->held[gpu]) != 0)
            uses[count++] = (struct slot_use){.pid = one->pid, .bytes = one->held[gpu]};
    return count;
}

/* ---- memory: what the slots say ---- */

struct sums {
    uint64_t held, pending, unseen;
};

static struct sums sum_slots(int gpu)
{
    bool has_unseen = LOAD(usage->gpu[gpu].has_unseen);
    struct sums all = {0};
    for (struct usage_slot *one = usage->slot; one < end_of_slots(); one++) {
        uint32_t unseen = 0, again = 0;
        if (LOAD(one->pid) == 0)
            continue;
        if (has_unseen)
            unseen = atomic_load((_Atomic uint32_t *)&one->unseen[gpu]);
        /* Pending first: what goes from there to held meanwhile is counted twice, and never not at all. */
        all.pending += atomic_load((_Atomic uint64_t *)&one->pending[gpu]);
        all.held += atomic_load((_Atomic uint64_t *)&one->held[gpu]);
        if (has_unseen) /* the lower one is in what was held, whichever changed meanwhile */
            again = atomic_load((_Atomic uint32_t *)&one->unseen[gpu]);
        all.unseen += (uint64_t)(unseen < again ? unseen : again) * UNSEEN_BYTES;
    }
    return all;
}

static uint64_t with_unattributed(int gpu, uint64_t held)
{
    int64_t more = LOAD(usage->gpu[gpu].unattributed);
    return more < 0 && held < -(uint64_t)more ? 0 : held + (uint64_t)more; /* unsigned: it may be any number */
}

/* ---- memory: what the agent observes ----
 *
 * The driver has more of a container than its slots say: modules, pages that are partly free, contexts that were estimated. It never
 * has more than held and that, because memory is counted before it is taken and until it is given back (what the driver says only
 * afterwards is late by microseconds). So what an observation has more than the most that was held since before it is unattributed for
 * sure, however much the program takes and gives meanwhile. That is corrected at once. What it has less may be memory that is about to
 * be taken: that is believed once nothing has changed for SETTLED_NS.
 *
 * The most that was held is kept in a window, which a new observation ends. Whoever takes memory raises it before he holds that, by
 * what all hold and have asked for: of those that ask at once the last one sees the others' questions. Who begins a window sums after
 * he has emptied it, and says only then that it has begun: what was held in between, and raised the window before, is either in the
 * sum or was given back before the window began. He may die at every instruction: a window that has not begun is no evidence.
 */
#define SETTLED_NS 300000000u
#define LINGERS_NS 500000000u /* for which the driver may have memory of a process that was killed: 86 ms (H200, measured) */
#define WINDOW_NUMBER ((1u << WINDOW_BITS) - 1)

static uint64_t seen_of(const struct sums *all)
{
    uint64_t asked = all->held + all->pending;
    return asked > all->unseen ? asked - all->unseen : 0;
}

static void raise_window(int gpu, const struct sums *all)
{
    uint64_t *window = &usage->gpu[gpu].window, found = LOAD(*window);
    uint64_t most = (seen_of(all) >> WINDOW_UNIT_BITS) + 1; /* units are rounded up */
    while (found >> WINDOW_BITS < most &&
           !atomic_compare_exchange_weak((_Atomic uint64_t *)window, &found, most << WINDOW_BITS | (found & WINDOW_NUMBER)))
        ;
}

/* Unless another process has changed it since: then that one, or the next question, does it. */
static bool begin_window(int gpu, uint64_t found)
{
    struct usage_gpu *use = &usage->gpu[gpu];
    uint64_t number = (found & WINDOW_NUMBER) % WINDOW_NUMBER + 1; /* never 0, which a new file has */
    if (!atomic_compare_exchange_strong((_Atomic uint64_t *)&use->window, &found, number))
        return false;
    struct sums all = sum_slots(gpu);
    raise_window(gpu, &all);
    STORE(use->window_at, ((now_ns() | WINDOW_NUMBER) + 1) | number);
    return true;
}

static bool is_raised_by_all(void)
{
    bool is = true;
    for (struct usage_slot *one = usage->slot; one < end_of_slots(); one++)
        is = is && (LOAD(one->pid) == 0 || LOAD(one->raises) == (uint32_t)LOAD(one->started_at));
    return is;
}

static void believe_more(int gpu, const struct config_gpu *seen)
{
    struct usage_gpu *use = &usage->gpu[gpu];
    uint64_t window = LOAD(use->window), at = LOAD(use->window_at), most = window >> WINDOW_BITS << WINDOW_UNIT_BITS;
    bool is_begun = window & WINDOW_NUMBER && ((window ^ at) & WINDOW_NUMBER) == 0;
    if (is_begun && at > seen->observed_at) /* also the one that has ended the window before */
        return;
    if (!begin_window(gpu, window) || !is_begun || !is_raised_by_all() || seen->observed_at < LOAD(use->ended_at) + LINGERS_NS)
        return;
    int64_t more = (int64_t)(seen->observed_bytes - most);
    if (more > LOAD(use->unattributed))
        STORE(use->unattributed, more);
}

/* What is less than the slots say can only be in what they estimate, so only by that much. `asked` is the caller's own question. */
static void attribute(int gpu, const struct config_gpu *seen, const struct sums *all, uint64_t asked)
{
    struct usage_gpu *use = &usage->gpu[gpu];
    if (!seen->observed_at)
        return;
    if (seen->observed_at < LOAD(use->changed_at) + SETTLED_NS || all->pending != asked) {
        believe_more(gpu, seen);
        return;
    }
    uint64_t estimated = 0;
    for (struct usage_slot *one = usage->slot; one < end_of_slots(); one++)
        if (LOAD(one->pid) != 0)
            estimated += LOAD(one->of_kind[CONTEXT]) + LOAD(one->of_kind[POOL]) + LOAD(one->of_kind[GRAPH]);
    int64_t more = (int64_t)(seen->observed_bytes + all->unseen - all->held);
    bool is_less = more < 0 && -(uint64_t)more > estimated;
    STORE(use->unattributed, is_less ? (int64_t)-estimated : more);
}

uint64_t held_bytes(int gpu, const struct limits *limits)
{
    struct sums all = sum_slots(gpu);
    attribute(gpu, &limits->seen, &all, 0);
    return with_unattributed(gpu, all.held);
}

/* ---- memory: taking and giving ---- */

/* Stamped before it: who finds what has changed in his sums finds the change, too, or what is still asked for. */
static void change_held(struct usage_slot *own, int gpu, enum kind kind, uint64_t bytes)
{
    struct usage_gpu *use = &usage->gpu[gpu];
    uint32_t unseen = kind == MANAGED ? (uint32_t)((int64_t)bytes / UNSEEN_BYTES) : 0;
    bool is_less = bytes > INT64_MAX;
    raise_to(&use->changed_at, now_ns());
    if (unseen && is_less) /* never more than what is held */
        ADD(own->unseen[gpu], unseen);
    ADD(own->held[gpu], bytes);
    if (unseen && !is_less) {
        ADD(own->unseen[gpu], unseen);
        STORE(use->has_unseen, 1);
    }
    ADD(own->of_kind[kind], bytes);
}

static bool is_above(uint64_t limit, uint64_t used, uint64_t bytes) { return used > limit || bytes > limit - used; }

/* One question: 1 taken, 0 refused, -1 another process asks at the same time, and both do not fit. */
static int ask_for(struct usage_slot *own, int gpu, enum kind kind, uint64_t bytes, const struct limits *limits)
{
    ADD(own->pending[gpu], bytes);
    struct sums all = sum_slots(gpu);
    attribute(gpu, &limits->seen, &all, bytes);
    uint64_t held = with_unattributed(gpu, all.held);
    bool is_full = is_above(limits->memory, held, bytes), has_room = !is_above(limits->memory, held, all.pending);
    if (has_room)
        raise_window(gpu, &all);
    if (has_room && kind != CONTEXT)
        change_held(own, gpu, kind, bytes);
    if (!has_room || kind != CONTEXT)
        ADD(own->pending[gpu], (uint64_t)-bytes);
    return has_room ? 1 : is_full ? 0 : -1;
}

bool take_bytes(int gpu, enum kind kind, uint64_t bytes)
{
    struct usage_slot *own = own_slot();
    struct limits limits;
    static int said;
    if (!own || gpu < 0) {
        if (gpu < 0 && own)
            say_once(&said, "%s names another GPU than the program uses: it gets no memory there", CONFIG_PATH);
        return false;
    }
    read_limits(gpu, &limits);
    if (!limits.limits_memory)
        limits.memory = UINT64_MAX;
    /* The window has 48 bits for pages of 4 KiB. */
    int answer = bytes > UINT64_MAX >> 8 ? 0 : ask_for(own, gpu, kind, bytes, &limits);
    for (int tries = 0; answer < 0 && tries < CONTENTION_TRIES; tries++) {
        /* Each withdraws and asks again at another time. */
        for (int i = 0; i <= (tries & 7) * (getpid() & 7); i++)
            sched_yield();
        answer = ask_for(own, gpu, kind, bytes, &limits);
    }
    if (answer <= 0)
        ADD(usage->gpu[gpu].refused, 1);
    return answer > 0;
}

void hold_context(int gpu, uint64_t bytes)
{
    struct usage_slot *own = own_slot();
    if (!own || gpu < 0 || !bytes)
        return;
    change_held(own, gpu, CONTEXT, bytes);
    ADD(own->pending[gpu], (uint64_t)-bytes);
}

void charge_bytes(int gpu, enum kind kind, uint64_t bytes)
{
    struct usage_slot *own = own_slot();
    if (!own || gpu < 0 || !bytes)
        return;
    ADD(own->pending[gpu], bytes);
    struct sums all = sum_slots(gpu);
    raise_window(gpu, &all);
    change_held(own, gpu, kind, bytes);
    ADD(own->pending[gpu], (uint64_t)-bytes);
}

void give_bytes(int gpu, enum kind kind, uint64_t bytes)
{
    struct usage_slot *own = own_slot();
    if (own && gpu >= 0 && bytes)
        change_held(own, gpu, kind, (uint64_t)-bytes);
}
