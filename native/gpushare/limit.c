/* The limit of compute: a launch waits until the container's share of the GPU allows it.
 *
 * What is shared is time of the GPU, in nanoseconds, in one bucket for all processes of the container:
 *
 *   refill   elapsed time · share, up to BURST_NS; so what was not used is lost, and an idle program may begin at once
 *   launch   pays at once what it is expected to take. In debt, once its batch is full, it waits until as much was refilled as the
 *            bucket lacked before it: so all processes and threads have their turns in the order in which they came
 *   span     launches that follow each other in a stream, between two events. What the events say, less what was expected, is paid
 *            when they are done: so every launch pays what it took in the end, also a kernel that is short today and long tomorrow
 *   kind     the same function with about as many blocks, and as many threads: what is expected of it is the mean of spans of one launch
 *
 * Contexts of a GPU take turns, and a span that lies in one turn says nothing but the truth. So launches go in batches of half a turn
 * while other containers compute, the next batch when the one before it is done. A kernel of several turns is longer by the turns of
 * the others (own_part_of).
 *
 * The driver's utilisation is believed for the GPU as a whole: an H200's driver names one process in each sample, with the whole GPU's
 * percents. It gives the scale while the container is alone, for what no event shows, and says whether the GPU is full.
 */
#define _GNU_SOURCE
#include "library.h"

#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define SECOND_NS 1000000000u
#define BURST_NS 50000000.0           /* that an idle container has saved: five points of a program's first second */
#define BATCH_NS 500000u               /* that a span in debt may have: then two events are a hundredth of it */
#define SPAN_NS (TURN_NS / 2)
#define HOST_NS 5000u /* that a call of the driver takes: an idle GPU has done an event, or the host notices that it has */
#define SLACK_NS 200000u /* below it events, questions for them and pauses of the host are not worth a measurement */
#define SHORTEST_WAIT_NS 50000u /* what a sleep takes at least, about */
#define LONGEST_WAIT_NS 10000000u /* a resize is noticed after it */
#define LONGEST_UNKNOWN_NS 100000000u /* a launch waits for what is not known yet, but not for ever: it may wait for the host */
#define MOST_DEBT_NS 3.6e12 /* a program has written more there itself */
#define SELDOM 0.1 /* of the times, another context had the GPU: nobody else computes */
#define PUBLISHED_MS 3000u /* so long what the agent says of the others is believed */
#define IDLE_NS 2000000000u /* then another program may begin: the scale is forgotten */
#define HOLD_NS 15000000000u /* without a sample: so long a scale that gives more, or a ceiling, is believed */
#define LEAST_BUSY_NS 30e6 /* seen, before a scale is made of it */
#define MEMORY_S 3.0 /* of the sums behind the scale: what lies so far back counts a third */
#define LATEST_S 1.2 /* utilisation is behind by less: half of what it is measured over, and its way */
#define MOST_SCALE 5.0
enum { COSTS = 4096, PROBES = 8, WEIGHT = 8, OUTSTANDING = 64, UNKNOWN_AT_ONCE = 16 };
enum { SPAN_LAUNCHES = 64, SPANS_AHEAD = 4 }; /* of a stream: more of them are not launched before one of the first is done */

#define LOAD(field) atomic_load_explicit((_Atomic __typeof__(field) *)&(field), memory_order_relaxed)
#define SEE(field) atomic_load_explicit((const _Atomic __typeof__(field) *)&(field), memory_order_relaxed)
#define STORE(field, value) atomic_store_explicit((_Atomic __typeof__(field) *)&(field), value, memory_order_relaxed)
#define ADD(field, value) atomic_fetch_add_explicit((_Atomic __typeof__(field) *)&(field), value, memory_order_relaxed)
#define EXCHANGE_IF(field, old, new) atomic_compare_exchange_strong((_Atomic __typeof__(field) *)&(field), old, new)

/* ---- kinds of launches ---- */

struct cost {
    _Atomic uint64_t key; /* 0: free */
    _Atomic uint64_t ns; /* 0: not known yet */
    _Atomic uint64_t used_at;
    _Atomic unsigned measured;
    _Atomic bool is_outstanding;
};
static struct cost costs[COSTS];
static _Atomic uint64_t ordinary_ns; /* what a launch takes, of all kinds */

