/* The beginning of a process: which GPUs it sees, and what a child of fork must forget. */
#define _GNU_SOURCE
#include "library.h"
#include "region.h"
#include "vdevice.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MOST_DEVICES = 64, LONGEST_WAIT_MS = 100 };

/* To standard error, where a person reads it, and once in a process: a loop that is refused must not fill the log. A program whose
   standard error nobody reads any more must not end by it (SIGPIPE), nor wait for ever. */
void say_once(int *said, const char *format, ...)
{
    char text[512];
    va_list values;
    sigset_t pipe_signal, before, pending;
    struct pollfd error = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (atomic_exchange((_Atomic int *)said, 1))
        return;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    forbid_cancel();
    pthread_sigmask(SIG_BLOCK, &pipe_signal, &before);
    sigpending(&pending);
    if (poll(&error, 1, LONGEST_WAIT_MS) == 1 && dprintf(STDERR_FILENO, "gpushare: %s\n", text) < 0 && errno == EPIPE &&
        !sigismember(&pending, SIGPIPE))
        sigtimedwait(&pipe_signal, NULL, &(struct timespec){0}); /* ours, taken away before the program could see it */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    allow_cancel();
}

/* ---- GPUs ---- */

static _Atomic int gpus[MOST_DEVICES]; /* index + 1 of each of CUDA's ordinals; 0: not known yet */

static int find_gpu(CUdevice device)
{
    CUuuid id;
    char text[37] = "";
    bool is_new = has_real(SLOT_cuDeviceGetUuid_v2); /* only that one knows instances of MIG: the other one names the GPU */
    CUresult result = is_new ? REAL(cuDeviceGetUuid_v2)(&id, device) : REAL(cuDeviceGetUuid)(&id, device);
    if (result != CUDA_SUCCESS)
        return -1; /* as before cuInit */
    for (unsigned i = 0, at = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            text[at++] = '-';
        text[at++] = "0123456789abcdef"[(unsigned char)id.bytes[i] >> 4];
        text[at++] = "0123456789abcdef"[id.bytes[i] & 15];
    }
    int named = gpu_named(text);
    return named < 0 && !is_new ? only_instance() : named; /* where there are instances, CUDA shows one of them and no GPU */
}

int gpu_of_device(CUdevice device)
{
    if (device < 0 || device >= MOST_DEVICES)
        return -1;
    int known = atomic_load_explicit(&gpus[device], memory_order_relaxed);
    if (known == 0) { /* what is not known now may be later: after cuInit, or when the files are there */
        known = find_gpu(device) + 1;
        atomic_store_explicit(&gpus[device], known, memory_order_relaxed);
    }
    return known - 1;
}

CUdevice current_device(void)
{
    CUdevice device = -1;
    return REAL(cuCtxGetDevice)(&device) == CUDA_SUCCESS ? device : -1;
}

static _Atomic int devices; /* that the process sees; 0: not known yet */

/* In most programs one: then no call of the driver is added to a launch. */
bool has_several_devices(void)
{
    int count = atomic_load_explicit(&devices, memory_order_relaxed);
    if (count == 0 && REAL(cuDeviceGetCount)(&count) == CUDA_SUCCESS)
        atomic_store_explicit(&devices, count, memory_order_relaxed);
    return count > 1;
}

CUdevice device_of_stream(CUstream stream)
{
    CUdevice device = current_device(), found;
    CUcontext context;
    if (is_of_context(stream) || (device >= 0 && !has_several_devices()))
        return device;
    if (REAL(cuStreamGetDevice)(stream, &found) == CUDA_SUCCESS) /* since CUDA 12.8 */
        return found;
    if (REAL(cuStreamGetCtx)(stream, &context) != CUDA_SUCCESS || REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return device;
    found = current_device();
    REAL(cuCtxPopCurrent_v2)(&context);
    return found;
}

HOOK(cuInit, (unsigned int flags), (flags))
{
    CUresult result = real(flags);
    if (result == CUDA_SUCCESS)
        (void)own_slot(); /* so the agent sees the process, and what is wrong with the files is said before memory is refused */
    return result;
}

/* ---- the agent ---- */

/* So it learns the process's PID on the host from the kernel, also where it cannot tell by cgroups whose a process is. Limits are in
   the files, and whatever it answers, or where it does not in time, the program goes on. */
void register_process(void)
{
    char pod_uid[sizeof((struct config *)0)->pod_uid], container[sizeof((struct config *)0)->container];
    int before = errno;
    container_names(pod_uid, container);
    struct vdevice_names names = {.addr = GPUSHARE_DIRECTORY "/vcuda.sock", .pod_uid = pod_uid, .name = container, .id = ""};
    forbid_cancel();
    (void)register_vdevice(&names, LONGEST_WAIT_MS);
    allow_cancel();
    errno = before;
}

/* ---- fork ---- */

/* The driver's state does not survive fork, and a child may call cuInit and use GPUs of its own. It has the parent's memory with all
   tables, and maybe locks that other threads held: at its first call all of that is made new. Most children only call exec, so not
   before. A child of clone or _Fork, which run no handlers, is known by the page that the kernel wipes. */
enum { IS_CHILD, IS_FORGETTING, IS_SETTLED };
static _Atomic(_Atomic uint32_t *) mark;

void notice_fork(void)
{
    uint32_t found = IS_CHILD;
    _Atomic uint32_t *own = atomic_load_explicit(&mark, memory_order_acquire);
    if (atomic_load_explicit(own, memory_order_acquire) == IS_SETTLED)
        return;
    if (atomic_compare_exchange_strong(own, &found, IS_FORGETTING)) {
        memset((void *)gpus, 0, sizeof gpus); /* CUDA_VISIBLE_DEVICES may be another one */
        atomic_store(&devices, 0);
        forget_region();
        forget_memory();
        forget_graphs();
        forget_launches();
        atomic_store_explicit(own, IS_SETTLED, memory_order_release);
    }
    while (atomic_load_explicit(own, memory_order_acquire) != IS_SETTLED) /* another thread of the child is at it */
        sched_yield();
}

static void mark_child(void)
{
    leave_hook();
    atomic_store(atomic_load(&mark), IS_CHILD);
}

void watch_forks(void)
{
    static _Atomic uint32_t without_page;
    _Atomic uint32_t *none = NULL;
    if (atomic_load_explicit(&mark, memory_order_acquire))
        return;
    void *page = mmap(NULL, sizeof *none, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    _Atomic uint32_t *own = page == MAP_FAILED ? &without_page : page;
    if (page != MAP_FAILED)
        (void)madvise(page, sizeof *own, MADV_WIPEONFORK); /* before Linux 4.14 there are the handlers alone */
    atomic_store(own, IS_SETTLED);
    if (atomic_compare_exchange_strong(&mark, &none, own)) {
        pthread_atfork(NULL, NULL, mark_child);
        watch_region();
    } else if (page != MAP_FAILED) {
        munmap(page, sizeof *own); /* another thread was first */
    }
}
