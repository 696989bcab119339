/* The limit of compute: a launch waits until the container's share of the GPU allows it.
 *
 * What is shared is time of the GPU, in nanoseconds, in one bucket for all processes of the container:
 *
 *   refill   elapsed time · share, up to BURST_NS; so what was not used is lost, and an idle program may begin at once
 *   launch   pays what it costs at once, into debt without a bound, and then waits until as much was refilled as the bucket lacked
 *            before: so all processes and threads have their turns in the order in which they came, and for a long kernel, which
 *            cannot be stopped, the next launch waits
 *   cost     of the same function with the same blocks: what two events around one say, on average. Long ones are all measured, of
 *            short ones some, and those that were measured pay what they took. Of what lies between two events two things are no
 *            time of the kernel: what the host and the events themselves take, which is measured too; and other containers' kernels
 *
 * What the driver says of the GPU as a whole corrects two things, slowly and within bounds (share_of):
 *
 *   scale    while the container is alone on the GPU: how many paid nanoseconds a busy one has, for copies, kernels that overlap
 *   price    while the GPU is full: what contexts lose to each other by taking turns is paid by all of them alike
 *
 * Which container a driver's sample belongs to is not used: an H200's driver names one process in each sample, with the whole GPU's
 * percents.
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
#define BURST_NS 50000000
#define LONGEST_WAIT_NS 10000000u  /* a resize is noticed after it */
#define SHORTEST_WAIT_NS 50000u    /* what a sleep takes at least, about */
#define POLL_NS 200000u            /* events are asked this often at most: it costs a microsecond */
#define UNKNOWN_NS 20000u          /* of a launch before anything was measured; then the difference is charged */
#define LONGEST_UNKNOWN_NS 100000000u /* a launch of which nothing is known waits for the measured one before it, but not for ever */
#define MEASURE_NS 2000000u        /* of launches of a kind, one is measured */
#define SELDOM_NS 50000000u        /* or one after so long, if none was; of all kinds one in SELDOM_APART_NS */
#define SELDOM_APART_NS 1000000u
#define MOST_OVERHEAD_NS 4000u     /* that is believed of an event */
#define MOST_HOST_NS 20000u        /* and of the host between an event and the kernel: else it was not the driver that took it */
#define SHORT_NS 200000u           /* of longer ones that does not matter */
#define TURN_NS 2300000.0          /* how long another context has the GPU before the first one's turn, with the change to it */
#define SETTLED_NS 1500000000u      /* then the means of the last second are of what is now */
#define TURN_LOSS 1.05             /* what a turn takes, with what is lost at its beginning, to what is computed */
#define LOSS 0.06                  /* what is lost for each container but one */
#define TOLD_MS 3000u              /* so long what the agent says of the others is believed */
#define ALONE_NS SECOND_NS /* for so long nobody else has computed, before the container is alone */
#define LEAST_BUSY_NS 30e6         /* observed, before a scale is made of it */
#define MEMORY_S 3.0               /* of the sums behind the scale: what lies so far back counts a third */
#define LATEST_S 1.2               /* utilisation is behind by less: half of what it is measured over, and its way */
#define IDLE_NS (2 * (uint64_t)SECOND_NS)  /* then another program may begin: the scale is forgotten */
#define HOLD_NS (15 * (uint64_t)SECOND_NS) /* without a sample: so long a scale is believed */
#define MOST_SCALE 5.0
#define MOST_OVERLAP 16.0
#define NOT_FULL 0.95              /* of the time busy: below it the GPU has some left; */
#define FULL 0.98                  /* from here on it has none */
#define MOST_PRICE 1.15
#define OVERLAPS_APART_NS 250000000u
enum { OVERLAP_OF = 16 }; /* launches that follow each other: how far they overlap is measured of all of these */
enum { COSTS = 4096, PROBES = 16, MEASURE_EVERY = 256, OUTSTANDING = 64, UNKNOWN_AT_ONCE = 16, MOST_ASKED = 8, WEIGHT = 8 };

#define LOAD(field) atomic_load_explicit((_Atomic __typeof__(field) *)&(field), memory_order_relaxed)
#define STORE(field, value) atomic_store_explicit((_Atomic __typeof__(field) *)&(field), value, memory_order_relaxed)
#define ADD(field, value) atomic_fetch_add_explicit((_Atomic __typeof__(field) *)&(field), value, memory_order_relaxed)
#define EXCHANGE_IF(field, old, new) atomic_compare_exchange_strong((_Atomic __typeof__(field) *)&(field), old, new)

