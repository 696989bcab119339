/* The limit of compute: a launch waits until the container's share of the GPU allows it.
 *
 * What is shared is time of the GPU, in nanoseconds, in one bucket for all processes of the container:
 *
 *   refill   elapsed time · share · scale, up to BURST_NS; so what was not used is lost, and an idle program may begin at once
 *   launch   pays what it costs at once, into debt without a bound, and then waits until as much was refilled as the bucket lacked
 *            before: so all processes and threads have their turns in the order in which they came, and for a long kernel, which
 *            cannot be stopped, the next launch waits
 *   cost     of the same function with the same blocks: measured by two events around one launch, and from time to time again
 *   scale    how many estimated nanoseconds one real one has, by what the agent sees in the driver. Launches overlap, and another
 *            container's kernels lie between two events: then costs are wrong, but all by the same factor.
 *
 * Counting blocks of threads instead, as other libraries do, needs a constant that no GPU has: a launch of one wave of long blocks
 * costs as much as one of a thousand short ones.
 */
#define _GNU_SOURCE
#include "library.h"

#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define SECOND_NS 1000000000u
#define BURST_NS 100000000
#define LONGEST_WAIT_NS 10000000u  /* a resize is noticed after it */
#define SHORTEST_WAIT_NS 50000u    /* what a sleep takes at least, about */
#define POLL_NS 200000u            /* events are asked this often at most: it costs a microsecond */
#define UNKNOWN_NS 20000u          /* of a first launch, until it is measured; then the difference is charged */
#define ELASTIC_NS SECOND_NS       /* for so long the others must have been idle, or not */
#define HOLD_NS (15 * (uint64_t)SECOND_NS) /* of launching without a sample: so long a scale that gives more is believed */
#define LEAST_BUSY_NS 30e6         /* observed, before a scale is made of it */
#define MEMORY_S 3.0               /* of the sums behind the scale: what lies so far back counts a third */
#define DELAY_S 0.6                /* by about so much utilisation is behind: half of what it is measured over, and its way */
enum { COSTS = 4096, PROBES = 16, FIRST_MEASURED = 3, MEASURE_EVERY = 256, OUTSTANDING = 16, KNOWN_RATES = 31 };
#define BUSY_OF_NOBODY 0.005 /* of the time */

#define LOAD(field) atomic_load_explicit((_Atomic __typeof__(field) *)&(field), memory_order_relaxed)
#define STORE(field, value) atomic_store_explicit((_Atomic __typeof__(field) *)&(field), value, memory_order_relaxed)
#define ADD(field, value) atomic_fetch_add_explicit((_Atomic __typeof__(field) *)&(field), value, memory_order_relaxed)
#define EXCHANGE_IF(field, old, new) atomic_compare_exchange_strong((_Atomic __typeof__(field) *)&(field), old, new)

/* ---- costs ---- */

struct cost {
    _Atomic uint64_t key; /* 0: free */
    _Atomic uint64_t ns;  /* 0: not known yet */
    _Atomic uint64_t launches, guessed, guessed_ns; /* launches that were charged a guess, and how much all of them */
    _Atomic unsigned measured;
    _Atomic bool is_outstanding;
};
static struct cost costs[COSTS], cost_of_the_rest;
static _Atomic bool has_costs;
static struct outstanding {
    struct cost *cost;
    CUevent before, after;
    uint64_t blocks;
    int gpu;
} outstanding[OUTSTANDING];
static unsigned outstanding_count;
static double rates[KNOWN_RATES]; /* nanoseconds a block, of what was measured last */
static unsigned rates_count;
static _Atomic uint64_t polled_at;
static _Atomic unsigned has_outstanding;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER; /* of what is above, but the costs */

static uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

static struct cost *cost_of(const struct launch *launch)
{
    atomic_store_explicit(&has_costs, true, memory_order_relaxed);
    uint64_t key = mix((uintptr_t)launch->what + mix(launch->blocks + mix(launch->threads))) | 1;
    for (unsigned i = 0; i < PROBES; i++) {
        struct cost *at = &costs[(key + i) % COSTS];
        uint64_t found = atomic_load_explicit(&at->key, memory_order_relaxed);
        if (found == key || (found == 0 && (atomic_compare_exchange_strong(&at->key, &found, key) || found == key)))
            return at;
    }
    return &cost_of_the_rest; /* a program that makes ever new ones: on average */
}

