/* A program of several GPUs that takes memory of one, or launches on it, while another one is current.
 *
 *   other_gpu KIND TARGET CURRENT [SECONDS]
 *
 * CURRENT: a GPU's ordinal, or -1: the thread has no context. KIND, of blocks of 128 MiB until one is refused:
 *
 *   alloc, managed, pitch, array, mipmapped    in TARGET's context, whatever CURRENT is
 *   async, chosen          cuMemAllocAsync in a stream of TARGET; its own pool, or one that was set as its current one
 *   pool, own              cuMemAllocFromPoolAsync in a stream of CURRENT, of a pool that was made there, or of TARGET's own
 *   managedpool, anywhere  of a managed pool that prefers TARGET; or no GPU, in a stream of TARGET
 *   vmm, mapped, domain    cuMemCreate; held, mapped alone, of a locality domain
 *   bound, bound2, bound3, address, address2, endpoint, place    bound alone, to an object or an endpoint: as memory or by its
 *                          address. It goes back when it is unbound, or with the object (bound2; bound3: another process's) or the
 *                          endpoint (place)
 *   sparse, sparse2        in tiles of a sparse array alone, until they are mapped no more, or until the array ends
 *   node, captured, uploaded    memory of a graph's node on TARGET, launched or uploaded in a stream of CURRENT
 *   stack, heap, fifo      limits of TARGET's context, which is current for the call
 *
 * It gives all back, waits for TARGET, and takes again. Other kinds:
 *
 *   destroy, detach, attached, reset, release, green, within    three times what fits in a context with a heap of a block more, which then ends
 *                          so; attached: a second user detaches first; green: a green context has it, too;
 *                          within: it is taken in that one, and the primary one is reset
 *   parts                  three times what fits next to a green context alone, by cuMemCreate
 *   contexts               twice as many contexts as fit
 *   ordered                blocks of a pool, each freed before the next one, which may not have its memory before a wait
 *   ended                  pools that are destroyed with 512 bytes in them, each as the current one of the GPU; again when these are freed,
 *                          and when the context was reset with them, which frees nothing
 *   kept                   pools that are to keep what they have, destroyed so, and freed; then waits
 *   poor                   a graph's node, of which the program has no memory to note anything
 *   kernel, graph, sync, multi    launches for so many SECONDS; sync: waited for each time, multi: cooperative on two GPUs
 *
 * Each step is a line of JSON; "mib": what NVML says of every GPU to a process that is not limited.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define BLOCK (128ull << 20)
enum { MOST = 1200, GPUS = 4 };
static CUcontext contexts[GPUS];
static CUstream streams[GPUS];
static CUdeviceptr taken[MOST];
static CUgraphExec graphs[MOST];
static CUmemoryPool pool;
static CUmemGenericAllocationHandle object;
static CUarray sparse;
static CUmulticastObjectProp multicast = {.numDevices = 1, .size = MOST * BLOCK};
static int target, current, count;
static size_t limit_at_first;

static int is_poor;
void *realloc(void *had, size_t size)
{
    static void *(*next)(void *, size_t);
    next = next ? next : (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
    return is_poor ? NULL : next(had, size);
}

static void make_current(int device) { cuCtxSetCurrent(device < 0 ? NULL : contexts[device]); }
static CUstream stream_of(int device) { return device < 0 ? streams[target] : streams[device]; }

static int is(const char *kind, const char *names)
{
    size_t length = strlen(kind);
    for (const char *at = names; (at = strstr(at, kind)) != NULL; at += length)
        if ((at == names || at[-1] == ' ') && (at[length] == ' ' || !at[length]))
            return 1;
    return 0;
}

static CUresult take_node(CUdeviceptr *address, CUgraphExec *graph, const char *kind)
{
    CUgraph from;
    CUgraphNode node;
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.bytesize = BLOCK};
    CUresult result;
    memory.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    memory.poolProps.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = target};
    if (strcmp(kind, "captured") == 0)
        (void)(cuStreamBeginCapture_v2(streams[target], CU_STREAM_CAPTURE_MODE_RELAXED) ||
               cuMemAllocAsync(address, BLOCK, streams[target]) || cuStreamEndCapture(streams[target], &from));
    else if (cuGraphCreate(&from, 0) || cuGraphAddMemAllocNode(&node, from, NULL, 0, &memory))
        return CUDA_ERROR_UNKNOWN;
    else
        *address = memory.dptr;
    is_poor = strcmp(kind, "poor") == 0;
    result = cuGraphInstantiateWithFlags(graph, from, 0);
    is_poor = 0;
    if (result)
        return result;
    result = strcmp(kind, "uploaded") == 0 ? cuGraphUpload(*graph, stream_of(current)) : CUDA_SUCCESS;
    return result ? result : cuGraphLaunch(*graph, stream_of(current));
}

static CUresult map_tile(int i, CUmemGenericAllocationHandle handle)
{
    CUarrayMapInfo tile = {.resourceType = CU_RESOURCE_TYPE_ARRAY,
                           .resource.array = sparse,
                           .subresource.sparseLevel.offsetX = (unsigned)i,
                           .memOperationType = handle ? CU_MEM_OPERATION_TYPE_MAP : CU_MEM_OPERATION_TYPE_UNMAP,
                           .memHandle.memHandle = handle};
    return (i % 2 ? cuMemMapArrayAsync_ptsz : cuMemMapArrayAsync)(&tile, 1, streams[target]);
}

static CUresult make_sparse(void)
{
    CUDA_ARRAY3D_DESCRIPTOR of = {
        .Width = 1 << 16, .Height = 1 << 10, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1, .Flags = CUDA_ARRAY3D_SPARSE};
    make_current(target);
    return cuArray3DCreate_v2(&sparse, &of);
}

static CUresult make_object(const char *kind)
{
    return is(kind, "bound3") ? cuMemImportFromShareableHandle(&object, (void *)(intptr_t)-1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
                              : cuMulticastCreate(&object, &multicast);
}

static CUresult take_mapped(CUdeviceptr *address, CUmemGenericAllocationHandle handle, const char *kind)
{
    CUresult result = CUDA_SUCCESS;
    size_t at = count * BLOCK;
    int is_mapped = is(kind, "mapped address address2 place");
    if (is_mapped && (cuMemAddressReserve(address, BLOCK, 0, 0, 0) || cuMemMap(*address, BLOCK, 0, handle, 0)))
        return CUDA_ERROR_UNKNOWN;
    if (is(kind, "bound bound2 bound3"))
        result = is(kind, "bound") ? cuMulticastBindMem(object, at, handle, 0, BLOCK, 0)
                                   : cuMulticastBindMem_v2(object, target, at, handle, 0, BLOCK, 0);
    if (is(kind, "address address2"))
        result = is(kind, "address") ? cuMulticastBindAddr(object, at, *address, BLOCK, 0)
                                     : cuMulticastBindAddr_v2(object, target, at, *address, BLOCK, 0);
    if (is(kind, "endpoint place"))
        result = is(kind, "endpoint") ? cuLogicalEndpointBindMem(1, target, at, handle, 0, BLOCK, 0)
                                      : cuLogicalEndpointBindAddr(1, target, at, (void *)(uintptr_t)*address, BLOCK, 0);
    if (is(kind, "sparse sparse2"))
        result = map_tile(count, handle);
    cuMemRelease(handle);
    if (is_mapped && !is(kind, "mapped"))
        cuMemUnmap(*address, BLOCK);
    return result;
}

static CUlimit limit_of(const char *kind)
{
    return strcmp(kind, "stack") == 0  ? CU_LIMIT_STACK_SIZE
           : strcmp(kind, "heap") == 0 ? CU_LIMIT_MALLOC_HEAP_SIZE
                                       : CU_LIMIT_PRINTF_FIFO_SIZE;
}
/* A stack of 512 bytes more is a block: 132 processors have 2,048 threads each.
 */
