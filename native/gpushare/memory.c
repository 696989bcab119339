/* Counting memory: each kind that the driver gives, from before it is given to when the driver has it back.
 *
 * The order is always the same. What is to be taken is counted first, so two threads never take the same rest; then the driver is
 * asked; what it refuses is given back. What is to be freed is taken out of the table first, because as soon as the driver has it back
 * another thread may get the same address; it is put back if the driver fails.
 */
#define _GNU_SOURCE
#include "library.h"
#include "region.h"

#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the table of what this process has ---- */

/* Many locks, because threads of one program allocate at once, and none of them may wait for another one's call of the driver. */
enum { SHARDS = 16, BUCKETS = 1024 };
static struct shard {
    pthread_mutex_t guard;
    struct allocation *bucket[BUCKETS];
} shards[SHARDS] = {
    [0 ... SHARDS - 1] = {.guard = PTHREAD_MUTEX_INITIALIZER},
};
static _Atomic bool has_allocations;

/* Addresses are multiples of 512 and more: the product's upper bits differ all the same. */
static uint64_t hash_of(enum class class, uint64_t value) { return ((value ^ (uint64_t)class << 60) * 0x9e3779b97f4a7c15u) >> 40; }
static struct shard *shard_of(uint64_t hash) { return &shards[hash % SHARDS]; }

static struct allocation **find_in(struct shard *shard, uint64_t hash, enum class class, uint64_t value)
{
    struct allocation **at = &shard->bucket[hash / SHARDS % BUCKETS];
    while (*at && ((*at)->class != class || (*at)->value != value))
        at = &(*at)->next;
    return at;
}

bool remember(const struct allocation *allocation)
{
    struct allocation *kept = malloc(sizeof *kept);
    if (!kept)
        return false;
    atomic_store_explicit(&has_allocations, true, memory_order_relaxed);
    uint64_t hash = hash_of(allocation->class, allocation->value);
    struct shard *shard = shard_of(hash);
    struct allocation **first = &shard->bucket[hash / SHARDS % BUCKETS];
    *kept = *allocation;
    pthread_mutex_lock(&shard->guard);
    kept->next = *first;
    *first = kept;
    pthread_mutex_unlock(&shard->guard);
    return true;
}

/* One reference less or more. true where it is known; a copy of it, and at 0 references it is out of the table. */
static bool refer(enum class class, uint64_t value, int by, struct allocation *found)
{
    uint64_t hash = hash_of(class, value);
    struct shard *shard = shard_of(hash);
    pthread_mutex_lock(&shard->guard);
    struct allocation **at = find_in(shard, hash, class, value), *one = *at, *last = NULL;
    if (one) {
        one->references += (unsigned)by;
        *found = *one;
        if (one->references == 0) {
            last = one;
            *at = one->next;
        }
    }
    pthread_mutex_unlock(&shard->guard);
    free(last); /* a program's own may wait for a thread that is about to call the driver */
    return one != NULL;
}

bool look_up(enum class class, uint64_t value, struct allocation *found) { return refer(class, value, 0, found); }

bool take_out(enum class class, uint64_t value, struct allocation *found)
{ return refer(class, value, -1, found) && found->references == 0; }

void amend(const struct allocation *changed)
{
    uint64_t hash = hash_of(changed->class, changed->value);
    struct shard *shard = shard_of(hash);
    pthread_mutex_lock(&shard->guard);
    struct allocation *one = *find_in(shard, hash, changed->class, changed->value), *next = one ? one->next : NULL;
    if (one) {
        *one = *changed;
        one->next = next;
    }
    pthread_mutex_unlock(&shard->guard);
}

static void give_size(int gpu, enum kind kind, uint64_t bytes);

/* With the context itself, unless it was only reset. */
static void give_all_of(CUcontext context, bool has_ended)
{
    struct allocation *given = NULL;
    for (struct shard *shard = shards; shard < shards + SHARDS; shard++) {
        pthread_mutex_lock(&shard->guard);
        for (unsigned i = 0; i < BUCKETS; i++)
            for (struct allocation **at = &shard->bucket[i], *one; (one = *at) != NULL;) {
                if (one->context != context || (one->class == USE && !has_ended)) {
                    at = &one->next;
                    continue;
                }
                give_size(one->gpu, one->kind, one->bytes);
                *at = one->next;
                one->next = given;
                given = one;
            }
        pthread_mutex_unlock(&shard->guard);
    }
    for (struct allocation *next; given; given = next) {
        next = given->next;
        free(given);
    }
}

enum { MOST_PRIMARY = 64, DEFAULT_CONTEXT_BYTES = 300 << 20 };
static _Atomic(CUcontext) primary[MOST_PRIMARY]; /* by ordinal */

/* Whose end is that of what the current one has: of a green context, which is a part of the primary one, that one's. */
static CUcontext owning_context(void)
{
    struct allocation use;
    CUcontext context = NULL;
    CUdevice device = current_device();
    REAL(cuCtxGetCurrent)(&context);
    CUcontext whole = device < 0 || device >= MOST_PRIMARY ? NULL : primary[device];
    return whole && !look_up(USE, (uintptr_t)context, &use) ? whole : context;
}

/* ---- taking and giving ---- */

bool free_unused(int gpu, CUdevice device)
{
    if (gpu < 0 || !own_slot())
        return false;
    reclaim_dead();
    read_pools(gpu, true);
    read_graph_memory(device, true);
    return true;
}

bool reserve_bytes(int gpu, CUdevice device, enum kind kind, uint64_t bytes)
{ return take_bytes(gpu, kind, bytes) || (free_unused(gpu, device) && take_bytes(gpu, kind, bytes)); }

/* What the driver takes for a size: pages of 2 MiB, each for one allocation of at least half of it, or shared by smaller ones. These
   count together as many pages as they need at least, however they are packed; what is free in the driver's pages beyond that is in
   what the agent observes. Of pools and graphs the driver says what they have, and virtual memory is asked for in whole pages. */
enum { UNIT_BYTES = 512, PAGE_UNITS = 4096, PAGE_BYTES = PAGE_UNITS * UNIT_BYTES, MOST_PARTS = 16 };

/* Of those that share pages. They need as many pages as they have units for; and, for each k, a k-th of a page for each (k + 1)-th of a
   page that one is larger than: no k + 1 of these fit into a page (a dual feasible function, Fekete and Schepers 2001). */
static struct shared_pages {
    pthread_mutex_t guard;
    uint64_t units, parts[MOST_PARTS + 1];
} shared_pages[2][MOST_GPUS] = {
    [0 ... 1] = {[0 ... MOST_GPUS - 1] = {.guard = PTHREAD_MUTEX_INITIALIZER}}}; /* managed ones have others */

static uint64_t round_up(uint64_t bytes, uint64_t to) { return bytes > UINT64_MAX / 2 ? bytes : (bytes + to - 1) / to * to; }

static uint64_t bytes_of_pages(const struct shared_pages *of)
{
    uint64_t most = round_up(of->units, PAGE_UNITS) / PAGE_UNITS;
    for (unsigned k = 2; k <= MOST_PARTS; k++) {
        uint64_t pages = (of->parts[k] + k - 1) / k;
        most = pages > most ? pages : most;
    }
    return most * PAGE_BYTES;
}