/* The median of nanoseconds a block of what is known: one kernel in a hundred that is another sort does not move it. */
static uint64_t guess(uint64_t blocks)
{
    double ordered[KNOWN_RATES];
    pthread_mutex_lock(&guard);
    unsigned count = rates_count < KNOWN_RATES ? rates_count : KNOWN_RATES;
    memcpy(ordered, rates, count * sizeof *rates);
    pthread_mutex_unlock(&guard);
    for (unsigned i = 1; i < count; i++)
        for (unsigned k = i; k > 0 && ordered[k] < ordered[k - 1]; k--) {
            double higher = ordered[k - 1];
            ordered[k - 1] = ordered[k];
            ordered[k] = higher;
        }
    double found = count ? ordered[count / 2] * (double)blocks : 0;
    return found > 1e9 ? SECOND_NS : found >= 1 ? (uint64_t)found : UNKNOWN_NS;
}

static void charge(int gpu, int64_t ns)
{
    struct usage_gpu *use = usage_of(gpu);
    ADD(use->tokens, -ns);
    ADD(use->launched, (uint64_t)ns);
}

/* The difference of a guess and what it was. One that was too high may be what launches wait for, by what was earned since they paid:
   so it is earned back. Who has waited for something else begins earlier then, and those behind it wait for that. */
static void settle(int gpu, int64_t difference)
{
    charge(gpu, difference);
    if (difference < 0)
        ADD(usage_of(gpu)->earned, (uint64_t)-difference);
}

static void note_measured(const struct outstanding *one, uint64_t ns)
{
    struct cost *cost = one->cost;
    uint64_t known = atomic_load(&cost->ns);
    unsigned measured = atomic_fetch_add(&cost->measured, 1);
    /* What lay between the events besides, a module's loading or another container's kernels, makes it longer, and nothing makes it
       shorter: so a shorter time is believed at once, a longer one by and by. */
    uint64_t settled = known == 0 || ns < known ? ns : measured < FIRST_MEASURED ? known : known + (ns - known) / 16;
    atomic_store(&cost->ns, settled ? settled : 1);
    if (one->blocks)
        rates[rates_count++ % KNOWN_RATES] = (double)ns / (double)one->blocks;
    uint64_t guessed = atomic_exchange(&cost->guessed, 0), guessed_ns = atomic_exchange(&cost->guessed_ns, 0);
    settle(one->gpu, (int64_t)(guessed * ns) - (int64_t)guessed_ns);
}

/* Asks the events of launches that were measured; waits for none. */
static void poll_outstanding(uint64_t now)
{
    if (!atomic_load_explicit(&has_outstanding, memory_order_relaxed) || now < atomic_load(&polled_at) + POLL_NS ||
        pthread_mutex_trylock(&guard) != 0)
        return;
    CUstreamCaptureMode mode = relax_capture();
    atomic_store(&polled_at, now);
    for (unsigned i = 0; i < outstanding_count;) {
        struct outstanding *one = &outstanding[i];
        float ms = 0;
        CUresult result = REAL(cuEventQuery)(one->after);
        if (result == CUDA_ERROR_NOT_READY) {
            i++;
            continue;
        }
        if (result == CUDA_SUCCESS && REAL(cuEventElapsedTime)(&ms, one->before, one->after) == CUDA_SUCCESS && ms >= 0) {
            note_measured(one, (uint64_t)((double)ms * 1e6));
            REAL(cuEventDestroy_v2)(one->before);
            REAL(cuEventDestroy_v2)(one->after);
        } /* else its context has ended, and the events with it */
        atomic_store(&one->cost->is_outstanding, false);
        *one = outstanding[--outstanding_count];
    }
    atomic_store(&has_outstanding, outstanding_count);
    restore_capture(mode);
    pthread_mutex_unlock(&guard);
}

/* ---- scale and share ---- */

/* exp(-x), without libm. */
static double fade(double x)
{
    double half = x > 0.5 ? fade(x / 2) : 0;
    return x > 0.5 ? half * half : 1 - x + x * x / 2 - x * x * x / 6;
}

