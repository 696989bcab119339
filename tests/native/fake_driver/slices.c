/* A GPU whose contexts take turns, as a real one's do: for the setting slice_us (machine.h). Without it machine.c runs whatever was
 * launched in the order in which it came.
 *
 *   context   of a process; has lanes, one for each of its streams, in which kernels, copies and events follow each other
 *   turn      while two contexts have kernels, each computes for slice_us, and a kernel that is not done goes on in the next turn.
 *             A context that had to wait for its turn loses switch_us before it; the GPU counts as busy then, and it does for it
 *   overlap   kernels of different lanes of a context compute at once: which was ready first has all the multiprocessors that it
 *             needs, the next one those that are left
 *   timed     a kernel that only waits for a time to pass; it ends then, though another context has had the GPU meanwhile
 *   event     has the time at which what is before it in its lane is done; it takes event_us in its lane and nothing of the GPU.
 *             On an idle GPU that is at once, so what the host takes for the launch behind it lies between two events too
 *   boost     kernels are boost_percent faster where the GPU is idle for three tenths of the time: its power is limited
 *   sample    every sample_every_ms, up to 2 ms late: how long the GPU was busy, and which process has had it last
 *
 * Nothing is computed ahead, since who comes later delays who is there: whoever asks brings the GPU up to the present (`advance`),
 * under machine.c's lock.
 */
#define _GNU_SOURCE
#include "slices.h"

#include <stddef.h>

#include "machine.h"

/* exp(-x), without libm. */
static double fade(double x)
{
    double half = x > 0.1 ? fade(x / 2) : 0;
    return x > 0.1 ? half * half : 1 - x + x * x / 2;
}

/* A driver's timer is not exact; so a program of a fixed period is not always met at the same point of it. */
uint64_t sim_sample_time(uint64_t number)
{
    uint64_t hash = (number + 1) * 0x9e3779b97f4a7c15ull;
    return number * config()->sample_every_ns + (hash >> 44) % 1000 * 2000;
}

static uint64_t at_least(double x) { return (uint64_t)x + ((double)(uint64_t)x < x); }

static int is_kernel(const sim_item *item) { return item->width > 0; }
static sim_item *head_of(sim_lane *lane) { return lane->tail != lane->head ? &lane->items[lane->head % LANE_ITEMS] : NULL; }

static int has_work(sim_context *context)
{
    for (sim_lane *lane = context->lanes; lane < context->lanes + LANES; lane++)
        if (head_of(lane))
            return 1;
    return 0;
}

static void note(uint64_t *slots, uint64_t from, uint64_t until)
{
    while (from < until) {
        uint64_t end = (from / METER_NS + 1) * METER_NS, stop = end < until ? end : until;
        slots[from / METER_NS % METER_SLOTS] += stop - from;
        from = stop;
    }
}

/* What NVML says is kept by machine.c; the meter is for tests, and keeps what was there after a process has ended. */
static void note_computing(sim_gpu *gpu, sim_context *context, uint64_t from, uint64_t until, int is_switch, note_fn *note_use)
{
    uint64_t base = gpu->began;
    note(context->gross, from - base, until - base);
    if (!is_switch)
        note(context->net, from - base, until - base);
    note_use(context->process, from, until);
    gpu->busy += until - from;
    double tau = 300e6, dt = (double)(until - from);
    gpu->duty += (1 - gpu->duty) * (1 - fade(dt / tau));
}

static void note_idle(sim_gpu *gpu, uint64_t dt) { gpu->duty *= fade((double)dt / 300e6); }

static double speed_of(const sim_gpu *gpu)
{
    double rest = (1 - gpu->duty) / 0.3;
    return 1 + (double)config()->boost_percent / 100 * (rest > 1 ? 1 : rest);
}

static int next_context(sim_gpu *gpu, int after)
{
    for (int i = 1; i <= CONTEXTS; i++) {
        int at = (after + i) % CONTEXTS;
        if (gpu->contexts[at].process >= 0 && has_work(&gpu->contexts[at]))
            return at;
    }
    return -1;
}

static void begin_turn(sim_gpu *gpu, int next)
{
    if (next != gpu->last) {
        int waited = gpu->contexts[next].waits;
        gpu->switch_left = waited ? config()->switch_ns : 0;
    }
    gpu->current = gpu->last = next;
    gpu->turn_left = config()->slice_ns;
    gpu->contexts[next].waits = 0;
}

/* A timed kernel begins, or has less left than it has computed. */
static void pass_time(const sim_gpu *gpu, sim_lane *lane, sim_item *item)
{
    if (!item->ends)
        return;
    if (item->ends == NOT_BEGUN)
        item->ends = gpu->now + item->left;
    uint64_t left = item->ends > gpu->now ? item->ends - gpu->now : 1;
    if (left < item->left) {
        lane->left -= item->left - left;
        item->left = left;
    }
}

