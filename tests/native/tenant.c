/* A program that uses a GPU of the fake driver in a certain way, phase after phase: for tests of shares.
 *
 *   tenant PHASE...      each SECONDS[,NAME=NUMBER...], or sleep=SECONDS; start=SECONDS as the first word: it begins to use the driver
 *                        so much later
 *
 *   us          1000     how long a kernel takes; several by +: one after the other
 *   times       1        how often each length of `us` is launched in a row, by + too
 *   random      0        not 0: which length is next is drawn by lot, with this seed; `times` says how likely each is
 *   keys        1        1: kernels of different lengths are different launches to a limit; 0: all look alike
 *   kinds       0        1: no launch looks like another one before it
 *   streams     1        used in turn, at most 32
 *   wait        0        waits for the GPU after so many launches; 0: at the end of the phase alone
 *   host        0        microseconds that the host computes before each launch
 *   rest        0        and after each time that it has waited
 *   graph       0        not 0: each launch is a graph of so many such kernels
 *   update      0        1: one graph, which is updated before each launch
 *   blocks      16384    fewer than the GPU has places for: kernels of several streams fit next to each other
 *   set         0        MiB of memory that are set after the last length of `us`
 *   timed       0        1: kernels of one block that wait for their time to pass
 *   period      0        not 0: launches begin so many microseconds apart, at least
 *   events      0        1: two events around each launch, in the `streams`, and what they say of it: all of these are waited for together
 *
 * One line of JSON for each phase, with the times of CLOCK_MONOTONIC. `waited_s` is from launches to the ends of waiting for them. It is
 * linked to the driver.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 16, BLOCK = 256, MOST_STREAMS = 32, MOST_SAMPLES = 16384 };

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void sleep_s(double seconds)
{
    clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)}, NULL);
}

static double number(const char *words, const char *name, double fallback)
{
    char wanted[32];
    snprintf(wanted, sizeof wanted, ",%s=", name);
    const char *at = strstr(words, wanted);
    return at ? atof(at + strlen(wanted)) : fallback;
}

/* Several by +; how many there are. */
static unsigned numbers(const char *words, const char *name, double found[MOST])
{
    char wanted[32];
    unsigned count = 0;
    snprintf(wanted, sizeof wanted, ",%s=", name);
    const char *at = strstr(words, wanted);
    for (at = at ? at + strlen(wanted) : NULL; at && count < MOST;) {
        found[count++] = atof(at);
        const char *plus = strchr(at, '+'), *comma = strchr(at, ',');
        at = plus && (!comma || plus < comma) ? plus + 1 : NULL;
    }
    return count;
}

static CUstream streams[MOST_STREAMS];
static CUfunction spin, timed;
static unsigned long all_launches;
static double samples[MOST_SAMPLES];

static int ascending(const void *one, const void *other)
{
    double difference = *(const double *)one - *(const double *)other;
    return difference < 0 ? -1 : difference > 0;
}

/* What two events say of launches in some streams, until a time; how many there were. */
static long run_events(unsigned long long ns, unsigned blocks, unsigned count, double until_s)
{
    CUevent before[MOST_STREAMS], after[MOST_STREAMS];
    void *parameters[] = {&ns};
    long done = 0;
    for (unsigned i = 0; i < count; i++)
        if (cuEventCreate(&before[i], 0) || cuEventCreate(&after[i], 0))
            return 0;
    while (now_s() < until_s && done + count <= MOST_SAMPLES) {
        for (unsigned i = 0; i < count; i++)
            if (cuEventRecord(before[i], streams[i]) || cuLaunchKernel(spin, blocks, 1, 1, BLOCK, 1, 1, 0, streams[i], parameters, NULL) ||
                cuEventRecord(after[i], streams[i]))
                return 0;
        cuCtxSynchronize();
        for (unsigned i = 0; i < count; i++) {
            float ms;
            if (cuEventElapsedTime(&ms, before[i], after[i]))
                return 0;
            samples[done++] = ms * 1e3;
        }
    }
    qsort(samples, (size_t)done, sizeof *samples, ascending);
    return done;
}

/* The length of a launch: in turn, or by lot. */
static unsigned index_of(unsigned long launch, unsigned lengths, const unsigned long times[MOST], unsigned long seed)
{
    unsigned long sum = 0, at = launch;
    for (unsigned i = 0; i < lengths; i++)
        sum += times[i];
    if (seed) {
        at = (launch + 1) * 0x9e3779b97f4a7c15ul + seed * 0xbf58476d1ce4e5b9ul;
        at = (at ^ at >> 30) * 0xbf58476d1ce4e5b9ul;
        at = (at ^ at >> 27) * 0x94d049bb133111ebul;
        at ^= at >> 31;
    }
    at %= sum;
    for (unsigned i = 0; i < lengths; i++) {
        if (at < times[i])
            return i;
        at -= times[i];
    }
    return 0;
}

