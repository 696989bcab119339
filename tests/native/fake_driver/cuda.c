/* libcuda.so.1 of the fake driver: contexts, memory of every kind, launches of every kind, and the ways to ask for functions.
 *
 * Only counts: no memory is behind a pointer, no kernel computes. Every other function that CUDA's headers know is a weak stub,
 * made by generate.py; what is defined here goes before it. Compiled against NVIDIA's cuda.h, so the types are the driver's.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL /* the functions under their own names: cuMemAlloc is the one of 32 bits */
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"
#include "symbols.h"

#define PER_THREAD(function) extern __typeof__(function) function##_ptsz __attribute__((alias(#function)))
#define QUEUE_NS 100000000ull
#define FIRST_ADDRESS 0x7f0000000000ull
#define FOREIGN_ADDRESS (FIRST_ADDRESS + (1ull << 44)) /* what another process has exported */
#define ALIGNMENT (2ull << 20)
#define BYTES_A_NS 3000 /* set */
static CUresult run(uint64_t duration_ns, unsigned width, int is_timed, CUstream stream);

/* --- GPUs: an ordinal of this process is an index into `minors` --- */

static unsigned minors[MAX_GPUS], gpu_count;
static pthread_once_t enumerated = PTHREAD_ONCE_INIT;
static int is_initialized;
static uint64_t busy_until[MAX_GPUS];

static int minor_named(const char *word, const unsigned *seen, unsigned seen_count, unsigned *minor)
{
    char uuid[96], *end;
    if (strncmp(word, "GPU-", 4) == 0) {
        for (unsigned i = 0; i < seen_count; i++) {
            gpu_uuid(seen[i], uuid);
            if (strncmp(uuid, word, strlen(word)) == 0)
                return *minor = seen[i], 1;
        }
        return 0;
    }
    unsigned long index = strtoul(word, &end, 10);
    if (end == word || index >= seen_count)
        return 0;
    return *minor = seen[index], 1;
}

/* CUDA_VISIBLE_DEVICES: up to the first word that names no GPU. */
static void enumerate(void)
{
    unsigned seen[MAX_GPUS], seen_count = visible_gpus(seen);
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    char text[2048], *rest = NULL;
    if (!wanted) {
        memcpy(minors, seen, sizeof minors);
        gpu_count = seen_count;
        return;
    }
    gpu_count = 0; /* a child of fork is here again where another thread of its parent was */
    snprintf(text, sizeof text, "%s", wanted);
    for (char *word = strtok_r(text, ",", &rest); word && gpu_count < MAX_GPUS; word = strtok_r(NULL, ",", &rest)) {
        if (!minor_named(word, seen, seen_count, &minors[gpu_count]))
            break;
        gpu_count++;
    }
}

static int is_gpu(CUdevice ordinal)
{
    pthread_once(&enumerated, enumerate);
    return ordinal >= 0 && (unsigned)ordinal < gpu_count;
}

static void begin_anew_in_child(void);
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, begin_anew_in_child); }

CUresult CUDAAPI cuInit(unsigned int flags)
{
    log_call("cuInit");
    (void)flags;
    pthread_once(&enumerated, enumerate);
    is_initialized = 1;
    return gpu_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult CUDAAPI cuDriverGetVersion(int *version)
{
    log_call("cuDriverGetVersion");
    *version = config()->cuda_version;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int *count)
{
    log_call("cuDeviceGetCount");
    pthread_once(&enumerated, enumerate);
    *count = (int)gpu_count;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return is_gpu(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceGetName(char *name, int size, CUdevice device)
{
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)size, "%s", config()->name);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    log_call("cuDeviceTotalMem_v2");
    uint64_t used, total;
    if (!is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    memory_of_caller(minors[device], &total, &used);
    *bytes = total;
    return CUDA_SUCCESS;
}

static unsigned in_32_bits(uint64_t value) { return value > 0xffffffffu ? 0xffffffffu : (unsigned)value; }

CUresult CUDAAPI cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
    log_call("cuDeviceTotalMem");
    size_t total = 0;
    CUresult result = cuDeviceTotalMem_v2(&total, device);
    *bytes = in_32_bits(total);
    return result;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = (int)config()->sm_count; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = 0x10 + (int)minors[device]; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = config()->is_unified; break;
    case CU_DEVICE_ATTRIBUTE_NUMA_CONFIG: *value = config()->numa_node ? CU_DEVICE_NUMA_CONFIG_NUMA_NODE : CU_DEVICE_NUMA_CONFIG_NONE; break;
    case CU_DEVICE_ATTRIBUTE_NUMA_ID: *value = config()->numa_node ? config()->numa_node + (int)minors[device] : -1; break;
    default: *value = 1; /* the rest are abilities, and an H100 has them */
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    log_call("cuDeviceGetUuid_v2");
    char text[96];
    if (!is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    gpu_uuid(minors[device], text);
    unsigned place = 0;
    for (const char *at = text + strlen("GPU-"); *at && place < 32; at++)
        if (*at != '-') {
            int digit = *at <= '9' ? *at - '0' : (*at | 0x20) - 'a' + 10;
            uuid->bytes[place / 2] = (char)(place % 2 ? uuid->bytes[place / 2] | digit : digit << 4);
            place++;
        }
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { log_call("cuDeviceGetUuid"); return cuDeviceGetUuid_v2(uuid, device); }

CUresult CUDAAPI cuDeviceGetPCIBusId(char *text, int size, CUdevice device)
{
    log_call("cuDeviceGetPCIBusId");
    char bus_id[32];
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    gpu_bus_id(minors[device], bus_id);
    snprintf(text, (size_t)size, "%s", bus_id + strlen("0000")); /* CUDA's domain has four digits */
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice *device, const char *wanted)
{
    char bus_id[32];
    pthread_once(&enumerated, enumerate);
    for (*device = 0; is_gpu(*device); ++*device)
        if (cuDeviceGetPCIBusId(bus_id, sizeof bus_id, *device) == CUDA_SUCCESS && strcasecmp(bus_id, wanted) == 0)
            return CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_DEVICE;
}

/* --- contexts: one handle a GPU --- */

static CUcontext handles[MAX_GPUS + 1];
static unsigned retained[MAX_GPUS];
static __thread CUdevice current = -1;

static CUcontext context_of(CUdevice device) { return device < 0 ? NULL : (CUcontext)&handles[device]; }
static CUdevice device_of(CUcontext context) { return context ? (CUdevice)((CUcontext *)context - handles) : -1; }

static CUresult retain(CUdevice device)
{
    if (!is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!open_context(minors[device]))
        return CUDA_ERROR_OUT_OF_MEMORY;
    __atomic_add_fetch(&retained[device], 1, __ATOMIC_SEQ_CST);
    return CUDA_SUCCESS;
}

static CUresult release(CUdevice device)
{
    if (!is_gpu(device) || !retained[device])
        return CUDA_ERROR_INVALID_CONTEXT;
    __atomic_sub_fetch(&retained[device], 1, __ATOMIC_SEQ_CST);
    close_context(minors[device]);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    log_call("cuDevicePrimaryCtxRetain");
    *context = context_of(device);
    return retain(device);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device) { log_call("cuDevicePrimaryCtxRelease_v2"); return release(device); }
CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) { log_call("cuDevicePrimaryCtxRelease"); return release(device); }

CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    log_call("cuDevicePrimaryCtxReset_v2");
    while (release(device) == CUDA_SUCCESS)
        ;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *is_active)
{
    log_call("cuDevicePrimaryCtxGetState");
    *flags = 0;
    *is_active = is_gpu(device) && retained[device];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    log_call("cuCtxCreate_v2");
    (void)flags;
    CUresult result = cuDevicePrimaryCtxRetain(context, device);
    if (result == CUDA_SUCCESS)
        current = device;
    return result;
}

CUresult CUDAAPI cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
    log_call("cuCtxCreate");
    return cuCtxCreate_v2(context, flags, device);
}