/* By how much what is to be counted becomes more, or less, and of which kind. What shares pages is noted here. */
static uint64_t change_pages(int gpu, enum kind *kind, uint64_t bytes, bool is_less)
{
    if (*kind != LINEAR && *kind != MANAGED && *kind != ARRAY)
        return bytes;
    if (gpu < 0 || bytes >= PAGE_BYTES / 2 || bytes == 0)
        return round_up(bytes, PAGE_BYTES);
    struct shared_pages *of = &shared_pages[*kind == MANAGED][gpu];
    uint64_t units = round_up(bytes, UNIT_BYTES) / UNIT_BYTES, by = is_less ? UINT64_MAX : 1;
    *kind = *kind == MANAGED ? MANAGED : LINEAR;
    pthread_mutex_lock(&of->guard);
    uint64_t before = bytes_of_pages(of);
    of->units += by * units;
    for (unsigned k = 2; k <= MOST_PARTS; k++)
        of->parts[k] += by * (((k + 1) * units - 1) / PAGE_UNITS);
    uint64_t after = bytes_of_pages(of);
    pthread_mutex_unlock(&of->guard);
    return is_less ? before - after : after - before;
}

static void give_size(int gpu, enum kind kind, uint64_t bytes)
{
    uint64_t less = change_pages(gpu, &kind, bytes, true);
    give_bytes(gpu, kind, less);
}

static bool reserve_size(int gpu, CUdevice device, enum kind kind, uint64_t bytes)
{
    uint64_t lacking = change_pages(gpu, &kind, bytes, false);
    if (lacking == 0 || reserve_bytes(gpu, device, kind, lacking))
        return true;
    /* What other threads have put into a shared page meanwhile stays there, and the page is counted. */
    charge_bytes(gpu, kind, lacking - change_pages(gpu, &kind, bytes, true));
    return false;
}

/* What was reserved is kept or given back, as the driver answered. Where there is no place in the table the memory stays counted. */
static CUresult keep(CUresult result, enum class class, uint64_t value, int gpu, enum kind kind, uint64_t bytes)
{
    struct allocation made = {.value = value, .class = class, .kind = kind, .gpu = gpu, .references = 1, .bytes = bytes};
    static int said;
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        say_once(&said, "the GPU has no %llu bytes left, though the container's share has", (unsigned long long)bytes);
    if (result != CUDA_SUCCESS) {
        give_size(gpu, kind, bytes);
        return result;
    }
    /* The end of a context frees what was allocated in it, without a call for each. */
    made.context = class == HANDLE ? NULL : owning_context(); /* a handle's memory does not end with a context */
    remember(&made);
    return result;
}

void put_back(struct allocation taken_out)
{
    taken_out.references = 1;
    remember(&taken_out);
}

static void settle_freed(bool is_taken_out, const struct allocation *freed, CUresult result)
{
    if (is_taken_out && result == CUDA_SUCCESS)
        give_size(freed->gpu, freed->kind, freed->bytes);
    else if (is_taken_out)
        put_back(*freed);
}

/* ---- locations ---- */

enum { UNSEEN_DEVICE = INT_MAX }; /* of which no file has a share */

static bool is_without_processors(int node)
{
    char path[sizeof GPUSHARE_NODES + 32], first = '\n';
    snprintf(path, sizeof path, GPUSHARE_NODES "/node%d/cpulist", node);
    forbid_cancel();
    int file = open(path, O_RDONLY | O_CLOEXEC);
    bool is_read = file >= 0 && read(file, &first, 1) >= 0;
    if (file >= 0)
        close(file);
    allow_cancel();
    return is_read && first == '\n';
}

/* On GH200 and GB200 in NUMA mode a GPU's memory is a NUMA node of the host, and memory of that node is the GPU's. Nodes of GPUs that
   the container does not have are there, too. */
static CUdevice device_of_node(int node)
{
    int count = 0, config = 0, found = -1;
    bool has_nodes = false;
    if (REAL(cuDeviceGetCount)(&count) != CUDA_SUCCESS)
        return -1;
    for (CUdevice device = 0; device < count; device++) {
        if (REAL(cuDeviceGetAttribute)(&config, CU_DEVICE_ATTRIBUTE_NUMA_CONFIG, device) != CUDA_SUCCESS ||
            config != CU_DEVICE_NUMA_CONFIG_NUMA_NODE)
            continue;
        has_nodes = true;
        if (REAL(cuDeviceGetAttribute)(&found, CU_DEVICE_ATTRIBUTE_NUMA_ID, device) == CUDA_SUCCESS && found == node)
            return device;
    }
    return has_nodes && is_without_processors(node) ? UNSEEN_DEVICE : -1;
}

/* Of one that is not there, or before cuInit, the driver has the right error. */
static CUdevice device_of_id(int id)
{
    int count = 0;
    return REAL(cuDeviceGetCount)(&count) == CUDA_SUCCESS && id < count ? id : -1;
}

CUdevice device_at(CUmemLocationType type, int id)
{
    CUdevice current;
    switch ((int)type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return device_of_id(id);
    case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN: return device_of_id(id & 0xff); /* the domain's number is in the next byte */
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT: return -1; /* that of the thread's processor, and no GPU's node has one */
    case CU_MEM_LOCATION_TYPE_HOST_NUMA: return device_of_node(id);
    default: current = current_device(); return current < 0 ? 0 : current; /* what is not known counts */
    }
}

/* ---- linear memory ---- */

/* Without a context the driver has the right error. */
#define RESERVE_OR_RETURN(kind, bytes)                            \
    CUdevice device = current_device();                           \
    int gpu = gpu_of_device(device);                              \
    if (device >= 0 && !reserve_size(gpu, device, kind, bytes)) { \
        return CUDA_ERROR_OUT_OF_MEMORY;                          \
    }

HOOK(cuMemAlloc_v2, (CUdeviceptr *address, size_t bytes), (address, bytes))
{
    RESERVE_OR_RETURN(LINEAR, bytes);
    CUresult result = real(address, bytes);
    return device < 0 ? result : keep(result, ADDRESS, result ? 0 : *address, gpu, LINEAR, bytes);
}

HOOK(cuMemAlloc, (CUdeviceptr_v1 *address, unsigned int bytes), (address, bytes))
{
    RESERVE_OR_RETURN(LINEAR, bytes);
    CUresult result = real(address, bytes);
    return device < 0 ? result : keep(result, ADDRESS, result ? 0 : *address, gpu, LINEAR, bytes);
}

HOOK(cuMemAllocManaged, (CUdeviceptr *address, size_t bytes, unsigned int flags), (address, bytes, flags))
{
    RESERVE_OR_RETURN(MANAGED, bytes);
    CUresult result = real(address, bytes, flags);
    return device < 0 ? result : keep(result, ADDRESS, result ? 0 : *address, gpu, MANAGED, bytes);
}