static int run(const char *phase)
{
    CUfunction function = number(phase, "timed", 0) ? timed : spin;
    double seconds = atof(phase), host_s = number(phase, "host", 0) * 1e-6, rest_s = number(phase, "rest", 0) * 1e-6;
    unsigned stream_count = (unsigned)number(phase, "streams", 1), wait = (unsigned)number(phase, "wait", 0);
    unsigned blocks = (unsigned)number(phase, "blocks", 16384), in_graph = (unsigned)number(phase, "graph", 0);
    unsigned has_keys = (unsigned)number(phase, "keys", 1), set_mib = (unsigned)number(phase, "set", 0);
    unsigned has_kinds = (unsigned)number(phase, "kinds", 0), updates = (unsigned)number(phase, "update", 0);
    double period_s = number(phase, "period", 0) * 1e-6, waited_s = 0, launched_s = 0;
    unsigned long long ns[MOST];
    unsigned long times[MOST], seed = (unsigned long)number(phase, "random", 0);
    double us[MOST], given_times[MOST];
    unsigned lengths = numbers(phase, "us", us), given = numbers(phase, "times", given_times);
    if (!lengths)
        us[lengths++] = 1000;
    for (unsigned i = 0; i < lengths; i++) {
        ns[i] = (unsigned long long)(us[i] * 1000);
        times[i] = i < given ? (unsigned long)given_times[i] : 1;
    }
    CUgraph sources[MOST] = {0};
    CUgraphExec graphs[MOST] = {0};
    for (unsigned i = 0; i < lengths && in_graph; i++) {
        CUgraph graph;
        CUgraphNode node;
        void *parameters[] = {&ns[i]};
        cuGraphCreate(&graph, 0);
        CUDA_KERNEL_NODE_PARAMS kernel = {.func = function, .gridDimX = blocks, .gridDimY = 1, .gridDimZ = 1, .blockDimX = BLOCK,
                                          .blockDimY = 1, .blockDimZ = 1, .kernelParams = parameters};
        for (unsigned k = 0; k < in_graph; k++)
            cuGraphAddKernelNode_v2(&node, graph, NULL, 0, &kernel);
        cuGraphInstantiateWithFlags(&graphs[i], graph, 0);
        sources[i] = graph;
    }
    long launches = 0;
    int result = 0;
    double began = now_s(), next_s = began;
    if (number(phase, "events", 0)) {
        launches = run_events(ns[0], blocks, stream_count, began + seconds);
        result = !launches;
        seconds = 0;
    }
    while (result == 0 && now_s() - began < seconds) {
        unsigned i = index_of((unsigned long)launches, lengths, times, seed);
        unsigned grid = blocks + (has_kinds ? (unsigned)all_launches++ : 0);
        void *parameters[] = {&ns[i]};
        launched_s = wait && launches % wait == 0 ? now_s() : launched_s;
        CUstream stream = stream_count > 1 ? streams[launches % stream_count] : NULL;
        if (host_s > 0)
            sleep_s(host_s);
        if (in_graph && updates) {
            CUgraphExecUpdateResultInfo why;
            cuGraphExecUpdate_v2(graphs[0], sources[i], &why);
        }
        result = in_graph ? (int)cuGraphLaunch(graphs[updates ? 0 : i], stream)
                          : (int)cuLaunchKernel(function, grid, 1, 1, BLOCK + (has_keys ? i : 0), 1, 1, 0, stream, parameters, NULL);
        launches++;
        if (i + 1 == lengths && set_mib && result == 0)
            result = (int)cuMemsetD32Async(0, 0, (size_t)set_mib << 18, stream);
        if (result == 0 && wait && launches % wait == 0) {
            result = (int)cuCtxSynchronize();
            waited_s += now_s() - launched_s;
            if (rest_s > 0)
                sleep_s(rest_s);
        }
        next_s += period_s;
        double left_s = period_s > 0 ? next_s - now_s() : 0;
        if (left_s > 0)
            sleep_s(left_s);
    }
    double launched = now_s();
    if (result == 0)
        result = (int)cuCtxSynchronize();
    printf("{\"action\": \"phase\", \"launches\": %ld, \"began\": %.6f, \"launched\": %.6f, \"ended\": %.6f, \"waited_s\": %.6f, "
           "\"median_us\": %.3f, \"p90_us\": %.3f, \"result\": %d}\n",
           launches, began, launched, now_s(), waited_s, samples[launches / 2 % MOST_SAMPLES], samples[launches * 9 / 10 % MOST_SAMPLES],
           result);
    return result;
}

int main(int count, char **words)
{
    CUdevice device;
    CUcontext context;
    CUmodule module;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int first = count > 1 && strncmp(words[1], "start=", 6) == 0 ? 2 : 1;
    if (first == 2)
        sleep_s(atof(words[1] + 6));
    if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context) ||
        cuModuleLoadData(&module, "") || cuModuleGetFunction(&spin, module, "spin") ||
        cuModuleGetFunction(&timed, module, "timed"))
        return 11;
    for (int i = 0; i < MOST_STREAMS; i++)
        cuStreamCreate(&streams[i], 0);
    for (int i = first; i < count; i++) {
        if (strncmp(words[i], "sleep=", 6) == 0)
            sleep_s(atof(words[i] + 6));
        else if (run(words[i]))
            return 12;
    }
    return 0;
}
