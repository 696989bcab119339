/* A library with a dlsym of its own, which finds what it calls libc's by the version. */
#define _GNU_SOURCE
#include <dlfcn.h>
void *dlsym(void *handle, const char *name)
{
    static void *(*real)(void *, const char *);
    if (!real && !(real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5")))
        real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
    return real(handle, name);
}
