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

#ifdef __aarch64__
#define JUMP "b "
#else
#define JUMP "jmp "
#endif
/* A function of its own, at an address of its own, as in NVIDIA's: it does the same. */
#define PER_THREAD(function)                                                                               \
    __asm__(".text\n.globl " #function "_ptsz\n.type " #function "_ptsz, %function\n" #function "_ptsz: " JUMP #function "\n"); \
    extern __typeof__(function) function##_ptsz
#define QUEUE_NS 100000000ull
#define FIRST_ADDRESS 0x7f0000200000ull /* its lower half is not 0 */
#define FOREIGN_ADDRESS (FIRST_ADDRESS + (1ull << 44)) /* what another process has exported */
#define ALIGNMENT (2ull << 20)
#define LEAST_OF_OWN_PAGES (1u << 20)
#define POOL_CHUNK (32ull << 20)
#define LARGEST (1ull << 47)
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
    if (strncmp(word, "GPU-", 4) == 0 || strncmp(word, "MIG-", 4) == 0) {
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
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    int names_gpu = wanted && strncmp(wanted, "GPU-", 4) == 0;
    unsigned seen[MAX_GPUS], seen_count = names_gpu ? 0 : visible_instances(seen), most = seen_count ? 1 : MAX_GPUS;
    seen_count = seen_count ? seen_count : visible_gpus(seen);
    char text[2048], *rest = NULL;
    if (!wanted) {
        memcpy(minors, seen, sizeof minors);
        gpu_count = seen_count < most ? seen_count : most;
        return;
    }
    gpu_count = 0; /* a child of fork is here again where another thread of its parent was */
    snprintf(text, sizeof text, "%s", wanted);
    for (char *word = strtok_r(text, ",", &rest); word && gpu_count < most; word = strtok_r(NULL, ",", &rest)) {
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
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = 0x10 + (int)parent_of(minors[device]); break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = config()->is_unified; break;
    case CU_DEVICE_ATTRIBUTE_NUMA_CONFIG: *value = config()->numa_node ? CU_DEVICE_NUMA_CONFIG_NUMA_NODE : CU_DEVICE_NUMA_CONFIG_NONE; break;
    case CU_DEVICE_ATTRIBUTE_NUMA_ID: *value = config()->numa_node ? config()->numa_node + (int)parent_of(minors[device]) : -1; break;
    default: *value = 1; /* the rest are abilities, and an H100 has them */
    }
    return CUDA_SUCCESS;
}

static CUresult uuid_of(CUuuid *uuid, CUdevice device, int is_gpus)
{
    char text[96];
    if (!is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    gpu_uuid(is_gpus ? parent_of(minors[device]) : minors[device], text);
    unsigned place = 0;
    for (const char *at = text + strlen("GPU-"); *at && place < 32; at++)
        if (*at != '-') {
            int digit = *at <= '9' ? *at - '0' : (*at | 0x20) - 'a' + 10;
            uuid->bytes[place / 2] = (char)(place % 2 ? uuid->bytes[place / 2] | digit : digit << 4);
            place++;
        }
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { log_call("cuDeviceGetUuid_v2"); return uuid_of(uuid, device, 0); }
CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { log_call("cuDeviceGetUuid"); return uuid_of(uuid, device, 1); }

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

/* --- contexts: those of cuCtxCreate and one primary of each GPU; a thread has a stack of them --- */

enum { MAX_CONTEXTS = 256, DEEPEST_STACK = 32, THREADS_OF_SM = 2048 };
enum { DEFAULT_STACK = 1 << 10, DEFAULT_FIFO = 1 << 20, DEFAULT_HEAP = 8 << 20, LARGEST_STACK = 512 << 10 };
typedef struct {
    CUdevice device;
    unsigned references, generation; /* `generation`: how many contexts of this handle have ended */
    int is_live;
    uint64_t stack, fifo, heap, taken; /* limits; what they take, beyond the defaults, which a context begins with */
} context;
static context contexts[MAX_CONTEXTS]; /* the first MAX_GPUS are the primary ones, by ordinal */
static pthread_mutex_t contexts_guard = PTHREAD_MUTEX_INITIALIZER;
static __thread struct { context *all[DEEPEST_STACK]; unsigned depth; } stack;
static void free_all_of(const context *ended);

static int is_primary(const context *of) { return of < contexts + MAX_GPUS; }
/* That of a green context is the primary one's with a bit set: its memory is that one's. */
static context *whole_of(CUcontext of) { return (context *)((uintptr_t)of & ~(uintptr_t)1); }
static CUcontext top_of_stack(void) { return stack.depth ? (CUcontext)stack.all[stack.depth - 1] : NULL; }
static context *current_context(void) { return whole_of(top_of_stack()); }
/* Of a context that has ended while it was current there is none. */
static CUdevice gpu_of(const context *of) { return of && of->is_live ? of->device : -1; }
static CUdevice current_gpu(void) { return gpu_of(current_context()); }
static context *or_current(CUcontext of) { return of ? whole_of(of) : current_context(); }

static CUresult push_context(context *of)
{
    if (stack.depth == DEEPEST_STACK)
        return CUDA_ERROR_INVALID_VALUE;
    return stack.all[stack.depth++] = of, CUDA_SUCCESS;
}

static CUresult begin_context(context *made, CUdevice device)
{
    if (!open_context(minors[device]))
        return CUDA_ERROR_OUT_OF_MEMORY;
    unsigned references = made->references, generation = made->generation; /* a primary one that was reset is retained still */
    *made = (context){.device = device, .references = references, .generation = generation, .is_live = 1, .stack = DEFAULT_STACK, .fifo = DEFAULT_FIFO,
                      .heap = DEFAULT_HEAP};
    return CUDA_SUCCESS;
}

/* With it end its arrays, its modules and its memory, but that of pools and of handles (cuda.h, cuCtxDestroy). */
static void end_context(context *ended)
{
    if (!ended->is_live)
        return;
    free_all_of(ended);
    give_memory(minors[ended->device], ended->taken, 0);
    close_context(minors[ended->device]);
    ended->is_live = 0;
    ended->generation++;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device)
{
    log_call("cuDevicePrimaryCtxRetain");
    if (!is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    context *primary = &contexts[device];
    pthread_mutex_lock(&contexts_guard);
    CUresult result = primary->is_live ? CUDA_SUCCESS : begin_context(primary, device);
    primary->references += result == CUDA_SUCCESS;
    pthread_mutex_unlock(&contexts_guard);
    return *found = (CUcontext)primary, result;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    log_call("cuDevicePrimaryCtxRelease_v2");
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&contexts_guard);
    CUresult result = contexts[device].references ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS && --contexts[device].references == 0)
        end_context(&contexts[device]);
    pthread_mutex_unlock(&contexts_guard);
    return result;
}
CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device)
{
    log_call("cuDevicePrimaryCtxRelease");
    return cuDevicePrimaryCtxRelease_v2(device);
}

/* Who has retained it releases it all the same; the next one who retains it begins it again. */
CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    log_call("cuDevicePrimaryCtxReset_v2");
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&contexts_guard);
    end_context(&contexts[device]);
    pthread_mutex_unlock(&contexts_guard);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice device)
{
    log_call("cuDevicePrimaryCtxReset");
    return cuDevicePrimaryCtxReset_v2(device);
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *is_active)
{
    log_call("cuDevicePrimaryCtxGetState");
    *flags = 0;
    *is_active = is_gpu(device) && contexts[device].is_live;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxCreate_v2(CUcontext *made, unsigned int flags, CUdevice device)
{
    log_call("cuCtxCreate_v2");
    (void)flags;
    if (!is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&contexts_guard);
    context *at = contexts + MAX_GPUS;
    while (at < contexts + MAX_CONTEXTS && at->is_live)
        at++;
    CUresult result = at == contexts + MAX_CONTEXTS ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        at->references = 1;
    if (result == CUDA_SUCCESS && (result = begin_context(at, device)) == CUDA_SUCCESS)
        result = push_context(at);
    pthread_mutex_unlock(&contexts_guard);
    if (result == CUDA_SUCCESS)
        *made = (CUcontext)at;
    return result;
}

CUresult CUDAAPI cuCtxCreate(CUcontext *made, unsigned int flags, CUdevice device)
{
    log_call("cuCtxCreate");
    return cuCtxCreate_v2(made, flags, device);
}

CUresult CUDAAPI cuCtxCreate_v3(CUcontext *made, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device)
{
    log_call("cuCtxCreate_v3");
    (void)affinity, (void)count;
    return cuCtxCreate_v2(made, flags, device);
}

CUresult CUDAAPI cuCtxCreate_v4(CUcontext *made, CUctxCreateParams *parameters, unsigned int flags, CUdevice device)
{
    log_call("cuCtxCreate_v4");
    (void)parameters;
    return cuCtxCreate_v2(made, flags, device);
}

static CUresult drop_reference(CUcontext of, unsigned count)
{
    context *dropped = (context *)of;
    if (!dropped || is_primary(dropped) || !dropped->is_live)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&contexts_guard);
    dropped->references -= count ? count : dropped->references;
    if (!dropped->references) {
        end_context(dropped);
        stack.depth -= current_context() == dropped;
    }
    pthread_mutex_unlock(&contexts_guard);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDestroy_v2(CUcontext of) { log_call("cuCtxDestroy_v2"); return drop_reference(of, 0); }
CUresult CUDAAPI cuCtxDestroy(CUcontext of) { log_call("cuCtxDestroy"); return drop_reference(of, 0); }
CUresult CUDAAPI cuCtxDetach(CUcontext of) { log_call("cuCtxDetach"); return drop_reference(of, 1); }
CUresult CUDAAPI cuCtxAttach(CUcontext *found, unsigned int flags)
{
    context *attached = current_context();
    if (flags || current_gpu() < 0)
        return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT;
    attached->references++;
    return *found = (CUcontext)attached, CUDA_SUCCESS;
}

/* A part of the primary context, which it retains. */
typedef struct { CUdevice device; } green;
CUresult CUDAAPI cuGreenCtxCreate(CUgreenCtx *made, CUdevResourceDesc resources, CUdevice device, unsigned int flags)
{
    CUcontext primary;
    (void)resources, (void)flags;
    CUresult result = cuDevicePrimaryCtxRetain(&primary, device);
    green *fresh = result ? NULL : malloc(sizeof *fresh);
    if (fresh)
        *fresh = (green){device};
    return *made = (CUgreenCtx)fresh, result;
}
CUresult CUDAAPI cuCtxFromGreenCtx(CUcontext *made, CUgreenCtx of)
{ return *made = (CUcontext)((uintptr_t)&contexts[((green *)of)->device] | 1), CUDA_SUCCESS; }
CUresult CUDAAPI cuGreenCtxDestroy(CUgreenCtx of)
{
    CUresult result = cuDevicePrimaryCtxRelease_v2(((green *)of)->device);
    return free(of), result;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext of)
{
    stack.depth -= stack.depth != 0;
    return of ? push_context((context *)of) : CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext of) { return of ? push_context((context *)of) : CUDA_ERROR_INVALID_CONTEXT; }
CUresult CUDAAPI cuCtxGetCurrent(CUcontext *found)
{
    log_call("cuCtxGetCurrent");
    return *found = top_of_stack(), CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *popped)
{
    if (!stack.depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (popped)
        *popped = top_of_stack();
    return stack.depth--, CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice_v2(CUdevice *device, CUcontext of)
{
    log_call("cuCtxGetDevice_v2");
    *device = gpu_of(or_current(of));
    return *device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxGetDevice(CUdevice *device)
{
    log_call("cuCtxGetDevice");
    *device = current_gpu();
    return *device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext of, unsigned int *version)
{
    (void)of;
    return *version = 3020, CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetFlags(unsigned int *flags) { return *flags = 0, CUDA_SUCCESS; }

/* Each thread that the GPU can have at once has its stack, from the setting on (cuda.h, cuCtxSetLimit). The heap of malloc is taken
   with it too. */
static uint64_t bytes_of_limits(const context *of)
{
    uint64_t threads = config()->sm_count * THREADS_OF_SM, bytes = 0;
    bytes += of->stack > DEFAULT_STACK ? (of->stack - DEFAULT_STACK) * threads : 0;
    bytes += of->fifo > DEFAULT_FIFO ? of->fifo - DEFAULT_FIFO : 0;
    bytes += of->heap > DEFAULT_HEAP ? of->heap - DEFAULT_HEAP : 0;
    return (bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
}

/* With its new limits, or as it was. */
static int change_context(context *of, context changed)
{
    uint64_t before = of->taken, after = bytes_of_limits(&changed);
    if (after > before && !take_memory(minors[of->device], after - before, 0))
        return 0;
    if (after < before)
        give_memory(minors[of->device], before - after, 0);
    changed.taken = after;
    return *of = changed, 1;
}

CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value)
{
    log_call("cuCtxSetLimit");
    if (current_gpu() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&contexts_guard);
    context changed = *current_context();
    CUresult result = CUDA_SUCCESS;
    switch ((int)limit) {
    case CU_LIMIT_STACK_SIZE: changed.stack = value > LARGEST_STACK ? LARGEST_STACK : (value + 15) & ~(size_t)15; break;
    case CU_LIMIT_PRINTF_FIFO_SIZE: changed.fifo = value; break;
    case CU_LIMIT_MALLOC_HEAP_SIZE: changed.heap = value; break;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH: result = CUDA_ERROR_UNSUPPORTED_LIMIT; break; /* of GPUs before 9.0 */
    }
    if (result == CUDA_SUCCESS && !change_context(current_context(), changed))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&contexts_guard);
    return result;
}

CUresult CUDAAPI cuCtxGetLimit(size_t *value, CUlimit limit)
{
    log_call("cuCtxGetLimit");
    const context *of = current_context();
    if (current_gpu() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    switch ((int)limit) {
    case CU_LIMIT_STACK_SIZE: *value = of->stack; break;
    case CU_LIMIT_PRINTF_FIFO_SIZE: *value = of->fifo; break;
    case CU_LIMIT_MALLOC_HEAP_SIZE: *value = of->heap; break;
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT: *value = 2048; break;
    default: return CUDA_ERROR_UNSUPPORTED_LIMIT;
    }
    return CUDA_SUCCESS;
}

/* --- streams: of a context, and so of a GPU. The others are the current context's own --- */

enum { OWN_LANES = 8 };
typedef struct { context *in; unsigned lane, flags; } own_stream; /* a lane: with slice_us, one of eight in turn */

static const own_stream *own_of(CUstream of) { return of > CU_STREAM_PER_THREAD ? (const own_stream *)of : NULL; }
static context *context_of(CUstream of) { return own_of(of) ? own_of(of)->in : current_context(); }
static CUdevice gpu_of_stream(CUstream of) { return gpu_of(context_of(of)); }
static unsigned lane_of(CUstream of) { return own_of(of) ? own_of(of)->lane : 0; }

CUresult CUDAAPI cuStreamCreate(CUstream *made, unsigned int flags)
{
    static unsigned count;
    if (current_gpu() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    own_stream *fresh = malloc(sizeof *fresh);
    *fresh = (own_stream){.in = current_context(), .flags = flags, .lane = config()->slice_ns ? 1 + count++ % OWN_LANES : 0};
    return *made = (CUstream)fresh, CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *made, unsigned int flags, int priority)
{
    (void)priority;
    return cuStreamCreate(made, flags);
}
CUresult CUDAAPI cuStreamDestroy_v2(CUstream of)
{
    if (own_of(of))
        free((void *)of);
    return own_of(of) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult CUDAAPI cuStreamDestroy(CUstream of) { return cuStreamDestroy_v2(of); }

/* One capture at a time, of a stream. Meanwhile a call that may wait for the GPU is refused and ends it, unless its thread says that it
   means it (cuda.h, cuThreadExchangeStreamCaptureMode), and so does whatever uses the legacy stream, which waits for the others. */
static struct graph *captured;
static struct { CUstream in; CUstreamCaptureMode mode; pthread_t by; int is_spoilt; } capture;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static CUresult spoil_capture(CUresult result) { return capture.is_spoilt = 1, result; }
static int is_captured(CUstream of) { return captured && of == capture.in; }
static int is_implied(CUstream of)
{
    return captured && (!of || of == CU_STREAM_LEGACY) && own_of(capture.in) && !(own_of(capture.in)->flags & CU_STREAM_NON_BLOCKING);
}
static int is_unsafe(void)
{
    if (!captured || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return 0;
    if (pthread_equal(capture.by, pthread_self()))
        return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}
#define UNLESS_UNSAFE \
    if (is_unsafe())  \
    return spoil_capture(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    return *mode = before, CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCtx(CUstream of, CUcontext *found)
{
    log_call("cuStreamGetCtx");
    *found = (CUcontext)context_of(of);
    return *found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
PER_THREAD(cuStreamGetCtx);
CUresult CUDAAPI cuStreamGetDevice(CUstream of, CUdevice *device)
{
    log_call("cuStreamGetDevice");
    if (config()->cuda_version < 12080) /* as if the driver had no such function */
        return CUDA_ERROR_NOT_SUPPORTED;
    *device = gpu_of_stream(of);
    return *device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}
PER_THREAD(cuStreamGetDevice);

/* --- memory: what this process has, by address --- */

/* What is of no context's: OF_POOL, OF_HANDLE, OF_HOST. */
typedef enum { PLAIN, MANAGED, OF_POOL, OF_HANDLE, OF_HOST } memory_kind;
/* What a pool has reserved stays its own after a free, until it is trimmed or, above its threshold, until the program waits for the
   GPU the next time (cuda.h, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD). It grows by whole chunks (measured, H200). */
typedef struct pool {
    CUdevice device;
    uint64_t used, reserved, used_high, reserved_high, threshold, waiting; /* freed, but for no other stream before a wait */
    CUmemLocation at;
    int is_managed, is_of_host, is_destroyed, is_imported, is_anywhere, is_ordered;
    struct pool *next;
} pool;
/* Memory of less than a MiB shares a page with others of its context; other memory has pages of its own. */
enum { UNIT = 512, UNITS = ALIGNMENT / UNIT };
typedef struct page {
    CUdeviceptr address;
    const context *in;
    memory_kind kind;
    unsigned char is_used[UNITS];
    struct page *next;
} page;
/* `references`: of a handle of virtual memory those that are held and those that are mapped; of other memory one. */
typedef struct {
    CUdeviceptr address;
    size_t bytes, taken; /* `taken`: of the GPU; 0 where it is of a pool, of a page or of the host */
    CUdevice device;
    memory_kind kind;
    pool *of;
    page *page;
    const context *in;
    unsigned references;
} allocation;
typedef struct { CUdeviceptr address, handle; size_t bytes; } mapping;
static struct { pthread_mutex_t guard; allocation *all; size_t count, room; CUdeviceptr next; mapping *mapped; size_t mappings; page *pages; }
    memory = {.guard = PTHREAD_MUTEX_INITIALIZER, .next = FIRST_ADDRESS};

/* Another thread may have held it at the fork, in the middle of a change: so nothing of it is kept, above all no pointer to what
   realloc has freed. What was allocated is the parent's; the addresses go on, so that none of the parent's means something here. */
static void forget_pools(void);
static void forget_graphs(void);
static void begin_anew_in_child(void)
{
    memory = (__typeof__(memory)){.guard = PTHREAD_MUTEX_INITIALIZER, .next = memory.next};
    for (context *one = contexts; one < contexts + MAX_CONTEXTS; one++)
        *one = (context){.generation = one->generation + 1};
    contexts_guard = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    stack.depth = 0;
    forget_pools();
    forget_graphs();
}

static uint64_t higher(uint64_t one, uint64_t other) { return one > other ? one : other; }

static uint64_t whole(uint64_t bytes, uint64_t of) { return (bytes + of - 1) / of * of; }

/* What a pool lacks for so many bytes; it has them afterwards, or nothing has changed. */
static int reserve_in(pool *of, size_t bytes)
{
    uint64_t wanted = of->used + of->waiting + bytes;
    uint64_t lacking = wanted > of->reserved ? whole(wanted - of->reserved, POOL_CHUNK) : 0;
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
    uint64_t kept = whole(higher(of->used + of->waiting, least), POOL_CHUNK);
    if (of->reserved > kept) {
        if (!of->is_of_host)
            give_memory(minors[of->device], of->reserved - kept, of->is_managed);
        of->reserved = kept;
    }
}

static CUdeviceptr next_address(size_t bytes)
{
    CUdeviceptr address = memory.next;
    memory.next += whole(bytes, ALIGNMENT);
    return address;
}

/* The first place in a page of this context, or in a new one. */
static int place_in_page(allocation *made)
{
    size_t units = made->bytes / UNIT;
    for (page *at = memory.pages; at; at = at->next)
        for (size_t first = 0, free_units = 0; at->in == made->in && at->kind == made->kind && first + free_units < UNITS;) {
            if (at->is_used[first + free_units]) {
                first += free_units + 1;
                free_units = 0;
            } else if (++free_units == units) {
                memset(at->is_used + first, 1, units);
                made->address = at->address + first * UNIT;
                return made->page = at, 1;
            }
        }
    if (!take_memory(minors[made->device], ALIGNMENT, made->kind == MANAGED))
        return 0;
    page *fresh = calloc(1, sizeof *fresh);
    *fresh = (page){.address = next_address(ALIGNMENT), .in = made->in, .kind = made->kind, .next = memory.pages};
    memset(fresh->is_used, 1, units);
    made->address = fresh->address;
    return made->page = memory.pages = fresh, 1;
}

static void leave_page(const allocation *freed)
{
    page *of = freed->page, **at = &memory.pages;
    memset(of->is_used + (freed->address - of->address) / UNIT, 0, freed->bytes / UNIT);
    if (memchr(of->is_used, 1, UNITS))
        return;
    while (*at != of)
        at = &(*at)->next;
    *at = of->next;
    give_memory(minors[freed->device], ALIGNMENT, of->kind == MANAGED);
    free(of);
}

static int place(allocation *made)
{
    if (made->kind <= MANAGED && !made->taken)
        return place_in_page(made);
    if (made->of ? !reserve_in(made->of, made->bytes) : made->taken && !take_memory(minors[made->device], made->taken, made->kind == MANAGED))
        return 0;
    return made->address = next_address(made->bytes), 1;
}

static void give_back(allocation *freed)
{
    if (freed->of) {
        freed->of->used -= freed->bytes;
        freed->of->waiting += freed->of->is_ordered ? freed->bytes : 0;
        if (freed->of->is_destroyed && !freed->of->used) /* nobody can wait for it any more */
            trim(freed->of, 0);
    } else if (freed->page) {
        leave_page(freed);
    } else if (freed->taken) {
        give_memory(minors[freed->device], freed->taken, freed->kind == MANAGED);
    }
    *freed = memory.all[--memory.count];
}

static CUresult allocate_from(CUdeviceptr *address, size_t bytes, CUdevice device, memory_kind kind, pool *of)
{
    if (device < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (bytes == 0 || bytes > LARGEST)
        return bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    allocation made = {.bytes = whole(bytes, UNIT), .device = device, .kind = kind, .of = of, .references = 1};
    int is_small = kind <= MANAGED && bytes < LEAST_OF_OWN_PAGES;
    made.taken = is_small || of || kind == OF_HOST ? 0 : whole(bytes, ALIGNMENT);
    made.in = kind <= MANAGED ? current_context() : NULL;
    pthread_mutex_lock(&memory.guard);
    int is_placed = place(&made);
    if (is_placed && memory.count == memory.room) {
        memory.room = memory.room ? 2 * memory.room : 64;
        memory.all = realloc(memory.all, memory.room * sizeof(allocation));
    }
    if (is_placed)
        memory.all[memory.count++] = made;
    pthread_mutex_unlock(&memory.guard);
    if (is_placed)
        *address = made.address;
    return is_placed ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate(CUdeviceptr *address, size_t bytes, CUdevice device, memory_kind kind)
{
    return allocate_from(address, bytes, device, kind, NULL);
}

static void free_all_of(const context *ended)
{
    pthread_mutex_lock(&memory.guard);
    for (size_t i = memory.count; i-- > 0;)
        if (memory.all[i].in == ended)
            give_back(&memory.all[i]);
    pthread_mutex_unlock(&memory.guard);
}

/* The GPU whose memory that is; -1: it is the host's. */
static CUdevice device_at(const CUmemLocation *at)
{
    if (at->type == CU_MEM_LOCATION_TYPE_HOST_NUMA)
        for (CUdevice device = 0; is_gpu(device) && config()->numa_node; device++)
            if (at->id == config()->numa_node + (int)parent_of(minors[device]))
                return device;
    return at->type == CU_MEM_LOCATION_TYPE_DEVICE                   ? at->id
           : at->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN ? at->localized.deviceId
                                                                     : -1;
}

static allocation *allocation_at(CUdeviceptr address)
{
    for (size_t i = memory.count; i-- > 0;)
        if (address >= memory.all[i].address && address < memory.all[i].address + memory.all[i].bytes)
            return &memory.all[i];
    return NULL;
}

/* The allocation that an address lies in, its own or one where it is mapped. */
static int find_allocation(CUdeviceptr address, allocation *found)
{
    pthread_mutex_lock(&memory.guard);
    const allocation *at = allocation_at(address);
    for (const mapping *one = memory.mapped; one < memory.mapped + memory.mappings && !at; one++)
        if (address >= one->address && address < one->address + one->bytes)
            at = allocation_at(one->handle);
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
        if (at->references == 0)
            give_back(at);
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
    UNLESS_UNSAFE;
    return allocate(address, bytes, current_gpu(), PLAIN);
}

/* As the driver's: a pointer of 32 bits is written. Who wanted cuMemAlloc_v2 has the upper half of whatever was there. */
CUresult CUDAAPI cuMemAlloc(CUdeviceptr_v1 *address, unsigned int bytes)
{
    CUdeviceptr whole = 0;
    log_call("cuMemAlloc");
    CUresult result = allocate(&whole, bytes, current_gpu(), PLAIN);
    if (result == CUDA_SUCCESS)
        *address = (CUdeviceptr_v1)whole;
    return result;
}

/* Of a later CUDA, with other parameters: what cuda_version 14000 knows under the name cuMemAlloc. */
CUresult CUDAAPI cuMemAlloc_v3(size_t bytes, CUdeviceptr *address, void *options);
CUresult CUDAAPI cuMemAlloc_v3(size_t bytes, CUdeviceptr *address, void *options)
{
    log_call("cuMemAlloc_v3");
    (void)options;
    return allocate(address, bytes, current_gpu(), PLAIN);
}

CUresult CUDAAPI cuMemFree_v2(CUdeviceptr address)
{
    log_call("cuMemFree_v2");
    UNLESS_UNSAFE;
    return free_allocation(address);
}

/* It has but the lower half of an address. */
CUresult CUDAAPI cuMemFree(CUdeviceptr_v1 lower)
{
    CUdeviceptr address = 0;
    log_call("cuMemFree");
    pthread_mutex_lock(&memory.guard);
    for (size_t i = 0; i < memory.count; i++)
        address = (CUdeviceptr_v1)memory.all[i].address == lower ? memory.all[i].address : address;
    pthread_mutex_unlock(&memory.guard);
    return lower && !address ? CUDA_ERROR_INVALID_VALUE : free_allocation(address);
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags)
{
    log_call("cuMemAllocManaged");
    (void)flags;
    return allocate(address, bytes, current_gpu(), MANAGED);
}

CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    log_call("cuMemAllocPitch_v2");
    (void)element;
    *pitch = (width + 511) & ~(size_t)511;
    return allocate(address, *pitch * height, current_gpu(), PLAIN);
}

CUresult CUDAAPI cuMemAllocPitch(CUdeviceptr_v1 *address, unsigned int *pitch, unsigned int width, unsigned int height,
                                 unsigned int element)
{
    CUdeviceptr whole_address = 0;
    size_t whole_pitch = 0;
    log_call("cuMemAllocPitch");
    CUresult result = cuMemAllocPitch_v2(&whole_address, &whole_pitch, width, height, element);
    *pitch = (unsigned)whole_pitch;
    return *address = (CUdeviceptr_v1)whole_address, result;
}

CUresult CUDAAPI cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    log_call("cuMemGetInfo_v2");
    uint64_t used, all;
    if (current_gpu() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    memory_of_caller(minors[current_gpu()], &all, &used);
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
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = (CUcontext)(uintptr_t)found.in; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = found.device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = found.address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = found.bytes; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)value = found.kind == MANAGED; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)value = (CUmemoryPool)found.of; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **values, CUdeviceptr address)
{
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = cuPointerGetAttribute(values[i], attributes[i], address);
    return result;
}

/* Of the host, which is not counted. */
CUresult CUDAAPI cuMemHostAlloc(void **memory_of_host, size_t bytes, unsigned int flags)
{
    (void)flags;
    return (*memory_of_host = malloc(bytes)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult CUDAAPI cuMemAllocHost_v2(void **memory_of_host, size_t bytes) { return cuMemHostAlloc(memory_of_host, bytes, 0); }
CUresult CUDAAPI cuMemFreeHost(void *memory_of_host) { return free(memory_of_host), CUDA_SUCCESS; }

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
    CUdevice device; /* whose memory an allocation takes; -1: the host's */
} graph_node;
typedef struct graph {
    unsigned count;
    int is_known, is_mapped;
    uint64_t done_at;
    struct graph *next;
    graph_node nodes[MAX_NODES];
} graph;
static graph *mapped_graphs; /* and those that were: under memory.guard, as what is reserved for them */
static uint64_t graphs_reserved[MAX_GPUS];

/* Pools: each GPU has one of its own; a program makes others. */
static pool own_pools[MAX_GPUS], *made_pools;
static pool *chosen_pools[MAX_GPUS]; /* by cuDeviceSetMemPool */

static void forget_pools(void)
{
    memset(own_pools, 0, sizeof own_pools);
    memset(chosen_pools, 0, sizeof chosen_pools);
    made_pools = NULL;
}

/* Behind a wait for the GPU. */
static CUresult trim_pools_of(CUdevice device)
{
    pthread_mutex_lock(&memory.guard);
    if (device >= 0)
        trim(&own_pools[device], own_pools[device].threshold);
    for (pool *one = made_pools; one; one = one->next)
        if (one->device == device) {
            one->waiting = 0;
            trim(one, one->threshold);
        }
    pthread_mutex_unlock(&memory.guard);
    return CUDA_SUCCESS;
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
    fresh->is_anywhere = properties->location.type == CU_MEM_LOCATION_TYPE_NONE;
    if (!is_gpu(fresh->device))
        return free(fresh), CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&memory.guard);
    fresh->next = made_pools;
    made_pools = fresh;
    pthread_mutex_unlock(&memory.guard);
    return *made = (CUmemoryPool)fresh, CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool of)
{
    log_call("cuMemPoolDestroy");
    if ((pool *)of >= own_pools && (pool *)of < own_pools + MAX_GPUS)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&memory.guard);
    trim((pool *)of, 0);
    ((pool *)of)->is_destroyed = 1; /* what still lies in it is freed with its last address; so the pool stays */
    for (unsigned i = 0; i < MAX_GPUS; i++)
        if (chosen_pools[i] == (pool *)of)
            chosen_pools[i] = NULL;
    pthread_mutex_unlock(&memory.guard);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool of, size_t least)
{
    log_call("cuMemPoolTrimTo");
    UNLESS_UNSAFE;
    pthread_mutex_lock(&memory.guard);
    trim((pool *)of, least);
    pthread_mutex_unlock(&memory.guard);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool of, CUmemPool_attribute attribute, void *value)
{
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        ((pool *)of)->threshold = *(cuuint64_t *)value;
    if (attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
        ((pool *)of)->is_ordered = !*(int *)value; /* all frees and allocations are taken to be of different streams */
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

/* While a stream is captured it becomes a node of the graph, as its free does. */
static CUresult capture_memory(CUdeviceptr *address, size_t bytes, const pool *from)
{
    CUgraphNode unwanted;
    CUDA_MEM_ALLOC_NODE_PARAMS parameters = {.poolProps.location = from->at, .bytesize = bytes};
    CUresult result = cuGraphAddMemAllocNode(&unwanted, (CUgraph)captured, NULL, 0, &parameters);
    return *address = parameters.dptr, result;
}

/* Another process's, which has a GiB. */
CUresult CUDAAPI cuMemPoolImportFromShareableHandle(CUmemoryPool *made, void *shared, CUmemAllocationHandleType type,
                                                    unsigned long long flags)
{
    (void)shared, (void)type, (void)flags;
    pool *fresh = calloc(1, sizeof *fresh);
    *fresh = (pool){.at.type = CU_MEM_LOCATION_TYPE_DEVICE, .reserved = 1u << 30, .used = 1u << 30, .is_imported = 1};
    return *made = (CUmemoryPool)fresh, CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool from, CUstream stream)
{
    log_call("cuMemAllocFromPoolAsync");
    if (((pool *)from)->is_imported)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_captured(stream))
        return capture_memory(address, bytes, (pool *)from);
    if (((pool *)from)->is_anywhere && !((pool *)from)->reserved)
        ((pool *)from)->device = gpu_of_stream(stream);
    return allocate_from(address, bytes, ((pool *)from)->device, OF_POOL, (pool *)from);
}
PER_THREAD(cuMemAllocFromPoolAsync);

/* From the pool that is current to the stream's GPU, whichever context is (cuda.h). */
CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    CUmemoryPool from = NULL;
    log_call("cuMemAllocAsync");
    if (gpu_of_stream(stream) < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    cuDeviceGetMemPool(&from, gpu_of_stream(stream));
    return cuMemAllocFromPoolAsync(address, bytes, from, stream);
}
PER_THREAD(cuMemAllocAsync);

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    CUgraphNode unwanted;
    log_call("cuMemFreeAsync");
    return is_captured(stream) ? cuGraphAddMemFreeNode(&unwanted, (CUgraph)captured, NULL, 0, address) : free_allocation(address);
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
    if (bytes % ALIGNMENT)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(handle, bytes, device < 0 ? 0 : device, device < 0 ? OF_HOST : OF_HANDLE);
}

static CUresult unbind(CUdeviceptr object, CUdevice device, uint64_t offset);
CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
    log_call("cuMemRelease");
    allocation of;
    CUresult result = handle >= FOREIGN_ADDRESS ? CUDA_SUCCESS : change_references(handle, -1);
    if (!find_allocation(handle, &of))
        unbind(handle, -1, 0);
    return result;
}

/* Memory stays while it is mapped, though its handle is released. */
CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    log_call("cuMemMap");
    (void)offset, (void)flags;
    CUresult result = handle >= FOREIGN_ADDRESS ? CUDA_SUCCESS : change_references(handle, 1);
    pthread_mutex_lock(&memory.guard);
    memory.mapped = realloc(memory.mapped, (memory.mappings + 1) * sizeof(mapping));
    memory.mapped[memory.mappings++] = (mapping){address, handle, bytes};
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

/* What is bound to an object of several GPUs stays, as what is mapped, until it is unbound or the object ends. */
#define ENDPOINT(id) (1ull << 63 | (id))
static struct { CUdeviceptr object, handle; CUdevice device; uint64_t offset; } bound[256];

static CUresult bind(CUdeviceptr object, uint64_t offset, CUmemGenericAllocationHandle handle)
{
    allocation of;
    unsigned place = 0;
    while (place < 255 && bound[place].object)
        place++;
    if (!find_allocation(handle, &of) || change_references(of.address, 1) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE;
    bound[place] = (__typeof__(bound[0])){object, of.address, of.device, offset};
    return CUDA_SUCCESS;
}

static CUresult unbind(CUdeviceptr object, CUdevice device, uint64_t offset)
{
    for (unsigned i = 0; i < 256; i++)
        if (bound[i].object == object && (device < 0 || (bound[i].device == device && bound[i].offset == offset))) {
            bound[i].object = 0;
            change_references(bound[i].handle, -1);
        }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMulticastCreate(CUmemGenericAllocationHandle *object, const CUmulticastObjectProp *properties)
{
    (void)properties;
    return allocate(object, ALIGNMENT, 0, OF_HOST);
}
CUresult CUDAAPI cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle memory_bound,
                                    size_t from, size_t size, unsigned long long flags)
{
    (void)from, (void)size, (void)flags;
    return bind(object, offset, memory_bound);
}
CUresult CUDAAPI cuMulticastBindMem_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t offset,
                                       CUmemGenericAllocationHandle memory_bound, size_t from, size_t size, unsigned long long flags)
{
    (void)device, (void)from, (void)size, (void)flags;
    return bind(object, offset, memory_bound);
}
CUresult CUDAAPI cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t size,
                                     unsigned long long flags)
{
    (void)size, (void)flags;
    return bind(object, offset, address);
}
CUresult CUDAAPI cuMulticastBindAddr_v2(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, CUdeviceptr address,
                                        size_t size, unsigned long long flags)
{
    (void)device, (void)size, (void)flags;
    return bind(object, offset, address);
}
CUresult CUDAAPI cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t size)
{
    (void)size;
    return unbind(object, device, offset);
}
CUresult CUDAAPI cuLogicalEndpointBindMem(CUlogicalEndpointId id, CUdevice device, cuuint64_t offset,
                                          CUmemGenericAllocationHandle memory_bound, cuuint64_t from, cuuint64_t size,
                                          unsigned long long flags)
{
    (void)device, (void)from, (void)size, (void)flags;
    return bind(ENDPOINT(id), offset, memory_bound);
}
CUresult CUDAAPI cuLogicalEndpointBindAddr(CUlogicalEndpointId id, CUdevice device, cuuint64_t offset, void *address, cuuint64_t size,
                                           unsigned long long flags)
{
    (void)device, (void)size, (void)flags;
    return bind(ENDPOINT(id), offset, (uintptr_t)address);
}
CUresult CUDAAPI cuLogicalEndpointUnbind(CUlogicalEndpointId id, CUdevice device, cuuint64_t offset, cuuint64_t size)
{
    (void)size;
    return unbind(ENDPOINT(id), device, offset);
}
CUresult CUDAAPI cuLogicalEndpointDestroy(CUlogicalEndpointId id) { return unbind(ENDPOINT(id), -1, 0); }

/* Between processes: an export has a number in place of a file's descriptor. What is opened is not this process's, until its owner
   has ended. */
static CUdeviceptr exported[MAX_EXPORTED]; /* by this process */

CUresult CUDAAPI cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                              unsigned long long flags)
{
    allocation found;
    (void)type, (void)flags;
    if (!find_allocation(handle, &found))
        return CUDA_ERROR_INVALID_VALUE;
    int id = *(int *)shared = export_memory(minors[found.device], found.bytes);
    if (id >= 0)
        exported[id] = found.address;
    return id < 0 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared, CUmemAllocationHandleType type)
{
    log_call("cuMemImportFromShareableHandle");
    (void)type;
    int id = (int)(intptr_t)shared, is_own = id >= 0 && id < MAX_EXPORTED && exported[id];
    if (is_own && change_references(*handle = exported[id], 1) == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    (void)import_memory(id);
    return *handle = FOREIGN_ADDRESS, CUDA_SUCCESS; /* another process's */
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
    *address = next_address(bytes);
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

/* A sparse one has memory of handles alone, which is mapped to its tiles. */
static CUresult make_array(void **array, size_t bytes, unsigned flags)
{
    CUdeviceptr address = 0;
    CUresult result = allocate(&address, bytes, current_gpu(), flags & CUDA_ARRAY3D_SPARSE ? OF_HOST : PLAIN);
    *array = (void *)(uintptr_t)address;
    return result;
}

CUresult CUDAAPI cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *of)
{
    log_call("cuArrayCreate_v2");
    return make_array((void **)array, bytes_of_array(of->Width, of->Height, 1, of->Format, of->NumChannels), 0);
}

CUresult CUDAAPI cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *of)
{
    log_call("cuArrayCreate");
    return make_array((void **)array, bytes_of_array(of->Width, of->Height, 1, of->Format, of->NumChannels), 0);
}

CUresult CUDAAPI cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *of)
{
    log_call("cuArray3DCreate");
    return make_array((void **)array, bytes_of_array(of->Width, of->Height, of->Depth, of->Format, of->NumChannels), of->Flags);
}

CUresult CUDAAPI cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *of)
{
    log_call("cuArray3DCreate_v2");
    return make_array((void **)array, bytes_of_array(of->Width, of->Height, of->Depth, of->Format, of->NumChannels), of->Flags);
}

CUresult CUDAAPI cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned int levels)
{
    size_t bytes = 0;
    log_call("cuMipmappedArrayCreate");
    for (unsigned level = 0; level < (levels ? levels : 1); level++)
        bytes += bytes_of_array(of->Width >> level, of->Height >> level, of->Depth >> level, of->Format, of->NumChannels);
    return make_array((void **)array, bytes, of->Flags);
}

CUresult CUDAAPI cuArrayDestroy(CUarray array)
{
    log_call("cuArrayDestroy");
    unbind((uintptr_t)array, -1, 0);
    return free_allocation((uintptr_t)array);
}
CUresult CUDAAPI cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    log_call("cuMipmappedArrayDestroy");
    return free_allocation((uintptr_t)array);
}

