/* A library with a dlopen of its own, as a sanitizer has: it says what is opened. FROM: where it finds the next one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
void *dlopen(const char *file, int flags)
{
    void *(*next)(const char *, int) = (void *(*)(const char *, int))dlvsym(FROM, "dlopen", "GLIBC_2.2.5");
    next = next ? next : (void *(*)(const char *, int))dlvsym(FROM, "dlopen", "GLIBC_2.17");
    fprintf(stderr, "%s\n", file);
    return next(file, flags);
}