CUresult CUDAAPI cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device)
{
    log_call("cuCtxCreate_v3");
    (void)affinity, (void)count;
    return cuCtxCreate_v2(context, flags, device);
}

CUresult CUDAAPI cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device)
{
    log_call("cuCtxCreate_v4");
    (void)parameters;
    return cuCtxCreate_v2(context, flags, device);
}

CUresult CUDAAPI cuCtxDestroy_v2(CUcontext context)
{
    log_call("cuCtxDestroy_v2");
    if (device_of(context) == current)
        current = -1;
    return release(device_of(context));
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) { return current = device_of(context), CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext context) { return current = device_of(context), CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context) { log_call("cuCtxGetCurrent"); return *context = context_of(current), CUDA_SUCCESS; }

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *context)
{
    if (context)
        *context = context_of(current);
    current = -1;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice *device)
{
    log_call("cuCtxGetDevice");
    *device = current;
    return current < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext context, unsigned int *version)
{
    (void)context;
    return *version = 3020, CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetFlags(unsigned int *flags) { return *flags = 0, CUDA_SUCCESS; }

/* --- memory: what this process has, by address --- */

typedef enum { PLAIN, OF_POOL, MANAGED, OF_HOST } memory_kind;
/* What a pool has reserved stays its own after a free, up to its threshold, until it is trimmed. */
typedef struct { CUdevice device; uint64_t used, reserved, used_high, reserved_high, threshold; CUmemLocation at; int is_managed, is_of_host; } pool;
/* `references`: of a handle of virtual memory those that are held and those that are mapped; of other memory one. */
typedef struct { CUdeviceptr address; size_t bytes; CUdevice device; memory_kind kind; pool *of; unsigned references; } allocation;
typedef struct { CUdeviceptr address, handle; } mapping;
static struct { pthread_mutex_t guard; allocation *all; size_t count, room; CUdeviceptr next; mapping *mapped; size_t mappings; }
    memory = {.guard = PTHREAD_MUTEX_INITIALIZER, .next = FIRST_ADDRESS};

/* Another thread may have held it at the fork, in the middle of a change: so nothing of it is kept, above all no pointer to what
   realloc has freed. What was allocated is the parent's; the addresses go on, so that none of the parent's means something here. */
static void forget_pools(void);
static void forget_graphs(void);
static void begin_anew_in_child(void)
{
    memory = (__typeof__(memory)){.guard = PTHREAD_MUTEX_INITIALIZER, .next = memory.next};
    memset(retained, 0, sizeof retained);
    forget_pools();
    forget_graphs();
}

static uint64_t higher(uint64_t one, uint64_t other) { return one > other ? one : other; }

/* What a pool lacks for so many bytes; it has them afterwards, or nothing has changed. */
static int reserve_in(pool *of, size_t bytes)
{
    uint64_t lacking = of->used + bytes > of->reserved ? of->used + bytes - of->reserved : 0;
    if (lacking && !of->is_of_host && !take_memory(minors[of->device], lacking, of->is_managed))
        return 0;
    of->used += bytes;
    of->reserved += lacking;
    of->used_high = higher(of->used_high, of->used);
    of->reserved_high = higher(of->reserved_high, of->reserved);
    return 1;
}

static void trim(pool *of, uint64_t least)
{
    uint64_t kept = higher(of->used, least);
    if (of->reserved > kept) {
        if (!of->is_of_host)
            give_memory(minors[of->device], of->reserved - kept, of->is_managed);
        of->reserved = kept;
    }
}

static CUresult allocate_from(CUdeviceptr *address, size_t bytes, CUdevice device, memory_kind kind, pool *of)
{
    if (device < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory.guard);
    int is_taken = of ? reserve_in(of, bytes) : kind == OF_HOST || take_memory(minors[device], bytes, kind == MANAGED);
    if (is_taken) {
        if (memory.count == memory.room) {
            memory.room = memory.room ? 2 * memory.room : 64;
            memory.all = realloc(memory.all, memory.room * sizeof(allocation));
        }
        *address = memory.next;
        memory.next += (bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
        memory.all[memory.count++] = (allocation){*address, bytes, device, kind, of, 1};
    }
    pthread_mutex_unlock(&memory.guard);
    return is_taken ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate(CUdeviceptr *address, size_t bytes, CUdevice device, memory_kind kind)
{
    return allocate_from(address, bytes, device, kind, NULL);
}

/* The GPU whose memory that is; -1: it is the host's. */
static CUdevice device_at(const CUmemLocation *at)
{
    if (at->type == CU_MEM_LOCATION_TYPE_HOST_NUMA)
        for (CUdevice device = 0; is_gpu(device) && config()->numa_node; device++)
            if (at->id == config()->numa_node + (int)minors[device])
                return device;
    return at->type == CU_MEM_LOCATION_TYPE_DEVICE                   ? at->id
           : at->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN ? current
                                                                     : -1;
}

static allocation *allocation_at(CUdeviceptr address)
{
    for (size_t i = memory.count; i-- > 0;)
        if (address >= memory.all[i].address && address < memory.all[i].address + memory.all[i].bytes)
            return &memory.all[i];
    return NULL;
}

/* The allocation that an address lies in. */
static int find_allocation(CUdeviceptr address, allocation *found)
{
    pthread_mutex_lock(&memory.guard);
    const allocation *at = allocation_at(address);
    if (at)
        *found = *at;
    pthread_mutex_unlock(&memory.guard);
    return at != NULL;
}

static CUresult change_references(CUdeviceptr address, int by)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory.guard);
    allocation *at = allocation_at(address);
    if (at && at->address == address) {
        at->references += (unsigned)by;
        if (at->references == 0 && at->of) {
            at->of->used -= at->bytes;
            trim(at->of, at->of->threshold);
        } else if (at->references == 0 && at->kind != OF_HOST) {
            give_memory(minors[at->device], at->bytes, at->kind == MANAGED);
        }
        if (at->references == 0)
            *at = memory.all[--memory.count];
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory.guard);
    return result;
}

static CUresult free_in_graphs(CUdeviceptr address);
static CUresult free_allocation(CUdeviceptr address)
{
    CUresult result = address ? change_references(address, -1) : CUDA_SUCCESS;
    return result == CUDA_SUCCESS ? result : free_in_graphs(address);
}

CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    log_call("cuMemAlloc_v2");
    return allocate(address, bytes, current, PLAIN);
}

