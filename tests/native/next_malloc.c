/* A library that stands before another one's function and finds it by RTLD_NEXT, as profilers of malloc do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
__attribute__((constructor)) static void begin(void) { free(malloc(1)); }
static int depth;
void *malloc(size_t size)
{
    static void *(*next)(size_t);
    if (depth++ > 2)
        abort(); /* found itself */
    if (!next)
        next = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    depth = 0;
    return next(size);
}