static size_t step_of(const char *kind) { return strcmp(kind, "stack") == 0 ? 512 : BLOCK; }

static CUresult take(const char *kind)
{
    enum { WIDTH = 1 << 16, ROWS = BLOCK / WIDTH / 4 };
    CUdeviceptr *address = &taken[count];
    size_t pitch;
    CUmemAllocationProp of = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                              .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = target}};
    CUDA_ARRAY_DESCRIPTOR flat = {.Width = WIDTH, .Height = ROWS, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    CUDA_ARRAY3D_DESCRIPTOR mips = {.Width = WIDTH, .Height = ROWS, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = of.location};
    if (is(kind, "alloc managed pitch array mipmapped stack heap fifo")) {
        make_current(target);
        CUresult result = strcmp(kind, "alloc") == 0     ? cuMemAlloc_v2(address, BLOCK)
                          : strcmp(kind, "managed") == 0 ? cuMemAllocManaged(address, BLOCK, CU_MEM_ATTACH_GLOBAL)
                          : strcmp(kind, "pitch") == 0   ? cuMemAllocPitch_v2(address, &pitch, 4 * WIDTH, ROWS, 4)
                          : strcmp(kind, "array") == 0   ? cuArrayCreate_v2((CUarray *)address, &flat)
                          : strcmp(kind, "mipmapped") == 0
                              ? cuMipmappedArrayCreate((CUmipmappedArray *)address, &mips, 1)
                              : cuCtxSetLimit(limit_of(kind), limit_at_first + (count + 1) * step_of(kind));
        make_current(current);
        return result;
    }
    if (is(kind, "async chosen"))
        return cuMemAllocAsync(address, BLOCK, streams[target]);
    if (is(kind, "pool own managedpool anywhere")) {
        CUstream stream = is(kind, "anywhere") ? streams[target] : stream_of(current);
        if (is(kind, "managedpool anywhere"))
            properties.allocType = CU_MEM_ALLOCATION_TYPE_MANAGED;
        if (is(kind, "anywhere"))
            properties.location.type = CU_MEM_LOCATION_TYPE_NONE;
        CUresult result = pool                       ? CUDA_SUCCESS
                          : strcmp(kind, "own") == 0 ? cuDeviceGetDefaultMemPool(&pool, target)
                                                     : cuMemPoolCreate(&pool, &properties);
        return result ? result : cuMemAllocFromPoolAsync(address, BLOCK, pool, stream);
    }
    if (is(kind, "vmm mapped sparse sparse2 domain bound bound2 bound3 address address2 endpoint place")) {
        CUmemGenericAllocationHandle handle;
        if (strcmp(kind, "domain") == 0) {
            of.location.type = CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN;
            of.location.localized.deviceId = (unsigned char)target;
            of.location.localized.localityDomainId = 1;
        }
        CUresult result = cuMemCreate(&handle, BLOCK, &of, 0);
        *address = handle;
        return result || is(kind, "vmm domain") ? result : take_mapped(address, handle, kind);
    }
    return take_node(address, &graphs[count], kind);
}