/* ---- costs ---- */

struct cost {
    _Atomic uint64_t key;   /* 0: free */
    _Atomic uint64_t ns;    /* 0: not known yet */
    _Atomic int32_t unmeasured; /* so many more, before one is measured */
    _Atomic bool is_outstanding;
    _Atomic uint64_t measured_at;
    _Atomic unsigned measured;
    /* Under guard: beside others, what most of them take, and what all take at least, on average. */
    double usual, least;
};
static struct cost costs[COSTS], cost_of_the_rest;
static _Atomic bool has_costs;
static struct outstanding {
    struct cost *cost;
    CUevent before, after, behind;
    uint64_t paid, host_ns;
    int gpu;
    bool was_idle; /* the GPU, when the host gave it the kernel: it waited for the host between the events */
    bool is_of_overlap;
} outstanding[OUTSTANDING];
/* Kernels of several streams compute at once, and each takes longer by the others: all of some launches are measured, to see for how
   long any of them was there. */
static struct {
    CUevent first; /* of which the others' times are told; NULL: nothing is being measured */
    unsigned begun, ended;
    double from[OVERLAP_OF], until[OVERLAP_OF];
} overlapping;
static double overlap = 1; /* the sum of what launches take, to the time in which any of them was there */
static _Atomic int32_t overlap_left;
static _Atomic uint64_t overlap_at;
static _Atomic unsigned stream_changes;
static _Atomic(CUstream) last_stream;
static unsigned outstanding_count;
static double overhead_ns = MOST_OVERHEAD_NS; /* between two events with nothing between them, the least */
static bool has_overhead;
static _Atomic uint64_t ordinary_ns;          /* what a launch takes, of all kinds */
static _Atomic uint64_t polled_at, seldom_at;
static _Atomic unsigned has_outstanding;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER; /* of what is above, but the costs' atomics */

static double within(double value, double least, double most) { return value < least ? least : value > most ? most : value; }

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

/* `is_long`: it takes several turns, where others compute. */
static void note_paid(struct usage_gpu *use, int64_t ns, bool is_long)
{
    ADD(use->launched, (uint64_t)ns);
    if (is_long)
        ADD(use->launched_long, (uint64_t)ns);
}

static void charge(int gpu, int64_t ns, bool is_long)
{
    struct usage_gpu *use = usage_of(gpu);
    ADD(use->tokens, -ns);
    note_paid(use, ns, is_long);
}

/* The difference of what was paid and what it was. What was too much may be what launches wait for, by what was earned since they paid:
   so it is earned back. Who has waited for something else begins earlier then, and those behind it wait for that. */
static void settle(int gpu, int64_t difference, bool is_long)
{
    charge(gpu, difference, is_long);
    if (difference < 0)
        ADD(usage_of(gpu)->earned, (uint64_t)-difference);
}

/* How many other containers may have had the GPU between two events, by the agent: without one it is taken for none, so what they
   did is paid for. */
static bool is_told(const struct config_gpu *seen, uint64_t now)
{
    return seen->told_at && (uint32_t)(now / 1000000) - seen->told_at < TOLD_MS;
}

/* How many times as long a kernel takes, that needs several turns, because of the others'. Others of several turns have the GPU as long
   as it has, while they are there; short ones as long as they have paid for, and for a turn at most. */
static double expected_stretch(const struct usage_gpu *use, const struct limits *limits)
{
    double others = limits->seen.companions, claimed = limits->seen.claimed / 10000.0 + 1e-6, of_long = limits->claimed_long;
    of_long = of_long < claimed ? of_long : claimed;
    double of_short = claimed - of_long, own = within(LOAD(*(double *)(uintptr_t)&use->paid_long), 0, 1), stretch = 1;
    double most = TURN_LOSS * (1 + others * (of_long + 0.75 * of_short) / claimed); /* who waits for each launch has no whole turn */
    for (int i = 0; i < 4; i++) {
        double there = own * stretch < 1 ? own * stretch : 1, others_there = of_long / (1 - there / (others + 1));
        double left = 1 - (others_there < others ? others_there : others) / (others + 1) - of_short;
        stretch = TURN_LOSS / (left > 0.1 ? left : 0.1);
        stretch = stretch < most ? stretch : most;
    }
    return stretch;
}