/* How fast the first item of each lane goes on; whether one of them is a kernel. */
static int set_rates(const sim_gpu *gpu, sim_context *context, double rates[LANES])
{
    double speed = speed_of(gpu), free = 1;
    int kernels = 0, order[LANES];
    for (int i = 0; i < LANES; i++) {
        sim_lane *lane = &context->lanes[i];
        sim_item *item = head_of(lane);
        rates[i] = item && !is_kernel(item);
        if (!item || !is_kernel(item))
            continue;
        int at = kernels++;
        for (; at > 0 && context->lanes[order[at - 1]].ready_at > lane->ready_at; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    for (int i = 0; i < kernels && free > 1e-9; i++) {
        sim_lane *lane = &context->lanes[order[i]];
        sim_item *item = head_of(lane);
        pass_time(gpu, lane, item);
        double width = item->width / 1000.0, part = free < width ? free / width : 1;
        rates[order[i]] = item->ends ? 1 : speed * part;
        free -= width * part;
    }
    return kernels > 0;
}

/* Of one context, for at most so long; the time that it took. */
static uint64_t work(sim_gpu *gpu, sim_context *context, uint64_t most, note_fn *note_use)
{
    double rates[LANES];
    uint64_t dt = most;
    int computes = set_rates(gpu, context, rates);
    for (int i = 0; i < LANES; i++) {
        if (rates[i] == 0)
            continue;
        uint64_t needs = at_least((double)head_of(&context->lanes[i])->left / rates[i]);
        dt = needs < dt ? needs : dt;
    }
    for (int i = 0; i < LANES; i++) {
        sim_lane *lane = &context->lanes[i];
        sim_item *item = head_of(lane);
        if (rates[i] == 0)
            continue;
        uint64_t done = at_least((double)dt * rates[i]);
        done = done > item->left ? item->left : done;
        item->left -= done;
        lane->left -= done;
        if (item->left == 0) {
            if (item->event && context->events[item->event % EVENTS].record == item->record)
                context->events[item->event % EVENTS].done_at = gpu->now + dt;
            lane->head++;
            lane->ready_at = gpu->now + dt;
        }
    }
    if (computes)
        note_computing(gpu, context, gpu->now, gpu->now + dt, 0, note_use);
    else
        note_idle(gpu, dt);
    return dt;
}

static void take_samples(sim_gpu *gpu)
{
    while (config()->shows_whole && sim_sample_time(gpu->samples_taken) <= gpu->now) {
        int process = gpu->last >= 0 ? gpu->contexts[gpu->last].process : -1;
        gpu->samples[gpu->samples_taken % SAMPLES] =
            (sim_sample){.at = sim_sample_time(gpu->samples_taken), .busy = gpu->busy, .process = process};
        gpu->samples_taken++;
    }
}

void sim_advance(sim_gpu *gpu, uint64_t now, note_fn *note_use)
{
    if (!gpu->began) {
        gpu->began = gpu->now = now;
        gpu->current = gpu->last = -1;
        if (config()->shows_whole)
            gpu->samples_taken = now / config()->sample_every_ns;
    }
    for (take_samples(gpu); gpu->now < now; take_samples(gpu)) {
        uint64_t most = now - gpu->now, dt;
        if (config()->shows_whole && sim_sample_time(gpu->samples_taken) < now)
            most = sim_sample_time(gpu->samples_taken) - gpu->now;
        if (gpu->current < 0 || !has_work(&gpu->contexts[gpu->current])) {
            int next = next_context(gpu, gpu->current < 0 ? gpu->last : gpu->current);
            gpu->current = -1;
            if (next >= 0)
                begin_turn(gpu, next);
        }
        for (int i = 0; i < CONTEXTS; i++)
            if (i != gpu->current && gpu->contexts[i].process >= 0 && has_work(&gpu->contexts[i]))
                gpu->contexts[i].waits = 1;
        if (gpu->current < 0) {
            note_idle(gpu, most);
            gpu->now += most;
            continue;
        }
        sim_context *context = &gpu->contexts[gpu->current];
        if (gpu->switch_left) {
            dt = gpu->switch_left < most ? gpu->switch_left : most;
            note_computing(gpu, context, gpu->now, gpu->now + dt, 1, note_use);
            gpu->switch_left -= dt;
            gpu->now += dt;
            continue;
        }
        int other = next_context(gpu, gpu->current), is_contended = other >= 0 && other != gpu->current;
        if (is_contended && gpu->turn_left == 0) {
            context->waits = 1;
            begin_turn(gpu, other);
            continue;
        }
        dt = work(gpu, context, is_contended && gpu->turn_left < most ? gpu->turn_left : most, note_use);
        gpu->now += dt;
        gpu->turn_left = !is_contended ? config()->slice_ns : gpu->turn_left > dt ? gpu->turn_left - dt : 0;
    }
}

sim_context *sim_context_of(sim_gpu *gpu, int process, int pid, uint64_t now)
{
    for (sim_context *at = gpu->contexts; at < gpu->contexts + CONTEXTS; at++)
        if (at->pid == pid && at->process == process && at->is_used)
            return at;
    for (int reuses = 0; reuses < 2; reuses++)
        for (sim_context *at = gpu->contexts; at < gpu->contexts + CONTEXTS; at++) {
            if (at->is_used && !(reuses && at->process < 0))
                continue;
            *at = (sim_context){.is_used = 1};
            at->process = process;
            at->pid = pid;
            at->began = now - (gpu->began ? gpu->began : now);
            return at;
        }
    return NULL;
}

/* What has not run yet of a process that has ended never will. */
void sim_forget(sim_gpu *gpu, int process)
{
    for (sim_context *at = gpu->contexts; at < gpu->contexts + CONTEXTS; at++)
        if (at->is_used && at->process == process) {
            at->process = -1;
            for (sim_lane *lane = at->lanes; lane < at->lanes + LANES; lane++)
                lane->head = lane->tail, lane->left = 0;
            if (gpu->current >= 0 && at == &gpu->contexts[gpu->current])
                gpu->current = -1;
        }
}

int sim_push(sim_gpu *gpu, sim_lane *lane, sim_item item)
{
    if (lane->tail - lane->head >= LANE_ITEMS - 8)
        return 0;
    if (!head_of(lane))
        lane->ready_at = gpu->now;
    lane->items[lane->tail++ % LANE_ITEMS] = item;
    lane->left += item.left;
    return 1;
}