static void give(const char *kind, int i)
{
    if (is(kind, "async chosen managedpool anywhere"))
        cuMemFreeAsync(taken[i], stream_of(current));
    else if (is(kind, "array"))
        cuArrayDestroy((CUarray)taken[i]);
    else if (is(kind, "mipmapped"))
        cuMipmappedArrayDestroy((CUmipmappedArray)taken[i]);
    else if (is(kind, "vmm domain"))
        cuMemRelease(taken[i]);
    else if (is(kind, "mapped"))
        cuMemUnmap(taken[i], BLOCK);
    else if (is(kind, "endpoint"))
        cuLogicalEndpointUnbind(1, target, i * BLOCK, BLOCK);
    else if (is(kind, "bound address address2"))
        cuMulticastUnbind(object, target, i * BLOCK, BLOCK);
    else if (is(kind, "sparse"))
        map_tile(i, 0);
    else if (i == 0 && is(kind, "sparse2"))
        (void)(cuArrayDestroy(sparse) || make_sparse());
    else if (i == 0 && is(kind, "place"))
        cuLogicalEndpointDestroy(1);
    else if (i == 0 && is(kind, "bound2 bound3"))
        (void)(cuMemRelease(object) || make_object(kind));
    else if (is(kind, "place bound2 bound3 sparse2"))
        ;
    else if (is(kind, "stack heap fifo")) {
        make_current(target);
        cuCtxSetLimit(limit_of(kind), limit_at_first);
        make_current(current);
    } else {
        cuMemFree_v2(taken[i]);
        if (is(kind, "node captured uploaded poor"))
            cuGraphExecDestroy(graphs[i]);
    }
}

/* By a process that nothing is preloaded into. */
static void say(const char *program, const char *step, CUresult result)
{
    char line[4200];
    snprintf(line, sizeof line, "unset LD_PRELOAD; '%s' nvml %s %d %d", program, step, count, (int)result);
    fflush(stdout);
    if (system(line))
        exit(3);
}