/* What the costs of the last seconds are to what the driver saw, or 1 where they agree within what the driver can tell: its percents
   are whole, and are behind by DELAY_S or another time. The costs come from events, and are more exact, as long as nothing overlaps. */
static double ratio_of(const struct usage_gpu *use)
{
    double share = use->busy_sum / (MEMORY_S * 1e9), ratio = use->cost_sum / use->busy_sum;
    /* While a program begins, ends or changes, the same work is in one sum and not yet in the other. */
    double change = use->recent / DELAY_S - use->cost_sum / MEMORY_S;
    double doubt = 0.01 + 0.01 / (share > 0.01 ? share : 0.01) + DELAY_S * (change < 0 ? -change : change) / (use->cost_sum + 1);
    return ratio > 1 + doubt || ratio < 1 / (1 + doubt) ? ratio : 1;
}

static void add_sample(struct usage_gpu *use, double dt_s, double cost_ns, double busy_ns)
{
    double released = (use->delayed + cost_ns) * (1 - fade(dt_s / DELAY_S)), kept = fade(dt_s / MEMORY_S);
    use->delayed += cost_ns - released;
    use->recent = use->recent * fade(dt_s / DELAY_S) + cost_ns;
    use->cost_sum = use->cost_sum * kept + released;
    use->busy_sum = use->busy_sum * kept + busy_ns;
}

static void set_scale(struct usage_gpu *use, uint64_t until, double dt_s, double busy, double share, bool is_throttled)
{
    double old = use->scale > 0 ? use->scale : 1, step = 1 + 7 * dt_s; /* of each sample: 1.7 where there are ten a second */
    double wanted = use->busy_sum >= LEAST_BUSY_NS ? ratio_of(use) : old;
    /* A cost that is far too high keeps the program so idle that there is nothing to measure it by. */
    bool is_starved = is_throttled && busy < share / 2 && use->busy_sum < LEAST_BUSY_NS;
    use->starved_since = !is_starved ? 0 : use->starved_since ? use->starved_since : until;
    if (is_starved && until - use->starved_since >= SECOND_NS)
        wanted = old * 1.1;
    wanted = wanted > old * step ? old * step : wanted < old / step ? old / step : wanted;
    STORE(use->scale, wanted);
}

/* The ceiling is for who is alone on the GPU. */
static void set_elastic(struct usage_gpu *use, uint64_t until, bool is_alone)
{
    use->alone_since = !is_alone ? 0 : use->alone_since ? use->alone_since : until;
    use->accompanied_since = is_alone ? 0 : use->accompanied_since ? use->accompanied_since : until;
    if (is_alone && until - use->alone_since >= ELASTIC_NS)
        use->is_elastic = 1;
    else if (!is_alone && until - use->accompanied_since >= ELASTIC_NS)
        use->is_elastic = 0;
}

/* Each sample is taken by one process, whichever comes first. */
static void take_sample(struct usage_gpu *use, const struct limits *limits)
{
    const struct config_gpu *seen = &limits->seen;
    uint64_t before = LOAD(use->sampled_at), until = seen->busy_until, launched = LOAD(use->launched);
    uint64_t throttled = LOAD(use->throttled);
    if (until == 0 || until == before || !EXCHANGE_IF(use->sampled_at, &before, until))
        return;
    double dt_s = (double)(until - before) / 1e9, cost_ns = (double)(launched - use->launched_at_sample);
    double busy_ns = (double)(seen->busy_ns - use->busy_at_sample), others_ns = (double)(seen->others_ns - use->others_at_sample);
    /* Else the agent has counted from another beginning, or `usage` has been written by somebody else. */
    bool is_whole = before && until > before && seen->busy_since <= before && seen->busy_ns >= use->busy_at_sample &&
                    seen->others_ns >= use->others_at_sample;
    bool is_throttled = throttled != use->throttled_at_sample;
    use->busy_at_sample = seen->busy_ns;
    use->others_at_sample = seen->others_ns;
    use->launched_at_sample = launched;
    use->throttled_at_sample = throttled;
    STORE(use->unobserved, 0);
    if (!is_whole)
        return;
    set_elastic(use, until, others_ns < BUSY_OF_NOBODY * dt_s * 1e9);
    add_sample(use, dt_s, cost_ns, busy_ns);
    set_scale(use, until, dt_s, busy_ns / (dt_s * 1e9), limits->cores, is_throttled);
}