static double stretch_of(const struct usage_gpu *use, const struct limits *limits)
{
    double found = LOAD(*(double *)(uintptr_t)&use->stretch);
    return within(expected_stretch(use, limits) * (found > 0 ? within(found, 0.5, 2) : 1), 1, TURN_LOSS * (limits->seen.companions + 1));
}

/* Enters what a launch took by two events, and answers what is to be paid for it. */
static uint64_t note_cost(struct cost *cost, const struct usage_gpu *use, const struct limits *limits, bool has_others, double between)
{
    unsigned measured = atomic_fetch_add(&cost->measured, 1);
    double known = (double)atomic_load(&cost->ns), weight = measured < WEIGHT ? measured + 1.0 : WEIGHT;
    double others = has_others ? limits->seen.companions : 0, took = between, least = between;
    bool is_long = between > TURN_NS && (known > TURN_NS || (known == 0 && between > 2 * TURN_NS));
    if (has_others && is_long)
        took = least = between / stretch_of(use, limits);
    else if (has_others)
        least = between / (1 + TURN_NS / 2e6 * others); /* where each turn of the kernels' is followed by one of every other */
    if (known == 0)
        cost->usual = took, cost->least = least;
    cost->least += (least - cost->least) / weight;
    if (!has_others) {
        cost->usual = cost->least = known + (took - known) / weight;
    } else {
        /* One in which a turn has ended is longer by the others' turns. Such are few, so they hardly move what is usual. */
        double more = took - cost->usual;
        cost->usual += more < 0 ? more / 2 : (more < cost->usual ? more : cost->usual) / 16;
    }
    double now = cost->usual > cost->least ? cost->usual : cost->least;
    atomic_store(&cost->ns, now >= 1 ? (uint64_t)now : 1);
    return (uint64_t)(!has_others || known > TURN_NS ? took : now); /* a short one that was much longer was probably not alone */
}

static uint64_t overlapped(uint64_t ns)
{
    ns = (uint64_t)((double)ns / overlap); /* another thread may write it: it is read whole */
    return ns ? ns : 1;
}

static double elapsed_ns(CUevent from, CUevent until)
{
    float ms = -1;
    return REAL(cuEventElapsedTime)(&ms, from, until) == CUDA_SUCCESS ? (double)ms * 1e6 : -1;
}

static void end_overlap(void)
{
    double sum = 0, any = 0, covered = -1e18;
    for (unsigned done = 0; done < overlapping.ended; done++) { /* the earliest first */
        unsigned next = done;
        for (unsigned i = done + 1; i < overlapping.ended; i++)
            next = overlapping.from[i] < overlapping.from[next] ? i : next;
        double from = overlapping.from[next], until = overlapping.until[next];
        overlapping.from[next] = overlapping.from[done], overlapping.until[next] = overlapping.until[done];
        sum += until - from;
        any += until > covered ? until - (from > covered ? from : covered) : 0;
        covered = until > covered ? until : covered;
    }
    if (overlapping.ended > OVERLAP_OF / 2 && any > 0)
        overlap += (within(sum / any, 1, MOST_OVERLAP) - overlap) / 2;
    REAL(cuEventDestroy_v2)(overlapping.first);
    overlapping.first = NULL;
}

static void note_overlap(const struct outstanding *one)
{
    double from = elapsed_ns(overlapping.first, one->before), until = elapsed_ns(overlapping.first, one->after);
    bool is_first = one->before == overlapping.first;
    if (is_first || from != -1) {
        overlapping.from[overlapping.ended] = is_first ? 0 : from;
        overlapping.until[overlapping.ended++] = until;
    }
    if (overlapping.ended >= overlapping.begun && atomic_load(&overlap_left) <= 0)
        end_overlap();
}

