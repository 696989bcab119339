/* A CUDA program for the isolation tests: asks for the driver's functions in one of the ways in which real programs do, and then does
 * what its arguments say.
 *
 *   gpu_program WAY VERSION ACTION...
 *
 * WAY: `link` (linked to libcuda.so.1, calls its symbols), `dlsym`, `next` (dlsym of RTLD_NEXT), `deepbind` (dlopen with
 * RTLD_DEEPBIND), `cuGetProcAddress` (as CUDA 11's runtime), `cuGetProcAddress_v2` (as CUDA 12's and 13's). VERSION is what the latter two ask for, 12080 for CUDA 12.8. `link` needs -DLINKED and -lcuda.
 *
 *   gpu:INDEX                 goes on with another GPU; a program begins with 0
 *   version                   calls cuDriverGetVersion once more
 *   info                      what cuMemGetInfo and cuDeviceTotalMem say
 *   infonull                  calls cuMemGetInfo without a place for one answer, for the other, for both
 *   nvml                      what NVML says of GPU 0: its memory, and how many processes
 *   alloc:KIND:MIB:COUNT      takes memory, COUNT times MIB or until it is refused; KIND: alloc, managed, pitch, async, pool, vmm,
 *                             array, array3d, mipmapped, mapped (virtual memory whose handle is released while it is mapped), graphmem
 *                             (of a graph's node), host, ipc (what another process has), other (in a stream of GPU 1, whatever is current)
 *                             MIB may be a number of bytes: 513b
 *   modules:COUNT             loads so many
 *   export:MIB, import:NUMBER   virtual memory for another process, and that of another one, which has that number
 *   at:TYPE:ID[:ALLOCATION]   a CUmemLocationType, its ID and a CUmemAllocationType: where vmm, mapped and pool, a new one, take from then on
 *   churn:COUNT               takes COUNT blocks of all kinds that are given back, some of them at a time, and keeps some at the end
 *   free                      gives all of it back
 *   graph:MIB:COUNT[:child…]  makes an executable graph that takes and frees MIB COUNT times, one after the other; within a child,
 *                             or within a child of a child
 *   upload, replay, destroy:INDEX   uploads, launches, ends one of these graphs, the first made being 0
 *   uploaded:MIB              as graph:MIB:1, uploaded as it is instantiated
 *   limit:NUMBER:MIB          cuCtxSetLimit; 2 is the heap of the GPU's malloc
 *   sync                      waits for the GPU
 *   trim                      gives back what graphs do not use
 *   launch:KIND:SECONDS[:GRID]   launches one after the other, with GRID blocks of 256 threads (16384); KIND: kernel, ex, cooperative,
 *                             graph, captured (ten kernels each), sync (a kernel, waited for before the next one)
 *   speed:COUNT               what a call takes, on average: of cuMemAlloc and cuMemFree of 2 MiB, and of a launch, in microseconds
 *   sleep:SECONDS
 *   fork                      the child goes on as a new program, its parent ends after it
 *   kill                      SIGKILL to itself
 *   wait                      until a line comes on standard input, or its end
 *   exit                      ends without giving anything back
 *
 * Each step writes one line of JSON to standard output. "result" is the driver's CUresult; -2: the function was not found. The exit code
 * is 0 where cuInit and the context worked.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL /* functions under their own names */
#include <cuda.h>
#include <cudaTypedefs.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { NOT_FOUND = -2, MOST_KEPT = 1 << 16, GRAPH_KERNELS = 10, BLOCK = 256 };