CUresult CUDAAPI cuMemMapArrayAsync(CUarrayMapInfo *tiles, unsigned int count, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    (void)stream;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
        CUdeviceptr array = (uintptr_t)tiles[i].resource.array;
        uint64_t at = tiles[i].subresource.sparseLevel.offsetX;
        for (CUdevice device = 0; is_gpu(device); device++)
            unbind(array, device, at);
        if (tiles[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            result = bind(array, at, tiles[i].memHandle.memHandle);
    }
    return result;
}
PER_THREAD(cuMemMapArrayAsync);

/* --- modules and launches: a launch returns at once, until the GPU has QUEUE_NS of work before it. No kernel is compiled: one named
   `spin` computes for its first parameter, nanoseconds in 64 bits; `timed` waits until so long after its begin, with slice_us;
   the others as the settings say --- */

static char a_module, a_function, a_spin, a_timed;

/* Its code and its variables are memory of the GPU, until it is unloaded. */
CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image)
{
    log_call("cuModuleLoadData");
    (void)image;
    CUdeviceptr address = (uintptr_t)&a_module;
    if (current_gpu() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = config()->module ? allocate(&address, config()->module, current_gpu(), PLAIN) : CUDA_SUCCESS;
    return *module = (CUmodule)(uintptr_t)address, result;
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}
CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *image) { return cuModuleLoadData(module, image); }

