/* One hook of libgpushare at a time: calls the function of that name as a program that has found it by dlsym, and says whether what
 * the hook is there for came of it, by the file `usage` of the working directory.
 *
 *   every_hook does NAME             {"has_effect": true}
 *   every_hook captures              launches and allocates next to a capture, which is to come to its end
 *   every_hook formats               arrays of several formats: what is held of each
 *   every_hook ends, forks           launches in one context after the other, in a child of fork
 *   every_hook finds NAME BASE VERSION PER_THREAD...   whether each is the library's, by dlsym and by cuGetProcAddress
 *
 * The share is to be one of 2,560 MiB and of some cores, with nothing used.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "format.h"

#define MIB ((size_t)1 << 20)
#define SHARE (2560 * MIB)
#define BYTES (64 * MIB)
#define WIDTH 4096u
#define HEIGHT 4096u /* elements of four bytes: BYTES */
extern __typeof__(cuGetProcAddress_v2) cuGetProcAddress_v2_ptsz;

static void *cuda, *nvml;
static const struct usage *usage;
static CUcontext context;
static CUfunction spin;
static CUmemoryPool pool;
static CUdeviceptr address;
static CUdeviceptr_v1 lower;
static CUarray array;
static CUmipmappedArray mipmapped;
static CUgraphExec executable;
static CUmemGenericAllocationHandle handle, object;

static void *find(const char *name)
{
    void *found = dlsym(name[0] == 'n' ? nvml : cuda, name);
    if (!found) {
        fprintf(stderr, "%s is missing\n", name);
        exit(3);
    }
    return found;
}
#define F(name) ((__typeof__(name) *)find(#name))

static void must(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "%s: %d\n", what, result);
        exit(3);
    }
}
#define MUST(call) must((int)(call), #call)

/* ---- what the library says ---- */

static uint64_t held(void)
{
    uint64_t bytes = 0;
    for (unsigned i = 0; i < MOST_SLOTS; i++)
        bytes += usage->slot[i].pid ? usage->slot[i].held[0] : 0;
    return bytes;
}
static unsigned processes(void)
{
    unsigned count = 0;
    for (unsigned i = 0; i < MOST_SLOTS; i++)
        count += usage->slot[i].pid != 0;
    return count;
}
static uint64_t launches(void) { return usage->gpu[0].launches; }

#define TAKES(call) ({ uint64_t before = held(); MUST(call); held() >= before + BYTES; })
#define GIVES(call) ({ uint64_t before = held(); MUST(call); held() + BYTES <= before; })
#define ENDS(call) ({ int had = held() > BYTES; MUST(call); had && held() == 0; }) /* with all that was taken in a context */
#define KEEPS(call) ({ uint64_t before = held(); MUST(call); held() == before; })
#define LAUNCHES(call) ({ uint64_t before = launches(); MUST(call); launches() == before + 1; })
#define SHOWS(total, call) ({ MUST(call); (uint64_t)(total) == SHARE; })

static int is_ours(const void *function)
{
    Dl_info found;
    return function && dladdr(function, &found) && strstr(found.dli_fname, "libgpushare");
}

/* ---- beginnings ---- */

static void begin(void)
{
    CUmodule module;
    MUST(F(cuInit)(0));
    MUST(F(cuDevicePrimaryCtxRetain)(&context, 0));
    MUST(F(cuCtxSetCurrent)(context));
    MUST(F(cuModuleLoadData)(&module, ""));
    MUST(F(cuModuleGetFunction)(&spin, module, "spin"));
}

static void allocate(void) { MUST(F(cuMemAlloc_v2)(&address, BYTES)); }
static void allocate_lower(void) { MUST(F(cuMemAlloc)(&lower, BYTES)); }

static void allocate_in_pool(void)
{
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    MUST(F(cuMemPoolCreate)(&pool, &properties));
    MUST(F(cuMemAllocFromPoolAsync)(&address, BYTES, pool, NULL));
}
/* So its pool keeps it. */
static void free_in_pool(void)
{
    allocate_in_pool();
    MUST(F(cuMemFreeAsync)(address, NULL));
}

