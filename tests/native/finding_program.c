/* How a program may come by functions of the driver, one CASE each; it is not linked to the driver. Prints one line for each answer.
 *
 *   finding_program CASE [LIBRARY]
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cudaTypedefs.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCK = 256 << 20 };
#pragma weak cuInit
#pragma weak cuMemAlloc_v2

/* The name of the file where it lies, and its own. */
static void say_where(const char *what, const void *function)
{
    Dl_info info = {0};
    const char *file = function && dladdr(function, &info) ? strrchr(info.dli_fname, '/') : NULL;
    const char *name = info.dli_sname ? info.dli_sname : "?";
    printf("%s: %s in %s\n", what, function ? name : "NULL", function && file ? file + 1 : "nothing");
}

static int has_error(const char *name)
{
    const char *text = dlerror();
    return text && strstr(text, name) != NULL;
}

static const char *error_or_none(void)
{
    const char *text = dlerror();
    return text ? text : "none";
}

static int take(CUresult (*alloc)(CUdeviceptr *, size_t))
{
    CUdeviceptr address;
    int taken = 0;
    while (taken < 20 && alloc && alloc(&address, BLOCK) == CUDA_SUCCESS)
        taken++;
    return taken;
}

#define GET(handle, name) ((__typeof__(name) *)dlsym(handle, #name))

static int begin(void *driver)
{
    CUcontext context;
    int version;
    if (GET(driver, cuDriverGetVersion)(&version) || GET(driver, cuInit)(0))
        return -1;
    return GET(driver, cuDevicePrimaryCtxRetain)(&context, 0) || GET(driver, cuCtxSetCurrent)(context);
}

static void *find_by_driver(void *driver, const char *name, int version)
{
    void *function = NULL;
    CUdriverProcAddressQueryResult status;
    PFN_cuGetProcAddress_v12000 ask = (PFN_cuGetProcAddress_v12000)dlsym(driver, "cuGetProcAddress_v2");
    cuuint64_t flags = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    /* As the runtime does, which asks for it by itself. */
    if (ask && ask("cuGetProcAddress", &function, 12080, flags, &status) == CUDA_SUCCESS && function)
        ask = (PFN_cuGetProcAddress_v12000)function;
    return ask && ask(name, &function, version, 0, &status) == CUDA_SUCCESS ? function : NULL;
}

/* By each of its ways a driver gives the same share. */
static int use(const char *path, int asks_driver)
{
    void *driver = dlopen(path, RTLD_NOW);
    if (!driver || begin(driver))
        return 3;
    printf("%d\n", take(asks_driver ? (PFN_cuMemAlloc_v3020)find_by_driver(driver, "cuMemAlloc", 12080) : GET(driver, cuMemAlloc_v2)));
    return 0;
}

static int use_own(const char *path)
{
    void *own = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!own)
        return 3;
    say_where("handle", dlsym(own, "cuInit"));
    say_where("version", dlvsym(own, "cuInit", "NONE"));
    say_where("without", dlsym(own, "cuMemFree_v2"));
    printf("%d ", has_error("cuMemFree_v2"));
    printf("%d\n", (int)GET(own, cuInit)(0));
    return 0;
}

/* The driver of the machine, and another one, as of a compatibility package. */
static int use_two(const char *path)
{
    void *first = dlopen("libcuda.so.1", RTLD_NOW);
    if (!first || begin(first))
        return 3;
    void *second = dlopen(path, RTLD_NOW);
    say_where("first", dlsym(first, "cuMemAlloc_v2"));
    say_where("second", second ? dlsym(second, "cuMemAlloc_v2") : NULL);
    printf("%d\n", take(GET(first, cuMemAlloc_v2)));
    return 0;
}