/* As the driver's: a pointer of 32 bits is written. Who wanted cuMemAlloc_v2 has the upper half of whatever was there. */
CUresult CUDAAPI cuMemAlloc(CUdeviceptr_v1 *address, unsigned int bytes)
{
    CUdeviceptr whole = 0;
    log_call("cuMemAlloc");
    CUresult result = allocate(&whole, bytes, current, PLAIN);
    if (result == CUDA_SUCCESS)
        *address = (CUdeviceptr_v1)whole;
    return result;
}

CUresult CUDAAPI cuMemFree_v2(CUdeviceptr address)
{
    log_call("cuMemFree_v2");
    return free_allocation(address);
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    log_call("cuMemAllocManaged");
    (void)flags;
    return allocate(address, bytes, current, MANAGED);
}

CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    log_call("cuMemAllocPitch_v2");
    (void)element;
    *pitch = (width + 511) & ~(size_t)511;
    return allocate(address, *pitch * height, current, PLAIN);
}

CUresult CUDAAPI cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    log_call("cuMemGetInfo_v2");
    uint64_t used, all;
    if (current < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    memory_of_caller(minors[current], &all, &used);
    if (total)
        *total = all;
    if (free_bytes)
        *free_bytes = used < all ? all - used : 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo(unsigned int *free_bytes, unsigned int *total)
{
    log_call("cuMemGetInfo");
    size_t wide_free = 0, wide_total = 0;
    CUresult result = cuMemGetInfo_v2(&wide_free, &wide_total);
    *free_bytes = in_32_bits(wide_free);
    *total = in_32_bits(wide_total);
    return result;
}

CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    allocation found;
    if (!find_allocation(address, &found))
        return CUDA_ERROR_INVALID_VALUE;
    if (base)
        *base = found.address;
    if (size)
        *size = found.bytes;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    allocation found;
    if (!find_allocation(address, &found))
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = context_of(found.device); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = found.device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = found.address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = found.bytes; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

/* Of the host, which is not counted. */
CUresult CUDAAPI cuMemHostAlloc(void **memory_of_host, size_t bytes, unsigned int flags)
{
    (void)flags;
    return (*memory_of_host = malloc(bytes)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult CUDAAPI cuMemAllocHost_v2(void **memory_of_host, size_t bytes) { return cuMemHostAlloc(memory_of_host, bytes, 0); }
CUresult CUDAAPI cuMemFreeHost(void *memory_of_host) { return free(memory_of_host), CUDA_SUCCESS; }

/* Pools: each GPU has one of its own; a program makes others. */
static pool own_pools[MAX_GPUS];
static pool *chosen_pools[MAX_GPUS]; /* by cuDeviceSetMemPool */

static void forget_pools(void)
{
    memset(own_pools, 0, sizeof own_pools);
    memset(chosen_pools, 0, sizeof chosen_pools);
}

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *found, CUdevice device)
{
    log_call("cuDeviceGetDefaultMemPool");
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    own_pools[device].device = device;
    own_pools[device].at = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    return *found = (CUmemoryPool)&own_pools[device], CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *found, CUdevice device)
{
    log_call("cuDeviceGetMemPool");
    CUresult result = cuDeviceGetDefaultMemPool(found, device);
    if (result == CUDA_SUCCESS && chosen_pools[device])
        *found = (CUmemoryPool)chosen_pools[device];
    return result;
}
CUresult CUDAAPI cuDeviceSetMemPool(CUdevice device, CUmemoryPool chosen)
{
    return is_gpu(device) ? (chosen_pools[device] = (pool *)chosen, CUDA_SUCCESS) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *made, const CUmemPoolProps *properties)
{
    int is_managed = properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
    CUdevice device = device_at(&properties->location);
    pool *fresh = calloc(1, sizeof *fresh);
    *fresh = (pool){.at = properties->location, .is_managed = is_managed, .is_of_host = device < 0 && !is_managed};
    fresh->device = device < 0 ? 0 : device; /* managed memory of the host moves to the GPU that uses it */
    if (!is_gpu(fresh->device))
        return free(fresh), CUDA_ERROR_INVALID_DEVICE;
    return *made = (CUmemoryPool)fresh, CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool of)
{
    log_call("cuMemPoolDestroy");
    trim((pool *)of, 0);
    for (unsigned i = 0; i < MAX_GPUS; i++)
        if (chosen_pools[i] == (pool *)of)
            chosen_pools[i] = NULL;
    return CUDA_SUCCESS; /* what still lies in it is freed with its last address; so the pool stays */
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool of, size_t least)
{
    log_call("cuMemPoolTrimTo");
    pthread_mutex_lock(&memory.guard);
    trim((pool *)of, least);
    pthread_mutex_unlock(&memory.guard);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool of, CUmemPool_attribute attribute, void *value)
{
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        ((pool *)of)->threshold = *(cuuint64_t *)value;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool of, CUmemPool_attribute attribute, void *value)
{
    log_call("cuMemPoolGetAttribute");
    const pool *asked = (pool *)of;
    if (config()->cuda_version < 13000 && attribute > CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_LOCATION_TYPE: *(int *)value = (int)asked->at.type; break;
    case CU_MEMPOOL_ATTR_LOCATION_ID: *(int *)value = asked->at.id; break;
    case CU_MEMPOOL_ATTR_ALLOCATION_TYPE: *(int *)value = asked->is_managed ? CU_MEM_ALLOCATION_TYPE_MANAGED : CU_MEM_ALLOCATION_TYPE_PINNED; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = asked->reserved; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = asked->used; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = asked->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = asked->used_high; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *(cuuint64_t *)value = asked->threshold; break;
    default: *(int *)value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool from, CUstream stream)
{
    log_call("cuMemAllocFromPoolAsync");
    (void)stream;
    return allocate_from(address, bytes, ((pool *)from)->device, OF_POOL, (pool *)from);
}
PER_THREAD(cuMemAllocFromPoolAsync);

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    CUmemoryPool from = NULL;
    log_call("cuMemAllocAsync");
    (void)stream;
    if (current < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    cuDeviceGetMemPool(&from, current);
    return allocate_from(address, bytes, current, OF_POOL, (pool *)from);
}
PER_THREAD(cuMemAllocAsync);

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    log_call("cuMemFreeAsync");
    (void)stream;
    return free_allocation(address);
}
PER_THREAD(cuMemFreeAsync);

/* Virtual memory: the memory is the handle's; addresses cost nothing. */
CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr address, unsigned int value, size_t count, CUstream stream)
{
    (void)address, (void)value;
    return config()->slice_ns ? run(count * 4 / BYTES_A_NS, 1000, 0, stream) : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                               CUmemAllocationGranularity_flags option)
{
    (void)properties, (void)option;
    return *bytes = ALIGNMENT, CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                             unsigned long long flags)
{
    log_call("cuMemCreate");
    (void)flags;
    CUdevice device = device_at(&properties->location);
    return allocate(handle, bytes, device < 0 ? 0 : device, device < 0 ? OF_HOST : PLAIN);
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
    log_call("cuMemRelease");
    return handle >= FOREIGN_ADDRESS ? CUDA_SUCCESS : change_references(handle, -1);
}

/* Memory stays while it is mapped, though its handle is released. */
CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    log_call("cuMemMap");
    (void)bytes, (void)offset, (void)flags;
    CUresult result = handle >= FOREIGN_ADDRESS ? CUDA_SUCCESS : change_references(handle, 1);
    pthread_mutex_lock(&memory.guard);
    memory.mapped = realloc(memory.mapped, (memory.mappings + 1) * sizeof(mapping));
    memory.mapped[memory.mappings++] = (mapping){address, handle};
    pthread_mutex_unlock(&memory.guard);
    return result;
}