/* name as cuGetProcAddress takes it, symbol, type */
#define FUNCTIONS(F)                                                                                                            \
    F(cuInit, cuInit, PFN_cuInit_v2000)                                                                                         \
    F(cuDriverGetVersion, cuDriverGetVersion, PFN_cuDriverGetVersion_v2020)                                                     \
    F(cuDeviceGetCount, cuDeviceGetCount, PFN_cuDeviceGetCount_v2000)                                                           \
    F(cuDeviceGet, cuDeviceGet, PFN_cuDeviceGet_v2000)                                                                          \
    F(cuDeviceTotalMem, cuDeviceTotalMem_v2, PFN_cuDeviceTotalMem_v3020)                                                        \
    F(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, PFN_cuDevicePrimaryCtxRetain_v7000)                                   \
    F(cuCtxSetCurrent, cuCtxSetCurrent, PFN_cuCtxSetCurrent_v4000)                                                              \
    F(cuCtxSetLimit, cuCtxSetLimit, PFN_cuCtxSetLimit_v3010)                                                                    \
    F(cuCtxSynchronize, cuCtxSynchronize, PFN_cuCtxSynchronize_v2000)                                                           \
    F(cuMemGetInfo, cuMemGetInfo_v2, PFN_cuMemGetInfo_v3020)                                                                    \
    F(cuMemAlloc, cuMemAlloc_v2, PFN_cuMemAlloc_v3020)                                                                          \
    F(cuMemFree, cuMemFree_v2, PFN_cuMemFree_v3020)                                                                             \
    F(cuMemAllocManaged, cuMemAllocManaged, PFN_cuMemAllocManaged_v6000)                                                        \
    F(cuMemAllocPitch, cuMemAllocPitch_v2, PFN_cuMemAllocPitch_v3020)                                                           \
    F(cuMemAllocAsync, cuMemAllocAsync, PFN_cuMemAllocAsync_v11020)                                                             \
    F(cuMemFreeAsync, cuMemFreeAsync, PFN_cuMemFreeAsync_v11020)                                                                \
    F(cuMemPoolCreate, cuMemPoolCreate, PFN_cuMemPoolCreate_v11020)                                                             \
    F(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, PFN_cuMemAllocFromPoolAsync_v11020)                                     \
    F(cuMemCreate, cuMemCreate, PFN_cuMemCreate_v10020)                                                                         \
    F(cuMemRelease, cuMemRelease, PFN_cuMemRelease_v10020)                                                                      \
    F(cuMemExportToShareableHandle, cuMemExportToShareableHandle, PFN_cuMemExportToShareableHandle_v10020)                      \
    F(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, PFN_cuMemImportFromShareableHandle_v10020)                \
    F(cuArrayCreate, cuArrayCreate_v2, PFN_cuArrayCreate_v3020)                                                                 \
    F(cuArray3DCreate, cuArray3DCreate_v2, PFN_cuArray3DCreate_v3020)                                                           \
    F(cuArrayDestroy, cuArrayDestroy, PFN_cuArrayDestroy_v2000)                                                                 \
    F(cuMipmappedArrayCreate, cuMipmappedArrayCreate, PFN_cuMipmappedArrayCreate_v5000)                                         \
    F(cuMipmappedArrayDestroy, cuMipmappedArrayDestroy, PFN_cuMipmappedArrayDestroy_v5000)                                      \
    F(cuModuleLoadData, cuModuleLoadData, PFN_cuModuleLoadData_v2000)                                                           \
    F(cuModuleGetFunction, cuModuleGetFunction, PFN_cuModuleGetFunction_v2000)                                                  \
    F(cuLaunchKernel, cuLaunchKernel, PFN_cuLaunchKernel_v4000)                                                                 \
    F(cuLaunchKernelEx, cuLaunchKernelEx, PFN_cuLaunchKernelEx_v11060)                                                          \
    F(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, PFN_cuLaunchCooperativeKernel_v9000)                                \
    F(cuGraphCreate, cuGraphCreate, PFN_cuGraphCreate_v10000)                                                                   \
    F(cuGraphAddKernelNode, cuGraphAddKernelNode_v2, PFN_cuGraphAddKernelNode_v12000)                                           \
    F(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, PFN_cuGraphInstantiateWithFlags_v11040)                         \
    F(cuGraphLaunch, cuGraphLaunch, PFN_cuGraphLaunch_v10000)                                                                   \
    F(cuGraphAddMemAllocNode, cuGraphAddMemAllocNode, PFN_cuGraphAddMemAllocNode_v11040)                                        \
    F(cuGraphAddMemFreeNode, cuGraphAddMemFreeNode, PFN_cuGraphAddMemFreeNode_v11040)                                           \
    F(cuGraphAddChildGraphNode, cuGraphAddChildGraphNode, PFN_cuGraphAddChildGraphNode_v10000)                                  \
    F(cuGraphInstantiateWithParams, cuGraphInstantiateWithParams, PFN_cuGraphInstantiateWithParams_v12000)                      \
    F(cuGraphUpload, cuGraphUpload, PFN_cuGraphUpload_v11010)                                                                   \
    F(cuGraphExecDestroy, cuGraphExecDestroy, PFN_cuGraphExecDestroy_v10000)                                                    \
    F(cuDeviceGraphMemTrim, cuDeviceGraphMemTrim, PFN_cuDeviceGraphMemTrim_v11040)                                              \
    F(cuStreamCreate, cuStreamCreate, PFN_cuStreamCreate_v2000)                                                                 \
    F(cuStreamBeginCapture, cuStreamBeginCapture_v2, PFN_cuStreamBeginCapture_v10010)                                           \
    F(cuStreamEndCapture, cuStreamEndCapture, PFN_cuStreamEndCapture_v10000)                                                    \
    F(cuMemMap, cuMemMap, PFN_cuMemMap_v10020)                                                                                  \
    F(cuMemUnmap, cuMemUnmap, PFN_cuMemUnmap_v10020)                                                                            \
    F(cuMemAddressReserve, cuMemAddressReserve, PFN_cuMemAddressReserve_v10020)                                                 \
    F(cuMemHostAlloc, cuMemHostAlloc, PFN_cuMemHostAlloc_v2020)                                                                 \
    F(cuIpcGetMemHandle, cuIpcGetMemHandle, PFN_cuIpcGetMemHandle_v4010)                                                        \
    F(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, PFN_cuIpcOpenMemHandle_v11000)