static void note_measured(const struct outstanding *one, const struct limits *limits, uint64_t now)
{
    struct cost *cost = one->cost;
    double between = elapsed_ns(one->before, one->after), nothing = elapsed_ns(one->after, one->behind);
    if (one->is_of_overlap && overlapping.first)
        note_overlap(one);
    if (between < 0)
        return;
    if (nothing >= 0 && (!has_overhead || nothing < overhead_ns))
        overhead_ns = nothing < MOST_OVERHEAD_NS ? nothing : MOST_OVERHEAD_NS, has_overhead = true;
    double host = one->was_idle ? (double)one->host_ns : 0;
    if (host > MOST_HOST_NS && between < 100 * host && atomic_load(&cost->ns))
        return;
    double took = between - overhead_ns - (host < MOST_HOST_NS ? host : MOST_HOST_NS);
    took = took > between / 8 ? took : between / 8;
    uint64_t ns = note_cost(cost, usage_of(one->gpu), limits, is_told(&limits->seen, now) && limits->seen.companions, took), ordinary = atomic_load(&ordinary_ns);
    atomic_store(&ordinary_ns, ordinary ? ordinary - ordinary / 16 + ns / 16 : ns);
    settle(one->gpu, (int64_t)overlapped(ns) - (int64_t)one->paid, one->paid > TURN_NS);
}

static void destroy_events(const struct outstanding *one)
{
    const CUevent events[] = {one->before, one->after, one->behind};
    for (int i = 0; i < 3; i++)
        if (events[i] && events[i] != overlapping.first)
            REAL(cuEventDestroy_v2)(events[i]);
}

/* Asks the events of launches that were measured, the oldest first; waits for none. */
static void poll_outstanding(const struct limits *limits, uint64_t now)
{
    if (!atomic_load_explicit(&has_outstanding, memory_order_relaxed) || now < atomic_load(&polled_at) + POLL_NS ||
        pthread_mutex_trylock(&guard) != 0)
        return;
    CUstreamCaptureMode mode = relax_capture();
    unsigned kept = 0, not_ready = 0;
    atomic_store(&polled_at, now);
    for (unsigned i = 0; i < outstanding_count; i++) {
        struct outstanding *one = &outstanding[i];
        CUresult result = not_ready < MOST_ASKED ? REAL(cuEventQuery)(one->behind) : CUDA_ERROR_NOT_READY;
        if (result == CUDA_ERROR_NOT_READY) {
            not_ready++;
            outstanding[kept++] = *one;
            continue;
        }
        if (result == CUDA_SUCCESS) {
            note_measured(one, limits, now);
            destroy_events(one);
        } /* else its context has ended, and the events with it */
        atomic_store(&one->cost->is_outstanding, false);
    }
    outstanding_count = kept;
    atomic_store(&has_outstanding, outstanding_count);
    restore_capture(mode);
    pthread_mutex_unlock(&guard);
}

/* ---- what the driver and the agent say ---- */

/* exp(-x), without libm. */
static double fade(double x)
{
    double half = x > 0.5 ? fade(x / 2) : 0;
    return x > 0.5 ? half * half : 1 - x + x * x / 2 - x * x * x / 6;
}

/* What was paid while the container was alone is to what the GPU was busy. Utilisation is behind, by as much as LATEST_S or by nothing:
   while a program begins, ends or changes, the two sums say different things, and what both of them say is believed. */
static double ratio_of(const struct usage_gpu *use)
{
    double early = use->cost_sum / use->busy_sum, late = use->late_sum / use->busy_sum;
    double low = early < late ? early : late, high = early < late ? late : early;
    double share = use->busy_sum / (MEMORY_S * 1e9), doubt = 1.02 + 0.01 / (share > 0.01 ? share : 0.01); /* percents are whole */
    return low > doubt ? within(1 + 2 * (low - doubt), 1, low) : high < 1 / doubt ? 1 / within(1 + 2 * (1 / high - doubt), 1, 1 / high) : 1;
}

static void forget_scale(struct usage_gpu *use)
{
    use->cost_sum = use->late_sum = use->delayed = use->busy_sum = 0;
    STORE(use->scale, 0.0);
}