static CUdeviceptr handle_mapped_at(CUdeviceptr address, int removes)
{
    CUdeviceptr handle = 0;
    pthread_mutex_lock(&memory.guard);
    for (size_t i = 0; i < memory.mappings && !handle; i++)
        if (memory.mapped[i].address == address) {
            handle = memory.mapped[i].handle;
            if (removes)
                memory.mapped[i] = memory.mapped[--memory.mappings];
        }
    pthread_mutex_unlock(&memory.guard);
    return handle;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    log_call("cuMemUnmap");
    (void)bytes;
    CUdeviceptr handle = handle_mapped_at(address, 1);
    return handle ? cuMemRelease(handle) : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    log_call("cuMemRetainAllocationHandle");
    *handle = handle_mapped_at((uintptr_t)address, 0);
    return *handle ? change_references(*handle, 1) : CUDA_ERROR_INVALID_VALUE;
}

/* Between processes: whatever is opened is another process's memory. */
CUresult CUDAAPI cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                              unsigned long long flags)
{
    (void)type, (void)flags;
    return *(int *)shared = (int)(handle >> 21 & 0xffff), CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared, CUmemAllocationHandleType type)
{
    log_call("cuMemImportFromShareableHandle");
    (void)shared, (void)type;
    return *handle = FOREIGN_ADDRESS, CUDA_SUCCESS;
}
CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    memset(handle, 0, sizeof *handle);
    return memcpy(handle, &address, sizeof address), CUDA_SUCCESS;
}
CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    (void)flags, (void)handle;
    return *address = FOREIGN_ADDRESS, CUDA_SUCCESS;
}
CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    return cuIpcOpenMemHandle_v2(address, handle, flags);
}
CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) { return (void)address, CUDA_SUCCESS; }

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr near,
                                     unsigned long long flags)
{
    (void)alignment, (void)near, (void)flags;
    pthread_mutex_lock(&memory.guard);
    *address = memory.next;
    memory.next += (bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
    pthread_mutex_unlock(&memory.guard);
    return CUDA_SUCCESS;
}

/* Arrays */
static size_t bytes_of_format(CUarray_format format)
{
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 2;
    default: return 4;
    }
}