CUresult CUDAAPI cuModuleUnload(CUmodule module)
{
    log_call("cuModuleUnload");
    return module == (CUmodule)&a_module ? CUDA_SUCCESS : free_allocation((uintptr_t)module);
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    (void)module;
    char *found = strcmp(name, "spin") == 0 ? &a_spin : strcmp(name, "timed") == 0 ? &a_timed : &a_function;
    return *function = (CUfunction)found, CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    (void)function;
    *value = attribute == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES ? 0 : 1;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) { return *mode = CU_MODULE_LAZY_LOADING, CUDA_SUCCESS; }

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

static int takes_turns(CUdevice device) { return config()->slice_ns && device >= 0; }

static CUresult run(uint64_t duration_ns, unsigned width, int is_timed, CUstream stream)
{
    CUdevice device = gpu_of_stream(stream);
    if (device < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (is_implied(stream))
        return spoil_capture(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (takes_turns(device))
        return push_kernel(minors[device], lane_of(stream), duration_ns, width, is_timed), CUDA_SUCCESS;
    uint64_t done_at = run_on_gpu(minors[device], duration_ns);
    busy_until[device] = done_at;
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
    if (is_captured(stream))
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

CUresult CUDAAPI cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *all, unsigned int count, unsigned int flags)
{
    CUresult result = CUDA_SUCCESS;
    log_call("cuLaunchCooperativeKernelMultiDevice");
    (void)flags;
    for (const CUDA_LAUNCH_PARAMS *one = all; one < all + count && result == CUDA_SUCCESS; one++)
        result = run_kernel(one->function, one->gridDimX, one->gridDimY, one->gridDimZ,
                            one->blockDimX * one->blockDimY * one->blockDimZ, one->hStream, one->kernelParams);
    return result;
}

/* Of CUDA 3. */
CUresult CUDAAPI cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
    log_call("cuLaunchGridAsync");
    return run_kernel(function, (unsigned)width, (unsigned)height, 1, 1, stream, NULL);
}
CUresult CUDAAPI cuLaunchGrid(CUfunction function, int width, int height) { return cuLaunchGridAsync(function, width, height, NULL); }
CUresult CUDAAPI cuLaunch(CUfunction function) { return cuLaunchGrid(function, 1, 1); }

/* What pools keep above their thresholds goes back with the wait. */
static CUresult wait_for(CUdevice device, int lane)
{
    if (device < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    UNLESS_UNSAFE;
    if (takes_turns(device))
        wait_for_lane(minors[device], lane);
    else
        sleep_until(busy_until[device]);
    return trim_pools_of(device);
}

CUresult CUDAAPI cuCtxSynchronize(void) { return wait_for(current_gpu(), ALL_LANES); }

/* Of CUDA 13: what is asked for as of that version. A program that takes it for the older one gives it no context. */
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext of) { return wait_for(gpu_of(or_current(of)), ALL_LANES); }

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) { return wait_for(gpu_of_stream(stream), (int)lane_of(stream)); }
PER_THREAD(cuStreamSynchronize);