/* The driver chooses the pitch: rows of a multiple of 512 bytes so far. It is asked for what that takes, and charged for what it is. */
enum { LEAST_PITCH = 512 };
static uint64_t bytes_of_rows(uint64_t width, uint64_t height)
{ return (width + LEAST_PITCH - 1) / LEAST_PITCH * LEAST_PITCH * height; }

static void charge_difference(int gpu, enum kind kind, uint64_t reserved, uint64_t *bytes, uint64_t found)
{
    if (found > reserved)
        charge_bytes(gpu, kind, found - reserved);
    else
        give_bytes(gpu, kind, reserved - found);
    *bytes = found;
}

static uint64_t change_size(int gpu, uint64_t before, uint64_t bytes)
{
    if (before != bytes) {
        enum kind kind = LINEAR;
        charge_bytes(gpu, kind, change_pages(gpu, &kind, bytes, false));
        give_size(gpu, LINEAR, before);
    }
    return bytes;
}

HOOK(cuMemAllocPitch_v2, (CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element),
     (address, pitch, width, height, element))
{
    uint64_t bytes = bytes_of_rows(width, height);
    RESERVE_OR_RETURN(LINEAR, bytes);
    CUresult result = real(address, pitch, width, height, element);
    if (device < 0)
        return result;
    if (result == CUDA_SUCCESS)
        bytes = change_size(gpu, bytes, (uint64_t)*pitch * height);
    return keep(result, ADDRESS, result ? 0 : *address, gpu, LINEAR, bytes);
}

HOOK(cuMemAllocPitch, (CUdeviceptr_v1 *address, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element),
     (address, pitch, width, height, element))
{
    uint64_t bytes = bytes_of_rows(width, height);
    RESERVE_OR_RETURN(LINEAR, bytes);
    CUresult result = real(address, pitch, width, height, element);
    if (device < 0)
        return result;
    if (result == CUDA_SUCCESS)
        bytes = change_size(gpu, bytes, (uint64_t)*pitch * height);
    return keep(result, ADDRESS, result ? 0 : *address, gpu, LINEAR, bytes);
}

HOOK(cuMemFree_v2, (CUdeviceptr address), (address))
{
    struct allocation freed;
    /* Not known: NULL, which the driver allows, memory of another process, or of a pool. The driver judges. */
    bool is_known = take_out(ADDRESS, address, &freed);
    CUresult result = real(address);
    settle_freed(is_known, &freed, result);
    if (!is_known && result == CUDA_SUCCESS) /* cuMemFree takes what was allocated in a stream, too */
        read_freed();
    return result;
}

HOOK(cuMemFree, (CUdeviceptr_v1 address), (address))
{
    struct allocation freed;
    bool is_known = take_out(ADDRESS, address, &freed);
    CUresult result = real(address);
    settle_freed(is_known, &freed, result);
    return result;
}

/* ---- pools: what counts is what they have reserved, because a free gives nothing back ---- */

enum { MOST_POOLS = 1024 };
static struct known_pool {
    CUmemoryPool pool;
    CUdevice device; /* whose memory it has, whichever uses it; -1: the host's, or another process's */
    int gpu;
    enum kind kind;
    bool has_grown; /* by more than it lacked: what is free in it is in pieces, or of a stream that is not so far */
    bool is_ended; /* by the program; by the driver, as soon as nothing is in it */
    uint64_t reserved;
} pools[MOST_POOLS];
static _Atomic unsigned pools_count;
/* Held over the driver's call: of two threads that ask at once each would otherwise count on the same reserve. Of pools and graphs
   together, because who is refused by one of them looks into both. */
pthread_mutex_t reserves_guard = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

bool is_capturing(CUstream stream, bool is_per_thread)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = is_per_thread && has_real(SLOT_cuStreamIsCapturing_ptsz) ? REAL(cuStreamIsCapturing_ptsz)(stream, &status)
                                                                               : REAL(cuStreamIsCapturing)(stream, &status);
    /* An error, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: of the legacy stream, while another one is captured. Whatever is done in it now
       would end that capture, so it counts as captured. */
    return (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_SUPPORTED) || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUstreamCaptureMode relax_capture(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    return REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS ? mode : CU_STREAM_CAPTURE_MODE_RELAXED;
}

void restore_capture(CUstreamCaptureMode mode) { REAL(cuThreadExchangeStreamCaptureMode)(&mode); }

static uint64_t ask_pool(CUmemoryPool pool, CUmemPool_attribute attribute)
{
    cuuint64_t bytes = 0;
    return REAL(cuMemPoolGetAttribute)(pool, attribute, &bytes) == CUDA_SUCCESS ? bytes : 0;
}

static void read_pool(struct known_pool *known)
{
    charge_difference(known->gpu, known->kind, known->reserved, &known->reserved,
                      ask_pool(known->pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
}

static CUresult end_of(struct known_pool *known, __typeof__(cuMemPoolDestroy) *destroy)
{
    CUresult result = destroy(known->pool);
    if (result == CUDA_SUCCESS)
        *known = pools[--pools_count];
    return result;
}

void read_pools(int gpu, bool trims)
{
    if (atomic_load_explicit(&pools_count, memory_order_relaxed) == 0)
        return;
    hold(&reserves_guard);
    CUstreamCaptureMode mode = relax_capture();
    for (struct known_pool *known = pools + pools_count; known-- > pools;) /* in the place of one that ends comes the last */
        if ((known->gpu == gpu || gpu == EVERY_GPU) && known->reserved) { /* it gets more by allocations, which read it */
            if (trims || known->is_ended)
                REAL(cuMemPoolTrimTo)(known->pool, 0);
            read_pool(known);
            if (known->is_ended && !known->reserved)
                end_of(known, REAL(cuMemPoolDestroy));
        }
    restore_capture(mode);
    release(&reserves_guard);
}

void read_freed(void)
{
    if (atomic_load_explicit(&pools_count, memory_order_relaxed) == 0 || pthread_mutex_trylock(&reserves_guard) != 0)
        return; /* who waits for the GPU must not wait for another thread's allocation, too */
    read_pools(EVERY_GPU, false);
    pthread_mutex_unlock(&reserves_guard);
}

static struct known_pool *find_pool(CUmemoryPool pool)
{
    for (struct known_pool *known = pools; known < pools + pools_count; known++)
        if (known->pool == pool)
            return known;
    return NULL;
}

/* NULL where it is one too many. Of ended ones that are not empty, what is in them stays counted. */
static struct known_pool *add_pool(CUmemoryPool pool, CUdevice device, int allocation)
{
    if (pools_count == MOST_POOLS)
        read_pools(EVERY_GPU, false);
    for (struct known_pool *known = pools; pools_count == MOST_POOLS && known < pools + MOST_POOLS; known++)
        if (known->is_ended)
            end_of(known, REAL(cuMemPoolDestroy));
    if (pools_count == MOST_POOLS)
        return NULL;
    enum kind kind = allocation == CU_MEM_ALLOCATION_TYPE_MANAGED ? MANAGED : POOL;
    pools[pools_count] = (struct known_pool){.pool = pool, .device = device, .gpu = gpu_of_device(device), .kind = kind};
    return &pools[pools_count++];
}

static void remember_pool(CUmemoryPool pool, CUdevice device, int allocation)
{
    hold(&reserves_guard);
    add_pool(pool, device, allocation);
    release(&reserves_guard);
}

/* Drivers before CUDA 13 do not say where a pool is. What a program has made is known; so it is the one that a GPU has from the start. */
static CUdevice owner_of(CUmemoryPool pool, CUdevice otherwise)
{
    CUmemoryPool own;
    int count = 0;
    REAL(cuDeviceGetCount)(&count);
    for (CUdevice device = 0; device < count; device++)
        if (REAL(cuDeviceGetDefaultMemPool)(&own, device) == CUDA_SUCCESS && own == pool)
            return device;
    return otherwise;
}

/* Managed memory without a GPU of its own begins with the host, and moves to the GPU that uses it first. */
static bool is_of_user(int allocation, int type, CUdevice from)
{ return allocation == CU_MEM_ALLOCATION_TYPE_MANAGED && (from < 0 || type == CU_MEM_LOCATION_TYPE_INVALID); }

static struct known_pool *known_pool(CUmemoryPool pool, CUdevice user)
{
    int type = CU_MEM_LOCATION_TYPE_DEVICE, id, allocation = CU_MEM_ALLOCATION_TYPE_PINNED;
    struct known_pool *known = find_pool(pool);
    if (known)
        return known;
    if (REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_LOCATION_TYPE, &type) != CUDA_SUCCESS ||
        REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_LOCATION_ID, &id) != CUDA_SUCCESS)
        id = owner_of(pool, user);
    REAL(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &allocation);
    CUdevice from = device_at((CUmemLocationType)type, id);
    return add_pool(pool, is_of_user(allocation, type, from) ? user : from, allocation);
}