static const CUmemAllocationProp on_gpu = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static void create(void)
{
    MUST(F(cuMemCreate)(&handle, BYTES, &on_gpu, 0));
    MUST(F(cuMemAddressReserve)(&address, BYTES, 0, 0, 0));
}
static void create_and_map(void)
{
    create();
    MUST(F(cuMemMap)(address, BYTES, 0, handle, 0));
    MUST(F(cuMemRelease)(handle));
}
static void make_object(void)
{
    CUmulticastObjectProp properties = {.numDevices = 1, .size = BYTES};
    MUST(F(cuMulticastCreate)(&object, &properties));
}
static void bind(void)
{
    make_object();
    create();
    MUST(F(cuMulticastBindMem)(object, 0, handle, 0, BYTES, 0));
    MUST(F(cuMemRelease)(handle));
}
static void bind_to_endpoint(void)
{
    create();
    MUST(F(cuLogicalEndpointBindMem)(1, 0, 0, handle, 0, BYTES, 0));
    MUST(F(cuMemRelease)(handle));
}
static void *exported(void)
{
    int file = -1;
    create();
    MUST(F(cuMemExportToShareableHandle)(&file, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return (void *)(intptr_t)file;
}

static const CUDA_ARRAY_DESCRIPTOR flat = {.Width = WIDTH, .Height = HEIGHT, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
static const CUDA_ARRAY_DESCRIPTOR_v1 flat_v1 = {.Width = WIDTH, .Height = HEIGHT, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
static const CUDA_ARRAY3D_DESCRIPTOR deep = {.Width = WIDTH, .Height = HEIGHT / 4, .Depth = 4, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
static const CUDA_ARRAY3D_DESCRIPTOR_v1 deep_v1 = {.Width = WIDTH, .Height = HEIGHT / 4, .Depth = 4, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};

static CUarrayMapInfo *tile(void)
{
    static CUarrayMapInfo made = {.resourceType = CU_RESOURCE_TYPE_ARRAY, .memOperationType = CU_MEM_OPERATION_TYPE_MAP};
    CUDA_ARRAY3D_DESCRIPTOR sparse = deep;
    sparse.Flags |= CUDA_ARRAY3D_SPARSE;
    MUST(F(cuArray3DCreate_v2)(&made.resource.array, &sparse));
    create();
    made.memHandle.memHandle = handle;
    return &made;
}

/* ---- graphs ---- */

static CUgraph graph_with_memory(void)
{
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                       .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
                                         .bytesize = BYTES};
    CUgraph graph;
    CUgraphNode node;
    MUST(F(cuGraphCreate)(&graph, 0));
    MUST(F(cuGraphAddMemAllocNode)(&node, graph, NULL, 0, &memory));
    MUST(F(cuGraphAddMemFreeNode)(&node, graph, &node, 1, memory.dptr));
    return graph;
}
static void instantiate(void) { MUST(F(cuGraphInstantiateWithFlags)(&executable, graph_with_memory(), 0)); }

static CUgraph graph_of(uint64_t ns)
{
    void *parameters[] = {&ns};
    CUDA_KERNEL_NODE_PARAMS kernel = {.func = spin, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32, .blockDimY = 1,
                                      .blockDimZ = 1, .kernelParams = parameters};
    CUgraph graph;
    CUgraphNode node;
    MUST(F(cuGraphCreate)(&graph, 0));
    MUST(F(cuGraphAddKernelNode_v2)(&node, graph, NULL, 0, &kernel));
    return graph;
}

/* One whose memory is known is refused where the share has none left for it. */
static int is_refused_where_full(CUresult instantiated)
{
    MUST(instantiated);
    while (F(cuMemAlloc_v2)(&address, BYTES) == CUDA_SUCCESS)
        ;
    return F(cuGraphLaunch)(executable, NULL) == CUDA_ERROR_OUT_OF_MEMORY;
}

enum { SHORT_NS = 3000, OTHER_NS = 4000 };
/* A graph that has ended has no entry in the library's table. */
static int forgets_ended(void)
{
    enum { COUNT = 2000 };
    CUgraph graph = graph_of(SHORT_NS);
    size_t before = mallinfo2().uordblks;
    for (int i = 0; i < COUNT; i++) {
        MUST(F(cuGraphInstantiateWithFlags)(&executable, graph, 0));
        MUST(F(cuGraphExecDestroy)(executable));
    }
    return mallinfo2().uordblks < before + COUNT * sizeof(void *);
}

/* ---- waits: what was launched since the last one is measured together, up to here ---- */

static int written;
static int driver_is_asked(void)
{
    static char text[1 << 16];
    ssize_t length = pread(written, text, sizeof text - 1, 0);
    text[length > 0 ? length : 0] = 0;
    return strstr(text, "cuEventRecord") != NULL;
}
/* Whether the library records an event in the driver meanwhile. */
#define RECORDS(call)                         \
    ({                                        \
        int error = dup(STDERR_FILENO);       \
        written = memfd_create("log", 0);     \
        dup2(written, STDERR_FILENO);         \
        MUST(call);                           \
        dup2(error, STDERR_FILENO);           \
        int is_asked = driver_is_asked();     \
        close(written), close(error);         \
        is_asked;                             \
    })
#define MEASURES(launched, call)                                \
    ({                                                          \
        int is_measured = 0;                                    \
        for (int round = 0; round < 50 && !is_measured; round++) { \
            for (int i = 0; i < 12; i++)                        \
                MUST(launched);                                 \
            is_measured = RECORDS(call);                        \
        }                                                       \
        is_measured;                                            \
    })

/* What was measured of a graph says nothing of it behind an update: so the first launch after each is measured alone. Without one
   few launches of a graph that is known are. */
enum { UPDATES = 20 };
#define FORGETS(call)                                                                     \
    ({                                                                                    \
        CUgraph both[] = {graph_of(SHORT_NS), graph_of(OTHER_NS)}, newer;                 \
        int measured = 0;                                                                 \
        MUST(F(cuGraphInstantiateWithFlags)(&executable, both[0], 0));                    \
        for (int i = 0; i < 200; i++)                                                     \
            MUST(F(cuGraphLaunch)(executable, NULL));                                     \
        for (int i = 0; i < UPDATES; i++) {                                               \
            newer = both[i % 2];                                                          \
            MUST(F(cuGraphLaunch)(executable, NULL));                                     \
            MUST(call);                                                                   \
            measured += RECORDS(F(cuGraphLaunch)(executable, NULL));                      \
        }                                                                                 \
        measured == UPDATES;                                                              \
    })

static uint64_t kernel_ns = 20000;
static void *parameters[] = {&kernel_ns};
static const CUlaunchConfig once = {.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32, .blockDimY = 1, .blockDimZ = 1};
#define KERNEL spin, 1, 1, 1, 32, 1, 1, 0, NULL, parameters

/* ---- the view of NVML ---- */

static nvmlDevice_t gpu(void)
{
    nvmlDevice_t found, instance;
    MUST(F(nvmlInit_v2)());
    MUST(F(nvmlDeviceGetHandleByIndex_v2)(0, &found));
    return F(nvmlDeviceGetMigDeviceHandleByIndex)(found, 0, &instance) == NVML_SUCCESS ? instance : found;
}
/* Another container's process is on the GPU, too. */
#define LISTS_OWN(entry, call)                                \
    ({                                                        \
        entry entries[16];                                    \
        unsigned count = 16;                                  \
        nvmlDevice_t device = gpu();                          \
        MUST(call);                                           \
        count == 1;                                           \
    })

/* ---- all of them ---- */

static void take_context(void) { MUST(F(cuInit)(0)); }
static void retain_context(void)
{
    MUST(F(cuInit)(0));
    MUST(F(cuDevicePrimaryCtxRetain)(&context, 0));
    MUST(F(cuCtxSetCurrent)(context));
    allocate();
}
/* The second time it costs nothing. */
static int is_retained_where_full(void)
{
    MUST(F(cuCtxSetCurrent)(context));
    while (F(cuMemAlloc_v2)(&address, BYTES) == CUDA_SUCCESS)
        ;
    return F(cuDevicePrimaryCtxRetain)(&context, 0) == CUDA_SUCCESS;
}
static void make_context(void)
{
    MUST(F(cuInit)(0));
    MUST(F(cuCtxCreate_v2)(&context, 0, 0));
    allocate();
}

static int has_effect(const char *wanted)
{
    void *found = NULL;
    CUdriverProcAddressQueryResult status;
    CUgraphExecUpdateResultInfo why_info;
    CUgraphExecUpdateResult why;
    CUDA_GRAPH_INSTANTIATE_PARAMS how = {0};
    CUDA_LAUNCH_PARAMS all = {.function = spin, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32, .blockDimY = 1,
                              .blockDimZ = 1, .kernelParams = parameters};
    unsigned pitch, free_32, total_32;
    size_t wide_pitch, free_bytes, total;
    nvmlMemory_t memory;
    nvmlDeviceAttributes_t attributes;
    nvmlMemory_v2_t memory_v2 = {.version = nvmlMemory_v2};
    nvmlProcessDetailList_t list = {.version = nvmlProcessDetailList_v1, .mode = NVML_PROCESS_MODE_COMPUTE};
    CUmemPoolProps of_host = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_HOST}};
    CUcheckpointGpuPair pair = {.newUuid.bytes = {1}};
    CUcheckpointRestoreArgs elsewhere = {.gpuPairs = &pair, .gpuPairsCount = 1};
    CUgreenCtx green;
#define CASE(name, prepared, effect)  \
    if (strcmp(wanted, #name) == 0) { \
        prepared;                     \
        return effect;                \
    }
#define ON(name, effect) CASE(name, begin(), effect)
    CASE(cuInit, , !processes() && F(cuInit)(0) == CUDA_SUCCESS && processes() == 1)
    ON(cuGetProcAddress, F(cuGetProcAddress)("cuMemAlloc", &found, 11080, 0) == CUDA_SUCCESS && is_ours(found))
    ON(cuGetProcAddress_v2, F(cuGetProcAddress_v2)("cuMemAlloc", &found, 12000, 0, &status) == CUDA_SUCCESS && is_ours(found))
    ON(cuGetProcAddress_v2_ptsz, F(cuGetProcAddress_v2_ptsz)("cuMemAllocAsync", &found, 12000, 0, &status) == CUDA_SUCCESS &&
                                     found == dlsym(cuda, "cuMemAllocAsync_ptsz") && is_ours(found))

    ON(cuMemAlloc, TAKES(F(cuMemAlloc)(&lower, BYTES)))
    ON(cuMemAlloc_v2, TAKES(F(cuMemAlloc_v2)(&address, BYTES)))
    ON(cuMemAllocPitch, TAKES(F(cuMemAllocPitch)(&lower, &pitch, 4 * WIDTH, HEIGHT, 4)))
    ON(cuMemAllocPitch_v2, TAKES(F(cuMemAllocPitch_v2)(&address, &wide_pitch, 4 * WIDTH, HEIGHT, 4)))
    ON(cuMemAllocManaged, TAKES(F(cuMemAllocManaged)(&address, BYTES, CU_MEM_ATTACH_GLOBAL)))
    ON(cuMemFree, (allocate_lower(), GIVES(F(cuMemFree)(lower))))
    ON(cuMemFree_v2, (allocate(), GIVES(F(cuMemFree_v2)(address))))

    ON(cuMemAllocAsync, TAKES(F(cuMemAllocAsync)(&address, BYTES, NULL)))
    ON(cuMemAllocAsync_ptsz, TAKES(F(cuMemAllocAsync_ptsz)(&address, BYTES, NULL)))
    ON(cuMemAllocFromPoolAsync, (free_in_pool(), MUST(F(cuMemPoolTrimTo)(pool, 0)),
                                 TAKES(F(cuMemAllocFromPoolAsync)(&address, BYTES, pool, NULL))))
    ON(cuMemAllocFromPoolAsync_ptsz, (free_in_pool(), MUST(F(cuMemPoolTrimTo)(pool, 0)),
                                      TAKES(F(cuMemAllocFromPoolAsync_ptsz)(&address, BYTES, pool, NULL))))
    ON(cuMemFreeAsync, (allocate(), GIVES(F(cuMemFreeAsync)(address, NULL))))
    ON(cuMemFreeAsync_ptsz, (allocate(), GIVES(F(cuMemFreeAsync_ptsz)(address, NULL))))
    /* Of the host, as a driver before CUDA 13 does not say. */
    CASE(cuMemPoolCreate, (setenv("FAKE_GPU_CUDA_VERSION", "12080", 1), begin()),
         (MUST(F(cuMemPoolCreate)(&pool, &of_host)), KEEPS(F(cuMemAllocFromPoolAsync)(&address, BYTES, pool, NULL))))
    /* The exporter has a GiB in it. */
    ON(cuMemPoolImportFromShareableHandle,
       (MUST(F(cuMemPoolImportFromShareableHandle)(&pool, NULL, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)),
        KEEPS(F(cuMemAllocFromPoolAsync)(&address, BYTES, pool, NULL) != CUDA_ERROR_INVALID_VALUE)))
    ON(cuMemPoolDestroy, (free_in_pool(), GIVES(F(cuMemPoolDestroy)(pool))))
    ON(cuMemPoolTrimTo, (free_in_pool(), GIVES(F(cuMemPoolTrimTo)(pool, 0))))

    ON(cuMemCreate, TAKES(F(cuMemCreate)(&handle, BYTES, &on_gpu, 0)))
    ON(cuMemRelease, (create(), GIVES(F(cuMemRelease)(handle))))
    ON(cuMemRetainAllocationHandle, (create_and_map(), MUST(F(cuMemRetainAllocationHandle)(&handle, (void *)(uintptr_t)address)),
                                     KEEPS(F(cuMemUnmap)(address, BYTES))))
    ON(cuMemImportFromShareableHandle,
       (MUST(F(cuMemImportFromShareableHandle)(&handle, exported(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)),
        KEEPS(F(cuMemRelease)(handle))))
    ON(cuMemMap, (create(), MUST(F(cuMemMap)(address, BYTES, 0, handle, 0)), KEEPS(F(cuMemRelease)(handle))))
    ON(cuMemUnmap, (create_and_map(), GIVES(F(cuMemUnmap)(address, BYTES))))

#define BINDS(name, prepared, call) ON(name, (prepared, MUST(call), KEEPS(F(cuMemRelease)(handle))))
#define BINDS_MAPPED(name, prepared, call) ON(name, (prepared, create_and_map(), MUST(call), KEEPS(F(cuMemUnmap)(address, BYTES))))
    ON(cuMulticastCreate, (bind(), GIVES(F(cuMemRelease)(object))))
    BINDS(cuMemMapArrayAsync, (void)0, F(cuMemMapArrayAsync)(tile(), 1, NULL))
    BINDS(cuMemMapArrayAsync_ptsz, (void)0, F(cuMemMapArrayAsync_ptsz)(tile(), 1, NULL))
    BINDS(cuMulticastBindMem, (make_object(), create()), F(cuMulticastBindMem)(object, 0, handle, 0, BYTES, 0))
    BINDS(cuMulticastBindMem_v2, (make_object(), create()), F(cuMulticastBindMem_v2)(object, 0, 0, handle, 0, BYTES, 0))
    BINDS_MAPPED(cuMulticastBindAddr, make_object(), F(cuMulticastBindAddr)(object, 0, address, BYTES, 0))
    BINDS_MAPPED(cuMulticastBindAddr_v2, make_object(), F(cuMulticastBindAddr_v2)(object, 0, 0, address, BYTES, 0))
    ON(cuMulticastUnbind, (bind(), GIVES(F(cuMulticastUnbind)(object, 0, 0, BYTES))))
    BINDS(cuLogicalEndpointBindMem, create(), F(cuLogicalEndpointBindMem)(1, 0, 0, handle, 0, BYTES, 0))
    BINDS_MAPPED(cuLogicalEndpointBindAddr, (void)0, F(cuLogicalEndpointBindAddr)(1, 0, 0, (void *)(uintptr_t)address, BYTES, 0))
    ON(cuLogicalEndpointUnbind, (bind_to_endpoint(), GIVES(F(cuLogicalEndpointUnbind)(1, 0, 0, BYTES))))
    ON(cuLogicalEndpointDestroy, (bind_to_endpoint(), GIVES(F(cuLogicalEndpointDestroy)(1))))

    ON(cuArrayCreate, TAKES(F(cuArrayCreate)(&array, &flat_v1)))
    ON(cuArrayCreate_v2, TAKES(F(cuArrayCreate_v2)(&array, &flat)))
    ON(cuArray3DCreate, TAKES(F(cuArray3DCreate)(&array, &deep_v1)))
    ON(cuArray3DCreate_v2, TAKES(F(cuArray3DCreate_v2)(&array, &deep)))
    ON(cuArrayDestroy, (MUST(F(cuArrayCreate_v2)(&array, &flat)), GIVES(F(cuArrayDestroy)(array))))
    ON(cuMipmappedArrayCreate, TAKES(F(cuMipmappedArrayCreate)(&mipmapped, &deep, 1)))
    ON(cuMipmappedArrayDestroy, (MUST(F(cuMipmappedArrayCreate)(&mipmapped, &deep, 1)), GIVES(F(cuMipmappedArrayDestroy)(mipmapped))))

    ON(cuGraphInstantiate, is_refused_where_full(F(cuGraphInstantiate)(&executable, graph_with_memory(), NULL, NULL, 0)))
    ON(cuGraphInstantiate_v2, is_refused_where_full(F(cuGraphInstantiate_v2)(&executable, graph_with_memory(), NULL, NULL, 0)))
    ON(cuGraphInstantiateWithFlags, is_refused_where_full(F(cuGraphInstantiateWithFlags)(&executable, graph_with_memory(), 0)))
    ON(cuGraphInstantiateWithParams, is_refused_where_full(F(cuGraphInstantiateWithParams)(&executable, graph_with_memory(), &how)))
    ON(cuGraphInstantiateWithParams_ptsz,
       is_refused_where_full(F(cuGraphInstantiateWithParams_ptsz)(&executable, graph_with_memory(), &how)))
    ON(cuGraphExecUpdate, FORGETS(F(cuGraphExecUpdate)(executable, newer, NULL, &why)))
    ON(cuGraphExecUpdate_v2, FORGETS(F(cuGraphExecUpdate_v2)(executable, newer, &why_info)))
    ON(cuGraphUpload, (instantiate(), TAKES(F(cuGraphUpload)(executable, NULL))))
    ON(cuGraphUpload_ptsz, (instantiate(), TAKES(F(cuGraphUpload_ptsz)(executable, NULL))))
    ON(cuGraphLaunch, (instantiate(), LAUNCHES(F(cuGraphLaunch)(executable, NULL))))
    ON(cuGraphLaunch_ptsz, (instantiate(), LAUNCHES(F(cuGraphLaunch_ptsz)(executable, NULL))))
    ON(cuGraphExecDestroy, forgets_ended())
    ON(cuDeviceGraphMemTrim, (instantiate(), MUST(F(cuGraphUpload)(executable, NULL)), GIVES(F(cuDeviceGraphMemTrim)(0))))

    ON(cuLaunch, LAUNCHES(F(cuLaunch)(spin)))
    ON(cuLaunchGrid, LAUNCHES(F(cuLaunchGrid)(spin, 1, 1)))
    ON(cuLaunchGridAsync, LAUNCHES(F(cuLaunchGridAsync)(spin, 1, 1, NULL)))
    ON(cuLaunchKernel, LAUNCHES(F(cuLaunchKernel)(KERNEL, NULL)))
    ON(cuLaunchKernel_ptsz, LAUNCHES(F(cuLaunchKernel_ptsz)(KERNEL, NULL)))
    ON(cuLaunchKernelEx, LAUNCHES(F(cuLaunchKernelEx)(&once, spin, parameters, NULL)))
    ON(cuLaunchKernelEx_ptsz, LAUNCHES(F(cuLaunchKernelEx_ptsz)(&once, spin, parameters, NULL)))
    ON(cuLaunchCooperativeKernel, LAUNCHES(F(cuLaunchCooperativeKernel)(KERNEL)))
    ON(cuLaunchCooperativeKernel_ptsz, LAUNCHES(F(cuLaunchCooperativeKernel_ptsz)(KERNEL)))
    ON(cuLaunchCooperativeKernelMultiDevice, (all.function = spin, LAUNCHES(F(cuLaunchCooperativeKernelMultiDevice)(&all, 1, 0))))
#define FILLS(name, ...)                                                                     \
    CASE(name##_v2, (begin(), allocate()), LAUNCHES(F(name##_v2)(address, __VA_ARGS__)))             \
    CASE(name##_v2_ptds, (begin(), allocate()), LAUNCHES(F(name##_v2_ptds)(address, __VA_ARGS__)))   \
    CASE(name##Async, (begin(), allocate()), LAUNCHES(F(name##Async)(address, __VA_ARGS__, NULL)))   \
    CASE(name##Async_ptsz, (begin(), allocate()), LAUNCHES(F(name##Async_ptsz)(address, __VA_ARGS__, NULL)))
    FILLS(cuMemsetD8, 0, 4096)
    FILLS(cuMemsetD16, 0, 4096)
    FILLS(cuMemsetD32, 0, 4096)
    FILLS(cuMemsetD2D8, 512, 0, 64, 64)
    FILLS(cuMemsetD2D16, 512, 0, 64, 64)
    FILLS(cuMemsetD2D32, 512, 0, 64, 64)
#define COPIES(name, ...) CASE(name, (begin(), allocate()), LAUNCHES(F(name)(address, address + BYTES / 2, __VA_ARGS__)))
    COPIES(cuMemcpyDtoD_v2, 4096)
    COPIES(cuMemcpyDtoD_v2_ptds, 4096)
    COPIES(cuMemcpyDtoDAsync_v2, 4096, NULL)
    COPIES(cuMemcpyDtoDAsync_v2_ptsz, 4096, NULL)

    ON(cuStreamSynchronize, MEASURES(F(cuLaunchKernel)(KERNEL, NULL), F(cuStreamSynchronize)(NULL)))
    ON(cuStreamSynchronize_ptsz, MEASURES(F(cuLaunchKernel_ptsz)(KERNEL, NULL), F(cuStreamSynchronize_ptsz)(NULL)))
    ON(cuCtxSynchronize, MEASURES(F(cuLaunchKernel)(KERNEL, NULL), F(cuCtxSynchronize)()))
    ON(cuCtxSynchronize_v2, MEASURES(F(cuLaunchKernel)(KERNEL, NULL), F(cuCtxSynchronize_v2)(context)))

    CASE(cuDevicePrimaryCtxRetain, take_context(), TAKES(F(cuDevicePrimaryCtxRetain)(&context, 0)) && is_retained_where_full())
    CASE(cuDevicePrimaryCtxRelease, retain_context(), ENDS(F(cuDevicePrimaryCtxRelease)(0)))
    CASE(cuDevicePrimaryCtxRelease_v2, retain_context(), ENDS(F(cuDevicePrimaryCtxRelease_v2)(0)))
    CASE(cuDevicePrimaryCtxReset, retain_context(), ENDS(F(cuDevicePrimaryCtxReset)(0)))
    CASE(cuDevicePrimaryCtxReset_v2, retain_context(), ENDS(F(cuDevicePrimaryCtxReset_v2)(0)))
    CASE(cuCtxCreate, take_context(), TAKES(F(cuCtxCreate)(&context, 0, 0)))
    CASE(cuCtxCreate_v2, take_context(), TAKES(F(cuCtxCreate_v2)(&context, 0, 0)))
    CASE(cuCtxCreate_v3, take_context(), TAKES(F(cuCtxCreate_v3)(&context, NULL, 0, 0, 0)))
    CASE(cuCtxCreate_v4, take_context(), TAKES(F(cuCtxCreate_v4)(&context, NULL, 0, 0)))
    CASE(cuCtxDestroy, make_context(), ENDS(F(cuCtxDestroy)(context)))
    CASE(cuCtxDestroy_v2, make_context(), ENDS(F(cuCtxDestroy_v2)(context)))
    CASE(cuCtxDetach, make_context(), ENDS(F(cuCtxDetach)(context)))
    CASE(cuCtxAttach, (make_context(), MUST(F(cuCtxAttach)(&context, 0))), KEEPS(F(cuCtxDetach)(context)))
    ON(cuCtxSetLimit, (MUST(F(cuCtxGetLimit)(&total, CU_LIMIT_MALLOC_HEAP_SIZE)),
                       TAKES(F(cuCtxSetLimit)(CU_LIMIT_MALLOC_HEAP_SIZE, total + BYTES))))
    CASE(cuGreenCtxCreate, take_context(), TAKES(F(cuGreenCtxCreate)(&green, NULL, 0, 0)))
    CASE(cuGreenCtxDestroy, (take_context(), MUST(F(cuGreenCtxCreate)(&green, NULL, 0, 0))), ENDS(F(cuGreenCtxDestroy)(green)))
    ON(cuCheckpointProcessRestore, F(cuCheckpointProcessRestore)(getpid(), &elsewhere) == CUDA_ERROR_NOT_SUPPORTED)

    ON(cuMemGetInfo, SHOWS(total_32, F(cuMemGetInfo)(&free_32, &total_32)))
    ON(cuMemGetInfo_v2, SHOWS(total, F(cuMemGetInfo_v2)(&free_bytes, &total)))
    ON(cuDeviceTotalMem, SHOWS(total_32, F(cuDeviceTotalMem)(&total_32, 0)))
    ON(cuDeviceTotalMem_v2, SHOWS(total, F(cuDeviceTotalMem_v2)(&total, 0)))
    ON(nvmlDeviceGetMemoryInfo, SHOWS(memory.total, F(nvmlDeviceGetMemoryInfo)(gpu(), &memory)))
    ON(nvmlDeviceGetMemoryInfo_v2, SHOWS(memory_v2.total, F(nvmlDeviceGetMemoryInfo_v2)(gpu(), &memory_v2)))
    ON(nvmlDeviceGetAttributes, SHOWS(attributes.memorySizeMB * MIB, F(nvmlDeviceGetAttributes)(gpu(), &attributes)))
    ON(nvmlDeviceGetAttributes_v2, SHOWS(attributes.memorySizeMB * MIB, F(nvmlDeviceGetAttributes_v2)(gpu(), &attributes)))
    ON(nvmlDeviceGetComputeRunningProcesses,
       LISTS_OWN(nvmlProcessInfo_v1_t, F(nvmlDeviceGetComputeRunningProcesses)(device, &count, entries)))
    ON(nvmlDeviceGetComputeRunningProcesses_v2,
       LISTS_OWN(nvmlProcessInfo_v2_t, F(nvmlDeviceGetComputeRunningProcesses_v2)(device, &count, entries)))
    ON(nvmlDeviceGetComputeRunningProcesses_v3,
       LISTS_OWN(nvmlProcessInfo_t, F(nvmlDeviceGetComputeRunningProcesses_v3)(device, &count, entries)))
    ON(nvmlDeviceGetRunningProcessDetailList,
       LISTS_OWN(nvmlProcessDetail_v1_t, (list.procArray = entries, list.numProcArrayEntries = count,
                                          F(nvmlDeviceGetRunningProcessDetailList)(device, &list) ||
                                              (count = list.numProcArrayEntries, 0))))
    fprintf(stderr, "nothing is known of %s\n", wanted);
    exit(2);
}

/* By cuGetProcAddress as of the version since which it is the function of that name. */
static void find_all(int count, char **words)
{
    MUST(F(cuInit)(0));
    for (int i = 0; i + 3 < count; i += 4) {
        void *by_name = dlsym(words[i][0] == 'n' ? nvml : cuda, words[i]), *asked = NULL;
        CUdriverProcAddressQueryResult status;
        cuuint64_t flags = atoi(words[i + 3]) ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_DEFAULT;
        F(cuGetProcAddress_v2)(words[i + 1], &asked, atoi(words[i + 2]), flags, &status);
        printf("{\"action\": \"%s\", \"by_name\": %d, \"next\": %d, \"asked\": %d}\n", words[i], is_ours(by_name) != 0,
               dlsym(RTLD_NEXT, words[i]) == by_name, words[i][0] == 'n' || asked == by_name);
    }
    unsigned unhooked = 0; /* what was found by its name and version alone, because its address is not known */
    for (unsigned i = 0; i < MOST_SLOTS; i++)
        unhooked += (unsigned)usage->slot[i].unhooked;
    printf("{\"action\": \"unhooked\", \"count\": %u}\n", unhooked);
}

/* In another stream than the one that is captured, until the share is full and the library looks for what is unused. */
static int captures(void)
{
    CUstream stream, other;
    CUgraph graph;
    size_t nodes = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    begin();
    instantiate();
    MUST(F(cuGraphLaunch)(executable, NULL)); /* so there is something to trim */
    free_in_pool();
    MUST(F(cuStreamCreate)(&stream, CU_STREAM_DEFAULT));
    MUST(F(cuStreamCreate)(&other, CU_STREAM_NON_BLOCKING));
    MUST(F(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    MUST(F(cuLaunchKernel)(spin, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
    for (int i = 0; i < 100; i++)
        MUST(F(cuLaunchKernel)(spin, 1, 1, 1, 32, 1, 1, 0, other, parameters, NULL));
    while (F(cuMemAllocAsync)(&address, BYTES, other) == CUDA_SUCCESS)
        ;
    MUST(F(cuThreadExchangeStreamCaptureMode)(&mode)); /* the program's own is as it was */
    MUST(F(cuStreamEndCapture)(stream, &graph));
    MUST(F(cuGraphGetNodes)(graph, NULL, &nodes));
    return nodes == 1 && mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

static int has_formats(void)
{
    static const struct { CUarray_format format; unsigned channels, halves; /* of a byte */ } known[] = {
        {CU_AD_FORMAT_UNSIGNED_INT8, 1, 2}, {CU_AD_FORMAT_SIGNED_INT16, 2, 8}, {CU_AD_FORMAT_HALF, 4, 16},
        {CU_AD_FORMAT_FLOAT, 4, 32},        {CU_AD_FORMAT_BC1_UNORM, 4, 1},    {CU_AD_FORMAT_NV12, 3, 3},
        {CU_AD_FORMAT_UNORM_INT8X2, 2, 4},  {CU_AD_FORMAT_UNORM_INT16X4, 4, 16},
    };
    int is_right = 1;
    begin();
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++) {
        CUDA_ARRAY_DESCRIPTOR of = {.Width = WIDTH, .Height = HEIGHT, .Format = known[i].format, .NumChannels = known[i].channels};
        uint64_t before = held(), expected = (uint64_t)WIDTH * HEIGHT * known[i].halves / 2;
        MUST(F(cuArrayCreate_v2)(&array, &of));
        is_right &= held() - before == expected;
        MUST(F(cuArrayDestroy)(array));
    }
    return is_right;
}

/* The library has events of what was launched; in the next context, or process, they are no more. */
static void launch_some(void)
{
    CUmodule module;
    MUST(F(cuModuleLoadData)(&module, ""));
    MUST(F(cuModuleGetFunction)(&spin, module, "spin"));
    for (int i = 0; i < 200; i++)
        MUST(F(cuLaunchKernel)(KERNEL, NULL));
}
static int ends(void)
{
    for (int i = 0; i < 4; i++) {
        make_context();
        launch_some();
        MUST(F(cuCtxDestroy_v2)(context));
    }
    return 1;
}
static int forks(void)
{
    int status = -1;
    make_context();
    launch_some();
    pid_t child = fork();
    if (child == 0) {
        make_context();
        launch_some();
        _exit(0);
    }
    waitpid(child, &status, 0);
    return status == 0;
}

int main(int count, char **words)
{
    int file = open("usage", O_RDONLY);
    usage = mmap(NULL, USAGE_BYTES, PROT_READ, MAP_SHARED, file, 0);
    cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (count < 2 || usage == MAP_FAILED || !cuda || !nvml)
        return 2;
    if (strcmp(words[1], "captures") == 0)
        printf("{\"action\": \"captures\", \"has_effect\": %d}\n", captures());
    else if (strcmp(words[1], "ends") == 0)
        printf("{\"action\": \"ends\", \"has_effect\": %d}\n", ends());
    else if (strcmp(words[1], "forks") == 0)
        printf("{\"action\": \"forks\", \"has_effect\": %d}\n", forks());
    else if (strcmp(words[1], "formats") == 0)
        printf("{\"action\": \"formats\", \"has_effect\": %d}\n", has_formats());
    else if (strcmp(words[1], "finds") == 0)
        find_all(count - 2, words + 2);
    else
        printf("{\"action\": \"does\", \"has_effect\": %d}\n", has_effect(words[2]));
    return 0;
}