static size_t bytes_of_array(size_t width, size_t height, size_t depth, CUarray_format format, unsigned channels)
{
    return width * (height ? height : 1) * (depth ? depth : 1) * bytes_of_format(format) * channels;
}

static CUresult make_array(void **array, size_t bytes)
{
    CUdeviceptr address = 0;
    CUresult result = allocate(&address, bytes, current, PLAIN);
    *array = (void *)(uintptr_t)address;
    return result;
}

CUresult CUDAAPI cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *of)
{
    log_call("cuArrayCreate_v2");
    return make_array((void **)array, bytes_of_array(of->Width, of->Height, 1, of->Format, of->NumChannels));
}

CUresult CUDAAPI cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *of)
{
    log_call("cuArray3DCreate_v2");
    return make_array((void **)array, bytes_of_array(of->Width, of->Height, of->Depth, of->Format, of->NumChannels));
}

CUresult CUDAAPI cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned int levels)
{
    size_t bytes = 0;
    log_call("cuMipmappedArrayCreate");
    for (unsigned level = 0; level < (levels ? levels : 1); level++)
        bytes += bytes_of_array(of->Width >> level, of->Height >> level, of->Depth >> level, of->Format, of->NumChannels);
    return make_array((void **)array, bytes);
}

CUresult CUDAAPI cuArrayDestroy(CUarray array)
{
    log_call("cuArrayDestroy");
    return free_allocation((uintptr_t)array);
}
CUresult CUDAAPI cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    log_call("cuMipmappedArrayDestroy");
    return free_allocation((uintptr_t)array);
}

/* --- modules and launches: a launch returns at once, until the GPU has QUEUE_NS of work before it. No kernel is compiled: one named
   `spin` computes for its first parameter, nanoseconds in 64 bits; `timed` waits until so long after its begin, with slice_us;
   the others as the settings say --- */

static int a_module, a_function, a_spin, a_timed, a_stream;

CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image)
{
    (void)image;
    return *module = (CUmodule)&a_module, CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    (void)module;
    int *found = strcmp(name, "spin") == 0 ? &a_spin : strcmp(name, "timed") == 0 ? &a_timed : &a_function;
    return *function = (CUfunction)found, CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) { return *mode = CU_MODULE_LAZY_LOADING, CUDA_SUCCESS; }

/* Graphs: their nodes, in the order in which they were added. An executable one is a copy. While one is captured, launches only add
   to it.

   Their memory, as NVIDIA's guide has it (CUDA Programming Guide, "Graph Memory Nodes"): a launch or an upload maps it, and it stays
   mapped. What a graph frees itself it shares with all others, for here one runs after the other; what it leaves is the program's to
   free, and until then its own. A trim unmaps what is neither allocated nor of a graph that is to run; the next launch maps it again.
   `bytes`: what an allocation adds to its graph; one at the address of another that the graph has freed adds nothing. */
enum { MAX_NODES = 64, PLACES_OF_SM = 8 };
struct graph;
typedef struct {
    CUgraphNodeType type;
    CUDA_KERNEL_NODE_PARAMS kernel;
    CUdeviceptr address;
    size_t asked, bytes;
    int is_freed, is_left; /* by its graph; by a launch */
    uint64_t duration_ns;
    struct graph *child;
} graph_node;
typedef struct graph {
    unsigned count;
    int is_known, is_mapped;
    CUdevice device;
    uint64_t done_at;
    struct graph *next;
    graph_node nodes[MAX_NODES];
} graph;
static graph *captured, *mapped_graphs; /* and those that were: under memory.guard, as what is reserved for them */
static uint64_t graphs_reserved[MAX_GPUS];

static uint64_t duration_of(CUfunction function, uint64_t blocks, void **parameters)
{
    if ((function == (CUfunction)&a_spin || function == (CUfunction)&a_timed) && parameters)
        return *(uint64_t *)parameters[0];
    uint64_t at_once = config()->sm_count * PLACES_OF_SM;
    if (!config()->block_ns)
        return config()->kernel_ns;
    return higher(blocks, at_once) * config()->block_ns / at_once;
}

static uint64_t blocks_of(const CUDA_KERNEL_NODE_PARAMS *kernel)
{
    return (uint64_t)kernel->gridDimX * kernel->gridDimY * kernel->gridDimZ;
}

/* A stream's lane: those of cuStreamCreate have their own in turn, all others the first. */
enum { OWN_LANES = 8 };
static char own_streams[OWN_LANES];
static int takes_turns(void) { return config()->slice_ns && current >= 0 && minors[current] == 0; }
static unsigned lane_of(CUstream stream)
{
    char *at = (char *)stream;
    return at >= own_streams && at < own_streams + OWN_LANES ? 1 + (unsigned)(at - own_streams) : 0;
}

