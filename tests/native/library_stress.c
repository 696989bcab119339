/* Threads of one program that take, give and launch at the same time, through libgpushare; linked to the driver.
 *
 *   library_stress THREADS ROUNDS
 *
 * Prints what is free at the beginning and at the end, when all was given back, and how many allocations were refused.
 */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_THREADS = 64, KINDS = 8, GRAPH = 6, ENDED = 7, PLACES = 6, LARGEST = 8 << 20, PAGE = 2 << 20 };
static CUcontext context;
static CUmemoryPool pool, own;
static const CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static int rounds, failed, refused;

/* Launched once; its memory is freed within it. */
static CUresult take_graph(unsigned bytes, uint64_t *value)
{
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                       .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
                                         .bytesize = bytes};
    CUgraph graph = NULL;
    CUgraphNode node;
    CUgraphExec executable = NULL;
    CUresult result = cuGraphCreate(&graph, 0);
    result = result ? result : cuGraphAddMemAllocNode(&node, graph, NULL, 0, &memory);
    result = result ? result : cuGraphAddMemFreeNode(&node, graph, NULL, 0, memory.dptr);
    result = result ? result : cuGraphInstantiateWithFlags(&executable, graph, 0);
    cuGraphDestroy(graph);
    result = result ? result : cuGraphLaunch(executable, NULL);
    if (result != CUDA_SUCCESS && executable)
        cuGraphExecDestroy(executable);
    *value = (uintptr_t)executable;
    return result;
}

/* Of a pool that is destroyed at once. */
static CUresult take_ended(unsigned bytes, uint64_t *value)
{
    CUmemoryPool ended;
    CUresult result = cuMemPoolCreate(&ended, &properties);
    result = result ? result : cuMemAllocFromPoolAsync((CUdeviceptr *)value, bytes, ended, NULL);
    return cuMemPoolDestroy(ended) ? CUDA_ERROR_UNKNOWN : result;
}

static CUresult take(int kind, unsigned bytes, uint64_t *value)
{
    CUmemAllocationProp on_gpu = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUDA_ARRAY_DESCRIPTOR flat = {.Width = bytes / 4, .Height = 1, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    size_t pitch;
    switch (kind) {
    case 0: return cuMemAlloc_v2((CUdeviceptr *)value, bytes);
    case 1: return cuMemAllocAsync((CUdeviceptr *)value, bytes, NULL);
    case 2: return cuMemAllocFromPoolAsync((CUdeviceptr *)value, bytes, pool, NULL);
    case 3: return cuMemCreate((CUmemGenericAllocationHandle *)value, (bytes + PAGE - 1) / PAGE * PAGE, &on_gpu, 0);
    case 4: return cuArrayCreate_v2((CUarray *)value, &flat);
    case GRAPH: return take_graph(bytes, value);
    case ENDED: return take_ended(bytes, value);
    default: return cuMemAllocPitch_v2((CUdeviceptr *)value, &pitch, 1000, bytes / 1000 + 1, 4);
    }
}

static CUresult give(int kind, uint64_t value)
{
    switch (kind) {
    case 1:
    case 2:
    case ENDED: return cuMemFreeAsync(value, NULL);
    case 3: return cuMemRelease(value);
    case 4: return cuArrayDestroy((CUarray)(uintptr_t)value);
    case GRAPH: return cuGraphExecDestroy((CUgraphExec)(uintptr_t)value);
    default: return cuMemFree_v2(value);
    }
}

static void note(CUresult result)
{
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        __atomic_fetch_add(&refused, 1, __ATOMIC_RELAXED);
    else if (result != CUDA_SUCCESS)
        __atomic_fetch_add(&failed, 1, __ATOMIC_RELAXED);
}

static void *work(void *seed)
{
    unsigned state = (unsigned)(uintptr_t)seed;
    uint64_t kept[PLACES] = {0};
    int kinds[PLACES] = {0};
    size_t free_bytes, total;
    cuCtxSetCurrent(context);
    for (int i = 0; i < rounds; i++) {
        int place = rand_r(&state) % PLACES;
        if (kept[place] && kinds[place] == GRAPH && i % 2) {
            note(cuGraphLaunch((CUgraphExec)(uintptr_t)kept[place], NULL));
        } else if (kept[place]) {
            note(give(kinds[place], kept[place]));
            kept[place] = 0;
        } else {
            kinds[place] = rand_r(&state) % KINDS;
            CUresult result = take(kinds[place], 4096 + rand_r(&state) % LARGEST, &kept[place]);
            note(result);
            kept[place] = result == CUDA_SUCCESS ? kept[place] : 0;
        }
        if (i % 4 == 0)
            note(cuLaunchKernel((CUfunction)(uintptr_t)(8 * (1 + i % 5)), 1 + i % 3, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
        if (i % 64 == 0)
            note(cuDeviceGraphMemTrim(0)), note(cuMemPoolTrimTo(pool, 0));
        if (i % 16 == 0 && (cuMemGetInfo_v2(&free_bytes, &total) != CUDA_SUCCESS || free_bytes > total))
            note(CUDA_ERROR_UNKNOWN);
    }
    for (int place = 0; place < PLACES; place++)
        if (kept[place])
            note(give(kinds[place], kept[place]));
    return NULL;
}

int main(int count, char **words)
{
    pthread_t threads[MOST_THREADS];
    size_t before = 0, after = 0, total;
    int wanted = count == 3 ? atoi(words[1]) : 0;
    if (wanted < 1 || wanted > MOST_THREADS || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) ||
        cuMemPoolCreate(&pool, &properties) || cuDeviceGetDefaultMemPool(&own, 0) || cuMemGetInfo_v2(&before, &total))
        return 2;
    rounds = atoi(words[2]);
    for (int i = 0; i < wanted; i++)
        pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < wanted; i++)
        pthread_join(threads[i], NULL);
    cuDeviceGraphMemTrim(0);
    cuMemPoolTrimTo(pool, 0);
    cuMemPoolTrimTo(own, 0); /* a pool gives back what was freed at the next wait, or when it is trimmed */
    cuCtxSynchronize(); /* so are those that are destroyed */
    cuMemGetInfo_v2(&after, &total);
    printf("{\"before\": %zu, \"after\": %zu, \"refused\": %d, \"failed\": %d}\n", before, after, refused, failed);
    return 0;
}