/* Launches of a stream that follow each other, of one thread while it is open. */
struct span {
    CUevent before, early, after, behind; /* NULL: there is none; early: behind one of its first launches */
    CUstream stream;
    CUcontext context;  /* of the events */
    const void *thread; /* a number for it */
    struct cost *cost;  /* of its only launch */
    uint64_t paid, begun_at, host_ns;
    uint64_t waited_ns; /* of the thread, when it began */
    unsigned launches, waits, generation;
    int gpu;
    bool is_per_thread, is_single, is_first, was_idle, is_dense, is_contended;
};
static _Thread_local struct span open_span, single_span; /* of several launches, and of the launch that is being made */
static _Thread_local CUstream last_stream;
static _Thread_local uint64_t launched_at;
static _Thread_local uint64_t waited_ns; /* in the driver, for the GPU */
static _Thread_local unsigned waits;
static _Thread_local uint32_t lots = 1;

static struct span outstanding[OUTSTANDING];
static unsigned outstanding_count;
static struct latest {
    CUevent end;
    CUstream stream;
    CUcontext context;
    const void *thread;
} latest[MOST_GPUS]; /* of the spans that are done, the last one's end */
static unsigned elsewhere_samples;
static uint64_t done_at; /* the last of them */
static double elsewhere; /* how often another context had the GPU when this one came: what is known without the agent */
static double event_ns = HOST_NS; /* what an event takes, the least that was seen */
static _Atomic unsigned event_samples;
static _Atomic unsigned generation; /* another one: open spans may have events of a context that is no more, or of a parent */
static _Atomic unsigned in_vain;    /* how often a launch has waited as long as it may since the oldest span is outstanding */
static _Atomic uint64_t polled_at;
static _Atomic unsigned has_outstanding;
static _Atomic bool has_begun;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER; /* of what is above, from `outstanding` on */

/* Of a number that is none, the least: the program may write any into `usage`. */
static double within(double value, double least, double most) { return value > least ? value < most ? value : most : least; }

static uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

/* Three digits of a binary number: a program of ever new sizes has some hundred kinds. */
static uint64_t about(uint64_t blocks)
{
    int digits = blocks ? 64 - __builtin_clzll(blocks) : 0;
    return digits > 3 ? blocks >> (digits - 3) << (digits - 3) : blocks;
}

/* Where all places of a key are taken the one that was not used for longest is given to it. */
static struct cost *cost_of(const struct launch *launch, int gpu, uint64_t now)
{
    uint64_t key = mix((uintptr_t)launch->what + mix(about(launch->blocks) + mix(launch->threads + mix((unsigned)gpu)))) | 1;
    uint64_t oldest_at = UINT64_MAX;
    struct cost *oldest = costs;
    for (unsigned i = 0; i < PROBES; i++) {
        struct cost *at = &costs[(key + i) % COSTS];
        uint64_t found = SEE(at->key), used_at = SEE(at->used_at);
        if (found == key) {
            if (now - used_at > SECOND_NS)
                STORE(at->used_at, now);
            return at;
        }
        if (found == 0)
            used_at = 0;
        if (used_at < oldest_at)
            oldest = at, oldest_at = used_at;
    }
    STORE(oldest->ns, 0);
    STORE(oldest->measured, 0);
    STORE(oldest->is_outstanding, false);
    STORE(oldest->used_at, now);
    STORE(oldest->key, key);
    return oldest;
}

/* ---- what the agent says ---- */

static bool is_published(const struct config_gpu *seen, uint64_t now)
{ return seen->published_at && (uint32_t)(now / 1000000) - seen->published_at < PUBLISHED_MS; }

/* Whether others may compute meanwhile. Without the agent nobody says that they do not. */
static bool is_contended(const struct config_gpu *seen, uint64_t now) { return seen->companions || !is_published(seen, now); }

/* How long the others compute between two turns of this container's, with what both changes take; 0: nobody else does. */
static double others_turns(const struct limits *limits, uint64_t now)
{
    bool is_by_agent = is_published(&limits->seen, now);
    if (is_by_agent ? !limits->seen.companions : elsewhere < SELDOM)
        return 0;
    return (is_by_agent ? limits->between_ns : TURN_NS * elsewhere / (2 - elsewhere)) + 2 * CHANGE_NS;
}

/* What the context computed in a span that took so long. The span begins with a turn of its own, because the context waited for that
   before the first event; then the others have theirs, and so on. */
static double own_part_of(double took, double between, unsigned *turns)
{
    *turns = between > 0 ? (unsigned)within(took / (TURN_NS + between), 0, 1e6) : 0;
    return took - *turns * between;
}

/* ---- spans that are done ---- */

