/* A plugin that takes memory of a GPU, and its host.
 *
 *   -DPLUGIN                      calls the driver's functions; linked to it
 *   -DPLUGIN -DPOINTERS           the same, by addresses in its data
 *   -DPLUGIN -DCONSTANTS          the same, by addresses in pages that are read-only but for the loader (text relocations)
 *   -DPLUGIN -DLACKS              calls one that nobody has in what is never called
 *   -DPLUGIN -DFINDS=FUNCTION     finds them by that dlsym; linked to nothing
 *   -DPLUGIN -DOPENS=FILE         opens another plugin, which takes it
 *   -DDRIVER                      a driver of the plugin's own, all of whose allocations fail
 *
 *   plugin_host STEP...
 *
 * deep:FILE and now:FILE open it with RTLD_DEEPBIND, base:FILE by dlmopen, plain:FILE without the flag; `close` closes it. `take` says how
 * many blocks of 256 MiB it gets, of whom its `whose` is, which the host has, too, and how much of its file is writable. threads:FILE,…
 * opens each file in two threads, all at once, and each takes four blocks.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef DRIVER

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    (void)address, (void)bytes;
    return CUDA_ERROR_UNKNOWN;
}

#elif defined PLUGIN

#ifdef OPENS
int take(int most)
{
    void *other = dlopen(OPENS, RTLD_LAZY | RTLD_DEEPBIND);
    return other ? ((int (*)(int))dlsym(other, "take"))(most) : -1;
}
#else
#if defined FINDS
typedef void *find_function(void *handle, const char *name);
static find_function *by_version(void *handle)
{
    void *found = dlvsym(handle, "dlsym", "GLIBC_2.2.5"); /* x86_64's first one */
    return (find_function *)(found ? found : dlvsym(handle, "dlsym", "GLIBC_2.17"));
}
static find_function *by_name(void *handle) { return (find_function *)dlsym(handle, "dlsym"); }
static void *find(const char *name)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *libc = dlopen("libdl.so.2", RTLD_NOW); /* or what it needs, since glibc 2.34 */
    (void)by_version, (void)by_name, (void)libc;
    return FINDS(driver, name);
}
#define CALL(name) ((__typeof__(name) *)find(#name))
#elif defined POINTERS
static __typeof__(cuInit) *at_cuInit = cuInit;
static __typeof__(cuDevicePrimaryCtxRetain) *at_cuDevicePrimaryCtxRetain = cuDevicePrimaryCtxRetain;
static __typeof__(cuCtxSetCurrent) *at_cuCtxSetCurrent = cuCtxSetCurrent;
static __typeof__(cuMemAlloc_v2) *at_cuMemAlloc_v2 = cuMemAlloc_v2;
#define CALL(name) at_##name
#elif defined CONSTANTS
enum { AT_cuInit, AT_cuDevicePrimaryCtxRetain, AT_cuCtxSetCurrent, AT_cuMemAlloc_v2 };
extern void *const constants[] __attribute__((visibility("hidden")));
__asm__(".section .rodata.constants,\"a\"\n.balign 8\n.globl constants\n.hidden constants\n"
        "constants: .quad cuInit, cuDevicePrimaryCtxRetain, cuCtxSetCurrent, cuMemAlloc_v2\n.previous");
#define CALL(name) ((__typeof__(name) *)constants[AT_##name])
#else
#define CALL(name) name
#endif
int take(int most)
{
    CUcontext context;
    CUdeviceptr address;
    int taken = 0;
    if (CALL(cuInit)(0) || CALL(cuDevicePrimaryCtxRetain)(&context, 0) || CALL(cuCtxSetCurrent)(context))
        return -1;
    while (taken < most && CALL(cuMemAlloc_v2)(&address, 256 << 20) == CUDA_SUCCESS)
        taken++;
    return taken;
}
#endif
#ifdef LACKS
int nobody_has_it(void);
int never_called(void) { return nobody_has_it(); }
#endif
const char *whose(void) { return "plugin"; }
const char *ask(void) { return whose(); }

#else

const char *whose(void) { return "host"; }

static void *open_plugin(const char *how)
{
    const char *file = strchr(how, ':') + 1;
    void *plugin = how[0] == 'd'   ? dlopen(file, RTLD_LAZY | RTLD_DEEPBIND)
                   : how[0] == 'n' ? dlopen(file, RTLD_NOW | RTLD_DEEPBIND)
                   : how[0] == 'b' ? dlmopen(LM_ID_BASE, file, RTLD_LAZY | RTLD_DEEPBIND)
                                   : dlopen(file, RTLD_LAZY);
    const char *error = dlerror();
    if (!plugin || error)
        fprintf(stderr, "%s\n", error);
    return plugin;
}

static long writable_kib(const char *file)
{
    char line[4096], access[8];
    unsigned long from, until, bytes = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        if (strstr(line, strrchr(file, '/') ? strrchr(file, '/') : file) && sscanf(line, "%lx-%lx %7s", &from, &until, access) == 3)
            bytes += access[1] == 'w' ? until - from : 0;
    fclose(maps);
    return (long)(bytes >> 10);
}

static pthread_barrier_t all_ready;
static void *open_and_take(void *file)
{
    char how[4096];
    snprintf(how, sizeof how, "deep:%s", (char *)file);
    pthread_barrier_wait(&all_ready);
    void *plugin = open_plugin(how);
    return plugin ? (void *)(long)((int (*)(int))dlsym(plugin, "take"))(4) : NULL;
}

static int open_in_threads(char *files)
{
    enum { MOST = 32 };
    pthread_t threads[MOST];
    char *names[MOST];
    int count = 0, sum = 0;
    for (char *file = strtok(files, ","); file && count < MOST; file = strtok(NULL, ","))
        names[count] = file, names[count + 1] = file, count += 2;
    pthread_barrier_init(&all_ready, NULL, (unsigned)count);
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, open_and_take, names[i]);
    for (int i = 0; i < count; i++) {
        void *taken;
        pthread_join(threads[i], &taken);
        sum += (int)(long)taken;
    }
    return sum;
}

int main(int count, char **words)
{
    void *plugin = NULL;
    const char *file = "";
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], "close") == 0)
            dlclose(plugin);
        else if (strncmp(words[i], "threads:", 8) == 0)
            printf("{\"action\": \"threads\", \"blocks\": %d}\n", open_in_threads(words[i] + 8));
        else if (strcmp(words[i], "take") != 0) {
            file = strchr(words[i], ':') + 1;
            if (!(plugin = open_plugin(words[i])))
                return 3;
        } else {
            int (*take)(int) = (int (*)(int))dlsym(plugin, "take");
            const char *(*ask)(void) = (const char *(*)(void))dlsym(plugin, "ask");
            printf("{\"action\": \"take\", \"blocks\": %d, \"whose\": \"%s\", \"writable_kib\": %ld}\n", take(20), ask(), writable_kib(file));
        }
    }
    return 0;
}

#endif
