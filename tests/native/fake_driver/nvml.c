/* libnvidia-ml.so.1 of the fake driver: GPUs, their memory, processes and utilisation, as far as the agent and the isolation libraries
 * ask. Every other function that nvml.h knows is a weak stub that answers NOT_SUPPORTED, made by generate.py.
 */
#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS /* nvmlInit and nvmlInit_v2 are two functions */
#include <linux/capability.h>
#include <linux/magic.h>
#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "machine.h"

#define SLICE_US 100000ull

/* A handle points to the minor number of the GPU, or that of the instance. */
static unsigned handles[MAX_GPUS];
static nvmlDevice_t handle_of(unsigned minor)
{
    handles[minor] = minor;
    return (nvmlDevice_t)&handles[minor];
}
static unsigned minor_of(nvmlDevice_t device) { return *(unsigned *)device; }

/* --- the library --- */

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    log_call("nvmlInit");
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }

const char *nvmlErrorString(nvmlReturn_t result)
{
    switch ((int)result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
    case NVML_ERROR_OPERATING_SYSTEM: return "The operating system has blocked the request";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    default: return "Unknown Error";
    }
}

static nvmlReturn_t put(char *answer, unsigned size, const char *text)
{
    return (unsigned)snprintf(answer, size, "%s", text) < size ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int size) { return put(version, size, config()->driver_version); }

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int size)
{
    char text[TEXT + 16];
    snprintf(text, sizeof text, "%d.%s", config()->cuda_version / 1000, config()->driver_version);
    return put(version, size, text);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = config()->cuda_version, NVML_SUCCESS; }
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

/* --- finding GPUs --- */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    unsigned minors[MAX_GPUS];
    return *count = visible_gpus(minors), NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    unsigned minors[MAX_GPUS];
    if (index >= visible_gpus(minors))
        return NVML_ERROR_INVALID_ARGUMENT;
    return *device = handle_of(minors[index]), NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlReturn_t find_gpu(void (*text_of)(unsigned minor, char *text), const char *wanted, nvmlDevice_t *device)
{
    unsigned minors[MAX_GPUS], count = visible_gpus(minors), instances[MAX_GPUS], found = text_of == gpu_uuid ? visible_instances(instances) : 0;
    char text[96];
    memcpy(minors + count, instances, found * sizeof *minors);
    for (unsigned i = 0; i < count + found; i++) {
        text_of(minors[i], text);
        size_t length = strlen(text), given = strlen(wanted);
        if (given <= length && strcasecmp(text + length - given, wanted) == 0) /* a bus ID may have a shorter domain */
            return *device = handle_of(minors[i]), NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    return strlen(uuid) < 32 ? NVML_ERROR_NOT_FOUND : find_gpu(gpu_uuid, uuid, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    return strlen(bus_id) < 7 ? NVML_ERROR_NOT_FOUND : find_gpu(gpu_bus_id, bus_id, device);
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    unsigned minors[MAX_GPUS], count = visible_gpus(minors);
    if (is_instance(minor_of(device)))
        return *index = minor_of(device) - FIRST_INSTANCE, NVML_SUCCESS;
    for (*index = 0; *index < count; ++*index)
        if (minors[*index] == minor_of(device))
            return NVML_SUCCESS;
    return NVML_ERROR_NOT_FOUND;
}

/* --- what a GPU is --- */

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) { return *minor = parent_of(minor_of(device)), NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int size)
{
    char text[2 * TEXT];
    unsigned minor = minor_of(device), gib = (unsigned)(memory_at(minor) >> 30);
    snprintf(text, sizeof text, is_instance(minor) ? "%s MIG 1g.%ugb" : "%s", config()->name, gib);
    return put(name, size, text);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int size)
{
    char text[96];
    gpu_uuid(minor_of(device), text);
    return put(uuid, size, text);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    memset(pci, 0, sizeof *pci);
    gpu_bus_id(minor_of(device), pci->busId);
    memcpy(pci->busIdLegacy, pci->busId + strlen("0000"), strlen("0000:10:00.0"));
    pci->bus = 0x10 + parent_of(minor_of(device));
    return NVML_SUCCESS;
}

/* The older variants have shorter structs, which begin alike: with the legacy bus ID. */
static nvmlReturn_t pci_of_older(nvmlDevice_t device, void *pci, size_t size)
{
    nvmlPciInfo_t whole;
    nvmlDeviceGetPciInfo_v3(device, &whole);
    memcpy(pci, &whole, size);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci) { return pci_of_older(device, pci, 36); }
nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci) { return pci_of_older(device, pci, 32); }

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    (void)device;
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand)
{
    (void)device;
    *brand = NVML_BRAND_NVIDIA;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    (void)device;
    return *mode = NVML_COMPUTEMODE_DEFAULT, NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending)
{
    if (is_instance(minor_of(device)))
        return NVML_ERROR_NOT_SUPPORTED;
    *now = *pending = has_mig(minor_of(device)) ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    return *count = has_mig(minor_of(device)) ? MAX_INSTANCES : 0, NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *instance)
{
    unsigned minors[MAX_GPUS], count = visible_instances(minors);
    if (!has_mig(minor_of(device)) || is_instance(minor_of(device)))
        return NVML_ERROR_NOT_SUPPORTED;
    for (unsigned i = 0; i < count; i++)
        if (minors[i] == FIRST_INSTANCE + index)
            return *instance = handle_of(minors[i]), NVML_SUCCESS;
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is) { return *is = is_instance(minor_of(device)), NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device)
{
    if (!is_instance(minor_of(instance)))
        return NVML_ERROR_INVALID_ARGUMENT;
    return *device = handle_of(parent_of(minor_of(instance))), NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    *id = minor_of(device) - FIRST_INSTANCE + 1;
    return is_instance(minor_of(device)) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    *id = 0;
    return is_instance(minor_of(device)) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    if (!is_instance(minor_of(device)))
        return NVML_ERROR_NOT_SUPPORTED;
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessorCount = 16, .gpuInstanceSliceCount = 1, .computeInstanceSliceCount = 1, .memorySizeMB = memory_at(minor_of(device)) >> 20};
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    return nvmlDeviceGetAttributes_v2(device, attributes);
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, nvmlGpuTopologyLevel_t *level)
{
    (void)one, (void)other;
    return *level = NVML_TOPOLOGY_NODE, NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
    *node = (unsigned)config()->numa_node + parent_of(minor_of(device));
    return config()->numa_node ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* --- events: there are none --- */

static int an_event_set;
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) { return *set = (nvmlEventSet_t)&an_event_set, NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    (void)device;
    return *types = nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError, NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    (void)device, (void)types, (void)set;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *event, unsigned int milliseconds)
{
    (void)set, (void)event;
    sleep_until(now_ns() + milliseconds * 1000000ull);
    return NVML_ERROR_TIMEOUT;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    (void)set;
    return NVML_SUCCESS;
}