/* Settles the difference between what was paid and what the span took. Launches in debt wait until enough was earned since they paid.
   If too much was paid, they may wait for that part: so it counts as earned. A launch that waited for something else then begins
   too early, and those behind it wait for that. */
static void settle(struct usage_gpu *use, int64_t difference)
{
    ADD(use->tokens, -difference);
    if (difference < 0)
        ADD(use->earned, (uint64_t)-difference);
}

static double elapsed_ns(CUevent from, CUevent until)
{
    float ms = 0;
    return REAL(cuEventElapsedTime)(&ms, from, until) == CUDA_SUCCESS ? (double)ms * 1e6 : -1e18;
}

static void destroy(CUevent event)
{
    if (event)
        REAL(cuEventDestroy_v2)(event);
}

static bool is_done(CUevent event)
{
    CUstreamCaptureMode mode = relax_capture();
    CUresult result = REAL(cuEventQuery)(event);
    restore_capture(mode);
    return result == CUDA_SUCCESS;
}

/* Without the time that was in a span of another stream, too. Keeps the end of the last one. */
static double without_overlap(struct span *one, double took)
{
    struct latest *last = &latest[one->gpu];
    bool is_behind =
        last->stream == one->stream && last->thread == one->thread; /* a thread's spans follow each other in a stream */
    double behind = last->end && !is_behind ? elapsed_ns(last->end, one->after) : 1e18;
    if (behind > -1e17 && behind <= 0)
        return 0;
    destroy(last->end);
    *last = (struct latest){.end = one->after, .stream = one->stream, .context = one->context, .thread = one->thread};
    one->after = NULL;
    return behind > 0 && behind < took ? behind : took;
}

static void note_cost(struct cost *cost, double took)
{
    double known = (double)SEE(cost->ns);
    unsigned measured = atomic_fetch_add(&cost->measured, 1);
    known += (took - known) / (known > 0 ? measured < WEIGHT ? measured + 1 : WEIGHT : 1);
    STORE(cost->ns, known >= 1 ? (uint64_t)known : 1);
}

static void note_done(struct span *one, uint64_t now)
{
    struct usage_gpu *use = usage_of(one->gpu);
    struct limits limits;
    read_limits(one->gpu, &limits);
    const struct config_gpu *seen = &limits.seen;
    double between = elapsed_ns(one->before, one->after), nothing = one->behind ? elapsed_ns(one->after, one->behind) : -1;
    if (between < 0)
        return;
    if (nothing >= 0)
        event_ns = event_samples++ && event_ns < nothing ? event_ns : within(nothing, 0, HOST_NS);
    /* On an idle GPU the first event is done at once, and what the host takes for the launch lies between the two. In a queue nothing
       does. Else it may have been idle for as long as the host did not wait for the GPU. */
    double most = between - event_ns > 1 ? between - event_ns : 1;
    double host = one->is_dense ? 0 : (double)one->host_ns, least = within(most - host, most / 8, most);
    double others = others_turns(&limits, now), took = one->was_idle ? least : within((double)one->paid, least, most);
    bool is_known = one->was_idle || least > 0.8 * most || (one->cost && !SEE(one->cost->ns));
    unsigned turns;
    took = own_part_of(took, others, &turns);
    if (one->launches > 1 && !one->is_dense) /* while the host made a pause the others have had a turn, too */
        took = within((double)one->paid, own_part_of(within(least, 0, most), others, &turns) - others, took);
    bool is_long = took > 1.5 * TURN_NS;
    took = without_overlap(one, took);
    if (one->cost && is_known)
        note_cost(one->cost, took);
    uint64_t ordinary = SEE(ordinary_ns), mean = (uint64_t)(took / one->launches);
    STORE(ordinary_ns, ordinary ? ordinary - ordinary / 16 + mean / 16 : mean);
    /* Where the GPU is full each pays for the beginnings of its own turns. */
    double full = is_published(seen, now) ? seen->full / 10000.0 : 0;
    bool has_changed = one->is_first && one->is_dense; /* it had to wait for another context */
    settle(use, (int64_t)(took + full * CHANGE_NS * (turns + has_changed)) - (int64_t)one->paid);
    ADD(use->launched, (uint64_t)took - one->paid);
    ADD(use->turns, turns + 1);
    if (is_long) {
        ADD(use->launched_long, (uint64_t)took);
        ADD(use->present_long, (uint64_t)between);
    }
}