HOOK(cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps *properties), (pool, properties))
{
    CUresult result = real(pool, properties);
    CUdevice device = result ? -1 : device_at(properties->location.type, properties->location.id);
    if (result == CUDA_SUCCESS && !is_of_user(properties->allocType, properties->location.type, device))
        remember_pool(*pool, device, properties->allocType);
    return result;
}

/* It is the exporter's, here it has nothing of its own. */
HOOK(cuMemPoolImportFromShareableHandle,
     (CUmemoryPool * pool, void *shared, CUmemAllocationHandleType type, unsigned long long flags), (pool, shared, type, flags))
{
    CUresult result = real(pool, shared, type, flags);
    if (result == CUDA_SUCCESS)
        remember_pool(*pool, -1, CU_MEM_ALLOCATION_TYPE_PINNED);
    return result;
}

struct pool_use {
    struct known_pool *pool;
    uint64_t lacking;
};

/* A pool grows by whole chunks of 32 MiB (H200, measured), but where what it has is no multiple of that. */
enum { CHUNK_BYTES = 32 << 20 };
static uint64_t lacking_in(const struct known_pool *known, uint64_t bytes)
{
    uint64_t wanted = ask_pool(known->pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) + bytes, chunk = known->reserved & -known->reserved;
    chunk = chunk && chunk < CHUNK_BYTES ? chunk : CHUNK_BYTES;
    return wanted > known->reserved ? round_up(wanted - known->reserved, chunk) : 0;
}

/* One that has grown so is also refused what lies in it, if the share is exceeded: it would grow again. */
static bool take_lacking_in(struct pool_use *use, uint64_t bytes)
{
    use->lacking = lacking_in(use->pool, bytes);
    return (use->lacking == 0 && !use->pool->has_grown) || take_bytes(use->pool->gpu, use->pool->kind, use->lacking);
}

/* Called, as end_pool, with the guard, which is held from before the pool is looked for: another thread may destroy it. */
static CUresult begin_pool(CUmemoryPool pool, CUdevice device, uint64_t bytes, struct pool_use *use)
{
    static int said;
    use->lacking = 0;
    use->pool = known_pool(pool, device);
    if (use->pool == NULL) {
        say_once(&said, "the program has more than %d pools: the others get no memory", MOST_POOLS);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (use->pool->is_ended)
        return CUDA_ERROR_INVALID_VALUE;
    if (use->pool->device < 0)
        return CUDA_SUCCESS;
    read_pool(use->pool);
    bool is_taken = take_lacking_in(use, bytes);
    if (!is_taken && free_unused(use->pool->gpu, use->pool->device)) { /* trimmed, this pool may lack more than before */
        use->pool = find_pool(pool); /* and have another place */
        is_taken = take_lacking_in(use, bytes);
    }
    if (!is_taken)
        return CUDA_ERROR_OUT_OF_MEMORY;
    use->pool->reserved += use->lacking; /* counted now; read_pool corrects it by what the driver says */
    return CUDA_SUCCESS;
}

static void end_pool(const struct pool_use *use)
{
    uint64_t counted = use->pool->reserved;
    read_pool(use->pool);
    use->pool->has_grown |= use->pool->reserved > counted;
}

#define ALLOCATE_ASYNC(per_thread, pool_of, call)                                    \
    struct pool_use use;                                                             \
    CUdevice device = device_of_stream(stream);                                      \
    /* Captured, it is a node of a graph, which is counted when that is launched. */ \
    if (device < 0 || is_capturing(stream, per_thread))                              \
        return call;                                                                 \
    hold(&reserves_guard);                                                           \
    CUresult result = begin_pool(pool_of, device, bytes, &use);                      \
    if (result == CUDA_SUCCESS) {                                                    \
        result = call;                                                               \
        end_pool(&use);                                                              \
    }                                                                                \
    release(&reserves_guard);                                                        \
    return result

static CUmemoryPool pool_of_device(CUdevice device)
{
    CUmemoryPool pool = NULL;
    REAL(cuDeviceGetMemPool)(&pool, device);
    return pool;
}

HOOK(cuMemAllocAsync, (CUdeviceptr *address, size_t bytes, CUstream stream), (address, bytes, stream))
{ ALLOCATE_ASYNC(false, pool_of_device(device), real(address, bytes, stream)); }
HOOK(cuMemAllocAsync_ptsz, (CUdeviceptr *address, size_t bytes, CUstream stream), (address, bytes, stream))
{ ALLOCATE_ASYNC(true, pool_of_device(device), real(address, bytes, stream)); }
HOOK(cuMemAllocFromPoolAsync, (CUdeviceptr *address, size_t bytes, CUmemoryPool from, CUstream stream),
     (address, bytes, from, stream))
{ ALLOCATE_ASYNC(false, from, real(address, bytes, from, stream)); }
HOOK(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr *address, size_t bytes, CUmemoryPool from, CUstream stream),
     (address, bytes, from, stream))
{ ALLOCATE_ASYNC(true, from, real(address, bytes, from, stream)); }