/* --- use --- */

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    uint64_t total, used;
    if (config()->is_unified)
        return NVML_ERROR_NOT_SUPPORTED;
    memory_of_gpu(minor_of(device), &total, &used);
    *memory = (nvmlMemory_t){.total = total, .free = total - used, .used = used};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    uint64_t total, used;
    if (config()->is_unified)
        return NVML_ERROR_NOT_SUPPORTED;
    memory_of_caller(minor_of(device), &total, &used);
    memory->total = total;
    memory->reserved = 0;
    memory->free = used < total ? total - used : 0;
    memory->used = used;
    return NVML_SUCCESS;
}

/* --- limits of cgroups: root with CAP_SYS_ADMIN, cgroup v2, driver 615 --- */

static nvmlReturn_t check_cgroup(const char *directory)
{
    struct statfs found;
    if (atoi(config()->driver_version) < FIRST_DRIVER_WITH_LIMITS)
        return NVML_ERROR_FUNCTION_NOT_FOUND; /* a real libnvidia-ml of then has no such symbol, and nvidia-ml-py says the same */
    if (!directory || !*directory)
        return NVML_ERROR_INVALID_ARGUMENT;
    return statfs(directory, &found) == 0 && found.f_type == CGROUP2_SUPER_MAGIC ? NVML_SUCCESS : NVML_ERROR_OPERATING_SYSTEM;
}

static int is_administrator(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];
    return syscall(SYS_capget, &header, data) == 0 && (data[0].effective >> CAP_SYS_ADMIN & 1);
}

nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
    log_call("nvmlDeviceSetMemoryLimits_v1");
    nvmlReturn_t result = limits ? check_cgroup(limits->nameSpace) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return result;
    if (!is_administrator())
        return NVML_ERROR_NO_PERMISSION;
    int is_limited = limits->hardLimit != NVML_DEVICE_MEMORY_LIMIT_MAX;
    if (limits->softLimit > limits->hardLimit || (is_limited && limits->hardLimit > config()->memory))
        return NVML_ERROR_INVALID_ARGUMENT;
    return set_memory_limit(minor_of(device), limits->nameSpace, limits->softLimit, limits->hardLimit) ? NVML_SUCCESS
                                                                                                       : NVML_ERROR_UNKNOWN;
}

nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
    memory_limit found;
    nvmlReturn_t result = limits ? check_cgroup(limits->nameSpace) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return result;
    if (!get_memory_limit(minor_of(device), limits->nameSpace, &found))
        return NVML_ERROR_NOT_FOUND;
    limits->softLimit = found.soft;
    limits->hardLimit = found.hard;
    limits->currentUsed = found.used;
    return NVML_SUCCESS;
}

/* --- processes --- */

static process_view *views_of(nvmlDevice_t device, unsigned *count)
{
    process_view *views = malloc(MAX_PROCESSES * sizeof *views);
    *count = views ? list_processes(minor_of(device), views) : 0;
    return views;
}