static CUresult run(uint64_t duration_ns, unsigned width, int is_timed, CUstream stream)
{
    if (current < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (takes_turns())
        return push_kernel(minors[current], lane_of(stream), duration_ns, width, is_timed), CUDA_SUCCESS;
    uint64_t done_at = run_on_gpu(minors[current], duration_ns);
    busy_until[current] = done_at;
    if (done_at > now_ns() + QUEUE_NS)
        sleep_until(done_at - QUEUE_NS);
    return CUDA_SUCCESS;
}

static CUresult add_node(CUgraphNode *node, graph *to, graph_node made)
{
    if (to->count == MAX_NODES)
        return CUDA_ERROR_OUT_OF_MEMORY;
    to->nodes[to->count] = made;
    *node = (CUgraphNode)&to->nodes[to->count++];
    return CUDA_SUCCESS;
}

/* In thousandths of the GPU. */
static unsigned width_of(uint64_t blocks)
{
    uint64_t at_once = config()->sm_count * PLACES_OF_SM;
    return blocks >= at_once ? 1000 : (unsigned)(blocks * 1000 / at_once);
}

static CUresult run_kernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, CUstream stream, void **parameters)
{
    CUgraphNode unwanted;
    CUDA_KERNEL_NODE_PARAMS kernel = {.func = function, .gridDimX = x, .gridDimY = y, .gridDimZ = z, .blockDimX = threads,
                                      .blockDimY = 1, .blockDimZ = 1};
    uint64_t duration_ns = duration_of(function, blocks_of(&kernel), parameters); /* parameters are the launch's own: read now */
    if (captured)
        return add_node(&unwanted, captured,
                        (graph_node){.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = kernel, .duration_ns = duration_ns});
    return run(duration_ns, width_of(blocks_of(&kernel)), function == (CUfunction)&a_timed, stream);
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                                CUstream stream, void **parameters, void **extra)
{
    log_call("cuLaunchKernel");
    (void)shared_bytes, (void)extra;
    return run_kernel(function, grid_x, grid_y, grid_z, block_x * block_y * block_z, stream, parameters);
}
PER_THREAD(cuLaunchKernel);

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *launch, CUfunction function, void **parameters, void **extra)
{
    log_call("cuLaunchKernelEx");
    (void)extra;
    return run_kernel(function, launch->gridDimX, launch->gridDimY, launch->gridDimZ,
                      launch->blockDimX * launch->blockDimY * launch->blockDimZ, launch->hStream, parameters);
}
PER_THREAD(cuLaunchKernelEx);

CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                           unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                           unsigned int shared_bytes, CUstream stream, void **parameters)
{
    log_call("cuLaunchCooperativeKernel");
    (void)shared_bytes;
    return run_kernel(function, grid_x, grid_y, grid_z, block_x * block_y * block_z, stream, parameters);
}
PER_THREAD(cuLaunchCooperativeKernel);

CUresult CUDAAPI cuCtxSynchronize(void)
{
    if (current < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (takes_turns())
        return wait_for_lane(minors[current], ALL_LANES), CUDA_SUCCESS;
    sleep_until(busy_until[current]);
    return CUDA_SUCCESS;
}

/* Of CUDA 13: what is asked for as of that version. A program that takes it for the older one gives it no context. */
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext context) { return (void)context, cuCtxSynchronize(); }

CUresult CUDAAPI cuStreamSynchronize(CUstream stream)
{
    if (takes_turns())
        return wait_for_lane(minors[current], (int)lane_of(stream)), CUDA_SUCCESS;
    return cuCtxSynchronize();
}
PER_THREAD(cuStreamSynchronize);

CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags)
{
    static unsigned made;
    (void)flags;
    return *stream = (CUstream)(config()->slice_ns ? &own_streams[made++ % OWN_LANES] : (char *)&a_stream), CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    (void)priority;
    return cuStreamCreate(stream, flags);
}

/* An event: the time at which what was given to the GPU before it will be done. */
CUresult CUDAAPI cuEventCreate(CUevent *event, unsigned int flags)
{
    log_call("cuEventCreate");
    (void)flags;
    return (*event = calloc(1, sizeof(gpu_event))) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult CUDAAPI cuEventDestroy_v2(CUevent event) { log_call("cuEventDestroy_v2"); return free(event), CUDA_SUCCESS; }
CUresult CUDAAPI cuEventDestroy(CUevent event) { return cuEventDestroy_v2(event); }

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream)
{
    log_call("cuEventRecord");
    if (current < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (captured) /* the real driver makes it a node of the graph */
        return CUDA_SUCCESS;
    if (takes_turns())
        push_event(minors[current], lane_of(stream), (gpu_event *)event);
    else
        ((gpu_event *)event)->done_at = higher(busy_until[current], now_ns());
    return CUDA_SUCCESS;
}
PER_THREAD(cuEventRecord);

CUresult CUDAAPI cuEventQuery(CUevent event)
{
    log_call("cuEventQuery");
    gpu_event *of = (gpu_event *)event;
    return (takes_turns() ? is_event_done(minors[current], of) : of->done_at <= now_ns()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult CUDAAPI cuEventSynchronize(CUevent event)
{
    gpu_event *of = (gpu_event *)event;
    while (takes_turns() && !is_event_done(minors[current], of))
        sleep_until(now_ns() + 2000);
    return sleep_until(of->done_at), CUDA_SUCCESS;
}
CUresult CUDAAPI cuEventElapsedTime(float *ms, CUevent from, CUevent until)
{
    log_call("cuEventElapsedTime");
    if (cuEventQuery(from) != CUDA_SUCCESS || cuEventQuery(until) != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_READY;
    double ns = ((double)((gpu_event *)until)->done_at - (double)((gpu_event *)from)->done_at) * (double)config()->event_percent / 100;
    return *ms = (float)(ns / 1e6), CUDA_SUCCESS;
}
CUresult CUDAAPI cuEventElapsedTime_v2(float *ms, CUevent from, CUevent until) { return cuEventElapsedTime(ms, from, until); }

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    log_call("cuStreamIsCapturing");
    (void)stream;
    return *status = captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
PER_THREAD(cuStreamIsCapturing);

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphCreate(CUgraph *made, unsigned int flags)
{
    (void)flags;
    return (*made = calloc(1, sizeof(graph))) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    (void)stream, (void)mode;
    return captured ? CUDA_ERROR_ILLEGAL_STATE : cuGraphCreate((CUgraph *)&captured, 0);
}

CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *made)
{
    (void)stream;
    if (!captured)
        return CUDA_ERROR_ILLEGAL_STATE;
    *made = (CUgraph)captured;
    captured = NULL;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph to, const CUgraphNode *after, size_t count,
                                         const CUDA_KERNEL_NODE_PARAMS *parameters)
{
    (void)after, (void)count;
    uint64_t duration_ns = duration_of(parameters->func, blocks_of(parameters), parameters->kernelParams);
    return add_node(node, (graph *)to,
                    (graph_node){.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *parameters, .duration_ns = duration_ns});
}

/* The older struct begins like the newer one, up to what an older program does not have. */
CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *node, CUgraph to, const CUgraphNode *after, size_t count,
                                      const CUDA_KERNEL_NODE_PARAMS_v1 *parameters)
{
    CUDA_KERNEL_NODE_PARAMS newer = {0};
    memcpy(&newer, parameters, sizeof *parameters);
    return cuGraphAddKernelNode_v2(node, to, after, count, &newer);
}

CUresult CUDAAPI cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph to, const CUgraphNode *after, size_t count,
                                        CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    log_call("cuGraphAddMemAllocNode");
    (void)after, (void)count;
    graph_node made = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .asked = parameters->bytesize, .bytes = parameters->bytesize};
    graph *in = (graph *)to;
    for (graph_node *one = in->nodes; one < in->nodes + in->count && !made.address; one++)
        if (one->is_freed == 1 && one->asked >= made.asked) {
            one->is_freed = 2; /* and its address is another one's */
            made.address = one->address;
            made.bytes = 0;
        }
    if (!made.address)
        cuMemAddressReserve(&made.address, made.bytes, 0, 0, 0);
    parameters->dptr = made.address;
    return add_node(node, in, made);
}