/* Who uses an event whose context has ended, or a parent's in a child of fork, may get anything from NVIDIA's driver. */
static gpu_event *live(CUevent event)
{
    gpu_event *of = (gpu_event *)event;
    if (of->in && ((const context *)of->in)->generation != of->generation) {
        fprintf(stderr, "[driver] an event of a context that has ended\n");
        abort();
    }
    return of;
}

/* An event: the time at which what was given to the GPU before it will be done. */
CUresult CUDAAPI cuEventCreate(CUevent *event, unsigned int flags)
{
    log_call("cuEventCreate");
    UNLESS_UNSAFE;
    (void)flags;
    if (current_gpu() < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    gpu_event *made = calloc(1, sizeof *made);
    *made = (gpu_event){.in = current_context(), .generation = current_context()->generation};
    return *event = (CUevent)made, CUDA_SUCCESS;
}
CUresult CUDAAPI cuEventDestroy_v2(CUevent event) { log_call("cuEventDestroy_v2"); return free(live(event)), CUDA_SUCCESS; }
CUresult CUDAAPI cuEventDestroy(CUevent event) { return cuEventDestroy_v2(event); }

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream)
{
    log_call("cuEventRecord");
    CUgraphNode unwanted;
    gpu_event *recorded = live(event);
    CUdevice device = gpu_of_stream(stream);
    if (device < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (recorded->in != context_of(stream))
        return CUDA_ERROR_INVALID_HANDLE;
    if (is_captured(stream))
        return add_node(&unwanted, captured, (graph_node){.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD});
    recorded->ordinal = device;
    if (takes_turns(device))
        push_event(minors[device], lane_of(stream), recorded);
    else
        recorded->done_at = higher(busy_until[device], now_ns());
    return CUDA_SUCCESS;
}
PER_THREAD(cuEventRecord);

CUresult CUDAAPI cuEventQuery(CUevent event)
{
    log_call("cuEventQuery");
    UNLESS_UNSAFE;
    gpu_event *of = live(event);
    return (takes_turns(of->ordinal) ? is_event_done(minors[of->ordinal], of) : of->done_at <= now_ns()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult CUDAAPI cuEventSynchronize(CUevent event)
{
    gpu_event *of = live(event);
    while (takes_turns(of->ordinal) && !is_event_done(minors[of->ordinal], of))
        sleep_until(now_ns() + 2000);
    sleep_until(of->done_at);
    return trim_pools_of(of->ordinal);
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
    *status = !is_captured(stream) ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture.is_spoilt  ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                   : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return is_implied(stream) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
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
    if (captured || !stream || stream == CU_STREAM_LEGACY)
        return captured ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    capture = (__typeof__(capture)){.in = stream, .mode = mode, .by = pthread_self()};
    return cuGraphCreate((CUgraph *)&captured, 0);
}

CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *made)
{
    if (!is_captured(stream))
        return CUDA_ERROR_ILLEGAL_STATE;
    *made = capture.is_spoilt ? NULL : (CUgraph)captured;
    captured = NULL;
    return *made ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
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
    graph_node made = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .asked = parameters->bytesize, .bytes = parameters->bytesize,
                       .device = device_at(&parameters->poolProps.location)};
    graph *in = (graph *)to;
    for (graph_node *one = in->nodes; one < in->nodes + in->count && !made.address; one++)
        if (one->is_freed == 1 && one->device == made.device && one->asked >= made.asked) {
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
    CUdevice device = ((graph_node *)node)->device;
    parameters->poolProps.location.type = device < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
    parameters->poolProps.location.id = device < 0 ? 0 : device;
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

static uint64_t bytes_of_graph(const graph *of, CUdevice device)
{
    uint64_t bytes = 0;
    for (const graph_node *node = of->nodes; node < of->nodes + of->count; node++)
        bytes += node->child ? bytes_of_graph(node->child, device) : node->device == device ? node->bytes : 0;
    return bytes;
}

static uint64_t bytes_left_by(const graph *of, CUdevice device)
{
    uint64_t bytes = 0;
    for (const graph_node *node = of->nodes; node < of->nodes + of->count; node++)
        bytes += node->is_left && node->device == device ? node->asked : 0;
    return bytes;
}

static int leaves_memory(const graph *of)
{
    int is_left = 0;
    for (const graph_node *node = of->nodes; node < of->nodes + of->count; node++)
        is_left |= node->is_left;
    return is_left;
}

static uint64_t used_by_graphs(CUdevice device)
{
    uint64_t left = 0, shared = 0;
    for (const graph *one = mapped_graphs; one; one = one->next) {
        left += bytes_left_by(one, device);
        shared = one->is_mapped ? higher(shared, bytes_of_graph(one, device) - bytes_left_by(one, device)) : shared;
    }
    return left + shared;
}

static void forget_graphs(void)
{
    captured = NULL;
    mapped_graphs = NULL;
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
    UNLESS_UNSAFE;
    if (!is_gpu(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&memory.guard);
    for (graph *one = mapped_graphs; one; one = one->next)
        if (one->done_at <= now_ns() && bytes_of_graph(one, device))
            one->is_mapped = 0;
    uint64_t used = used_by_graphs(device);
    give_memory(minors[device], graphs_reserved[device] - used, 0);
    graphs_reserved[device] = used;
    pthread_mutex_unlock(&memory.guard);
    return CUDA_SUCCESS;
}

/* Each allocation is of the GPU that its node names, wherever the graph is launched. */
static CUresult map_graph(graph *of, int runs, CUstream stream)
{
    uint64_t lacking[MAX_GPUS] = {0};
    CUdevice device = 0;
    if (gpu_of_stream(stream) < 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&memory.guard);
    if (leaves_memory(of)) { /* of the launch before */
        pthread_mutex_unlock(&memory.guard);
        return CUDA_ERROR_INVALID_VALUE;
    }
    graph before = *of;
    if (!of->is_known) {
        of->next = mapped_graphs;
        mapped_graphs = of;
    }
    of->is_known = of->is_mapped = 1;
    of->done_at = runs ? UINT64_MAX : of->done_at;
    for (graph_node *node = of->nodes; node < of->nodes + of->count; node++)
        node->is_left = runs && node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && !node->is_freed;
    for (; is_gpu(device); device++) {
        uint64_t used = used_by_graphs(device);
        lacking[device] = used > graphs_reserved[device] ? used - graphs_reserved[device] : 0;
        if (lacking[device] && !take_memory(minors[device], lacking[device], 0))
            break;
        graphs_reserved[device] += lacking[device];
    }
    CUresult result = is_gpu(device) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    while (result != CUDA_SUCCESS && device-- > 0) {
        give_memory(minors[device], lacking[device], 0);
        graphs_reserved[device] -= lacking[device];
    }
    if (result != CUDA_SUCCESS) {
        if (!before.is_known)
            mapped_graphs = of->next;
        *of = before;
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

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *made, CUgraph from, CUgraphNode *failed, char *text, size_t size)
{
    (void)failed, (void)text, (void)size;
    return cuGraphInstantiateWithFlags(made, from, 0);
}
CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *made, CUgraph from, CUgraphNode *failed, char *text, size_t size)
{
    return cuGraphInstantiate(made, from, failed, text, size);
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

CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec of, CUgraph from, CUgraphNode *failed, CUgraphExecUpdateResult *why)
{
    CUgraphExecUpdateResultInfo found = {0};
    CUresult result = cuGraphExecUpdate_v2(of, from, &found);
    return (void)failed, *why = found.result, result;
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec of, CUstream stream)
{
    log_call("cuGraphUpload");
    return map_graph((graph *)of, 0, stream);
}
PER_THREAD(cuGraphUpload);

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *made, CUgraph from, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
    log_call("cuGraphInstantiateWithParams");
    CUresult result = cuGraphInstantiateWithFlags(made, from, parameters->flags);
    parameters->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result == CUDA_SUCCESS && parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD ? map_graph((graph *)*made, 0, parameters->hUploadStream) : result;
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
    CUresult result = map_graph(of, 1, stream);
    if (result != CUDA_SUCCESS)
        return result;
    result = run(duration_of_graph(of), 1000, 0, stream);
    of->done_at = busy_until[gpu_of_stream(stream)];
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
    int is_left = leaves_memory(ended);
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

extern __typeof__(cuGetProcAddress_v2) cuGetProcAddress_v2_ptsz;
CUresult CUDAAPI cuGetProcAddress_v2_ptsz(const char *name, void **function, int version, cuuint64_t flags,
                                          CUdriverProcAddressQueryResult *status)
{
    return cuGetProcAddress_v2(name, function, version, flags | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, status);
}

/* NVIDIA's own libraries ask for tables that are not documented. */
CUresult CUDAAPI cuGetExportTable(const void **table, const CUuuid *id)
{
    (void)id;
    return *table = NULL, CUDA_ERROR_NOT_FOUND;
}