static bool is_in_stream(const struct span *one, CUstream stream, bool is_per_thread, const void *thread, int gpu)
{
    bool is_of_thread = stream == CU_STREAM_PER_THREAD || (is_per_thread && !stream);
    return one->stream == stream && one->is_per_thread == is_per_thread && one->gpu == gpu &&
           (!is_of_thread || one->thread == thread);
}

/* Whether one of the first so many, which are not done, is before it in its stream: then it is not done either. */
static bool is_behind_others(const struct span *one, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        if (outstanding[i].thread == one->thread &&
            is_in_stream(&outstanding[i], one->stream, one->is_per_thread, one->thread, one->gpu))
            return true;
    return false;
}

/* Asks the events of spans that have ended, the oldest first; waits for none. */
static void poll_outstanding(uint64_t now, uint64_t apart)
{
    if (!SEE(has_outstanding) || now < SEE(polled_at) + apart || pthread_mutex_trylock(&guard) != 0)
        return;
    forbid_cancel(); /* the other sections with the lock call nothing in which a thread can be cancelled */
    CUstreamCaptureMode mode = relax_capture();
    unsigned kept = 0;
    STORE(polled_at, now);
    for (unsigned i = 0; i < outstanding_count; i++) {
        struct span *one = &outstanding[i];
        CUresult result =
            is_behind_others(one, kept) ? CUDA_ERROR_NOT_READY : REAL(cuEventQuery)(one->behind ? one->behind : one->after);
        if (result == CUDA_ERROR_NOT_READY) {
            outstanding[kept++] = *one;
            continue;
        }
        if (i == 0)
            STORE(in_vain, 0);
        if (result == CUDA_SUCCESS) { /* else its context has ended */
            note_done(one, now);
            done_at = now;
        }
        if (one->cost)
            STORE(one->cost->is_outstanding, false);
        destroy(one->before), destroy(one->after), destroy(one->behind);
    }
    outstanding_count = kept;
    STORE(has_outstanding, kept);
    restore_capture(mode);
    pthread_mutex_unlock(&guard);
    allow_cancel();
}

/* ---- scale and share ---- */

/* exp(-x), without libm. */
static double fade(double x)
{
    double half = x > 0.5 ? fade(x / 2) : 0;
    return x > 0.5 ? half * half : 1 - x + x * x / 2 - x * x * x / 6;
}

static void forget_scale(struct usage_gpu *use)
{
    use->cost_sum = use->late_sum = use->delayed = use->busy_sum = 0;
    STORE(use->scale, 0.0);
}

/* What was paid while the container was alone is to what the GPU was busy. Utilisation is behind, by as much as LATEST_S or by nothing:
   while a program begins, ends or changes, the two sums say different things, and what both of them say is believed. */