/* It may free what cuMemAlloc gave, too. What a pool gives back it does when the program next waits; that is read then. */
HOOK(cuMemFreeAsync, (CUdeviceptr address, CUstream stream), (address, stream))
{
    struct allocation freed;
    bool is_known = take_out(ADDRESS, address, &freed);
    CUresult result = real(address, stream);
    settle_freed(is_known, &freed, result);
    return result;
}
HOOK_ALSO(cuMemFreeAsync_ptsz, cuMemFreeAsync, (CUdeviceptr address, CUstream stream), (address, stream));

HOOK(cuMemPoolTrimTo, (CUmemoryPool pool, size_t least), (pool, least))
{
    hold(&reserves_guard); /* another thread's allocation may count on what is reserved */
    CUresult result = real(pool, least);
    struct known_pool *known = find_pool(pool);
    if (known)
        read_pool(known);
    release(&reserves_guard);
    return result;
}

/* The driver keeps one until its last address is freed and each free is done, and nobody could ask it any more. So it is destroyed then;
   what a destroy does at once is done at once. */
HOOK(cuMemPoolDestroy, (CUmemoryPool pool), (pool))
{
    CUmemoryPool first;
    CUresult result = CUDA_SUCCESS;
    hold(&reserves_guard);
    struct known_pool *known = find_pool(pool);
    if (known) {
        CUstreamCaptureMode mode = relax_capture();
        REAL(cuMemPoolTrimTo)(pool, 0);
        read_pool(known);
        restore_capture(mode);
    }
    if (!known) {
        result = real(pool);
    } else if (known->device < 0 || !known->reserved || owner_of(pool, -1) >= 0) {
        result = end_of(known, real);
    } else {
        known->is_ended = true;
        if (pool_of_device(known->device) == pool && REAL(cuDeviceGetDefaultMemPool)(&first, known->device) == CUDA_SUCCESS)
            REAL(cuDeviceSetMemPool)(known->device, first);
    }
    release(&reserves_guard);
    return result;
}

/* ---- virtual memory: it is the handle's, and stays while the handle is held or mapped ---- */

HOOK(cuMemCreate,
     (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags),
     (handle, bytes, properties, flags))
{
    CUdevice device = properties ? device_at(properties->location.type, properties->location.id) : -1;
    if (device < 0)
        return real(handle, bytes, properties, flags);
    int gpu = gpu_of_device(device);
    if (!reserve_size(gpu, device, VIRTUAL, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(handle, bytes, properties, flags);
    return keep(result, HANDLE, result ? 0 : *handle, gpu, VIRTUAL, bytes);
}

static void unbind(uint64_t object, int gpu, uint64_t offset);

static void drop_handle(uint64_t handle)
{
    struct allocation freed;
    if (take_out(HANDLE, handle, &freed)) {
        give_size(freed.gpu, freed.kind, freed.bytes);
        unbind(handle, EVERY_GPU, 0);
    }
}

static void hold_handle(CUresult result, const CUmemGenericAllocationHandle *handle)
{
    struct allocation unused;
    if (result == CUDA_SUCCESS)
        refer(HANDLE, *handle, 1, &unused);
}

HOOK(cuMemRelease, (CUmemGenericAllocationHandle handle), (handle))
{
    struct allocation freed;
    bool is_last = take_out(HANDLE, handle, &freed), is_known = is_last || look_up(HANDLE, handle, &freed);
    CUresult result = real(handle);
    if (result != CUDA_SUCCESS && is_known && !is_last)
        refer(HANDLE, handle, 1, &freed);
    settle_freed(is_last, &freed, result);
    if (is_last && result == CUDA_SUCCESS)
        unbind(handle, EVERY_GPU, 0);
    return result;
}

HOOK(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *handle, void *address), (handle, address))
{
    CUresult result = real(handle, address);
    hold_handle(result, handle);
    return result;
}

/* What has no memory of this process: an object, or what another process has. So its end is noticed, with what is bound to it. */
static void remember_object(CUmemGenericAllocationHandle handle)
{ remember(&(struct allocation){.value = handle, .class = HANDLE, .gpu = -1, .references = 1}); }

/* What the process has exported itself comes back as the handle that it has. */
HOOK(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *handle, void *shared, CUmemAllocationHandleType type),
     (handle, shared, type))
{
    CUresult result = real(handle, shared, type);
    struct allocation unused;
    if (result == CUDA_SUCCESS && !refer(HANDLE, *handle, 1, &unused))
        remember_object(*handle);
    return result;
}

HOOK(cuMemMap, (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),
     (address, bytes, offset, handle, flags))
{
    CUresult result = real(address, bytes, offset, handle, flags);
    hold_handle(result, &handle);
    if (result == CUDA_SUCCESS)
        remember(&(struct allocation){.value = address, .class = MAPPING, .references = 1, .bytes = bytes, .handle = handle});
    return result;
}

/* One call may end many mappings, which lie one behind the other. */
HOOK(cuMemUnmap, (CUdeviceptr address, size_t bytes), (address, bytes))
{
    CUresult result = real(address, bytes);
    struct allocation mapping;
    for (CUdeviceptr at = address; result == CUDA_SUCCESS && at < address + bytes; at += mapping.bytes ? mapping.bytes : bytes) {
        if (!take_out(MAPPING, at, &mapping))
            break;
        drop_handle(mapping.handle);
    }
    return result;
}

/* ---- what is bound to an object of several GPUs stays, too, until it is unbound or the object ends ---- */

#define ENDPOINT(id) ((uint64_t)1 << 63 | (id)) /* no handle has such a number */
#define SPARSE(array) ((uint64_t)1 << 62 | (uintptr_t)(array))
enum { ANY_GPU = -3 };

static void unbind(uint64_t object, int gpu, uint64_t offset)
{
    uint64_t hash = hash_of(BOUND, object);
    struct shard *shard = shard_of(hash);
    struct allocation *ended = NULL, *one;
    pthread_mutex_lock(&shard->guard);
    for (struct allocation **at = &shard->bucket[hash / SHARDS % BUCKETS]; (one = *at) != NULL;)
        if (one->class == BOUND && one->value == object &&
            (gpu == EVERY_GPU || ((gpu == ANY_GPU || one->gpu == gpu) && one->bytes == offset))) {
            *at = one->next;
            one->next = ended;
            ended = one;
        } else {
            at = &one->next;
        }
    pthread_mutex_unlock(&shard->guard);
    while ((one = ended) != NULL) {
        ended = one->next;
        drop_handle(one->handle);
        free(one);
    }
}

static CUresult bind(CUresult result, uint64_t object, uint64_t offset, uint64_t handle)
{
    struct allocation memory;
    if (result == CUDA_SUCCESS && refer(HANDLE, handle, 1, &memory))
        remember(&(struct allocation){
            .value = object, .class = BOUND, .gpu = memory.gpu, .references = 1, .bytes = offset, .handle = handle});
    return result;
}

/* Of memory that cuMemCreate gave; 0 else. */
static CUmemGenericAllocationHandle handle_at(CUdeviceptr address)
{
    CUmemGenericAllocationHandle handle;
    if (REAL(cuMemRetainAllocationHandle)(&handle, (void *)(uintptr_t)address) != CUDA_SUCCESS)
        return 0;
    REAL(cuMemRelease)(handle);
    return handle;
}

