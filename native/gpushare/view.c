/* What a program is shown of its GPU: its share, so that one which takes a part of all memory takes that part of its share. */
#define _GNU_SOURCE
#include "library.h"
#include "region.h"

#define NVML_NO_UNVERSIONED_FUNC_DEFS /* nvmlDeviceGetComputeRunningProcesses and its _v2 are two functions */
#include <nvml.h>
#include <stdio.h>
#include <string.h>

/* false: the container's memory is not limited there, or nothing is known of it: the driver's answer is right. */
static bool read_share(int gpu, uint64_t *total, uint64_t *used)
{
    struct limits limits;
    if (gpu < 0)
        return false;
    read_limits(gpu, &limits);
    if (!limits.limits_memory)
        return false;
    *total = limits.memory;
    read_pools(gpu, false);
    reclaim_dead(); /* a process that has ended does not say so */
    *used = held_bytes(gpu, &limits);
    *used = *used < *total ? *used : *total; /* after it was made smaller; a program subtracts one from the other */
    return true;
}

static uint64_t lower(uint64_t one, uint64_t other) { return one < other ? one : other; }

/* ---- CUDA ---- */

HOOK(cuMemGetInfo_v2, (size_t *free_bytes, size_t *total), (free_bytes, total))
{
    size_t of_gpu_free = 0, of_gpu = 0;
    uint64_t share, used;
    CUresult result = real(&of_gpu_free, &of_gpu); /* into places of ours: the program's may be NULL */
    if (result != CUDA_SUCCESS)
        return result;
    if (read_share(gpu_of_device(current_device()), &share, &used)) {
        of_gpu_free = lower(of_gpu_free, share - used); /* others may have taken what is ours: it is not free then */
        of_gpu = lower(of_gpu, share);
    }
    if (free_bytes) /* the driver takes NULL for either */
        *free_bytes = of_gpu_free;
    if (total)
        *total = of_gpu;
    return result;
}

static unsigned in_32_bits(uint64_t bytes) { return bytes > UINT32_MAX ? UINT32_MAX : (unsigned)bytes; }

HOOK(cuMemGetInfo, (unsigned int *free_bytes, unsigned int *total), (free_bytes, total))
{
    unsigned of_gpu_free = 0, of_gpu = 0;
    uint64_t share, used;
    CUresult result = real(&of_gpu_free, &of_gpu);
    if (result != CUDA_SUCCESS)
        return result;
    if (read_share(gpu_of_device(current_device()), &share, &used)) {
        of_gpu_free = in_32_bits(lower(of_gpu_free, share - used));
        of_gpu = in_32_bits(lower(of_gpu, share));
    }
    if (free_bytes)
        *free_bytes = of_gpu_free;
    if (total)
        *total = of_gpu;
    return result;
}

HOOK(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device), (bytes, device))
{
    uint64_t share, used;
    CUresult result = real(bytes, device);
    if (result == CUDA_SUCCESS && read_share(gpu_of_device(device), &share, &used))
        *bytes = lower(*bytes, share);
    return result;
}

HOOK(cuDeviceTotalMem, (unsigned int *bytes, CUdevice device), (bytes, device))
{
    uint64_t share, used;
    CUresult result = real(bytes, device);
    if (result == CUDA_SUCCESS && read_share(gpu_of_device(device), &share, &used))
        *bytes = in_32_bits(lower(*bytes, share));
    return result;
}

/* ---- NVML ---- */

#define HOOK_NVML(name, parameters, arguments)                                            \
    static nvmlReturn_t body_##name(__typeof__(name) *real, UNPACK parameters);           \
    HOOK_EXPORT(name, body_##name, enter_nvml_hook, nvmlReturn_t, parameters, arguments); \
    static nvmlReturn_t body_##name(__typeof__(name) *real, UNPACK parameters)

static int gpu_of_handle(nvmlDevice_t device)
{
    char uuid[96];
    if (REAL(nvmlDeviceGetUUID)(device, uuid, sizeof uuid) != NVML_SUCCESS || strlen(uuid) < 5)
        return -1;
    return gpu_named(uuid + 4);
}

/* GB10 uses the host's memory, of which NVML says nothing; a share of it is known all the same. */
static bool is_unified(nvmlReturn_t result, const void *memory) { return result == NVML_ERROR_NOT_SUPPORTED && memory; }

HOOK_NVML(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *memory), (device, memory))
{
    uint64_t share, used;
    nvmlReturn_t result = real(device, memory);
    bool is_of_host = is_unified(result, memory);
    if ((result == NVML_SUCCESS || is_of_host) && read_share(gpu_of_handle(device), &share, &used)) {
        if (is_of_host)
            memory->total = memory->free = UINT64_MAX;
        result = NVML_SUCCESS;
        memory->total = lower(memory->total, share);
        memory->used = lower(used, memory->total);
        memory->free = lower(memory->free, memory->total - memory->used);
    }
    return result;
}