static double ratio_of(const struct usage_gpu *use)
{
    double early = use->cost_sum / use->busy_sum, late = use->late_sum / use->busy_sum;
    double low = early < late ? early : late, high = early < late ? late : early;
    double share = use->busy_sum / (MEMORY_S * 1e9), doubt = 1.02 + 0.01 / (share > 0.01 ? share : 0.01); /* percents are whole */
    return low > doubt        ? within(1 + 2 * (low - doubt), 1, low)
           : high < 1 / doubt ? 1 / within(1 + 2 * (1 / high - doubt), 1, 1 / high)
                              : 1;
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

/* Each sample is taken by one process, whichever comes first. */
static void take_sample(struct usage_gpu *use, const struct limits *limits, uint64_t now)
{
    const struct config_gpu *seen = &limits->seen;
    uint64_t before = LOAD(use->sampled_at), until = seen->busy_until, launched = LOAD(use->launched),
             alone = LOAD(use->alone_since);
    if (limits->is_instance) { /* of MIG, which has no utilisation: who has no companions is alone */
        STORE(use->alone_since, seen->companions || !is_published(seen, now) ? 0 : alone ? alone : now);
        STORE(use->sampled_at, now);
        return;
    }
    if (until == 0 || until == before || !EXCHANGE_IF(use->sampled_at, &before, until))
        return;
    double dt_s = (double)(until - before) / 1e9, others_ns = (double)(seen->others_ns - use->others_at_sample);
    double busy_ns = (double)(seen->busy_ns - use->busy_at_sample) + others_ns;
    int64_t paid = (int64_t)(launched - use->launched_at_sample); /* less than nothing: what was paid too much is given back */
    double paid_ns = paid > 0 ? (double)paid : 0;
    /* Else the agent has counted from another beginning, or `usage` has been written by somebody else. */
    bool is_whole = before && until > before && dt_s < 5 && seen->busy_since <= before && seen->busy_ns >= use->busy_at_sample &&
                    seen->others_ns >= use->others_at_sample;
    use->busy_at_sample = seen->busy_ns;
    use->others_at_sample = seen->others_ns;
    use->launched_at_sample = launched;
    if (!is_whole || !is_published(seen, now)) {
        use->alone_since = 0;
        return;
    }
    use->alone_since = seen->companions || others_ns > 0 ? 0 : use->alone_since ? use->alone_since : until;
    set_scale(use, use->alone_since && until - use->alone_since >= SECOND_NS, dt_s, paid_ns, busy_ns);
}

/* Nanoseconds of payment that the container has for each one that passes, and that of its burst. */
static double share_of(const struct usage_gpu *use, const struct limits *limits, uint64_t now, double *scale)
{
    uint64_t alone_since = SEE(use->alone_since), sampled_at = SEE(use->sampled_at);
    /* Without the agent nobody says whether the others are idle, or that a scale which was right is no more. One that gives less stays:
       a limit must not be lost with the agent. */
    bool is_observed = sampled_at && now - sampled_at < HOLD_NS;
    bool is_elastic = limits->has_ceiling && is_observed && alone_since && sampled_at - alone_since >= SECOND_NS;
    double share = is_elastic ? limits->ceiling : limits->cores;
    *scale = SEE(use->scale);
    *scale = *scale > 0 ? within(*scale, 1 / MOST_SCALE, is_observed ? MOST_SCALE : 1)
                        : 1; /* the program may write there whatever it likes */
    return (share < 0.001 ? 0.001 : share) * *scale; /* nothing would be for ever */
}

/* ---- the bucket ---- */

static void refill(struct usage_gpu *use, double share, double most, uint64_t now)
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
    while ((tokens > (int64_t)most || tokens < (int64_t)-MOST_DEBT_NS) &&
           !EXCHANGE_IF(use->tokens, &tokens, tokens > 0 ? (int64_t)most : 0))
        ;
}

static double keep_up(int gpu, struct limits *limits, uint64_t now, uint64_t poll_apart)
{
    struct usage_gpu *use = usage_of(gpu);
    double scale;
    poll_outstanding(now, poll_apart);
    take_sample(use, limits, now);
    double share = share_of(use, limits, now, &scale);
    refill(use, share, BURST_NS * scale, now);
    return share;
}

/* What a signal's handler calls meanwhile is limited. It may leave the sleep by longjmp, or the thread is cancelled, as in any wait: no
   lock is held, and what its launch has paid is not given back. */
static double sleep_and_keep_up(int gpu, struct limits *limits, uint64_t *now, double ns)
{
    ns = within(ns, SHORTEST_WAIT_NS, LONGEST_WAIT_NS);
    uintptr_t *frame = leave_hook();
    clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_nsec = (long)ns}, NULL);
    enter_hook(frame);
    read_limits(gpu, limits);
    uint64_t before = *now;
    *now = now_ns();
    ADD(usage_of(gpu)->throttled, *now - before);
    return keep_up(gpu, limits, *now, 0);
}

/* In its stream, so many that there must be no more before one of them is done. */
static bool are_enough_ahead(const struct launch *launch, int gpu, unsigned most, double others_ns, uint64_t now)
{
    unsigned ahead = 0;
    bool is_late = false;
    pthread_mutex_lock(&guard);
    for (unsigned i = 0; i < outstanding_count; i++) {
        const struct span *one = &outstanding[i];
        if (!is_in_stream(one, launch->stream, launch->is_per_thread, &open_span, gpu))
            continue;
        uint64_t since =
            one->begun_at > done_at ? one->begun_at : done_at; /* another thread's `now` may be later than this one's */
        is_late |= !ahead++ && now > since && now - since > 2 * one->paid + SLACK_NS + (uint64_t)others_ns;
    }
    pthread_mutex_unlock(&guard);
    return ahead >= most || is_late;
}

/* True if a span must wait before it begins: only few launches of unknown length are let through. Else a queue of long kernels would
   be there before anybody knows that they are long. A launch that waits here is behind the others in its stream anyway. */