CUresult CUDAAPI cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph to, const CUgraphNode *after, size_t count, CUdeviceptr address)
{
    log_call("cuGraphAddMemFreeNode");
    (void)after, (void)count;
    graph *in = (graph *)to;
    for (graph_node *one = in->nodes; one < in->nodes + in->count; one++)
        if (one->address == address && !one->is_freed) {
            one->is_freed = 1;
            return add_node(node, in, (graph_node){.type = CU_GRAPH_NODE_TYPE_MEM_FREE});
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    log_call("cuGraphMemAllocNodeGetParams");
    *parameters = (CUDA_MEM_ALLOC_NODE_PARAMS){.bytesize = ((graph_node *)node)->asked, .dptr = ((graph_node *)node)->address};
    parameters->poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    return CUDA_SUCCESS;
}

/* As a child that is moved into its parent: it stays the parent's. */
CUresult CUDAAPI cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph to, const CUgraphNode *after, size_t count, CUgraph child)
{
    log_call("cuGraphAddChildGraphNode");
    (void)after, (void)count;
    return add_node(node, (graph *)to, (graph_node){.type = CU_GRAPH_NODE_TYPE_GRAPH, .child = (graph *)child});
}

CUresult CUDAAPI cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *child)
{
    log_call("cuGraphChildGraphNodeGetGraph");
    return *child = (CUgraph)((graph_node *)node)->child, CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph of, CUgraphNode *nodes, size_t *count)
{
    log_call("cuGraphGetNodes");
    graph *in = (graph *)of;
    for (size_t i = 0; nodes && i < *count && i < in->count; i++)
        nodes[i] = (CUgraphNode)&in->nodes[i];
    return *count = in->count, CUDA_SUCCESS;
}
CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
    log_call("cuGraphNodeGetType");
    return *type = ((graph_node *)node)->type, CUDA_SUCCESS;
}
CUresult CUDAAPI cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *parameters)
{
    return *parameters = ((graph_node *)node)->kernel, CUDA_SUCCESS;
}

static uint64_t bytes_of_graph(const graph *of)
{
    uint64_t bytes = 0;
    for (const graph_node *node = of->nodes; node < of->nodes + of->count; node++)
        bytes += node->bytes + (node->child ? bytes_of_graph(node->child) : 0);
    return bytes;
}

static uint64_t bytes_left_by(const graph *of)
{
    uint64_t bytes = 0;
    for (const graph_node *node = of->nodes; node < of->nodes + of->count; node++)
        bytes += node->is_left ? node->asked : 0;
    return bytes;
}

static uint64_t used_by_graphs(CUdevice device)
{
    uint64_t left = 0, shared = 0;
    for (const graph *one = mapped_graphs; one; one = one->next)
        if (one->device == device) {
            left += bytes_left_by(one);
            shared = one->is_mapped ? higher(shared, bytes_of_graph(one) - bytes_left_by(one)) : shared;
        }
    return left + shared;
}

static void forget_graphs(void)
{
    captured = mapped_graphs = NULL;
    memset(graphs_reserved, 0, sizeof graphs_reserved);
}

static CUresult free_in_graphs(CUdeviceptr address)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory.guard);
    for (graph *one = mapped_graphs; one; one = one->next)
        for (graph_node *node = one->nodes; node < one->nodes + one->count; node++)
            if (node->is_left && node->address == address) {
                node->is_left = 0;
                result = CUDA_SUCCESS;
            }
    pthread_mutex_unlock(&memory.guard);
    return result;
}

CUresult CUDAAPI cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
    log_call("cuDeviceGetGraphMemAttribute");
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    int is_reserved = attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT || attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
    pthread_mutex_lock(&memory.guard);
    *(cuuint64_t *)value = is_reserved ? graphs_reserved[device] : used_by_graphs(device);
    pthread_mutex_unlock(&memory.guard);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice device)
{
    log_call("cuDeviceGraphMemTrim");
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&memory.guard);
    for (graph *one = mapped_graphs; one; one = one->next)
        if (one->device == device && one->done_at <= now_ns())
            one->is_mapped = 0;
    uint64_t used = used_by_graphs(device);
    give_memory(minors[device], graphs_reserved[device] - used, 0);
    graphs_reserved[device] = used;
    pthread_mutex_unlock(&memory.guard);
    return CUDA_SUCCESS;
}