static CUresult end_binding(CUresult result, uint64_t object, int gpu, uint64_t offset)
{
    if (result == CUDA_SUCCESS)
        unbind(object, gpu, offset);
    return result;
}

HOOK(cuMulticastCreate, (CUmemGenericAllocationHandle *object, const CUmulticastObjectProp *properties), (object, properties))
{
    CUresult result = real(object, properties);
    if (result == CUDA_SUCCESS)
        remember_object(*object);
    return result;
}

HOOK(cuMulticastBindMem,
     (CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle memory, size_t from, size_t size,
      unsigned long long flags),
     (object, offset, memory, from, size, flags))
{ return bind(real(object, offset, memory, from, size, flags), object, offset, memory); }
HOOK(cuMulticastBindMem_v2,
     (CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUmemGenericAllocationHandle memory, size_t from,
      size_t size, unsigned long long flags),
     (object, device, offset, memory, from, size, flags))
{ return bind(real(object, device, offset, memory, from, size, flags), object, offset, memory); }
HOOK(cuMulticastBindAddr,
     (CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t size, unsigned long long flags),
     (object, offset, address, size, flags))
{ return bind(real(object, offset, address, size, flags), object, offset, handle_at(address)); }
HOOK(cuMulticastBindAddr_v2,
     (CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUdeviceptr address, size_t size,
      unsigned long long flags),
     (object, device, offset, address, size, flags))
{ return bind(real(object, device, offset, address, size, flags), object, offset, handle_at(address)); }
HOOK(cuMulticastUnbind, (CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t size),
     (object, device, offset, size))
{ return end_binding(real(object, device, offset, size), object, gpu_of_device(device), offset); }

HOOK(cuLogicalEndpointBindMem,
     (CUlogicalEndpointId id, CUdevice device, cuuint64_t offset, CUmemGenericAllocationHandle memory, cuuint64_t from,
      cuuint64_t size, unsigned long long flags),
     (id, device, offset, memory, from, size, flags))
{ return bind(real(id, device, offset, memory, from, size, flags), ENDPOINT(id), offset, memory); }
HOOK(cuLogicalEndpointBindAddr,
     (CUlogicalEndpointId id, CUdevice device, cuuint64_t offset, void *address, cuuint64_t size, unsigned long long flags),
     (id, device, offset, address, size, flags))
{ return bind(real(id, device, offset, address, size, flags), ENDPOINT(id), offset, handle_at((uintptr_t)address)); }
HOOK(cuLogicalEndpointUnbind, (CUlogicalEndpointId id, CUdevice device, cuuint64_t offset, cuuint64_t size),
     (id, device, offset, size))
{ return end_binding(real(id, device, offset, size), ENDPOINT(id), gpu_of_device(device), offset); }
HOOK(cuLogicalEndpointDestroy, (CUlogicalEndpointId id), (id)) { return end_binding(real(id), ENDPOINT(id), EVERY_GPU, 0); }

/* A sparse array has the memory of handles, too: a tile that is mapped again has another one's. */
static uint64_t tile_of(const CUarrayMapInfo *of)
{
    __typeof__(of->subresource.sparseLevel) level = of->subresource.sparseLevel;
    bool is_tail = of->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL;
    uint64_t numbers[] = {level.level, level.layer, level.offsetX, level.offsetY, level.offsetZ},
             tail[] = {UINT64_MAX, of->subresource.miptail.layer, of->subresource.miptail.offset, 0, 0}, tile = 0;
    for (unsigned i = 0; i < 5; i++)
        tile = (tile + (is_tail ? tail : numbers)[i]) * 0x9e3779b97f4a7c15u;
    return tile;
}

HOOK(cuMemMapArrayAsync, (CUarrayMapInfo * tiles, unsigned int count, CUstream stream), (tiles, count, stream))
{
    CUresult result = real(tiles, count, stream);
    for (const CUarrayMapInfo *one = tiles; result == CUDA_SUCCESS && one < tiles + count; one++) {
        unbind(SPARSE(one->resource.array), ANY_GPU, tile_of(one));
        if (one->memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            bind(result, SPARSE(one->resource.array), tile_of(one), one->memHandle.memHandle);
    }
    return result;
}
HOOK_ALSO(cuMemMapArrayAsync_ptsz, cuMemMapArrayAsync, (CUarrayMapInfo * tiles, unsigned int count, CUstream stream),
          (tiles, count, stream));

/* ---- arrays: nobody says what one takes, so it is computed; rounding is in what the agent observes ---- */

/* Of one element of one channel, times 16: compressed and planar formats have parts of bytes. */
static unsigned sixteenths_of(CUarray_format format, unsigned *channels)
{
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: return 16;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: return 32;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT: return 64;
    }
    *channels = 1; /* all others have theirs in the format */
    switch ((int)format) {
    case CU_AD_FORMAT_BC1_UNORM:
    case CU_AD_FORMAT_BC1_UNORM_SRGB:
    case CU_AD_FORMAT_BC4_UNORM:
    case CU_AD_FORMAT_BC4_SNORM: return 8;
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1:
    case CU_AD_FORMAT_BC2_UNORM:
    case CU_AD_FORMAT_BC2_UNORM_SRGB:
    case CU_AD_FORMAT_BC3_UNORM:
    case CU_AD_FORMAT_BC3_UNORM_SRGB:
    case CU_AD_FORMAT_BC5_UNORM:
    case CU_AD_FORMAT_BC5_SNORM:
    case CU_AD_FORMAT_BC6H_UF16:
    case CU_AD_FORMAT_BC6H_SF16:
    case CU_AD_FORMAT_BC7_UNORM:
    case CU_AD_FORMAT_BC7_UNORM_SRGB: return 16;
    case CU_AD_FORMAT_NV12:
    case CU_AD_FORMAT_UINT8_SEMIPLANAR_420:
    case CU_AD_FORMAT_UINT8_PLANAR_420: return 24;
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1:
    case CU_AD_FORMAT_NV16:
    case CU_AD_FORMAT_YUY2:
    case CU_AD_FORMAT_UINT8_PACKED_422:
    case CU_AD_FORMAT_UINT8_SEMIPLANAR_422:
    case CU_AD_FORMAT_UINT8_PLANAR_422: return 32;
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4:
    case CU_AD_FORMAT_Y416: return 128;
    default: return 64; /* four bytes: the rest of 8 bits with four channels, of 10 bits, of 16 bits and less than four */
    }
}

static uint64_t bytes_of_level(uint64_t width, uint64_t height, uint64_t depth, CUarray_format format, unsigned channels)
{
    unsigned sixteenths = sixteenths_of(format, &channels);
    uint64_t elements, bytes;
    if (__builtin_mul_overflow(width, (height ? height : 1) * (depth ? depth : 1), &elements) ||
        __builtin_mul_overflow(elements, (uint64_t)sixteenths * channels, &bytes))
        return UINT64_MAX / 2; /* which nobody has */
    return (bytes + 15) / 16;
}