#define POINTER(name, symbol, type) static type p_##name;
FUNCTIONS(POINTER)

#define CALL(name, ...) (p_##name ? (int)p_##name(__VA_ARGS__) : NOT_FOUND)

/* --- finding the functions --- */

static PFN_cuGetProcAddress_v11030 ask_v1;
static PFN_cuGetProcAddress_v12000 ask_v2;
static void *driver;

static void *ask(const char *name, const char *symbol, int version)
{
    void *function = NULL;
    CUdriverProcAddressQueryResult status;
    if (ask_v2)
        return ask_v2(name, &function, version, CU_GET_PROC_ADDRESS_DEFAULT, &status) == CUDA_SUCCESS ? function : NULL;
    if (ask_v1)
        return ask_v1(name, &function, version, CU_GET_PROC_ADDRESS_DEFAULT) == CUDA_SUCCESS ? function : NULL;
    return dlsym(driver, symbol);
}

#ifdef LINKED
#define WEAK(text) _Pragma(#text)
#define IS_WEAK(name, symbol, type) WEAK(weak symbol)
FUNCTIONS(IS_WEAK)
#define FIND(name, symbol, type) p_##name = (type)symbol;
#else
#define FIND(name, symbol, type) p_##name = (type)ask(#name, #symbol, version);
#endif

static int say_missing(const char *what)
{
    printf("{\"action\": \"find\", \"missing\": \"%s\"}\n", what);
    return 10;
}

static int find_functions(const char *way, int version)
{
    (void)version;
    if (strcmp(way, "link") != 0) {
        driver = dlopen("libcuda.so.1", RTLD_NOW | (strcmp(way, "deepbind") == 0 ? RTLD_DEEPBIND : RTLD_GLOBAL));
        if (!driver)
            return say_missing("libcuda.so.1");
        if (strcmp(way, "next") == 0)
            driver = RTLD_NEXT;
        if (strcmp(way, "cuGetProcAddress") == 0 && !(ask_v1 = (PFN_cuGetProcAddress_v11030)dlsym(driver, way)))
            return say_missing(way);
        if (strcmp(way, "cuGetProcAddress_v2") == 0 && !(ask_v2 = (PFN_cuGetProcAddress_v12000)dlsym(driver, way)))
            return say_missing(way);
    }
    FUNCTIONS(FIND)
    (void)ask;
    return 0;
}

/* --- memory --- */

static CUdevice device;
static struct { char kind[16]; CUdeviceptr pointer; size_t bytes; } kept[MOST_KEPT];
static int kept_count;

static CUmemoryPool pool;
static int location, location_id, allocation_type = CU_MEM_ALLOCATION_TYPE_PINNED; /* by `at` */

static CUmemLocation where(void)
{
    CUmemLocation own = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    return location ? (CUmemLocation){.type = (CUmemLocationType)location, .id = location_id} : own;
}

static int take_in_other(CUdeviceptr *pointer, size_t bytes)
{
    static CUstream stream;
    CUcontext own, other;
    int result = CALL(cuDevicePrimaryCtxRetain, &own, device);
    if (result == 0 && !stream) {
        result = CALL(cuDevicePrimaryCtxRetain, &other, 1);
        result = result ? result : CALL(cuCtxSetCurrent, other);
        result = result ? result : CALL(cuStreamCreate, &stream, 0);
        result = result ? result : CALL(cuCtxSetCurrent, own);
    }
    return result ? result : CALL(cuMemAllocAsync, pointer, bytes, stream);
}

static int take_from_pool(CUdeviceptr *pointer, size_t bytes)
{
    CUmemPoolProps properties = {.allocType = (CUmemAllocationType)allocation_type, .location = where()};
    int result = pool ? 0 : CALL(cuMemPoolCreate, &pool, &properties);
    return result ? result : CALL(cuMemAllocFromPoolAsync, pointer, bytes, pool, NULL);
}

static int add_memory(CUgraph graph, CUdeviceptr *pointer, size_t bytes)
{
    CUgraphNode node;
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                       .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}},
                                         .bytesize = bytes};
    int result = CALL(cuGraphAddMemAllocNode, &node, graph, NULL, 0, &memory);
    *pointer = memory.dptr;
    return result;
}