HOOK_NVML(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *memory), (device, memory))
{
    uint64_t share, used;
    nvmlReturn_t result = real(device, memory);
    bool is_of_host = is_unified(result, memory);
    if ((result == NVML_SUCCESS || is_of_host) && read_share(gpu_of_handle(device), &share, &used)) {
        if (is_of_host)
            memory->total = memory->free = UINT64_MAX;
        result = NVML_SUCCESS;
        memory->total = lower(memory->total, share);
        memory->reserved = 0; /* the driver's own, of which a share has none */
        memory->used = lower(used, memory->total);
        memory->free = lower(memory->free, memory->total - memory->used);
    }
    return result;
}

/* What a MIG instance is; it has whole MiB. */
HOOK_NVML(nvmlDeviceGetAttributes_v2, (nvmlDevice_t device, nvmlDeviceAttributes_t *attributes), (device, attributes))
{
    uint64_t share, used;
    nvmlReturn_t result = real(device, attributes);
    if (result == NVML_SUCCESS && read_share(gpu_of_handle(device), &share, &used))
        attributes->memorySizeMB = lower(attributes->memorySizeMB, share >> 20);
    return result;
}
HOOK_EXPORT(nvmlDeviceGetAttributes, body_nvmlDeviceGetAttributes_v2, enter_nvml_hook, nvmlReturn_t,
            (nvmlDevice_t device, nvmlDeviceAttributes_t *attributes), (device, attributes));

/* The container's own processes, by the PIDs of its namespace: the driver's list may have all containers', by the host's. Entries of
   `size` bytes begin with a nvmlProcessInfo_v1_t; in longer ones the IDs of a MIG instance follow, or that there is none. */
static nvmlReturn_t list_own(nvmlDevice_t device, int gpu, unsigned *count, void *entries, size_t size)
{
    struct slot_use uses[MOST_SLOTS];
    unsigned ids[2] = {UINT32_MAX, UINT32_MAX};
    if (REAL(nvmlDeviceGetGpuInstanceId)(device, &ids[0]) || REAL(nvmlDeviceGetComputeInstanceId)(device, &ids[1]))
        ids[0] = ids[1] = UINT32_MAX;
    read_pools(gpu, false);
    unsigned found = list_slots(gpu, uses, MOST_SLOTS), room = *count;
    for (unsigned i = 0; i < found && i < room && entries; i++) {
        nvmlProcessInfo_v1_t *entry = (nvmlProcessInfo_v1_t *)((char *)entries + i * size);
        memset(entry, 0xff, size);
        entry->pid = (unsigned)uses[i].pid;
        entry->usedGpuMemory = uses[i].bytes;
        if (size >= sizeof *entry + sizeof ids)
            memcpy(entry + 1, ids, sizeof ids);
    }
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define LIST_OWN                                                                                           \
    int gpu = count ? gpu_of_handle(device) : -1;                                                          \
    return gpu < 0 ? real(device, count, entries) : list_own(device, gpu, count, entries, sizeof *entries)

HOOK_NVML(nvmlDeviceGetComputeRunningProcesses, (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *entries),
          (device, count, entries))
{ LIST_OWN; }
HOOK_NVML(nvmlDeviceGetComputeRunningProcesses_v2, (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *entries),
          (device, count, entries))
{ LIST_OWN; }
HOOK_NVML(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *entries),
          (device, count, entries))
{ LIST_OWN; }

HOOK_NVML(nvmlDeviceGetRunningProcessDetailList, (nvmlDevice_t device, nvmlProcessDetailList_t *list), (device, list))
{
    bool has_own = list && list->version == nvmlProcessDetailList_v1 &&
                   (list->mode == NVML_PROCESS_MODE_COMPUTE || list->mode == NVML_PROCESS_MODE_ALL);
    int gpu = has_own ? gpu_of_handle(device) : -1;
    if (gpu < 0)
        return real(device, list);
    nvmlReturn_t result = list_own(device, gpu, &list->numProcArrayEntries, list->procArray, sizeof *list->procArray);
    for (unsigned i = 0; result == NVML_SUCCESS && i < list->numProcArrayEntries && list->procArray; i++)
        list->procArray[i].usedGpuCcProtectedMemory = 0;
    return result;
}