static double share_of(const struct usage_gpu *use, const struct limits *limits)
{
    /* Without the agent nobody says whether the others are idle, or that a scale which was right is no more. One that gives less stays:
       a limit must not be lost with the agent. */
    bool is_observed = LOAD(*(uint64_t *)(uintptr_t)&use->unobserved) < HOLD_NS;
    double share = limits->has_ceiling && use->is_elastic && is_observed ? limits->ceiling : limits->cores;
    double scale = LOAD(*(double *)(uintptr_t)&use->scale);
    if (scale > 1 && !is_observed)
        scale = 1;
    share = share < 0.001 ? 0.001 : share; /* nothing would be for ever */
    return share * (scale > 1e-4 && scale < 1e4 ? scale : 1); /* the program may have written there whatever it likes */
}

/* ---- the bucket ---- */

static void refill(struct usage_gpu *use, double share, uint64_t now)
{
    uint64_t since = LOAD(use->refilled_at);
    /* A time far ahead is of another clock, or written by the program: it must not stop the refill until it comes. */
    bool is_ahead = since > now && since - now > SECOND_NS;
    if ((now <= since && !is_ahead) || !EXCHANGE_IF(use->refilled_at, &since, now)) /* another one has just done it */
        return;
    uint64_t elapsed = since == 0 || is_ahead ? 0 : now - since > SECOND_NS ? SECOND_NS : now - since;
    uint64_t earned = (uint64_t)((double)elapsed * share);
    ADD(use->unobserved, elapsed);
    ADD(use->earned, earned);
    int64_t tokens = (int64_t)((uint64_t)ADD(use->tokens, (int64_t)earned) + earned);
    while (tokens > BURST_NS && !EXCHANGE_IF(use->tokens, &tokens, (int64_t)BURST_NS))
        ;
}

static double keep_up(int gpu, struct limits *limits, uint64_t now)
{
    struct usage_gpu *use = usage_of(gpu);
    poll_outstanding(now);
    take_sample(use, limits);
    double share = share_of(use, limits);
    refill(use, share, now);
    return share;
}

/* Pays, and waits for the turn that comes with it. The limits are read anew in each round. */
static void pay_and_wait(const struct launch *launch, struct measurement *measurement, struct limits *limits)
{
    int gpu = measurement->gpu;
    struct usage_gpu *use = usage_of(gpu);
    uint64_t now = now_ns();
    double share = keep_up(gpu, limits, now); /* by which the cost may just become known */
    uint64_t known = atomic_load(&measurement->cost->ns), earned = LOAD(use->earned);
    measurement->is_guessed = known == 0;
    measurement->paid = known ? known : guess(launch->blocks);
    int64_t had = ADD(use->tokens, -(int64_t)measurement->paid);
    ADD(use->launched, measurement->paid);
    while (limits->limits_cores && had < 0) {
        uint64_t debt = -(uint64_t)had,
                 paid = LOAD(use->earned) - earned; /* unsigned: the program may have written anything there */
        if (paid >= debt)
            break;
        double wait = (double)(debt - paid) / share;
        uint64_t ns = wait > LONGEST_WAIT_NS ? LONGEST_WAIT_NS : wait < SHORTEST_WAIT_NS ? SHORTEST_WAIT_NS : (uint64_t)wait;
        /* A signal's handler may leave the sleep by longjmp: the thread must not count as within a hook for ever. */
        leave_hook();
        clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_nsec = (long)ns}, NULL);
        enter_hook();
        read_limits(gpu, limits);
        uint64_t before = now;
        now = now_ns();
        ADD(use->throttled, now - before); /* not at the end alone: a wait may be longer than what samples are apart */
        share = keep_up(gpu, limits, now);
    }
    if (measurement->is_guessed && (known = atomic_load(&measurement->cost->ns)) != 0) { /* it became known while this one waited */
        settle(gpu, (int64_t)(known - measurement->paid));
        measurement->paid = known;
        measurement->is_guessed = false;
    }
}