static int take_in_graph(CUdeviceptr *pointer, size_t bytes)
{
    CUgraph graph;
    CUgraphExec executable;
    int result = CALL(cuGraphCreate, &graph, 0);
    if (result == 0)
        result = add_memory(graph, pointer, bytes);
    if (result == 0)
        result = CALL(cuGraphInstantiateWithFlags, &executable, graph, 0);
    return result ? result : CALL(cuGraphLaunch, executable, NULL);
}

static CUgraphExec graphs[16];
static int graphs_count;

static void make_graph(const char *arguments, unsigned long long flags)
{
    CUgraph graph = NULL, parent = NULL;
    CUgraphNode node;
    CUdeviceptr pointer;
    CUDA_GRAPH_INSTANTIATE_PARAMS parameters = {.flags = flags};
    size_t mib = 0;
    int count = 1;
    sscanf(arguments, "%zu:%d", &mib, &count);
    int result = CALL(cuGraphCreate, &graph, 0);
    for (int i = 0; i < count && result == 0; i++) {
        result = add_memory(graph, &pointer, mib << 20);
        result = result ? result : CALL(cuGraphAddMemFreeNode, &node, graph, NULL, 0, pointer);
    }
    for (const char *at = arguments; result == 0 && (at = strstr(at, "child")) != NULL; at++) {
        result = CALL(cuGraphCreate, &parent, 0);
        result = result ? result : CALL(cuGraphAddChildGraphNode, &node, parent, NULL, 0, graph);
        graph = parent;
    }
    if (result == 0)
        result = flags ? CALL(cuGraphInstantiateWithParams, &graphs[graphs_count], graph, &parameters)
                       : CALL(cuGraphInstantiateWithFlags, &graphs[graphs_count], graph, 0);
    graphs_count += result == 0;
    printf("{\"action\": \"graph\", \"result\": %d}\n", result);
}

static void use_graph(const char *action, int index)
{
    CUgraphExec executable = graphs[index];
    int result = strcmp(action, "upload") == 0   ? CALL(cuGraphUpload, executable, NULL)
                 : strcmp(action, "replay") == 0 ? CALL(cuGraphLaunch, executable, NULL)
                                                 : CALL(cuGraphExecDestroy, executable);
    printf("{\"action\": \"%s\", \"index\": %d, \"result\": %d}\n", action, index, result);
}

static int take_and_map(CUdeviceptr *pointer, size_t bytes, const CUmemAllocationProp *on_gpu)
{
    CUmemGenericAllocationHandle handle;
    int result = CALL(cuMemCreate, &handle, bytes, on_gpu, 0);
    if (result == 0)
        result = CALL(cuMemAddressReserve, pointer, bytes, 0, 0, 0);
    if (result == 0)
        result = CALL(cuMemMap, *pointer, bytes, 0, handle, 0);
    return result ? result : CALL(cuMemRelease, handle);
}

static void load_modules(int count)
{
    CUmodule module;
    int result = 0;
    while (count-- > 0 && result == 0)
        result = CALL(cuModuleLoadData, &module, "");
    printf("{\"action\": \"modules\", \"result\": %d}\n", result);
}

static void export_memory(size_t bytes)
{
    CUmemAllocationProp on_gpu = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = where()};
    CUmemGenericAllocationHandle handle = 0;
    int number = -1, result = CALL(cuMemCreate, &handle, bytes, &on_gpu, 0);
    if (result == 0)
        result = CALL(cuMemExportToShareableHandle, &number, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    printf("{\"action\": \"export\", \"number\": %d, \"result\": %d}\n", number, result);
}

