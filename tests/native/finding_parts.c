/* Libraries around finding_program, one for each -D:
 *
 *   FORWARDS    a libcuda.so.1 that opens another one, $FORWARDS_TO, and calls that, as WSL2's does: at its first call, or with
 *               AT_START in its constructor; with OPENS it opens a library in each call, as a driver does in some; with NESTS one of
 *               its functions calls another one, which is by its name the library's
 *   OWN_NAMES   functions of the program's own under the driver's names, such as a recorder has
 *   WRAPS       such a function that calls the next one, and says that it was there
 *   CALLS, ARGUMENTS   a plugin that calls this function: its constructor calls the driver while another thread, which began to do so before, waits for the loader
 *   FORKS       a library that libcuda.so.1 needs, which stops the thread that opens it until the program has forked
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef FORWARDS
#define NAMES(F)                                                                                                                 \
    F(cuInit) F(cuDriverGetVersion) F(cuDeviceGetCount) F(cuDeviceGet) F(cuDeviceGetUuid_v2) F(cuDeviceTotalMem_v2)              \
    F(cuDeviceGetAttribute) F(cuDevicePrimaryCtxRetain) F(cuDevicePrimaryCtxGetState) F(cuCtxSetCurrent) F(cuCtxGetCurrent)      \
    F(cuCtxGetDevice) F(cuMemAlloc_v2) F(cuMemFree_v2) F(cuMemGetInfo_v2) F(cuGetProcAddress_v2) F(cuDeviceGetPCIBusId)          \
    F(cuGetProcAddress_v2_ptsz) F(cuCtxCreate_v2) F(cuMemPoolTrimTo) F(cuMemPoolGetAttribute) \
    F(cuDeviceGetGraphMemAttribute) F(cuThreadExchangeStreamCaptureMode)
#define POINTER(name) static int (*p_##name)(void *, void *, void *, void *, void *, void *);
NAMES(POINTER)

#ifdef AT_START
__attribute__((constructor))
#endif
static void find(void)
{
    static void *driver;
    if (driver)
        return;
    driver = dlopen(getenv("FORWARDS_TO"), RTLD_NOW | RTLD_LOCAL);
#define FIND(name) p_##name = (__typeof__(p_##name))dlsym(driver, #name);
    NAMES(FIND)
}

#ifdef OPENS
#define OPEN_ONE dlclose(dlopen("libdl.so.2", RTLD_NOW))
#else
#define OPEN_ONE (void)0
#endif
#define FORWARD(name)                                            \
    int name(void *a, void *b, void *c, void *d, void *e, void *f) \
    {                                                            \
        find();                                                  \
        OPEN_ONE;                                                \
        return p_##name ? p_##name(a, b, c, d, e, f) : 801;      \
    }
#ifdef NESTS
#define cuMemAlloc_v2 cuMemAllocManaged
#endif
NAMES(FORWARD)
#ifdef NESTS
#undef cuMemAlloc_v2
int cuMemAlloc_v2(void *a, void *b) { return cuMemAllocManaged(a, b, (void *)1, NULL, NULL, NULL); }
#endif
#endif

#ifdef OWN_NAMES
int cuInit(unsigned flags) { return (void)flags, 4242; }
int cuMemAlloc_v2(unsigned long long *address, size_t bytes) { return (void)address, (void)bytes, 4242; }
#endif

#ifdef WRAPS
int cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    int (*next)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    puts(WRAPS);
    return next ? next(address, bytes) : 4243;
}
#endif

#ifdef CALLS
extern int CALLS(), cuInit(unsigned);
static _Thread_local char room[2][256];
static int results[2];
static _Atomic pid_t other;

static void *call(void *unused)
{
    (void)unused;
    other = (pid_t)syscall(SYS_gettid);
    results[1] = CALLS(ARGUMENTS);
    return NULL;
}

/* The first word behind the name: S where it waits for something, here for the loader's lock. */
static char state_of(pid_t thread)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "re");
    if (!file)
        return '?';
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    const char *behind = strrchr(text, ')');
    return behind && behind[1] ? behind[2] : '?';
}

static pthread_t thread;
__attribute__((constructor)) static void begin(void)
{
    BEFORE;
    pthread_create(&thread, NULL, call, NULL);
    while (!other || state_of(other) != 'S')
        sched_yield();
    results[0] = CALLS(ARGUMENTS);
}

int ask_plugin(void)
{
    pthread_join(thread, NULL);
    return 1000 * results[0] + results[1];
}
#endif

#ifdef FORKS
extern void forks_here(void) __attribute__((weak)); /* of the program */
__attribute__((constructor)) static void begin(void)
{
    if (forks_here)
        forks_here();
}
#endif