static bool is_to_wait(const struct launch *launch, const struct cost *cost, int gpu, const struct limits *limits, uint64_t now)
{
    poll_outstanding(now, 0);
    unsigned all = SEE(has_outstanding);
    bool is_unknown = SEE(cost->ns) == 0 && (SEE(cost->is_outstanding) || all >= UNKNOWN_AT_ONCE);
    double others = within(limits->seen.companions, 0, 64);
    /* A container below its share need not be measured so well, and must not be delayed. */
    bool is_in_turns = is_contended(&limits->seen, now) && LOAD(usage_of(gpu)->tokens) < (int64_t)(BURST_NS / 2);
    return all && (is_unknown || all >= OUTSTANDING ||
                   are_enough_ahead(launch, gpu, is_in_turns ? 1 : SPANS_AHEAD, others * (TURN_NS + CHANGE_NS), now));
}

/* Pays, and waits for the turn that comes with it. The limits are read again in each round. */
static void pay_and_wait(const struct launch *launch, struct measurement *measurement, struct limits *limits, uint64_t now)
{
    struct span *span = measurement->span;
    int gpu = measurement->gpu;
    struct usage_gpu *use = usage_of(gpu);
    double share = keep_up(gpu, limits, now, SLACK_NS);
    /* What is ahead may wait for the host, which launches more first: so launches behind it wait less and less. */
    uint64_t until = now + LONGEST_UNKNOWN_NS / (1 + SEE(in_vain));
    while (limits->limits_cores && !span && is_to_wait(launch, measurement->cost, gpu, limits, now)) {
        if (now >= until) {
            measurement->is_late = true;
            atomic_fetch_add(&in_vain, 1);
            break;
        }
        share = sleep_and_keep_up(gpu, limits, &now, SHORTEST_WAIT_NS);
    }
    uint64_t known = SEE(measurement->cost->ns), ordinary = SEE(ordinary_ns), earned = LOAD(use->earned);
    measurement->paid = known ? known : ordinary ? ordinary : HOST_NS; /* its events may fail, too */
    int64_t had = ADD(use->tokens, -(int64_t)measurement->paid);
    ADD(use->launched, measurement->paid);
    while (limits->limits_cores && had < 0 && !(span && span->paid < BATCH_NS) && (double)had > -MOST_DEBT_NS) {
        uint64_t debt = -(uint64_t)had,
                 paid = LOAD(use->earned) - earned; /* unsigned: the program may have written anything there */
        if (paid >= debt)
            break;
        share = sleep_and_keep_up(gpu, limits, &now, (double)(debt - paid) / share);
    }
    measurement->now = now;
}

/* ---- spans that are open ---- */

static CUresult record(CUevent event, CUstream stream, bool is_per_thread)
{
    return is_per_thread && has_real(SLOT_cuEventRecord_ptsz) ? REAL(cuEventRecord_ptsz)(event, stream)
                                                              : REAL(cuEventRecord)(event, stream);
}