static uint64_t bytes_of_array(const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned levels)
{
    uint64_t bytes = 0, width = of->Width, height = of->Height, depth = of->Depth;
    if (of->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) /* it gets memory of handles, which are counted */
        return 0;
    for (unsigned level = 0; level < (levels ? levels : 1) && level < 32 && bytes < UINT64_MAX / 4; level++) {
        bytes += bytes_of_level(width, height, depth, of->Format, of->NumChannels);
        if (width <= 1 && height <= 1 && (depth <= 1 || of->Flags & CUDA_ARRAY3D_LAYERED))
            break; /* the driver makes no more levels than there are halves */
        width = width > 1 ? width / 2 : width;
        height = height > 1 ? height / 2 : height;
        if (!(of->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)))
            depth = depth > 1 ? depth / 2 : depth;
    }
    return bytes;
}

#define CREATE_ARRAY(array, bytes, call)                                                                     \
    uint64_t all_bytes = bytes;                                                                              \
    RESERVE_OR_RETURN(ARRAY, all_bytes);                                                                     \
    CUresult result = call;                                                                                  \
    return device < 0 ? result : keep(result, OBJECT, result ? 0 : (uintptr_t)*array, gpu, ARRAY, all_bytes)

HOOK(cuArrayCreate_v2, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR *of), (array, of))
{ CREATE_ARRAY(array, of ? bytes_of_level(of->Width, of->Height, 1, of->Format, of->NumChannels) : 0, real(array, of)); }
HOOK(cuArrayCreate, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *of), (array, of))
{ CREATE_ARRAY(array, of ? bytes_of_level(of->Width, of->Height, 1, of->Format, of->NumChannels) : 0, real(array, of)); }
HOOK(cuArray3DCreate_v2, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *of), (array, of))
{ CREATE_ARRAY(array, of ? bytes_of_array(of, 1) : 0, real(array, of)); }
HOOK(cuArray3DCreate, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *of), (array, of))
{ CREATE_ARRAY(array, of ? bytes_of_level(of->Width, of->Height, of->Depth, of->Format, of->NumChannels) : 0, real(array, of)); }
HOOK(cuMipmappedArrayCreate, (CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned int levels), (array, of, levels))
{ CREATE_ARRAY(array, of ? bytes_of_array(of, levels) : 0, real(array, of, levels)); }

#define DESTROY_ARRAY(array)                                    \
    struct allocation freed;                                    \
    bool is_known = take_out(OBJECT, (uintptr_t)array, &freed); \
    CUresult result = real(array);                              \
    settle_freed(is_known, &freed, result);                     \
    return end_binding(result, SPARSE(array), EVERY_GPU, 0)
HOOK(cuArrayDestroy, (CUarray array), (array)) { DESTROY_ARRAY(array); }
HOOK(cuMipmappedArrayDestroy, (CUmipmappedArray array), (array)) { DESTROY_ARRAY(array); }

/* ---- contexts: what one takes the agent has measured; until it has, and where it is wrong, what is observed says it ---- */

/* Before the driver makes it, which takes it a third of a second: the agent must not see what is not counted yet. false: the container
   has no room for it. Without limits' files a program may still compute, so it gets its context. */
static bool reserve_context(CUdevice device, struct allocation *made)
{
    struct limits limits;
    *made = (struct allocation){.class = USE, .kind = CONTEXT, .gpu = gpu_of_device(device), .references = 1};
    if (made->gpu < 0 || !own_slot())
        return true;
    read_limits(made->gpu, &limits);
    made->bytes = limits.context ? limits.context : DEFAULT_CONTEXT_BYTES;
    return reserve_bytes(made->gpu, device, CONTEXT, made->bytes);
}

/* One that is known already costs nothing. */
static CUresult keep_context(CUresult result, struct allocation *made, const CUcontext *found)
{
    struct allocation known;
    made->context = result ? NULL : *found;
    made->value = (uintptr_t)made->context;
    hold_context(made->gpu, made->bytes);
    if (result != CUDA_SUCCESS || look_up(USE, made->value, &known))
        give_bytes(made->gpu, CONTEXT, made->bytes);
    else if (made->bytes)
        remember(made);
    return result;
}

/* With it goes what was allocated in it. */
static void drop_context(CUcontext context)
{
    forget_launches_of(context);
    give_all_of(context, true);
}

static bool is_primary_active(CUdevice device)
{
    unsigned flags;
    int is_active = 0;
    return REAL(cuDevicePrimaryCtxGetState)(device, &flags, &is_active) == CUDA_SUCCESS && is_active;
}

/* By ordinal. No lock may be held over the driver's calls: it may wait for the loader's. */
static _Atomic bool is_beginning[MOST_PRIMARY];

/* Not by what the driver says is active: after fork that may be the parent's. */
static bool is_primary_known(CUdevice device) { return device < 0 || device >= MOST_PRIMARY || primary[device]; }

/* The runtime's way: one context of a GPU for the whole process, counted by the driver. It is created at the first of these calls. */
HOOK(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device), (context, device))
{
    struct allocation made;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    /* Of threads that begin at once one counts it. Where the one is refused and the others are not, theirs is in what the agent
       observes. */
    if (is_primary_known(device) || atomic_exchange(&is_beginning[device], true))
        return real(context, device);
    if (is_primary_known(device)) { /* by now */
        result = real(context, device);
    } else if (reserve_context(device, &made)) {
        result = keep_context(real(context, device), &made, context);
        primary[device] = made.bytes ? made.context : NULL;
    }
    is_beginning[device] = false;
    return result;
}

/* Who has retained one that is reset still has it, but nothing is in it any more. One that has ended is not known before anything of it
   is given back: a thread that retains it meanwhile asks for it again. */
static CUresult settle_primary(CUresult result, CUdevice device, bool is_reset)
{
    if (result != CUDA_SUCCESS || device < 0 || device >= MOST_PRIMARY)
        return result;
    bool has_ended = primary[device] && !is_primary_active(device);
    CUcontext context = has_ended ? atomic_exchange(&primary[device], NULL) : primary[device];
    if (context && (has_ended || is_reset)) {
        forget_launches_of(context);
        give_all_of(context, has_ended);
    }
    if (has_ended) {
        read_pools(gpu_of_device(device), false);
        read_graph_memory(device, true);
    }
    return result;
}

HOOK(cuDevicePrimaryCtxRelease_v2, (CUdevice device), (device)) { return settle_primary(real(device), device, false); }
HOOK_ALSO(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device), (device));
HOOK(cuDevicePrimaryCtxReset_v2, (CUdevice device), (device)) { return settle_primary(real(device), device, true); }
HOOK_ALSO(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, (CUdevice device), (device));

/* It retains the primary context. */
HOOK(cuGreenCtxCreate, (CUgreenCtx * green, CUdevResourceDesc resources, CUdevice device, unsigned int flags),
     (green, resources, device, flags))
{
    CUcontext context;
    CUresult result = body_cuDevicePrimaryCtxRetain(REAL(cuDevicePrimaryCtxRetain), &context, device);
    if (result != CUDA_SUCCESS)
        return result;
    result = real(green, resources, device, flags);
    settle_primary(REAL(cuDevicePrimaryCtxRelease_v2)(device), device, false);
    return result;
}
HOOK(cuGreenCtxDestroy, (CUgreenCtx green), (green))
{
    CUresult result = real(green);
    for (CUdevice device = 0; device < MOST_PRIMARY; device++) /* nobody says of which it was */
        settle_primary(result, device, false);
    return result;
}