static void set_scale(struct usage_gpu *use, bool is_alone, double dt_s, double paid_ns, double busy_ns)
{
    double old = use->scale > 0 ? use->scale : 1, kept = fade(dt_s / MEMORY_S), step = 1 + 2 * dt_s;
    if (!is_alone) { /* nothing is learned; what was, is forgotten in half a minute */
        use->cost_sum = use->late_sum = use->delayed = use->busy_sum = 0;
        STORE(use->scale, 1 + (old - 1) * fade(dt_s / 30));
        return;
    }
    double released = (use->delayed + paid_ns) * (1 - fade(dt_s / LATEST_S));
    use->delayed += paid_ns - released;
    use->cost_sum = use->cost_sum * kept + paid_ns;
    use->late_sum = use->late_sum * kept + released;
    use->busy_sum = use->busy_sum * kept + busy_ns;
    double wanted = use->busy_sum >= LEAST_BUSY_NS ? ratio_of(use) : old;
    STORE(use->scale, within(within(wanted, old / step, old * step), 1 / MOST_SCALE, MOST_SCALE));
}

/* Whether launches of several turns, of all containers, have paid for what the GPU was busy beyond all others. Who of them has paid too
   much nobody can say, so all learn the same of it. */
static void set_stretch(struct usage_gpu *use, const struct limits *limits, uint64_t until, double dt_s)
{
    double claimed = limits->seen.claimed / 10000.0, others = limits->seen.companions, of_long = use->paid_long + limits->claimed_long;
    if (!others || use->paid_long < use->paid / 4) {
        STORE(use->stretch, 0.0);
        use->long_since = 0;
        return;
    }
    use->long_since = use->long_since ? use->long_since : until;
    if (until - use->long_since < SETTLED_NS)
        return;
    double busy = use->busy / (1 + LOSS * others) - (use->paid + claimed - of_long), old = use->stretch > 0 ? use->stretch : 1;
    double ratio = within(of_long / (busy > 1e-3 ? busy : 1e-3), 0.7, 1.4);
    old += (1 - old) * (1 - fade(dt_s / 20)); /* what each has learned before it was like the others is forgotten */
    STORE(use->stretch, within(old * (1 + (ratio - 1) * (dt_s < 1 ? dt_s / 2 : 0.5)), 0.5, 2));
}

/* Each sample is taken by one process, whichever comes first. */
static void take_sample(struct usage_gpu *use, const struct limits *limits, uint64_t now)
{
    const struct config_gpu *seen = &limits->seen;
    uint64_t before = LOAD(use->sampled_at), until = seen->busy_until, launched = LOAD(use->launched);
    if (until == 0 || until == before || !EXCHANGE_IF(use->sampled_at, &before, until))
        return;
    double dt_s = (double)(until - before) / 1e9;
    int64_t paid = (int64_t)(launched - use->launched_at_sample); /* may be less than nothing: what was paid too much is given back */
    int64_t paid_long = (int64_t)(LOAD(use->launched_long) - use->long_at_sample);
    double paid_ns = paid > 0 ? (double)paid : 0, long_ns = paid_long > 0 ? (double)paid_long : 0, others_ns = (double)(seen->others_ns - use->others_at_sample);
    double busy_ns = (double)(seen->busy_ns - use->busy_at_sample) + others_ns;
    /* Else the agent has counted from another beginning, or `usage` has been written by somebody else. */
    bool is_whole = before && until > before && dt_s < 5 && seen->busy_since <= before && seen->busy_ns >= use->busy_at_sample &&
                    seen->others_ns >= use->others_at_sample;
    use->busy_at_sample = seen->busy_ns;
    use->others_at_sample = seen->others_ns;
    use->launched_at_sample = launched;
    use->long_at_sample = LOAD(use->launched_long);
    if (!is_whole || !is_told(seen, now)) {
        use->alone_since = 0;
        return;
    }
    bool has_others = seen->companions > 0 || others_ns > 0;
    use->alone_since = has_others ? 0 : use->alone_since ? use->alone_since : until;
    set_scale(use, use->alone_since && until - use->alone_since >= ALONE_NS, dt_s, paid_ns, busy_ns);
    double kept = use->busy > 0 ? fade(2 * dt_s) : 0;
    use->busy = use->busy * kept + busy_ns / (dt_s * 1e9) * (1 - kept);
    use->paid = use->paid * kept + paid_ns / (dt_s * 1e9) * (1 - kept);
    use->paid_long = use->paid_long * kept + long_ns / (dt_s * 1e9) * (1 - kept);
    use->claimed = seen->claimed / 10000.0;
    set_stretch(use, limits, until, dt_s);
}