static CUevent record_new(CUstream stream, bool is_per_thread)
{
    CUevent event = NULL;
    CUstreamCaptureMode mode = relax_capture(); /* another thread may capture: creating an event would then be an error there */
    if (REAL(cuEventCreate)(&event, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        event = NULL;
    restore_capture(mode);
    if (event && record(event, stream, is_per_thread) != CUDA_SUCCESS) {
        REAL(cuEventDestroy_v2)(event);
        event = NULL;
    }
    return event;
}

/* An event that is recorded there, or NULL. It has to be of the stream's context, which need not be the current one. */
static CUevent recorded(CUstream stream, bool is_per_thread, CUcontext *context)
{
    CUevent event = record_new(stream, is_per_thread);
    CUcontext unused;
    if (!event && !is_of_context(stream) && REAL(cuStreamGetCtx)(stream, context) == CUDA_SUCCESS &&
        REAL(cuCtxPushCurrent_v2)(*context) == CUDA_SUCCESS) {
        event = record_new(stream, is_per_thread);
        REAL(cuCtxPopCurrent_v2)(&unused);
    }
    return event;
}

/* The span that is open in this stream, or NULL. One of a context that is no more is forgotten with its events. */
static struct span *span_in(CUstream stream, bool is_per_thread)
{
    CUcontext current = NULL;
    if (open_span.before && open_span.generation != SEE(generation))
        open_span.before = open_span.early = NULL;
    if (!open_span.before || open_span.stream != stream || open_span.is_per_thread != is_per_thread)
        return NULL;
    return !is_of_context(stream) || (REAL(cuCtxGetCurrent)(&current) == CUDA_SUCCESS && current == open_span.context) ? &open_span
                                                                                                                       : NULL;
}

static void drop(struct span *span)
{
    destroy(span->before), destroy(span->early);
    if (span->cost)
        STORE(span->cost->is_outstanding, false);
    span->before = span->early = NULL;
}

/* Called where the program has just used the stream: one that it has destroyed must not be touched. */
static void close_span(struct span *span, uint64_t now)
{
    struct span one = *span;
    /* While the container is alone, what the host waited for is what it launched. */
    uint64_t waited = one.is_contended ? 0 : waited_ns - one.waited_ns;
    destroy(one.early);
    span->before = span->early = one.early = NULL;
    one.host_ns = now - one.begun_at;
    one.host_ns -= waited < one.host_ns ? waited : one.host_ns;
    one.host_ns += (waits - one.waits) * HOST_NS;
    one.is_dense = !one.was_idle && !is_done(one.before);
    one.cost = one.launches == 1 ? one.cost : NULL;
    one.after = recorded(one.stream, one.is_per_thread, &one.context);
    one.behind =
        one.after && one.is_single && event_samples < WEIGHT ? recorded(one.stream, one.is_per_thread, &one.context) : NULL;
    pthread_mutex_lock(&guard);
    if (one.is_first)
        elsewhere += (one.is_dense - elsewhere) / (elsewhere_samples < 2 * WEIGHT ? ++elsewhere_samples : 2 * WEIGHT);
    bool is_kept = one.after && outstanding_count < OUTSTANDING;
    if (is_kept)
        outstanding[outstanding_count++] = one;
    STORE(has_outstanding, outstanding_count);
    pthread_mutex_unlock(&guard);
    if (!is_kept) {
        destroy(one.after), destroy(one.behind);
        drop(&one);
    }
}

/* The events of a thread that ends. */
static pthread_key_t thread_key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static bool has_key;
static void end_thread(void *unused)
{
    (void)unused;
    if (open_span.before && open_span.generation == SEE(generation))
        drop(&open_span);
}
static void make_key(void) { has_key = pthread_key_create(&thread_key, end_thread) == 0; }

static struct span *begin_span(const struct launch *launch, const struct measurement *measurement, bool is_single)
{
    struct span *one = is_single ? &single_span : &open_span;
    if (!has_real(SLOT_cuEventElapsedTime))
        return NULL;
    pthread_once(&key_once, make_key);
    if (has_key)
        pthread_setspecific(thread_key, &open_span);
    if (one->before) /* of another stream, which may be no more: what its launches took stays what was expected */
        drop(one);
    *one = (struct span){.stream = launch->stream,
                         .is_per_thread = launch->is_per_thread,
                         .gpu = measurement->gpu,
                         .cost = measurement->cost,
                         .is_single = is_single,
                         .is_first = !SEE(has_outstanding),
                         .waited_ns = waited_ns,
                         .waits = waits,
                         .thread = &open_span,
                         .generation = SEE(generation)};
    REAL(cuCtxGetCurrent)(&one->context);
    one->before = recorded(launch->stream, launch->is_per_thread, &one->context);
    one->begun_at = now_ns();
    /* Whether the GPU has nothing to do and waits for the host: then the event is done within microseconds. */
    uint64_t known = SEE(measurement->cost->ns);
    for (uint64_t until = one->begun_at + HOST_NS;
         one->before && is_single && known < SLACK_NS && one->begun_at < until && !one->was_idle;) {
        one->was_idle = is_done(one->before);
        one->begun_at = now_ns();
    }
    if (one->before && !known)
        STORE(one->cost->is_outstanding, true);
    return one->before ? one : NULL;
}

/* Each launch of a kind is as likely as the others to be measured alone: of a program that does the same again and again, one at fixed
   distances would always be the same one. */
static bool is_drawn(void)
{
    lots ^= lots << 13, lots ^= lots >> 17, lots ^= lots << 5;
    return lots % WEIGHT == 0;
}

void begin_launch(const struct launch *launch, struct measurement *measurement)
{
    struct limits limits;
    *measurement = (struct measurement){.gpu = gpu_of_device(device_of_stream(launch->stream))};
    if (measurement->gpu < 0)
        return;
    (void)own_slot(); /* so the agent sees the process; one that finds no free slot computes within the share all the same */
    read_limits(measurement->gpu, &limits);
    if (!limits.limits_cores || is_capturing(launch->stream, launch->is_per_thread)) /* captured, it is paid for by its graph */
        return;
    uint64_t now = now_ns();
    if (!SEE(has_begun)) { /* what another program's launches were is not what this one's are */
        STORE(has_begun, true);
        forget_scale(usage_of(measurement->gpu));
    }
    measurement->cost = cost_of(launch, measurement->gpu, now);
    struct span *span = span_in(launch->stream, launch->is_per_thread);
    uint64_t known = SEE(measurement->cost->ns);
    bool has_gap = now - launched_at > SLACK_NS; /* the stream may have been idle for long */
    bool alternates = launch->stream != last_stream;
    last_stream = launch->stream;
    measurement->is_contended = is_contended(&limits.seen, now);
    measurement->has_companions = limits.seen.companions;
    bool is_single = known == 0 ||
                     known >= (alternates                  ? SLACK_NS / 4
                               : measurement->is_contended ? SPAN_NS
                                                           : SLACK_NS) ||
                     has_gap || ((!span || alternates) && is_drawn());
    bool is_ahead = false;
    if (span && span->early && (span->launches == WEIGHT || span->launches == 3 * WEIGHT)) {
        /* Nothing was ahead of the span: the launch before the event is done by now, or they are long. */
        is_ahead = !is_done(span->early) || record(span->early, launch->stream, launch->is_per_thread) != CUDA_SUCCESS;
        if (is_ahead && now - span->begun_at > 2 * known * (span->launches == WEIGHT ? 1 : WEIGHT) + 2 * HOST_NS) {
            STORE(measurement->cost->ns, 0);
            is_single = true;
        }
    }
    if (span && (is_single || is_ahead)) {
        close_span(span, now);
        span = NULL;
    }
    measurement->span = span;
    pay_and_wait(launch, measurement, &limits, now);
    if (!span && !launch->is_unmeasured && (is_single || measurement->is_late || !alternates))
        measurement->span = begin_span(launch, measurement, is_single || measurement->is_late);
}

void end_launch(const struct measurement *measurement, bool is_launched)
{
    struct span *span = measurement->span;
    if (!measurement->cost)
        return;
    struct usage_gpu *use = usage_of(measurement->gpu);
    if (!is_launched) { /* the driver refused it: nothing ran */
        settle(use, -(int64_t)measurement->paid);
        ADD(use->launched, -measurement->paid);
        if (span && !span->launches)
            drop(span);
        return;
    }
    ADD(use->launches, 1);
    launched_at = measurement->now;
    if (!span)
        return;
    span->launches++;
    span->paid += measurement->paid;
    span->is_contended = measurement->is_contended;
    if (span->launches == 1 && span->is_first && !span->is_single && !measurement->has_companions)
        span->early = recorded(span->stream, span->is_per_thread, &span->context);
    if (span->is_single || span->launches >= SPAN_LAUNCHES || span->paid >= SPAN_NS ||
        (span->paid >= BATCH_NS && LOAD(use->tokens) < 0))
        close_span(span, now_ns());
}

/* ---- waiting for the GPU ---- */

/* Before it: what others do meanwhile must not be in a span, and what comes after it is another program's, as far as anybody knows. */
void begin_wait(CUstream stream, bool is_per_thread)
{
    struct span *span = span_in(stream, is_per_thread);
    if (span && span->launches && (span->is_contended || span->launches >= WEIGHT) && !is_capturing(stream, is_per_thread))
        close_span(span, now_ns());
}

void end_wait(uint64_t ns)
{
    waited_ns += ns;
    waits++;
}

/* A context is no more, nor are its events: their names may be those of the program's next ones. */
void forget_launches_of(CUcontext context)
{
    unsigned kept = 0;
    pthread_mutex_lock(&guard);
    atomic_fetch_add(&generation, 1);
    for (unsigned i = 0; i < outstanding_count; i++) {
        if (outstanding[i].context != context)
            outstanding[kept++] = outstanding[i];
        else if (outstanding[i].cost)
            STORE(outstanding[i].cost->is_outstanding, false);
    }
    outstanding_count = kept;
    STORE(has_outstanding, kept);
    for (struct latest *last = latest; last < latest + MOST_GPUS; last++)
        if (last->context == context)
            *last = (struct latest){0};
    pthread_mutex_unlock(&guard);
}

void forget_launches(void)
{
    guard = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    atomic_fetch_add(&generation, 1); /* open spans are the parent's, and their events */
    memset(latest, 0, sizeof latest);
    if (atomic_exchange(&has_begun, false)) /* a function of the child may have the address of another one of the parent */
        memset(costs, 0, sizeof costs);
    outstanding_count = 0;
    done_at = 0;
    atomic_store(&polled_at, 0); /* its clock may be another one */
    atomic_store(&in_vain, 0);
    atomic_store(&ordinary_ns, 0);
    atomic_store(&has_outstanding, 0);
}