/* ---- a launch ---- */

static bool is_to_be_measured(struct cost *cost)
{
    uint64_t launches = atomic_fetch_add_explicit(&cost->launches, 1, memory_order_relaxed);
    bool is_due = atomic_load(&cost->measured) < FIRST_MEASURED || launches % MEASURE_EVERY == 0;
    return is_due && cost != &cost_of_the_rest && atomic_load(&has_outstanding) < OUTSTANDING &&
           has_real(SLOT_cuEventElapsedTime) && !atomic_exchange(&cost->is_outstanding, true);
}

static CUresult record(CUevent event, const struct launch *launch)
{
    return launch->is_per_thread && has_real(SLOT_cuEventRecord_ptsz) ? REAL(cuEventRecord_ptsz)(event, launch->stream)
                                                                      : REAL(cuEventRecord)(event, launch->stream);
}

static CUevent make_event(void)
{
    CUevent event = NULL;
    CUstreamCaptureMode mode = relax_capture(); /* another thread may capture: creating an event would then be an error there */
    if (REAL(cuEventCreate)(&event, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        event = NULL;
    restore_capture(mode);
    return event;
}

static void drop_measurement(const struct measurement *measurement, CUevent after)
{
    if (measurement->before)
        REAL(cuEventDestroy_v2)(measurement->before);
    if (after)
        REAL(cuEventDestroy_v2)(after);
    atomic_store(&measurement->cost->is_outstanding, false);
}

void begin_launch(const struct launch *launch, struct measurement *measurement)
{
    struct limits limits;
    *measurement = (struct measurement){.gpu = gpu_of_device(current_device())};
    if (measurement->gpu < 0)
        return;
    (void)own_slot(); /* so the agent sees the process; one that finds no free slot computes within the share all the same */
    read_limits(measurement->gpu, &limits);
    if (!limits.limits_cores || is_capturing(launch->stream, launch->is_per_thread)) /* captured, it is paid for by its graph */
        return;
    measurement->cost = cost_of(launch);
    pay_and_wait(launch, measurement, &limits);
    if (!is_to_be_measured(measurement->cost))
        return;
    measurement->before = make_event();
    if (!measurement->before || record(measurement->before, launch) != CUDA_SUCCESS) {
        drop_measurement(measurement, NULL);
        measurement->before = NULL;
    }
}

static void end_measurement(const struct launch *launch, const struct measurement *measurement)
{
    CUevent after = make_event();
    bool is_kept = after && record(after, launch) == CUDA_SUCCESS;
    pthread_mutex_lock(&guard);
    is_kept = is_kept && outstanding_count < OUTSTANDING;
    if (is_kept)
        outstanding[outstanding_count++] = (struct outstanding){.cost = measurement->cost,
                                                                .before = measurement->before,
                                                                .after = after,
                                                                .blocks = launch->blocks,
                                                                .gpu = measurement->gpu};
    atomic_store(&has_outstanding, outstanding_count);
    pthread_mutex_unlock(&guard);
    if (!is_kept)
        drop_measurement(measurement, after);
}

void end_launch(const struct launch *launch, const struct measurement *measurement, bool is_launched)
{
    struct cost *cost = measurement->cost;
    if (!cost)
        return;
    if (!is_launched) {
        charge(measurement->gpu, -(int64_t)measurement->paid); /* the driver refused it: nothing ran */
        if (measurement->before)
            drop_measurement(measurement, NULL);
        return;
    }
    if (measurement->is_guessed) {
        atomic_fetch_add(&cost->guessed_ns, measurement->paid);
        atomic_fetch_add(&cost->guessed, 1);
    }
    ADD(usage_of(measurement->gpu)->launches, 1);
    if (measurement->before)
        end_measurement(launch, measurement);
}

#define LAUNCH(function, all_blocks, all_threads, on_stream, per_thread, call)                                             \
    struct launch launch = {                                                                                               \
        .what = function, .blocks = all_blocks, .threads = all_threads, .stream = on_stream, .is_per_thread = per_thread}; \
    struct measurement measurement;                                                                                        \
    begin_launch(&launch, &measurement);                                                                                   \
    CUresult result = call;                                                                                                \
    end_launch(&launch, &measurement, result == CUDA_SUCCESS);                                                             \
    return result

static uint64_t product(unsigned x, unsigned y, unsigned z) { return (uint64_t)x * y * z; }

#define KERNEL_PARAMETERS                                                                                                \
    CUfunction function, unsigned int x, unsigned int y, unsigned int z, unsigned int u, unsigned int v, unsigned int w, \
        unsigned int shared, CUstream stream, void **parameters

HOOK(cuLaunchKernel, (KERNEL_PARAMETERS, void **extra), (function, x, y, z, u, v, w, shared, stream, parameters, extra))
{
    LAUNCH(function, product(x, y, z), product(u, v, w), stream, false,
           real(function, x, y, z, u, v, w, shared, stream, parameters, extra));
}
HOOK(cuLaunchKernel_ptsz, (KERNEL_PARAMETERS, void **extra), (function, x, y, z, u, v, w, shared, stream, parameters, extra))
{
    LAUNCH(function, product(x, y, z), product(u, v, w), stream, true,
           real(function, x, y, z, u, v, w, shared, stream, parameters, extra));
}
HOOK(cuLaunchCooperativeKernel, (KERNEL_PARAMETERS), (function, x, y, z, u, v, w, shared, stream, parameters))
{
    LAUNCH(function, product(x, y, z), product(u, v, w), stream, false,
           real(function, x, y, z, u, v, w, shared, stream, parameters));
}
HOOK(cuLaunchCooperativeKernel_ptsz, (KERNEL_PARAMETERS), (function, x, y, z, u, v, w, shared, stream, parameters))
{
    LAUNCH(function, product(x, y, z), product(u, v, w), stream, true,
           real(function, x, y, z, u, v, w, shared, stream, parameters));
}

static uint64_t blocks_of(const CUlaunchConfig *how) { return product(how->gridDimX, how->gridDimY, how->gridDimZ); }
static uint64_t threads_of(const CUlaunchConfig *how) { return product(how->blockDimX, how->blockDimY, how->blockDimZ); }

HOOK(cuLaunchKernelEx, (const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra),
     (how, function, parameters, extra))
{
    if (!how)
        return real(how, function, parameters, extra);
    LAUNCH(function, blocks_of(how), threads_of(how), how->hStream, false, real(how, function, parameters, extra));
}
HOOK(cuLaunchKernelEx_ptsz, (const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra),
     (how, function, parameters, extra))
{
    if (!how)
        return real(how, function, parameters, extra);
    LAUNCH(function, blocks_of(how), threads_of(how), how->hStream, true, real(how, function, parameters, extra));
}

/* On several GPUs at once: each pays for its own, on the first one's account where that is the current one. */
HOOK(cuLaunchCooperativeKernelMultiDevice, (CUDA_LAUNCH_PARAMS *all, unsigned int count, unsigned int flags), (all, count, flags))
{
    if (!all || !count)
        return real(all, count, flags);
    LAUNCH(all->function, product(all->gridDimX, all->gridDimY, all->gridDimZ),
           product(all->blockDimX, all->blockDimY, all->blockDimZ), all->hStream, false, real(all, count, flags));
}

/* Of CUDA 3: the block's size was set before. */
HOOK(cuLaunch, (CUfunction function), (function)) { LAUNCH(function, 1, 0, NULL, false, real(function)); }
HOOK(cuLaunchGrid, (CUfunction function, int width, int height), (function, width, height))
{ LAUNCH(function, product((unsigned)width, (unsigned)height, 1), 0, NULL, false, real(function, width, height)); }
HOOK(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream), (function, width, height, stream))
{ LAUNCH(function, product((unsigned)width, (unsigned)height, 1), 0, stream, false, real(function, width, height, stream)); }

void forget_launches(void)
{
    guard = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    if (atomic_exchange(&has_costs, false)) { /* a function of the child may have the address of another one of the parent */
        memset(costs, 0, sizeof costs);
        memset(&cost_of_the_rest, 0, sizeof cost_of_the_rest);
    }
    outstanding_count = rates_count = 0;
    atomic_store(&has_outstanding, 0);
}