/* Nanoseconds of payment that the container has for each one that passes. */
static double share_of(const struct usage_gpu *use, const struct limits *limits, uint64_t now)
{
    const struct config_gpu *seen = &limits->seen;
    uint64_t alone_since = LOAD(*(uint64_t *)(uintptr_t)&use->alone_since), sampled_at = LOAD(*(uint64_t *)(uintptr_t)&use->sampled_at);
    double scale = LOAD(*(double *)(uintptr_t)&use->scale), busy = LOAD(*(double *)(uintptr_t)&use->busy), price = 1;
    /* Without the agent nobody says whether the others are idle, or that a scale which was right is no more. One that gives less stays:
       a limit must not be lost with the agent. */
    bool is_observed = sampled_at && now - sampled_at < HOLD_NS;
    bool is_elastic = limits->has_ceiling && is_observed && alone_since && sampled_at - alone_since >= SECOND_NS;
    double share = is_elastic ? limits->ceiling : limits->cores;
    share = share < 0.001 ? 0.001 : share; /* nothing would be for ever */
    scale = scale > 0 ? within(scale, 1 / MOST_SCALE, MOST_SCALE) : 1; /* the program may have written there whatever it likes */
    if (scale > 1 && !is_observed)
        scale = 1;
    if (is_told(seen, now) && seen->companions && busy > NOT_FULL)
        price = 1 + within((busy - NOT_FULL) / (FULL - NOT_FULL), 0, 1) * (within(busy / (LOAD(*(double *)(uintptr_t)&use->paid) + LOAD(*(double *)(uintptr_t)&use->claimed) + 1e-3), 1, MOST_PRICE) - 1);
    return share * scale / price;
}

/* ---- the bucket ---- */

static void refill(struct usage_gpu *use, double share, uint64_t now)
{
    uint64_t since = LOAD(use->refilled_at);
    /* A time far ahead is of another clock, or written by the program: it must not stop the refill until it comes. */
    bool is_ahead = since > now && since - now > SECOND_NS;
    if ((now <= since && !is_ahead) || !EXCHANGE_IF(use->refilled_at, &since, now)) /* another one has just done it */
        return;
    if (since == 0 || is_ahead || now - since > IDLE_NS)
        forget_scale(use);
    uint64_t elapsed = since == 0 || is_ahead ? 0 : now - since > SECOND_NS ? SECOND_NS : now - since;
    uint64_t earned = (uint64_t)((double)elapsed * share);
    ADD(use->earned, earned);
    int64_t tokens = (int64_t)((uint64_t)ADD(use->tokens, (int64_t)earned) + earned);
    while (tokens > BURST_NS && !EXCHANGE_IF(use->tokens, &tokens, (int64_t)BURST_NS))
        ;
}

static double keep_up(int gpu, struct limits *limits, uint64_t now)
{
    struct usage_gpu *use = usage_of(gpu);
    poll_outstanding(limits, now);
    take_sample(use, limits, now);
    double share = share_of(use, limits, now);
    refill(use, share, now);
    return share;
}

/* A signal's handler may leave the sleep by longjmp: the thread must not count as within a hook for ever. */
static void sleep_outside(uint64_t ns)
{
    leave_hook();
    clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_nsec = (long)ns}, NULL);
    enter_hook();
}

/* Of what is launched for the first time one is measured before there are more, and not many such at once: else a queue of long kernels
   would be there before anybody knows that they are long. The time is bounded: it may be a kernel that waits for the host. */
static uint64_t await_known(const struct cost *cost, int gpu, struct limits *limits, uint64_t now)
{
    for (uint64_t until = now + LONGEST_UNKNOWN_NS, ns = SHORTEST_WAIT_NS; now < until; ns = ns < 1000000 ? 2 * ns : ns) {
        if (atomic_load(&cost->ns) || !(atomic_load(&cost->is_outstanding) || atomic_load(&has_outstanding) >= UNKNOWN_AT_ONCE))
            break;
        sleep_outside(ns);
        read_limits(gpu, limits);
        now = now_ns();
        keep_up(gpu, limits, now);
    }
    return now;
}