#define CREATE_CONTEXT(call)                    \
    struct allocation made;                     \
    if (!reserve_context(device, &made))        \
        return CUDA_ERROR_OUT_OF_MEMORY;        \
    CUresult result = call;                     \
    return keep_context(result, &made, context)

HOOK(cuCtxCreate_v2, (CUcontext *context, unsigned int flags, CUdevice device), (context, flags, device))
{ CREATE_CONTEXT(real(context, flags, device)); }
HOOK_ALSO(cuCtxCreate, cuCtxCreate_v2, (CUcontext *context, unsigned int flags, CUdevice device), (context, flags, device));
HOOK(cuCtxCreate_v3, (CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device),
     (context, affinity, count, flags, device))
{ CREATE_CONTEXT(real(context, affinity, count, flags, device)); }
HOOK(cuCtxCreate_v4, (CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device),
     (context, parameters, flags, device))
{ CREATE_CONTEXT(real(context, parameters, flags, device)); }

HOOK(cuCtxDestroy_v2, (CUcontext context), (context))
{
    CUresult result = real(context);
    if (result == CUDA_SUCCESS)
        drop_context(context);
    return result;
}
HOOK_ALSO(cuCtxDestroy, cuCtxDestroy_v2, (CUcontext context), (context));

/* The old way counts who uses a context, and the last one's cuCtxDetach ends it. */
HOOK(cuCtxAttach, (CUcontext *context, unsigned int flags), (context, flags))
{
    struct allocation use;
    CUresult result = real(context, flags);
    if (result == CUDA_SUCCESS && !refer(USE, (uintptr_t)*context, 1, &use)) /* who has created it is another user */
        remember(&(struct allocation){.value = (uintptr_t)*context, .class = USE, .gpu = -1, .references = 2, .context = *context});
    return result;
}

HOOK(cuCtxDetach, (CUcontext context), (context))
{
    struct allocation use = {.gpu = -1};
    CUresult result = real(context);
    if (result == CUDA_SUCCESS && (!refer(USE, (uintptr_t)context, -1, &use) || use.references == 0)) {
        give_bytes(use.gpu, CONTEXT, use.bytes);
        drop_context(context);
    }
    return result;
}

/* ---- what a context's limits reserve ---- */

static uint64_t attribute_of(CUdevice device, CUdevice_attribute attribute)
{
    int value = 0;
    return REAL(cuDeviceGetAttribute)(&value, attribute, device) == CUDA_SUCCESS && value > 0 ? (uint64_t)value : 1;
}

/* What one more of that limit takes; 0: nothing. Stacks are there for all threads that the GPU can have at once. */
static uint64_t bytes_for_each(CUlimit limit, CUdevice device)
{
    uint64_t processors = attribute_of(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    switch ((int)limit) {
    case CU_LIMIT_STACK_SIZE: return processors * attribute_of(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    case CU_LIMIT_PER_BLOCK_MEMORY_SIZE:
        return processors * attribute_of(device, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
    case CU_LIMIT_PRINTF_FIFO_SIZE:
    case CU_LIMIT_MALLOC_HEAP_SIZE: return 1;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH: return 150 << 20; /* as much as that, by NVIDIA's guide */
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT: return 4096; /* of a launch's parameters */
    default: return 0;
    }
}

/* Of what was so at first, which is in what the context was found to take. */
static uint64_t bytes_above(uint64_t first, uint64_t value, uint64_t each)
{
    uint64_t bytes;
    return value <= first ? 0 : __builtin_mul_overflow(value - first, each, &bytes) ? UINT64_MAX / 2 : bytes;
}

HOOK(cuCtxSetLimit, (CUlimit limit, size_t value), (limit, value))
{
    CUdevice device = current_device();
    int gpu = gpu_of_device(device);
    CUcontext context = owning_context();
    struct allocation had, now = {.value = (uintptr_t)context * CU_LIMIT_MAX + limit,
                                  .class = LIMIT,
                                  .kind = CONTEXT,
                                  .gpu = gpu,
                                  .references = 1,
                                  .context = context};
    uint64_t each = device < 0 ? 0 : bytes_for_each(limit, device), reserved = 0;
    size_t before;
    if (!each || REAL(cuCtxGetLimit)(&before, limit) != CUDA_SUCCESS)
        return real(limit, value);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    hold(&reserves_guard);
    bool is_known = look_up(LIMIT, now.value, &had);
    now.bytes = is_known ? had.bytes : 0;
    now.handle = is_known ? had.handle : before;
    uint64_t wanted = bytes_above(now.handle, value, each);
    if (wanted > now.bytes)
        reserved = wanted - now.bytes;
    if (!reserved || reserve_bytes(gpu, device, CONTEXT, reserved)) {
        hold_context(gpu, reserved);
        result = real(limit, value);
        /* The driver may have rounded it. Where it refuses, it stays as it was. */
        uint64_t found = REAL(cuCtxGetLimit)(&before, limit) == CUDA_SUCCESS ? bytes_above(now.handle, before, each) : now.bytes;
        charge_difference(gpu, CONTEXT, now.bytes + reserved, &now.bytes, found);
        if (is_known)
            amend(&now);
        else
            remember(&now);
    }
    release(&reserves_guard);
    return result;
}

/* What a process had stays counted while it is away, because who restores it need not be in the container, and it must fit then. On
   another GPU it would be counted where it was. */
HOOK(cuCheckpointProcessRestore, (int pid, CUcheckpointRestoreArgs *how), (pid, how))
{
    static int said;
    for (unsigned i = 0; how && how->gpuPairs && i < how->gpuPairsCount; i++)
        if (memcmp(&how->gpuPairs[i].oldUuid, &how->gpuPairs[i].newUuid, sizeof(CUuuid)) != 0) {
            say_once(&said, "a checkpointed process can be restored onto the GPU of its share alone");
            return CUDA_ERROR_NOT_SUPPORTED;
        }
    return real(pid, how);
}

/* ---- fork ---- */

void forget_memory(void)
{
    bool has_any = atomic_exchange(&has_allocations, false); /* else its pages stay the parent's: most children only call exec */
    for (struct shard *shard = shards; shard < shards + SHARDS; shard++) {
        shard->guard = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* also who only asks for an address holds it */
        if (has_any)
            memset(shard->bucket, 0, sizeof shard->bucket); /* what hung in it is lost: free() may not be called here */
    }
    reserves_guard = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    pools_count = 0;
    memset((void *)primary, 0, sizeof primary);
    memset((void *)is_beginning, 0, sizeof is_beginning);
    for (int i = 0; i < 2 * MOST_GPUS; i++)
        shared_pages[i % 2][i / 2] = (struct shared_pages){.guard = PTHREAD_MUTEX_INITIALIZER};
}