static CUresult map_graph(graph *of, int runs)
{
    CUresult result = current < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS || !bytes_of_graph(of))
        return result;
    pthread_mutex_lock(&memory.guard);
    if (bytes_left_by(of)) { /* of the launch before */
        pthread_mutex_unlock(&memory.guard);
        return CUDA_ERROR_INVALID_VALUE;
    }
    graph before = *of;
    if (!of->is_known) {
        of->next = mapped_graphs;
        mapped_graphs = of;
    }
    of->is_known = of->is_mapped = 1;
    of->device = current;
    of->done_at = runs ? UINT64_MAX : of->done_at;
    for (graph_node *node = of->nodes; node < of->nodes + of->count; node++)
        node->is_left = runs && node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && !node->is_freed;
    uint64_t used = used_by_graphs(current), reserved = graphs_reserved[current];
    if (used > reserved && !take_memory(minors[current], used - reserved, 0)) {
        if (!before.is_known)
            mapped_graphs = of->next;
        *of = before;
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        graphs_reserved[current] = higher(used, reserved);
    }
    pthread_mutex_unlock(&memory.guard);
    return result;
}

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph from, unsigned long long flags)
{
    log_call("cuGraphInstantiateWithFlags");
    (void)flags;
    graph *copy = malloc(sizeof(graph));
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *copy = *(graph *)from;
    *made = (CUgraphExec)copy;
    return CUDA_SUCCESS;
}

/* The kernels of another graph of the same shape, which are read now. */
CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec of, CUgraph from, CUgraphExecUpdateResultInfo *why)
{
    log_call("cuGraphExecUpdate_v2");
    graph *updated = (graph *)of;
    const graph *newer = (const graph *)from;
    int is_alike = updated->count == newer->count;
    for (unsigned i = 0; i < newer->count && is_alike; i++)
        is_alike = updated->nodes[i].type == newer->nodes[i].type;
    why->result = is_alike ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    if (!is_alike)
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    for (unsigned i = 0; i < newer->count; i++) {
        updated->nodes[i].kernel = newer->nodes[i].kernel;
        updated->nodes[i].duration_ns = newer->nodes[i].duration_ns;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec of, CUstream stream)
{
    log_call("cuGraphUpload");
    (void)stream;
    return map_graph((graph *)of, 0);
}
PER_THREAD(cuGraphUpload);

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *made, CUgraph from, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
    log_call("cuGraphInstantiateWithParams");
    CUresult result = cuGraphInstantiateWithFlags(made, from, parameters->flags);
    parameters->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result == CUDA_SUCCESS && parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD ? map_graph((graph *)*made, 0) : result;
}
PER_THREAD(cuGraphInstantiateWithParams);

static uint64_t duration_of_graph(const graph *of)
{
    uint64_t duration = 0;
    for (const graph_node *node = of->nodes; node < of->nodes + of->count; node++)
        duration += node->duration_ns + (node->child ? duration_of_graph(node->child) : 0);
    return duration;
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec from, CUstream stream)
{
    log_call("cuGraphLaunch");
    graph *of = (graph *)from;
    CUresult result = map_graph(of, 1);
    if (result != CUDA_SUCCESS)
        return result;
    result = run(duration_of_graph(of), 1000, 0, stream);
    of->done_at = busy_until[current];
    return result;
}
PER_THREAD(cuGraphLaunch);

CUresult CUDAAPI cuGraphDestroy(CUgraph of) { return free(of), CUDA_SUCCESS; }

/* What it has left stays the program's to free. */
CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec of)
{
    log_call("cuGraphExecDestroy");
    graph *ended = (graph *)of, **at = &mapped_graphs;
    pthread_mutex_lock(&memory.guard);
    ended->is_mapped = 0;
    int is_left = bytes_left_by(ended) != 0;
    while (*at && *at != ended)
        at = &(*at)->next;
    if (*at && !is_left)
        *at = ended->next;
    pthread_mutex_unlock(&memory.guard);
    if (!is_left)
        free(ended);
    return CUDA_SUCCESS;
}

/* --- errors --- */

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name)
{
    switch ((int)error) {
    case CUDA_SUCCESS: *name = "CUDA_SUCCESS"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    default: *name = "CUDA_ERROR_UNKNOWN";
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

/* --- asking for functions --- */

/* The newest variant of a function that is not newer than `version`; its per-thread one where the flags want that and there is one. */
static CUresult find_function(const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
    int wants_per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, best = -1, is_known = 0;
    *function = NULL;
    for (const driver_symbol *symbol = driver_symbols; symbol->base; symbol++) {
        if (strcmp(symbol->base, name) != 0 || symbol->is_per_thread > wants_per_thread || !strcmp(config()->lacks, name))
            continue;
        is_known = 1;
        int rank = 2 * symbol->since + symbol->is_per_thread;
        if (symbol->since <= version && symbol->since <= config()->cuda_version && rank > best) {
            best = rank;
            *function = symbol->function;
        }
    }
    *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS
              : is_known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

/* Up to CUDA 11 what was not found was an error; since CUDA 12 it is a status. */
CUresult CUDAAPI cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
    log_call("cuGetProcAddress");
    CUdriverProcAddressQueryResult status;
    CUresult result = find_function(name, function, version, flags, &status);
    return result == CUDA_SUCCESS && !*function ? CUDA_ERROR_NOT_FOUND : result;
}

CUresult CUDAAPI cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                     CUdriverProcAddressQueryResult *status)
{
    log_call("cuGetProcAddress_v2");
    CUdriverProcAddressQueryResult unwanted;
    return find_function(name, function, version, flags, status ? status : &unwanted);
}

/* NVIDIA's own libraries ask for tables that are not documented. */
CUresult CUDAAPI cuGetExportTable(const void **table, const CUuuid *id)
{
    (void)id;
    return *table = NULL, CUDA_ERROR_NOT_FOUND;
}