/* Pays, and waits for the turn that comes with it. The limits are read anew in each round. */
static void pay_and_wait(struct measurement *measurement, struct limits *limits)
{
    int gpu = measurement->gpu;
    struct usage_gpu *use = usage_of(gpu);
    uint64_t now = now_ns();
    double share = keep_up(gpu, limits, now); /* by which the cost may just become known */
    if (!atomic_load(&measurement->cost->ns) && has_real(SLOT_cuEventElapsedTime))
        now = await_known(measurement->cost, gpu, limits, now);
    uint64_t known = atomic_load(&measurement->cost->ns), ordinary = atomic_load(&ordinary_ns), earned = LOAD(use->earned);
    measurement->paid = overlapped(known ? known : ordinary ? ordinary : UNKNOWN_NS);
    int64_t had = ADD(use->tokens, -(int64_t)measurement->paid);
    note_paid(use, (int64_t)measurement->paid, measurement->paid > TURN_NS);
    while (limits->limits_cores && had < 0) {
        uint64_t debt = -(uint64_t)had,
                 paid = LOAD(use->earned) - earned; /* unsigned: the program may have written anything there */
        if (paid >= debt)
            break;
        double wait = (double)(debt - paid) / share;
        sleep_outside(wait > LONGEST_WAIT_NS ? LONGEST_WAIT_NS : wait < SHORTEST_WAIT_NS ? SHORTEST_WAIT_NS : (uint64_t)wait);
        read_limits(gpu, limits);
        uint64_t before = now;
        now = now_ns();
        ADD(use->throttled, now - before);
        share = keep_up(gpu, limits, now);
    }
    measurement->recorded_at = now;
}

/* ---- a launch ---- */

/* Of the launches that follow, if the program uses several streams. */
static void begin_overlap(uint64_t now)
{
    uint64_t last = atomic_load(&overlap_at);
    if (now - last < OVERLAPS_APART_NS || !atomic_compare_exchange_strong(&overlap_at, &last, now))
        return;
    pthread_mutex_lock(&guard);
    if (overlapping.first) /* some of those before have not ended, or their context has */
        overlapping.first = NULL;
    bool is_of_several = atomic_exchange(&stream_changes, 0) > 1;
    if (!is_of_several)
        overlap = 1;
    overlapping.begun = overlapping.ended = 0;
    atomic_store(&overlap_left, is_of_several ? OVERLAP_OF : 0);
    pthread_mutex_unlock(&guard);
}

/* Each launch of a kind is as likely as the others: of a program that does the same again and again, one at fixed distances, or after a
   fixed time, would always be the same one. */
static bool is_to_be_measured(struct cost *cost, struct measurement *measurement, uint64_t now)
{
    if (atomic_load_explicit(&overlap_left, memory_order_relaxed) > 0 && atomic_load(&has_outstanding) < OUTSTANDING &&
        atomic_fetch_sub(&overlap_left, 1) > 0)
        return atomic_store(&cost->is_outstanding, true), measurement->is_of_overlap = true;
    uint64_t known = atomic_load(&cost->ns), last = atomic_load(&seldom_at);
    bool is_due = atomic_fetch_sub_explicit(&cost->unmeasured, 1, memory_order_relaxed) <= 0 ||
                  (atomic_load_explicit(&cost->measured, memory_order_relaxed) < WEIGHT && cost != &cost_of_the_rest);
    if (!is_due && known && now - atomic_load(&cost->measured_at) > SELDOM_NS && now - last > SELDOM_APART_NS)
        is_due = atomic_compare_exchange_strong(&seldom_at, &last, now);
    if ((!is_due && known) || atomic_load(&has_outstanding) >= OUTSTANDING || !has_real(SLOT_cuEventElapsedTime))
        return false;
    uint64_t every = known ? MEASURE_NS / known : 0;
    every = every < MEASURE_EVERY ? every : MEASURE_EVERY;
    atomic_store(&cost->unmeasured, (int32_t)(every / 2 + mix(now) % (every + 1)));
    atomic_store(&cost->measured_at, now);
    atomic_store(&cost->is_outstanding, true);
    begin_overlap(now);
    return true;
}

static CUresult record(CUevent event, const struct launch *launch)
{
    return launch->is_per_thread && has_real(SLOT_cuEventRecord_ptsz) ? REAL(cuEventRecord_ptsz)(event, launch->stream)
                                                                      : REAL(cuEventRecord)(event, launch->stream);
}