/* Entries of `size` bytes that begin with a nvmlProcessInfo_v1_t; the later members are the IDs of the instance, or say "no MIG". */
static nvmlReturn_t list(nvmlDevice_t device, unsigned *room, void *entries, size_t size)
{
    unsigned count, listed = 0;
    process_view *views = views_of(device, &count);
    for (unsigned i = 0; i < count; i++) {
        if (views[i].list_pid <= 0)
            continue;
        if (entries && listed < *room) {
            nvmlProcessInfo_v1_t *entry = (nvmlProcessInfo_v1_t *)((char *)entries + listed * size);
            memset(entry, 0xff, size);
            entry->pid = (unsigned)views[i].list_pid;
            entry->usedGpuMemory = views[i].memory;
            if (is_instance(minor_of(device)) && size >= sizeof(nvmlProcessInfo_t)) {
                ((nvmlProcessInfo_t *)entry)->gpuInstanceId = minor_of(device) - FIRST_INSTANCE + 1;
                ((nvmlProcessInfo_t *)entry)->computeInstanceId = 0;
            }
        }
        listed++;
    }
    free(views);
    nvmlReturn_t result = listed > *room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
    *room = listed;
    return result;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *entries)
{
    return list(device, count, entries, sizeof *entries);
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *entries)
{
    return list(device, count, entries, sizeof *entries);
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *entries)
{
    return list(device, count, entries, sizeof *entries);
}

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *of)
{
    return list(device, &of->numProcArrayEntries, of->procArray, sizeof *of->procArray);
}

#define EMPTY_LIST(function, type)                                                                                              \
    nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, type *entries)                                              \
    {                                                                                                                           \
        (void)device, (void)entries;                                                                                            \
        return *count = 0, NVML_SUCCESS;                                                                                        \
    }
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

static unsigned long long newest_sample_us(void)
{
    struct timespec now;
    unsigned long long every_us = config()->sample_every_ns / 1000;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long now_us = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
    if (!every_us)
        return now_us - now_us % SLICE_US;
    unsigned long long newest_us = now_us - now_ns() / 1000 % every_us + 500; /* two clocks that are asked one after the other */
    return newest_us - newest_us % 1000;
}

#define ASKING_NS 1700000 /* what a question for samples of the whole GPU takes, as measured */

/* As the setting rows says `whole`. */
static nvmlReturn_t list_whole(unsigned minor, nvmlProcessUtilizationSample_t *samples, unsigned *room, unsigned long long since_us)
{
    whole_row rows[8];
    sleep_until(now_ns() + ASKING_NS);
    unsigned count = list_whole_rows(minor, rows, 8), listed = 0;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    /* Of two clocks that are asked one after the other; a row has the same time whenever it is asked for. */
    unsigned long long now_us = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
    unsigned long long behind_us = (now_us - now_ns() / 1000 + 500) / 1000 * 1000;
    for (unsigned i = 0; i < count; i++) {
        unsigned long long at = behind_us + rows[i].at / 1000;
        if (at <= since_us || rows[i].pid <= 0)
            continue;
        if (samples && listed < *room)
            samples[listed] =
                (nvmlProcessUtilizationSample_t){.pid = (unsigned)rows[i].pid, .timeStamp = at, .smUtil = rows[i].percent};
        listed++;
    }
    nvmlReturn_t result = !listed ? NVML_ERROR_NOT_FOUND
                          : !samples || listed > *room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
    *room = listed;
    return result;
}

/* One sample of each process that has a context, idle ones with 0, a new one every tenth of a second; or as sample_every_ms says. */
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *room,
                                             unsigned long long since_us)
{
    unsigned count, listed = 0;
    if (config()->utilization[0])
        return strcmp(config()->utilization, "denied") == 0 ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_NOT_SUPPORTED;
    if (has_mig(minor_of(device)))
        return NVML_ERROR_NOT_SUPPORTED;
    if (config()->shows_whole)
        return list_whole(minor_of(device), samples, room, since_us);
    unsigned long long newest = newest_sample_us();
    process_view *views = newest > since_us ? views_of(device, &count) : (count = 0, NULL);
    for (unsigned i = 0; i < count; i++) {
        if (views[i].sample_pid <= 0 || (config()->sample_every_ns && !views[i].percent))
            continue;
        if (samples && listed < *room)
            samples[listed] = (nvmlProcessUtilizationSample_t){
                .pid = (unsigned)views[i].sample_pid, .timeStamp = newest, .smUtil = views[i].percent};
        listed++;
    }
    free(views);
    nvmlReturn_t result = !listed ? NVML_ERROR_NOT_FOUND
                          : !samples || listed > *room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
    *room = listed;
    return result;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    unsigned count, sum = 0;
    if (has_mig(minor_of(device)))
        return NVML_ERROR_NOT_SUPPORTED;
    process_view *views = views_of(device, &count);
    for (unsigned i = 0; i < count; i++)
        sum += views[i].percent;
    free(views);
    *rates = (nvmlUtilization_t){.gpu = sum > 100 ? 100 : sum};
    return NVML_SUCCESS;
}