static void import_memory(int number)
{
    CUmemGenericAllocationHandle handle;
    int result = CALL(cuMemImportFromShareableHandle, &handle, (void *)(intptr_t)number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    printf("{\"action\": \"import\", \"result\": %d}\n", result);
}

static int open_of_another(CUdeviceptr *pointer, size_t bytes)
{
    static CUdeviceptr exported;
    CUipcMemHandle handle;
    int result = exported ? 0 : CALL(cuMemAlloc, &exported, bytes);
    if (result == 0)
        result = CALL(cuIpcGetMemHandle, &handle, exported);
    return result ? result : CALL(cuIpcOpenMemHandle, pointer, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

static int take(const char *kind, CUdeviceptr *pointer, size_t bytes)
{
    enum { WIDTH = 1 << 16 }; /* elements of 4 bytes: rows of 256 KiB */
    size_t pitch, rows = bytes / (4 * WIDTH);
    CUmemAllocationProp on_gpu = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = where()};
    CUDA_ARRAY_DESCRIPTOR flat = {.Width = WIDTH, .Height = rows, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    CUDA_ARRAY3D_DESCRIPTOR mips = {.Width = WIDTH, .Height = rows, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    CUDA_ARRAY3D_DESCRIPTOR deep = {.Width = WIDTH, .Height = rows / 8, .Depth = 8, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    if (strcmp(kind, "alloc") == 0)
        return CALL(cuMemAlloc, pointer, bytes);
    if (strcmp(kind, "managed") == 0)
        return CALL(cuMemAllocManaged, pointer, bytes, CU_MEM_ATTACH_GLOBAL);
    if (strcmp(kind, "pitch") == 0)
        return CALL(cuMemAllocPitch, pointer, &pitch, (size_t)4 * WIDTH, rows, 4);
    if (strcmp(kind, "async") == 0)
        return CALL(cuMemAllocAsync, pointer, bytes, NULL);
    if (strcmp(kind, "other") == 0)
        return take_in_other(pointer, bytes);
    if (strcmp(kind, "pool") == 0)
        return take_from_pool(pointer, bytes);
    if (strcmp(kind, "vmm") == 0)
        return CALL(cuMemCreate, pointer, bytes, &on_gpu, 0);
    if (strcmp(kind, "array") == 0)
        return CALL(cuArrayCreate, (CUarray *)pointer, &flat);
    if (strcmp(kind, "array3d") == 0)
        return CALL(cuArray3DCreate, (CUarray *)pointer, &deep);
    if (strcmp(kind, "mipmapped") == 0)
        return CALL(cuMipmappedArrayCreate, (CUmipmappedArray *)pointer, &mips, 1);
    if (strcmp(kind, "mapped") == 0)
        return take_and_map(pointer, bytes, &on_gpu);
    if (strcmp(kind, "graphmem") == 0)
        return take_in_graph(pointer, bytes);
    if (strcmp(kind, "host") == 0)
        return CALL(cuMemHostAlloc, (void **)pointer, bytes, 0);
    if (strcmp(kind, "ipc") == 0)
        return open_of_another(pointer, bytes);
    return NOT_FOUND;
}

static int give(const char *kind, CUdeviceptr pointer, size_t bytes)
{
    if (strcmp(kind, "async") == 0 || strcmp(kind, "pool") == 0 || strcmp(kind, "other") == 0)
        return CALL(cuMemFreeAsync, pointer, NULL);
    if (strcmp(kind, "vmm") == 0)
        return CALL(cuMemRelease, pointer);
    if (strcmp(kind, "mapped") == 0)
        return CALL(cuMemUnmap, pointer, bytes);
    if (strcmp(kind, "mipmapped") == 0)
        return CALL(cuMipmappedArrayDestroy, (CUmipmappedArray)pointer);
    if (strncmp(kind, "array", 5) == 0)
        return CALL(cuArrayDestroy, (CUarray)pointer);
    return CALL(cuMemFree, pointer);
}

static void allocate(const char *arguments)
{
    char kind[16] = "";
    size_t bytes = 256;
    int most = 1, blocks = 0, short_pointers = 0, result = 0;
    if (sscanf(arguments, "%15[a-z0-9]:%zub:%d", kind, &bytes, &most) < 3) {
        sscanf(arguments, "%15[a-z0-9]:%zu:%d", kind, &bytes, &most);
        bytes <<= 20;
    }
    while (blocks < most && kept_count < MOST_KEPT) {
        CUdeviceptr pointer = 0;
        result = take(kind, &pointer, bytes);
        if (result != 0)
            break;
        snprintf(kept[kept_count].kind, sizeof kept->kind, "%s", kind);
        kept[kept_count].bytes = bytes;
        kept[kept_count++].pointer = pointer;
        short_pointers += pointer >> 32 == 0; /* what an allocation of 32 bits leaves; the driver's addresses are longer */
        blocks++;
    }
    printf("{\"action\": \"alloc\", \"kind\": \"%s\", \"block_mib\": %zu, \"asked\": %d, \"blocks\": %d, "
           "\"short_pointers\": %d, \"result\": %d}\n",
           kind, bytes >> 20, most, blocks, short_pointers, result);
}

/* Sizes are whole multiples of what the driver allots, so that what is asked for is what is taken. */
static void churn(int count)
{
    static const char *const kinds[] = {"alloc", "managed", "vmm", "mapped"};
    enum { PLACES = 8, UNIT = 2 << 20 };
    unsigned state = (unsigned)getpid();
    int taken = 0, refused = 0, result = 0;
    size_t held = 0;
    while (taken + refused < count && result == 0) {
        int place = rand_r(&state) % PLACES;
        if (kept[place].bytes) {
            result = give(kept[place].kind, kept[place].pointer, kept[place].bytes);
            kept[place].bytes = 0;
            continue;
        }
        size_t bytes = (size_t)(1 + rand_r(&state) % 4) * UNIT;
        snprintf(kept[place].kind, sizeof kept->kind, "%s", kinds[rand_r(&state) % (sizeof kinds / sizeof *kinds)]);
        result = take(kept[place].kind, &kept[place].pointer, bytes);
        kept[place].bytes = result == 0 ? bytes : 0;
        taken += result == 0;
        refused += result == CUDA_ERROR_OUT_OF_MEMORY;
        result = result == CUDA_ERROR_OUT_OF_MEMORY ? 0 : result;
    }
    for (int place = 0; place < PLACES; place++)
        if (kept[place].bytes) {
            held += kept[place].bytes;
            kept[kept_count++] = kept[place];
        }
    printf("{\"action\": \"churn\", \"taken\": %d, \"refused\": %d, \"held\": %zu, \"result\": %d}\n", taken, refused, held,
           result);
}

static void free_all(void)
{
    int result = 0;
    while (kept_count > 0 && result == 0) {
        kept_count--;
        result = give(kept[kept_count].kind, kept[kept_count].pointer, kept[kept_count].bytes);
    }
    printf("{\"action\": \"free\", \"result\": %d}\n", result);
}

static void inform(void)
{
    size_t free_bytes = 0, total = 0, of_device = 0;
    int result = CALL(cuMemGetInfo, &free_bytes, &total);
    int device_result = CALL(cuDeviceTotalMem, &of_device, device);
    printf("{\"action\": \"info\", \"result\": %d, \"free_mib\": %zu, \"total_mib\": %zu, \"device_result\": %d, "
           "\"device_total_mib\": %zu}\n",
           result, free_bytes >> 20, total >> 20, device_result, of_device >> 20);
}

static void inform_without_places(void)
{
    size_t total = 0, free_bytes = 0;
    int first = CALL(cuMemGetInfo, NULL, &total), second = CALL(cuMemGetInfo, &free_bytes, NULL);
    int both = CALL(cuMemGetInfo, NULL, NULL);
    printf("{\"action\": \"infonull\", \"results\": [%d, %d, %d], \"free_mib\": %zu, \"total_mib\": %zu}\n", first, second, both,
           free_bytes >> 20, total >> 20);
}

/* By functions alone, so that the program starts where there is no NVML. */
static void ask_nvml(void)
{
    struct { unsigned long long total, free, used; } memory = {0};
    struct { unsigned version; unsigned long long total, reserved, free, used; } newer = {.version = 0x02000028};
    static char entries[24 * 256];
    unsigned count = 256;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *gpu = NULL;
    if (!library)
        return (void)say_missing("libnvidia-ml.so.1");
    int (*init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
    int (*by_index)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    int (*memory_of)(void *, void *) = (int (*)(void *, void *))dlsym(library, "nvmlDeviceGetMemoryInfo");
    int (*newer_of)(void *, void *) = (int (*)(void *, void *))dlsym(library, "nvmlDeviceGetMemoryInfo_v2");
    int (*list)(void *, unsigned *, void *) =
        (int (*)(void *, unsigned *, void *))dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
    int result = init() | by_index(0, &gpu) | memory_of(gpu, &memory) | newer_of(gpu, &newer) | list(gpu, &count, entries);
    printf("{\"action\": \"nvml\", \"result\": %d, \"total_mib\": %llu, \"used_mib\": %llu, \"newer_total_mib\": %llu, "
           "\"newer_used_mib\": %llu, \"processes\": %u}\n",
           result, memory.total >> 20, memory.used >> 20, newer.total >> 20, newer.used >> 20, count);
}

/* --- launches --- */

static unsigned grid = 16384; /* blocks of a launch: what keeps a large GPU busy for a millisecond has more than a thousand at a time */

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static CUgraphExec ten_kernels(CUfunction function, int *result)
{
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    CUgraphNode node;
    CUDA_KERNEL_NODE_PARAMS kernel = {.func = function, .gridDimX = grid, .gridDimY = 1, .gridDimZ = 1, .blockDimX = BLOCK,
                                      .blockDimY = 1, .blockDimZ = 1};
    *result = CALL(cuGraphCreate, &graph, 0);
    for (int i = 0; i < GRAPH_KERNELS && *result == 0; i++)
        *result = CALL(cuGraphAddKernelNode, &node, graph, NULL, 0, &kernel);
    if (*result == 0)
        *result = CALL(cuGraphInstantiateWithFlags, &executable, graph, 0);
    return executable;
}

static CUgraphExec ten_captured(CUfunction function, int *result)
{
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    CUstream stream = NULL;
    *result = CALL(cuStreamCreate, &stream, 0);
    if (*result == 0)
        *result = CALL(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    for (int i = 0; i < GRAPH_KERNELS && *result == 0; i++)
        *result = CALL(cuLaunchKernel, function, grid, 1, 1, BLOCK, 1, 1, 0, stream, NULL, NULL);
    if (*result == 0)
        *result = CALL(cuStreamEndCapture, stream, &graph);
    if (*result == 0)
        *result = CALL(cuGraphInstantiateWithFlags, &executable, graph, 0);
    return executable;
}

static int launch_once(const char *kind, CUfunction function, CUgraphExec graph)
{
    CUlaunchConfig launch = {.gridDimX = grid, .gridDimY = 1, .gridDimZ = 1, .blockDimX = BLOCK, .blockDimY = 1, .blockDimZ = 1};
    if (strcmp(kind, "kernel") == 0)
        return CALL(cuLaunchKernel, function, grid, 1, 1, BLOCK, 1, 1, 0, NULL, NULL, NULL);
    if (strcmp(kind, "ex") == 0)
        return CALL(cuLaunchKernelEx, &launch, function, NULL, NULL);
    if (strcmp(kind, "cooperative") == 0)
        return CALL(cuLaunchCooperativeKernel, function, grid, 1, 1, BLOCK, 1, 1, 0, NULL, NULL);
    if (strcmp(kind, "graph") == 0 || strcmp(kind, "captured") == 0)
        return CALL(cuGraphLaunch, graph, NULL);
    if (strcmp(kind, "sync") == 0) {
        int result = CALL(cuLaunchKernel, function, grid, 1, 1, BLOCK, 1, 1, 0, NULL, NULL, NULL);
        return result ? result : CALL(cuCtxSynchronize);
    }
    return NOT_FOUND;
}

static void launch(const char *arguments)
{
    char kind[16] = "";
    double seconds = 1, began;
    CUmodule module;
    CUfunction function = NULL;
    CUgraphExec graph = NULL;
    long launches = 0;
    sscanf(arguments, "%15[a-z]:%lf:%u", kind, &seconds, &grid);
    int result = CALL(cuModuleLoadData, &module, "");
    if (result == 0)
        result = CALL(cuModuleGetFunction, &function, module, "kernel");
    int is_captured = strcmp(kind, "captured") == 0, is_graph = strcmp(kind, "graph") == 0 || is_captured;
    if (result == 0 && is_graph)
        graph = is_captured ? ten_captured(function, &result) : ten_kernels(function, &result);
    for (began = now_s(); result == 0 && now_s() - began < seconds; launches += result == 0)
        result = launch_once(kind, function, graph);
    if (result == 0)
        result = CALL(cuCtxSynchronize);
    double took = now_s() - began;
    long kernels = launches * (is_graph ? GRAPH_KERNELS : 1);
    printf("{\"action\": \"launch\", \"kind\": \"%s\", \"kernels\": %ld, \"seconds\": %.3f, \"rate\": %.1f, \"result\": %d}\n", kind,
           kernels, took, took > 0 ? (double)kernels / took : 0, result);
}

/* The driver's own part is in it: who wants the library's measures both. */
static void measure_calls(int count)
{
    CUmodule module;
    CUfunction function = NULL;
    CUdeviceptr pointer;
    double began = now_s();
    int result = 0;
    for (int i = 0; i < count && result == 0; i++) {
        result = CALL(cuMemAlloc, &pointer, 2 << 20);
        result = result ? result : CALL(cuMemFree, pointer);
    }
    double allocated = now_s();
    result = result ? result : CALL(cuModuleLoadData, &module, "");
    result = result ? result : CALL(cuModuleGetFunction, &function, module, "kernel");
    for (int i = 0; i < count && result == 0; i++)
        result = CALL(cuLaunchKernel, function, grid, 1, 1, BLOCK, 1, 1, 0, NULL, NULL, NULL);
    printf("{\"action\": \"speed\", \"alloc_us\": %.3f, \"launch_us\": %.3f, \"result\": %d}\n", (allocated - began) * 1e6 / count,
           (now_s() - allocated) * 1e6 / count, result);
}

/* --- the program --- */

static int use_gpu(int index)
{
    CUcontext context = NULL;
    int result = CALL(cuDeviceGet, &device, index);
    if (result == 0)
        result = CALL(cuDevicePrimaryCtxRetain, &context, device);
    if (result == 0)
        result = CALL(cuCtxSetCurrent, context);
    printf("{\"action\": \"gpu\", \"index\": %d, \"result\": %d}\n", index, result);
    return result;
}

static int start(void)
{
    int version = 0, count = 0, result = CALL(cuInit, 0);
    if (result == 0)
        result = CALL(cuDriverGetVersion, &version);
    if (result == 0)
        result = CALL(cuDeviceGetCount, &count);
    printf("{\"action\": \"init\", \"result\": %d, \"version\": %d, \"gpus\": %d, \"pid\": %d, \"uid\": %d}\n", result, version, count,
           getpid(), getuid());
    return result ? result : use_gpu(0);
}

static void ask_version(void)
{
    int version = 0, result = CALL(cuDriverGetVersion, &version);
    printf("{\"action\": \"version\", \"result\": %d, \"version\": %d}\n", result, version);
}

/* The child of a program that uses a GPU has none of it, and begins again, without exec. */
static int go_on_in_child(void)
{
    pid_t child = fork();
    if (child == 0) {
        kept_count = 0;
        return start();
    }
    int status = 0;
    waitpid(child, &status, 0);
    _exit(WEXITSTATUS(status));
}

static void wait_for_line(void)
{
    char line[64];
    printf("{\"action\": \"wait\"}\n");
    if (!fgets(line, sizeof line, stdin))
        clearerr(stdin);
}

int main(int count, char **words)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count < 3) {
        fprintf(stderr, "usage: %s WAY VERSION ACTION...\n", words[0]);
        return 2;
    }
    int code = find_functions(words[1], atoi(words[2]));
    if (code != 0)
        return code;
    if (start() != 0)
        return 11;
    for (int i = 3; i < count; i++) {
        const char *word = words[i], *colon = strchr(word, ':'), *arguments = colon ? colon + 1 : "";
        size_t length = colon ? (size_t)(colon - word) : strlen(word);
        if (strncmp(word, "gpu", length) == 0)
            use_gpu(atoi(arguments));
        else if (strncmp(word, "at", length) == 0 && sscanf(arguments, "%d:%d:%d", &location, &location_id, &allocation_type))
            pool = NULL;
        else if (strncmp(word, "version", length) == 0)
            ask_version();
        else if (strncmp(word, "info", length) == 0)
            inform();
        else if (strncmp(word, "infonull", length) == 0)
            inform_without_places();
        else if (strncmp(word, "nvml", length) == 0)
            ask_nvml();
        else if (strncmp(word, "sleep", length) == 0)
            nanosleep(&(struct timespec){(time_t)atof(arguments), (long)((atof(arguments) - (double)(time_t)atof(arguments)) * 1e9)}, NULL);
        else if (strncmp(word, "fork", length) == 0 && (code = go_on_in_child()) != 0)
            return 12;
        else if (strncmp(word, "kill", length) == 0)
            kill(getpid(), SIGKILL);
        else if (strncmp(word, "alloc", length) == 0)
            allocate(arguments);
        else if (strncmp(word, "modules", length) == 0)
            load_modules(atoi(arguments));
        else if (strncmp(word, "export", length) == 0)
            export_memory(strtoull(arguments, NULL, 10) << 20);
        else if (strncmp(word, "import", length) == 0)
            import_memory(atoi(arguments));
        else if (strncmp(word, "churn", length) == 0)
            churn(atoi(arguments));
        else if (strncmp(word, "free", length) == 0)
            free_all();
        else if (strncmp(word, "graph", length) == 0)
            make_graph(arguments, 0);
        else if (strncmp(word, "upload", length) == 0)
            use_graph("upload", atoi(arguments));
        else if (strncmp(word, "uploaded", length) == 0)
            make_graph(arguments, CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
        else if (strncmp(word, "replay", length) == 0)
            use_graph("replay", atoi(arguments));
        else if (strncmp(word, "destroy", length) == 0)
            use_graph("destroy", atoi(arguments));
        else if (strncmp(word, "trim", length) == 0)
            printf("{\"action\": \"trim\", \"result\": %d}\n", CALL(cuDeviceGraphMemTrim, device));
        else if (strncmp(word, "sync", length) == 0)
            printf("{\"action\": \"sync\", \"result\": %d}\n", CALL(cuCtxSynchronize));
        else if (strncmp(word, "limit", length) == 0)
            printf("{\"action\": \"limit\", \"result\": %d}\n",
                   CALL(cuCtxSetLimit, (CUlimit)atoi(arguments), strtoull(strchr(arguments, ':') + 1, NULL, 10) << 20));
        else if (strncmp(word, "launch", length) == 0)
            launch(arguments);
        else if (strncmp(word, "wait", length) == 0)
            wait_for_line();
        else if (strncmp(word, "speed", length) == 0)
            measure_calls(atoi(arguments));
        else if (strncmp(word, "exit", length) == 0)
            _exit(0);
    }
    return 0;
}