/* An event that is recorded there, or NULL. */
static CUevent recorded(const struct launch *launch)
{
    CUevent event = NULL;
    CUstreamCaptureMode mode = relax_capture(); /* another thread may capture: creating an event would then be an error there */
    if (REAL(cuEventCreate)(&event, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        event = NULL;
    restore_capture(mode);
    if (event && record(event, launch) != CUDA_SUCCESS) {
        REAL(cuEventDestroy_v2)(event);
        event = NULL;
    }
    return event;
}

static bool is_done(CUevent event)
{
    CUstreamCaptureMode mode = relax_capture();
    CUresult result = REAL(cuEventQuery)(event);
    restore_capture(mode);
    return result == CUDA_SUCCESS;
}

static bool is_short(struct cost *cost)
{
    uint64_t known = atomic_load(&cost->ns);
    return known && known < SHORT_NS;
}

/* Whether the GPU has nothing to do and waits for the host: then the event is done before the launch. It takes a microsecond or two to
   say so. */
static void find_idle(struct measurement *measurement)
{
    for (uint64_t until = measurement->recorded_at + MOST_OVERHEAD_NS; measurement->recorded_at < until && !measurement->was_idle;) {
        measurement->was_idle = is_done(measurement->before);
        measurement->recorded_at = now_ns();
    }
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
    if (atomic_load_explicit(&last_stream, memory_order_relaxed) != launch->stream) {
        atomic_store_explicit(&last_stream, launch->stream, memory_order_relaxed);
        atomic_fetch_add_explicit(&stream_changes, 1, memory_order_relaxed);
    }
    pay_and_wait(measurement, &limits);
    if (!is_to_be_measured(measurement->cost, measurement, measurement->recorded_at))
        return;
    measurement->before = recorded(launch);
    measurement->recorded_at = now_ns();
    if (!measurement->before)
        atomic_store(&measurement->cost->is_outstanding, false);
    else if (atomic_load(&measurement->cost->ns) < SHORT_NS) /* or not known */
        find_idle(measurement);
}

static void end_measurement(const struct launch *launch, const struct measurement *measurement)
{
    struct outstanding one = {.cost = measurement->cost, .before = measurement->before, .gpu = measurement->gpu, .paid = measurement->paid};
    one.host_ns = now_ns() - measurement->recorded_at;
    one.was_idle = measurement->was_idle;
    if (!one.was_idle && !measurement->is_of_overlap && is_short(measurement->cost) && is_done(one.before)) {
        /* The GPU came to wait for the host at a time that nobody knows. */
        destroy_events(&one);
        atomic_fetch_add(&one.cost->measured, 1);
        atomic_store(&one.cost->unmeasured, atomic_load(&one.cost->unmeasured) / 4);
        atomic_store(&one.cost->is_outstanding, false);
        return;
    }
    one.after = recorded(launch);
    one.behind = one.after ? recorded(launch) : NULL;
    pthread_mutex_lock(&guard);
    bool is_kept = one.behind && outstanding_count < OUTSTANDING;
    if (is_kept && measurement->is_of_overlap && overlapping.begun < OVERLAP_OF) {
        overlapping.first = overlapping.begun++ ? overlapping.first : one.before;
        one.is_of_overlap = overlapping.first;
    }
    if (is_kept)
        outstanding[outstanding_count++] = one;
    atomic_store(&has_outstanding, outstanding_count);
    pthread_mutex_unlock(&guard);
    if (!is_kept) {
        destroy_events(&one);
        atomic_store(&one.cost->is_outstanding, false);
    }
}

void end_launch(const struct launch *launch, const struct measurement *measurement, bool is_launched)
{
    struct cost *cost = measurement->cost;
    if (!cost)
        return;
    if (!is_launched) {
        charge(measurement->gpu, -(int64_t)measurement->paid, measurement->paid > TURN_NS); /* the driver refused it: nothing ran */
        if (measurement->before) {
            REAL(cuEventDestroy_v2)(measurement->before);
            atomic_store(&cost->is_outstanding, false);
        }
        return;
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
    outstanding_count = 0;
    overlapping.first = NULL;
    overlap = 1;
    atomic_store(&overlap_left, 0);
    atomic_store(&ordinary_ns, 0);
    atomic_store(&has_outstanding, 0);
}