static int say_nvml(char **words)
{
    struct {
        unsigned long long total, free, used;
    } memory;
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device;
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*find)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*ask)(void *, void *) = (int (*)(void *, void *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    printf("{\"action\": \"%s\", \"blocks\": %s, \"result\": %s, \"mib\": [", words[2], words[3], words[4]);
    init();
    for (unsigned i = 0; find(i, &device) == 0 && ask(device, &memory) == 0; i++)
        printf("%s%llu", i ? ", " : "", memory.used >> 20);
    printf("]}\n");
    return 0;
}

static int end_contexts(const char *program, const char *way)
{
    CUcontext context, same;
    CUgreenCtx green = NULL;
    CUresult result = CUDA_SUCCESS;
    for (int round = 0; round < 3; round++) {
        size_t heap;
        if (is(way, "green within") && cuGreenCtxCreate(&green, NULL, target, 0))
            return 3;
        if (is(way, "destroy detach attached") ? cuCtxCreate_v2(&context, 0, target) : cuDevicePrimaryCtxRetain(&context, target))
            return 4;
        if (is(way, "within") && cuCtxFromGreenCtx(&context, green))
            return 4;
        cuCtxSetCurrent(context);
        if (cuCtxGetLimit(&heap, CU_LIMIT_MALLOC_HEAP_SIZE) || cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, heap + BLOCK))
            return 5;
        for (count = 0; count < MOST && (result = cuMemAlloc_v2(&taken[count], BLOCK)) == CUDA_SUCCESS; count++)
            ;
        say(program, "take", result);
        if (is(way, "attached") &&
            (cuCtxAttach(&same, 0) || cuCtxDetach(same) || cuMemAlloc_v2(&taken[0], BLOCK) != CUDA_ERROR_OUT_OF_MEMORY))
            return 6;
        result = is(way, "destroy")           ? cuCtxDestroy_v2(context)
                 : is(way, "detach attached") ? cuCtxDetach(context)
                 : is(way, "reset within")    ? cuDevicePrimaryCtxReset_v2(target)
                                              : cuDevicePrimaryCtxRelease_v2(target);
        if (result == CUDA_SUCCESS && is(way, "green within"))
            result = cuGreenCtxDestroy(green);
        say(program, "give", result);
    }
    return 0;
}

static int make_green_contexts(const char *program)
{
    for (int round = 0; round < 3; round++) {
        CUgreenCtx green = NULL;
        CUresult result = cuGreenCtxCreate(&green, NULL, target, 0);
        for (count = 0; result == CUDA_SUCCESS && (result = take("vmm")) == CUDA_SUCCESS; count++)
            ;
        say(program, "take", result);
        for (int i = 0; i < count; i++)
            give("vmm", i);
        say(program, "give", cuGreenCtxDestroy(green));
    }
    return 0;
}

static int make_contexts(const char *program)
{
    for (int round = 0; round < 2; round++) {
        CUcontext made[MOST];
        CUresult result = CUDA_SUCCESS;
        for (count = 0; count < MOST && (result = cuCtxCreate_v2(&made[count], 0, target)) == CUDA_SUCCESS; count++)
            cuCtxPopCurrent_v2(NULL);
        say(program, "take", result);
        for (int i = 0; i < count; i++)
            result = cuCtxDestroy_v2(made[i]);
        say(program, "give", result);
    }
    return 0;
}

/* Until one is refused. */
static int take_of_pools(const char *program, const char *kind)
{
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = target}};
    CUresult result = cuDevicePrimaryCtxRetain(&contexts[0], target);
    int is_allowed = 0, ends = !is(kind, "ordered");
    cuuint64_t threshold = is(kind, "kept") ? 1ull << 40 : 0;
    cuCtxSetCurrent(contexts[0]);
    if (is(kind, "ordered") && (cuMemPoolCreate(&pool, &properties) ||
                                cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &is_allowed)))
        return 3;
    for (int round = 0; round < (is(kind, "ended") ? 3 : 1); round++) {
        if (round == 2)
            cuDevicePrimaryCtxReset_v2(target), cuDevicePrimaryCtxRetain(&contexts[0], target), cuCtxSetCurrent(contexts[0]);
        result = CUDA_SUCCESS;
        for (count = 0; count < MOST && result == CUDA_SUCCESS; count += result == CUDA_SUCCESS) {
            CUmemoryPool now;
            CUdeviceptr unused;
            if (ends && (cuMemPoolCreate(&pool, &properties) || cuDeviceSetMemPool(target, pool) ||
                         cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold)))
                return 3;
            result = cuMemAllocFromPoolAsync(&taken[count], ends ? 512 : BLOCK, pool, NULL);
            if (result == CUDA_SUCCESS && is(kind, "ordered"))
                cuMemFreeAsync(taken[count], NULL);
            if (ends && (cuMemPoolDestroy(pool) || cuDeviceGetMemPool(&now, target) || now == pool))
                return 4;
            if (ends && result == CUDA_SUCCESS && cuMemAllocFromPoolAsync(&unused, 512, pool, NULL) != CUDA_ERROR_INVALID_VALUE)
                return 5;
        }
        say(program, "take", result);
        for (int i = 0; i < count && ends && round == 0; i++)
            cuMemFreeAsync(taken[i], NULL);
    }
    if (is(kind, "kept")) {
        result = cuCtxSynchronize();
        say(program, "give", result);
    }
    return 0;
}

