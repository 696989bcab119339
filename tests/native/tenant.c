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
 *   blocks      16384    fewer than the GPU has places for: kernels of several streams fit beside each other
 *   set         0        MiB of memory that are set after the last length of `us`
 *
 * One line of JSON for each phase, with the times of CLOCK_MONOTONIC. It is linked to the driver.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 16, BLOCK = 256, MOST_STREAMS = 32 };

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
static unsigned long all_launches;

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

static int run(const char *phase, CUfunction function)
{
    double seconds = atof(phase), host_s = number(phase, "host", 0) * 1e-6, rest_s = number(phase, "rest", 0) * 1e-6;
    unsigned stream_count = (unsigned)number(phase, "streams", 1), wait = (unsigned)number(phase, "wait", 0);
    unsigned blocks = (unsigned)number(phase, "blocks", 16384), in_graph = (unsigned)number(phase, "graph", 0);
    unsigned has_keys = (unsigned)number(phase, "keys", 1), set_mib = (unsigned)number(phase, "set", 0);
    unsigned has_kinds = (unsigned)number(phase, "kinds", 0), updates = (unsigned)number(phase, "update", 0);
    unsigned long long ns[MOST];
    unsigned long times[MOST], seed = (unsigned long)number(phase, "random", 0);
    double us[MOST], given_times[MOST];
    unsigned lengths = numbers(phase, "us", us), timed = numbers(phase, "times", given_times);
    if (!lengths)
        us[lengths++] = 1000;
    for (unsigned i = 0; i < lengths; i++) {
        ns[i] = (unsigned long long)(us[i] * 1000);
        times[i] = i < timed ? (unsigned long)given_times[i] : 1;
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
    double began = now_s();
    while (result == 0 && now_s() - began < seconds) {
        unsigned i = index_of((unsigned long)launches, lengths, times, seed);
        unsigned grid = blocks + (has_kinds ? (unsigned)all_launches++ : 0);
        void *parameters[] = {&ns[i]};
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
            if (rest_s > 0)
                sleep_s(rest_s);
        }
    }
    double launched = now_s();
    if (result == 0)
        result = (int)cuCtxSynchronize();
    printf("{\"action\": \"phase\", \"launches\": %ld, \"began\": %.6f, \"launched\": %.6f, \"ended\": %.6f, \"result\": %d}\n", launches,
           began, launched, now_s(), result);
    return result;
}

int main(int count, char **words)
{
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int first = count > 1 && strncmp(words[1], "start=", 6) == 0 ? 2 : 1;
    if (first == 2)
        sleep_s(atof(words[1] + 6));
    if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context) ||
        cuModuleLoadData(&module, "") || cuModuleGetFunction(&function, module, "spin"))
        return 11;
    for (int i = 0; i < MOST_STREAMS; i++)
        cuStreamCreate(&streams[i], 0);
    for (int i = first; i < count; i++) {
        if (strncmp(words[i], "sleep=", 6) == 0)
            sleep_s(atof(words[i] + 6));
        else if (run(words[i], function))
            return 12;
    }
    return 0;
}