/* Before and after the program has opened the driver. */
static int look_everywhere(void)
{
    void *self = dlopen(NULL, RTLD_NOW);
    for (int i = 0; i < 2; i++) {
        say_where("default", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
        say_where("self", dlsym(self, "cuMemAlloc_v2"));
        say_where("next", dlsym(RTLD_NEXT, "cuMemAlloc_v2"));
        say_where("version", dlvsym(RTLD_DEFAULT, "cuMemAlloc_v2", "NONE"));
        void *loaded = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        printf("%s\n", loaded ? "loaded" : "not loaded");
        if (!dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL))
            return 3;
    }
    return 0;
}

/* A name that the driver lacks, and one that it has: the reason and none. */
static int read_errors(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *handles[] = {driver, RTLD_DEFAULT, RTLD_NEXT};
    for (int i = 0; i < 3; i++) {
        dlerror();
        void *absent = dlsym(handles[i], "cuMemPoolTrimTo");
        int is_said = has_error("cuMemPoolTrimTo");
        void *absent_too = dlvsym(handles[i], "cuMemPoolTrimTo", "NONE");
        is_said += has_error("cuMemPoolTrimTo");
        void *present = dlsym(handles[i], "cuMemAlloc_v2");
        printf("%d %d %s\n", is_said, !absent && !absent_too && present, error_or_none());
    }
    return 0;
}

static int load_plugin(const char *path)
{
    void *plugin = dlopen(path, RTLD_NOW);
    int (*ask)(void) = plugin ? (int (*)(void))dlsym(plugin, "ask_plugin") : NULL;
    printf("%d\n", ask ? ask() : -1);
    return 0;
}

/* Without a driver the hook is there all the same, and later the driver is. */
static int come_later(void)
{
    printf("%d\n", (int)cuInit(0));
    fflush(stdout);
    getchar();
    alarm(60);
    while (cuInit(0) != CUDA_SUCCESS)
        usleep(1000);
    puts("0");
    return 0;
}

/* Another thread is about to open the driver, and stays there until the child has come to its end. */
static pthread_barrier_t opens, is_over;
void forks_here(void);
void forks_here(void)
{
    pthread_barrier_wait(&opens);
    pthread_barrier_wait(&is_over);
}
static void *init(void *result)
{
    *(CUresult *)result = cuInit(0);
    return NULL;
}
static int fork_meanwhile(void)
{
    pthread_t thread;
    CUresult result = CUDA_ERROR_UNKNOWN;
    int status = -1;
    pthread_barrier_init(&opens, NULL, 2);
    pthread_barrier_init(&is_over, NULL, 2);
    pthread_create(&thread, NULL, init, &result);
    pthread_barrier_wait(&opens);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        _exit((int)cuInit(0));
    }
    waitpid(child, &status, 0);
    pthread_barrier_wait(&is_over);
    pthread_join(thread, NULL);
    printf("%d %d\n", status, (int)result);
    return 0;
}

static int ask_for_versions(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver || begin(driver))
        return 3;
    for (int version = 13000; version <= 14000; version += 1000)
        say_where("cuMemAlloc", find_by_driver(driver, "cuMemAlloc", version));
    say_where("cuMemFree", find_by_driver(driver, "cuMemFree", 14000));
    return 0;
}

int main(int count, char **words)
{
    const char *name = count > 1 ? words[1] : "", *path = count > 2 ? words[2] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
#define CASE(text, call)         \
    if (strcmp(name, text) == 0) \
        return call;
    CASE("use", use(path, 0))
    CASE("ask", use(path, 1))
    CASE("own", use_own(path))
    CASE("two", use_two(path))
    CASE("everywhere", look_everywhere())
    CASE("errors", read_errors())
    CASE("plugin", load_plugin(path))
    CASE("later", come_later())
    CASE("fork", fork_meanwhile())
    CASE("versions", ask_for_versions())
    if (strcmp(name, "wrapped") == 0) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *wrapper = dlopen(path, RTLD_NOW);
        if (!driver || !wrapper || begin(driver))
            return 3;
        CUdeviceptr address;
        printf("%d\n", (int)GET(wrapper, cuMemAlloc_v2)(&address, BLOCK));
        return 0;
    }
    fprintf(stderr, "usage: %s CASE [LIBRARY]\n", words[0]);
    return 2;
}