static int launch(const char *kind, double seconds)
{
    struct timespec now;
    CUmodule module;
    CUfunction function;
    CUgraph from;
    CUgraphNode node;
    CUgraphExec graph;
    CUDA_LAUNCH_PARAMS all[GPUS];
    unsigned long launches = 0;
    CUresult result = CUDA_SUCCESS;
    make_current(target);
    if (cuModuleLoadData(&module, "") || cuModuleGetFunction(&function, module, "kernel"))
        return 3;
    CUDA_KERNEL_NODE_PARAMS kernel = {
        .func = function, .gridDimX = 1056, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 256, .blockDimY = 1, .blockDimZ = 1};
    for (int i = 0; i < GPUS; i++)
        all[i] = (CUDA_LAUNCH_PARAMS){function, 1056, 1, 1, 256, 1, 1, 0, streams[i], NULL};
    if (cuGraphCreate(&from, 0) || cuGraphAddKernelNode_v2(&node, from, NULL, 0, &kernel) ||
        cuGraphInstantiateWithFlags(&graph, from, 0))
        return 3;
    make_current(current);
    clock_gettime(CLOCK_MONOTONIC, &now);
    double began = (double)now.tv_sec + (double)now.tv_nsec / 1e9, at = began;
    for (; at < began + seconds && result == CUDA_SUCCESS; launches++) {
        if (strcmp(kind, "multi") == 0)
            result = cuLaunchCooperativeKernelMultiDevice(all, 2, 0);
        else if (strcmp(kind, "graph") == 0)
            result = cuGraphLaunch(graph, streams[target]);
        else
            result = cuLaunchKernel(function, 1056, 1, 1, 256, 1, 1, 0, streams[target], NULL, NULL);
        if (strcmp(kind, "sync") == 0)
            cuStreamSynchronize(streams[target]);
        clock_gettime(CLOCK_MONOTONIC, &now);
        at = (double)now.tv_sec + (double)now.tv_nsec / 1e9;
    }
    printf("{\"action\": \"launch\", \"rate\": %.1f, \"result\": %d}\n", (double)launches / (at - began), (int)result);
    return 0;
}

int main(int words, char **word)
{
    CUresult result;
    if (words > 4 && strcmp(word[1], "nvml") == 0)
        return say_nvml(word);
    if (words < 4 || cuInit(0))
        return 2;
    target = atoi(word[2]);
    current = atoi(word[3]);
    if (is(word[1], "destroy detach attached reset release green within"))
        return end_contexts(word[0], word[1]);
    if (is(word[1], "parts"))
        return make_green_contexts(word[0]);
    if (is(word[1], "ordered ended kept"))
        return take_of_pools(word[0], word[1]);
    if (is(word[1], "contexts"))
        return make_contexts(word[0]);
    for (int i = 0; i < GPUS && cuDevicePrimaryCtxRetain(&contexts[i], i) == CUDA_SUCCESS; i++) {
        cuCtxSetCurrent(contexts[i]);
        cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING);
    }
    if (words > 4)
        return launch(word[1], atof(word[4]));
    if (strcmp(word[1], "chosen") == 0) {
        CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = target}};
        if (cuMemPoolCreate(&pool, &properties) || cuDeviceSetMemPool(target, pool))
            return 3;
    }
    if (is(word[1], "sparse sparse2") && make_sparse())
        return 3;
    if (is(word[1], "bound bound2 bound3 address address2") && make_object(word[1]))
        return 3;
    make_current(target);
    if (is(word[1], "stack heap fifo"))
        cuCtxGetLimit(&limit_at_first, limit_of(word[1]));
    make_current(current);
    for (int round = 0; round < 2; round++) {
        for (count = 0; count < MOST && (result = take(word[1])) == CUDA_SUCCESS; count++)
            ;
        say(word[0], "take", result);
        for (int i = 0; i < count; i++)
            give(word[1], i);
        make_current(target);
        result = cuCtxSynchronize();
        if (is(word[1], "node captured uploaded poor"))
            result = cuDeviceGraphMemTrim(target);
        size_t free_bytes = 0, total;
        cuMemGetInfo_v2(&free_bytes, &total);
        count = (int)(free_bytes >> 20);
        say(word[0], "give", result);
        make_current(current);
    }
    return 0;
}
