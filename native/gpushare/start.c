/* The beginning of a process: which GPUs it sees, and what a child of fork must forget. */
#define _GNU_SOURCE
#include "library.h"
#include "region.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MOST_DEVICES = 64 };

/* To standard error, where a person reads it, and once in a process: a loop that is refused must not fill the log. */
void say_once(int *said, const char *format, ...)
{
    char text[512];
    va_list values;
    if (atomic_exchange((_Atomic int *)said, 1))
        return;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    dprintf(STDERR_FILENO, "gpushare: %s\n", text);
}

/* ---- GPUs ---- */

static _Atomic int gpus[MOST_DEVICES]; /* index + 1 of each of CUDA's ordinals; 0: not asked yet; -1: unknown */

static int find_gpu(CUdevice device)
{
    CUuuid id;
    char text[37] = "";
    bool is_new = has_real(SLOT_cuDeviceGetUuid_v2); /* only that one knows instances of MIG */
    CUresult result = is_new ? REAL(cuDeviceGetUuid_v2)(&id, device) : REAL(cuDeviceGetUuid)(&id, device);
    if (result != CUDA_SUCCESS)
        return -1;
    for (unsigned i = 0, at = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            text[at++] = '-';
        text[at++] = "0123456789abcdef"[(unsigned char)id.bytes[i] >> 4];
        text[at++] = "0123456789abcdef"[id.bytes[i] & 15];
    }
    return gpu_named(text);
}

int gpu_of_device(CUdevice device)
{
    if (device < 0 || device >= MOST_DEVICES)
        return -1;
    int known = atomic_load_explicit(&gpus[device], memory_order_relaxed);
    if (known == 0) {
        int found = find_gpu(device);
        known = found < 0 ? -1 : found + 1;
        atomic_store_explicit(&gpus[device], known, memory_order_relaxed);
    }
    return known < 0 ? -1 : known - 1;
}

CUdevice current_device(void)
{
    CUdevice device = -1;
    return REAL(cuCtxGetDevice)(&device) == CUDA_SUCCESS ? device : -1;
}

HOOK(cuInit, (unsigned int flags), (flags))
{
    CUresult result = real(flags);
    if (result == CUDA_SUCCESS)
        (void)own_slot(); /* so the agent sees the process, and what is wrong with the files is said before memory is refused */
    return result;
}

/* ---- fork ---- */

/* The driver's state does not survive fork, and a child may call cuInit and use GPUs of its own. It has the parent's memory with all
   tables, and maybe a lock that another thread held. Its slot is the parent's: it takes another one when it first needs one. */
static void forget_parent(void)
{
    leave_hook();
    forget_region();
    forget_memory();
    forget_graphs();
    forget_launches();
}

void watch_forks(void) { pthread_atfork(NULL, NULL, forget_parent); }
